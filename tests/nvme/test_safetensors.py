"""safetensors files: the same bytes as the format's own package reads and writes, nothing believed,
nothing half.
"""

from __future__ import annotations

import errno
import json
import os
import stat
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays_of

from deepnvme import (
    Durability,
    FaultPlan,
    IOQueue,
    NVMeError,
    Requests,
    Returns,
    SafetensorsError,
    WhenFull,
    read_safetensors,
    safetensors_header,
    write_safetensors,
)
from deepnvme.formats.safetensors import SafetensorsFile, SafetensorsWriter
from deepnvme.memory.arrays import ITEMSIZES, Description, describe
from support.nvme_io import PAGE, pattern
from support.nvme_programs import output_of, run_program

LARGE = 1 << 20


def raw_file(path: Path, header: Any, data: bytes = b"", *, length: int | None = None) -> Path:
    """Write a file of this format by hand."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)
    return path


def entry(dtype: str, shape: list[int], begin: int, end: int) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def assert_same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert set(found) == set(expected)
    for name, array in expected.items():
        assert (found[name].dtype, found[name].shape) == (array.dtype, array.shape), name
        assert found[name].tobytes() == array.tobytes(), name


@pytest.fixture
def mixed() -> dict[str, Any]:
    """Return arrays of every kind that matters: large and small, whole pages and not, scalars,
    empty, odd names.
    """
    return {
        "large": np.arange(LARGE // 4 + 7, dtype=np.float32),
        "whole pages": np.arange(LARGE, dtype=np.uint8).reshape(64, -1),
        "wide": np.linspace(0, 1, 70_001),
        "scalar": np.array(2.5, np.float16),
        "empty": np.empty((0, 3), np.int64),
        "größe.重み/\n": np.arange(5, dtype=np.int8),
        "flags": np.arange(99) % 3 == 0,
        "complex": np.array([1 + 2j], np.complex64),
    }


# --- there and back -------------------------------------------------------------------------------


def test_what_is_written_is_read_back(tmp_path: Path, mixed: dict[str, Any]) -> None:
    path = tmp_path / "model.safetensors"

    write_safetensors(path, mixed, {"format": "pt", "größe": "ü\n"})

    assert_same(read_safetensors(path, returns=Returns.NUMPY), mixed)
    assert safetensors_header(path).metadata == {"format": "pt", "größe": "ü\n"}


def test_every_backend_on_drives_reads_and_writes(
    tmp_path: Path, mixed: dict[str, Any], disk_queue: IOQueue
) -> None:
    write_safetensors(tmp_path / "x", mixed, queue=disk_queue)

    assert_same(read_safetensors(tmp_path / "x", returns=Returns.NUMPY, queue=disk_queue), mixed)


DTYPES = [np.bool_, np.uint8, np.int16, np.uint32, np.float16, np.float32, np.int64, np.complex64]


@given(
    st.dictionaries(
        st.text(st.characters(codec="utf-8"), max_size=8),
        st.sampled_from(DTYPES).flatmap(
            lambda dtype: arrays_of.arrays(
                dtype, arrays_of.array_shapes(min_dims=0, min_side=0, max_side=40)
            )
        ),
        max_size=8,
    )
)
def test_any_arrays_come_back(
    tmp_path_factory: pytest.TempPathFactory, tensors: dict[str, Any]
) -> None:
    path = tmp_path_factory.mktemp("any") / "x.safetensors"

    write_safetensors(path, tensors)

    assert_same(read_safetensors(path, returns=Returns.NUMPY), tensors)


WITHOUT_NUMPY = """
import sys
sys.modules["numpy"] = sys.modules["torch"] = None
import deepnvme

given = {"large": bytes(range(256)) * 4096, "small": b"abc", "empty": b"", "odd": b"x" * 300_001}
deepnvme.write_safetensors("file", given)
for options in {}, {"returns": deepnvme.Returns.BYTES}:
    found = deepnvme.read_safetensors("file", **options)
    assert {name: bytes(tensor) for name, tensor in found.items()} == given
    assert {type(tensor) for tensor in found.values()} == {memoryview}
"""


def test_bytes_are_read_where_numpy_is_not_installed(tmp_path: Path) -> None:
    output_of(run_program(WITHOUT_NUMPY, folder=tmp_path, python=("-W", "ignore")))


def test_some_tensors_are_read_by_name_in_the_order_asked_for(
    tmp_path: Path, mixed: dict[str, Any]
) -> None:
    write_safetensors(tmp_path / "x", mixed)

    found = read_safetensors(tmp_path / "x", ["flags", "large"], returns=Returns.NUMPY)

    assert list(found) == ["flags", "large"]


def test_tensors_are_read_into_memory_that_is_given(tmp_path: Path, mixed: dict[str, Any]) -> None:
    write_safetensors(tmp_path / "x", mixed)
    out = {name: np.zeros_like(mixed[name]) for name in ("large", "flags")}

    found = read_safetensors(tmp_path / "x", out=out, returns=Returns.NUMPY)

    assert found["large"] is out["large"]
    assert_same(found, mixed)


def test_a_name_that_is_not_there_is_a_key_error(tmp_path: Path) -> None:
    write_safetensors(tmp_path / "x", {"there": np.zeros(3)})

    with pytest.raises(KeyError, match="no tensor 'missing' among the 1"):
        read_safetensors(tmp_path / "x", ["missing"])


def test_memory_of_another_type_is_refused(tmp_path: Path) -> None:
    write_safetensors(tmp_path / "x", {"w": np.zeros(3)})

    with pytest.raises(ValueError, match=r"is F64 of shape \(3,\); it cannot be read into F32"):
        read_safetensors(tmp_path / "x", out={"w": np.zeros(3, np.float32)})


def test_no_file_is_a_file_not_found_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        read_safetensors(tmp_path / "x")


def test_bytes_are_uint8(tmp_path: Path) -> None:
    write_safetensors(tmp_path / "x", {"blob": b"abc"})

    assert read_safetensors(tmp_path / "x", returns=Returns.NUMPY)["blob"].tobytes() == b"abc"


def test_many_small_tensors_share_operations(tmp_path: Path) -> None:
    tensors = {f"layer.{number}": np.full(1000, number) for number in range(2000)}
    with IOQueue() as queue:
        write_safetensors(tmp_path / "x", tensors, durability=Durability.NONE, queue=queue)
        assert_same(read_safetensors(tmp_path / "x", returns=Returns.NUMPY, queue=queue), tensors)
        (drive,) = queue.stats().drives.values()

    assert drive.operations < 20


# --- by direct I/O --------------------------------------------------------------------------------


def test_all_whole_pages_go_past_the_page_cache_and_large_ones_without_a_copy(
    tmp_path: Path,
) -> None:
    path = tmp_path / "x"
    large = {"odd": np.zeros(LARGE // 4 + 3, np.float32), "more": np.zeros(LARGE + 1, np.uint8)}
    with IOQueue("threads") as writing:
        write_safetensors(path, large, queue=writing)
        (written,) = writing.stats().drives.values()
    with IOQueue("threads") as reading, reading.open(path) as file:
        if not file.direct:
            pytest.skip("the file system of the test directory has no direct I/O")
        read_safetensors(path, returns=Returns.NUMPY, queue=reading)
        (read,) = reading.stats().drives.values()

    assert written.buffered_bytes < PAGE
    # The ends within pages, and the header, go through memory of the drive's own.
    assert read.buffered_bytes + read.bounced_bytes <= 4 * PAGE


def test_the_tensors_begin_with_a_page_and_each_at_a_multiple_of_its_element(
    tmp_path: Path, mixed: dict[str, Any]
) -> None:
    write_safetensors(tmp_path / "x", mixed)

    entries = safetensors_header(tmp_path / "x").tensors
    assert min(each.offset for each in entries.values()) == PAGE
    assert entries["whole pages"].offset % PAGE == 0
    assert all(each.offset % ITEMSIZES[each.dtype] == 0 for each in entries.values())


def test_tensors_at_odd_offsets_are_aligned_in_memory(tmp_path: Path) -> None:
    values = np.arange(LARGE, dtype=np.float64)
    header = {"b": entry("U8", [3], 0, 3), "w": entry("F64", [LARGE], 3, 3 + values.nbytes)}
    raw_file(tmp_path / "x", header, b"abc" + values.tobytes())

    found = read_safetensors(tmp_path / "x", returns=Returns.NUMPY)

    assert found["w"].flags.aligned
    assert (found["w"] == values).all()


# --- whole or not at all --------------------------------------------------------------------------


@pytest.mark.parametrize("durability", Durability)
def test_a_file_is_replaced(tmp_path: Path, durability: Durability) -> None:
    write_safetensors(tmp_path / "x", {"old": np.zeros(3)})

    write_safetensors(tmp_path / "x", {"new": np.ones(3)}, durability=durability)

    assert list(read_safetensors(tmp_path / "x")) == ["new"]
    assert [path.name for path in tmp_path.iterdir()] == ["x"]


def test_a_link_stays_one(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("target")

    write_safetensors(tmp_path / "link", {"w": np.zeros(3)})

    assert (tmp_path / "link").is_symlink()
    assert list(read_safetensors(tmp_path / "target")) == ["w"]


@pytest.mark.parametrize("nth", [1, 2])
@pytest.mark.parametrize("requests", [Requests.WRITES, Requests.SYNCS])
def test_a_drive_that_fails_leaves_what_was_there(
    tmp_path: Path, requests: Requests, nth: int
) -> None:
    write_safetensors(tmp_path / "x", {"old": np.zeros(3)})
    plan = FaultPlan(seed=1)
    plan.fail(nth=nth if requests is Requests.WRITES else 1, errno=errno.EIO, requests=requests)

    with IOQueue("threads", faults=plan) as queue, pytest.raises(NVMeError) as caught:
        write_safetensors(tmp_path / "x", {"new": np.ones(LARGE)}, queue=queue)

    assert caught.value.errno == errno.EIO
    assert list(read_safetensors(tmp_path / "x")) == ["old"]
    assert [path.name for path in tmp_path.iterdir()] == ["x"]


@pytest.mark.parametrize("size", [10, LARGE])
def test_a_drive_that_fails_to_read_is_an_error(tmp_path: Path, size: int) -> None:
    write_safetensors(tmp_path / "x", {"w": np.zeros(size)})
    plan = FaultPlan(seed=1)
    plan.fail(nth=1, errno=errno.EIO, requests=Requests.READS)

    with IOQueue("threads", faults=plan) as queue, pytest.raises(NVMeError) as caught:
        read_safetensors(tmp_path / "x", queue=queue)

    assert caught.value.errno == errno.EIO


@pytest.mark.parametrize(
    ("tensors", "metadata", "flaw"),
    [
        ({"w": np.zeros(2, np.complex128)}, None, "the format has no C128"),
        ({"__metadata__": np.zeros(2)}, None, "no tensor can have the name __metadata__"),
        ({"\ud800": np.zeros(2)}, None, "half of a surrogate pair"),
        ({3: np.zeros(2)}, None, "expected a name as str, got int"),
        ({}, {"epoch": 3}, "expected the metadata as texts by name, got 3"),
    ],
)
def test_what_the_format_cannot_hold_is_refused(
    tmp_path: Path, tensors: Any, metadata: Any, flaw: str
) -> None:
    with pytest.raises(SafetensorsError, match=flaw) as caught:
        write_safetensors(tmp_path / "x", tensors, metadata)

    assert (caught.value.errno, caught.value.path) == (errno.EINVAL, str(tmp_path / "x"))
    assert list(tmp_path.iterdir()) == []


# --- piece by piece -------------------------------------------------------------------------------


def test_a_file_is_written_in_several_calls_and_read_as_bytes(
    tmp_path: Path, mixed: dict[str, Any]
) -> None:
    described = {name: describe(array) for name, array in mixed.items()}
    layout = {name: (each.code, each.shape) for name, each in described.items()}

    with SafetensorsWriter(tmp_path / "x", layout) as writer:
        for name in writer.names:
            writer.write({name: described[name]})
    with SafetensorsFile(tmp_path / "x") as file:
        found = file.read(mixed)

    assert {name: (each.code, each.shape) for name, each in found.items()} == layout
    assert_same(read_safetensors(tmp_path / "x", returns=Returns.NUMPY), mixed)


def test_memory_may_change_once_write_has_returned(tmp_path: Path) -> None:
    array = np.ones(LARGE)
    with SafetensorsWriter(
        tmp_path / "x", {"a": ("F64", (LARGE,)), "b": ("F64", (LARGE,))}
    ) as writer:
        writer.write({"a": describe(array)})
        array[:] = 2
        writer.write({"b": describe(array)})

    found = read_safetensors(tmp_path / "x", returns=Returns.NUMPY)
    assert (found["a"] == 1).all()
    assert (found["b"] == 2).all()


def test_tensors_out_of_turn_or_of_another_shape_are_refused(tmp_path: Path) -> None:
    tensor = describe(np.zeros(4))
    with (
        pytest.raises(ValueError, match="expected the tensors"),
        SafetensorsWriter(tmp_path / "x", {"a": ("F64", (4,)), "b": ("F64", (4,))}) as writer,
    ):
        writer.write({"b": tensor})
    with (
        pytest.raises(ValueError, match="'a' was announced as"),
        SafetensorsWriter(tmp_path / "x", {"a": ("F64", (5,))}) as writer,
    ):
        writer.write({"a": tensor})

    assert list(tmp_path.iterdir()) == []


def test_a_tensor_that_was_announced_and_not_written_leaves_no_file(tmp_path: Path) -> None:
    with (
        pytest.raises(ValueError, match="1 of the tensors that were announced were not written"),
        SafetensorsWriter(tmp_path / "x", {"a": ("U8", (3,))}),
    ):
        pass

    assert list(tmp_path.iterdir()) == []


# --- nothing is believed --------------------------------------------------------------------------

GOOD = {"a": entry("U8", [4], 0, 4), "b": entry("F32", [1], 4, 8)}


def changed(**fields: Any) -> dict[str, Any]:
    return {**GOOD, "b": {**GOOD["b"], **fields}}


def test_the_good_header_is_good(tmp_path: Path) -> None:
    header = safetensors_header(raw_file(tmp_path / "x", GOOD, bytes(8)))

    assert [(name, each.dtype, each.shape) for name, each in header.tensors.items()] == [
        ("a", "U8", (4,)),
        ("b", "F32", (1,)),
    ]


@pytest.mark.parametrize(
    ("header", "flaw"),
    [
        (b" {}", 'begins with "{"'),
        (b"{", "Expecting"),
        (b'{"a": 1} x', "Extra data"),
        (b'{"\xff": 1}', "utf-8"),
        (b'{"\\ud800":{"dtype":"U8","shape":[8],"data_offsets":[0,8]}}', "surrogate"),
        (b'{"a":' * 100_000, "nested too deeply"),
        (b'{"a":{"dtype":"U8","shape":[4],"data_offsets":[0,8]},"a":{}}', "'a' stands twice"),
        (
            b'{"a":{"dtype":"U8","dtype":"I8","shape":[8],"data_offsets":[0,8]}}',
            "'dtype' stands twice",
        ),
        ({"__metadata__": {"a": 1}}, "expected __metadata__ as an object of texts"),
        ({"__metadata__": ["a"]}, "expected __metadata__ as an object of texts"),
        ({"a": [1]}, "expected an object with dtype, shape and data_offsets"),
        (changed(more=1), "expected an object with dtype, shape and data_offsets"),
        (changed(dtype="C128"), "expected one of the dtypes"),
        (changed(dtype="F4"), "expected one of the dtypes"),
        (changed(dtype=["F32"]), "expected one of the dtypes"),
        (changed(shape=4), "expected its shape as a list of sizes"),
        (changed(shape=[-1]), "expected its shape as a list of sizes"),
        (changed(shape=[True]), "expected its shape as a list of sizes"),
        (changed(shape=[1.0]), "expected its shape as a list of sizes"),
        (changed(shape=[1] * 65), "64 dimensions at most"),
        (changed(shape=[1 << 62, 1 << 62]), "less than 2\\*\\*63 bytes"),
        (changed(data_offsets=[4]), "expected its data_offsets as a list of two"),
        (changed(data_offsets=[4, "8"]), "expected its data_offsets as a list of two"),
        (changed(data_offsets=[8, 4]), "its bytes 8 to 4 are -4"),
        (changed(data_offsets=[4, 9]), "its bytes 4 to 9 are 5; F32 of shape \\[1\\] takes 4"),
        (changed(data_offsets=[3, 7]), "'b' should begin where 'a' ends, at byte 4, not 3"),
        (changed(data_offsets=[5, 9]), "'b' should begin where 'a' ends, at byte 4, not 5"),
        ({"b": GOOD["b"]}, "'b' should begin at byte 0, not 4"),
        (
            {"a": GOOD["a"]},
            "its tensors end at byte 72, the file at 76: it was cut off or added to",
        ),
        ({}, "its tensors end at byte 10, the file at 18"),
    ],
)
def test_a_header_that_makes_no_sense_is_refused_by_name(
    tmp_path: Path, header: Any, flaw: str
) -> None:
    path = raw_file(tmp_path / "bad.safetensors", header, bytes(8))

    with pytest.raises(SafetensorsError, match=flaw) as caught:
        safetensors_header(path)

    assert (caught.value.errno, caught.value.path) == (errno.EBADMSG, str(path))


@pytest.mark.parametrize(
    ("content", "flaw"),
    [
        (b"", "expected 8 B at least, got 0"),
        (b"1234567", "expected 8 B at least, got 7"),
        (struct.pack("<Q", 3) + b"{}", "its header would have 3 B, 2 follow"),
        (struct.pack("<Q", 100_000_001), "the format allows 100000000"),
        (struct.pack("<Q", (1 << 64) - 1), "the format allows 100000000"),
    ],
)
def test_a_length_that_makes_no_sense_is_refused(tmp_path: Path, content: bytes, flaw: str) -> None:
    (tmp_path / "x").write_bytes(content)

    with pytest.raises(SafetensorsError, match=flaw):
        safetensors_header(tmp_path / "x")


@pytest.mark.timeout(20)
@pytest.mark.parametrize("make", [os.mkfifo, Path.mkdir])
def test_what_is_no_regular_file_is_refused_at_once(
    tmp_path: Path, make: Callable[[Path], None]
) -> None:
    make(tmp_path / "x")

    with pytest.raises(SafetensorsError, match="not a regular file"):
        safetensors_header(tmp_path / "x")
    with pytest.raises(OSError, match=r"directory|regular|seek"):
        read_safetensors(tmp_path / "x")


@given(st.data())
def test_a_header_with_changed_bytes_is_refused_or_still_whole(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    content = bytearray(
        raw_file(tmp_path_factory.getbasetemp() / "fuzzed", GOOD, bytes(8)).read_bytes()
    )
    for at in data.draw(st.lists(st.integers(0, len(content) - 1), min_size=1, max_size=4)):
        content[at] = data.draw(st.integers(0, 255))
    path = tmp_path_factory.getbasetemp() / "fuzzed"
    path.write_bytes(content)

    try:
        header = safetensors_header(path)
    except SafetensorsError:
        return
    assert sum(each.nbytes for each in header.tensors.values()) <= 8


def test_a_file_that_was_cut_off_after_its_header_was_read_is_an_error(tmp_path: Path) -> None:
    write_safetensors(tmp_path / "x", {"w": np.zeros(LARGE)})
    with SafetensorsFile(tmp_path / "x") as file:
        with (tmp_path / "x").open("r+b") as cut:
            cut.truncate(2 * PAGE)
        with pytest.raises(NVMeError):
            file.read(["w"])


# --- with torch, and with the format's own package ------------------------------------------------


def torch_tensors() -> dict[str, Any]:
    torch = pytest.importorskip("torch", reason="torch is not installed")
    torch.manual_seed(0)
    return {
        "weight": torch.randn(1000, 257),
        "half": torch.randn(999, 301).bfloat16(),
        "tiny": torch.randn(3).to(torch.float8_e4m3fn),
        "scalar": torch.tensor(7),
        "empty": torch.empty(0, 4),
        "größe.重み": torch.arange(9, dtype=torch.int16),
        "mask": torch.arange(10) > 4,
    }


def assert_same_tensors(found: dict[str, Any], expected: dict[str, Any]) -> None:
    import torch

    assert set(found) == set(expected)
    for name, tensor in expected.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape), name
        assert torch.equal(
            found[name].reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8)
        ), name


def test_torch_tensors_come_back_as_such(tmp_path: Path) -> None:
    tensors = torch_tensors()

    write_safetensors(tmp_path / "x", tensors)

    assert_same_tensors(read_safetensors(tmp_path / "x", returns=Returns.TORCH), tensors)


def test_a_dtype_that_numpy_lacks_is_passed_on_as_bytes(tmp_path: Path) -> None:
    data = np.frombuffer(pattern(400_000, 1), np.uint8)
    with SafetensorsWriter(tmp_path / "x", {"w": ("BF16", (200_000,))}) as writer:
        writer.write({"w": Description("BF16", (200_000,), describe(data).memory)})

    with SafetensorsFile(tmp_path / "x") as file:
        found = file.read(["w"])["w"]

    assert (found.code, found.shape) == ("BF16", (200_000,))
    assert np.asarray(found).tobytes() == data.tobytes()


def test_the_safetensors_package_reads_what_we_write(tmp_path: Path) -> None:
    theirs = pytest.importorskip("safetensors", reason="the safetensors package is not installed")
    tensors = torch_tensors()
    write_safetensors(tmp_path / "x", tensors, {"format": "pt", "größe": "ü"})

    with theirs.safe_open(tmp_path / "x", "pt") as file:
        assert file.metadata() == {"format": "pt", "größe": "ü"}
        assert_same_tensors({name: file.get_tensor(name) for name in file.keys()}, tensors)  # noqa: SIM118


def test_we_read_what_the_safetensors_package_writes(tmp_path: Path) -> None:
    pytest.importorskip("safetensors", reason="the safetensors package is not installed")
    tensors = torch_tensors()
    from safetensors.torch import save_file

    save_file(tensors, tmp_path / "x", {"format": "pt", "größe": "ü"})

    assert_same_tensors(read_safetensors(tmp_path / "x", returns=Returns.TORCH), tensors)
    assert safetensors_header(tmp_path / "x").metadata == {"format": "pt", "größe": "ü"}


def test_both_agree_on_no_tensors_and_no_metadata(tmp_path: Path) -> None:
    theirs = pytest.importorskip(
        "safetensors.numpy", reason="the safetensors package is not installed"
    )
    write_safetensors(tmp_path / "ours", {})
    theirs.save_file({}, tmp_path / "theirs")

    assert theirs.load_file(tmp_path / "ours") == {}
    assert read_safetensors(tmp_path / "theirs") == {}


# --- names and permissions ------------------------------------------------------------------------


@pytest.mark.parametrize("mode", [0o600, 0o640, 0o666])
def test_a_file_that_is_replaced_keeps_its_permissions(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "x"
    write_safetensors(path, {"w": np.zeros(3)})
    path.chmod(mode)

    write_safetensors(path, {"w": np.ones(3)})

    assert stat.S_IMODE(path.stat().st_mode) == mode


def test_while_it_is_written_a_file_is_not_readable_by_more_than_before(tmp_path: Path) -> None:
    path = tmp_path / "x"
    write_safetensors(path, {"w": np.zeros(3)})
    path.chmod(0o600)

    with SafetensorsWriter(path, {"w": ("F64", (3,))}) as writer:
        [draft] = [each for each in tmp_path.iterdir() if each != path]
        assert stat.S_IMODE(draft.stat().st_mode) == 0o600
        writer.write({"w": describe(np.ones(3))})


@pytest.mark.parametrize("moment", ["before", "after"])
def test_header_and_tensors_are_of_one_file_whenever_somebody_replaces_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    """Here in the moment before it is opened for its tensors, or after."""
    path = tmp_path / "x"
    versions = {
        "after": {"first": np.full(LARGE, 1.0)},
        "before": {"second": np.full(7, 2, np.int8)},
    }
    write_safetensors(path, versions["after"])
    opening = IOQueue.open

    def replaced(queue: IOQueue, name: Any, *rest: Any, **options: Any) -> Any:
        if Path(name) != path:
            return opening(queue, name, *rest, **options)
        monkeypatch.undo()
        file = opening(queue, name, *rest, **options) if moment == "after" else None
        write_safetensors(path, versions["before"])
        return file or opening(queue, name, *rest, **options)

    monkeypatch.setattr(IOQueue, "open", replaced)

    assert_same(read_safetensors(path, returns=Returns.NUMPY), versions[moment])
    assert list(safetensors_header(path).tensors) == ["second"]


@pytest.mark.parametrize("count", [3, 3000])
def test_headers_of_every_length_are_read(tmp_path: Path, count: int) -> None:
    tensors = {
        f"a rather long name of the tensor {index}": np.array(index) for index in range(count)
    }
    write_safetensors(tmp_path / "x", tensors)

    assert_same(read_safetensors(tmp_path / "x", returns=Returns.NUMPY), tensors)


def test_a_queue_that_raises_when_it_is_full_is_waited_for(
    tmp_path: Path, mixed: dict[str, Any]
) -> None:
    with IOQueue("threads", max_pending=1, when_full=WhenFull.RAISE) as queue:
        write_safetensors(tmp_path / "x", mixed, queue=queue)

        assert_same(read_safetensors(tmp_path / "x", returns=Returns.NUMPY, queue=queue), mixed)
