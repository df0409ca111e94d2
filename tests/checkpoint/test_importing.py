"""What other libraries saved becomes a checkpoint with the same bits; nothing of it is executed."""

from __future__ import annotations

import io
import os
import pickle
import random
import subprocess
import sys
import warnings
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from infinity_engine.checkpoint import CheckpointDirectory, CheckpointReader, Kind
from infinity_engine.checkpoint.exchange.origins import open_foreign
from infinity_engine.checkpoint.exchange.torch_files import OpenFiles
from infinity_engine.checkpoint.objects import read_objects
from infinity_engine.checkpoint.rewriting import import_foreign
from infinity_engine.cli.main import main
from infinity_engine.errors import (
    CheckpointError,
    DamagedCheckpoint,
    IncompleteCheckpoint,
    UnsupportedCheckpoint,
)

if TYPE_CHECKING:
    import torch
else:
    torch = pytest.importorskip("torch")

from support.foreign_checkpoints import STREAMS, TAG, Saved, save_universal, save_zero
from support.ranks import launched
from support.warm_programs import WITH_SUPPORT


def imported(path: Path, to: Path, **more: Any) -> tuple[Path, tuple[str, ...]]:
    """Import a checkpoint; return where it is and what was left behind."""
    with OpenFiles() as files:
        foreign = open_foreign(path, files, **more)
        files.check()
        return import_foreign(foreign, CheckpointDirectory(to), 2), foreign.left_behind


def stream_of(path: Path, name: str, stream: str) -> torch.Tensor:
    with CheckpointReader(path) as reader:
        tensor = reader.manifest.tensor(name)
        raw = np.empty(tensor.numel * (2 if tensor.streams[stream] == "BF16" else 4), np.uint8)
        reader.read(tensor.stream(stream), 0, raw)
    dtype = torch.bfloat16 if tensor.streams[stream] == "BF16" else torch.float32
    return torch.from_numpy(raw).view(dtype).reshape(tensor.shape)


def assert_is(path: Path, saved: Saved) -> None:
    """Check that a checkpoint has all that was saved, bit for bit."""
    for (name, stream), values in saved.streams.items():
        assert torch.equal(stream_of(path, name, stream), values), (name, stream)
    assert torch.equal(stream_of(path, "frozen.weight", "value"), saved.frozen)
    assert torch.equal(stream_of(path, "scale", "value"), saved.scale)
    with CheckpointReader(path) as reader:
        assert list(reader.verify()) == []
        assert reader.manifest.step == 3
        tensors = {tensor.name: tensor for tensor in reader.manifest.tensors}
        objects = read_objects(reader, 0)
    assert tensors["embed.weight"].aliases == ("head.weight",)
    assert tensors["frozen.weight"].kind is Kind.FROZEN
    assert tensors["scale"].kind is Kind.BUFFER
    for name in saved.shapes:
        assert (tensors[name].steps, tuple(tensors[name].streams)) == (3, STREAMS)
        assert tensors[name].dtype == "BF16"
    assert [group["weight_decay"] for group in objects["optimizer_groups"]] == [0.1, 0.0]
    assert objects["optimizer_groups"][0]["betas"] == (0.9, 0.999)


# --- DeepSpeed ------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_zero_checkpoints_keep_their_bits(tmp_path: Path, stage: int, ranks: int) -> None:
    saved = Saved.random()
    path = save_zero(tmp_path / "ds", saved, stage=stage, ranks=ranks)
    found, left = imported(path, tmp_path / "run")
    assert_is(found, saved)
    with CheckpointReader(found) as reader:
        scale = read_objects(reader, 0)["loss_scale"]
    assert scale == {"value": 4096.0, "good_steps": 20}
    named = " ".join(left)
    for expected in ("lr_scheduler", "mine", "random generators", "window of 1000"):
        assert expected in named


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_stages_that_python_pickled_by_name_are_read(tmp_path: Path, stage: int) -> None:
    saved = Saved.random()
    path = save_zero(tmp_path / "ds", saved, stage=stage, ranks=2, by_name=True)
    assert_is(imported(path, tmp_path / "run")[0], saved)


def test_parameters_that_were_aligned_keep_their_bits(tmp_path: Path) -> None:
    saved = Saved.random()
    path = save_zero(tmp_path / "ds", saved, stage=2, ranks=2, alignment=(8, 3))
    assert_is(imported(path, tmp_path / "run")[0], saved)


@pytest.mark.parametrize("flat", [True, False])
def test_universal_checkpoints_keep_their_bits(tmp_path: Path, flat: bool) -> None:
    saved = Saved.random()
    path = save_universal(tmp_path / "ds", saved, flat=flat)
    assert_is(imported(path, tmp_path / "run")[0], saved)


def test_the_directory_of_one_tag_is_imported_too(tmp_path: Path) -> None:
    saved = Saved.random()
    path = save_zero(tmp_path / "ds", saved, stage=3, ranks=2)
    assert_is(imported(path / TAG, tmp_path / "run")[0], saved)


def test_a_missing_rank_is_named(tmp_path: Path) -> None:
    path = save_zero(tmp_path / "ds", Saved.random(), stage=3, ranks=3)
    (path / TAG / "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt").unlink()
    with pytest.raises(IncompleteCheckpoint, match="optimizer states of rank 1"):
        imported(path, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_tensor_parallel_checkpoints_are_refused_with_a_way_out(tmp_path: Path) -> None:
    path = save_zero(tmp_path / "ds", Saved.random(), stage=2, ranks=1)
    (path / TAG / "mp_rank_01_model_states.pt").write_bytes(b"")
    with pytest.raises(UnsupportedCheckpoint, match="ds_to_universal"):
        imported(path, tmp_path / "run")


def test_states_that_stayed_on_nvme_are_refused_with_a_way_out(tmp_path: Path) -> None:
    path = save_zero(tmp_path / "ds", Saved.random(), stage=3, ranks=1)
    file = path / TAG / "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt"
    torch.save(
        {
            "optimizer_state_dict": {
                "zero_stage": 3,
                "partition_count": 1,
                "optimizer_state_dict": {"state": {}, "param_groups": []},
                "fp32_flat_groups": [torch.empty(0), torch.empty(0)],
            }
        },
        file,
    )
    with pytest.raises(UnsupportedCheckpoint, match="stayed on NVMe"):
        imported(path, tmp_path / "run")


# --- DCP and torch.save ---------------------------------------------------------------------------


class Small(torch.nn.Module):
    """Has tied weights and a frozen weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(20, 6)
        self.frozen = torch.nn.Linear(6, 6)
        self.head = torch.nn.Linear(6, 20, bias=False)
        self.head.weight = self.embed.weight
        self.frozen.requires_grad_(False)
        self.bias = torch.nn.Parameter(torch.randn(20))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(self.frozen(self.embed(tokens))) + self.bias
        return logits


def trained() -> tuple[Small, torch.optim.Optimizer, list[str]]:
    """Return a model, its optimizer of two groups, and the names in the optimizer's order."""
    torch.manual_seed(0)
    model = Small()
    groups: list[dict[str, Any]] = [
        {"params": [model.bias], "lr": 0.1},
        {"params": [model.embed.weight]},
    ]
    optimizer = torch.optim.AdamW(groups, lr=0.01)
    for _ in range(3):
        model(torch.arange(5)).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer, ["bias", "embed.weight"]


def assert_is_plain(path: Path, model: Small, optimizer: torch.optim.Optimizer) -> None:
    for name, parameter in {"bias": model.bias, "embed.weight": model.embed.weight}.items():
        assert torch.equal(stream_of(path, name, "master"), parameter.detach())
        for moment in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(stream_of(path, name, moment), optimizer.state[parameter][moment])
    assert torch.equal(stream_of(path, "frozen.weight", "value"), model.frozen.weight)
    with CheckpointReader(path) as reader:
        assert reader.manifest.tensor("bias").steps == 3
        groups = read_objects(reader, 0)["optimizer_groups"]
        assert [group["lr"] for group in groups] == [0.1, 0.01]


def save_dcp(state: Mapping[str, Any], path: Path) -> None:
    dcp = pytest.importorskip("torch.distributed.checkpoint")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(state, checkpoint_id=str(path))


@pytest.mark.parametrize("flat", [True, False])
def test_dcp_checkpoints_keep_their_bits(tmp_path: Path, flat: bool) -> None:
    states = pytest.importorskip("torch.distributed.checkpoint.state_dict")
    model, optimizer, _ = trained()
    options = states.StateDictOptions(flatten_optimizer_state_dict=flat)
    of_model, of_optimizer = states.get_state_dict(model, optimizer, options=options)
    save_dcp({"model": of_model, "optim": of_optimizer, "epoch": 7}, tmp_path / "dcp")
    found, left = imported(tmp_path / "dcp", tmp_path / "run")
    if not flat:
        assert_is_plain(found, model, optimizer)
    else:
        for moment in ("exp_avg", "exp_avg_sq"):
            value = optimizer.state[model.bias][moment]
            assert torch.equal(stream_of(found, "bias", moment), value)
    assert any("epoch" in name for name in left)


def saves_shards(path: Path) -> dict[tuple[str, str], torch.Tensor]:
    """Train and save on ranks that FSDP shards over; return the whole masters and moments."""
    import torch.distributed as dist
    from torch.distributed.checkpoint.state_dict import get_state_dict
    from torch.distributed.checkpoint.state_dict_saver import save
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group("gloo")
    try:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Linear(7, 3))
        fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        for _ in range(3):
            model(torch.randn(4, 5)).pow(2).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        of_model, of_optimizer = get_state_dict(model, optimizer)
        save({"model": of_model, "optim": of_optimizer}, checkpoint_id=str(path))
        streams: dict[tuple[str, str], Any] = {}
        for name, parameter in model.named_parameters():
            state = {"master": parameter.detach(), **optimizer.state[parameter]}
            streams |= {(name, stream): state[stream].full_tensor() for stream in STREAMS}
        return streams
    finally:
        dist.destroy_process_group()


def test_shards_of_fsdp_keep_their_bits(tmp_path: Path) -> None:
    streams, _ = launched(2, saves_shards, tmp_path / "dcp")
    assert len(list((tmp_path / "dcp").glob("*.distcp"))) == 2
    found, _ = imported(tmp_path / "dcp", tmp_path / "run")
    assert len(streams) == 4 * len(STREAMS)
    for (name, stream), values in streams.items():
        assert torch.equal(stream_of(found, name, stream), values), (name, stream)
    with CheckpointReader(found) as reader:
        assert [tensor.steps for tensor in reader.manifest.tensors] == [3] * 4
        assert [group["lr"] for group in read_objects(reader, 0)["optimizer_groups"]] == [0.01]


def test_plain_files_keep_their_bits(tmp_path: Path) -> None:
    model, optimizer, names = trained()
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": 7}
    torch.save(state, tmp_path / "run.pt")
    with pytest.raises(UnsupportedCheckpoint, match="--names FILE"):
        imported(tmp_path / "run.pt", tmp_path / "run")
    found, left = imported(tmp_path / "run.pt", tmp_path / "run", names=names)
    assert_is_plain(found, model, optimizer)
    with CheckpointReader(found) as reader:
        assert reader.manifest.tensor("embed.weight").aliases == ("head.weight",)
    assert any("epoch" in name for name in left)


def test_one_group_of_all_parameters_needs_no_names(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Linear(5, 2))
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.randn(4, 3)).sum().backward()
    optimizer.step()
    wrapped = {f"module.{name}": value for name, value in model.state_dict().items()}
    torch.save({"state_dict": wrapped, "optimizer": optimizer.state_dict()}, tmp_path / "run.pt")
    found, _ = imported(tmp_path / "run.pt", tmp_path / "run")
    value = optimizer.state[list(model.parameters())[2]]["exp_avg"]
    assert torch.equal(stream_of(found, "1.weight", "exp_avg"), value)


def test_tensors_in_strides_and_in_other_dtypes_are_read(tmp_path: Path) -> None:
    model, optimizer, names = trained()
    model.embed.weight.data = model.embed.weight.data.t().contiguous().t()
    model.half()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "f")
    found, _ = imported(tmp_path / "f", tmp_path / "run", names=names)
    expected = model.embed.weight.detach().float()
    assert torch.equal(stream_of(found, "embed.weight", "master"), expected)


class Scaled(torch.nn.Module):
    """Has a parameter without dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.tensor(2.0))
        self.weight = torch.nn.Parameter(torch.randn(3))


@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, torch.optim.NAdam])
@pytest.mark.parametrize("dcp", [False, True])
def test_moments_of_parameters_without_dimensions_go_along(
    tmp_path: Path, optimizer: Any, dcp: bool
) -> None:
    model = Scaled()
    trainer = optimizer(model.parameters())
    # torch has no annotations for it
    (model.weight * model.scale).sum().backward()  # type: ignore[no-untyped-call]
    trainer.step()
    states = {"model": model.state_dict(), "optimizer": trainer.state_dict()}
    path = tmp_path / "saved"
    if dcp:
        save_dcp(states, path)
    else:
        torch.save(states, path)
    found, _ = imported(path, tmp_path / "run")
    for name, parameter in model.named_parameters():
        for moment in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(stream_of(found, name, moment), trainer.state[parameter][moment]), (
                name
            )
    with CheckpointReader(found) as reader:
        for tensor in reader.manifest.tensors:
            assert (tuple(tensor.streams), tensor.steps) == (("master", *STREAMS[1:]), 1)


def test_moments_of_scalars_alone_go_along(tmp_path: Path) -> None:
    model = torch.nn.Module()
    model.register_parameter("scale", torch.nn.Parameter(torch.tensor(2.0)))
    trainer = torch.optim.Adam(model.parameters())
    trainer.param_groups[0]["params"][0].sum().backward()
    trainer.step()
    states = {"model": model.state_dict(), "optimizer": trainer.state_dict()}
    torch.save(states, tmp_path / "run.pt")
    found, left = imported(tmp_path / "run.pt", tmp_path / "run")
    assert float(stream_of(found, "scale", "exp_avg")) == pytest.approx(0.1)
    assert not any("exp_avg" in name for name in left)


def test_a_file_of_weights_alone_is_imported(tmp_path: Path) -> None:
    model, _, _ = trained()
    torch.save(model.state_dict(), tmp_path / "weights.bin")
    found, left = imported(tmp_path / "weights.bin", tmp_path / "run")
    assert torch.equal(stream_of(found, "bias", "value"), model.bias.detach())
    assert any("weights_only=True" in name for name in left)


# --- nothing is executed --------------------------------------------------------------------------


class Malicious:
    """Makes a directory when Python unpickles it."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> tuple[Any, ...]:
        return (os.mkdir, (str(self.file),))


def test_a_pickle_that_runs_code_is_read_as_data(tmp_path: Path) -> None:
    trap = tmp_path / "trap"
    model, optimizer, names = trained()
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    torch.save({**state, "trap": Malicious(trap)}, tmp_path / "run.pt")
    found, left = imported(tmp_path / "run.pt", tmp_path / "run", names=names)
    assert_is_plain(found, model, optimizer)
    assert any("trap" in name for name in left)
    assert not trap.exists()
    torch.load(tmp_path / "run.pt", weights_only=False)
    assert trap.exists()  # the trap would have worked


def test_the_pickle_of_dcp_runs_nothing(tmp_path: Path) -> None:
    trap = tmp_path / "trap"
    save_dcp({"model": {"weight": torch.ones(3)}}, tmp_path / "dcp")
    (tmp_path / "dcp" / ".metadata").write_bytes(pickle.dumps(Malicious(trap)))
    with pytest.raises(DamagedCheckpoint, match="metadata"):
        imported(tmp_path / "dcp", tmp_path / "run")
    assert not trap.exists()


@pytest.mark.parametrize("name", ["../../secret", "/etc/passwd", "a/b"])
def test_dcp_metadata_that_leads_outside_is_refused(tmp_path: Path, name: str) -> None:
    save_dcp({"model": {"weight": torch.ones(3)}}, tmp_path / "dcp")
    [file] = [path.name for path in (tmp_path / "dcp").iterdir() if path.suffix == ".distcp"]
    metadata = pickle.loads((tmp_path / "dcp" / ".metadata").read_bytes())
    for place in metadata.storage_data.values():
        assert place.relative_path == file
        place.relative_path = name
    (tmp_path / "dcp" / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(DamagedCheckpoint, match="plain file name"):
        imported(tmp_path / "dcp", tmp_path / "run")


def test_a_link_in_place_of_a_file_is_refused(tmp_path: Path) -> None:
    path = save_zero(tmp_path / "ds", Saved.random(), stage=2, ranks=1)
    file = path / TAG / "mp_rank_00_model_states.pt"
    file.unlink()
    file.symlink_to("/etc/passwd")
    with pytest.raises(DamagedCheckpoint, match="mp_rank_00_model_states") as refusal:
        imported(path, tmp_path / "run")
    assert "root:" not in str(refusal.value)


def zipped(pickled: bytes, path: Path, method: int = zipfile.ZIP_STORED) -> Path:
    """Write a file as torch.save would, with a pickle of one's own."""
    with zipfile.ZipFile(path, "w", method) as file:
        file.writestr("f/data.pkl", pickled)
        file.writestr("f/version", "3\n")
    return path


HOSTILE = {
    "deep lists": b"\x80\x02" + b"]" * 100_000 + b"a" * 99_999 + b".",
    "no end": b"\x80\x02]",
    "an empty stack": b"\x80\x02a.",
    "a memo that is not there": b"\x80\x02h\x07.",
    "a key in a key": b"\x80\x02})" + b"\x85" * 200 + b"Ns.",
    "an unknown opcode": b"\x80\x02\xff.",
    "an extension": b"\x80\x02\x82\x01.",
    "an absurd length": b"\x80\x02X\xff\xff\xff\x7f.",
    "a number without end": b"\x80\x02I" + b"9" * 10_000 + b"\n.",
    "no dict": b"\x80\x02K\x01.",
}


@pytest.mark.parametrize("pickled", HOSTILE.values(), ids=HOSTILE.keys())
def test_hostile_pickles_are_refused_in_words(tmp_path: Path, pickled: bytes) -> None:
    with pytest.raises(CheckpointError, match="checkpoint"):
        imported(zipped(pickled, tmp_path / "f.pt"), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_compressed_pickle_is_refused_before_it_is_unpacked(tmp_path: Path) -> None:
    file = zipped(b"\x80\x02" + b"N0" * 1_000_000 + b"N.", tmp_path / "f", zipfile.ZIP_DEFLATED)
    with pytest.raises(DamagedCheckpoint, match="compressed"):
        imported(file, tmp_path / "run")


def test_a_flipped_bit_is_found_with_its_member(tmp_path: Path) -> None:
    path = save_zero(tmp_path / "ds", Saved.random(), stage=3, ranks=2)
    file = path / TAG / "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt"
    data = bytearray(file.read_bytes())
    with zipfile.ZipFile(io.BytesIO(data)) as members:
        largest = max(members.infolist(), key=lambda member: member.file_size)
    data[largest.header_offset + 1000] ^= 2
    file.write_bytes(data)
    with pytest.raises(DamagedCheckpoint, match=r"optim_states.pt.*data/\d"):
        imported(path, tmp_path / "run")


def mutated(data: bytes, chosen: random.Random) -> bytes:
    """Return data with a few bytes changed, removed or added."""
    broken = bytearray(data)
    for _ in range(chosen.randint(1, 3)):
        at, kind = chosen.randrange(len(broken)), chosen.randrange(4)
        if kind == 0:
            broken[at] ^= 1 << chosen.randrange(8)
        elif kind == 1:
            del broken[at : at + chosen.randint(1, 60)]
        elif kind == 2:
            broken[at:at] = chosen.randbytes(chosen.randint(1, 9))
        else:
            broken = broken[: at + 1]
    return bytes(broken)


@pytest.mark.parametrize(
    "count", [pytest.param(200, id="200"), pytest.param(4000, id="4000", marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("kind", ["deepspeed", "dcp"])
def test_mutated_files_are_refused_or_imported(tmp_path: Path, kind: str, count: int) -> None:
    if kind == "dcp":
        model, _, _ = trained()
        save_dcp({"model": model.state_dict()}, tmp_path / "c")
        folder = tmp_path / "c"
    else:
        folder = save_zero(tmp_path / "c", Saved.random(), stage=3, ranks=2) / TAG
    files = sorted(path for path in folder.iterdir() if path.is_file())
    whole = {path: path.read_bytes() for path in files}
    chosen, refused = random.Random(count), 0
    for number in range(count):
        path = files[number % len(files)]
        path.write_bytes(mutated(whole[path], chosen))
        try:
            with OpenFiles() as opened:
                foreign = open_foreign(folder, opened, origin=kind)
                foreign.check()
                opened.check()
        except CheckpointError:
            refused += 1
        path.write_bytes(whole[path])
    assert refused > count // 2
    assert sorted(tmp_path.iterdir()) == [tmp_path / "c"]


# --- the command ----------------------------------------------------------------------------------


def test_the_command_says_what_was_not_carried_over(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = save_zero(tmp_path / "ds", Saved.random(), stage=3, ranks=2)
    assert main(["checkpoint", "import", str(path), str(tmp_path / "run")]) == 0
    text = capsys.readouterr().out
    assert "DeepSpeed '0.19.8', ZeRO-3, 2 ranks, step 3" in text
    assert "not carried over:" in text
    assert "lr_scheduler" in text
    assert main(["checkpoint", "verify", str(tmp_path / "run")]) == 0


def test_a_path_that_is_no_checkpoint_is_one_line_and_two(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for path in (tmp_path / "nowhere", tmp_path):
        assert main(["checkpoint", "import", str(path), str(tmp_path / "run")]) == 2
    assert capsys.readouterr().err.count("\n") == 2


WITHOUT_TORCH = """
import sys
sys.modules["torch"] = None
import infinity_engine.memory  # with all that it imports: the baseline is of what lies there
from infinity_engine.cli.main import main
from support.resident_memory import ResidentMemory
resident = ResidentMemory()
assert main(["checkpoint", "import", sys.argv[1], sys.argv[2]]) == 0
print(resident.peak_bytes() - resident.baseline_bytes)
"""


def test_imports_need_no_torch_and_little_memory(tmp_path: Path) -> None:
    weights = {f"layer.{number}": torch.randn(1000, 5000) for number in range(15)}  # 300 MB
    torch.save(weights, tmp_path / "large.pt")
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH, str(tmp_path / "large.pt"), str(tmp_path / "run")],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, **WITH_SUPPORT},
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout.splitlines()[-1]) < 160 << 20
