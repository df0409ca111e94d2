"""Weights leave a checkpoint as files that other libraries read."""

from __future__ import annotations

import errno
import json
import re
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import pytest

from deepnvme import FaultPlan, IOQueue, Requests
from infinity_engine.checkpoint import CheckpointReader, Kind
from infinity_engine.checkpoint.export import Dtype, export
from infinity_engine.checkpoint.rounding import converted
from infinity_engine.errors import CheckpointError, ConfigError, TransferError
from support.saved_streams import parameters_of, save, values_of

if TYPE_CHECKING:
    import torch
else:
    torch = pytest.importorskip("torch")
load_file = pytest.importorskip("safetensors.torch").load_file

SPECIAL = np.array(
    [
        0.0,
        -0.0,
        1.0,
        1.00390625,
        1.01171875,
        3.4e38,
        -3.4e38,
        np.inf,
        -np.inf,
        np.nan,
        1e-40,
        65519.9,
        65520.0,
        6e-8,
    ],
    np.float32,
)


def exported(tmp_path: Path, values: npt.NDArray[np.float32], dtype: Dtype) -> torch.Tensor:
    parameters = parameters_of({"weight": values.shape})
    streams = values_of(parameters)
    path = save(
        tmp_path / "c", "tag", parameters, {**streams, ("weight", "master"): values.reshape(-1)}
    )
    with CheckpointReader(path) as reader:
        export(reader, tmp_path / "out", dtype=dtype)
    found: torch.Tensor = load_file(tmp_path / "out" / "model.safetensors")["weight"]
    return found


@pytest.mark.parametrize(
    ("dtype", "want"),
    [
        (Dtype.AS_COMPUTED, torch.bfloat16),
        (Dtype.BF16, torch.bfloat16),
        (Dtype.FP16, torch.float16),
        (Dtype.FP32, torch.float32),
    ],
)
def test_masters_are_rounded_as_torch_rounds_them(
    tmp_path: Path, dtype: Dtype, want: torch.dtype
) -> None:
    values = np.concatenate(
        [SPECIAL, np.random.default_rng(0).standard_normal(5_000_000, np.float32)]
    )
    found = exported(tmp_path, values, dtype)
    expected = torch.from_numpy(values).to(want)
    assert found.dtype is want
    assert torch.equal(found.nan_to_num(7), expected.nan_to_num(7))
    assert torch.equal(found.isnan(), expected.isnan())


def test_large_models_are_written_in_shards_with_an_index(tmp_path: Path) -> None:
    parameters = parameters_of({f"layer.{number}": (100, 50) for number in range(5)})
    values = values_of(parameters)
    path = save(tmp_path / "c", "tag", parameters, values)
    with CheckpointReader(path) as reader:
        files = export(reader, tmp_path / "out", dtype=Dtype.FP32, shard_bytes=45_000)
    assert [file.name for file in files][-1] == "model.safetensors.index.json"
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == 5 * 20_000
    assert sorted(set(index["weight_map"].values())) == [
        f"model-0000{n}-of-00003.safetensors" for n in (1, 2, 3)
    ]
    for name, file in index["weight_map"].items():
        found = load_file(tmp_path / "out" / file)[name]
        assert np.array_equal(found.numpy().reshape(-1), values[name, "master"])


def test_frozen_weights_and_buffers_keep_their_dtype_and_transient_buffers_stay_behind(
    tmp_path: Path,
) -> None:
    trained, *others = parameters_of(
        {"trained": (4,), "frozen": (6,), "buffer": (3,), "transient": (2,)}
    )
    kinds = [Kind.FROZEN, Kind.BUFFER, Kind.TRANSIENT]
    kept = [
        replace(tensor, kind=kind, dtype="F32", streams={"value": "F32"})
        for tensor, kind in zip(others, kinds, strict=True)
    ]
    path = save(tmp_path / "c", "tag", [trained, *kept], values_of([trained, *kept]))
    with CheckpointReader(path) as reader:
        export(reader, tmp_path / "out", dtype=Dtype.BF16)
        export(reader, tmp_path / "adapters", trainable_only=True)
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert {name: tensor.dtype for name, tensor in found.items()} == {
        "trained": torch.bfloat16,
        "frozen": torch.bfloat16,
        "buffer": torch.float32,
    }
    assert list(load_file(tmp_path / "adapters" / "model.safetensors")) == ["trained"]


def test_weights_that_are_there_already_are_left_alone(tmp_path: Path) -> None:
    parameters = parameters_of({"weight": (4,)})
    path = save(tmp_path / "c", "tag", parameters, values_of(parameters))
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "model.safetensors").write_bytes(b"mine")
    with CheckpointReader(path) as reader, pytest.raises(ConfigError, match=r"model\.safetensors"):
        export(reader, tmp_path / "out")
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == b"mine"


def test_fp64_is_rounded_once_to_nearest_even() -> None:
    random = np.random.default_rng(0)
    ties = np.array([1 + 2**-8 + 2**-40, 1 + 2**-8 - 2**-40, 1 + 2**-8, 1 + 3 * 2**-8, -1 - 2**-8])
    values = np.concatenate([ties, random.standard_normal(10_000), SPECIAL.astype(np.float64)])
    found = converted(values.view(np.uint8), "F64", "BF16").view(np.uint16)
    for value, bits in zip(values, found.tolist(), strict=True):
        got = (np.array([bits], np.uint32) << 16).view(np.float32)[0]
        if not np.isfinite(got):
            assert np.isnan(value) == np.isnan(got)
            continue
        below, above = (
            (np.array([near], np.uint32) << 16).view(np.float32)[0]
            for near in (max(bits - 1, 0), bits + 1)
        )
        distance = abs(float(got) - value)
        for other in (below, above):
            if np.isfinite(other):
                away = abs(float(other) - value)
                assert distance < away or (distance == away and bits % 2 == 0)


def test_a_failed_export_leaves_no_files(tmp_path: Path) -> None:
    parameters = parameters_of({f"layer.{number}": (100, 50) for number in range(5)})
    path = save(tmp_path / "c", "tag", parameters, values_of(parameters))
    shard = path / "rank-00000-00000.safetensors"
    data = bytearray(shard.read_bytes())
    data[-30_000] ^= 1
    shard.write_bytes(data)
    with CheckpointReader(path) as reader, pytest.raises(CheckpointError, match=shard.name):
        export(reader, tmp_path / "out", dtype=Dtype.FP32, shard_bytes=45_000)
    assert list((tmp_path / "out").iterdir()) == []


@pytest.mark.parametrize("nth", [1, 2])
def test_a_drive_that_fails_in_an_export_is_a_transfer_error(tmp_path: Path, nth: int) -> None:
    parameters = parameters_of({"weight": (100, 50)})
    path, out = save(tmp_path / "c", "tag", parameters, values_of(parameters)), tmp_path / "out"
    faults = FaultPlan().fail(nth=nth, requests=Requests.WRITES, errno=errno.ENOSPC)
    with (
        CheckpointReader(path) as reader,
        IOQueue(faults=faults) as queue,
        pytest.raises(TransferError, match=re.escape(f"weights for {out}")) as error,
    ):
        export(reader, out, queue=queue)
    assert error.value.errno == errno.ENOSPC
    assert list(out.iterdir()) == []


KILLED = """
import os, signal, sys
from itertools import count
from pathlib import Path
from infinity_engine.checkpoint import CheckpointReader, export as module

owner = Path if sys.argv[3] == "replace" else module
does, calls = getattr(owner, sys.argv[3]), count()

def dies(*arguments):
    if next(calls) == int(sys.argv[4]):
        os.kill(os.getpid(), signal.SIGKILL)
    return does(*arguments)

setattr(owner, sys.argv[3], dies)
with CheckpointReader(sys.argv[1]) as reader:
    module.export(reader, Path(sys.argv[2]), dtype=module.Dtype.FP32, shard_bytes=45_000)
"""


@pytest.mark.parametrize(
    ("call", "nth"),
    [("_write_shard", 1), ("_write_index", 0), *(("replace", nth) for nth in range(7))],
)
def test_an_export_that_was_killed_is_repeated(tmp_path: Path, call: str, nth: int) -> None:
    parameters = parameters_of({f"layer.{number}": (100, 50) for number in range(5)})
    values = values_of(parameters)
    path, out = save(tmp_path / "c", "tag", parameters, values), tmp_path / "out"
    out.mkdir()
    (out / "config.json").write_text("mine")
    command = [sys.executable, "-c", KILLED, str(path), str(out), call, str(nth)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr
    with CheckpointReader(path) as reader:
        files = export(reader, out, dtype=Dtype.FP32, shard_bytes=30_000)
    assert sorted(entry.name for entry in out.iterdir()) == sorted(
        ["config.json", *(file.name for file in files)]
    )
    index = json.loads(files[-1].read_text())
    for name, file in index["weight_map"].items():
        assert np.array_equal(load_file(out / file)[name].reshape(-1), values[name, "master"])


def test_an_index_that_a_killed_export_did_not_write_removes_nothing(tmp_path: Path) -> None:
    parameters = parameters_of({"weight": (4,)})
    path = save(tmp_path / "c", "tag", parameters, values_of(parameters))
    out = tmp_path / "out"
    (out / ".export.writing").mkdir(parents=True)
    (tmp_path / "mine.safetensors").write_bytes(b"mine")
    index = {"weight_map": {"weight": "../mine.safetensors"}}
    (out / ".export.writing" / "model.safetensors.index.json").write_text(json.dumps(index))
    with CheckpointReader(path) as reader:
        export(reader, out)
    assert (tmp_path / "mine.safetensors").read_bytes() == b"mine"
    assert [entry.name for entry in out.iterdir()] == ["model.safetensors"]
