"""A save that leaves out frozen parameters writes no byte of them, and goes on with the same bits
on the same base; another base is refused.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import infinity_engine
from infinity_engine.checkpoint import CheckpointDirectory, CheckpointReader, Kind
from infinity_engine.checkpoint.rewriting import reshard
from infinity_engine.engine.checkpoints import frozen
from infinity_engine.engine.checkpoints.saving import SaveState
from infinity_engine.engine.engine import Engine
from infinity_engine.errors import ManifestMismatch
from infinity_engine.tiling import tile
from support.engine_bits import bits_of, differing
from support.saved_engines import PLACES, engine_at, steps

pytestmark = pytest.mark.usefixtures("deterministic")

MODEL = "llama"  # its embedding is frozen
BASE = "embed.weight"


@pytest.mark.parametrize(
    ("origin", "to"),
    [
        ("host", "drives"),
        ("drives", "host"),
        ("drives, early updates", "drives and device"),
        ("device, parameters on host", "interleaved device"),
    ],
)
@pytest.mark.parametrize("wait", [True, False])
def test_a_run_without_its_frozen_bytes_goes_on_anywhere_with_the_same_bits(
    tmp_path: Path, origin: str, to: str, wait: bool
) -> None:
    with engine_at(PLACES["host"], tmp_path, model=MODEL) as (engine, run):
        losses = steps(engine, run, 0, 4)[2:]
        expected = bits_of(engine)
    with engine_at(PLACES[origin], tmp_path, model=MODEL) as (engine, run):
        for step in range(2):
            steps(engine, run, step, 1)
            engine.save(tmp_path / "saved", frozen="leave_out", keep=1, wait=wait)
        assert steps(engine, run, 2, 2) == losses
    with engine_at(PLACES[to], tmp_path, model=MODEL) as (engine, run):
        assert engine.load(tmp_path / "saved").mismatched == ()
        assert steps(engine, run, 2, 2) == losses
        assert differing(expected, bits_of(engine)) == []


@pytest.mark.parametrize("place", ["host", "drives"])
def test_no_byte_of_a_frozen_parameter_is_written(tmp_path: Path, place: str) -> None:
    with engine_at(PLACES[place], tmp_path, model=MODEL) as (engine, run):
        steps(engine, run, 0, 1)
        assert engine._parts.frozen[0].on_drives == (place == "drives")
        base = engine.state_dict()[BASE].view(torch.uint8).numpy().tobytes()
        engine.save(tmp_path / "saved", "whole")
        whole = engine.last_save().nbytes
        engine.save(tmp_path / "saved", "part", frozen="leave_out")
        part = engine.last_save().nbytes
        trained = sum(known.numel for known in engine._parts.trained)
    assert base in written(tmp_path / "saved/whole")
    assert base not in written(tmp_path / "saved/part")
    assert whole - part >= len(base)
    with CheckpointReader(tmp_path / "saved/part") as reader:
        assert [tensor.name for tensor in reader.manifest.left_out] == [BASE]
        streams = [
            tensor.stream(name) for tensor in reader.manifest.tensors for name in tensor.streams
        ]
        assert {stream.name for stream in streams} == {"master", "exp_avg", "exp_avg_sq"}
        assert sum(stream.numel for stream in streams) == 3 * trained


def written(checkpoint: Path) -> bytes:
    return b"".join(path.read_bytes() for path in checkpoint.iterdir())


def test_frozen_values_are_read_once_for_all_saves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, reads = frozen._read, []

    def counted(*arguments: Any) -> dict[str, int]:
        reads.append(arguments)
        return read(*arguments)

    monkeypatch.setattr(frozen, "_read", counted)
    model, engine = adapted()
    with engine:
        for _ in range(3):
            one_step(engine)
            engine.save(tmp_path, frozen="leave_out")
        assert len(reads) == 1
        with engine.gathered(model.base.weight, modify=True), torch.no_grad():
            model.base.weight[0] += 1
        engine.save(tmp_path, "other", frozen="leave_out")
        assert len(reads) == 2


def test_a_frozen_parameter_that_the_program_averages_is_no_longer_the_base(
    tmp_path: Path, saved: Path
) -> None:
    model, engine = adapted()
    with engine:
        engine.load(saved)
        with torch.no_grad():  # As a teacher that follows its student does, without `gathered`.
            model.base.weight.mul_(0.99)
        engine.save(tmp_path / "averaged", frozen="leave_out")
        engine.load(tmp_path / "averaged")
    _, engine = adapted()
    with engine, pytest.raises(ManifestMismatch, match="checksum"):
        engine.load(tmp_path / "averaged")


class Adapted(nn.Module):
    """A frozen layer, and an adapter beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(8, 16)
        self.base.requires_grad_(False)
        self.down = nn.Linear(8, 2, bias=False)
        self.up = nn.Linear(2, 16, bias=False)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return torch.as_tensor(self.base(inputs) + self.up(self.down(inputs)))


def adapted(
    change: Callable[[Adapted], object] = lambda _: None, **settings: Any
) -> tuple[Adapted, Engine]:
    """Return a model, changed before its engine is made, and the engine."""
    torch.manual_seed(0)
    model = Adapted()
    change(model)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    usual = {"budget": {"host": "64MiB"}, "strategy": "host_only", "accelerator": "cpu"}
    optimizer = torch.optim.AdamW(trained, lr=1e-2)
    return model, infinity_engine.initialize(model, optimizer, **{**usual, **settings})


def one_step(engine: Engine) -> None:
    engine.backward(engine(torch.randn(3, 8)).pow(2).mean())
    engine.step()


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    _, engine = adapted()
    with engine:
        one_step(engine)
        engine.save(tmp_path / "saved", frozen="leave_out")
    return tmp_path / "saved"


def set_one(model: Adapted) -> None:
    with torch.no_grad():
        model.base.weight[3, 3] += 1e-3


def narrow(model: Adapted) -> None:
    model.base = nn.Linear(8, 1).requires_grad_(False)


@pytest.mark.parametrize(
    ("different", "said"),
    [
        ({"change": set_one}, r"base\.weight should be 'values with the checksum [0-9a-f]{8}"),
        ({"change": narrow}, r"base\.weight should be 'frozen, of shape \(1, 8\) in F32'"),
        ({"precision": "bf16"}, r"base\.weight should be 'frozen, of shape \(16, 8\) in BF16'"),
        (
            {"change": lambda model: model.base.weight.requires_grad_(True)},
            r"base\.weight should be 'trained, .* says 'frozen, .*same parameters frozen",
        ),
        ({"change": lambda model: setattr(model, "base", nn.Identity())}, r"base\.weight"),
    ],
    ids=["values", "shape", "dtype", "trained", "name"],
)
@pytest.mark.parametrize("weights_only", [False, True])
def test_another_base_is_refused_and_nothing_has_changed(
    saved: Path, different: dict[str, Any], said: str, weights_only: bool
) -> None:
    _, engine = adapted(**different)
    with engine:
        before = bits_of(engine)
        with pytest.raises(ManifestMismatch, match=said):
            engine.load(saved, weights_only=weights_only)
        assert differing(before, bits_of(engine)) == []


def test_a_refusal_says_what_to_do(saved: Path) -> None:
    _, engine = adapted(set_one)
    with engine, pytest.raises(ManifestMismatch, match=r"on the same base.*frozen='save'.*strict"):
        engine.load(saved)


def test_without_strict_the_adapters_are_loaded_onto_another_base(saved: Path) -> None:
    model, engine = adapted()
    with engine:
        engine.load(saved)
        expected = engine.trainable_state_dict()
    model, engine = adapted(set_one)
    with engine:
        base = model.base.weight.clone()
        [mismatched] = engine.load(saved, strict=False).mismatched
        assert mismatched.startswith("base.weight: expected values with the checksum")
        assert torch.equal(model.base.weight, base)
        assert differing(expected, engine.trainable_state_dict()) == []


def test_values_that_a_load_has_brought_count_as_the_base(tmp_path: Path, saved: Path) -> None:
    _, engine = adapted(set_one)
    with engine:
        engine.save(tmp_path / "other")
    _, engine = adapted()
    with engine:
        engine.load(saved)
        engine.load(tmp_path / "other")  # a whole checkpoint, of another base
        with pytest.raises(ManifestMismatch, match="checksum"):
            engine.load(saved)


def test_a_whole_checkpoint_has_the_frozen_values_that_another_save_left_out(
    tmp_path: Path,
) -> None:
    _, engine = adapted()
    with engine:
        engine.save(tmp_path, frozen="leave_out")
        engine.save(tmp_path, "whole")
        expected = bits_of(engine)
    _, engine = adapted(set_one)
    with engine:
        engine.load(tmp_path, "whole")
        assert differing(expected, bits_of(engine)) == []


def test_tiles_of_a_frozen_weight_have_the_checksum_of_the_whole(saved: Path) -> None:
    model, engine = adapted(lambda model: tile(model, 200))
    with engine:
        assert len(list(model.base.parameters())) > 2
        engine.load(saved)


def test_autosave_leaves_out_what_it_is_told_to(tmp_path: Path) -> None:
    _, engine = adapted()
    with engine:
        one_step(engine)
        engine.autosave(tmp_path, every=1, frozen="leave_out", wait=True)
        assert kinds_with_values(tmp_path) == {Kind.TRAINED}
        engine.preempt()
        with pytest.raises(SystemExit):
            engine.autosave(tmp_path, every=1)  # the newest save has less than this one asks for
    assert kinds_with_values(tmp_path) == {Kind.TRAINED, Kind.FROZEN}


def test_a_run_that_is_told_to_stop_leaves_out_as_well(tmp_path: Path) -> None:
    _, engine = adapted()
    with engine:
        one_step(engine)
        engine.preempt()
        with pytest.raises(SystemExit):
            engine.autosave(tmp_path, every=100, frozen="leave_out")
        assert engine.last_save().state is SaveState.COMMITTED
    assert kinds_with_values(tmp_path) == {Kind.TRAINED}


def kinds_with_values(path: Path) -> set[Kind]:
    with CheckpointReader(CheckpointDirectory(path).resolve()) as reader:
        return {tensor.kind for tensor in reader.manifest.tensors if tensor.streams}


def test_a_model_without_frozen_parameters_is_saved_whole(tmp_path: Path) -> None:
    _, engine = adapted(lambda model: model.requires_grad_(True))
    with engine:
        engine.save(tmp_path, "part", frozen="leave_out")
    assert (tmp_path / "part/manifest").read_bytes().startswith(b"infinity-checkpoint 1 ")


def test_another_word_is_refused(tmp_path: Path) -> None:
    _, engine = adapted()
    with engine, pytest.raises(ValueError, match="leave_out"):
        engine.save(tmp_path, frozen="drop")


def test_a_resharded_checkpoint_leaves_out_the_same(tmp_path: Path, saved: Path) -> None:
    with CheckpointReader(CheckpointDirectory(saved).resolve()) as reader:
        reshard(reader, CheckpointDirectory(tmp_path / "three"), 3)
    found = []
    for path in (saved, tmp_path / "three"):
        _, engine = adapted()
        with engine:
            engine.load(path)
            found.append(bits_of(engine))
        with CheckpointReader(CheckpointDirectory(path).resolve()) as reader:
            assert len(reader.manifest.left_out) == 2
    assert differing(*found) == []
