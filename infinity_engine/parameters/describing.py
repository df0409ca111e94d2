"""Describes a model, its optimizer and the settings in sizes, for a planner that knows no torch."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from types import MappingProxyType

import torch

from infinity_engine.activation.blocks import blocks_held_whole
from infinity_engine.config import EngineConfig, ParametersAt
from infinity_engine.optim import FloatFormat, Rule
from infinity_engine.optim.policy import OffloadPolicy
from infinity_engine.parameters.parameters import ModelParameter, TrainedParameter
from infinity_engine.placement.buffers import NO_LAYOUT
from infinity_engine.placement.models import ModelShape, ModuleShape, ParameterShape
from infinity_engine.placement.pieces import GradientPiece
from infinity_engine.placement.placing import Plan, Wish
from infinity_engine.placement.sizing import Sizing, cut
from infinity_engine.plan import Rates, Tier

__all__ = ["deepest_of", "pieces_of", "shape_of", "sizing_of", "wish_of"]

_TIERS = MappingProxyType(
    {
        ParametersAt.AUTO: (Tier.DEVICE, Tier.HOST, Tier.NVME),
        ParametersAt.DEVICE: (Tier.DEVICE,),
        ParametersAt.HOST: (Tier.HOST,),
        ParametersAt.NVME: (Tier.NVME,),
    }
)
_LISTS = (torch.nn.ParameterList, torch.nn.ParameterDict)


def sizing_of(
    model: torch.nn.Module,
    trained: Sequence[TrainedParameter],
    frozen: Sequence[ModelParameter],
    rules: Sequence[Rule],
    config: EngineConfig,
    *,
    unified: bool,
) -> Sizing:
    """Return the sizes of a model with these parameters, or of shards of them."""
    everything = (*trained, *frozen)
    nbytes = {id(parameter.of_model): parameter.nbytes for parameter in everything}
    is_cut = any(parameter.part_of is not None for parameter in everything)
    on_drives = config.budget is not None and config.budget.nvme
    return Sizing(
        subgroups=cut(
            [(parameter.numel, parameter.formats) for parameter in trained],
            config.subgroup_numel,
            small_bytes=config.storage.small_bytes if on_drives else None,
        ),
        # The widest rule decides: every subgroup has memory for as many states.
        state_names=max(
            (rules[group].states for group in {known.group for known in trained}),
            key=len,
            default=(),
        ),
        parameters=tuple(nbytes.values()),
        deepest=deepest_of(model, nbytes, blocks_held_whole(model)),
        unified=unified,
        sums=config.accumulation_steps > 1,
        activations=config.activation_bytes,
        gradient_width=FloatFormat.FP32.nbytes if is_cut else None,  # sums of all ranks'
    )


def deepest_of(
    model: torch.nn.Module, nbytes: Mapping[int, int], leaves: Collection[str] = ()
) -> int:
    """Return the most bytes that nested modules need at one time; `nbytes` is by parameters' id.

    Modules of `leaves` need all that is inside them.
    """
    modules = dict(model.named_modules())
    return _deepest(
        model,
        lambda parameter: nbytes.get(id(parameter), 0),
        frozenset(id(modules[name]) for name in leaves),
    )


def shape_of(
    model: torch.nn.Module, trained: Iterable[TrainedParameter], frozen: Iterable[ModelParameter]
) -> ModelShape:
    """Return a live model in the planner's terms; arithmetic is estimated from the weights."""
    ours = {id(known.of_model) for known in trained}
    widths = {id(known.of_model): known.dtype.itemsize for known in (*trained, *frozen)}
    seen: set[int] = set()
    modules = []
    for name, module in model.named_modules():
        own = [
            (key, parameter)
            for key, parameter in module.named_parameters(
                name, recurse=False, remove_duplicate=False
            )
            if parameter.numel()
        ]
        # A tied parameter belongs to the module that has it first.
        first = [(key, parameter) for key, parameter in own if id(parameter) not in seen]
        seen.update(id(parameter) for _, parameter in own)
        # An embedding looks rows up and multiplies nothing.
        multiplies = not isinstance(module, torch.nn.Embedding)
        shape = ModuleShape(
            name=name,
            parameters=tuple(
                ParameterShape(key, parameter.numel(), id(parameter) in ours, widths[id(parameter)])
                for key, parameter in first
            ),
            flops_per_token=sum(
                2 * parameter.numel() for _, parameter in own if multiplies and parameter.ndim > 1
            ),
            shared_numel=sum(parameter.numel() for _, parameter in own)
            - sum(parameter.numel() for _, parameter in first),
        )
        if own:
            modules.append(shape)
    return ModelShape(
        name=type(model).__name__,
        modules=tuple(modules),
        deepest_numel=_deepest(model, lambda parameter: parameter.numel()),
    )


def pieces_of(sizing: Sizing, plan: Plan, trained: int) -> list[list[GradientPiece]]:
    """Return the pieces in which the gradient of each trained parameter is needed."""
    homes = plan.steps.homes()
    pieces: dict[int, list[GradientPiece]] = {}
    for subgroup in sizing.subgroups:
        layout = plan.layouts.get(subgroup.index, NO_LAYOUT)
        stays = sizing.gradient_stays(homes[subgroup.index], drives=plan.resting.any)
        for number, segment in enumerate(subgroup.segments):
            kept = Tier.DEVICE if stays else Tier.HOST
            if number in layout.gradients:
                kept = Tier.NVME
            piece = GradientPiece(segment.first_element, segment.numel, kept)
            pieces.setdefault(segment.parameter, []).append(piece)
    return [pieces.get(number, []) for number in range(trained)]


def wish_of(config: EngineConfig, policy: OffloadPolicy | None) -> Wish:
    """Return what the settings ask for, and a policy that replaces the strategy's."""
    return Wish(
        strategy=config.strategy,
        tiers=_TIERS[config.parameters],
        accumulation_steps=config.accumulation_steps,
        small_bytes=config.storage.small_bytes,
        rates=(config.rates or Rates()).both_at_once(),  # as the planner gives them to policies
        early_updates=config.storage.early_updates,
        policy=policy,
    )


def _deepest(
    module: torch.nn.Module,
    nbytes: Callable[[torch.nn.Parameter], int],
    leaves: Collection[int] = (),
) -> int:
    """Return the most that a module and those inside it need at one time.

    A list of parameters is never called, so its parameters count for the module that has the list.
    """
    own = sum(nbytes(parameter) for parameter in module.parameters(recurse=id(module) in leaves))
    if id(module) in leaves:
        return own
    within = [child for child in module.children() if not isinstance(child, _LISTS)]
    own += sum(
        nbytes(parameter)
        for child in module.children()
        if isinstance(child, _LISTS)
        for parameter in child.parameters()
    )
    # The module's own stay while one of the modules inside runs.
    return own + max((_deepest(child, nbytes, leaves) for child in within), default=0)
