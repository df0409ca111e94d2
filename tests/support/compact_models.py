"""Directories of compact models, as bitsandbytes saves them, and what they stand for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from infinity_engine.compact import CompactKind, CompactLinear, compact_linears
from support.families import transformers

__all__ = ["DOUBLE", "compact_layers", "llama", "saved_as_bitsandbytes", "with_plain_layers"]

# What Transformers writes into a configuration for nf4 with scales in 8 bits.
DOUBLE = {
    "quant_method": "bitsandbytes",
    "load_in_4bit": True,
    "load_in_8bit": False,
    "bnb_4bit_quant_type": "nf4",
    "bnb_4bit_use_double_quant": True,
    "bnb_4bit_compute_dtype": "float32",
    "llm_int8_skip_modules": None,
}
_NESTED_BLOCK = 20  # scales with one scale of their own


def llama(**changes: Any) -> Any:
    """Return a Llama of two layers, always with the same values.

    Its rows are whole blocks: bitsandbytes' own kernels for CPUs expand others wrongly (0.50).
    """
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    config = transformers().LlamaConfig(
        vocab_size=64, num_attention_heads=2, eos_token_id=None, **{**sizes, **changes}
    )
    return transformers().LlamaForCausalLM(config)


def compact_layers(model: torch.nn.Module) -> dict[str, CompactLinear]:
    """Return the compact layers of a model by their paths."""
    return {
        path: module for path, module in model.named_modules() if isinstance(module, CompactLinear)
    }


def with_plain_layers(model: Any, compact: torch.nn.Module) -> Any:
    """Give a model the linear layers that another one's compact layers stand for."""
    for path, layer in compact_layers(compact).items():
        plain = model.get_submodule(path)
        with torch.no_grad():
            plain.weight.copy_(layer.expanded(plain.weight.dtype))
    return model


def saved_as_bitsandbytes(model: Any, folder: Path) -> Any:
    """Save a model as Transformers saves one that bitsandbytes has quantized, scales in 8 bits.

    Written by the published layout, without bitsandbytes. Return the model, which is compact then.
    """
    from safetensors.torch import save_file

    compact_linears(model, CompactKind.NF4)
    state = {name: value.contiguous() for name, value in model.state_dict().items()}
    for path, layer in compact_layers(model).items():
        state |= _nested(f"{path}.weight", layer)
    folder.mkdir()
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(folder)
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "quantization_config": DOUBLE}))
    return model


def _nested(name: str, layer: CompactLinear) -> dict[str, torch.Tensor]:
    """Return a layer's scales in 8 bits, which the layer has from now on."""
    values = torch.linspace(-1, 1, 256)
    offset = layer.scale.mean().item()
    rest = layer.scale.detach() - offset
    nested = torch.stack([part.abs().max() for part in torch.split(rest, _NESTED_BLOCK)])
    factors = nested.repeat_interleave(_NESTED_BLOCK)[: len(rest)]
    numbers = torch.bucketize(rest / factors, values).clamp(max=255)
    layer.scale.data = values[numbers] * factors + offset
    described = {
        "quant_type": "nf4",
        "blocksize": 64,
        "dtype": "bfloat16",
        "shape": [layer.out_features, layer.in_features],
        "nested_blocksize": _NESTED_BLOCK,
        "nested_dtype": "float32",
        "nested_offset": offset,
    }
    return {
        f"{name}.absmax": numbers.byte(),
        f"{name}.nested_absmax": nested,
        f"{name}.nested_quant_map": values,
        f"{name}.quant_state.bitsandbytes__nf4": torch.tensor(
            list(json.dumps(described).encode())
        ).byte(),
    }
