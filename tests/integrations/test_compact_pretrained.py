"""`load_pretrained` makes weights compact as it reads them, and reads what bitsandbytes has saved."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import infinity_engine
from infinity_engine.building.built import built_model_of
from infinity_engine.compact import CompactKind, CompactLinear
from infinity_engine.errors import ConfigError
from support.compact_models import DOUBLE, compact_layers, llama, saved_as_bitsandbytes
from support.engine_bits import differing
from support.families import FAMILIES, saved, transformers
from support.unnamed_files import unnamed_files

transformers()
pytestmark = pytest.mark.usefixtures("deterministic")

LENGTH = 32
# Falcon and GPT-2 have linear layers of classes of their own.
COMPACTED = [name for name in FAMILIES if name not in ("falcon", "gpt2")]
SHORT = ("llama", "mixtral", "t5")
TOKENS = torch.arange(LENGTH).repeat(2, 1)


@pytest.fixture
def drive(tmp_path: Path) -> Path:
    path = tmp_path / "drive"
    path.mkdir()
    return path


def budget(drive: Path) -> dict[str, Any]:
    return {"host": "64MiB", "nvme": {str(drive): "64MiB"}}


def whole(model: Any) -> Any:
    """Return the model with its values in ordinary memory."""
    built = built_model_of(model)
    assert built is not None
    built.whole()
    return model


def everything_of(model: Any) -> dict[str, torch.Tensor]:
    return {
        **{name: value.detach() for name, value in model.named_parameters(remove_duplicate=False)},
        **dict(model.named_buffers(remove_duplicate=False)),
    }


# --- rounded as it is read ------------------------------------------------------------------------


@pytest.mark.parametrize("kind", list(CompactKind))
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[] if n in SHORT else pytest.mark.slow) for n in COMPACTED]
)
def test_each_layer_has_the_bits_of_one_made_compact_in_memory(
    name: str, kind: CompactKind, tmp_path: Path, drive: Path
) -> None:
    folder = saved(FAMILIES[name], tmp_path / "given", length=LENGTH)
    loaded = infinity_engine.load_pretrained(
        folder, budget(drive), dtype=torch.bfloat16, compact=kind.value
    )
    built = built_model_of(loaded)
    assert built is not None
    layers = compact_layers(loaded)
    assert layers
    assert all(built.is_absent(layer.weight) for layer in layers.values())

    expected = type(loaded).from_pretrained(folder, dtype=torch.bfloat16)
    for path in layers:
        expected.set_submodule(path, CompactLinear.of(expected.get_submodule(path), kind))

    assert differing(everything_of(expected), everything_of(whole(loaded))) == []
    assert not loaded.training
    assert loaded.get_output_embeddings() not in layers.values()


def test_a_model_without_linear_layers_of_torch_is_refused(tmp_path: Path, drive: Path) -> None:
    folder = saved(FAMILIES["falcon"], tmp_path / "given", length=LENGTH)
    refused(folder, drive, r"with layers of the class torch\.nn\.Linear", compact="nf4")


def test_an_unknown_kind_is_refused(tmp_path: Path, drive: Path) -> None:
    llama().save_pretrained(tmp_path / "given")
    refused(tmp_path / "given", drive, "compact: expected one of int8, nf4", compact="int9")


def test_a_weight_without_whole_blocks_stays_in_full(tmp_path: Path, drive: Path) -> None:
    folder = saved(FAMILIES["qwen2-moe"], tmp_path / "given", length=LENGTH)
    model = infinity_engine.load_pretrained(folder, budget(drive), compact="nf4")

    gate = model.model.layers[0].mlp.shared_expert_gate
    assert type(gate) is torch.nn.Linear
    assert gate.weight.numel() % 64


# --- saved by bitsandbytes ------------------------------------------------------------------------


def test_a_directory_in_the_layout_of_bitsandbytes_is_loaded_with_its_values(
    tmp_path: Path, drive: Path
) -> None:
    expected = saved_as_bitsandbytes(llama(), tmp_path / "given").eval()

    model = infinity_engine.load_pretrained(tmp_path / "given", budget(drive))

    assert differing(everything_of(expected), everything_of(whole(model))) == []
    assert compact_layers(model).keys() == compact_layers(expected).keys()
    with torch.no_grad():
        assert torch.equal(model(TOKENS).logits, expected(TOKENS).logits)


def test_a_compact_model_that_was_saved_is_loaded_again(tmp_path: Path, drive: Path) -> None:
    llama().save_pretrained(tmp_path / "given")
    model = whole(infinity_engine.load_pretrained(tmp_path / "given", budget(drive), compact="nf4"))
    model.save_pretrained(tmp_path / "saved")

    again = whole(infinity_engine.load_pretrained(tmp_path / "saved", budget(drive)))

    assert differing(everything_of(model), everything_of(again)) == []


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("nested", [False, True])
def test_directories_go_to_and_from_bitsandbytes(nested: bool, tmp_path: Path, drive: Path) -> None:
    pytest.importorskip("accelerate", reason="quantized models are loaded with it")
    pytest.importorskip("bitsandbytes", reason="it saves the models", exc_type=ImportError)
    llama().save_pretrained(tmp_path / "given")
    kind = transformers().LlamaForCausalLM
    theirs = kind.from_pretrained(
        tmp_path / "given",
        device_map={"": "cpu"},
        quantization_config=transformers().BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=nested
        ),
    ).train()  # its kernels for inference round otherwise
    theirs.save_pretrained(tmp_path / "theirs")

    model = whole(infinity_engine.load_pretrained(tmp_path / "theirs", budget(drive)))
    model.save_pretrained(tmp_path / "mine")
    back = kind.from_pretrained(tmp_path / "mine", device_map={"": "cpu"}).train()

    expected = theirs(TOKENS, labels=TOKENS).loss.item()
    assert len(compact_layers(model)) == 14
    assert model(TOKENS, labels=TOKENS).loss.item() == pytest.approx(expected, rel=1e-6)
    assert type(back.model.layers[0].mlp.up_proj).__name__ == "Linear4bit"
    assert back(TOKENS, labels=TOKENS).loss.item() == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(
    "form",
    [
        {"bnb_4bit_quant_type": "fp4"},
        {"load_in_4bit": False, "load_in_8bit": True},
        {"quant_method": "gptq", "load_in_4bit": None},
    ],
)
def test_weights_that_are_quantized_otherwise_are_refused(
    form: dict[str, Any], tmp_path: Path, drive: Path
) -> None:
    saved_as_bitsandbytes(llama(), tmp_path / "given")
    change(tmp_path / "given", quantization_config={**DOUBLE, **form})

    refused(tmp_path / "given", drive, "none, or nf4 of bitsandbytes")


def test_compact_weights_are_not_rounded_again(tmp_path: Path, drive: Path) -> None:
    saved_as_bitsandbytes(llama(), tmp_path / "given")
    refused(tmp_path / "given", drive, "stay as they are", compact="int8")


@pytest.mark.parametrize("gone", ["absmax", "quant_map", "quant_state.bitsandbytes__nf4"])
def test_a_layer_without_its_entries_is_named(gone: str, tmp_path: Path, drive: Path) -> None:
    from safetensors.torch import load_file, save_file

    name = f"model.layers.1.mlp.gate_proj.weight.{gone}"
    saved_as_bitsandbytes(llama(), tmp_path / "given")
    file = tmp_path / "given" / "model.safetensors"
    tensors = load_file(file)
    del tensors[name]
    save_file(tensors, file, metadata={"format": "pt"})

    refused(tmp_path / "given", drive, f"1 missing: {name}")


def test_a_weight_of_another_shape_is_named(tmp_path: Path, drive: Path) -> None:
    saved_as_bitsandbytes(llama(), tmp_path / "given")
    change(tmp_path / "given", intermediate_size=192)

    refused(tmp_path / "given", drive, r"layers\.\d\.mlp\.\w+\.weight: expected nf4 with")


def change(folder: Path, **values: Any) -> None:
    """Change a directory's configuration."""
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **values}))


def refused(folder: Path, drive: Path, match: str, **settings: Any) -> None:
    with pytest.raises(ConfigError, match=match):
        infinity_engine.load_pretrained(folder, budget(drive), **settings)
    assert unnamed_files(drive) == []
