"""LoRA on a base of bitsandbytes' 4-bit or 8-bit layers: the losses of plain PEFT."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import infinity_engine
from infinity_engine.engine.engine import Engine
from support.families import peft, transformers
from support.trainers import arguments_of, language_model, losses_of, rows

transformers()
pytest.importorskip("accelerate", reason="quantized models are loaded with it")
pytest.importorskip("bitsandbytes", reason="its layers are the base", exc_type=ImportError)

from infinity_engine.integrations.transformers import InfinityTrainer  # noqa: E402

pytestmark = [
    pytest.mark.usefixtures("deterministic"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]

QUANTIZED: dict[str, dict[str, Any]] = {
    "nf4": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
    "nf4 with quantized scales": {
        "load_in_4bit": True,
        "bnb_4bit_quant_type": "nf4",
        "bnb_4bit_use_double_quant": True,
    },
    "int8": {"load_in_8bit": True},
}


def adapted(folder: Path, quantized: str) -> Any:
    """Return a quantized Llama with adapters, always with the same values."""
    if not folder.exists():
        language_model().save_pretrained(folder)
    base = transformers().AutoModelForCausalLM.from_pretrained(
        folder,
        dtype=torch.float32,
        device_map={"": "cpu"},
        quantization_config=transformers().BitsAndBytesConfig(**QUANTIZED[quantized]),
    )
    torch.manual_seed(1)
    config = peft().LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)
    return peft().get_peft_model(base, config).train()


def on_drives(folder: Path) -> dict[str, Any]:
    folder.mkdir(parents=True, exist_ok=True)
    return {
        "accelerator": "cpu",
        "calibration": "off",
        "budget": {"host": "64MiB", "nvme": {str(folder): "256MiB"}},
        "strategy": "nvme_streamed",
        "parameters": "nvme",
        "storage": {"small_bytes": 0},
    }


def adamw(model: Any) -> torch.optim.AdamW:
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return torch.optim.AdamW(trained, lr=1e-2)


def batch() -> dict[str, torch.Tensor]:
    return {name: torch.stack([row[name] for row in rows(2)]) for name in ("input_ids", "labels")}


@pytest.mark.parametrize(
    ("quantized", "place"),
    [
        ("nf4", "memory"),
        ("nf4", "drives"),
        ("nf4 with quantized scales", "drives"),
        ("int8", "memory"),
    ],
)
def test_losses_are_those_of_plain_peft(quantized: str, place: str, tmp_path: Path) -> None:
    plain = adapted(tmp_path / "base", quantized)
    optimizer = adamw(plain)
    expected = []
    for _ in range(3):
        loss = plain(**batch()).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        expected.append(loss.item())

    model = adapted(tmp_path / "base", quantized)
    settings = {"accelerator": "cpu", "calibration": "off", "budget": {"host": "64MiB"}}
    if place == "drives":
        settings = on_drives(tmp_path / "drive")
    with infinity_engine.initialize(model, adamw(model), settings) as engine:
        found = [step(engine) for _ in range(3)]
        assert compact_on_drives(engine) == (place == "drives")

    assert found == pytest.approx(expected, rel=1e-5)
    # The base has its values back: the next loss is that of the plain model.
    with torch.no_grad():
        assert model(**batch()).loss.item() == pytest.approx(plain(**batch()).loss.item(), rel=1e-5)


def test_an_8_bit_base_on_drives_is_refused(tmp_path: Path) -> None:
    # Its layers replace their own weight when they run.
    model = adapted(tmp_path / "base", "int8")
    settings = on_drives(tmp_path / "drive")
    refused = pytest.raises(RuntimeError, match="was changed outside of the engine")

    with infinity_engine.initialize(model, adamw(model), settings) as engine, refused:
        step(engine)


def step(engine: Engine) -> float:
    """Make a step; return its loss."""
    loss: torch.Tensor = engine(**batch()).loss
    engine.backward(loss)
    engine.step()
    return loss.item()


def compact_on_drives(engine: Engine) -> bool:
    """Tell whether the quantized weights, which have a byte for each element, rest on drives."""
    compact = [known for known in engine._known.values() if known.parameter.element_size() == 1]
    assert len(compact) == 14
    return all(known.on_drives for known in compact)


def test_a_trainer_trains_adapters_on_a_quantized_base(tmp_path: Path) -> None:
    plain = transformers().Trainer(
        model=adapted(tmp_path / "base", "nf4"),
        args=arguments_of(tmp_path / "plain"),
        train_dataset=rows(),
    )
    plain.train()
    mine = InfinityTrainer(
        model=adapted(tmp_path / "base", "nf4"),
        args=arguments_of(tmp_path / "mine"),
        train_dataset=rows(),
        engine=on_drives(tmp_path / "drive"),
    )
    mine.train()
    mine.save_model(str(tmp_path / "saved"))
    mine.end()

    for ours, theirs in zip(losses_of(mine), losses_of(plain), strict=True):
        assert ours == pytest.approx(theirs, rel=1e-4)
    assert (tmp_path / "saved/adapter_model.safetensors").exists()
    assert not (tmp_path / "saved/model.safetensors").exists()
