"""`PreviousStates`: states that an optimizer made before the engine, which goes on with them.

Checks them and fills the engine's own from them. The optimizer keeps them until the engine is
complete.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from infinity_engine.errors import ConfigError
from infinity_engine.optim import Rule
from infinity_engine.parameters.parameters import TrainedParameter
from infinity_engine.partition.digest import digest_of
from infinity_engine.ranks.ranks import Cut

__all__ = ["PreviousStates"]

_STEP = "step"


class PreviousStates:
    """The states of `trained`, the parameters of the model; each has the rule of its group."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        trained: Sequence[TrainedParameter],
        rules: Sequence[Rule],
    ) -> None:
        self._optimizer = optimizer
        self._cut: Cut | None = None
        self._states: dict[int, Mapping[str, Any]] = {}
        for known in trained:
            # get: looking a parameter up in torch's defaultdict would add an entry.
            state = optimizer.state.get(known.parameter, {})
            if _has_stepped(state):
                self._states[known.number] = _checked(known, state, rules[known.group])

    def cut(self, cut: Cut) -> None:
        """From here on, fill the shards of this rank.

        Raises:
            CollectiveError: the ranks have other states.
        """
        # Ranks that resumed from different files would otherwise train on, unnoticed.
        cut.ranks.agree_on(
            "the optimizer's states",
            {
                f"{name} of {known.name}": digest_of(value)
                if isinstance(value, torch.Tensor)
                else value
                for known in cut.wholes
                for name, value in self._states.get(known.number, {}).items()
            },
        )
        self._cut = cut

    def steps_of(self, number: int) -> int:
        """Return how many updates a parameter has had: 1 for SGD's states, which have no count."""
        return int(self._states.get(number, {_STEP: 0}).get(_STEP, 1))

    def fill(self, number: int, name: str, first_element: int, values: torch.Tensor) -> bool:
        """Fill flat `values` with part of a parameter's or shard's state; False: there is none."""
        state = self._states.get(number)
        if state is None:
            return False
        flat = state[name].detach().reshape(-1)
        if self._cut is not None:
            flat = self._cut.ranks.own(self._cut.specs[number], flat)
        values.copy_(flat[first_element : first_element + values.numel()])
        return True

    def release(self, trained: Sequence[TrainedParameter]) -> None:
        """Remove the states from the optimizer: the engine has them."""
        # Under the user's own parameter, which is the optimizer's key.
        for known in trained:
            if known.number in self._states:
                del self._optimizer.state[known.of_model]
        self._states.clear()


def _has_stepped(state: Mapping[str, object]) -> bool:
    """Tell whether states come from steps: Adagrad makes some before its first step."""
    step = state.get(_STEP, 1)
    # SGD without momentum keeps None; states that have a count of 0 come from no step.
    return any(value is not None for value in state.values()) and bool(step != 0)


def _checked(known: TrainedParameter, state: Mapping[str, Any], rule: Rule) -> dict[str, Any]:
    """Return a parameter's states, after checking that its rule knows all of them."""
    found = {name: value for name, value in state.items() if value is not None}
    numel, shape = known.parameter.numel(), tuple(known.parameter.shape)
    # The count is no state of the rule.
    if set(found) - {_STEP} != set(rule.states):
        raise ConfigError(
            field=f"optimizer's states of {known.name}",
            value=", ".join(sorted(found)) or "nothing",
            expected=(
                f"{', '.join(rule.states) or 'nothing'}, the states of {type(rule).__name__} with "
                "the options of its group. To begin with new states, call optimizer.state.clear()"
            ),
        )
    for name in rule.states:
        value = found[name]
        if (
            not isinstance(value, torch.Tensor)
            or value.numel() != numel
            or tuple(value.shape) != shape
        ):
            raise ConfigError(
                field=f"optimizer's {name} of {known.name}",
                value=f"a tensor of shape {tuple(value.shape)}"
                if isinstance(value, torch.Tensor)
                else value,
                expected=f"a tensor of the parameter's shape {shape}",
            )
    return found
