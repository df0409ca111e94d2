"""QLoRA through peft itself, on a frozen base of ours that `load_pretrained` has made compact."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import infinity_engine
from infinity_engine.building.built import built_model_of
from infinity_engine.compact import CompactKind, CompactLinear, expand_linears
from support.compact_models import compact_layers, llama, with_plain_layers
from support.families import peft, transformers

peft()
pytestmark = [
    pytest.mark.usefixtures("deterministic"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]

KINDS = list(CompactKind)
TOKENS = torch.arange(32).repeat(2, 1)


def budget(folder: Path) -> dict[str, Any]:
    drive = folder / "drive"
    drive.mkdir(exist_ok=True)
    return {"host": "64MiB", "nvme": {str(drive): "64MiB"}}


def base_of(folder: Path, kind: CompactKind) -> Any:
    """Return a compact Llama in bf16, whose values are on drives."""
    given = folder / "given"
    if not given.exists():
        llama().bfloat16().save_pretrained(given)
    return infinity_engine.load_pretrained(given, budget(folder), compact=kind)


def adapted(base: Any) -> Any:
    config = peft().LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
    model = peft().get_peft_model(base, config).train()
    generator = torch.Generator().manual_seed(1)
    for parameter in trained(model):
        # peft rounds adapters of a base in bf16, and others not.
        values = torch.randn(parameter.shape, generator=generator).mul(0.1).bfloat16()
        parameter.data.copy_(values)
    return model


def trained(model: Any) -> list[torch.nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def plain_of(folder: Path, kind: CompactKind) -> Any:
    """Return the model in memory that the compact base stands for."""
    base = base_of(folder, kind)
    built = built_model_of(base)
    assert built is not None
    built.whole()
    return with_plain_layers(
        transformers().LlamaForCausalLM.from_pretrained(folder / "given"), base
    )


def trained_from_drives(folder: Path, kind: CompactKind) -> tuple[Any, list[float]]:
    """Train adapters on a base on drives, and save them; return the model, and the losses."""
    model = adapted(base_of(folder, kind))
    losses = []
    with infinity_engine.initialize(
        model,
        torch.optim.AdamW(trained(model), lr=1e-2),
        budget=budget(folder),
        strategy="nvme_streamed",
        parameters="nvme",
        storage={"small_bytes": 0},
        accelerator="cpu",
        calibration="off",
    ) as engine:
        integers = [known for known in engine._known.values() if known.parameter.itemsize == 1]
        assert len(integers) == 14
        assert all(known.on_drives for known in integers)
        for _ in range(3):
            loss = engine(input_ids=TOKENS, labels=TOKENS).loss
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
        model.save_pretrained(folder / "adapters", state_dict=engine.state_dict())
    return model.eval(), losses


@pytest.mark.parametrize("kind", KINDS)
def test_losses_are_those_of_plain_peft_on_the_expanded_base(
    kind: CompactKind, tmp_path: Path
) -> None:
    plain = adapted(plain_of(tmp_path, kind))
    optimizer = torch.optim.AdamW(trained(plain), lr=1e-2)
    expected = []
    for _ in range(3):
        loss = plain(input_ids=TOKENS, labels=TOKENS).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        expected.append(loss.item())

    _, losses = trained_from_drives(tmp_path, kind)

    assert losses[0] == expected[0]
    # bf16 has 8 bits, and torch and the engine round a step of AdamW otherwise.
    assert losses == pytest.approx(expected, rel=1e-3)
    assert losses[2] < losses[0]


@pytest.mark.parametrize("kind", KINDS)
def test_adapters_are_saved_alone_and_loaded_by_plain_peft(
    kind: CompactKind, tmp_path: Path
) -> None:
    model, _ = trained_from_drives(tmp_path, kind)

    files = {path.name for path in (tmp_path / "adapters").iterdir()}
    assert files == {"README.md", "adapter_config.json", "adapter_model.safetensors"}
    config = json.loads((tmp_path / "adapters" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(tmp_path / "given")
    plain = peft().PeftModel.from_pretrained(plain_of(tmp_path, kind), tmp_path / "adapters").eval()
    with torch.no_grad():
        assert torch.equal(model(TOKENS).logits, plain(TOKENS).logits)


@pytest.mark.parametrize("kind", KINDS)
def test_peft_merges_adapters_into_the_expanded_base_within_the_budget(
    kind: CompactKind, tmp_path: Path
) -> None:
    model, _ = trained_from_drives(tmp_path, kind)
    plain = peft().PeftModel.from_pretrained(plain_of(tmp_path, kind), tmp_path / "adapters")
    expected = plain.merge_and_unload()

    with infinity_engine.init_context(budget=budget(tmp_path), cache="32KiB") as built:
        names = expand_linears(model, torch.bfloat16)
        merged = model.merge_and_unload()

    assert len(names) == 14
    layers = [merged.get_submodule(path) for path in map(without_peft, names)]
    assert all(built.is_absent(layer.weight) for layer in layers)
    with infinity_engine.initialize(
        merged, budget=budget(tmp_path), accelerator="cpu", calibration="off"
    ) as engine:
        merged.save_pretrained(tmp_path / "merged", state_dict=engine.state_dict())
    again = transformers().LlamaForCausalLM.from_pretrained(tmp_path / "merged")
    values, wanted = again.state_dict(), expected.state_dict()
    assert values.keys() == wanted.keys()
    assert all(torch.equal(values[name], wanted[name]) for name in wanted)


def without_peft(path: str) -> str:
    """Return a layer's path in the model without adapters."""
    return path.removeprefix("base_model.model.").removesuffix(".base_layer")


def test_an_expanded_layer_has_the_weight_and_the_bias_of_the_compact_one() -> None:
    compact = CompactLinear.of(torch.nn.Linear(64, 32), CompactKind.NF4).eval()
    model = torch.nn.Sequential(compact)

    assert expand_linears(model, torch.float32) == ("0",)

    layer = model[0]
    assert type(layer) is torch.nn.Linear
    assert torch.equal(layer.weight, compact.expanded(torch.float32))
    assert layer.bias is compact.bias
    assert not layer.training
    assert compact_layers(model) == {}
