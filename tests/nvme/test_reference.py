"""docs/nvme-reference.md has every public name of deepnvme, as the code has it now."""

from __future__ import annotations

import enum
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
    headings = set(re.findall(r"^### `(\w+)`", reference.PAGE.read_text(), re.M))

    returned = {name for names in reference.RETURNED.values() for name in names}
    assert headings == {*deepnvme.__all__} | returned


def test_every_member_of_a_choice_says_what_it_means(reference: ModuleType) -> None:
    assert reference.meanings_of(deepnvme.Access)["READ"].startswith("by any number of processes")
    assert reference.meanings_of(deepnvme.Sync)["ALL"] == "times and permissions too"
    for name in deepnvme.__all__:
        kind = getattr(deepnvme, name)
        if isinstance(kind, type) and issubclass(kind, enum.Enum) and kind is not deepnvme.Requests:
            meanings = reference.meanings_of(kind)
            assert all(meanings.get(member.name) for member in kind), name


def test_a_public_name_without_a_subject_is_refused(
    reference: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deepnvme, "__all__", [*deepnvme.__all__, "novel"])

    with pytest.raises(ValueError, match="novel"):
        reference.page()


@pytest.mark.parametrize("name", deepnvme.__all__)
def test_every_public_name_says_what_it_is(name: str) -> None:
    assert getattr(deepnvme, name).__doc__
