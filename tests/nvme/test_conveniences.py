"""What users expect beside the core: sizes as text, one path for a list, modes, read(), hot files."""

from __future__ import annotations

import asyncio
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import deepnvme
from deepnvme import (
    IOQueue,
    Member,
    PageStock,
    Pool,
    Returns,
    SafetensorsError,
    TensorStore,
    Volume,
    map_safetensors,
    write_safetensors,
)
from deepnvme.memory import arrays
from deepnvme.memory.buffers import torch_of
from support.nvme_io import TIMEOUT_S

ROOT = Path(__file__).resolve().parents[2]
MIB = 1 << 20


# --- sizes as text -----------------------------------------------------------------------------


def test_memory_is_asked_for_by_text() -> None:
    assert Pool("2MiB").capacity >= 2 * MIB
    assert Pool("2MiB").buffer("4KiB").nbytes == 4096
    assert PageStock().take("1MiB", keep="1MiB").nbytes == MIB


def test_files_and_queues_take_sizes_as_text(tmp_path: Path) -> None:
    with IOQueue("threads", chunk_bytes="128KiB", inflight_bytes="1MiB") as queue:
        assert queue.settings_for(tmp_path).chunk_bytes == 128 << 10
        with queue.open(tmp_path / "f", "w", size="1MiB") as file:
            file.truncate("8KiB")
            assert file.size == 8192
            file.preallocate("64KiB")


def test_stores_and_volumes_take_sizes_as_text(tmp_path: Path) -> None:
    with Volume.create(Member(tmp_path / "v", capacity="1MiB")) as volume:
        volume.grow("1MiB")
        assert sum(volume.capacities) == 2 * MIB
    with TensorStore.swap(tmp_path, "1MiB") as store:
        store.put("a", b"x")
        store.prefetch(["a"], most_bytes="1MiB")
    deepnvme.save({"a": 1}, tmp_path / "s", capacity="1MiB")
    assert deepnvme.load(tmp_path / "s") == {"a": 1}


@pytest.mark.parametrize(
    "ask",
    [
        lambda folder: Pool("64MB"),
        lambda folder: TensorStore.swap(folder, "much"),
        lambda folder: IOQueue("threads", chunk_bytes="1 mib"),
    ],
)
def test_a_text_that_names_no_size_is_refused(ask: Callable[[Path], Any], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="a whole number and one of TiB"):
        ask(tmp_path)


# --- one path for a list of directories --------------------------------------------------------


@pytest.mark.parametrize("as_given", [str, Path, Member])
def test_one_directory_stands_for_a_list_of_one(
    as_given: Callable[[Path], Any], tmp_path: Path
) -> None:
    place = tmp_path / "store"
    with TensorStore.create(as_given(place), MIB) as store:
        store.put("a", b"kept")
        store.commit()
    with TensorStore.open(as_given(place), returns=Returns.BYTES) as store:
        assert bytes(store.get("a")) == b"kept"


# --- files -------------------------------------------------------------------------------------


def test_the_modes_of_python_open_files(tmp_path: Path) -> None:
    with IOQueue("threads") as queue:
        for mode in ("xb", "wb", "r+b", "rb+", "rb"):
            with queue.open(tmp_path / "f", mode) as file:
                if mode != "rb":
                    file.pwrite(mode.encode()).result(TIMEOUT_S)
        with pytest.raises(ValueError, match="mode"):
            queue.open(tmp_path / "f", "bb")  # type: ignore[arg-type]
    assert (tmp_path / "f").read_bytes() == b"rb+"


def test_bytes_are_read_in_one_call(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(bytes(range(256)) * 100)
    with IOQueue("threads") as queue, queue.open(tmp_path / "f", "rb") as file:
        assert bytes(file.read(10, 250)) == bytes([*range(250, 256), 0, 1, 2, 3])
        assert file.read("1MiB").nbytes == 25_600
        assert file.read(10, 25_595).nbytes == 5
        assert file.read(10, 1 << 40).nbytes == 0
        with pytest.raises(ValueError, match="negative"):
            file.read(-1)


# --- copies ------------------------------------------------------------------------------------


def test_a_strided_tensor_is_put_with_copy_alone(tmp_path: Path) -> None:
    strided = torch.arange(600_000).reshape(600, 1000).T.to(torch.bfloat16)[::3]
    with TensorStore.swap(tmp_path, "8MiB", returns=Returns.TORCH) as store:
        with pytest.raises(ValueError, match="contiguous"):
            store.put("a", strided)
        store.put("a", strided, copy=True)
        store.put_many({"b": strided[:5]}, copy=True)
        store.put_async("c", strided[5:9], copy=True).result(TIMEOUT_S)

        assert torch.equal(store.get("a"), strided)
        assert torch.equal(store.get("b"), strided[:5])
        assert torch.equal(store.get("c"), strided[5:9])


class OnDevice:
    """A tensor of a GPU, as far as the store looks at it; `cpu` copies it to the host."""

    layout, device = torch.strided, torch.device("cuda")

    def __init__(self, values: torch.Tensor) -> None:
        self._values = values
        self.shape, self.nbytes = values.shape, values.nbytes

    def detach(self) -> OnDevice:
        return self

    def cpu(self) -> torch.Tensor:
        return self._values.clone()


def test_a_tensor_on_a_device_is_copied_to_the_host_and_put(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensor_code = arrays._tensor_code
    monkeypatch.setattr(
        arrays, "torch_of", lambda thing: torch if type(thing) is OnDevice else torch_of(thing)
    )
    monkeypatch.setattr(
        arrays,
        "_tensor_code",
        lambda thing, torch: "F32" if type(thing) is OnDevice else tensor_code(thing, torch),
    )
    values = torch.arange(300_000, dtype=torch.float32)
    with TensorStore.swap(tmp_path, "8MiB", returns=Returns.TORCH) as store:
        with pytest.raises(TypeError):
            store.put("a", OnDevice(values))
        store.put("a", OnDevice(values), copy=True)
        store.put_many({"b": OnDevice(values[:7])}, copy=True)
        store.put_async("c", OnDevice(values[7:99].reshape(23, 4)), copy=True).result(TIMEOUT_S)

        assert torch.equal(store.get("a"), values)
        assert torch.equal(store.get("b"), values[:7])
        assert torch.equal(store.get("c"), values[7:99].reshape(23, 4))


def test_strided_and_plain_tensors_that_wait_are_put_together(tmp_path: Path) -> None:
    async def put(store: TensorStore) -> None:
        await asyncio.gather(
            *(store.put_async(f"s{i}", np.arange(40)[::2] + i, copy=True) for i in range(9)),
            *(store.put_async(f"p{i}", np.arange(20) + i) for i in range(9)),
        )

    with TensorStore.swap(tmp_path, "8MiB", returns=Returns.NUMPY) as store:
        asyncio.run(put(store))
        assert (store.get("s3") == np.arange(40)[::2] + 3).all()
        assert (store.get("p8") == np.arange(20) + 8).all()


# --- hot safetensors ---------------------------------------------------------------------------


@pytest.fixture
def hot(tmp_path: Path) -> Path:
    tensors = {
        "large": np.arange(100_000, dtype=np.float32).reshape(100, 1000),
        "odd": np.arange(3, dtype=np.uint8),
        "empty": np.zeros((0, 4), np.int64),
        "small": np.arange(5, dtype=np.int16),
    }
    write_safetensors(tmp_path / "hot.safetensors", tensors)
    return tmp_path / "hot.safetensors"


def test_a_mapped_file_has_the_tensors_of_the_file(hot: Path) -> None:
    found = map_safetensors(hot, returns=Returns.NUMPY)
    read = deepnvme.read_safetensors(hot, returns=Returns.NUMPY)

    assert found.keys() == read.keys()
    for name, tensor in read.items():
        assert found[name].dtype == tensor.dtype
        assert found[name].shape == tensor.shape
        assert (found[name] == tensor).all()


def test_mapped_tensors_are_torchs_where_asked_and_some_where_named(hot: Path) -> None:
    found = map_safetensors(hot, ["large"], returns=Returns.TORCH)

    assert list(found) == ["large"]
    assert torch.equal(found["large"][3, :4], torch.tensor([3000.0, 3001.0, 3002.0, 3003.0]))


def test_what_is_written_to_a_mapped_tensor_does_not_reach_the_file(hot: Path) -> None:
    before = hot.read_bytes()
    map_safetensors(hot, returns=Returns.NUMPY)["large"][:] = 0

    assert hot.read_bytes() == before


def test_a_mapped_file_is_checked_like_one_that_is_read(hot: Path, tmp_path: Path) -> None:
    (tmp_path / "cut").write_bytes(hot.read_bytes()[:-1])

    with pytest.raises(SafetensorsError, match="cut off"):
        map_safetensors(tmp_path / "cut")
    with pytest.raises(KeyError, match="gone"):
        map_safetensors(hot, ["gone"])


# --- the example -------------------------------------------------------------------------------


def test_the_example_of_a_kv_cache_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    example = ROOT / "scripts" / "examples" / "kv_cache.py"
    monkeypatch.setattr(sys, "argv", [str(example), str(tmp_path)])
    runpy.run_path(str(example), run_name="__main__")

    assert "all came back as they were" in capsys.readouterr().out
