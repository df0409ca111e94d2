from __future__ import annotations

from pathlib import Path

import pytest

import infinity_engine
from infinity_engine import engine
from infinity_engine.errors import MissingDependencyError
from infinity_engine.machine.packages import require_torch


def pretend_installed(folder: Path, name: str, version: str) -> None:
    """Write what the import system needs to believe that a package of this version is installed in
    `folder`.
    """
    info = folder / f"{name}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")


def test_both_ways_of_importing_the_engine_give_the_same_names() -> None:
    assert set(engine.__all__) == set(infinity_engine.__all__)
    assert all(getattr(engine, name) is getattr(infinity_engine, name) for name in engine.__all__)


def test_a_torch_too_old_is_named_with_what_is_needed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend_installed(tmp_path, "torch", "2.5.1")
    monkeypatch.setattr("sys.path", [str(tmp_path)])
    with pytest.raises(
        MissingDependencyError, match=r"PyTorch >= 2\.6.*2\.5\.1.*infinity-engine\[torch\]"
    ):
        require_torch("something")


def test_a_new_enough_torch_is_accepted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_installed(tmp_path, "torch", "2.6.0+cpu")
    monkeypatch.setattr("sys.path", [str(tmp_path)])
    require_torch("something")


def test_initialize_without_torch_names_the_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.path", [str(tmp_path)])
    with pytest.raises(MissingDependencyError, match=r"infinity-engine\[torch\]"):
        infinity_engine.initialize(object(), object())  # type: ignore[arg-type]
