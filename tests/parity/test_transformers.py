"""Models of Transformers train as they do in plain torch with fp32 masters, and with the same bits
on every tier.

The models are what `from_pretrained(dtype=torch.bfloat16)` gives: buffers such as rotary
frequencies in fp32, and what a family keeps in fp32 on purpose. The plain training is torch's AdamW
over fp32 copies of the parameters; its square root is replaced by the correctly rounded one
(docs/optimizers.md), so that all bits must be equal.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import infinity_engine
from infinity_engine.errors import CapacityError
from infinity_engine.plan import Interleaved
from infinity_engine.tiling import tile
from support.block_ways import take_turns
from support.engine_bits import Bits, differing
from support.families import FAMILIES, Batch, Family, peft, saved
from support.nvme_training import RATES, emulated

pytestmark = [
    pytest.mark.usefixtures("deterministic"),
    # peft and many programs still use the old names.
    pytest.mark.filterwarnings(
        "ignore:`(is_)?gradient_checkpointing.*` is deprecated:FutureWarning"
    ),
    pytest.mark.filterwarnings(
        "ignore:fan_in_fan_out is set to False but the target module is `Conv1D`:UserWarning"
    ),
]

STEPS = 2
LENGTH = 32
LONG = 2048
"""Rotary angles rounded to bf16 are off by a radian here."""
TIERS = ("host", "drives", "device")
SAVED = "activations on drives"
AGAIN = "blocks recomputed"
AGAIN_SAVED = "blocks recomputed, inputs on drives"
MIXED = "each block another way in each step"
BLOCKS = (AGAIN, AGAIN_SAVED, MIXED)
VARIANTS = ("full", "lora", "reentrant checkpoints", "checkpoints")
TILE_BYTES = 1024
DTYPE = torch.bfloat16
Trained = tuple[Bits, list[float]]


def loaded(family: Family, directory: Path, variant: str) -> Any:
    """Return the saved model as users load it, with its adapters, checkpointing or tiles."""
    model = family.load(directory, DTYPE)
    if variant == "lora":
        torch.manual_seed(1)
        model = peft().get_peft_model(
            model, peft().LoraConfig(r=4, lora_alpha=8, target_modules=family.adapted)
        )
    if variant == "tiled":
        assert tile(model, TILE_BYTES).names
    if variant.endswith("checkpoints"):
        reentrant = variant.startswith("reentrant")
        model.gradient_checkpointing_enable(
            gradient_checkpointing_kwargs={"use_reentrant": reentrant}
        )
    return model


def batch_of(family: Family, step: int, length: int) -> Batch:
    """Return the inputs of a step, in the dtype that the model computes in."""
    given = family.batch(step, length)
    return {
        name: value.to(DTYPE) if value.is_floating_point() else value
        for name, value in given.items()
    }


def adamw(parameters: Any) -> torch.optim.AdamW:
    return torch.optim.AdamW(parameters, lr=3e-3, weight_decay=0.1, foreach=False)


def trained_by_torch(
    model: Any, batch: Callable[[int], Batch], steps: int, patch: pytest.MonkeyPatch
) -> Trained:
    """Train with gradients in the model's dtypes and masters in fp32."""
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    masters = [parameter.detach().float().clone() for parameter in trainable]
    optimizer = adamw(masters)
    losses = []
    for step in range(steps):
        torch.manual_seed(step)  # of dropout
        loss = model(**batch(step)).loss
        loss.backward()
        losses.append(loss.item())
        for parameter, master in zip(trainable, masters, strict=True):
            master.grad, parameter.grad = (
                None if parameter.grad is None else parameter.grad.float(),
                None,
            )
        with patch.context() as patched:
            patched.setattr(torch.Tensor, "sqrt", correctly_rounded_root)
            optimizer.step()
        with torch.no_grad():
            for parameter, master in zip(trainable, masters, strict=True):
                parameter.copy_(master)
    bits = {name: value.detach().clone() for name, value in model.state_dict().items()}
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    for parameter, master in zip(trainable, masters, strict=True):
        bits[f"{names[id(parameter)]}: master"] = master
    return bits, losses


def correctly_rounded_root(tensor: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(np.asarray(np.sqrt(tensor.detach().numpy())))


def trained_by_engine(
    model: Callable[[], Any], batch: Callable[[int], Batch], steps: int, tier: str, drive: Path
) -> Trained:
    """Train with everything on one tier that can be there; on drives, at about the least host
    budget.
    """
    host = 16 << 20 if tier == "drives" else 256 << 20
    while True:
        try:
            with ExitStack() as stack:
                return _trained(model(), batch, steps, settings_of(tier, host, drive, stack))
        except CapacityError as error:
            if tier != "drives":
                raise
            host = max(error.asked, host + (32 << 10))


def settings_of(tier: str, host: int, drive: Path, stack: ExitStack) -> dict[str, Any]:
    if tier == "host":
        return {"strategy": "host_only", "budget": {"host": host}}
    on_drives: dict[str, Any] = {"at": "nvme", "resident_bytes": 2048, "small_bytes": 512}
    activations = {
        SAVED: on_drives,
        AGAIN: {"recompute": "blocks"},
        AGAIN_SAVED: {**on_drives, "recompute": "blocks"},
        MIXED: {**on_drives, "at": "auto"},
    }
    if tier in activations:
        return {
            "strategy": "host_only",
            "budget": {"host": host, "nvme": {str(drive): "64MiB"}},
            "activations": activations[tier],
        }
    if tier == "drives":
        budget = {"host": host, "nvme": {str(drive): "64MiB"}}
        return {
            "strategy": "nvme_streamed",
            "parameters": "nvme",
            "budget": budget,
            "storage": {"small_bytes": 256},
        }
    device = emulated(1)
    stack.callback(device.close)
    budget = {"host": host, "device": "32MiB"}
    return {
        "strategy": Interleaved(share=0.5),
        "parameters": "host",
        "budget": budget,
        "device": device,
    }


def _trained(
    model: Any, batch: Callable[[int], Batch], steps: int, settings: dict[str, Any]
) -> Trained:
    optimizer = adamw([parameter for parameter in model.parameters() if parameter.requires_grad])
    losses = []
    given = {
        "accelerator": "cpu",
        "rates": RATES,
        "subgroup_numel": 4096,
        "update_threads": 2,
        **settings,
    }
    saves = given.get("activations", {})
    with infinity_engine.initialize(model, optimizer, **given) as engine:
        if saves.get("at") == "auto":
            take_turns(engine)
        for step in range(steps):
            torch.manual_seed(step)
            loss = engine(**batch(step)).loss
            engine.backward(loss)
            assert engine.step().outcome is infinity_engine.Outcome.UPDATED
            losses.append(loss.item())
        if saves.get("recompute") == "blocks" or saves.get("at") == "auto":
            ways = {use.way for use in engine.report().blocks}
            assert ways, "blocks were found"
            assert saves.get("at") == "auto" or all("recomputed" in way for way in ways)
        if saves.get("at") == "nvme":
            assert re.search(r"^nvme write +activations ", str(engine.report()), re.MULTILINE)
        elif not saves and "nvme" in given["budget"]:
            whole = all(parameter.requires_grad for parameter in model.parameters())
            moved = "write .*parameters .*gradients .*states " if whole else "read .*parameters "
            assert re.search(f"^nvme {moved}", str(engine.report()), re.MULTILINE)
        bits = dict(engine.state_dict())
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                bits[f"{name}: master"] = engine.state_of(parameter)["master"]
    return bits, losses


def compare(
    name: str,
    variant: str,
    tiers: tuple[str, ...],
    length: int,
    folder: Path,
    patch: pytest.MonkeyPatch,
) -> None:
    """Train in plain torch and on each tier; all bits have to be the same, those of what is trained
    and of losses.
    """
    family = FAMILIES[name]
    directory = saved(family, folder / "model", length=length)
    (folder / "drive").mkdir()

    def batch(step: int) -> Batch:
        return batch_of(family, step, length)

    expected, losses = trained_by_torch(loaded(family, directory, variant), batch, STEPS, patch)
    for tier in tiers:
        bits, same = trained_by_engine(
            lambda: loaded(family, directory, variant), batch, STEPS, tier, folder / "drive"
        )
        assert same == losses, tier
        assert differing(expected, bits) == [], tier


# Each variant has other families in the default suite, one of them on every tier and one on drives;
# the long run has them all.
SHORT: dict[str, dict[str, tuple[str, ...]]] = {
    "lora": {"llama": TIERS, "whisper": ("drives",)},
    "reentrant checkpoints": {"qwen3": ("drives",), "t5": TIERS},
    "checkpoints": {"gemma3": TIERS, "mixtral": ("drives",)},
}
# By default each way of blocks has families with and without experts, one of them in every way.
RECOMPUTED: dict[str, tuple[str, ...]] = {
    "llama": BLOCKS,
    "qwen2-moe": (AGAIN, MIXED),
    "t5": (AGAIN_SAVED, MIXED),
    "vit": (AGAIN,),
    "mamba": (AGAIN_SAVED,),
}
# The same for activations on drives.
SAVING = {
    "full": ("llama", "qwen2-moe", "t5", "vit", "mamba"),
    "lora": ("llama",),
    "reentrant checkpoints": ("llama",),
    "checkpoints": ("qwen2-moe", "t5"),
}


@pytest.mark.parametrize(
    ("name", "ways"),
    [
        *RECOMPUTED.items(),
        *(
            pytest.param(name, BLOCKS, marks=pytest.mark.slow)
            for name in FAMILIES
            if RECOMPUTED.get(name) != BLOCKS
        ),
    ],
    ids=str,
)
def test_blocks_may_be_recomputed_or_moved_each_in_its_own_way(
    name: str, ways: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compare(name, "full", ways, LENGTH, tmp_path, monkeypatch)


# By default, every family trains from drives, and every other one on the host or on a device too.
@pytest.mark.parametrize(
    ("name", "tiers"),
    [
        *((name, ("drives", "host")) for name in list(FAMILIES)[::4]),
        *((name, ("drives", "device")) for name in list(FAMILIES)[2::4]),
        *((name, ("drives",)) for name in list(FAMILIES)[1::2]),
        *(pytest.param(name, TIERS, marks=pytest.mark.slow) for name in FAMILIES),
    ],
    ids=str,
)
def test_a_family_trains_with_torchs_bits_on_every_tier(
    name: str, tiers: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compare(name, "full", tiers, LENGTH, tmp_path, monkeypatch)


@pytest.mark.parametrize(
    ("name", "variant"),
    [
        pytest.param(name, variant, marks=[] if name in SAVING[variant] else pytest.mark.slow)
        for variant in VARIANTS
        for name in FAMILIES
    ],
)
def test_what_autograd_saves_may_wait_on_drives(
    name: str, variant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compare(name, variant, (SAVED,), LENGTH, tmp_path, monkeypatch)


@pytest.mark.parametrize(
    ("name", "variant", "tiers"),
    [
        *(
            (name, variant, tiers)
            for variant, families in SHORT.items()
            for name, tiers in families.items()
        ),
        *(
            pytest.param(name, variant, TIERS, marks=pytest.mark.slow)
            for variant, families in SHORT.items()
            for name in FAMILIES
            if families.get(name) != TIERS
        ),
    ],
    ids=str,
)
def test_adapters_and_checkpointing_train_with_torchs_bits(
    name: str,
    variant: str,
    tiers: tuple[str, ...],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    compare(name, variant, tiers, LENGTH, tmp_path, monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_layers_in_tiles_train_with_torchs_bits(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compare(name, "tiled", (*TIERS, MIXED), LENGTH, tmp_path, monkeypatch)


@pytest.mark.parametrize(
    ("name", "tiers"),
    [
        pytest.param(
            name, tiers, marks=[] if (name, tiers) == ("llama", ("host",)) else pytest.mark.slow
        )
        for name, family in FAMILIES.items()
        if family.rotary
        for tiers in (("host",), TIERS)
    ],
    ids=str,
)
def test_rotary_positions_have_torchs_bits_in_long_sequences(
    name: str, tiers: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compare(name, "full", tiers, LONG, tmp_path, monkeypatch)
