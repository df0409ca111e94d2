"""docs/nvme-reference.md has every public name of deepnvme, as the code has it now."""

from __future__ import annotations

import re
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from types import ModuleType

import pytest

import deepnvme

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def reference() -> ModuleType:
    loader = SourceFileLoader("reference", str(ROOT / "scripts" / "reference"))
    spec = spec_from_loader("reference", loader)
    assert spec is not None
    module = module_from_spec(spec)
    loader.exec_module(module)
    return module


def test_the_page_is_what_the_script_writes(reference: ModuleType) -> None:
    assert reference.PAGE.read_text() == reference.page(), "run scripts/reference"


def test_the_page_has_every_public_name(reference: ModuleType) -> None:
    headings = re.findall(r"^### `(\w+)`", reference.PAGE.read_text(), re.M)

    assert sorted(headings) == sorted(deepnvme.__all__)


def test_a_public_name_without_a_subject_is_refused(
    reference: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deepnvme, "__all__", [*deepnvme.__all__, "novel"])

    with pytest.raises(ValueError, match="novel"):
        reference.page()


@pytest.mark.parametrize("name", deepnvme.__all__)
def test_every_public_name_says_what_it_is(name: str) -> None:
    assert getattr(deepnvme, name).__doc__
