"""A run that was saved goes on with the same bits, wherever it is loaded."""

from __future__ import annotations

import errno
import os
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import infinity_engine
from deepnvme.memory.checksum import crc32c
from infinity_engine.checkpoint import CheckpointDirectory, CheckpointReader
from infinity_engine.checkpoint.directory import read_manifest
from infinity_engine.checkpoint.manifest import encode
from infinity_engine.checkpoint.rewriting import reshard
from infinity_engine.config import EngineConfig
from infinity_engine.engine.checkpoints import loading
from infinity_engine.engine.checkpoints.saving import _Draft
from infinity_engine.engine.engine import Engine
from infinity_engine.errors import (
    CapacityError,
    ChecksumError,
    ConfigError,
    DamagedCheckpoint,
    IncompleteCheckpoint,
    ManifestMismatch,
    TransferError,
)
from support.engine_bits import Bits, bits_of, differing
from support.saved_engines import PLACES, engine_at, one_step, small, steps

pytestmark = pytest.mark.usefixtures("deterministic")


def uninterrupted(tmp_path: Path, precision: str, model: str = "gpt") -> tuple[Bits, list[float]]:
    with engine_at(PLACES["host"], tmp_path, precision=precision, model=model) as (engine, run):
        losses = steps(engine, run, 0, 4)
        return bits_of(engine), losses[2:]


def in_turn(first: int) -> list[Any]:
    """Return every place in both precisions: by default one each, which are other ones where
    `first` is another one.
    """
    return [
        pytest.param(
            precision, place, marks=[] if (first + number + kind) % 2 == 0 else pytest.mark.slow
        )
        for kind, precision in enumerate(("fp32", "bf16"))
        for number, place in enumerate(PLACES)
    ]


@pytest.mark.parametrize(("precision", "to"), in_turn(0))
def test_a_run_saved_on_the_host_goes_on_anywhere_with_the_same_bits(
    tmp_path: Path, precision: str, to: str
) -> None:
    expected, losses = uninterrupted(tmp_path, precision)
    with engine_at(PLACES["host"], tmp_path, precision=precision) as (engine, run):
        steps(engine, run, 0, 2)
        engine.save(tmp_path / "saved")
    with engine_at(PLACES[to], tmp_path, precision=precision) as (engine, run):
        loaded = engine.load(tmp_path / "saved")
        assert (loaded.step, engine.steps, loaded.missing, loaded.unexpected) == (2, 2, (), ())
        assert steps(engine, run, 2, 2) == losses
        assert differing(expected, bits_of(engine)) == []


@pytest.mark.parametrize(("precision", "origin"), in_turn(1))
def test_a_run_saved_anywhere_goes_on_on_the_host(
    tmp_path: Path, precision: str, origin: str
) -> None:
    expected, losses = uninterrupted(tmp_path, precision)
    with engine_at(PLACES[origin], tmp_path, precision=precision) as (engine, run):
        steps(engine, run, 0, 2)
        engine.save(tmp_path / "saved", "mine")
        assert steps(engine, run, 2, 2) == losses  # saving changes nothing
    with engine_at(PLACES["host"], tmp_path, precision=precision) as (engine, run):
        steps(engine, run, 7, 1)  # another run, until the load
        engine.load(tmp_path / "saved", "mine")
        assert steps(engine, run, 2, 2) == losses
        assert differing(expected, bits_of(engine)) == []


@pytest.mark.parametrize("model", ["conv net", "mixture of experts", "encoder-decoder"])
def test_models_with_buffers_and_unused_parameters_go_on(tmp_path: Path, model: str) -> None:
    expected, losses = uninterrupted(tmp_path, "bf16", model)
    with engine_at(PLACES["host"], tmp_path, model=model) as (engine, run):
        steps(engine, run, 0, 2)
        engine.save(tmp_path / "saved")
    with engine_at(PLACES["drives"], tmp_path, model=model) as (engine, run):
        engine.load(tmp_path / "saved")
        assert steps(engine, run, 2, 2) == losses
        assert differing(expected, bits_of(engine)) == []


def test_fp16_goes_on_with_its_loss_scale(tmp_path: Path) -> None:
    with engine_at(PLACES["host"], tmp_path, precision="fp16") as (engine, run):
        steps(engine, run, 0, 3)
        engine.save(tmp_path / "saved")
        expected = steps(engine, run, 3, 2), bits_of(engine), engine._parts.scale.state_dict()
    with engine_at(PLACES["host"], tmp_path, precision="fp16") as (engine, run):
        engine.load(tmp_path / "saved")
        losses = steps(engine, run, 3, 2)
        assert (losses, engine._parts.scale.state_dict()) == (expected[0], expected[2])
        assert differing(expected[1], bits_of(engine)) == []


def test_random_numbers_and_schedulers_go_on_where_they_were(tmp_path: Path) -> None:
    _, optimizer, engine = small()
    with engine:
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
        for _ in range(3):
            one_step(engine)
            scheduler.step()
        engine.save(tmp_path, extra={"scheduler": scheduler})
        expected = [one_step(engine), random.random(), np.random.random()]
        expected.append(optimizer.param_groups[0]["lr"])
        scheduler.step()
        expected += [one_step(engine), optimizer.param_groups[0]["lr"]]
    _, optimizer, engine = small()
    with engine:
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
        engine.load(tmp_path, extra={"scheduler": scheduler})
        found = [one_step(engine), random.random(), np.random.random()]
        found.append(optimizer.param_groups[0]["lr"])
        scheduler.step()
        found += [one_step(engine), optimizer.param_groups[0]["lr"]]
    assert found == expected


def test_a_scheduler_that_the_engine_steps_is_saved_without_being_named(tmp_path: Path) -> None:
    rates = []
    for _ in range(2):
        _, optimizer, engine = small()
        with engine:
            engine.follow_schedule(torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5))
            engine.resume(tmp_path)
            for _ in range(3):
                rates.append(optimizer.param_groups[0]["lr"])
                one_step(engine)
            engine.save(tmp_path)
    assert rates == pytest.approx([1e-2, 1e-2, 5e-3, 5e-3, 2.5e-3, 2.5e-3])


def test_another_number_of_followed_schedulers_is_a_difference(tmp_path: Path) -> None:
    _, optimizer, engine = small()
    with engine:
        engine.follow_schedule(torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5))
        engine.save(tmp_path)
    _, _, other = small()
    with other:
        with pytest.raises(ManifestMismatch, match=r"number of schedulers .* should be .*0.*1"):
            other.load(tmp_path)
        [difference] = other.load(tmp_path, strict=False).mismatched
    assert difference == "the number of schedulers that the engine steps: expected 0, found 1"


def test_a_checkpoint_says_the_settings_of_its_run(tmp_path: Path) -> None:
    _, _, engine = small(accumulation_steps=3)
    with engine:
        engine.save(tmp_path, "mine")
    settings = read_manifest(tmp_path / "mine").run["configuration"]
    assert EngineConfig.from_mapping(settings).accumulation_steps == 3
    assert settings["budget"]["host"] == 64 << 20


def test_only_the_newest_checkpoints_are_kept(tmp_path: Path) -> None:
    _, _, engine = small()
    with engine:
        for _ in range(4):
            one_step(engine)
            engine.save(tmp_path, keep=2)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == [
        "latest",
        "step-00000003",
        "step-00000004",
    ]


def test_a_save_that_reads_back_damaged_leaves_latest_and_older_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, _, engine = small()
    write = CheckpointDirectory.commit

    def damaging(self: CheckpointDirectory, tag: str, *arguments: Any) -> Path:
        shard = next(self.draft_of(tag).glob("rank-*"))
        with shard.open("r+b") as file:
            file.seek(-8, os.SEEK_END)
            file.write(b"\xff" * 8)
        return write(self, tag, *arguments)

    with engine:
        one_step(engine)
        first = engine.save(tmp_path, keep=1)
        with monkeypatch.context() as patch:
            patch.setattr(CheckpointDirectory, "commit", damaging)
            with pytest.raises(ChecksumError, match="is damaged"):
                engine.save(tmp_path, "damaged", keep=1)
        directory = CheckpointDirectory(tmp_path)
        assert (directory.latest(), directory.tags()) == (first, [first])
        engine.load(tmp_path)


def test_a_drive_that_is_full_when_latest_is_written_commits_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, _, engine = small()

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with engine:
        one_step(engine)
        first = engine.save(tmp_path)
        with monkeypatch.context() as patch:
            patch.setattr(CheckpointDirectory, "_pointer_to", full)
            with pytest.raises(TransferError, match="No space left"):
                engine.save(tmp_path, "second")
        directory = CheckpointDirectory(tmp_path)
        assert (directory.latest(), directory.tags()) == (first, [first])
        engine.save(tmp_path, "second")


@pytest.mark.parametrize("keep", [0, -1])
def test_keeping_no_checkpoint_is_refused_and_nothing_is_written(tmp_path: Path, keep: int) -> None:
    _, _, engine = small()
    with engine, pytest.raises(ConfigError, match="keep"):
        engine.save(tmp_path, keep=keep)
    assert list(tmp_path.iterdir()) == []


def test_gradients_that_wait_for_a_step_refuse_a_save(tmp_path: Path) -> None:
    _, _, engine = small()
    with engine:
        engine.backward(engine(torch.randn(3, 8)).sum())
        with pytest.raises(RuntimeError, match=r"Gradients have come .* before save\(\)"):
            engine.save(tmp_path)
        engine.zero_grad()
        engine.save(tmp_path)
        engine.backward(engine(torch.randn(3, 8)).sum())
        with pytest.raises(RuntimeError, match=r"before load\(\)"):
            engine.load(tmp_path)
        engine.step()


@pytest.mark.parametrize("place", ["memory", "drives"])
def test_a_save_that_leaves_out_pending_gradients_changes_no_bit_of_the_run(
    tmp_path: Path, place: str
) -> None:
    drives: dict[str, Any] = {
        "budget": {"host": "64MiB", "nvme": {str(tmp_path): "64MiB"}},
        "strategy": "nvme_streamed",
        "parameters": "nvme",
        "storage": {"small_bytes": 0},
    }
    given = {"accumulation_steps": 2, **(drives if place == "drives" else {})}

    def trained(*, saves: bool) -> Bits:
        _, _, engine = small(**given)
        with engine:
            for number in range(4):
                torch.manual_seed(number)
                engine.backward(engine(torch.randn(3, 8)).sum())
                if saves and number == 2:
                    engine.save(tmp_path / "run", pending="leave_out")
                engine.step()
            return bits_of(engine)

    expected = trained(saves=False)
    assert differing(trained(saves=True), expected) == []

    # It is the run after one step, without the gradients of its third micro-batch.
    _, _, resumed = small(**given)
    with resumed:
        assert resumed.load(tmp_path / "run").step == 1
        for number in (2, 3):
            torch.manual_seed(number)
            resumed.backward(resumed(torch.randn(3, 8)).sum())
            resumed.step()
        assert differing(bits_of(resumed), expected) == []


def test_another_model_is_refused_by_name_and_nothing_changes(tmp_path: Path) -> None:
    _, _, engine = small()
    with engine:
        engine.save(tmp_path)
    model = torch.nn.Sequential(
        torch.nn.Linear(8, 17), torch.nn.Dropout(0.5), torch.nn.Linear(17, 4)
    )
    before = {name: value.clone() for name, value in model.state_dict().items()}
    budget = {"host": "64MiB"}
    with infinity_engine.initialize(
        model, torch.optim.AdamW(model.parameters()), budget=budget, accelerator="cpu"
    ) as other:
        with pytest.raises(
            ManifestMismatch, match=r"0\.weight should be .*shape \(17, 8\).*shape \(16, 8\)"
        ):
            other.load(tmp_path)
        assert all(torch.equal(before[name], value) for name, value in other.state_dict().items())
        loaded = other.load(tmp_path, strict=False)
        assert (loaded.missing, loaded.unexpected) == ((), ())
        names = [difference.split(":")[0] for difference in loaded.mismatched]
        assert names == ["0.weight", "0.bias", "2.weight"]
        assert loaded.mismatched[1] == "0.bias: expected shape (17,), found shape (16,)"
        assert not torch.equal(other.state_dict()["2.bias"], before["2.bias"])


def test_state_that_would_not_fit_into_memory_is_refused_with_its_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = Kept(torch.zeros(1 << 18))
    _, _, engine = small()
    with engine:
        one_step(engine)
        engine.save(tmp_path, extra={"kept": kept})
        before = engine.state_dict()
        monkeypatch.setattr(loading, "free_for_copies", lambda: 100_000)
        with pytest.raises(CapacityError, match=r"cannot hold .*1\.01 MiB\).*state dicts of"):
            engine.load(tmp_path, extra={"kept": kept})
        assert str(engine.state_dict()) == str(before)
        engine.load(tmp_path, weights_only=True)


class Counting(torch.nn.Module):
    """A layer, and a buffer of some dtype."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(8, 4)
        self.register_buffer("seen", torch.tensor([1, 3], dtype=dtype))

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.layer(values)
        return found


def counting(dtype: torch.dtype) -> Engine:
    model = Counting(dtype)
    optimizer = torch.optim.AdamW(model.parameters())
    return infinity_engine.initialize(model, optimizer, budget={"host": "64MiB"}, accelerator="cpu")


@pytest.mark.parametrize(
    ("saved", "found"),
    [
        (torch.float32, torch.int64),
        (torch.int64, torch.float32),
        (torch.int64, torch.bool),
        (torch.complex64, torch.float32),
    ],
)
def test_a_buffer_of_another_kind_of_numbers_is_refused(
    tmp_path: Path, saved: torch.dtype, found: torch.dtype
) -> None:
    with counting(saved) as engine:
        engine.save(tmp_path)
    with counting(found) as engine:
        before = engine.state_dict()["seen"].clone()
        with pytest.raises(ManifestMismatch, match="seen should be 'a buffer of"):
            engine.load(tmp_path)
        [difference] = engine.load(tmp_path, strict=False).mismatched
        assert difference.startswith("seen: expected a buffer of")
        assert torch.equal(engine.state_dict()["seen"], before)


def test_a_buffer_of_another_width_is_converted(tmp_path: Path) -> None:
    with counting(torch.int64) as engine:
        engine.save(tmp_path)
    with counting(torch.int32) as engine:
        engine.state_dict()
        engine.load(tmp_path)
        assert engine.state_dict()["seen"].tolist() == [1, 3]


def test_weights_alone_begin_with_a_new_optimizer(tmp_path: Path) -> None:
    model, _, engine = small()
    with engine:
        one_step(engine)
        engine.save(tmp_path)
        weights = engine.state_dict()
    torch.manual_seed(1)
    model = torch.nn.Sequential(
        torch.nn.Linear(8, 16), torch.nn.Dropout(0.5), torch.nn.Linear(16, 4)
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with infinity_engine.initialize(
        model, optimizer, budget={"host": "64MiB"}, accelerator="cpu"
    ) as other:
        with pytest.raises(ManifestMismatch, match=r"0\.weight"):
            other.load(tmp_path)
        other.load(tmp_path, weights_only=True)
        assert all(torch.equal(weights[name], value) for name, value in other.state_dict().items())
        assert other.steps == 0
        one_step(other)


def test_damage_that_shows_while_loading_lets_nothing_go_on(tmp_path: Path) -> None:
    _, _, engine = small()
    with engine:
        one_step(engine)
        engine.save(tmp_path)
        shard = tmp_path / "step-00000001" / "rank-00000-00000.safetensors"
        data = bytearray(shard.read_bytes())
        data[-5] ^= 4
        shard.write_bytes(data)
        with pytest.raises(
            infinity_engine.InfinityError, match=r"rank-00000-00000\.safetensors is damaged"
        ):
            engine.load(tmp_path)
        # the header lies in the same MiB, so it was refused before anything changed
        one_step(engine)


def test_a_load_that_fails_half_way_has_to_be_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from infinity_engine.checkpoint import CheckpointReader

    _, _, engine = small()
    with engine:
        one_step(engine)
        engine.save(tmp_path)
        read, calls = CheckpointReader.read, iter(range(100))

        def failing(*arguments: Any) -> None:
            if next(calls) == 4:
                raise TransferError(errno=5, path="drive", offset=0, asked=1, done=0)
            read(*arguments)

        with monkeypatch.context() as patch:
            patch.setattr(CheckpointReader, "read", failing)
            with pytest.raises(TransferError):
                engine.load(tmp_path)
        with pytest.raises(RuntimeError, match=r"Call load\(\) again"):
            engine(torch.randn(3, 8))
        with pytest.raises(RuntimeError, match=r"Call load\(\) again"):
            engine.save(tmp_path, "broken")
        with pytest.raises(IncompleteCheckpoint):
            engine.load(tmp_path, "nowhere")
        with pytest.raises(RuntimeError, match=r"Call load\(\) again"):
            engine(torch.randn(3, 8))
        engine.load(tmp_path)
        one_step(engine)


def test_what_cannot_be_kept_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    class Odd:
        def state_dict(self) -> Any:
            return {"callback": lambda: None}

        def load_state_dict(self, state_dict: Any) -> None:
            raise AssertionError("nothing was saved")

    _, _, engine = small()
    with engine:
        with pytest.raises(TypeError, match="callback"):
            engine.save(tmp_path, extra={"odd": Odd()})
        assert list(tmp_path.iterdir()) == []
        with pytest.raises(IncompleteCheckpoint):
            engine.load(tmp_path)
        with pytest.raises(ConfigError, match="tag"):
            engine.save(tmp_path, "../up")


class Kept:
    """Something with any state."""

    def __init__(self, state: Any) -> None:
        self.state = state

    def state_dict(self) -> Any:
        return {"value": self.state}

    def load_state_dict(self, state_dict: Any) -> None:
        self.state = state_dict["value"]


@pytest.mark.parametrize("wait", [True, False])
@pytest.mark.parametrize("rows", [4, 1 << 18], ids=["small", "too large for a copy"])
def test_state_that_is_not_one_piece_of_memory_is_saved_by_its_values(
    tmp_path: Path, rows: int, wait: bool
) -> None:
    values = torch.arange(2.0 * rows).view(rows, 2)
    state = {
        "transposed": values.t(),
        "every other": values[:, ::2],
        "expanded": torch.ones(1).expand(5),
        "conjugate": torch.tensor([1 + 2j]).conj(),
        "array": values.numpy().T,
    }
    kept = Kept(state)
    _, _, engine = small()
    with engine:
        one_step(engine)
        engine.save(tmp_path, extra={"kept": kept}, wait=wait)
        kept.state = None
        engine.load(tmp_path, extra={"kept": kept})
    assert isinstance(kept.state["array"], np.ndarray)
    for name, found in kept.state.items():
        assert torch.equal(torch.as_tensor(found), torch.as_tensor(state[name]).resolve_conj())


def test_a_tensor_without_values_is_refused_by_its_name(tmp_path: Path) -> None:
    _, _, engine = small()
    with engine, pytest.raises(TypeError, match=r"extra\.kept\.value.*sparse"):
        engine.save(tmp_path, extra={"kept": Kept(torch.eye(3).to_sparse())})


def test_complex128_is_refused_by_its_name(tmp_path: Path) -> None:
    values = torch.ones(3, dtype=torch.complex128)
    model, _, engine = small()
    with engine:
        with pytest.raises(TypeError, match=r"extra\.kept\.value.*no complex128"):
            engine.save(tmp_path, extra={"kept": Kept(values)})
        model.register_buffer("turns", values)
        with pytest.raises(TypeError, match=r"turns.*no complex128"):
            engine.save(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_relative_path_is_that_of_the_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    write = _Draft.write

    def moves_first(draft: _Draft, *, beside: bool) -> None:
        os.chdir("elsewhere")
        write(draft, beside=beside)

    monkeypatch.setattr(_Draft, "write", moves_first)
    _, _, engine = small()
    with engine:
        one_step(engine)
        tag = engine.save("saved")
    assert CheckpointDirectory(tmp_path / "saved").tags() == [tag]
    assert list((tmp_path / "elsewhere").iterdir()) == []


def test_the_manifest_of_something_else_is_no_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "manifest").write_text("{}")
    _, _, engine = small()
    with engine, pytest.raises(DamagedCheckpoint, match="infinity-checkpoint"):
        engine.load(tmp_path, "c")


def test_a_save_stays_within_the_budget_of_the_host(tmp_path: Path) -> None:
    with engine_at(PLACES["drives"], tmp_path) as (engine, run):
        steps(engine, run, 0, 1)
        engine.save(tmp_path / "saved")
        engine.load(tmp_path / "saved")
        for usage in engine.usage():
            assert usage.peak_held <= usage.limit


def test_a_resharded_run_goes_on_with_the_same_bits(tmp_path: Path) -> None:
    expected, losses = uninterrupted(tmp_path, "bf16")
    with engine_at(PLACES["host"], tmp_path) as (engine, run):
        steps(engine, run, 0, 2)
        engine.save(tmp_path / "saved")
    with CheckpointReader(CheckpointDirectory(tmp_path / "saved").resolve()) as reader:
        reshard(reader, CheckpointDirectory(tmp_path / "three"), 3)
    with engine_at(PLACES["drives"], tmp_path) as (engine, run):
        engine.load(tmp_path / "three")
        assert steps(engine, run, 2, 2) == losses
        assert differing(expected, bits_of(engine)) == []


def test_a_strict_load_needs_no_buffers_that_state_dicts_leave_out(tmp_path: Path) -> None:
    _, _, engine = small()
    with engine:
        one_step(engine)
        engine.save(tmp_path)
    model, _, engine = small()
    model.register_buffer("positions", torch.arange(3.0), persistent=False)
    with engine:
        assert engine.load(tmp_path).missing == ()
        assert dict(model.named_buffers())["positions"].tolist() == [0, 1, 2]


def test_a_tensor_that_a_checkpoint_does_not_have_keeps_its_values_on_drives(
    tmp_path: Path,
) -> None:
    with engine_at(PLACES["host"], tmp_path) as (engine, _):
        engine.save(tmp_path / "saved")
    damaged = tmp_path / "saved" / "step-00000000"
    manifest = read_manifest(damaged)
    first, *others = manifest.tensors
    other = replace(first, name="another", aliases=())
    shard = damaged / "rank-00000-00000.safetensors"
    renamed_in(shard, first.name, other.name)
    data = shard.read_bytes()
    sums = tuple(crc32c(data[at : at + (1 << 20)]) for at in range(0, len(data), 1 << 20))
    files = tuple(
        replace(file, checksums=sums) if file.name == shard.name else file
        for file in manifest.files
    )
    changed = replace(manifest, tensors=(other, *others), files=files)
    (damaged / "manifest").write_bytes(encode(changed))
    with engine_at(PLACES["drives"], tmp_path) as (engine, run):
        steps(engine, run, 0, 2)
        before = engine.state_dict()
        loaded = engine.load(tmp_path / "saved", strict=False)
        assert (loaded.missing, loaded.unexpected) == ((first.name,), ("another",))
        assert torch.equal(before[first.name], engine.state_dict()[first.name])
        steps(engine, run, 2, 1)


def renamed_in(shard: Path, name: str, other: str) -> None:
    """Give a tensor another name in the header of a shard, which stays as long as it is."""
    data = shard.read_bytes()
    end = 8 + int.from_bytes(data[:8], "little")
    header = data[8:end].rstrip().replace(f'"{name}#'.encode(), f'"{other}#'.encode())
    assert len(header) <= end - 8
    shard.write_bytes(data[:8] + header.ljust(end - 8) + data[end:])


def test_a_run_resumes_only_where_there_is_a_checkpoint(tmp_path: Path) -> None:
    _, _, engine = small()
    with engine:
        assert not engine.resume(tmp_path / "none")
        one_step(engine)
        engine.save(tmp_path)
        (tmp_path / "latest").unlink()  # killed right after the commit
        one_step(engine)
        assert engine.resume(tmp_path)
        assert engine.steps == 1


def test_a_parameter_that_only_one_side_has_is_named_before_its_group(tmp_path: Path) -> None:
    def made(bias: bool) -> Engine:
        model = torch.nn.Linear(4, 4, bias=bias)
        optimizer = torch.optim.AdamW(model.parameters())
        return infinity_engine.initialize(model, optimizer, accelerator="cpu")

    with made(bias=False) as saving:
        saving.backward(saving(torch.ones(1, 4)).sum())
        saving.step()
        saving.save(tmp_path)

    said = "bias should be 'a tensor of that name'"
    with made(bias=True) as other, pytest.raises(ManifestMismatch, match=said):
        other.load(tmp_path)


def test_a_step_that_is_saved_again_after_going_back_gets_another_tag(tmp_path: Path) -> None:
    _, _, engine = small()
    with engine:
        for _ in range(2):
            one_step(engine)
            engine.save(tmp_path)
        engine.load(tmp_path, "step-00000001")
        one_step(engine)
        assert engine.save(tmp_path) == "step-00000002.2"
        assert engine.load(tmp_path).tag == "step-00000002.2"


@pytest.mark.parametrize(
    ("optimizer", "said"),
    [
        (lambda model: torch.optim.Adam(model.parameters()), "the optimizer should be"),
        (
            lambda model: torch.optim.AdamW([{"params": [each]} for each in model.parameters()]),
            "the number of the optimizer's groups",
        ),
        (
            lambda model: torch.optim.AdamW(reversed(list(model.parameters()))),
            "the optimizer's groups of parameters",
        ),
    ],
    ids=["another class", "other groups", "another order"],
)
def test_another_optimizer_is_refused_or_listed(
    tmp_path: Path, optimizer: Callable[[torch.nn.Module], torch.optim.Optimizer], said: str
) -> None:
    model, _, engine = small()
    with engine:
        one_step(engine)
        engine.save(tmp_path)
    other = optimizer(model)
    before = [group["lr"] for group in other.param_groups]
    budget = {"host": "64MiB"}
    with infinity_engine.initialize(model, other, budget=budget, accelerator="cpu") as engine:
        with pytest.raises(ManifestMismatch, match=said):
            engine.load(tmp_path)
        loaded = engine.load(tmp_path, strict=False)
        assert [difference for difference in loaded.mismatched if said[:13] in difference]
        assert [group["lr"] for group in other.param_groups] == before
        one_step(engine)


class Coded(torch.nn.Module):
    """A layer, and frozen codes of some dtype."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(8, 4)
        codes = torch.full((4, 4), 3, dtype=dtype) / (2 if dtype.is_floating_point else 1)
        self.codes = torch.nn.Parameter(codes.to(dtype), requires_grad=False)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.layer(values)
        return found


@pytest.mark.parametrize(
    ("saved", "found"), [(torch.float32, torch.int8), (torch.int8, torch.float32)]
)
def test_frozen_parameters_of_another_kind_of_numbers_are_refused(
    tmp_path: Path, saved: torch.dtype, found: torch.dtype
) -> None:
    def engine_of(dtype: torch.dtype) -> Engine:
        model = Coded(dtype)
        optimizer = torch.optim.AdamW(model.layer.parameters())
        return infinity_engine.initialize(
            model, optimizer, budget={"host": "64MiB"}, accelerator="cpu"
        )

    with engine_of(saved) as engine:
        engine.save(tmp_path)
    with engine_of(found) as engine:
        before = engine.state_dict()["codes"].clone()
        with pytest.raises(ManifestMismatch, match="a parameter of"):
            engine.load(tmp_path)
        [difference] = engine.load(tmp_path, strict=False).mismatched
        assert difference.startswith("codes: expected a parameter of")
        assert torch.equal(engine.state_dict()["codes"], before)


def test_state_that_could_not_be_read_again_is_not_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("infinity_engine.checkpoint.manifest._MOST_PARTS", 1000)

    class Sampler:
        def state_dict(self) -> dict[str, object]:
            return {"order": list(range(2000))}

        def load_state_dict(self, state: object) -> None: ...

    _, _, engine = small()
    with engine:
        with pytest.raises(ConfigError, match="tensors or arrays"):
            engine.save(tmp_path, extra={"sampler": Sampler()})
        assert engine.resume(tmp_path) is False
        engine.save(tmp_path)
        assert engine.resume(tmp_path)
