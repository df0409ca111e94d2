"""The way of a byte from `Engine.step` to the drive is the one that docs/architecture.md draws."""

from __future__ import annotations

import re
import sys
from dataclasses import replace
from pathlib import Path
from types import FrameType

import pytest

from support.nvme_training import STREAMED, opened, train

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs/architecture.md").read_text()
Hop = tuple[str, str]


def hops_on_the_page() -> list[Hop]:
    """Return file and function of each row of the page's table, as far as it is Python."""
    section = PAGE.split("\n## The way of a byte\n")[1].split("\n## ")[0]
    return [
        (file, function)
        for file, function in re.findall(r"^\| `([\w/]+\.py)` \| `([\w.]+)` \|", section, re.M)
    ]


def way_of_the_first_write(tmp_path: Path) -> list[Hop]:
    """Return the Python frames from `Engine.step` to the call that hands states to the native
    queue.
    """
    ways: list[list[Hop]] = []

    def profile(frame: FrameType, event: str, called: object) -> None:
        if event != "c_call" or getattr(called, "__name__", "") != "submit":
            return
        way: list[Hop] = []
        at: FrameType | None = frame
        while at is not None:
            file = Path(at.f_code.co_filename)
            # whole names are Python 3.11's
            name = getattr(at.f_code, "co_qualname", at.f_code.co_name)
            if file.is_relative_to(ROOT):
                way.append((str(file.relative_to(ROOT)), name))
            at = at.f_back
        way.reverse()
        if ("deepnvme/queue/queue.py", "File.pwrite") in way:
            ways.append(way)

    case = replace(STREAMED, clip=None, steps=1)
    with opened(case, None, tmp_path, overlap="off") as (engine, task):
        train(engine, task, case)
        engine.backward(engine(task.batch(7)))
        sys.setprofile(profile)
        try:
            engine.step()
        finally:
            sys.setprofile(None)
    first = ways[0]
    return first[first.index(("infinity_engine/engine/engine.py", "Engine.step")) :]


@pytest.mark.skipif(
    sys.version_info < (3, 11), reason="frames have no qualified names before Python 3.11"
)
def test_the_page_draws_the_way_that_states_take_to_the_drive(tmp_path: Path) -> None:
    assert way_of_the_first_write(tmp_path) == hops_on_the_page()


def test_the_page_names_every_room_and_no_other() -> None:
    drawn = set(
        re.findall(r"^\| `(\w+)` \|", PAGE.split("\n## Rooms\n")[1].split("\n## ")[0], re.M)
    )
    folder = ROOT / "infinity_engine"
    assert drawn == {path.parent.name for path in folder.glob("*/__init__.py")}


def test_the_page_names_every_room_of_the_storage_library_and_no_other() -> None:
    drawn = set(re.findall(r"^\| `deepnvme/(\w+)` \|", PAGE, re.M))

    assert drawn == {path.parent.name for path in (ROOT / "deepnvme").glob("*/__init__.py")}


def test_every_file_and_class_that_the_page_names_exists() -> None:
    packages = [ROOT / "infinity_engine", ROOT / "deepnvme"]
    files = set(re.findall(r"`(\w+(?:/\w+)+/?(?:\.py)?)`", PAGE))
    first = {
        f"{room}/{file}"
        for room, files_of_it in re.findall(r"^\| `([\w/]+)` \|.*\| (`\w+\.py`.*) \|$", PAGE, re.M)
        for file in re.findall(r"\w+\.py", files_of_it)
    }
    text = "".join(path.read_text() for package in packages for path in package.rglob("*.py"))
    classes = set(re.findall(r"`([A-Z][a-z]+(?:[A-Z][a-z]*)+)`", PAGE))

    assert {
        path
        for path in files | first
        if not any((top / path).exists() for top in (ROOT, *packages))
    } == set()
    assert {name for name in classes if not re.search(rf"^class {name}\b", text, re.M)} == set()
