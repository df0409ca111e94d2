"""The model of `infinity plan`: a preset, a config.json, or a Hugging Face id of the local cache;
with adapters or frozen parts.

Reads files of sizes, never weights, and never the network. Called by plan.py and compare.py.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import TYPE_CHECKING

from infinity_engine.errors import ConfigError

if TYPE_CHECKING:
    from infinity_engine.placement.models import ModelShape

__all__ = ["model_of"]

_PARTS_OF_ID = 2  # such as meta-llama/Llama-3.1-8B


def model_of(options: argparse.Namespace) -> ModelShape:
    """Return the model that is named, or described by a file, with what is frozen of it."""
    from infinity_engine.sim.adapters import freeze, with_lora

    model = _whole(options.model)
    if options.lora is not None:
        model = with_lora(model, options.lora)
    return model if options.freeze is None else freeze(model, options.freeze)


def _whole(given: str | None) -> ModelShape:
    from infinity_engine.sim.configs import read_config
    from infinity_engine.sim.presets import PRESETS, preset

    if given is None:
        expected = (
            f"a preset ({', '.join(PRESETS)}), a path to a config.json, or a Hugging Face id that "
            "is in the local cache"
        )
        raise ConfigError(field="--model", value=None, expected=expected)
    path = Path(given)
    if given.lower() in PRESETS:
        return preset(given)
    if path.exists() or path.suffix == ".json":
        return read_config(path)
    if len(path.parts) == _PARTS_OF_ID and not path.is_absolute():
        return read_config(_cached(given))
    if len(path.parts) > 1:
        return read_config(path)
    return preset(given)


def _cached(name: str) -> Path:
    """Return the folder of a model in the local cache of Hugging Face's libraries.

    Raises:
        ConfigError: it is not there.
    """
    cache = _cache()
    repository = cache / f"models--{name.replace('/', '--')}"
    snapshots = repository / "snapshots"
    try:
        commit = (repository / "refs" / "main").read_text(encoding="utf-8").strip()
        folders = [snapshots / commit]
    except OSError:  # it was downloaded by its commit alone
        folders = sorted(snapshots.glob("*"))
    for folder in folders:
        if (folder / "config.json").is_file():
            return folder
    expected = (
        f"a model with its config.json in {cache}, as this command asks no network: download it "
        "there, or give the path of its config.json"
    )
    raise ConfigError(field="--model", value=name, expected=expected)


def _cache() -> Path:
    if "HF_HUB_CACHE" in os.environ:
        return Path(os.environ["HF_HUB_CACHE"])
    home = os.environ.get("HF_HOME") or Path("~/.cache/huggingface").expanduser()
    return Path(home, "hub")
