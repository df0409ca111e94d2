"""The optimizer's states in the layout of torch's own optimizers: out of an engine, and into it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, cast

import torch

from infinity_engine.building.previous import PreviousStates
from infinity_engine.engine.checkpoints.checkpointing import Run
from infinity_engine.engine.checkpoints.loading import Loads, Overwritten
from infinity_engine.engine.guards import LEFT_WITH_THE_ENGINE
from infinity_engine.errors import ConfigError
from infinity_engine.optim import Rule, Segment, check_rules, rules_of
from infinity_engine.ranks.together import ManyRanks

__all__ = ["load_optimizer_state_dict", "nbytes_of_states", "optimizer_state_dict"]

_StateOf = Callable[[torch.nn.Parameter], Mapping[str, torch.Tensor | int]]


def nbytes_of_states(run: Run) -> int:
    """Return how many bytes all moments have, and one copy of the largest master."""
    sizes = [4 * known.of_model.numel() for known in run.trained]
    return len(run.states.state_names) * sum(sizes) + max(sizes, default=0)


def optimizer_state_dict(run: Run, state_of: _StateOf) -> dict[str, Any]:
    """Return what the optimizer's `state_dict()` would be if it had the states itself."""
    trained = {id(known.of_model): known for known in run.trained}
    rules = rules_of(run.optimizer)
    states: dict[int, dict[str, Any]] = {}
    groups: list[dict[str, Any]] = []
    for number, parameter in _numbered(run.optimizer):
        known = trained.get(id(parameter))
        state = None if known is None else state_of(parameter)
        # As in torch, a parameter that was never updated has no state.
        if known is None or state is None or not state["step"]:
            continue
        rule = rules[known.group]
        if rule.states:
            states[number] = {name: state[name] for name in rule.states}
        if not isinstance(run.optimizer, torch.optim.SGD):  # torch counts steps for all others
            # It keeps the count in a float tensor on the CPU.
            steps = torch.tensor(float(state["step"]), device="cpu")
            states[number] = {"step": steps, **states.get(number, {})}
    first = 0
    for group in run.optimizer.param_groups:
        # torch numbers the parameters through all groups.
        numbers = list(range(first, first + len(group["params"])))
        first += len(numbers)
        groups.append({**group, "params": numbers})
    return {"state": states, "param_groups": groups}


def load_optimizer_state_dict(run: Run, loads: Loads, state_dict: Mapping[str, Any]) -> int | None:
    """Overwrite moments, step counts and groups; return the largest step count, None where states
    have none, as SGD's and Lion's.

    Where that fails half-way, `loads` knows it.

    Raises:
        ConfigError: it is of an optimizer with other groups or states. Nothing has changed.
        CollectiveError: the ranks were given other states, or another rank failed.
    """
    groups, states = state_dict["param_groups"], state_dict["state"]
    _check_groups(run.optimizer, groups)
    numbers = [number for group in groups for number in group["params"]]
    listed = [parameter for _, parameter in _numbered(run.optimizer)]
    given = {
        parameter: states[number]
        for number, parameter in zip(numbers, listed, strict=True)
        if number in states
    }
    # Rules follow from the groups: these are set first, and set back where states do not fit.
    before = [dict(group) for group in run.optimizer.param_groups]
    _set_groups(run.optimizer, groups)
    try:
        rules = rules_of(run.optimizer)
        # On all ranks: where one was given other states, none goes on.
        run.ranks.on_all("checking the optimizer's states", lambda: _check(run, rules, state_dict))
        # PreviousStates reads the `state` of an optimizer and nothing else.
        stand_in = cast(torch.optim.Optimizer, SimpleNamespace(state=given))
        previous = PreviousStates(stand_in, run.trained, rules)
        if isinstance(run.ranks, ManyRanks):
            previous.cut(run.ranks.cut)
    except BaseException:
        _set_groups(run.optimizer, before)
        raise

    def fill(segment: Segment, pieces: Mapping[str, torch.Tensor]) -> None:
        rule = rules[run.trained[segment.parameter].group]
        for name, piece in pieces.items():
            # Weights are not the optimizer's: masters stay.
            if name == "master":
                continue
            first = segment.first_element
            has = name in rule.states and previous.fill(segment.parameter, name, first, piece)
            if not has:
                piece.fill_(rule.initial_state)

    steps = {known.number: previous.steps_of(known.number) for known in run.trained}
    with loads.overwriting(Overwritten.STATES):
        run.ranks.on_all(
            "overwriting the optimizer's states", lambda: run.states.overwrite_segments(fill)
        )
        for number, made in steps.items():
            run.states.set_steps(number, made)
    counts = any("step" in state for state in given.values())
    if not counts and (given or not any(rule.states for rule in rules)):
        return None
    return max(steps.values(), default=0)


def _check(run: Run, rules: Sequence[Rule], state_dict: Mapping[str, Any]) -> None:
    """Refuse what an engine left without states, and options that need others than there are."""
    updates = state_dict.get(LEFT_WITH_THE_ENGINE)
    if updates:
        raise ConfigError(
            field="state_dict",
            value=f"one without states, as an engine had those, of {updates} updates",
            expected="what optimizer_state_dict() of the engine returned, or a plain optimizer's",
        )
    check_rules(rules, states=run.states.state_names, groups=run.states.groups)


def _numbered(optimizer: torch.optim.Optimizer) -> Iterator[tuple[int, torch.nn.Parameter]]:
    """Yield the parameters with the numbers that torch gives them."""
    yield from enumerate(
        parameter for group in optimizer.param_groups for parameter in group["params"]
    )


def _check_groups(optimizer: torch.optim.Optimizer, groups: Sequence[Mapping[str, Any]]) -> None:
    mine = [len(group["params"]) for group in optimizer.param_groups]
    given = [len(group["params"]) for group in groups]
    if mine != given:
        raise ConfigError(
            field="numbers of parameters in the groups of state_dict",
            value=given,
            expected=f"{mine}, as the optimizer of this engine has them",
        )


def _set_groups(optimizer: torch.optim.Optimizer, groups: Sequence[Mapping[str, Any]]) -> None:
    for group, given in zip(optimizer.param_groups, groups, strict=True):
        group.update({name: value for name, value in given.items() if name != "params"})
