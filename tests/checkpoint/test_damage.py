"""Whatever happens to the files of a checkpoint: it is told by name, or nothing was lost."""

from __future__ import annotations

import json
import os
import random
import resource
import shutil
import tracemalloc
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from deepnvme.memory.checksum import crc32c
from deepnvme.volume.framing import framed
from infinity_engine.checkpoint import CheckpointReader
from infinity_engine.checkpoint.manifest import (
    BLOCK_BYTES,
    Manifest,
    SavedFile,
    SavedTensor,
    encode,
    parse,
)
from infinity_engine.checkpoint.objects import read_objects
from infinity_engine.cli.main import main
from infinity_engine.errors import (
    CheckpointError,
    ChecksumError,
    DamagedCheckpoint,
    IncompleteCheckpoint,
)
from support.flipped_bits import flip, regions
from support.saved_streams import parameters_of, save, values_of

PARAMETERS = parameters_of({"weight": (1100, 1000), "bias": (1000,)})
SHARD = "rank-00000-00000.safetensors"


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of three files and 13 MB, which nobody changes."""
    values = values_of(PARAMETERS)
    return save(
        tmp_path_factory.mktemp("whole"),
        "tag",
        PARAMETERS,
        values,
        piece_numel=300_000,
        file_bytes=5 << 20,
    )


@pytest.fixture
def saved(whole: Path, tmp_path: Path) -> Path:
    """A copy of it."""
    return Path(shutil.copytree(whole, tmp_path / "tag"))


def read_all(path: Path) -> None:
    with CheckpointReader(path) as reader:
        for parameter in reader.manifest.tensors:
            for name in parameter.streams:
                reader.read(parameter.stream(name), 0, np.empty(parameter.numel, np.float32))
        if reader.manifest.objects:
            read_objects(reader, 0)


def test_an_untouched_checkpoint_is_read(saved: Path) -> None:
    read_all(saved)
    with CheckpointReader(saved) as reader:
        assert list(reader.verify()) == []


@pytest.mark.parametrize("region", range(24))
def test_a_flipped_bit_anywhere_is_found_by_name(saved: Path, region: int) -> None:
    files = sorted(saved.iterdir())
    chosen = random.Random(region)
    path = files[region % len(files)]
    size = path.stat().st_size
    offset = [0, size - 1, *(chosen.randrange(size) for _ in range(4))][region // len(files)]
    flip(path, offset)
    with pytest.raises(CheckpointError, match=path.name.replace(".", r"\.")):
        read_all(saved)


@pytest.mark.parametrize("offset", [9, BLOCK_BYTES - 1, BLOCK_BYTES, 3 * BLOCK_BYTES + 5])
def test_verify_names_the_block_and_its_tensors(saved: Path, offset: int) -> None:
    flip(saved / SHARD, offset)
    with CheckpointReader(saved) as reader:
        [damage] = reader.verify()
    assert (damage.file, damage.offset) == (SHARD, offset // BLOCK_BYTES * BLOCK_BYTES)
    assert offset < BLOCK_BYTES or all(name.startswith("weight#") for name in damage.tensors)


def test_all_damaged_blocks_are_found(saved: Path) -> None:
    size = (saved / SHARD).stat().st_size
    for offset in range(10, size, BLOCK_BYTES):
        flip(saved / SHARD, offset)
    read: list[int] = []
    with CheckpointReader(saved) as reader:
        found = [damage.offset for damage in reader.verify(read.append) if damage.file == SHARD]
    assert found == list(range(0, size, BLOCK_BYTES))
    assert sum(read) == sum(file.nbytes for file in parse((saved / "manifest").read_bytes()).files)


@pytest.mark.parametrize("nbytes", [0, 1, 4095, BLOCK_BYTES])
def test_a_truncated_file_is_told_with_both_lengths(saved: Path, nbytes: int) -> None:
    size = (saved / SHARD).stat().st_size
    os.truncate(saved / SHARD, nbytes)
    with pytest.raises(DamagedCheckpoint, match=f"it has {nbytes} B, its manifest says {size} B"):
        read_all(saved)


def test_a_missing_file_is_named_before_anything_is_read(saved: Path) -> None:
    (saved / SHARD).unlink()
    with pytest.raises(IncompleteCheckpoint, match=SHARD):
        CheckpointReader(saved)


def test_a_checkpoint_without_a_manifest_is_incomplete(saved: Path) -> None:
    (saved / "manifest").unlink()
    with pytest.raises(IncompleteCheckpoint, match="manifest"):
        CheckpointReader(saved)


def test_a_file_that_the_manifest_does_not_name_is_left_alone(saved: Path) -> None:
    (saved / "notes.txt").write_text("mine")
    read_all(saved)
    assert (saved / "notes.txt").read_text() == "mine"


@pytest.mark.parametrize(
    "make", [os.mkfifo, lambda path: path.symlink_to("/etc/passwd"), Path.mkdir]
)
@pytest.mark.parametrize("name", ["manifest", SHARD])
def test_what_is_no_regular_file_is_refused_at_once(
    saved: Path, name: str, make: Callable[[Path], None]
) -> None:
    (saved / name).unlink()
    make(saved / name)
    with pytest.raises(DamagedCheckpoint, match=name) as refusal:
        read_all(saved)
    assert "root:" not in str(refusal.value)


def test_slices_of_another_checkpoint_do_not_fit(saved: Path, tmp_path: Path) -> None:
    other = parameters_of({"weight": (1100, 1000), "bias": (999,)})
    path = save(tmp_path / "other", "tag", other, values_of(other))
    shutil.copy(path / SHARD, saved / SHARD)
    with pytest.raises(CheckpointError, match=SHARD):
        read_all(saved)


def changed(saved: Path, change: Callable[[dict[str, Any]], object]) -> Path:
    """Change what the manifest says, with a right checksum."""
    content = json.loads((saved / "manifest").read_bytes().partition(b"\n")[2])
    change(content)
    (saved / "manifest").write_bytes(framed("infinity-checkpoint", 1, content))
    return saved


HOSTILE: dict[str, Callable[[dict[str, Any]], object]] = {
    "a path outside": lambda m: m["files"][0].update(name="../../etc/passwd"),
    "an absolute path": lambda m: m["files"][0].update(name="/etc/passwd"),
    "a hidden file": lambda m: m["files"][0].update(name=".bashrc"),
    "the manifest itself": lambda m: m["files"][0].update(name="manifest"),
    "a file twice": lambda m: m["files"].append(dict(m["files"][0])),
    "an absurd length": lambda m: m["files"][0].update(bytes=1 << 62),
    "a negative length": lambda m: m["files"][0].update(bytes=-1),
    "a length in words": lambda m: m["files"][0].update(bytes="many"),
    "a length that is true": lambda m: m["files"][0].update(bytes=True),
    "checksums that are no digits": lambda m: m["files"][0].update(
        checksums="x" * len(m["files"][0]["checksums"])
    ),
    "too few checksums": lambda m: m["files"][0].update(checksums=""),
    "an absurd shape": lambda m: m["tensors"][0].update(shape=[1 << 62, 1 << 62]),
    "a negative size": lambda m: m["tensors"][0].update(shape=[-1]),
    "too many dimensions": lambda m: m["tensors"][0].update(shape=[1] * 1000),
    "an unknown dtype": lambda m: m["tensors"][0].update(dtype="pickle"),
    "a stream with a path": lambda m: m["tensors"][0]["streams"].update({"../x": "F32"}),
    "a stream that is nowhere": lambda m: m["tensors"][0]["streams"].update({"more": "F32"}),
    "a parameter twice": lambda m: m["tensors"].append(dict(m["tensors"][0])),
    "an alias of another one": lambda m: m["tensors"][0].update(aliases=["bias"]),
    "no ranks": lambda m: m.update(ranks=0),
    "a field more": lambda m: m.update(code="import os"),
    "a field less": lambda m: m.pop("run"),
    "a list for an object": lambda m: m.update(tensors={}),
    "another shape": lambda m: m["tensors"][0].update(shape=[7]),
    "another stream dtype": lambda m: m["tensors"][0]["streams"].update(master="F64"),
    "objects in a file that is nowhere": lambda m: m["objects"].update(
        {"objects-00000.safetensors": {}}
    ),
    "a parameter that is nowhere": lambda m: m["tensors"].append(
        {**m["tensors"][0], "name": "more"}
    ),
}


@pytest.mark.parametrize("change", HOSTILE.values(), ids=HOSTILE.keys())
def test_a_hostile_manifest_is_refused_in_words(
    saved: Path, change: Callable[[dict[str, Any]], object]
) -> None:
    with pytest.raises(CheckpointError, match=r"checkpoint .*tag"):
        read_all(changed(saved, change))


def test_json_that_is_nested_too_deeply_is_refused(saved: Path) -> None:
    deep = b'{"tag":' + b"[" * 100_000 + b"]" * 100_000 + b"}"
    (saved / "manifest").write_bytes(
        b"infinity-checkpoint 1 %d %08x\n" % (len(deep), crc32c(deep)) + deep
    )
    with pytest.raises(DamagedCheckpoint, match="nested too deeply"):
        CheckpointReader(saved)


def test_a_newer_version_is_told_from_damage(saved: Path) -> None:
    data = (saved / "manifest").read_bytes()
    (saved / "manifest").write_bytes(
        data.replace(b"infinity-checkpoint 1 ", b"infinity-checkpoint 3 ", 1)
    )
    with pytest.raises(DamagedCheckpoint, match="version 3 of the format"):
        CheckpointReader(saved)


def mutations(data: bytes, count: int, chosen: random.Random | None = None) -> Iterator[bytes]:
    chosen = chosen or random.Random(7)
    for _ in range(count):
        broken = bytearray(data)
        for _ in range(chosen.randint(1, 4)):
            at = chosen.randrange(len(broken))
            kind = chosen.randrange(4)
            if kind == 0:
                broken[at] ^= 1 << chosen.randrange(8)
            elif kind == 1:
                del broken[at : at + chosen.randint(1, 40)]
            elif kind == 2:
                broken[at:at] = bytes(
                    chosen.choices(b'{}[]",:0123456789-e\\u', k=chosen.randint(1, 8))
                )
            else:
                broken[at : at + 1] = broken[chosen.randrange(len(broken)) :][:20]
            if not broken:
                break
        yield bytes(broken)


@pytest.mark.parametrize("framing", ["as it is", "with a right checksum"])
def test_mutated_manifests_are_refused_or_read_as_manifests(framing: str) -> None:
    parameters = (replace(PARAMETERS[0], aliases=("tied",)), PARAMETERS[1])
    files = (SavedFile(name=SHARD, nbytes=10, checksums=(7,)),)
    manifest = Manifest(tag="tag", step=1, created="now", ranks=1, tensors=parameters, files=files)
    data = encode(manifest)
    assert parse(data) == manifest
    line, _, payload = data.partition(b"\n")
    refused = 0
    for broken in mutations(data if framing == "as it is" else payload, 5000):
        text = broken
        if framing != "as it is":
            text = b"infinity-checkpoint 1 %d %08x\n" % (len(broken), crc32c(broken)) + broken
        try:
            found = parse(text)
        except ValueError:
            refused += 1
        else:
            assert isinstance(found, Manifest)
            assert all(isinstance(parameter, SavedTensor) for parameter in found.tensors)
    assert line.startswith(b"infinity-checkpoint 1 ")
    assert refused > 3000


# --- whole checkpoints, mutated -------------------------------------------------------------------

SMALL = parameters_of({"layer.weight": (60, 50), "layer.bias": (50,)})


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """A checkpoint of two ranks, of some kilobytes, with further state of most kinds."""
    state = {
        "random": np.arange(100),
        "groups": [{"lr": 1e-3, "betas": (0.9, 0.999), "seed": 1 << 60}, {"lr": float("inf")}],
        "extra": {"bytes": b"some", "scalar": np.float32(2), "empty": np.empty((0, 3))},
    }
    return save(
        tmp_path / "c",
        "tag",
        SMALL,
        values_of(SMALL),
        ranks=2,
        piece_numel=1000,
        objects=state,
    )


def test_a_flipped_bit_in_any_region_of_any_file_is_found_by_load_and_by_verify(
    small: Path,
) -> None:
    expected = {"first line", "JSON", "length", "header"}
    seen: set[str] = set()
    for path in sorted(small.iterdir()):
        for region, offset in list(regions(path)):
            seen.add(region.partition("#")[0])
            flip(path, offset)
            with pytest.raises(CheckpointError, match=path.name.replace(".", r"\.")) as refusal:
                read_all(small)
            if "#" in region:
                assert region in str(refusal.value)
            assert main(["checkpoint", "verify", str(small)]) == 1
            flip(path, offset)
    assert seen == expected | {"layer.weight", "layer.bias", "random"}
    read_all(small)


def test_the_error_names_the_stream_that_was_read(saved: Path) -> None:
    flip(saved / SHARD, 3 * BLOCK_BYTES + 5)
    with pytest.raises(ChecksumError) as refusal:
        read_all(saved)
    assert (refusal.value.entry, refusal.value.tensor) == (SHARD, "master of weight")
    assert (
        f"{SHARD} is damaged at or after offset {3 * BLOCK_BYTES}, where master of weight lies"
        in str(refusal.value)
    )


def hostile(small: Path, chosen: random.Random) -> None:
    """Mutate one file, and let the manifest say of it what a malicious writer would."""
    files = sorted(small.iterdir())
    path = files[chosen.randrange(len(files))]
    data = path.read_bytes()
    if path.name == "manifest":
        payload = data.partition(b"\n")[2]
        [broken] = mutations(payload, 1, chosen)
        line = b"infinity-checkpoint 1 %d %08x\n" % (len(broken), crc32c(broken))
        path.write_bytes(line + broken)
        return
    header = int.from_bytes(data[:8], "little")
    [text] = mutations(data[8 : 8 + header], 1, chosen)
    length = len(text) if chosen.random() < 0.8 else chosen.randrange(1 << 63)
    broken = length.to_bytes(8, "little") + text + data[8 + header :]
    path.write_bytes(broken)
    sums = [f"{crc32c(broken[at : at + BLOCK_BYTES]):08x}" for at in range(0, len(broken), 1 << 20)]

    def lie(manifest: dict[str, Any]) -> None:
        [entry] = [file for file in manifest["files"] if file["name"] == path.name]
        entry.update(bytes=len(broken), checksums="".join(sums))

    changed(small, lie)


@pytest.mark.parametrize(
    "count", [pytest.param(300, id="300"), pytest.param(10_000, id="10000", marks=pytest.mark.slow)]
)
def test_checkpoints_with_right_checksums_and_wrong_content_are_refused_or_read(
    small: Path, count: int
) -> None:
    whole = {path: path.read_bytes() for path in small.iterdir()}
    around = sorted(path.name for path in small.parent.iterdir())
    chosen, refused = random.Random(count), 0
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for _ in range(count):
        hostile(small, chosen)
        try:
            read_all(small)
        except CheckpointError:
            refused += 1
        for path, data in whole.items():
            path.write_bytes(data)
    assert refused > count // 2
    assert sorted(path.name for path in small.parent.iterdir()) == around
    assert sorted(small.iterdir()) == sorted(whole)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200 << 10


@pytest.mark.parametrize("name", ["files", "tensors", "objects"])
def test_a_manifest_of_countless_parts_is_refused_before_it_is_built(
    small: Path, name: str
) -> None:
    payload = b'{"%s":[' % name.encode() + b"[]," * 11_000_000 + b"[]]}"
    line = b"infinity-checkpoint 1 %d %08x\n" % (len(payload), crc32c(payload))
    (small / "manifest").write_bytes(line + payload)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(DamagedCheckpoint, match="parts"):
        CheckpointReader(small)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200 << 10


def test_checksums_of_a_huge_file_take_no_more_than_their_digits() -> None:
    blocks = 1 << 20  # of a file of 1 TiB
    huge = SavedFile(name=SHARD, nbytes=blocks * BLOCK_BYTES, checksums=(0xDEADBEEF,) * blocks)
    manifest = Manifest(tag="tag", step=1, created="now", ranks=1, tensors=(), files=(huge,))
    data = encode(manifest)
    tracemalloc.start()
    try:
        found = parse(data)
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert found == manifest
    assert held < len(data)
