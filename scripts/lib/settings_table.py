"""The settings of the engine as the rows of the table in docs/quickstart.md."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import Field, fields, is_dataclass
from typing import Any, NamedTuple

from infinity_engine.config import EngineConfig


class Setting(NamedTuple):
    """One row of the table of settings."""

    name: str
    kind: str
    default: str
    meaning: str


def settings_table() -> list[Setting]:
    """Return one row for each setting, those of sections under their dotted names."""
    return list(_rows(fields(EngineConfig), EngineConfig().to_mapping(), ""))


def _rows(
    settings: tuple[Field[Any], ...], defaults: Mapping[str, Any], within: str
) -> Iterator[Setting]:
    for setting in settings:
        default = defaults[setting.name]
        # A section is not a row of its own: its settings are, under its name.
        if is_dataclass(setting.default) and isinstance(default, dict):
            yield from _rows(fields(setting.default), default, f"{within}{setting.name}.")
        else:
            about = setting.metadata
            yield Setting(
                f"{within}{setting.name}", about["kind"].words, str(default), about["meaning"]
            )
