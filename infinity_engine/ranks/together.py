"""What the engine asks of all ranks in a step: sums of gradients, their norm, the same update.

`ManyRanks` answers where a model is cut over several ranks, `OneRank` where one rank has all of it.
Moves nothing itself: a provider has the parameters, a reducer the gradients.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import torch

from infinity_engine.errors import CapacityError, CollectiveError
from infinity_engine.gradients.accumulation import Accumulation
from infinity_engine.gradients.keeper import GradientKeeper
from infinity_engine.kept_errors import kept, raise_any
from infinity_engine.optim import GradientNorm, Rule
from infinity_engine.parameters.modules import ModuleParameters, UnwatchedModules
from infinity_engine.parameters.parameters import ModelParameter
from infinity_engine.parameters.providing import Provider
from infinity_engine.partition.digest import digest_of
from infinity_engine.ranks.ranks import Cut, Ranks
from infinity_engine.ranks.reducing import GradientReducer

__all__ = ["ManyRanks", "OneRank"]


class _Together(ABC):
    """What ranks do together: what one cannot do, none does."""

    is_alone: bool
    rank: int

    @abstractmethod
    def tell(self, what: str, value: Any) -> list[Any]:
        """Return what each rank passes, as JSON has it."""

    def on_rank_0(self, what: str, act: Callable[[], Any]) -> Any:
        """Let rank 0 do something, and return what it returned; where it fails, all ranks do."""
        return self.on_all(what, act if self.rank == 0 else lambda: None)[0]

    def on_all(self, what: str, act: Callable[[], Any]) -> list[Any]:
        """Let all ranks do something; return what each returned. Where one fails, all do.

        Raises:
            CollectiveError: another rank failed.
        """
        failed: Exception | None = None
        done: Any = None
        try:
            done = act()
        except Exception as error:
            failed = kept(error)
        # With one rank nothing is exchanged, and any value may be returned.
        answer = {"failed": None, "done": done}
        if not self.is_alone:
            is_json = isinstance(done, dict | list | str | int | float)
            answer = {"failed": failed and str(failed), "done": done if is_json else None}
        said = self.tell(what, answer)
        # After the exchange, so that no other rank is left waiting.
        raise_any(failed)
        self.check(what, [answer["failed"] for answer in said])
        return [answer["done"] for answer in said]

    def check(self, what: str, failures: Sequence[str | None]) -> None:
        """Raise where a rank failed.

        Raises:
            CollectiveError: names the first one, and what it said.
        """
        for rank, failure in enumerate(failures):
            if failure is not None:
                reason = f"rank {rank} failed: {failure}"
                raise CollectiveError(group="all ranks", rank=self.rank, op=what, reason=reason)


class OneRank(_Together):
    """One rank that has all parameters and gradients: there is nothing to exchange."""

    is_alone = has_states = True
    rank, size, neighbours = 0, 1, 1

    def __init__(self, gradients: GradientKeeper) -> None:
        self._gradients = gradients

    def on_wait(self, call: Callable[[], object]) -> None:
        """Do nothing: this rank waits for no other."""

    def check_room_for_more(self) -> None:
        """Refuse another backward where the keeper has no room to sum its gradients."""
        self._gradients.check_room_for_more()

    def accumulate(self, number: int, gradient: torch.Tensor) -> None:
        """Give a gradient to the keeper."""
        self._gradients.accumulate(number, gradient)

    def end_backward(self, *, last: bool) -> None:
        """Do nothing: the keeper has all gradients already."""

    def waits(self, *, last: bool) -> bool:
        """Return False: no gradient waits to be reduced."""
        return False

    def finish(self, *, last: bool) -> None:
        """Do nothing."""

    def drop(self) -> None:
        """Do nothing."""

    def agree_on_update(
        self,
        rules: Sequence[Rule],
        max_grad_norm: float | None,
        loss_scale: float,
        accumulation: Accumulation,
    ) -> None:
        """Do nothing."""

    def norm(self) -> GradientNorm:
        """Return the norm of the gradients that the keeper has."""
        return self._gradients.norm()

    def own(self, number: int, flat: torch.Tensor) -> torch.Tensor:
        """Return all of a parameter."""
        return flat

    def gradient(self, number: int, found: torch.Tensor | None) -> torch.Tensor | None:
        """Return the gradient that was found."""
        return found

    def states(
        self, parameter: ModelParameter, states: Mapping[str, torch.Tensor], steps: int
    ) -> tuple[dict[str, torch.Tensor], int]:
        """Return the states as they are."""
        return dict(states), steps

    def check_same(self, changed: Sequence[ModelParameter]) -> None:
        """Do nothing."""

    def memory_for_copies(self, free: int) -> int:
        """Return all of the machine's free memory."""
        return free

    def first_element(self, number: int) -> int:
        """Return 0: this rank has all of every parameter."""
        return 0

    def agree_on(self, what: str, values: Mapping[str, object]) -> None:
        """Do nothing."""

    def tell(self, what: str, value: Any) -> list[Any]:
        """Return what this rank passes."""
        return [value]

    def any_has_more(self, *, has_more: bool, has_had: bool) -> bool:
        """Tell whether this rank has another batch."""
        return has_more

    def close(self, error: BaseException | None = None) -> None:
        """Do nothing: no other rank waits to hear of it."""


class ManyRanks(_Together):
    """A model that is cut over several ranks; `cut` says who owns what.

    `provider` gathers whole parameters, `reducer` sums gradients. The ranks call the same methods
    in the same order: one that calls another method ends the run with a CollectiveError.
    """

    is_alone = False

    def __init__(
        self,
        cut: Cut,
        provider: Provider,
        modules: ModuleParameters | UnwatchedModules,
        reducer: GradientReducer,
        gradients: GradientKeeper,
    ) -> None:
        self.cut = cut
        self.rank, self.neighbours = cut.ranks.rank, cut.ranks.neighbours
        self.has_states = self.rank < cut.ranks.shards.size
        """Whether its states are not another rank's as well: of replicas, the first one saves."""
        self.provider = provider
        self.modules = modules
        self.reducer = reducer
        self._gradients = gradients
        # Of the gradients reduced last: clipping and the update use the same.
        self._norm: GradientNorm | None = None
        # A backward has ended, and the ranks have yet to reduce its gradients.
        self._must_reduce = False

    @property
    def ranks(self) -> Ranks:
        """The ranks that train the model."""
        return self.cut.ranks

    @property
    def size(self) -> int:
        """How many ranks there are."""
        return self.ranks.size

    def first_element(self, number: int) -> int:
        """Return where this rank's shard of a parameter begins."""
        return self.cut.specs[number].shards[self.ranks.shards.rank].first_element

    def agree_on(self, what: str, values: Mapping[str, object]) -> None:
        """Make sure that all ranks have the same values.

        Raises:
            CollectiveError: they have not.
        """
        self.ranks.agree_on(what, values)

    def tell(self, what: str, value: Any) -> list[Any]:
        """Return what each rank passes, as JSON has it."""
        return self.ranks.tell(what, value)

    def on_wait(self, call: Callable[[], object]) -> None:
        """Call `call` again and again while this rank waits for others."""
        self.ranks.on_wait(call)

    def check_room_for_more(self) -> None:
        """Refuse another backward where a rank has no room to sum its gradients.

        All ranks call this.

        Raises:
            CapacityError: one has not. All ranks raise it, and nothing has changed.
        """
        # Gradients of a plain loss.backward() may be in flight: count them on all ranks.
        self.finish(last=True)
        if not self._gradients.may_refuse:
            return
        refusal = None
        try:
            self._gradients.check_room_for_more()
        except CapacityError as error:
            refusal = kept(error)
        refusal = self._first_refusal("room for a further backward", refusal)
        raise_any(refusal)

    def accumulate(self, number: int, gradient: torch.Tensor) -> None:
        """Give a whole gradient to the reducer."""
        self.reducer.accumulate(number, gradient)

    def end_backward(self, *, last: bool) -> None:
        """Reduce the gradients of a backward, or note that they wait for the `last` one.

        All ranks call this.

        Raises:
            CapacityError: a rank has no room for their sums. All ranks raise it.
        """
        # Before gradients are reduced: modules let go of what their backward held.
        self.modules.end_backward()
        if self.waits(last=last):
            self._must_reduce = True
        else:
            self._reduce()

    def waits(self, *, last: bool) -> bool:
        """Tell whether gradients stay on the rank that made them until the last micro-batch."""
        return self.reducer.adds_up and not last

    def finish(self, *, last: bool) -> None:
        """Reduce gradients that came outside of `Engine.backward`, or that waited for this.

        Raises:
            CapacityError: as `end_backward`.
        """
        if (self.reducer.open or self._must_reduce) and not self.waits(last=last):
            self._reduce()

    def agree_on_update(
        self,
        rules: Sequence[Rule],
        max_grad_norm: float | None,
        loss_scale: float,
        accumulation: Accumulation,
    ) -> None:
        """Make sure that all ranks update in the same way; they exchange this once a step.

        Raises:
            CollectiveError: they do not. The error names what differs, and on which ranks.
        """
        groups = {f"optimizer's group {number}": rule for number, rule in enumerate(rules)}
        mine = {
            **groups,
            "max_grad_norm": max_grad_norm,
            "loss scale": loss_scale,
            "micro-batches of this step": accumulation.count,
            "divisor of gradients": accumulation.divisor,
        }
        self.ranks.agree_again_on("what the update is made with", mine)

    def drop(self) -> None:
        """Drop all gradients since the last step. All ranks call this."""
        self.reducer.drop()
        self._must_reduce = False

    def _reduce(self) -> None:
        self._must_reduce = False
        self._norm = None
        self.reducer.finish()
        self._check_refused()

    def _check_refused(self) -> None:
        """Raise, on all ranks, where one had no room for the sum of a gradient."""
        refusal = self._gradients.refusal
        # Nothing is exchanged for what the plans of all ranks have room for.
        if self._gradients.may_have_refused:
            refusal = self._first_refusal("room for the sums of gradients", refusal)
            if refusal is not None:
                # No rank may step with gradients that another one lacks.
                self._gradients.note_refused(f"a parameter on rank {refusal.rank}")
        raise_any(refusal)

    def _first_refusal(self, what: str, own: CapacityError | None) -> CapacityError | None:
        """Return what the first rank that has no room says, None where all have room."""
        for rank, refusal in enumerate(self.tell(what, own and asdict(own))):
            if refusal is not None:
                return CapacityError(**{**refusal, "rank": rank})
        return None

    def norm(self) -> GradientNorm:
        """Return the norm of the gradients of all ranks, which they exchange once a step."""
        # A norm of gradients that are gone says nothing.
        if self._norm is None or not self._gradients.any:
            specs = self.cut.specs[: len(self.cut.trained)]
            self._norm = self.ranks.norm(self._gradients.sums(), specs)
        return self._norm

    def own(self, number: int, flat: torch.Tensor) -> torch.Tensor:
        """Return this rank's shard of a whole parameter."""
        return self.ranks.own(self.cut.specs[number], flat)

    def gradient(self, number: int, found: torch.Tensor | None) -> torch.Tensor | None:
        """Return this rank's shard of a gradient: zeros if only other ranks have it, else None."""
        # Asked of all ranks, also where this one has some: all have to come to it.
        name = self.cut.wholes[number].name
        if not self.ranks.most(f"gradients of {name}", int(found is not None)):
            return None
        return torch.zeros(self.cut.trained[number].numel) if found is None else found

    def states(
        self, parameter: ModelParameter, states: Mapping[str, torch.Tensor], steps: int
    ) -> tuple[dict[str, torch.Tensor], int]:
        """Return a parameter's whole states and its steps, from the shards of all ranks.

        A rank that owns no element of it has counted no steps.
        """
        spec = self.cut.specs[parameter.number]
        wholes = self.ranks.wholes(f"states of {parameter.name}", spec, list(states.values()))
        whole = dict(zip(states, wholes, strict=True))
        return whole, self.ranks.most(f"steps of {parameter.name}", steps)

    def check_same(self, changed: Sequence[ModelParameter]) -> None:
        """Make sure that all ranks have changed parameters to the same values.

        Raises:
            CollectiveError: they have not.
        """
        digests = {parameter.name: digest_of(parameter.parameter.data) for parameter in changed}
        self.ranks.agree_on("what gathered(modify=True) wrote", digests)

    def memory_for_copies(self, free: int) -> int:
        """Return this rank's part of its machine's free memory, as the rank with least has it."""
        return self.ranks.least("memory for a state dict", free // self.neighbours)

    def any_has_more(self, *, has_more: bool, has_had: bool) -> bool:
        """Tell whether any rank has another batch."""
        return self.ranks.any_has_more(has_more=has_more, has_had=has_had)

    def close(self, error: BaseException | None = None) -> None:
        """Leave the other ranks, which learn the error where there is one."""
        self.ranks.close(error)
