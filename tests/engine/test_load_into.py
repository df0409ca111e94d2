"""A model on the meta device is filled from files by way of the drives; what does not fit together
is named.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from deepnvme import FaultPlan, IOQueue, Requests, write_safetensors
from infinity_engine.building.built import built_model_of
from infinity_engine.compact import CompactKind, CompactLinear
from infinity_engine.engine.init_context import load_into
from infinity_engine.errors import CapacityError, ConfigError, TransferError
from infinity_engine.plan import Budget
from infinity_engine.storage import swapfile
from support.interrupts import interrupted_at
from support.nvme_programs import output_of, run_program
from support.unnamed_files import unnamed_files
from support.warm_programs import WITH_SUPPORT


class Model(nn.Module):
    """Has tied weights, buffers, and parameters of several kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(300, 70)
        self.layers = nn.ModuleList(nn.Linear(70, 70) for _ in range(3))
        self.norm = nn.BatchNorm1d(70)
        self.head = nn.Linear(70, 300, bias=False)
        self.head.weight = self.embed.weight
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.empty = nn.Parameter(torch.zeros(0, 3), requires_grad=False)
        self.halved = nn.Parameter(torch.randn(9000).to(torch.bfloat16), requires_grad=False)


def values() -> dict[str, torch.Tensor]:
    torch.manual_seed(3)
    return {name: tensor.clone() for name, tensor in Model().state_dict().items()}


def on_meta(make: Callable[[], nn.Module] = Model) -> Any:
    with torch.device("meta"):
        return make()


@pytest.fixture
def drive(tmp_path: Path) -> Path:
    path = tmp_path / "drive"
    path.mkdir()
    return path


def budget(drive: Path, *, nvme: str = "64MiB", host: str = "128MiB") -> Budget:
    return Budget(host=host, nvme={str(drive): nvme})


def written(folder: Path, *shards: Mapping[str, torch.Tensor]) -> Path:
    """Return a directory with these files, and an index where there are several."""
    folder.mkdir(exist_ok=True)
    index = {}
    for number, shard in enumerate(shards):
        file = f"model-{number}.safetensors"
        write_safetensors(folder / file, shard)
        index.update(dict.fromkeys(shard, file))
    if len(shards) > 1:
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    return folder


def without(state: Mapping[str, torch.Tensor], *names: str) -> dict[str, torch.Tensor]:
    return {name: tensor for name, tensor in state.items() if name not in names}


def test_the_values_of_the_files_are_those_of_the_model(tmp_path: Path, drive: Path) -> None:
    state = without(values(), "head.weight")
    names = sorted(state)
    folder = written(
        tmp_path / "files", *({name: state[name] for name in names[i::3]} for i in range(3))
    )
    model = on_meta()
    parameters = [*model.parameters()]

    built = load_into(model, folder, budget(drive))

    assert built_model_of(model) is built
    assert [id(each) for each in model.parameters()] == [id(each) for each in parameters]
    assert model.head.weight is model.embed.weight
    assert not model.empty.requires_grad
    for name, parameter in model.named_parameters():
        assert (parameter.device.type, parameter.dtype) == ("cpu", state[name].dtype)
        assert torch.equal(
            built.piece(parameter, 0, parameter.numel()).view(parameter.shape), state[name]
        )
    assert built.is_absent(model.halved)
    assert model.scale == 2
    built.whole()
    assert all(torch.equal(tensor, values()[name]) for name, tensor in model.state_dict().items())
    assert unnamed_files(drive) == []


def test_a_number_is_converted_where_the_model_has_another_dtype(
    tmp_path: Path, drive: Path
) -> None:
    state = {"weight": torch.randn(3000, 1100), "bias": torch.randn(3000)}
    folder = written(tmp_path / "files", state)
    model = on_meta(lambda: nn.Linear(1100, 3000, dtype=torch.bfloat16))

    built = load_into(model, folder, budget(drive))

    assert torch.equal(built.piece(model.weight, 0, 3_300_000), state["weight"].bfloat16().view(-1))
    built.close()


def test_a_buffer_outside_of_the_meta_device_is_filled_too(tmp_path: Path, drive: Path) -> None:
    folder = written(tmp_path / "files", {"0.weight": torch.ones(4, 4), "table": torch.arange(5.0)})
    model = on_meta(lambda: nn.Sequential(nn.Linear(4, 4, bias=False)))
    model.register_buffer("table", torch.zeros(5))
    model.register_buffer("own", torch.ones(5), persistent=False)

    built = load_into(model, folder, budget(drive))

    assert torch.equal(model.table, torch.arange(5.0))
    assert torch.equal(model.own, torch.ones(5))
    built.close()


def test_what_belongs_to_a_parameter_stays_with_it(tmp_path: Path, drive: Path) -> None:
    folder = written(tmp_path / "files", {"weight": torch.ones(4, 4)})
    model = on_meta(lambda: nn.Linear(4, 4, bias=False))
    model.weight.note = "mine"

    built = load_into(model, folder, budget(drive))

    assert model.weight.note == "mine"
    built.close()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda state: without(state, "layers.1.bias", "scale"), "2 missing: scale, layers.1.bias"),
        (lambda state: without(state, "head.weight", "embed.weight"), "1 missing: embed.weight"),
        (lambda state: {**state, "more": torch.ones(1)}, "1 that the model does not have: more"),
        (lambda state: {**state, "scale": torch.ones(1)}, r"scale in .*expected the shape \(\)"),
        (
            lambda state: {**state, "halved": torch.ones(90, 100)},
            r"halved in .*expected the shape \(9000,\)",
        ),
        (
            lambda state: {**state, "norm.num_batches_tracked": torch.tensor(1.5)},
            r"num_batches_tracked in .*expected a dtype that torch converts to torch\.int64.*got torch\.float32",
        ),
    ],
)
def test_files_of_another_model_are_refused(
    change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]],
    said: str,
    tmp_path: Path,
    drive: Path,
) -> None:
    folder = written(tmp_path / "files", change(values()))
    model = on_meta()

    with pytest.raises(ConfigError, match=said):
        load_into(model, folder, budget(drive))

    assert all(parameter.is_meta for parameter in model.parameters())
    assert unnamed_files(drive) == []


def test_a_directory_without_files_is_refused(tmp_path: Path, drive: Path) -> None:
    with pytest.raises(ConfigError, match=r"one with \.safetensors files"):
        load_into(on_meta(), tmp_path, budget(drive))


def test_a_name_in_two_files_is_refused(tmp_path: Path, drive: Path) -> None:
    folder = written(tmp_path / "files", values(), values())
    (folder / "model.safetensors.index.json").unlink()

    with pytest.raises(
        ConfigError, match=r"both model-0\.safetensors and model-1\.safetensors have this one"
    ):
        load_into(on_meta(), folder, budget(drive))


@pytest.mark.parametrize(
    ("file", "said"),
    [("model-0.safetensors", "a safetensors file"), ("x.safetensors.index.json", "weight_map")],
)
def test_a_damaged_file_is_named(file: str, said: str, tmp_path: Path, drive: Path) -> None:
    folder = written(tmp_path / "files", values())
    (folder / file).write_bytes(b"damaged")

    with pytest.raises(ConfigError, match=f"{file}.*|{said}") as refused:
        load_into(on_meta(), folder, budget(drive))

    assert file in str(refused.value)
    assert said in str(refused.value)


@pytest.mark.timeout(20)
@pytest.mark.parametrize("file", ["model-0.safetensors", "model.safetensors.index.json"])
def test_a_pipe_is_refused_as_a_file_unopened(file: str, tmp_path: Path, drive: Path) -> None:
    folder = written(tmp_path / "files", values())
    (folder / file).unlink(missing_ok=True)
    os.mkfifo(folder / file)

    with pytest.raises(ConfigError, match=f"{file}.*|not a regular file") as refused:
        load_into(on_meta(), folder, budget(drive))

    assert file in str(refused.value)
    assert "not a regular file" in str(refused.value)


def test_a_model_that_has_values_is_refused(tmp_path: Path, drive: Path) -> None:
    with pytest.raises(ConfigError, match="on the meta device: build the model under"):
        load_into(Model(), written(tmp_path / "files", values()), budget(drive))


def test_a_buffer_that_no_file_can_have_is_refused(tmp_path: Path, drive: Path) -> None:
    model = on_meta()
    model.register_buffer("own", torch.empty(5, device="meta"), persistent=False)
    model.norm.register_buffer("angles", torch.empty(5, device="meta"), persistent=False)

    with pytest.raises(
        ConfigError,
        match=r"buffer own, norm\.angles: .*not persistent.*include_buffers=False.*again",
    ):
        load_into(model, written(tmp_path / "files", values()), budget(drive))


def test_a_parameter_that_no_file_can_have_is_refused(tmp_path: Path, drive: Path) -> None:
    model = on_meta(lambda: nn.Sequential(CompactLinear(8, 8, kind=CompactKind.INT8)))
    folder = written(tmp_path / "files", {"0.weight": torch.zeros(8, 8, dtype=torch.int8)})

    with pytest.raises(ConfigError, match=r"parameter 0\.values: .*state dict.*init_context"):
        load_into(model, folder, budget(drive))


class Rotary(nn.Module):
    """Has a buffer that no file has."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("angles", torch.arange(5.0), persistent=False)


def test_a_module_made_again_off_the_meta_device_brings_its_buffers(
    tmp_path: Path, drive: Path
) -> None:
    folder = written(tmp_path / "files", {"0.weight": torch.ones(4, 4)})
    model = on_meta(lambda: nn.Sequential(nn.Linear(4, 4, bias=False), Rotary()))
    model[1] = Rotary()

    built = load_into(model, folder, budget(drive))

    assert torch.equal(model[1].angles, torch.arange(5.0))
    built.close()


def test_drives_without_room_leave_the_model_as_it_was(tmp_path: Path, drive: Path) -> None:
    folder = written(tmp_path / "files", {"weight": torch.ones(1000, 1000)})
    model = on_meta(lambda: nn.Linear(1000, 1000, bias=False))

    with pytest.raises(CapacityError, match="raise the budget's nvme"):
        load_into(model, folder, budget(drive, nvme="2MiB"))

    assert model.weight.is_meta
    assert unnamed_files(drive) == []


def test_a_parameter_that_cannot_be_given_values_leaves_the_model_as_it_was(
    tmp_path: Path, drive: Path
) -> None:
    model = on_meta()
    names = [name for name, _ in model.named_parameters()]
    alias = model.norm.weight.view(-1)  # torch cannot exchange what has views

    with pytest.raises(RuntimeError, match="use_count"):
        load_into(model, written(tmp_path / "files", values()), budget(drive))

    assert alias.is_meta
    assert [name for name, _ in model.named_parameters()] == names
    assert all(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))
    assert unnamed_files(drive) == []


@pytest.mark.parametrize("requests", [Requests.READS, Requests.WRITES])
def test_a_drive_that_fails_is_told_and_the_model_is_as_it_was(
    requests: Requests, tmp_path: Path, drive: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = written(tmp_path / "files", without(values(), "head.weight"))
    plan = FaultPlan().fail(nth=3, requests=requests)
    monkeypatch.setattr(swapfile, "IOQueue", lambda: IOQueue(faults=plan))
    model = on_meta()

    with pytest.raises(TransferError, match="errno 5"):
        load_into(model, folder, budget(drive))

    assert all(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))
    assert unnamed_files(drive) == []


def test_a_loading_that_is_interrupted_has_filled_the_model_or_left_it_as_it_was(
    tmp_path: Path, drive: Path
) -> None:
    folder, found = written(tmp_path / "files", values()), []
    for line in range(1, 3000, 23):
        model = on_meta()
        with interrupted_at(
            line, ("building/loading.py", "building/built_parameters.py", "building/built.py")
        ) as told:
            load_into(model, folder, budget(drive))

        found.append({each.is_meta for each in (*model.parameters(), *model.buffers())})
        if False in found[-1]:
            built = built_model_of(model)
            assert built is not None
            built.whole()
            assert torch.equal(model.halved, values()["halved"])
        assert unnamed_files(drive) == []
        if not told[0]:
            break

    assert not told[0]
    assert {True} in found
    assert all(len(each) == 1 for each in found)


LARGER = """
import torch
from torch import nn
from deepnvme import write_safetensors
from infinity_engine.engine.init_context import load_into
from support.resident_memory import ResidentMemory

for number in range(8):
    write_safetensors(f"{number}.safetensors", {f"{number}.weight": torch.rand(8 << 20).view(2048, 4096)})
with torch.device("meta"):
    model = nn.Sequential(*(nn.Linear(4096, 2048, bias=False, dtype=torch.float32) for _ in range(8)))
import ctypes; ctypes.CDLL(None).malloc_trim(0)
resident = ResidentMemory()
peaks = open("/proc/self/clear_refs", "w"); peaks.write("5"); peaks.close()
built = load_into(model, ".", {"host": "100MiB", "nvme": {".": "1GiB"}})
print((resident.peak_bytes() - resident.baseline_bytes) >> 20)
"""


def test_a_model_larger_than_the_budget_is_never_in_memory(tmp_path: Path) -> None:
    rise = int(output_of(run_program(LARGER, folder=tmp_path, environment=WITH_SUPPORT)))

    assert rise < 100
