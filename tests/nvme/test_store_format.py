"""docs/store-format.md keeps its word: its reader reads a store with nothing but Python's standard
library.
"""

from __future__ import annotations

import math
import re
import runpy
import subprocess
import sys
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from deepnvme.memory.arrays import ITEMSIZES, MAX_DIMENSIONS
from deepnvme.memory.checksum import CHECKSUM_BYTES, crc32c
from deepnvme.sizes import PAGE
from deepnvme.store.manifest import FORMAT_VERSION, Manifest, Record, encode
from deepnvme.store.store import TensorStore
from deepnvme.store.tree import MAX_DEPTH, flatten
from deepnvme.volume.extents import Extent
from deepnvme.volume.member import Header

PAGE_OF_DOCS = (Path(__file__).resolve().parents[2] / "docs/store-format.md").read_text()
VOLUME = "5f1c0f6e2f0b4d8ea3a1c2d3e4f50617"
STATE = OrderedDict(
    model={"layers/0": np.arange(6, dtype=np.int16).reshape(2, 3), 7: (True, None, "größe")},
    seed=2**100, best=-math.inf, bias=np.float64(0.5), raw=b"\x00\xff", steps=[1, 2.0],
)  # fmt: skip


@pytest.fixture
def script(tmp_path: Path) -> Path:
    [program] = re.findall(r"^```python\n(.*?)^```$", PAGE_OF_DOCS, flags=re.MULTILINE | re.DOTALL)
    path = tmp_path / "read_store.py"
    path.write_text(program)
    return path


class Written:
    """A store in two directories, laid out by hand: each tensor in two pieces, with a page between
    them.
    """

    def __init__(self, folder: Path) -> None:
        self.folders = [folder / "a", folder / "b"]
        self.data = [bytearray(PAGE), bytearray(PAGE)]
        self.tensors: dict[str, Record] = {}
        self.trees: dict[str, Any] = {}

    def put(self, name: str, values: Any, code: str) -> None:
        data = values.tobytes()
        half = len(data) // 2
        extents = []
        for member, piece in ((1, data[:half]), (0, data[half:])):
            if piece:
                extents.append(Extent(member, len(self.data[member]), len(piece)))
                self.data[member] += piece.ljust(
                    extents[-1].end - extents[-1].offset + PAGE, b"\xaa"
                )
        sums = tuple(
            crc32c(data[at : at + CHECKSUM_BYTES]) for at in range(0, len(data), CHECKSUM_BYTES)
        )
        self.tensors[name] = Record(code, values.shape, tuple(extents), sums)

    def put_state(self, name: str, state: Any) -> None:
        self.trees[name], found = flatten(state)
        for leaf, values in found.items():
            self.put(f"{name}/{leaf}", values, "I16")

    def commit(self, generation: int) -> None:
        for member, (folder, data) in enumerate(zip(self.folders, self.data, strict=True)):
            folder.mkdir(exist_ok=True)
            data[:PAGE] = Header(VOLUME, member, len(data) - PAGE, (1e9, 2e9)).encode()
            (folder / "data").write_bytes(data)
        manifest = Manifest(VOLUME, generation, self.tensors, self.trees)
        (self.folders[0] / f"manifest.{generation % 2}").write_bytes(encode(manifest))


@pytest.fixture
def written(tmp_path: Path) -> Written:
    store = Written(tmp_path)
    store.commit(1)
    store.put("large", np.arange(CHECKSUM_BYTES // 4 + 5, dtype=np.float32), "F32")
    store.put("none", np.zeros((0, 3)), "F64")
    store.put_state("run", STATE)
    store.commit(2)
    return store


def listing(script: Path, folders: list[Path]) -> subprocess.CompletedProcess[str]:
    """Run the reader where nothing but the standard library can be imported."""
    command = [
        sys.executable,
        "-I",
        "-S",
        "-W",
        "error",
        "-W",
        "ignore::ResourceWarning",
        str(script),
        *map(str, folders),
    ]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_the_reader_lists_a_store_with_nothing_but_the_standard_library(
    script: Path, written: Written
) -> None:
    done = listing(script, written.folders[::-1])

    assert done.stderr == ""
    assert done.stdout.splitlines() == [
        "large: F32 [262149], 1048596 B, whole",
        "none: F64 [0, 3], 0 B, whole",
        "run/model.layers%2F0: I16 [2, 3], 12 B, whole",
    ]


def test_the_reader_reads_what_the_store_writes(script: Path, tmp_path: Path) -> None:
    folders = [tmp_path / "a", tmp_path / "b"]
    large = np.random.default_rng(1).integers(0, 256, 2 * CHECKSUM_BYTES + 100, np.uint8)
    with TensorStore.create(folders, 64 << 20) as store:
        store.put("large", large)
        store.put_state("run", STATE)
        store.commit()
        extents = store.record("large").extents

    assert len({extent.member for extent in extents}) == 2
    done = listing(script, folders)
    assert done.stdout.splitlines() == [
        "large: U8 [2097252], 2097252 B, whole",
        "run/model.layers%2F0: I16 [2, 3], 12 B, whole",
    ], done.stderr


def test_the_reader_leaves_a_store_in_use_alone(script: Path, tmp_path: Path) -> None:
    with TensorStore.create([tmp_path / "a"], 1 << 20):
        assert "BlockingIOError" in listing(script, [tmp_path / "a"]).stderr


def test_the_reader_returns_the_bytes_and_the_state_that_were_put(
    script: Path, written: Written
) -> None:
    reader = runpy.run_path(str(script))
    files, manifest = reader["open_store"](written.folders)

    dtype, shape, data = reader["tensor"](files, manifest, "large")
    state = reader["state"](files, manifest, "run")
    for file in files:
        file.close()

    assert (dtype, shape) == ("F32", (CHECKSUM_BYTES // 4 + 5,))
    assert (np.frombuffer(data, "<f4") == np.arange(CHECKSUM_BYTES // 4 + 5)).all()
    weight = STATE["model"]["layers/0"]
    bias = ("F64", (), np.float64(0.5).tobytes())
    model = {"layers/0": ("I16", (2, 3), weight.tobytes()), 7: (True, None, "größe")}
    assert state == {**STATE, "model": model, "bias": bias}
    assert list(state) == list(STATE)


def test_the_reader_finds_a_flipped_bit(script: Path, written: Written) -> None:
    written.data[1][PAGE + 5] ^= 4
    written.commit(2)

    assert "tensor 'large' is damaged in its MiB 0" in listing(script, written.folders).stderr


@pytest.mark.parametrize("file", ["manifest.0", "manifest.1", "data"])
def test_the_reader_refuses_a_damaged_file(file: str, script: Path, written: Written) -> None:
    path = written.folders[0] / file
    damaged = bytearray(path.read_bytes())
    damaged[60] ^= 1
    path.write_bytes(damaged)

    assert "a damaged deepnvme-" in listing(script, written.folders).stderr


def test_the_reader_wants_all_members(script: Path, written: Written) -> None:
    assert "not all the members of one volume: [0]" in listing(script, written.folders[:1]).stderr


# --- the text -------------------------------------------------------------------------------------


def section(title: str) -> str:
    return re.split(rf"^## {title}$", PAGE_OF_DOCS, flags=re.MULTILINE)[1].split("\n## ")[0]


def test_the_page_names_every_dtype_with_its_size() -> None:
    rows = re.findall(r"^  \| ([0-9]+) \| (.*) \|$", section("Tensors"), flags=re.MULTILINE)

    assert {
        code: int(size) for size, codes in rows for code in re.findall("`(.+?)`", codes)
    } == ITEMSIZES


def test_the_page_names_every_tag_of_a_tree() -> None:
    structure, _ = flatten({**STATE, "t": ()})
    reader_tags = set(re.findall(r'"([a-z]+)": lambda', PAGE_OF_DOCS))

    assert (
        set(re.findall(r'^\| `\{"([a-z]+)"', section("Trees"), flags=re.MULTILINE)) | {"array"}
        == reader_tags
    )
    assert set(re.findall(r"\{'([a-z]+)': ", str([structure, flatten(STATE)[0]]))) <= reader_tags


def test_the_page_says_the_limits() -> None:
    assert f"version {FORMAT_VERSION}," in PAGE_OF_DOCS
    assert f"up to {MAX_DIMENSIONS} dimensions" in section("Tensors")
    assert f"at most {MAX_DEPTH} deep" in section("Trees")
    assert f"every {CHECKSUM_BYTES:,} bytes" in section("Checksums")
    assert f"a page is {PAGE} bytes" in PAGE_OF_DOCS
    assert f"{crc32c(b'123456789'):08x}" in section("Checksums")


def test_the_keys_of_the_page_are_those_that_are_written() -> None:
    keys = {title: re.findall(r"^\| `(\w+)` \|", section(title), flags=re.MULTILINE) for title in (
        "The header of a member", "The manifest")}  # fmt: skip
    manifest = encode(Manifest(VOLUME, 1, {}, {})).decode()

    assert keys["The manifest"] == re.findall(r'"(\w+)":', manifest)
    assert keys["The header of a member"] == re.findall(
        r'"(\w+)":', Header(VOLUME, 0, PAGE, (1.0,)).encode().decode()
    )
