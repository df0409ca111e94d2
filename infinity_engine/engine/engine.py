"""`Engine`: a model that trains within its budgets.

Call it like the model, then `backward` and `step`.

Ties together what the rest does: hooks give gradients to their keeper, a step fixes factor and
hyperparameters, the executor walks the plan, and modules compute with the new values. Made by
`initialize`.
"""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial, wraps
from itertools import islice
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch
from torch.autograd.graph import increment_version

from deepnvme import IOQueue
from deepnvme.choices import chosen
from infinity_engine.accel import Accelerator
from infinity_engine.checkpoint.directory import LATEST
from infinity_engine.checkpoint.export import SHARD_BYTES
from infinity_engine.engine.autosave import PREEMPTED_EXIT_CODE, Autosave
from infinity_engine.engine.checkpointing import Run, Stateful
from infinity_engine.engine.exporting import Exports, export_dtype
from infinity_engine.engine.guards import Guards
from infinity_engine.engine.loading import Loaded, Loads
from infinity_engine.engine.saving import OnError, SaveReport, SaveRequest, Saves, SaveState
from infinity_engine.errors import CapacityError, ConfigError
from infinity_engine.gradients.accumulation import Accumulation
from infinity_engine.gradients.keeper import GradientKeeper
from infinity_engine.gradients.scaling import LossScale
from infinity_engine.gradients.taken import TakenGradients, dropped_by_somebody
from infinity_engine.kept_errors import again, kept
from infinity_engine.lanes.meter import Meter
from infinity_engine.machine.capacity import free_for_copies
from infinity_engine.machine.memory import probe_memory
from infinity_engine.memory import Ledger, Usage
from infinity_engine.optim import GradientNorm, Rule, gradient_factor, rules_of
from infinity_engine.outcome import Outcome, StepResult
from infinity_engine.parameters.awaiting import AwaitedParameters
from infinity_engine.parameters.hooks import Hooks
from infinity_engine.parameters.modules import ModuleParameters, tensors_in
from infinity_engine.parameters.parameters import ModelParameter, TrainedParameter
from infinity_engine.parameters.providing import Provider
from infinity_engine.plan import Tier
from infinity_engine.plan.step import StepPlan
from infinity_engine.ranks.sharding import Whole
from infinity_engine.reporting.device_full import no_room_for_modules
from infinity_engine.reporting.drives import DriveMeter
from infinity_engine.reporting.report import StepReport, report_of
from infinity_engine.residence import FetchingStats
from infinity_engine.schedule import Executor
from infinity_engine.signals import HeldEnd
from infinity_engine.telemetry import Telemetry, Timeline
from infinity_engine.update.early import EarlyUpdates
from infinity_engine.update.replanning import Replanner
from infinity_engine.update.states import StateKeeper, StepInputs
from infinity_engine.update.updating import Deferral, Updates

__all__ = ["Engine", "EngineParts"]

_MOST_NAMED = 5  # parameters in a message

_P = ParamSpec("_P")
_R = TypeVar("_R")
_B = TypeVar("_B")


_MOVES = (
    "it would move or cast parameters that the engine holds. Choose where and in which type "
    "modules compute with the "
    "settings `accelerator` and `precision` of initialize"
)
_REFUSED = MappingProxyType(
    {
        **dict.fromkeys(
            ("bfloat16", "cpu", "cuda", "double", "float", "half", "to", "to_empty", "type", "xpu"),
            _MOVES,
        ),
        "load_state_dict": "it would change parameters past the engine. Load under `with "
        "engine.gathered(engine.parameters(), modify=True): engine.module.load_state_dict(...)`",
        "requires_grad_": "the engine trains the parameters that required a gradient when it was "
        "initialized. Close "
        "it, change that, and initialize another one",
        "share_memory": "the engine's memory belongs to this process. Share what "
        "engine.state_dict() returns",
    }
)
"""Methods of modules that an engine does not pass on, and why."""


@dataclass(frozen=True, kw_only=True)
class EngineParts:
    """What an engine is put together of."""

    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    accelerator: Accelerator
    trained: Sequence[TrainedParameter]
    frozen: Sequence[ModelParameter]
    plan: StepPlan
    replanner: Replanner | None  # None: it is that of every step
    gradients: GradientKeeper
    states: StateKeeper
    fetcher: Provider | None  # None where one rank's parameters stay on the device
    modules: ModuleParameters | None  # None where whole parameters stay there
    whole: Whole | None  # None where there is one rank
    deferral: Deferral | None  # None: an update ends in its step
    early: EarlyUpdates | None  # None: an update begins in its step
    scale: LossScale
    # what torch.autocast is to choose beside fp32; None: it is not used
    autocast: torch.dtype | None
    accumulation_steps: int
    max_grad_norm: float | None
    telemetry: Telemetry
    meter: Meter
    drives: DriveMeter
    ledger: Ledger
    hooks: Hooks
    queue: IOQueue | None  # None where there are no drives
    io_bytes: int  # that it has reserved of the host for copies
    resources: ExitStack


def _held(method: Callable[Concatenate[Engine, _P], _R]) -> Callable[Concatenate[Engine, _P], _R]:
    """Hold signals back while a method runs."""

    @wraps(method)
    def held(self: Engine, /, *args: _P.args, **kwargs: _P.kwargs) -> _R:
        with self._signals:
            return method(self, *args, **kwargs)

    return held


class Engine:
    """Trains one model. Call it like the model.

    Ctrl-C, and what other signals' handlers raise, comes between ops of an update and never within
    one.
    """

    def __init__(self, parts: EngineParts) -> None:
        self.model = parts.model
        self.optimizer = parts.optimizer
        self._parts = parts
        self._signals = parts.hooks.signals
        self._updates = Updates(
            parts.plan,
            Executor(parts.states, parts.telemetry, self._safe_point),
            states=parts.states,
            gradients=parts.gradients,
            meter=parts.meter,
            deferral=parts.deferral,
            replanner=parts.replanner,
        )
        self._known = {id(each.parameter): each for each in (*parts.trained, *parts.frozen)}
        self._accumulation = Accumulation(parts.accumulation_steps, parts.meter.micro_batch)
        self._clip_to = parts.max_grad_norm
        # of the step that was begun last, where it was asked for
        self._total: GradientNorm | None = None
        self._in_backward = False
        self._recording = False
        self._modifying = 0  # how many `gathered` have a body that may change trained parameters
        self._closing = self._closed = False
        self._process = os.getpid()
        self._taken = TakenGradients(Hooks(self._signals))
        for each in self._known.values():
            each.note_values()
        if parts.whole is not None:
            parts.whole.ranks.on_wait(self._safe_point)
        for each in parts.trained:
            parts.hooks.on_gradient(each.parameter, partial(self._take, each.number))
        run = Run(
            model=parts.model,
            optimizer=parts.optimizer,
            trained=parts.trained,
            frozen=parts.frozen,
            states=parts.states,
            provider=parts.fetcher,
            whole=parts.whole,
            scale=parts.scale,
            ledger=parts.ledger,
            queue=parts.queue,
            io_bytes=parts.io_bytes,
            telemetry=parts.telemetry,
        )
        self._saves, self._loads, self._exports = Saves(run), Loads(run), Exports(run)
        self._autosave = Autosave(parts.whole)
        self._half_loaded = False
        self._guards = Guards(
            parts.model,
            parts.optimizer,
            self._known,
            parts.hooks,
            whole=parts.modules is None,
            updates=lambda: self.steps,
        )

    @property
    def module(self) -> torch.nn.Module:
        """The model."""
        return self.model

    def __getattr__(self, name: str) -> Any:
        """Return what the model has under a name that the engine does not have; `generate` runs as
        the model does.

        Raises:
            AttributeError: the model does not have it either, or it would change the model past the
                engine.
        """
        if name in _REFUSED:
            raise AttributeError(f"Engine has no {name}(): {_REFUSED[name]}")
        if "model" not in self.__dict__ or (name.startswith("__") and name.endswith("__")):
            raise AttributeError(f"Engine has no attribute {name!r}")
        found = getattr(self.model, name)
        return partial(self._run, found) if name == "generate" else found

    # --- training ---------------------------------------------------------------------------------

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model.

        Raises:
            CapacityError: the device's budget has no room for what modules make.
            RuntimeError: an update that goes on beside this has failed: the next call goes on with
                it.
        """
        return self._run(self.model, *args, **kwargs)

    def _run(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call the model, or a method of it that calls modules."""
        parts, end = self._parts, HeldEnd(self._signals)
        with self._too_little_is_told(), end as around, end:
            with self._signals:
                self._signals.watch(around)
                self._check_whole(deferred_too=False)
                self._begin()
                self._accumulation.end_micro_batch()
                around.enter_context(parts.telemetry.timed("forward"))
                if parts.modules is not None:
                    around.enter_context(parts.modules.saving())
                if parts.autocast is not None:
                    # Without its cache: the casts that it keeps would stay saved, and parameters
                    # need none.
                    kind = self.device.type
                    around.enter_context(
                        torch.autocast(kind, dtype=parts.autocast, cache_enabled=False)
                    )
            output = call(*args, **kwargs)
        self._check_output(output)
        return output

    def backward(self, loss: torch.Tensor, *, scale: bool = True, **kwargs: Any) -> None:
        """Compute the gradients of `loss`.

        With fp16, the engine multiplies it by the loss scale first.

        This is one micro-batch, for which the update divides gradients by `accumulation_steps`;
        with `scale=False` it does not, and averaging is the caller's. With `retain_graph=True`, the
        micro-batch goes on: the next backward belongs to it, unless the model or `step()` is called
        before.

        Raises:
            CapacityError: the device's budget has no room for what modules make, or the host's for
                the gradients of more micro-batches than `accumulation_steps`. The latter changes
                nothing: step() uses what has come.
            RuntimeError: this step has gradients of backwards with the other `scale`, or its
                updates have begun early. Nothing has changed.
        """
        self._check_open()
        self._check_loss(loss)
        retains_graph = kwargs.get("retain_graph")
        end = HeldEnd(self._signals)
        with self._too_little_is_told(), end as around, end:
            self._begin_backward(around, averaged=scale)
            scaled = loss if self._parts.scale.value == 1.0 else loss * self._parts.scale.value
            scaled.backward(**kwargs)  # type: ignore[no-untyped-call]  # torch is
            # Where it is not said, torch retains the graph of a backward that can be
            # differentiated.
            self._end_backward(
                retains_graph=bool(
                    kwargs.get("create_graph") if retains_graph is None else retains_graph
                )
            )

    @contextmanager
    def _too_little_is_told(self) -> Iterator[None]:
        """Say what would fit where torch finds the device's budget full."""
        try:
            yield
        except torch.OutOfMemoryError as error:
            told = no_room_for_modules(error, self._parts.accelerator, self.usage())
            if told is None:
                raise
            raise again(told) from kept(error)

    def _check_loss(self, loss: object) -> None:
        if not isinstance(loss, torch.Tensor):
            expected = "a tensor: of what a model returns that has its loss beside others, the loss"
            raise ConfigError(field="loss", value=type(loss).__name__, expected=expected)
        if loss.numel() != 1:
            expected = "a tensor of one element, as Tensor.backward() needs"
            raise ConfigError(
                field="loss", value=f"a tensor of shape {tuple(loss.shape)}", expected=expected
            )
        if loss.device.type == "cpu" and not math.isfinite(loss.item()):
            said = (
                f"The loss is {loss.item()} in step {self.steps}. An update would turn every "
                "parameter that it depends "
                "on into NaN. If the same batch gives a finite loss in plain PyTorch, your code "
                "uses a parameter where "
                "the engine cannot see it, such as a penalty over model.parameters() or a weight "
                "that is kept in a "
                "list: use it under `with engine.gathered(parameter)`, or call "
                "engine.register_external(module, "
                "parameter) for the module that uses it"
            )
            if math.isnan(loss.item()) and self._shows_nan:
                raise RuntimeError(f"{said}. No gradient was computed")
            warnings.warn(said, RuntimeWarning, stacklevel=3)

    @property
    def _shows_nan(self) -> bool:
        """Whether modules and the caller may read NaN in place of parameters, and a NaN may be the
        engine's own.
        """
        return self._parts.modules is not None and not self._parts.scale.dynamic

    def _check_output(self, output: object) -> None:
        """Refuse NaN from a model of which no module has asked for some parameters: it may have
        read them as NaN.

        Raises:
            RuntimeError: that is so; names the parameters.
        """
        modules = self._parts.modules
        unseen = [] if modules is None else modules.never_asked()
        if unseen and any(
            each.is_floating_point() and bool(each.isnan().any()) for each in tensors_in(output)
        ):
            named = ", ".join(unseen[:_MOST_NAMED]) + (
                " and others" if len(unseen) > _MOST_NAMED else ""
            )
            raise RuntimeError(
                f"The model returned NaN, and no module has asked for {named} yet. If plain "
                "PyTorch returns other "
                "values, your code uses them where the engine cannot see it, such as through a "
                "list: they read as NaN. "
                "Call engine.register_external(module, parameter) once for the module that uses "
                "each, or call the "
                "model under `with engine.gathered(parameters)`"
            )

    def _check_gradient(self, number: int, gradient: torch.Tensor) -> None:
        """Refuse a gradient that begins with NaN, of a loss that was finite, where parameters are
        fetched.

        Raises:
            RuntimeError: that is so; no step can be made before zero_grad().
        """
        if self._shows_nan and gradient.device.type == "cpu" and gradient.numel():
            if not math.isnan(gradient.reshape(-1)[0].item()):
                return
            name = self._parts.trained[number].name
            self._parts.gradients.lose(number)
            raise RuntimeError(
                f"The gradient of {name} is NaN. If it is finite in plain PyTorch, a "
                "torch.autograd.Function in your "
                "model keeps a parameter as an attribute of its ctx, and its backward reads NaN "
                "there: let it call "
                "ctx.save_for_backward(parameter). No parameter was updated. Call zero_grad() "
                "before the next backward"
            )

    @_held
    def _begin_backward(self, around: ExitStack, *, averaged: bool) -> None:
        self._signals.watch(around)
        self._check_whole()
        self._begin()
        self._begin_gradients(averaged=averaged)
        around.enter_context(self._parts.telemetry.timed("backward"))
        around.callback(self._leave_backward)
        self._in_backward = True

    def _leave_backward(self) -> None:
        self._in_backward = False

    @_held
    def _end_backward(self, *, retains_graph: bool) -> None:
        self._accumulation.end_backward(retains_graph=retains_graph)
        if self._parts.whole is not None:
            self._parts.whole.end_backward(last=self._accumulation.is_reached)
        if self._parts.early is not None:
            self._parts.early.go_on()

    @_held
    def step(self, update: bool | None = None) -> StepResult:
        """Update every parameter that has a gradient, and use the gradients up.

        Where fewer micro-batches have come than `accumulation_steps`, leave them for a later call.
        `update=True` updates with what has come, as at the end of an epoch; `update=False` never
        does. A step that was interrupted in its update is finished in any case.

        Raises:
            FloatingPointError: with fp16, the gradients are not finite at a loss scale of 1.
                Nothing was updated.
            RuntimeError: no gradient has come since the last step, a parameter was changed by
                somebody else, or an op
                failed: call it again, and it goes on where it stopped.
        """
        self._begin()
        parts = self._parts
        self._saves.look()
        self._updates.resume()
        self._updates.end()
        self._accumulation.end_micro_batch()
        wanted = self._accumulation.is_reached if update is None else update
        last = wanted or self._accumulation.is_reached
        self._finish_gradients(last=last)
        self._guards.check_gradients()
        self._guards.check_states()
        if not parts.gradients.any and (parts.whole is None or not parts.whole.waits(last=last)):
            raise RuntimeError(
                "there is nothing to step with: no gradient has come since the last step, or "
                "zero_grad() has dropped "
                "it. Call backward() first; if you did, the loss does not depend on any parameter "
                "of the optimizer"
            )
        if not wanted and not parts.states.begun:
            self._accumulation.leave()
            return StepResult(Outcome.ACCUMULATED, loss_scale=parts.scale.value)
        if not parts.states.begun:  # else what has changed values may be what the step has begun
            self._check_untouched(parts.trained)
        before = self.steps
        try:
            with parts.telemetry.timed("update"):
                result = self._update()
        finally:
            for each in parts.trained:
                each.note_values()
        self._updates.end_step()
        self._accumulation.end_step()
        if parts.fetcher is not None:
            parts.fetcher.end_step()
        fetching = self.fetching()
        parts.drives.count()
        parts.telemetry.note(planned_again=self._updates.why_planned_again())
        parts.meter.end_step(result, in_time=fetching.in_time, late=fetching.late)
        self._recording = False
        self._updates.look_for_a_plan(parts.telemetry.counters)
        if self.steps > before:
            self._guards.step_optimizer()
        parts.drives.warn_of_wear()
        return result

    @_held
    def zero_grad(self) -> None:
        """Drop the gradients that have come, as if there had been no backward; a step uses them up
        without this.
        """
        self._check_whole(deferred_too=False)
        self._taken.hide()
        if self._updates.under_way:  # its gradients are in use, and none has come since
            return
        if self._accumulation.drops_in_vain():
            warnings.warn(
                f"zero_grad() drops the gradients of {self._accumulation.count} of "
                f"{self._accumulation.planned} "
                "micro-batches of a step: where it is called after each of them, no step ever "
                "updates anything",
                RuntimeWarning,
                stacklevel=3,
            )
        if self._parts.whole is not None:
            self._parts.whole.drop()
        if self._parts.early is not None:
            self._parts.early.drop()
        self._parts.gradients.clear()
        for each in self._parts.trained:
            each.parameter.grad = None  # what was interrupted before it was taken
        self._accumulation.drop()
        self._clip_to = self._parts.max_grad_norm

    @_held
    def clip_grad_norm_(self, max_norm: float) -> float:
        """Let the next step clip the gradients to `max_norm`, unless they are dropped; return their
        norm as it is now.

        What torch.nn.utils.clip_grad_norm_ is for: that one sees no gradients here.
        """
        self._check_whole()
        if self._parts.early is not None:
            raise ConfigError(
                field="storage.early_updates",
                value=True,
                expected="False where gradients are clipped: some updates are made before the norm "
                "is known",
            )
        self._finish_gradients(last=True)
        self._parts.gradients.settle()
        norm = self._norm().norm(self._unscale())
        self._clip_to = float(max_norm)
        return norm

    def _update(self) -> StepResult:
        parts = self._parts
        rules = rules_of(self.optimizer)
        self._check_early(rules)
        self._settle_early()
        parts.gradients.settle()
        unscale, used = self._unscale(), parts.scale.value
        if parts.whole is not None:
            parts.whole.agree_on_update(rules, self._clip_to, used, self._accumulation)
        norm = None
        if self._clip_to is not None or parts.scale.dynamic:
            total = self._norm()
            norm = total.norm(unscale)
            if parts.scale.dynamic and not total.is_finite:
                parts.scale.step_skipped()
                self._clip_to = parts.max_grad_norm
                return StepResult(Outcome.SKIPPED, gradient_norm=norm, loss_scale=parts.scale.value)
            if not total.is_finite:
                warnings.warn(
                    f"the norm of the gradients is {norm} in step {self.steps}: what they update "
                    "will be NaN",
                    RuntimeWarning,
                    stacklevel=4,
                )
            factor = gradient_factor(total, unscale=unscale, max_norm=self._clip_to)
        else:
            factor = unscale
        if parts.modules is not None and parts.fetcher is not None:
            parts.modules.let_go()
            parts.fetcher.give_up()
        self._refuse_older_graphs()
        parts.states.begin_step(StepInputs(parts.gradients, rules, factor))
        self._adopt_early()
        self._updates.begin()
        if parts.fetcher is not None:
            parts.fetcher.changed(each.number for each in parts.trained)
        self._updates.leave_rest()
        parts.scale.step_made()
        self._clip_to = parts.max_grad_norm
        return StepResult(Outcome.UPDATED, gradient_norm=norm, loss_scale=used)

    def _refuse_older_graphs(self) -> None:
        """Let PyTorch refuse the backward of a graph that has saved values which this update
        replaces.

        Kernels write without telling autograd. Parameters that modules fetch are refused when they
        are fetched again.
        """
        parts = self._parts
        if parts.modules is None:
            # other ranks may have gradients of what this one has none of
            cut = parts.whole is not None
            increment_version(
                [
                    known.parameter
                    for known in parts.trained
                    if cut or parts.gradients.has(known.number)
                ]
            )

    def _begin_gradients(self, *, averaged: bool) -> None:
        """Refuse gradients that this step cannot take, before any comes; begin early updates if it
        is time.
        """
        if self._accumulation.is_full:
            if self._parts.early is not None and self._parts.early.inputs is not None:
                raise RuntimeError(
                    f"accumulation_steps plans for {self._accumulation.planned} in a step, and "
                    "this backward would be "
                    "one more. With storage.early_updates, the updates of this step have begun "
                    "already. Nothing was "
                    "lost: call step(), then compute this loss again"
                )
            self._parts.gradients.check_room_for_more(self._accumulation.planned)
        self._accumulation.begin_backward(averaged=averaged)
        self._begin_early()

    def _begin_early(self) -> None:
        """Begin to update what is complete, in the backward of the last micro-batch."""
        parts = self._parts
        if parts.early is None or parts.early.inputs is not None or self._modifying:
            return
        if self._accumulation.expects_last:
            parts.gradients.settle()  # those of earlier micro-batches are read
            parts.early.begin(
                StepInputs(parts.gradients, rules_of(self.optimizer), self._unscale())
            )

    def _check_early(self, rules: Sequence[Rule]) -> None:
        """Refuse hyperparameters that are others than those with which updates were made in the
        backward.
        """
        early = self._parts.early
        if (
            early is not None
            and early.inputs is not None
            and list(early.inputs.rules) != list(rules)
        ):
            raise RuntimeError(
                "hyperparameters were changed between backward() and step(), and with "
                "storage.early_updates the "
                "backward has used them: change them after step() or before backward(). Call "
                "zero_grad(), which takes "
                "the update back, and do the step's backward again, or set them as they were"
            )

    def _settle_early(self) -> None:
        """Let no early update be under way: what is not made yet is left to the step."""
        if self._parts.early is not None:
            self._parts.early.settle()

    def _adopt_early(self) -> None:
        """Let what was made in the backward count, in a step that was begun.

        Interrupted, it can be done again.
        """
        early, fetcher = self._parts.early, self._parts.fetcher
        if early is not None and self._parts.states.begun:
            places = self._parts.states.adopt(early.made)
            if fetcher is not None:
                fetcher.moved(places)
            early.end()

    def _finish_gradients(self, *, last: bool) -> None:
        """Let the gradients that came to any rank be with those who own them, if they are needed by
        now.
        """
        if self._parts.whole is not None:
            self._parts.whole.finish(last=last)

    def _norm(self) -> GradientNorm:
        gradients, whole = self._parts.gradients, self._parts.whole
        if self._total is None or not self._parts.states.begun:  # else some may be used up
            self._total = gradients.norm() if whole is None else whole.norm(gradients)
        return self._total

    def _unscale(self) -> float:
        ranks = 1 if self._parts.whole is None else self._parts.whole.ranks.size
        return 1.0 / (self._parts.scale.value * self._accumulation.divisor * ranks)

    def _take(self, number: int, gradient: torch.Tensor) -> None:
        if gradient.layout != torch.strided:
            raise ConfigError(
                field=f"gradient of {self._parts.trained[number].name}",
                value=str(gradient.layout),
                expected="a dense gradient: use sparse=False",
            )
        self._leave_no_half()  # the gradients of an update that was deferred make way
        if not self._in_backward:
            self._begin_gradients(averaged=True)
        if self._parts.scale.dynamic and not self._in_backward:
            raise RuntimeError(
                "with fp16 the loss has to be scaled before its gradients are computed: call "
                "engine.backward(loss), "
                "not loss.backward()"
            )
        whole, modules = self._parts.whole, self._parts.modules
        if modules is not None:
            modules.check_asked(number)
        self._check_gradient(number, gradient)
        self._accumulation.note_gradient()
        (self._parts.gradients if whole is None else whole.reducer).take(number, gradient)
        self._taken.show(self._parts.trained[number])

    # --- looking and changing ---------------------------------------------------------------------

    @contextmanager
    def gathered(
        self, parameters: torch.nn.Parameter | Iterable[torch.nn.Parameter], *, modify: bool = False
    ) -> Iterator[None]:
        """Have whole parameters within the body; what it finds and changes of them, with `modify`,
        is kept.
        """
        wanted = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        for each in wanted:
            if not isinstance(each, torch.Tensor):
                expected = "a parameter, or several, as model.parameters() lists them"
                raise ConfigError(field="parameters", value=_said(each), expected=expected)
        known = [self._known[id(each)] for each in wanted if id(each) in self._known]
        end = HeldEnd(self._signals)
        with end as around, end:
            self._signals.holding(self._gather)(known, around, modify=modify)
            yield
            with self._signals:
                self._take_over(known) if modify else self._check_untouched(known)

    def _gather(self, known: Sequence[ModelParameter], around: ExitStack, *, modify: bool) -> None:
        """Have whole parameters until `around` ends."""
        self._check_whole()
        if not modify:
            self._check_untouched(known)
        changing = modify and any(isinstance(each, TrainedParameter) for each in known)
        if changing:
            self._check_not_early()
        if modify:
            self._saves.wait_for_states()
        self._settle_early()
        self._parts.gradients.start_writing()
        if changing:
            around.enter_context(self._without_early())
        if self._parts.fetcher is not None:
            around.enter_context(
                self._gathered_with_room([parameter.number for parameter in known])
            )
        if self._parts.modules is not None:
            self._parts.modules.gathered(each.number for each in known)

    @contextmanager
    def _gathered_with_room(self, numbers: Sequence[int]) -> Iterator[None]:
        """Have these in the body; what the caller has read outside of modules makes way where room
        is short.
        """
        fetcher, modules = self._parts.fetcher, self._parts.modules
        assert fetcher is not None, "parameters are fetched"
        with ExitStack() as held:
            while True:
                try:
                    held.enter_context(fetcher.gathered(numbers))
                    break
                except CapacityError:
                    if modules is None or not modules.let_go_of_oldest_read(numbers):
                        raise
            yield

    def _take_over(self, known: Sequence[ModelParameter]) -> None:
        """Keep what somebody has made of parameters that are gathered."""
        if self._parts.whole is not None:
            self._parts.whole.check_same(known)
        for each in known:
            # The master first: until the values are home as well, they are a change that nothing
            # goes on without.
            if isinstance(each, TrainedParameter):
                self._parts.states.set_master(each.number, self._own(each))
            if self._parts.fetcher is not None:
                self._parts.fetcher.write_home(each.number)
            each.note_values()

    @_held
    def register_external(self, module: torch.nn.Module, parameter: torch.nn.Parameter) -> None:
        """Let `module` have a parameter of another one whenever it runs, as it has its own.

        For what it uses without reading it as an attribute of that other one: out of a variable, a
        list or a closure. Of several ranks, all register the same. Where parameters stay on the
        device, no update of it waits for a forward.

        Raises:
            ConfigError: the module or the parameter is not the model's.
        """
        self._check_whole()
        if not any(module is each for each in self.model.modules()):
            expected = "one of the model's, as named_modules() lists them"
            raise ConfigError(field="module", value=type(module).__name__, expected=expected)
        if id(parameter) not in self._known:
            expected = "one of the model's, as named_parameters() lists them"
            raise ConfigError(field="parameter", value=_said(parameter), expected=expected)
        if self._parts.modules is not None:
            self._parts.modules.register_external(module, parameter)
        deferral = self._updates.deferral
        if deferral is not None and isinstance(deferral.follower, AwaitedParameters):
            deferral.follower.register_external(parameter)

    def _check_untouched(self, known: Iterable[ModelParameter]) -> None:
        for each in known:
            each.check_untouched()

    def _own(self, each: ModelParameter) -> torch.Tensor:
        """Return what this rank owns of a parameter that is shown, flat."""
        flat, whole = each.parameter.detach().reshape(-1), self._parts.whole
        return flat if whole is None else whole.own(each.number, flat)

    def _check_not_early(self) -> None:
        """Refuse to change parameters of which new values may have been made already, from those
        that they have.
        """
        early = self._parts.early
        if early is not None and early.inputs is not None:
            raise RuntimeError(
                "gathered(modify=True) came between backward() and step(), and with "
                "storage.early_updates the backward "
                "has made new values from those that would be changed: change parameters after "
                "step() or before "
                "backward(), or call zero_grad(), which takes the update back"
            )

    @contextmanager
    def _without_early(self) -> Iterator[None]:
        """Let no early update begin in the body."""
        self._modifying += 1
        try:
            yield
        finally:
            self._modifying -= 1

    @_held
    def state_dict(self) -> dict[str, Any]:
        """Return the model's state dict as copies on the host, wherever its parameters are.

        A parameter that has several names has one copy, so that what saves it can see that they are
        tied.

        Raises:
            CapacityError: the machine, or its memory group, has too little memory for the copies.
        """
        self._check_whole()
        names = dict(self.model.named_parameters(remove_duplicate=False))
        with self._guards.listing():
            listed = self.model.state_dict(keep_vars=True)
        tensors = {id(value): value for value in listed.values() if isinstance(value, torch.Tensor)}
        self._check_room_for_copies(tensors.values())

        def copy_of(name: str, value: Any) -> Any:
            self._safe_point()
            known = self._known.get(id(names.get(name)))
            cut = self._parts.whole is not None and known is not None and known.numel > 0
            if known is not None and (known.on_drives or cut) and self._parts.fetcher is not None:
                return self._parts.fetcher.copy_of(known.number).view(known.parameter.shape)
            tensor = value if known is None else known.values.view(known.parameter.shape)
            return tensor.detach().cpu().clone() if isinstance(tensor, torch.Tensor) else tensor

        copies: dict[int, Any] = {}
        for name, value in listed.items():
            if id(value) not in copies:
                copies[id(value)] = copy_of(name, value)
        return {name: copies[id(value)] for name, value in listed.items()}

    def _check_room_for_copies(self, tensors: Iterable[torch.Tensor]) -> None:
        """Refuse copies on the host that would not fit: the kernel kills who takes more than its
        group has.
        """
        nbytes = sum(each.numel() * each.element_size() for each in tensors)
        free, whole = free_for_copies(), self._parts.whole
        if whole is not None:
            free = whole.ranks.least("memory for a state dict", free // whole.ranks.neighbours)
        if nbytes > free:
            raise CapacityError(
                tier=Tier.HOST.name,
                asked=nbytes,
                free=free,
                limit=probe_memory().usable_bytes,
                change="copy parameter by parameter under engine.gathered(parameter) and write "
                "each to a file, or give "
                "the process more memory beside the budget's host",
            )

    @_held
    def state_of(self, parameter: torch.nn.Parameter) -> Mapping[str, torch.Tensor | int]:
        """Return copies of a parameter's fp32 master and moments, in its shape, and how many
        updates it has had.

        And of its gradient, where one has come since the last step and is kept: in fp32, as the
        step would use it but for clipping. Updates in the backward use gradients up.

        Raises:
            ConfigError: the engine does not train it.
        """
        self._check_whole()
        known = self._known.get(id(parameter))
        if not isinstance(known, TrainedParameter):
            expected = "a parameter that the optimizer was made of and that requires a gradient"
            raise ConfigError(field="parameter", value=_said(parameter), expected=expected)
        number = known.number
        self._settle_early()
        self._parts.gradients.start_writing()
        flat, steps = dict(self._parts.states.state_of(number)), self._parts.states.steps_of(number)
        gradient = self._gradient_of(number)
        if gradient is not None:
            flat["gradient"] = gradient
        if self._parts.whole is not None:
            flat, steps = self._parts.whole.states(known, flat, steps)
        shaped: dict[str, torch.Tensor | int] = {
            name: values.view(parameter.shape) for name, values in flat.items()
        }
        return {**shaped, "step": steps}

    def _gradient_of(self, number: int) -> torch.Tensor | None:
        """Return a flat copy of what this rank keeps of a parameter's gradient; None where no rank
        has one.
        """
        gradients, whole = self._parts.gradients, self._parts.whole
        if whole is None and not gradients.has(number):
            return None
        # no rank has its sum yet
        if whole is not None and whole.waits(last=self._accumulation.is_reached):
            return None
        self._finish_gradients(last=self._accumulation.is_reached)
        gradients.settle()
        found = gradients.sum_of(number)
        if whole is not None:
            found = whole.gradient(number, found)
        return None if found is None else found.mul_(self._unscale())

    @_held
    def save(
        self,
        path: str | os.PathLike[str],
        tag: str | None = None,
        *,
        extra: Mapping[str, Stateful] | None = None,
        keep: int | None = None,
        wait: bool = True,
        on_error: OnError | str = OnError.RAISE,
    ) -> str:
        """Save all that the run needs to go on with the same bits; return the checkpoint's tag.

        The directory `path` holds the checkpoints of a run; all ranks share it. What is saved:
        parameters, masters, moments, step counts, buffers, the loss scale, the optimizer's groups,
        random generators of every rank, and the state dicts of what `extra` names: learning-rate
        schedulers, samplers. A checkpoint is there whole or not at all; when this returns, it
        survives a power loss. With `keep`, all but so many of the newest are removed after this one
        was read back and found whole. All ranks call this.

        With `wait=False`, it returns as soon as training may go on, and a thread writes beside it
        what there is now. An error of the drive appears at the next step, save, load or close. It
        is raised; with `on_error="warn"` it is a warning, now and then. A save that is still under
        way is waited for first. `last_save()` says how it stands.

        Raises:
            RuntimeError: gradients have come since the last step: step() or zero_grad() first.
            ConfigError: `tag` cannot be a tag, or a checkpoint has it already.
            CapacityError: the host's budget has less than 1.2 MiB free.
            TransferError: the drive is full or failed. Earlier checkpoints are as they were, and
                training can go on.
            TypeError: a state dict holds what cannot be kept without pickling: where, and what to
                do.
            CollectiveError: another rank failed.
        """
        self._check_between_steps("save")
        request = SaveRequest(
            path=Path(path),
            tag=tag,
            extra=extra or {},
            keep=keep,
            wait=wait,
            on_error=chosen(OnError, on_error, "on_error"),
            steps=self.steps,
        )
        return self._saves.save(request)

    @_held
    def export(
        self,
        path: str | os.PathLike[str],
        *,
        dtype: torch.dtype | str | None = None,
        trainable_only: bool = False,
        shard_bytes: int = SHARD_BYTES,
    ) -> tuple[Path, ...]:
        """Write the weights as safetensors into the directory `path`; return the files.

        `transformers.from_pretrained` and `load_into` read them; a large model is in shards of
        `shard_bytes` with an index, tied weights are there once. `dtype` is float32, bfloat16 or
        float16, rounded to nearest even from the masters; without it, each weight has the dtype
        that modules compute with. With `trainable_only`, only what is trained is written. Takes up
        to 32 MiB of the host's budget, and the drive twice the weights while it runs. All ranks
        call this and share the directory.

        Raises:
            ConfigError: `path` has weights already, or `dtype` is another one.
            CapacityError: the host's budget has less than 1.2 MiB free.
            TransferError: the drive is full or failed. No file is left.
            RuntimeError: gradients have come since the last step: step() or zero_grad() first.
            CollectiveError: another rank failed.
        """
        chosen_dtype = export_dtype(dtype)
        self._check_between_steps("export")
        self._saves.finish()
        return self._exports.export(
            Path(path), chosen_dtype, trainable_only=trainable_only, shard_bytes=shard_bytes
        )

    def last_save(self) -> SaveReport:
        """Return how the newest save stands: tag, bytes, seconds, how long training waited."""
        return self._saves.report

    def autosave(
        self,
        path: str | os.PathLike[str],
        *,
        every: int | str,
        keep: int | None = None,
        extra: Mapping[str, Stateful] | None = None,
        wait: bool = False,
        on_error: OnError | str = OnError.WARN,
    ) -> str | None:
        """Save if it is time, and return the tag then; None if it is not.

        Call it at the end of the loop's body, on all ranks. `every` is a number of steps or a time:
        500, "30min", "1.5h". The other arguments are those of `save`. Between the micro-batches of
        a step, it does nothing.

        From the first call on, SIGTERM lets the next call save, close the engine and raise
        SystemExit(75), unless the program has a handler of its own. That one can call `preempt()`,
        which has the same effect.

        Raises:
            ConfigError: `every` is neither.
            SystemExit: the process was told to stop, and the checkpoint is there.
        """
        tag, stops = self._autosave_if_due(
            path, every, keep=keep, extra=extra, wait=wait, on_error=on_error
        )
        if stops:
            self.close(restore=False)
            raise SystemExit(PREEMPTED_EXIT_CODE)
        return tag

    def preempt(self) -> None:
        """Let the next `autosave` save and end the process.

        Signal handlers and other threads may call it.
        """
        self._autosave.stop()

    @_held
    def _autosave_if_due(
        self,
        path: str | os.PathLike[str],
        every: int | str,
        *,
        keep: int | None,
        extra: Mapping[str, Stateful] | None,
        wait: bool,
        on_error: OnError | str,
    ) -> tuple[str | None, bool]:
        """Save if it is time or the process has to stop; return the tag, and whether it has to."""
        self._check_process()
        self._check_open()
        self._autosave.begin(every, self.steps)
        waiting = self._parts.gradients.any and not self._updates.under_way
        if waiting or self._accumulation.count or not self.steps:
            return None, False
        due, stops = self._autosave.decide(self.steps)
        if not due and not stops:
            return None, False
        if stops:
            self._saves.finish()
        last = self._saves.report
        if stops and last.state is SaveState.COMMITTED and last.step == self.steps:
            return last.tag, True
        if stops:
            return self.save(path, extra=extra, keep=keep), True
        return self.save(path, extra=extra, keep=keep, wait=wait, on_error=on_error), False

    @_held
    def load(
        self,
        path: str | os.PathLike[str],
        tag: str = LATEST,
        *,
        strict: bool = True,
        extra: Mapping[str, Stateful] | None = None,
        weights_only: bool = False,
    ) -> Loaded:
        """Go on from a checkpoint, whatever strategy, budget, tier or number of ranks has saved it.

        With `weights_only`, the optimizer begins anew: moments, step counts, groups and random
        generators are left as they are. Without `strict`, tensors that only one side has are left
        alone and listed. `extra` has the same names as in `save`. All ranks call this.

        Raises:
            IncompleteCheckpoint: there is no such checkpoint, or files of it are missing.
            DamagedCheckpoint, ChecksumError: it is damaged: the tensor's file is named. If that
                shows while values are being read, the engine refuses to train until a load
                succeeds.
            ManifestMismatch: it is of another model or optimizer.
            RuntimeError: gradients have come since the last step: step() or zero_grad() first.
            CollectiveError: another rank failed.
        """
        self._check_between_steps("load", loads=True)
        self._saves.finish()
        loaded = self._loads.load(
            Path(path),
            tag,
            extra or {},
            strict=strict,
            weights_only=weights_only,
            begin=self._begin_loading,
        )
        self._half_loaded = False
        if not weights_only:
            self._updates.continue_from(loaded.step)
        for parameter in self._parts.trained:
            parameter.note_values()
        return loaded

    def _begin_loading(self) -> None:
        """Note that from here on the model is neither what it was nor what is loaded."""
        self._half_loaded = True

    def _check_between_steps(self, what: str, *, loads: bool = False) -> None:
        """Let nothing be under way; what `loads` may follow a load that has failed.

        Raises:
            RuntimeError: gradients wait for a step.
        """
        self._check_process()
        self._leave_no_half(half_loaded_too=loads)
        self._settle_early()
        self._parts.gradients.start_writing()
        if self._parts.gradients.any or self._accumulation.count:
            raise RuntimeError(
                "gradients have come since the last step, and a checkpoint has none: call step() "
                "or zero_grad() before "
                f"{what}()"
            )

    @property
    def plan(self) -> StepPlan:
        """What moves where and in which order in each update; with strategy auto, until it is
        planned again.
        """
        return self._updates.plan

    @property
    def device(self) -> torch.device:
        """Where modules compute, and where batches have to be."""
        return self._parts.accelerator.torch_device

    @property
    def steps(self) -> int:
        """How many updates were made."""
        return self._updates.made

    def usage(self) -> tuple[Usage, ...]:
        """Return what each tier holds and held, against its budget."""
        return self._parts.ledger.usage()

    def fetching(self) -> FetchingStats:
        """Return what parameters were fetched around modules: nothing where they stay on the
        device.
        """
        fetcher = self._parts.fetcher
        return FetchingStats() if fetcher is None else fetcher.stats

    def timeline(self) -> Timeline:
        """Return what was recorded of the newest steps."""
        return self._parts.telemetry.timeline()

    def report(self) -> StepReport:
        """Return the figures of the newest step that has ended; printed, they are a small table.

        Raises:
            RuntimeError: there is none.
        """
        ended = [step for step in self.timeline().steps if step.end_ns is not None]
        if not ended:
            raise RuntimeError(
                "there is no step to report on: expected one that step() has ended, and the "
                "setting "
                "telemetry.recording to be on while it ran"
            )
        drives = self._parts.drives
        return report_of(ended[-1], self.usage(), drives.uses(ended[-1]), drives.rates_of_update())

    def in_step(self, batches: Iterable[_B]) -> Iterator[tuple[_B, bool]]:
        """Yield this rank's batches as often as the rank that has most of them, each with whether
        it is a new one.

        A rank that has no more gets its last one again, so that it takes part in what the others
        do: its result is not to be counted. All ranks go through all of it. On one rank, every
        batch is new.

        Raises:
            CollectiveError: another rank does something else, or has failed.
            ConfigError: a rank has no batch at all, and others have.
        """
        rest, whole = iter(batches), self._parts.whole
        last: list[_B] = []
        while True:
            new = list(islice(rest, 1))
            self._check_open()
            if not (
                new
                if whole is None
                else whole.ranks.any_has_more(has_more=bool(new), has_had=bool(last))
            ):
                return
            last = new or last
            yield last[0], bool(new)

    def train(self, mode: bool = True) -> Engine:
        """Put the model into training mode."""
        self.model.train(mode)
        return self

    def eval(self) -> Engine:
        """Put the model into evaluation mode."""
        self.model.eval()
        return self

    # --- the end ----------------------------------------------------------------------------------

    def close(self, *, restore: bool = True) -> None:
        """Take the hooks off and give all memory back but the parameters'. Again: nothing.

        Parameters that the engine fetched get ordinary memory with their values, if the machine and
        its memory group have enough; else they show NaN, and a warning says so. With
        `restore=False` they show NaN and nothing is read: for a model that was saved and is needed
        no more. Of several ranks, all say the same.
        """
        try:
            self._close(None, restore=restore)
        finally:
            self._autosave.close()

    @_held
    def _close(self, reason: BaseException | None, *, restore: bool = True) -> None:
        """Close; of several ranks, let the others know if there is a `reason` that they should
        know.
        """
        # a forked process has nothing of what is closed
        if not self._closed and os.getpid() == self._process:
            self._closing = True
            failed: Exception | None = None
            whole = self._parts.whole
            if whole is not None and reason is not None:
                whole.ranks.close(reason)
            try:
                self._adopt_early()
                self._updates.resume()
                self._updates.end()
            except RuntimeError as error:  # told at the end
                failed = kept(error)
            failed = self._end_save(alone=(failed or reason) is not None) or failed
            self._closed = True
            if self._parts.modules is not None:
                self._parts.modules.close()
            self._parts.hooks.remove()
            self._taken.hide()
            self._updates.follow_no_more()
            if self._parts.early is not None:
                self._parts.early.drop()
            self._parts.gradients.clear()
            if not restore and self._parts.fetcher is not None:
                self._parts.fetcher.leave_absent()
            try:
                self._parts.resources.close()
            finally:
                if whole is not None:
                    whole.ranks.close(failed)
            if failed is not None:
                raise again(failed)

    def _end_save(self, *, alone: bool) -> Exception | None:
        """Let the save that is under way end; return what is to be raised of it."""
        if alone:
            self._saves.finish_alone()
            return None
        try:
            self._saves.finish()
        except Exception as error:
            return kept(error)
        return None

    def __enter__(self) -> Engine:
        """Return itself."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close; where the body raised, its error is the one to see."""
        try:
            self._close(error)
        except Exception:
            if error is None:
                raise
        finally:
            self._autosave.close()

    def __deepcopy__(self, _memo: object) -> Engine:
        """Refuse: states, hooks and memory are not to be had twice."""
        raise TypeError(
            "an engine cannot be copied: initialize another one for a copy of the model"
        )

    def __reduce__(self) -> str:
        """Refuse likewise."""
        raise TypeError(
            "an engine cannot be pickled: its states are in memory that only this process has"
        )

    def _safe_point(self) -> None:
        """Let Ctrl-C act here, unless that would leave an engine that is half closed."""
        if not self._closing:
            self._signals.safe_point()

    def _begin(self) -> None:
        """Begin to record a step, where none is being recorded."""
        self._check_process()
        self._check_open()
        self._accumulation.note_call()
        if self._taken.hide():
            self._drop_as_somebody_did()
        if not self._recording:
            self._parts.telemetry.begin_step(self.steps)
            self._recording = True

    def _drop_as_somebody_did(self) -> None:
        """Drop gradients that the optimizer or the model was asked to drop."""
        if self._accumulation.left_by_step:
            raise RuntimeError(
                f"{dropped_by_somebody()}. Here they are those of {self._accumulation.count} of "
                f"{self._accumulation.planned} micro-batches of a step, and they still count. Call "
                "zero_grad() only "
                "after the last micro-batch. step() already clears the gradients that it used"
            )
        self.zero_grad()

    def _check_whole(self, *, deferred_too: bool = True) -> None:
        """Refuse to go on from half a step; what of one was deferred is done first, or left as it
        is.
        """
        self._check_process()
        self._leave_no_half(deferred_too=deferred_too)

    def _leave_no_half(self, *, deferred_too: bool = True, half_loaded_too: bool = False) -> None:
        self._check_open()
        if self._half_loaded and not half_loaded_too:
            raise RuntimeError(
                "a load failed half-way, so the model is a mixture: call load() again until it "
                "succeeds"
            )
        self._updates.resume()
        if self._updates.under_way:
            if deferred_too:
                self._updates.end()
            return
        if self._parts.states.begun:
            raise RuntimeError("a step was interrupted: call step() again, which does what it left")

    def _check_open(self) -> None:
        if self._closed:
            raise RuntimeError("the engine is closed: initialize another one")

    def _check_process(self) -> None:
        if os.getpid() != self._process:
            raise RuntimeError(
                f"this engine belongs to process {self._process}, and this one, {os.getpid()}, was "
                "forked from it, as "
                "workers of data loaders are: it has neither the engine's memory nor its threads. "
                "Call the engine, and "
                "its model, in that process only"
            )


def _said(parameter: object) -> str:
    """Return what is said of what should be another parameter."""
    if isinstance(parameter, torch.Tensor):
        return f"one of shape {tuple(parameter.shape)}"
    return f"{parameter!r}, which is no parameter"
