"""Replaces the linear layers of a model by compact ones, and compact ones by linear layers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from typing import Any

import torch

from infinity_engine.compact.linear import CompactLinear
from infinity_engine.compact.weights import NF4_BLOCK, CompactKind
from infinity_engine.errors import ConfigError

__all__ = ["compact_linears", "expand_linears", "no_such_layers"]


def compact_linears(
    model: torch.nn.Module,
    kind: CompactKind | str = CompactKind.NF4,
    *,
    skip: Collection[str] = ("lm_head",),
) -> tuple[str, ...]:
    """Keep the weights of a model's linear layers in 8 or 4 bits; return their paths.

    Only modules of exactly the class `torch.nn.Linear` are replaced, and none that `skip` names by
    path or last name, that a model of Transformers keeps in fp32, that shares its weight, that has
    hooks, or whose weight has a number of elements that the kind cannot have. One weight at a time
    is in memory in both forms. Call it before peft adds adapters, and before `initialize`.

    Raises:
        ConfigError: the kind is unknown, or there is no such layer.
    """
    chosen = CompactKind.of(kind)
    # Transformers looks at the dtype of these weights when the model runs.
    kept = set(getattr(model, "_keep_in_fp32_modules", None) or ())
    holders = Counter(
        id(parameter)
        for module in model.modules()
        for parameter in module.parameters(recurse=False)
    )
    # By any of its paths: a layer may be in several places.
    left = {
        id(module)
        for path, module in model.named_modules(remove_duplicate=False)
        if {path, path.rpartition(".")[2]} & set(skip) or kept & set(path.split("."))
    }
    names = [
        path
        for path, module in model.named_modules()
        if path
        and type(module) is torch.nn.Linear
        and holders[id(module.weight)] == 1
        and id(module) not in left
        and not _has_hooks(module)
        and chosen.fits(module.weight.numel())
    ]
    if not names:
        raise no_such_layers(chosen, model)
    places = _places(model)
    for path in names:
        layer = model.get_submodule(path)
        assert isinstance(layer, torch.nn.Linear), "it was looked at above"
        made = CompactLinear.of(layer, chosen)
        for parent, name in places[id(layer)]:
            parent.add_module(name, made)
    return tuple(names)


def _has_hooks(module: torch.nn.Module) -> bool:
    return any(
        (
            module._forward_hooks,
            module._forward_pre_hooks,
            module._backward_hooks,
            module._backward_pre_hooks,
        )
    )


def _places(model: torch.nn.Module) -> Mapping[int, list[tuple[torch.nn.Module, str]]]:
    """Return the places of each module, by its id, as parents and names: it may have several."""
    places: dict[int, list[tuple[torch.nn.Module, str]]] = {}
    for parent in model.modules():
        for name, child in parent._modules.items():
            places.setdefault(id(child), []).append((parent, name))
    return places


def no_such_layers(kind: CompactKind, model: torch.nn.Module) -> ConfigError:
    """Return the error of a model that has no layer to be made compact."""
    return ConfigError(
        field="compact",
        value=f"{kind.value} for a {type(model).__name__}",
        expected="a model with layers of the class torch.nn.Linear, in nf4 of a multiple of "
        f"{NF4_BLOCK} elements: this one has none. Train it without compact layers",
    )


def expand_linears(model: torch.nn.Module, dtype: torch.dtype) -> tuple[str, ...]:
    """Give each compact layer its weight in floating point back; return their paths.

    The layers are `torch.nn.Linear` then, so that peft merges adapters into them. Within an
    `init_context`, the expanded weights go to the drives, and one at a time is in memory. Call it
    when no engine has the model.
    """
    names = [path for path, module in model.named_modules() if isinstance(module, CompactLinear)]
    places = _places(model)
    for path in names:
        layer = model.get_submodule(path)
        assert isinstance(layer, CompactLinear), "it was looked at above"
        made = layer.as_linear(dtype)
        for parent, name in places[id(layer)]:
            parent.add_module(name, made)
    # Transformers saves `quantization_config` with the model, and would load it as compact.
    for module in model.modules():
        config: Any = getattr(module, "config", None)
        if getattr(config, "quantization_config", None) is not None:
            config.update({"quantization_config": None})
    return tuple(names)
