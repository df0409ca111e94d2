"""Lightning's Trainer with the engine's strategy: the losses of a plain one, and resuming."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

lightning: Any = pytest.importorskip(
    "lightning", reason="it is Lightning's Trainer that runs", exc_type=ImportError
)

from infinity_engine.checkpoint.directory import CheckpointDirectory, read_manifest  # noqa: E402
from infinity_engine.errors import ConfigError  # noqa: E402
from infinity_engine.integrations.lightning import InfinityStrategy  # noqa: E402
from support.engine_bits import bits_of, differing  # noqa: E402
from support.nvme_programs import output_of, run_program  # noqa: E402

pytestmark = [
    pytest.mark.usefixtures("deterministic"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]


class Module(lightning.LightningModule):  # type: ignore[misc]
    """Two layers and a dropout between them, with a scheduler that steps each batch."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Dropout(0.1), nn.Linear(32, 8))
        self.losses: list[float] = []
        self.validated: list[float] = []
        self.bits: dict[str, torch.Tensor] = {}

    def training_step(self, batch: torch.Tensor, _index: int) -> torch.Tensor:
        loss: torch.Tensor = (self.layers(batch) - batch).pow(2).mean()
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch: torch.Tensor, _index: int) -> None:
        self.validated.append((self.layers(batch) - batch).pow(2).mean().item())

    def on_train_end(self) -> None:
        strategy = self.trainer.strategy
        if isinstance(strategy, InfinityStrategy):
            assert strategy.engine is not None
            self.bits = bits_of(strategy.engine)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.9)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": scheduler, "interval": "step"},
        }


def batches(number: int = 10) -> Any:
    generator = torch.Generator().manual_seed(1)
    rows = [torch.randn(8, generator=generator) for _ in range(number)]
    return torch.utils.data.DataLoader(rows, batch_size=2)  # type: ignore[arg-type]


def strategy(folder: Path, **options: Any) -> InfinityStrategy:
    folder.mkdir(parents=True, exist_ok=True)
    return InfinityStrategy(
        engine={
            "accelerator": "cpu",
            "calibration": "off",
            "budget": {"host": "64MiB", "nvme": {str(folder): "64MiB"}},
            "strategy": "nvme_streamed",
            "parameters": "nvme",
            "storage": {"small_bytes": 0},
        },
        device="cpu",
        **options,
    )


def trainer(folder: Path, **options: Any) -> Any:
    given = {
        "max_epochs": 2,
        "accumulate_grad_batches": 2,
        "gradient_clip_val": 0.05,
        "accelerator": "cpu",
        "devices": 1,
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": False,
        "default_root_dir": str(folder),
        **options,
    }
    return lightning.Trainer(**given)


def fitted(folder: Path, module: Module | None = None, **options: Any) -> Module:
    module = Module() if module is None else module
    torch.manual_seed(5)
    path = options.pop("ckpt_path", None)
    trainer(folder, **options).fit(module, batches(), batches(4), ckpt_path=path)
    return module


def test_losses_are_those_of_a_plain_trainer(tmp_path: Path) -> None:
    expected = fitted(tmp_path / "plain")
    mine = fitted(tmp_path / "mine", strategy=strategy(tmp_path / "drive"))

    assert len(expected.losses) == 10
    assert mine.losses == pytest.approx(expected.losses, rel=1e-5)
    assert mine.validated == pytest.approx(expected.validated, rel=1e-5)


class Choosy(Module):
    """Skips its first batch, and the fourth."""

    def training_step(self, batch: torch.Tensor, index: int) -> Any:
        return None if index in (0, 3) else super().training_step(batch, index)


@pytest.mark.parametrize("accumulation", [1, 2])
def test_a_batch_whose_step_returns_none_is_skipped(accumulation: int, tmp_path: Path) -> None:
    options = {"accumulate_grad_batches": accumulation, "gradient_clip_val": None}
    expected = fitted(tmp_path / "plain", Choosy(), **options)
    mine = fitted(tmp_path / "mine", Choosy(), strategy=strategy(tmp_path / "drive"), **options)

    assert len(expected.losses) == 6
    assert mine.losses == pytest.approx(expected.losses, rel=1e-5)


def test_a_backward_of_the_modules_own_is_refused(tmp_path: Path) -> None:
    class Doubling(Module):
        def backward(self, loss: torch.Tensor, *_: Any, **__: Any) -> None:
            (2 * loss).backward()  # type: ignore[no-untyped-call]

    with pytest.raises(ConfigError, match="backward: expected LightningModule's own"):
        fitted(tmp_path, Doubling(), strategy=strategy(tmp_path / "drive"))


def test_a_save_takes_the_place_of_a_link(tmp_path: Path) -> None:
    class Saving(lightning.Callback):  # type: ignore[misc]
        def on_train_end(self, made: Any, _module: Any) -> None:
            made.save_checkpoint(tmp_path / "a.ckpt")
            for name, target in (("last.ckpt", "a.ckpt"), ("lost.ckpt", "nothing")):
                (tmp_path / name).symlink_to(target)
                made.save_checkpoint(tmp_path / name)
                made.save_checkpoint(tmp_path / name)

    fitted(tmp_path / "fit", strategy=strategy(tmp_path / "drive"), callbacks=[Saving()])

    for name in ("a.ckpt", "last.ckpt", "lost.ckpt"):
        assert (tmp_path / name).is_dir()
        assert not (tmp_path / name).is_symlink()
        assert (tmp_path / name / "engine").is_dir()


def test_a_module_has_its_values_back_after_fitting(tmp_path: Path) -> None:
    mine = fitted(tmp_path, strategy=strategy(tmp_path / "drive"))

    for name, value in mine.state_dict().items():
        assert torch.equal(value, mine.bits[name])


def test_a_resumed_fit_has_the_bits_of_one_that_went_through(tmp_path: Path) -> None:
    whole = fitted(tmp_path / "whole", strategy=strategy(tmp_path / "drive"), max_epochs=3)
    saving = lightning.pytorch.callbacks.ModelCheckpoint(
        dirpath=tmp_path / "saved", every_n_epochs=1, save_top_k=-1, filename="{epoch}"
    )
    fitted(
        tmp_path / "first",
        strategy=strategy(tmp_path / "drive"),
        max_epochs=2,
        enable_checkpointing=True,
        callbacks=[saving],
    )
    folder = tmp_path / "saved/epoch=1.ckpt"
    assert {path.name for path in folder.iterdir()} == {"engine", "lightning.ckpt"}

    resumed = fitted(
        tmp_path / "again",
        strategy=strategy(tmp_path / "drive"),
        max_epochs=3,
        ckpt_path=str(folder),
    )

    assert resumed.losses == whole.losses[10:]
    assert differing(resumed.bits, whole.bits) == []


def test_a_fit_goes_on_from_a_plain_trainers_checkpoint(tmp_path: Path) -> None:
    saving = lightning.pytorch.callbacks.ModelCheckpoint(dirpath=tmp_path, filename="{epoch}")
    fitted(tmp_path, max_epochs=1, enable_checkpointing=True, callbacks=[saving])

    def resumed(**options: Any) -> list[float]:
        module = Module()
        for parameter in module.parameters():
            torch.nn.init.zeros_(parameter)
        path = str(tmp_path / "epoch=0.ckpt")
        return fitted(tmp_path, module, max_epochs=2, ckpt_path=path, **options).losses

    expected = resumed()
    assert resumed(strategy=strategy(tmp_path / "drive")) == pytest.approx(expected, rel=1e-5)


def test_a_checkpoint_without_states_of_the_optimizer_is_refused(tmp_path: Path) -> None:
    ended = trainer(tmp_path, strategy=strategy(tmp_path / "drive"))
    ended.fit(Module(), batches())
    # The engine is closed, so it has the weights alone.
    ended.save_checkpoint(tmp_path / "late.ckpt")

    with pytest.raises(ConfigError, match="let ModelCheckpoint save while fitting"):
        fitted(
            tmp_path / "again",
            strategy=strategy(tmp_path / "again-drive"),
            max_epochs=3,
            ckpt_path=str(tmp_path / "late.ckpt"),
        )


def test_an_engines_checkpoint_is_refused_where_nothing_is_fitted(tmp_path: Path) -> None:
    (tmp_path / "saved.ckpt/engine").mkdir(parents=True)
    mine = trainer(tmp_path, strategy=strategy(tmp_path / "drive"))

    with pytest.raises(ConfigError, match="Export it with `infinity checkpoint export"):
        mine.validate(Module(), batches(4), ckpt_path=str(tmp_path / "saved.ckpt"))


class Adapted(Module):
    """The first layer is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[0].requires_grad_(False)


def test_a_fit_goes_on_from_a_checkpoint_without_frozen_layers(tmp_path: Path) -> None:
    def fit(name: str, **options: Any) -> Module:
        engine = strategy(tmp_path / "drive", frozen="leave_out")
        return fitted(tmp_path / name, Adapted(), strategy=engine, max_epochs=2, **options)

    saving = lightning.pytorch.callbacks.ModelCheckpoint(
        dirpath=tmp_path / "saved", every_n_epochs=1, save_top_k=-1, filename="{epoch}"
    )
    whole = fit("whole", enable_checkpointing=True, callbacks=[saving])
    folder = tmp_path / "saved/epoch=0.ckpt"
    manifest = read_manifest(CheckpointDirectory(folder / "engine").resolve())
    assert [tensor.name for tensor in manifest.left_out] == ["layers.0.weight", "layers.0.bias"]

    resumed = fit("again", ckpt_path=str(folder))
    assert resumed.losses == whole.losses[5:]
    assert differing(resumed.bits, whole.bits) == []


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true"])
def test_a_precision_of_the_trainer_is_refused(precision: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="precision: expected Trainer's default"):
        fitted(tmp_path, strategy=strategy(tmp_path / "drive"), precision=precision)


def test_a_save_between_micro_batches_changes_no_bit(tmp_path: Path) -> None:
    def validating(name: str, **options: Any) -> Module:
        # Of five batches, two to a step, it validates after the third.
        drive = strategy(tmp_path / "drive")
        return fitted(tmp_path / name, strategy=drive, val_check_interval=3, **options)

    expected = validating("quiet")
    saving = lightning.pytorch.callbacks.ModelCheckpoint(
        dirpath=tmp_path / "saved", save_top_k=-1, save_last=True
    )
    mine = validating("saving", enable_checkpointing=True, callbacks=[saving])

    saved = {path.name for path in (tmp_path / "saved").iterdir()}
    assert saved == {"epoch=0-step=1.ckpt", "epoch=1-step=4.ckpt", "last.ckpt"}
    assert mine.losses == expected.losses
    assert differing(mine.bits, expected.bits) == []


def test_what_killed_saves_left_is_in_the_way_of_no_later_one(tmp_path: Path) -> None:
    for name in (".last.ckpt.older", ".last.ckpt.making"):
        (tmp_path / "saved" / name / "engine").mkdir(parents=True)
    saving = lightning.pytorch.callbacks.ModelCheckpoint(
        dirpath=tmp_path / "saved", filename="{epoch}", save_last=True
    )
    fitted(
        tmp_path / "run",
        strategy=strategy(tmp_path / "drive"),
        enable_checkpointing=True,
        callbacks=[saving],
    )

    names = {path.name for path in (tmp_path / "saved").iterdir()}
    assert names == {"epoch=1.ckpt", "last.ckpt"}


def test_a_failed_save_leaves_the_checkpoint_of_its_name_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = fitted(tmp_path / "whole", strategy=strategy(tmp_path / "drive"), max_epochs=3)

    def saving() -> Any:
        return lightning.pytorch.callbacks.ModelCheckpoint(
            dirpath=tmp_path / "saved", filename="same", enable_version_counter=False
        )

    def fit(name: str, **options: Any) -> Module:
        return fitted(
            tmp_path / name,
            strategy=strategy(tmp_path / "drive"),
            max_epochs=3,
            enable_checkpointing=True,
            callbacks=[saving()],
            **options,
        )

    kind, written = lightning.pytorch.strategies.SingleDeviceStrategy, []
    save = kind.save_checkpoint

    def failing(self: Any, *arguments: Any, **options: Any) -> None:
        written.append(arguments)
        if len(written) == 2:
            raise OSError("No space left on device")
        save(self, *arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(kind, "save_checkpoint", failing)
        with pytest.raises(OSError, match="No space left"):
            fit("first")

    resumed = fit("again", ckpt_path=str(tmp_path / "saved/same.ckpt"))

    assert resumed.losses == expected.losses[5:]
    assert differing(resumed.bits, expected.bits) == []
    assert [path.name for path in (tmp_path / "saved").iterdir()] == ["same.ckpt"]


PROGRAM = """
import hashlib, os, signal, sys
from pathlib import Path

sys.path[:0] = [sys.argv[1], sys.argv[1] + "/integrations"]
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import SingleDeviceStrategy
from test_lightning import Module, fitted, strategy

folder, place, number = Path(sys.argv[2]), sys.argv[3], int(sys.argv[4])
torch.set_num_threads(1)

def killing(call):
    calls = []
    def counted(*arguments, **options):
        calls.append(call)
        if len(calls) == number:
            os.kill(os.getpid(), signal.SIGKILL)
        return call(*arguments, **options)
    return counted

if place == "training":
    Module.training_step = killing(Module.training_step)
if place == "saving":
    SingleDeviceStrategy.save_checkpoint = killing(SingleDeviceStrategy.save_checkpoint)
mine = fitted(
    folder / "run",
    strategy=strategy(folder / "drive"),
    max_epochs=3,
    enable_checkpointing=True,
    callbacks=[ModelCheckpoint(dirpath=folder / "saved", save_last=True)],
    ckpt_path="last",
)
digest = hashlib.sha256()
for name, value in sorted(mine.bits.items()):
    digest.update(name.encode() + value.contiguous().view(-1).numpy().tobytes())
print(mine.losses[-1], digest.hexdigest())
"""


def ran(folder: Path, place: str, number: int) -> Any:
    folder.mkdir(exist_ok=True)
    tests = Path(__file__).resolve().parents[1]
    return run_program(PROGRAM, tests, folder, place, number, folder=folder)


# Each epoch has 5 batches, and saves twice: under its name, and as the last.
@pytest.mark.parametrize(("place", "number"), [("training", 8), ("saving", 3), ("saving", 4)])
def test_a_killed_fit_goes_on_with_the_bits_of_one_that_was_not(
    place: str, number: int, tmp_path: Path
) -> None:
    expected = output_of(ran(tmp_path / "whole", "nowhere", -1)).splitlines()[-1]

    assert ran(tmp_path / "killed", place, number).returncode == -9
    found = output_of(ran(tmp_path / "killed", "resumed", -1)).splitlines()[-1]

    assert found == expected


def test_a_module_that_optimizes_by_hand_has_the_losses_of_a_plain_one(tmp_path: Path) -> None:
    class Manual(Module):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False

        def training_step(self, batch: torch.Tensor, index: int) -> None:  # type: ignore[override]
            loss = (self.layers(batch) - batch).pow(2).mean()
            self.losses.append(loss.item())
            self.manual_backward(loss / 2)
            if index % 2:
                optimizer = self.optimizers()
                self.clip_gradients(optimizer, 0.05, "norm")
                optimizer.step()
                optimizer.zero_grad()

    losses = []
    for options in ({}, {"strategy": strategy(tmp_path / "drive")}):
        module = Manual()
        torch.manual_seed(5)
        given = {"gradient_clip_val": None, "accumulate_grad_batches": 1, **options}
        trainer(tmp_path, **given).fit(module, batches())
        losses.append(module.losses)

    assert losses[1] == pytest.approx(losses[0], rel=1e-5)


def test_a_module_is_tested_after_fitting_in_mixed_precision(tmp_path: Path) -> None:
    class Tested(Module):
        def test_step(self, batch: torch.Tensor, _index: int) -> None:  # noqa: PT019
            self.validated.append((self.layers(batch) - batch).pow(2).mean().item())

    module = Tested()
    settings = {"accelerator": "cpu", "calibration": "off", "precision": "bf16_autocast"}
    mine = trainer(tmp_path, strategy=InfinityStrategy(engine=settings, device="cpu"))
    mine.fit(module, batches())
    mine.test(module, batches(4), verbose=False)

    assert len(module.validated) == 2


def test_a_wrong_setting_is_refused_at_once() -> None:
    with pytest.raises(ConfigError, match="budgets: expected one of budget"):
        InfinityStrategy(engine={"budgets": 1})


def test_one_of_several_processes_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="this strategy trains in one process"):
        strategy(tmp_path / "drive")


def test_clipping_by_value_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match='"norm" in an engine'):
        fitted(tmp_path, strategy=strategy(tmp_path / "drive"), gradient_clip_algorithm="value")


def test_several_optimizers_are_refused(tmp_path: Path) -> None:
    class Two(Module):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False

        def configure_optimizers(self) -> Any:
            return [torch.optim.SGD(self.parameters(), lr=0.1) for _ in range(2)]

    with pytest.raises(ConfigError, match="2 optimizers"):
        trainer(
            tmp_path,
            strategy=strategy(tmp_path / "drive"),
            gradient_clip_val=None,
            accumulate_grad_batches=1,
        ).fit(Two(), batches())
