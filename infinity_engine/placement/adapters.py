"""Models of which a part is frozen or compact, and models with low-rank adapters (LoRA).

Pure: from one ModelShape to another. Frozen parameters have no gradients and no states, and cross
links only to be used. Called by the command line.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace

from infinity_engine.errors import ConfigError
from infinity_engine.placement.models import ModelShape, ModuleShape, ParameterShape

__all__ = ["freeze", "with_compact_base", "with_lora"]

_FP32 = 4  # bytes: adapters are kept so, whatever the model computes in, and scales
_MOST_RANK = 4096
_BLOCK = 64  # elements of nf4 with one scale
_VALUES = 16  # that four bits stand for


def freeze(model: ModelShape, pattern: str) -> ModelShape:
    """Return the model with those parameters frozen that have the pattern in their names.

    Raises:
        ConfigError: it is no regular expression, or it is found in no name or in all of them.
    """
    try:
        names = re.compile(pattern)
    # OverflowError: a count too large; RecursionError: too many brackets in one another.
    except (re.error, OverflowError, RecursionError) as error:
        expected = f"a regular expression ({error})"
        raise ConfigError(field="--freeze", value=pattern, expected=expected) from error
    found = [bool(names.search(parameter.name)) for parameter in model.parameters]
    if not any(found) or all(found):
        example = model.parameters[0].name
        expected = f"a pattern that some names have, but not all; a name is {example}"
        raise ConfigError(field="--freeze", value=pattern, expected=expected)
    return replace(
        model,
        modules=tuple(
            replace(
                module,
                parameters=tuple(
                    replace(
                        parameter, trained=parameter.trained and not names.search(parameter.name)
                    )
                    for parameter in module.parameters
                ),
            )
            for module in model.modules
        ),
    )


def with_lora(model: ModelShape, rank: int) -> ModelShape:
    """Return the model, frozen, with adapters of this rank beside every linear module but the
    last, which makes the logits.

    Autograd keeps what goes into each adapter, in fp32, and what comes out of its first half.

    Raises:
        ConfigError: the rank is none.
    """
    if not 1 <= rank <= _MOST_RANK:
        expected = f"a rank from 1 to {_MOST_RANK}"
        raise ConfigError(field="--lora", value=rank, expected=expected)
    *inner, last = model.modules
    modules = [part for module in inner for part in _adapted(module, rank)]
    known = model.activations
    if known.are_known:
        kept = sum(module.sides[1] + rank for module in inner if module.sides[1])
        known = replace(known, fp32=known.fp32 + -(-kept // known.blocks))
    return replace(model, modules=(*modules, _frozen(last)), activations=known)


def with_compact_base(model: ModelShape, kind: str) -> ModelShape:
    """Return the model with the weights of frozen linear layers in 8 or 4 bits, as
    `compact.CompactLinear` keeps them; the last module, which makes the logits, stays whole, and so
    do layers of another class than `torch.nn.Linear`.

    Raises:
        ConfigError: the model has no such layers.
    """
    *inner, last = model.modules
    modules = [_compact(module, kind) for module in inner]
    expanded = [
        whole.sides[0] * whole.sides[1]
        for whole, module in zip(inner, modules, strict=True)
        if module is not whole
    ]
    if not expanded and any(module.own_class for module in inner):
        expected = (
            "a model with layers of the class torch.nn.Linear: loading makes no others compact, "
            f"and those of {model.name} are of a class of their own"
        )
        raise ConfigError(field="--base", value=kind, expected=expected)
    if not expanded:
        expected = "frozen linear layers: give --lora or --freeze beside it"
        raise ConfigError(field="--base", value=kind, expected=expected)
    known = model.activations
    return replace(
        model,
        modules=(*modules, last),
        activations=replace(known, expanded=max(expanded)) if known.are_known else known,
    )


def _compact(module: ModuleShape, kind: str) -> ModuleShape:
    """Return a frozen linear module with its weight compact, and any other as it is."""
    out, into = module.sides
    numel = out * into
    trains = any(parameter.trained for parameter in module.parameters)
    if not numel or trains or module.own_class or (kind == "nf4" and numel % _BLOCK):
        return module
    weight, *others = module.parameters
    scales = out if kind == "int8" else numel // _BLOCK
    integers = numel if kind == "int8" else numel // 2
    parts = (
        ParameterShape(weight.name, integers, trained=False, element_bytes=1, stands_for=numel),
        *(
            ParameterShape(
                f"{module.name}.{name}", count, trained=False, element_bytes=_FP32, stands_for=0
            )
            for name, count in (("scale", scales), ("values", _VALUES))
        ),
    )
    return replace(module, parameters=(*parts, *others))


def _adapted(module: ModuleShape, rank: int) -> Iterator[ModuleShape]:
    """Yield a module, frozen, and its two adapters in the order in which PEFT registers them."""
    yield _frozen(module)
    out, into = module.sides
    if not into:
        return
    for name, numel in (("lora_A", rank * into), ("lora_B", out * rank)):
        yield ModuleShape(
            name=f"{module.name}.{name}.default",
            parameters=(
                ParameterShape(f"{module.name}.{name}.default.weight", numel, element_bytes=_FP32),
            ),
            flops_per_token=2 * numel,
            feed_forward=module.feed_forward,
        )


def _frozen(module: ModuleShape) -> ModuleShape:
    return replace(
        module,
        parameters=tuple(replace(parameter, trained=False) for parameter in module.parameters),
    )
