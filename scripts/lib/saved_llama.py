"""A Llama with random weights in a folder, as save_pretrained writes one, never whole in memory."""

from __future__ import annotations

import json
from importlib import metadata
from pathlib import Path
from typing import Any

import bench

__all__ = ["save_llama"]


def save_llama(folder: Path, *, dtype: str, **shape: Any) -> None:
    """Save a Llama of this shape, with values of this dtype, a file for each layer.

    Raises:
        UnavailableError: Transformers is missing.
    """
    try:
        metadata.version("transformers")
    except metadata.PackageNotFoundError:
        raise bench.UnavailableError(
            "Transformers is not installed in .venv: run scripts/test once"
        ) from None
    import torch
    import transformers

    from deepnvme import write_safetensors

    config = transformers.LlamaConfig(
        dtype=dtype, architectures=["LlamaForCausalLM"], eos_token_id=None, **shape
    )
    config.save_pretrained(folder)
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config)
    files: dict[str, dict[str, Any]] = {}
    for name, parameter in model.named_parameters():
        layer = name.split("layers.")[-1].split(".")[0]
        files.setdefault(f"model-{layer}.safetensors", {})[name] = parameter.shape
    generator = torch.Generator().manual_seed(0)
    kind: torch.dtype = getattr(torch, dtype)
    for file, shapes in files.items():
        values = {
            name: torch.ones(shape)
            if len(shape) == 1
            else torch.empty(shape).normal_(0, 0.02, generator=generator)
            for name, shape in shapes.items()
        }
        write_safetensors(
            folder / file,
            {name: tensor.to(kind) for name, tensor in values.items()},
            {"format": "pt"},
        )
    names = {name: file for file, shapes in files.items() for name in shapes}
    index = {"metadata": {}, "weight_map": names}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
