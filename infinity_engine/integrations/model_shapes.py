"""A config.json of any family that Transformers knows, as a ModelShape: the model is made on the
meta device, where parameters have shapes and no memory.

Reads no weights, runs no code of a model's directory, and asks no network. Called by the command
line, for families that the planner does not know by itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
import transformers

from infinity_engine.errors import ConfigError
from infinity_engine.placement.models import (
    UNKNOWN_ACTIVATIONS,
    Activations,
    ModelShape,
    ModuleShape,
    ParameterShape,
)
from infinity_engine.sim.configs import model_of_config

__all__ = ["shape_of_config"]

_MATRIX, _EXPERTS = 2, 3  # dimensions of a parameter: of one product, and of all experts of a layer


def shape_of_config(config: Mapping[str, Any], *, name: str) -> ModelShape | None:
    """Return the model that Transformers makes of a config.json; None: it knows no such model, or
    the config is not whole.
    """
    model = _made(config)
    if model is None:
        return None
    text = model.config.get_text_config()
    modules = tuple(_modules(model, text))
    kind = config.get("model_type")
    notes = [f"models of type {kind} are not known: parameters are those that Transformers makes"]
    activations = _activations(config)
    if activations.are_known:
        notes[0] += ", activations are an estimate by layers, width and vocabulary"
    positions = getattr(text, "max_position_embeddings", None)
    stated = getattr(model.config, "dtype", None)
    return ModelShape(
        name=name,
        modules=modules,
        deepest_numel=max(module.numel for module in modules),
        activations=activations,
        positions=positions if isinstance(positions, int) and positions > 0 else None,
        notes=tuple(notes),
        dtype=None if stated is None else str(stated).removeprefix("torch."),
    )


def _made(config: Mapping[str, Any]) -> Any:
    """Return the language model of a config, on the meta device; None where there is none."""
    plain = {key: value for key, value in config.items() if key not in {"model_type", "auto_map"}}
    try:
        known = transformers.AutoConfig.for_model(config.get("model_type"), **plain)
        with torch.device("meta"):
            return transformers.AutoModelForCausalLM.from_config(known)
    # Each family checks its config in its own way, and raises what it likes.
    except Exception:
        return None


def _activations(config: Mapping[str, Any]) -> Activations:
    try:
        return model_of_config(config, name="").activations
    except ConfigError:
        return UNKNOWN_ACTIVATIONS


def _modules(model: torch.nn.Module, text: Any) -> Iterator[ModuleShape]:
    """Yield the modules with parameters, each parameter once, in the order of registration."""
    seen: set[int] = set()
    attended = _outputs_of_attention(model, text)
    for path, module in model.named_modules():
        own = dict(module.named_parameters(path, recurse=False, remove_duplicate=False))
        first = {key: parameter for key, parameter in own.items() if id(parameter) not in seen}
        seen.update(map(id, own.values()))
        if own:
            is_linear = isinstance(module, torch.nn.Linear)
            yield ModuleShape(
                name=path,
                parameters=tuple(
                    ParameterShape(key, parameter.numel()) for key, parameter in first.items()
                ),
                flops_per_token=sum(_flops(module, parameter, text) for parameter in own.values()),
                attention_width=attended.get(path, 0),
                shared_numel=sum(
                    parameter.numel() for key, parameter in own.items() if key not in first
                ),
                sides=(module.out_features, module.in_features) if is_linear else (0, 0),
                own_class=is_linear and type(module) is not torch.nn.Linear,
            )


def _flops(module: torch.nn.Module, parameter: torch.nn.Parameter, text: Any) -> int:
    """Return the operations of a product with a parameter for one token."""
    if isinstance(module, torch.nn.Embedding) or parameter.ndim < _MATRIX:
        return 0
    flops = 2 * parameter.numel()
    if parameter.ndim < _EXPERTS:
        return flops
    # A token goes through some of the experts.
    chosen = getattr(text, "num_experts_per_tok", None)
    return flops * min(chosen, len(parameter)) // len(parameter) if chosen else flops


def _outputs_of_attention(model: torch.nn.Module, text: Any) -> dict[str, int]:
    """Return the width of each attention by the path of its last product."""
    heads = getattr(text, "num_attention_heads", None) or 0
    found: dict[str, int] = {}
    for path, module in model.named_modules():
        if not type(module).__name__.endswith("Attention"):
            continue
        linear = [
            (f"{path}.{name}", inner)
            for name, inner in module.named_modules()
            if isinstance(inner, torch.nn.Linear)
        ]
        if linear:
            width = getattr(module, "head_dim", None)
            last, product = linear[-1]
            found[last] = heads * width if isinstance(width, int) and heads else product.in_features
    return found
