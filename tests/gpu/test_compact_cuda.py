"""Frozen layers in 8 and 4 bits on a GPU, and models of files that train and generate there."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import nn

import infinity_engine
from infinity_engine.accel import Accelerator
from infinity_engine.compact import CompactKind, CompactLinear, compact_linears
from support.nvme_training import RATES

pytest.importorskip("cupy")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU"),
    pytest.mark.usefixtures("exact"),
    # what `exact` asks for, where torch has it not
    pytest.mark.filterwarnings("ignore:.*deterministic:UserWarning"),
    # torch, in a backward's own thread
    pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS:UserWarning"),
]
# cuBLAS takes 32 MiB of it for each thread that computes, and for some products as much again
DEVICE = "1GiB"
CUDA = torch.device("cuda")
KINDS = list(CompactKind)


def layer() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(192, 320)


@pytest.mark.parametrize("kind", KINDS)
def test_a_layer_is_made_compact_on_the_device_as_on_the_cpu(kind: CompactKind) -> None:
    expected = CompactLinear.of(layer(), kind)

    found = CompactLinear.of(layer().to(CUDA), kind).to(CUDA)

    # torch's GPU kernels divide by a number by multiplying with its reciprocal
    torch.testing.assert_close(found.scale.cpu(), expected.scale, rtol=1e-6, atol=0.0)
    if kind is CompactKind.INT8:
        assert int((found.weight.cpu().int() - expected.weight.int()).abs().max()) <= 1
    else:
        assert torch.equal(found.weight.cpu(), expected.weight)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_a_weight_is_expanded_with_the_bits_of_the_cpu(
    kind: CompactKind, dtype: torch.dtype
) -> None:
    compact = CompactLinear.of(layer(), kind)
    expected = compact.expanded(dtype)

    assert torch.equal(compact.to(CUDA).expanded(dtype).cpu(), expected)


@pytest.mark.parametrize(
    ("dtype", "near"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2), (torch.float16, 3e-3)]
)
@pytest.mark.parametrize("kind", KINDS)
def test_output_and_gradients_are_the_cpus_to_rounding(
    kind: CompactKind, dtype: torch.dtype, near: float
) -> None:
    given = torch.randn(7, 192, generator=torch.Generator().manual_seed(0)).to(dtype)
    factor = torch.randn(7, 320, generator=torch.Generator().manual_seed(1))
    results = []
    for device in (torch.device("cpu"), CUDA):
        compact = CompactLinear.of(layer().to(dtype), kind).to(device)
        inputs = given.clone().to(device).requires_grad_()
        output = compact(inputs)
        (output.float() * factor.to(device)).sum().backward()
        assert inputs.grad is not None
        assert compact.bias.grad is not None
        found = (output.detach(), inputs.grad, compact.bias.grad)
        results.append([each.cpu().double() for each in found])

    for expected, found in zip(*results, strict=True):
        assert float((found - expected).norm() / expected.norm()) <= near


def test_autocast_computes_in_its_dtype() -> None:
    compact = CompactLinear.of(layer(), CompactKind.NF4).to(CUDA)
    with torch.autocast("cuda", dtype=torch.bfloat16):
        assert compact(torch.randn(2, 192, device=CUDA)).dtype is torch.bfloat16


class Adapted(nn.Module):
    """Adds a small trained product to a frozen layer, as LoRA does."""

    def __init__(self, base: nn.Module, columns: int, rows: int) -> None:
        super().__init__()
        self.base = base
        self.down = nn.Linear(columns, 2, bias=False)
        self.up = nn.Linear(2, rows, bias=False)

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.base(given) + self.up(self.down(given))
        return output


def adapted(kind: CompactKind) -> nn.Module:
    torch.manual_seed(0)
    base = nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 64))
    assert compact_linears(base, kind) == ("0", "2")
    base.requires_grad_(False)
    return nn.Sequential(Adapted(base[0], 64, 128), base[1], Adapted(base[2], 128, 64))


def losses_of(kind: CompactKind, **settings: Any) -> list[float]:
    made = adapted(kind)
    trained = [parameter for parameter in made.parameters() if parameter.requires_grad]
    losses = []
    with infinity_engine.initialize(
        made, torch.optim.AdamW(trained, lr=1e-2), calibration="off", rates=RATES, **settings
    ) as engine:
        for seed in range(3):
            batch = torch.randn(8, 64, generator=torch.Generator().manual_seed(seed))
            loss = engine(batch.to(engine.device)).square().mean()
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
    return losses


@pytest.mark.parametrize("kind", KINDS)
def test_adapters_on_a_compact_base_train_alike_from_everywhere(
    kind: CompactKind, device: Accelerator, tmp_path: Path
) -> None:
    on_cpu = losses_of(kind, accelerator="cpu", budget={"host": "64MiB"})
    budget: dict[str, object] = {"host": "64MiB", "device": DEVICE}
    drives = {"nvme": {str(tmp_path): "64MiB"}}

    expected = losses_of(
        kind, device=device, strategy="host_only", parameters="device", budget=budget
    )

    assert expected == pytest.approx(on_cpu, rel=1e-4)
    for strategy, parameters in (("host_only", "host"), ("device_only", "device")):
        found = losses_of(
            kind, device=device, strategy=strategy, parameters=parameters, budget=budget
        )
        assert found == expected
    found = losses_of(
        kind,
        device=device,
        strategy="host_only",
        parameters="nvme",
        storage={"small_bytes": 0},
        budget={**budget, **drives},
    )
    assert found == expected


def saved_llama(folder: Path) -> tuple[Any, Path]:
    """Save a tiny model; return it and where it is."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=64,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=2,
            eos_token_id=None,
        )
    )
    model.save_pretrained(folder)
    return model.eval(), folder


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("parameters", ["host", "nvme"])
def test_a_model_of_files_trains_and_generates(
    parameters: str, device: Accelerator, tmp_path: Path
) -> None:
    plain, folder = saved_llama(tmp_path / "given")
    drive = tmp_path / "drive"
    drive.mkdir()
    budget = {"host": "64MiB", "device": DEVICE, "nvme": {str(drive): "64MiB"}}
    tokens = torch.arange(16).repeat(2, 1)
    with torch.no_grad():
        expected = plain(input_ids=tokens, labels=tokens).loss.item()
        continued = plain.generate(tokens, max_new_tokens=6, do_sample=False)

    model = infinity_engine.load_pretrained(
        folder, {"host": "64MiB", "nvme": {str(drive): "64MiB"}}
    )
    with infinity_engine.initialize(
        model,
        "adamw",
        device=device,
        budget=budget,
        strategy="host_only",
        parameters=parameters,
        rates=RATES,
        calibration="off",
    ) as engine:
        given, known = tokens.to(engine.device), cast(Any, engine.model)
        with torch.no_grad():
            found = known.generate(given, max_new_tokens=6, do_sample=False)
        losses = []
        for _ in range(3):
            loss = engine(input_ids=given, labels=given).loss
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())

    assert losses[0] == pytest.approx(expected, rel=1e-4)
    assert losses[2] < losses[0]
    assert torch.equal(found.cpu(), continued)
