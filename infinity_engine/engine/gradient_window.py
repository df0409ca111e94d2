"""`GradientWindow`: the gradients of one step, from its first backward to its update.

Decides which gradients a step accepts, how they are averaged, scaled and clipped, and when updates
begin in the backward. Holds no gradient: the keeper does, and across ranks the reducer before it.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from infinity_engine.engine.parts import EngineParts
from infinity_engine.errors import ConfigError
from infinity_engine.gradients.accumulation import Accumulation
from infinity_engine.gradients.nan_checks import NaNChecks
from infinity_engine.gradients.placeholders import GradientPlaceholders, set_to_none_message
from infinity_engine.optim import rules_of
from infinity_engine.parameters.hooks import Hooks
from infinity_engine.update.under_way import StepInputs

__all__ = ["GradientWindow"]


class GradientWindow:
    """The window of one engine, one step after the other."""

    def __init__(self, parts: EngineParts) -> None:
        self.nan_checks = NaNChecks(parts.modules, parts.scale)
        self.placeholders = GradientPlaceholders(Hooks(parts.hooks.signals))
        self.accumulation = Accumulation(parts.accumulation_steps, parts.meter.micro_batch)
        self.clip_to = parts.max_grad_norm
        """What the norm of the gradients is clipped to in the next update, or None."""
        self._parts = parts
        self._in_backward = False
        self._modifying = 0  # how many `gathered` have a body that may change trained parameters

    @property
    def in_backward(self) -> bool:
        """Whether the engine's own backward is running, before which everything was checked."""
        return self._in_backward

    # --- backwards --------------------------------------------------------------------------------

    @contextmanager
    def backward(self) -> Iterator[None]:
        """Note that the body is a backward of `Engine.backward`, which scales the loss."""
        self._in_backward = True
        try:
            yield
        finally:
            self._in_backward = False

    def begin_backward(self, *, averaged: bool, all_ranks: bool) -> None:
        """Refuse gradients that this step cannot use, before any comes.

        Begins the updates that storage.early_updates makes in the last backward. `all_ranks`: all
        ranks call this now, so they can refuse together. If not, several ranks refuse after they
        have reduced.
        """
        parts, accumulation = self._parts, self.accumulation
        if accumulation.is_full:
            if parts.early.begun:
                raise RuntimeError(
                    f"accumulation_steps is {accumulation.planned}, and this step has had as many "
                    "backwards. One more would add gradients to parameters that "
                    "storage.early_updates has updated already. Nothing was lost: call step(), "
                    "then compute this loss again"
                )
            # Refused before anything is computed: step() can still use what has come.
            if all_ranks or parts.ranks.is_alone:
                parts.ranks.check_room_for_more()
        begins = parts.early.enabled and not parts.early.begun and not self._modifying
        begins = begins and accumulation.expects_last
        rules = rules_of(parts.optimizer) if begins else ()
        if begins:
            parts.check_rules(rules)
        accumulation.begin_backward(averaged=averaged)
        if begins:
            # An early update reads the gradients of earlier micro-batches from the drives.
            parts.gradients.finish_transfers()
            parts.early.begin(StepInputs(parts.gradients, rules, self.unscaling))

    def accept(self, number: int, gradient: torch.Tensor) -> None:
        """Give a gradient that autograd has made to the keeper or the reducer.

        Raises:
            ConfigError: it is sparse.
            RuntimeError: it was not scaled, or it is NaN where a parameter was read as NaN.
        """
        parts = self._parts
        if gradient.layout != torch.strided:
            raise ConfigError(
                field=f"gradient of {parts.trained[number].name}",
                value=str(gradient.layout),
                expected="a dense gradient: use sparse=False",
            )
        # A plain loss.backward(): nothing was checked before it began.
        if not self._in_backward:
            # Another rank may get no gradient in this backward.
            self.begin_backward(averaged=True, all_ranks=False)
            if parts.scale.dynamic:
                raise RuntimeError(
                    "This gradient is of a loss that was not scaled, and in fp16 small values of "
                    "it are 0. Call engine.backward(loss), which scales it, not loss.backward()"
                )
        parts.modules.check_asked(number)
        if self.nan_checks.is_suspect(gradient):
            parts.gradients.note_refused(parts.trained[number].name)
            raise RuntimeError(
                f"The gradient of {parts.trained[number].name} is NaN. If it is finite in plain "
                "PyTorch, a torch.autograd.Function in your model keeps a parameter where the "
                "engine cannot find it, and its backward reads NaN there: let it call "
                "ctx.save_for_backward(parameter). No parameter was updated. Call zero_grad() "
                "before the next backward"
            )
        # After the refusals: a gradient that was refused opens no micro-batch.
        self.accumulation.note_gradient()
        parts.ranks.accumulate(number, gradient)
        self.placeholders.show(parts.trained[number])

    def end_backward(self, *, retains_graph: bool) -> None:
        """End a backward of `Engine.backward`; with `retains_graph`, its micro-batch goes on."""
        self.accumulation.end_backward(retains_graph=retains_graph)
        self._parts.ranks.end_backward(last=self.accumulation.is_reached)
        # Gradients are counted by now: subgroups that they complete can be updated.
        self._parts.early.go_on()

    # --- the update -------------------------------------------------------------------------------

    @property
    def unscaling(self) -> float:
        """What the sum of all gradients is multiplied by: loss scale, micro-batches and ranks."""
        divisor = self.accumulation.divisor * self._parts.ranks.size
        return 1.0 / (self._parts.scale.value * divisor)

    def clip(self, max_norm: float) -> float:
        """Clip the gradients to `max_norm` in the next update; return their norm as it is now.

        Raises:
            ConfigError: updates are made before the norm is known.
        """
        if self._parts.early.enabled:
            raise ConfigError(
                field="storage.early_updates",
                value=True,
                expected="False where gradients are clipped: some updates are made before the norm "
                "is known",
            )
        # The norm is of all gradients: they are reduced and have arrived first.
        self._parts.ranks.finish(last=True)
        self._parts.gradients.finish_transfers()
        norm = self._parts.ranks.norm().norm(self.unscaling)
        self.clip_to = float(max_norm)
        return norm

    def forget_clipping(self) -> None:
        """Clip to the setting max_grad_norm again."""
        self.clip_to = self._parts.max_grad_norm

    def gradient_of(self, number: int) -> torch.Tensor | None:
        """Return a flat copy of what this rank keeps of a gradient, None where no rank has one."""
        gradients, ranks = self._parts.gradients, self._parts.ranks
        last = self.accumulation.is_reached
        if ranks.is_alone and not gradients.has(number):
            return None
        if ranks.waits(last=last):  # no rank has its sum yet
            return None
        ranks.finish(last=last)
        gradients.finish_transfers()
        found = ranks.gradient(number, gradients.sum_of(number))
        # In place: it is a copy.
        return None if found is None else found.mul_(self.unscaling)

    def drop(self) -> None:
        """Drop all gradients since the last step, and what early updates have made of them."""
        parts = self._parts
        if self.accumulation.drops_in_vain():
            warnings.warn(
                f"zero_grad() drops the gradients of {self.accumulation.count} of "
                f"{self.accumulation.planned} micro-batches of a step. If it is called after each "
                "micro-batch, no step ever updates anything. Call it only after the last one",
                RuntimeWarning,
                stacklevel=4,
            )
        parts.ranks.drop()
        parts.early.drop()
        parts.gradients.clear()
        for trained in parts.trained:
            # An interrupt between autograd and the engine's hook leaves a gradient there.
            trained.parameter.grad = None
        self.accumulation.drop()
        self.forget_clipping()

    def check_may_drop(self) -> None:
        """Refuse to drop gradients that an earlier call of step() has left for a later one.

        Raises:
            RuntimeError: there are some.
        """
        if self.accumulation.left_by_step:
            raise RuntimeError(
                f"{set_to_none_message()}. Here they are those of {self.accumulation.count} of "
                f"{self.accumulation.planned} micro-batches of a step, and they still count. Call "
                "zero_grad() only after the last micro-batch. step() already clears the gradients "
                "that it used"
            )

    # --- changes by the caller --------------------------------------------------------------------

    @contextmanager
    def modifying(self) -> Iterator[None]:
        """Begin no early update in the body, which changes parameters."""
        self._modifying += 1
        try:
            yield
        finally:
            self._modifying -= 1
