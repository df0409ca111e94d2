"""`Engine`: a model that trains within its budgets: call it like the model, `backward`, `step`.

Connects the parts: hooks give gradients to the window, a step fixes the factor and hyperparameters,
`Updates` carries out the plan, and modules compute with the new values. Made by `initialize`.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial, wraps
from itertools import islice
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch
from torch.autograd.graph import increment_version

from deepnvme.choices import chosen
from infinity_engine.checkpoint.directory import LATEST, CheckpointDirectory
from infinity_engine.checkpoint.export import SHARD_BYTES
from infinity_engine.engine.checkpoints.autosave import PREEMPTED_EXIT_CODE
from infinity_engine.engine.checkpoints.checkpointing import Stateful
from infinity_engine.engine.checkpoints.exporting import export_dtype, export_weights
from infinity_engine.engine.checkpoints.loading import Loaded, Loads, Overwritten
from infinity_engine.engine.checkpoints.saving import (
    FrozenParameters,
    OnError,
    PendingGradients,
    SaveReport,
    SaveRequest,
    Saves,
)
from infinity_engine.engine.checkpoints.torch_states import (
    load_optimizer_state_dict,
    nbytes_of_states,
    optimizer_state_dict,
)
from infinity_engine.engine.ending import Ending, SafePoint, while_alive
from infinity_engine.engine.gradient_window import GradientWindow
from infinity_engine.engine.guards import Guards, check_schedule
from infinity_engine.engine.parts import EngineParts
from infinity_engine.engine.stepping import EngineOptimizer
from infinity_engine.errors import CapacityError, ConfigError
from infinity_engine.kept_errors import again, kept
from infinity_engine.machine.capacity import free_for_copies
from infinity_engine.machine.memory import probe_memory
from infinity_engine.memory import Usage
from infinity_engine.optim import gradient_factor, rules_of
from infinity_engine.outcome import Outcome, StepResult
from infinity_engine.parameters.parameters import ModelParameter, TrainedParameter
from infinity_engine.parameters.pending import PendingParameters
from infinity_engine.plan import Tier
from infinity_engine.plan.step import StepPlan
from infinity_engine.reporting.device_full import no_room_for_modules
from infinity_engine.reporting.report import StepReport, report_of
from infinity_engine.schedule import Executor, FetchingStats
from infinity_engine.signals import HeldEnd
from infinity_engine.telemetry import Timeline
from infinity_engine.tiling.weights import TiledValues
from infinity_engine.update.under_way import StepInputs
from infinity_engine.update.updating import Updates

__all__ = ["Engine", "close_at_its_end"]

_P = ParamSpec("_P")
_R = TypeVar("_R")
_B = TypeVar("_B")


_MOVES = (
    "it would move or cast parameters that the engine manages. Choose device and dtype with the "
    "settings `accelerator` and `precision` of initialize"
)
_MERGES = (
    "it would change frozen parameters through parameter.data, which the engine cannot see: where "
    "they are streamed, the change is lost. Close the engine, then merge the model's adapters"
)
_REFUSED = MappingProxyType(
    {
        **dict.fromkeys(("merge_adapter", "merge_and_unload", "unmerge_adapter"), _MERGES),
        **dict.fromkeys(
            ("bfloat16", "cpu", "cuda", "double", "float", "half", "to", "to_empty", "type", "xpu"),
            _MOVES,
        ),
        "load_state_dict": "it would change parameters behind the engine's back. Load under `with "
        "engine.gathered(engine.parameters(), modify=True): engine.module.load_state_dict(...)`",
        "requires_grad_": "the engine trains the parameters that required a gradient in "
        "initialize. Close the engine, change requires_grad, and initialize another one",
        "resize_token_embeddings": "it replaces parameters that the engine trains. Close the "
        "engine, resize, and initialize another one",
        "share_memory": "the engine's memory belongs to this process. Share what "
        "engine.state_dict() returns",
    }
)
"""Methods of modules that an engine does not pass on, and why."""


def _held(method: Callable[Concatenate[Engine, _P], _R]) -> Callable[Concatenate[Engine, _P], _R]:
    """Delay signals while a method runs."""

    @wraps(method)
    def held(self: Engine, /, *args: _P.args, **kwargs: _P.kwargs) -> _R:
        with self._signals:
            return method(self, *args, **kwargs)

    return held


class Engine:
    """Trains one model. Call it like the model.

    Ctrl-C and the exceptions of other signal handlers come between ops of an update, never within
    one.
    """

    def __init__(self, parts: EngineParts) -> None:
        self.model = parts.model
        self.optimizer = parts.optimizer
        self._parts = parts
        self._signals = parts.hooks.signals
        # Where Ctrl-C may act within held methods: between ops, and while this rank waits.
        self._safe_point = SafePoint(self._signals)
        self._updates = updates = Updates(
            parts.plan,
            Executor(parts.states, parts.telemetry, self._safe_point),
            states=parts.states,
            early=parts.early,
            gradients=parts.gradients,
            fetcher=parts.fetcher,
            meter=parts.meter,
            deferral=parts.deferral,
            replanner=parts.replanner,
        )
        # By id: comparing tensors would compare their elements.
        self._known = {id(known.parameter): known for known in (*parts.trained, *parts.frozen)}
        self._window = GradientWindow(parts)
        for known in self._known.values():
            # From here on check_untouched() compares with these.
            known.note_values()
        parts.ranks.on_wait(self._safe_point)
        accept = while_alive(self._accept)
        for trained in parts.trained:
            # Hooks go with the model: they must not keep the engine alive.
            parts.hooks.on_gradient(trained.parameter, partial(accept, trained.number))
        self._saves, self._loads = Saves(parts), Loads(parts)
        self._guards = Guards(
            parts.model,
            parts.optimizer,
            self._known,
            parts.hooks,
            whole=not parts.modules.fetches,
            updates=updates,
        )
        resources = ExitStack()
        # The last one is closed first.
        for close in (
            updates.drop,
            self._window.placeholders.hide,
            parts.hooks.remove,
            parts.modules.close,
        ):
            resources.callback(close)
        self._ending = Ending(
            parts.model,
            updates=updates,
            fetcher=parts.fetcher,
            ranks=parts.ranks,
            saves=self._saves,
            safe_point=self._safe_point,
            resources=resources,
        )

    @property
    def module(self) -> torch.nn.Module:
        """The model."""
        return self.model

    @property
    def schedulers(self) -> tuple[torch.optim.lr_scheduler.LRScheduler, ...]:
        """The learning-rate schedulers that each update steps: see `follow_schedule`."""
        return tuple(self._parts.schedulers)

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the model. `generate` runs as the model does.

        Raises:
            AttributeError: the model does not have it, or it would change the model behind the
                engine's back.
        """
        # Python calls this only for what the engine itself does not have.
        if name in _REFUSED:
            raise AttributeError(f"Engine has no {name}(): {_REFUSED[name]}")
        # Before __init__ has set `model`, asking for it would come here again.
        if "model" not in self.__dict__ or (name.startswith("__") and name.endswith("__")):
            raise AttributeError(f"Engine has no attribute {name!r}")
        found = getattr(self.model, name)
        # It calls modules many times, and needs all that a call of the model needs.
        return partial(self.run, found) if name == "generate" else found

    # --- training ---------------------------------------------------------------------------------

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model.

        Raises:
            CapacityError: the device's budget has no room for the activations.
            RuntimeError: an update that goes on beside this has failed. The next call resumes it.
                Or torch's current CUDA stream is another one than the engine was made in.
        """
        return self.run(self.model, *args, **kwargs)

    def run(self, call: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Run a method of the model, or other code that calls its modules, as the model runs."""
        parts, end = self._parts, HeldEnd(self._signals)
        # Entered twice: see HeldEnd.
        with self._explaining_out_of_memory(), end as around, end:
            with self._signals:
                # Handlers stay replaced during the call, so that each hook's hold costs little.
                self._signals.watch(around)
                parts.accelerator.check_current()
                # An update may go on beside this forward: modules wait for what they need.
                self._check_whole(deferred_too=False)
                self._begin()
                # The micro-batch of a retained graph ends with the next call of the model.
                self._window.accumulation.end_micro_batch()
                around.enter_context(parts.telemetry.timed("forward"))
                around.enter_context(parts.modules.saving())
                if parts.autocast is not None:
                    # Without its cache: it would keep a cast copy of each parameter alive until the
                    # backward, and parameters have the dtype already.
                    kind = self.device.type
                    around.enter_context(
                        torch.autocast(kind, dtype=parts.autocast, cache_enabled=False)
                    )
            # Outside of the hold: Ctrl-C may interrupt the model's own code.
            return call(*args, **kwargs)

    def backward(self, loss: torch.Tensor, *, scale: bool = True, **kwargs: Any) -> None:
        """Compute the gradients of `loss`, which the engine multiplies by the loss scale with fp16.

        One call is one micro-batch, and the update divides the gradients by `accumulation_steps`.
        With `scale=False` it does not, and the caller averages. With `retain_graph=True` the next
        backward belongs to the same micro-batch, unless the model or `step()` is called in between.

        Raises:
            CapacityError: the device's budget has no room for what the backward allocates; or the
                host's has none for the gradients of more micro-batches than `accumulation_steps`.
                In the second case nothing has changed, and step() uses the gradients so far. All
                ranks raise it where one has no room.
            RuntimeError: this step has gradients of backwards with the other `scale`, or its
                updates have begun early. Nothing has changed.
        """
        self._ending.check_open()
        self._window.nan_checks.check_loss(loss, self.steps)
        retains_graph = kwargs.get("retain_graph")
        end = HeldEnd(self._signals)
        with self._explaining_out_of_memory(), end as around, end:
            self._begin_backward(around, averaged=scale)
            self._parts.modules.prepare_backward(loss)
            # Not in place: the caller's loss stays what it is.
            scaled = loss if self._parts.scale.value == 1.0 else loss * self._parts.scale.value
            scaled.backward(**kwargs)  # type: ignore[no-untyped-call]  # torch is
            # torch's own default: the graph is retained if the backward can be differentiated.
            with self._signals:
                self._window.end_backward(
                    retains_graph=bool(
                        kwargs.get("create_graph") if retains_graph is None else retains_graph
                    )
                )

    @contextmanager
    def _explaining_out_of_memory(self) -> Iterator[None]:
        """Turn torch's out-of-memory error into one that says what would fit in the budget."""
        try:
            yield
        except torch.OutOfMemoryError as error:
            explained = no_room_for_modules(error, self._parts.accelerator, self.usage())
            # It did not run into the budget: torch's own error says all.
            if explained is None:
                raise
            raise again(explained) from kept(error)

    @_held
    def _begin_backward(self, around: ExitStack, *, averaged: bool) -> None:
        self._signals.watch(around)
        # Also ends a deferred update, which still uses the gradients of its step.
        self._check_whole()
        self._begin()
        self._window.begin_backward(averaged=averaged, all_ranks=True)
        around.enter_context(self._parts.telemetry.timed("backward"))
        around.enter_context(self._window.backward())
        self._parts.activations.begin_backward()

    @_held
    def step(self, update: bool | None = None) -> StepResult:
        """Update every parameter that has a gradient, and clear the gradients.

        Before `accumulation_steps` micro-batches have come, it only returns and keeps their
        gradients. `update=True` updates with what has come, as at the end of an epoch;
        `update=False` never does. A step that was interrupted in its update is finished in any
        case.

        Raises:
            CapacityError: a rank has no room to sum gradients that came outside of `backward`. All
                ranks raise it; zero_grad() begins the step again.
            FloatingPointError: with fp16, the gradients are not finite at a loss scale of 1.
                Nothing was updated.
            RuntimeError: no gradient has come since the last step; your code changed a parameter;
                a backward runs; or an op failed, and the next call resumes there.
        """
        self._guards.check_no_backward()
        self._begin()
        parts = self._parts
        # Before anything changes: the error of a save in the background shows here.
        self._saves.look(self.steps)
        # First what is left of the update before: its gradients are still in use.
        self._updates.tell()
        self._updates.resume()
        self._updates.end()
        accumulation = self._window.accumulation
        # A plain loss.backward() is counted here.
        accumulation.end_micro_batch()
        wanted = accumulation.is_reached if update is None else update
        last = wanted or accumulation.is_reached
        # Collective: gradients that waited for the last micro-batch are reduced now.
        parts.ranks.finish(last=last)
        # Before anything is updated: a refusal loses nothing.
        self._guards.check_gradients()
        self._guards.check_states()
        # Gradients that wait for the last micro-batch are not in the keeper yet.
        if not parts.gradients.any and not parts.ranks.waits(last=last):
            raise RuntimeError(
                "There is no gradient to update with: none has come since the last step, or "
                "zero_grad() has dropped it. Call backward() first. If you did, the loss does not "
                "depend on any parameter of the optimizer"
            )
        # An update that has begun is finished whatever `update` says.
        if not wanted and not parts.states.begun:
            accumulation.leave()
            return StepResult(Outcome.ACCUMULATED, loss_scale=parts.scale.value)
        # A step that is resumed has changed some parameters itself.
        if not parts.states.begun:
            self._check_untouched(parts.trained)
        before = self.steps
        # Also where the update is skipped: the loss scale changes.
        self._saves.note_change()
        try:
            with parts.telemetry.timed("update"):
                result = self._update()
        finally:
            # Also where it failed: what it has written is not a change by the caller.
            for trained in parts.trained:
                trained.note_values()
        # First of all that follows: the update is made, whatever fails below.
        self._updates.end_step()
        accumulation.end_step()
        parts.fetcher.end_step()
        parts.activations.end_step()
        fetching = self.fetching()
        parts.drives.count()
        parts.telemetry.note(
            planned_again=self._updates.why_planned_again(),
            blocks=parts.activations.uses(),
            ways=parts.activations.described(),
        )
        parts.meter.end_step(result, in_time=fetching.in_time, late=fetching.late)
        # After the meter: its counters are those of the step that has ended.
        self._updates.look_for_a_plan(parts.telemetry.counters)
        # A skipped step has updated nothing, and no scheduler sees it.
        if self.steps > before:
            self._guards.step_optimizer()
            for scheduler in self._parts.schedulers:
                scheduler.step()
        parts.drives.warn_of_wear()
        return result

    @_held
    def zero_grad(self) -> None:
        """Drop all gradients since the last step. step() clears those that it used without this."""
        self._check_whole(deferred_too=False)
        self._window.placeholders.hide()
        # A deferred update still uses the gradients of its step, and none has come since.
        if self._updates.under_way:
            return
        self._window.drop()

    @_held
    def clip_grad_norm_(self, max_norm: float) -> float:
        """Clip the gradients to `max_norm` in the next step, unless dropped; return their norm.

        Use it instead of torch.nn.utils.clip_grad_norm_, which sees no gradients here.

        Raises:
            CapacityError: as in `step`.
        """
        self._check_whole()
        return self._window.clip(max_norm)

    def as_optimizer(self) -> EngineOptimizer:
        """Return an optimizer whose `step()` steps the engine, for code that calls optimizers.

        The caller owns the boundary of a step: `optimizer.step()` updates with all gradients that
        have come, and `backward(loss, scale=False)` leaves averaging to the caller. Learning-rate
        schedulers take it like the engine's own optimizer.
        """
        return EngineOptimizer(self)

    def follow_schedule(self, scheduler: torch.optim.lr_scheduler.LRScheduler) -> None:
        """Step `scheduler` after each update from now on: do not step it yourself.

        Checkpoints have its state: `extra` need not name it.

        Raises:
            ConfigError: it needs a metric, is of another optimizer, or is stepped already.
            RuntimeError: the engine was closed.
        """
        self._ending.check_open()
        check_schedule(scheduler, self.optimizer, self._parts.schedulers)
        self._parts.schedulers.append(scheduler)

    def no_sync(self) -> AbstractContextManager[None]:
        """Change nothing in the body, for loops written for DistributedDataParallel.

        The engine decides when ranks reduce gradients, and gives the same bits in either case.
        """
        return nullcontext()

    def _update(self) -> StepResult:
        parts, states = self._parts, self._parts.states
        # An interrupted step goes on with what it began with.
        inputs, result = (
            (states.step.inputs, states.step.result) if states.begun else self._decide_update()
        )
        if result.outcome is Outcome.SKIPPED:
            return result
        # Modules let go first: what they hold is not evicted. Both come before the first kernel
        # writes: a copy that stays on the device would keep the old values.
        parts.modules.let_go()
        parts.fetcher.give_up()
        self._refuse_older_graphs()
        self._updates.begin(inputs, result)
        self._updates.make()
        # Before the rest is deferred: modules may fetch what is made from then on.
        parts.fetcher.changed([trained.number for trained in parts.trained])
        self._updates.defer_rest()
        parts.scale.step_made()
        self._window.forget_clipping()
        return result

    def _decide_update(self) -> tuple[StepInputs, StepResult]:
        """Return what an update is made with and what it comes to, or that it is skipped."""
        parts = self._parts
        rules = rules_of(self.optimizer)
        # Early updates have used the hyperparameters of the backward's begin.
        parts.early.check_rules(rules)
        # In this order: what early updates leave undone goes to the drives, and is waited for.
        parts.early.finish()
        parts.gradients.finish_transfers()
        window, unscale, used = self._window, self._window.unscaling, parts.scale.value
        # Collective, and before anything is updated: ranks that differ have changed nothing.
        parts.ranks.agree_on_update(rules, window.clip_to, used, window.accumulation)
        parts.check_rules(rules)  # of all ranks alike, so that all refuse together
        norm, factor = None, unscale
        # A pass over all gradients, so only where the norm is used.
        if window.clip_to is not None or parts.scale.dynamic:
            total = parts.ranks.norm()
            norm = total.norm(unscale)
            if parts.scale.dynamic and not total.is_finite:
                parts.scale.step_skipped()
                window.forget_clipping()
                skipped = StepResult(Outcome.SKIPPED, norm, parts.scale.value)
                return StepInputs(parts.gradients, rules, factor), skipped
            if not total.is_finite:
                warnings.warn(
                    f"The norm of the gradients is {norm} in step {self.steps}. Every parameter "
                    "that they update becomes NaN or infinite",
                    RuntimeWarning,
                    stacklevel=5,
                )
            factor = gradient_factor(total, unscale=unscale, max_norm=window.clip_to)
        # The scale that these gradients had: step_made() may raise it.
        return StepInputs(parts.gradients, rules, factor), StepResult(Outcome.UPDATED, norm, used)

    def _refuse_older_graphs(self) -> None:
        """Let PyTorch refuse a backward through values that this update replaces.

        The engine's kernels write without telling autograd, so the version counters are raised
        here. Parameters that modules fetch need none: fetching a newer version is refused.
        """
        parts = self._parts
        if not parts.modules.fetches:
            increment_version(
                [
                    known.parameter
                    for known in parts.trained
                    # Other ranks may have gradients where this one has none.
                    if not parts.ranks.is_alone or parts.gradients.has(known.number)
                ]
            )

    def _accept(self, number: int, gradient: torch.Tensor) -> None:
        if not self._window.in_backward:
            self._leave_no_half()  # a deferred update still uses the gradients of the step before
        self._window.accept(number, gradient)

    # --- looking and changing ---------------------------------------------------------------------

    @contextmanager
    def gathered(
        self, parameters: torch.nn.Parameter | Iterable[torch.nn.Parameter], *, modify: bool = False
    ) -> Iterator[None]:
        """Have whole parameters in the body. With `modify`, what the body writes is kept."""
        wanted = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        for parameter in wanted:
            if not isinstance(parameter, torch.Tensor):
                expected = "a parameter, or several, as model.parameters() lists them"
                raise ConfigError(
                    field="parameters", value=_described(parameter), expected=expected
                )
        # A tensor that the engine does not manage has its values already.
        known = [self._known[id(parameter)] for parameter in wanted if id(parameter) in self._known]
        end = HeldEnd(self._signals)
        with end as around, end:
            self._signals.holding(self._gather)(known, around, modify=modify)
            yield
            # Not reached where the body raised: half of a change is not kept.
            with self._signals:
                self._keep_changes(known) if modify else self._check_untouched(known)

    def _gather(self, known: Sequence[ModelParameter], around: ExitStack, *, modify: bool) -> None:
        """Have whole parameters until `around` ends."""
        self._check_whole()
        # A change past the engine would show here and be lost later.
        if not modify:
            self._check_untouched(known)
        changing = modify and any(isinstance(parameter, TrainedParameter) for parameter in known)
        if changing:
            self._parts.early.check_not_begun()
        if modify:
            # A save in the background still reads the values that are to change.
            self._saves.in_flight.wait_for_values()
        self._parts.early.finish()
        # Gathering may need the memory of gradients that wait to be written.
        self._parts.gradients.start_writing()
        if changing:
            around.enter_context(self._window.modifying())
        around.enter_context(self._gathered_with_room([parameter.number for parameter in known]))
        self._parts.modules.gathered(parameter.number for parameter in known)

    @contextmanager
    def _gathered_with_room(self, numbers: Sequence[int]) -> Iterator[None]:
        """Have these parameters in the body; evict what was read outside of modules for room."""
        fetcher, modules = self._parts.fetcher, self._parts.modules
        with ExitStack() as held:
            # Each turn one parameter less is held: the one that was read first.
            while True:
                try:
                    held.enter_context(fetcher.gathered(numbers))
                    break
                except CapacityError:
                    if not modules.let_go_of_oldest_read(numbers):
                        raise
            yield

    def _keep_changes(self, known: Sequence[ModelParameter]) -> None:
        """Keep what the body of `gathered` has written."""
        if any(not isinstance(parameter, TrainedParameter) for parameter in known):
            self._parts.checksums.forget()
        self._parts.ranks.check_same(known)
        self._saves.note_change()
        for parameter in known:
            # The master first: an interrupt between the two leaves values that check_untouched
            # refuses, not a master that differs from them.
            if isinstance(parameter, TrainedParameter):
                flat = parameter.parameter.detach().reshape(-1)
                own = self._parts.ranks.own(parameter.number, flat)
                self._parts.states.set_master(parameter.number, own)
            self._parts.fetcher.write_home(parameter.number)
            # The body may have written past autograd, as through parameter.data.
            if not self._parts.modules.fetches:
                increment_version([parameter.parameter])
            parameter.note_values()

    @_held
    def register_external(self, module: torch.nn.Module, parameter: torch.nn.Parameter) -> None:
        """Let `module` use a parameter of another module, whenever it runs, like its own.

        Needed where the module does not read it as an attribute of that other module, but from a
        variable, a list or a closure. All ranks register the same. Where parameters stay on the
        device, updates of this one never wait for a forward.

        Raises:
            ConfigError: the module or the parameter is not the model's.
        """
        self._check_whole()
        if not any(module is one_of_model for one_of_model in self.model.modules()):
            expected = "one of the model's, as named_modules() lists them"
            raise ConfigError(field="module", value=type(module).__name__, expected=expected)
        if id(parameter) not in self._known:
            expected = "one of the model's, as named_parameters() lists them"
            raise ConfigError(field="parameter", value=_described(parameter), expected=expected)
        self._parts.modules.register_external(module, parameter)
        if isinstance(self._parts.deferral.follower, PendingParameters):
            self._parts.deferral.follower.register_external(parameter)

    def _check_untouched(self, known: Iterable[ModelParameter]) -> None:
        for parameter in known:
            parameter.check_untouched()

    @_held
    def state_dict(self) -> dict[str, Any]:
        """Return the model's state dict as copies on the host, wherever its parameters are.

        A parameter with several names has one copy, so that the code that saves it can see the tie.

        Raises:
            CapacityError: the machine or its memory cgroup has too little memory for the copies.
        """
        return self._copies_of(lambda _: True)

    def listing(self) -> AbstractContextManager[None]:
        """Let the model's own `state_dict()` list its entries in the body.

        For code that reads the names alone, as peft's `save_pretrained` does of whole layers that
        are trained beside adapters. Values that are not on the device are NaN there.
        """
        return self._guards.listing()

    @_held
    def trainable_state_dict(self) -> dict[str, Any]:
        """Return what `state_dict` has of the parameters that are trained, such as adapters.

        Raises:
            CapacityError: the machine, or its memory group, has too little memory for the copies.
        """
        trained = {id(known.of_model) for known in self._parts.trained}
        return self._copies_of(
            lambda value: any(id(tensor) in trained for tensor in _tensors_of(value))
        )

    def _copies_of(self, is_wanted: Callable[[Any], bool]) -> dict[str, Any]:
        """Return copies of those entries of the model's state dict."""
        self._check_whole()
        # With all names of tied parameters: they share one copy.
        names = dict(self.model.named_parameters(remove_duplicate=False))
        # The model refuses state_dict() to all other callers.
        with self._guards.listing():
            # keep_vars: the tensors themselves, by which parameters are recognised.
            found = self.model.state_dict(keep_vars=True)
        listed = {name: value for name, value in found.items() if is_wanted(value)}
        # Tied parameters take memory once.
        tensors = {
            id(tensor): tensor
            for value in listed.values()
            for tensor in _tensors_of(value)
            if isinstance(tensor, torch.Tensor)
        }
        self._check_room_for_copies(
            sum(tensor.numel() * tensor.element_size() for tensor in tensors.values()),
            "copy parameter by parameter under engine.gathered(parameter) and write each to a file",
        )

        # By what it is made of: tied weights that are tiled have the same tiles.
        copies: dict[tuple[int, ...], Any] = {}
        for name, value in listed.items():
            made_of = tuple(id(tensor) for tensor in _tensors_of(value))
            if made_of not in copies:
                copies[made_of] = self._copy_of(value, names.get(name, value))
        return {
            name: copies[tuple(id(tensor) for tensor in _tensors_of(value))]
            for name, value in listed.items()
        }

    def _copy_of(self, value: Any, parameter: Any) -> Any:
        """Return a copy of an entry of the state dict, which is of this parameter, if of any."""
        # Copying takes long: Ctrl-C acts between two.
        self._safe_point()
        if isinstance(value, TiledValues):
            # A tile of a parameter has no name in the state dict.
            return value.joined(lambda tile: self._copy_of(tile, tile))
        known = self._known.get(id(parameter))
        tensor = value
        if known is not None:
            # Cut over ranks, it is gathered: all ranks come here in the same order.
            cut = not self._parts.ranks.is_alone and known.numel > 0
            if known.on_drives or cut:
                return self._parts.fetcher.copy_of(known.number).view(known.parameter.shape)
            tensor = known.values.view(known.parameter.shape)
        # cpu() returns a tensor of the CPU itself, so clone() makes the copy.
        return tensor.detach().cpu().clone() if isinstance(tensor, torch.Tensor) else tensor

    @_held
    def optimizer_state_dict(self) -> dict[str, Any]:
        """Return what the optimizer's own `state_dict()` would be, as copies on the host.

        A plain PyTorch run goes on from it, and from `state_dict()`. Moments are fp32 whatever the
        dtype of their parameters. All ranks call this. Checkpoints need no such copies: `save`.

        Raises:
            CapacityError: the machine, or its memory group, has too little memory for the copies.
        """
        self._check_whole()
        self._parts.early.finish()
        self._check_room_for_copies(
            nbytes_of_states(self._parts), "write a checkpoint with engine.save(path)"
        )
        return optimizer_state_dict(self._parts, self.state_of)

    @_held
    def load_optimizer_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on with the moments, step counts and groups of a plain PyTorch run, or of an engine.

        `state_dict` is that of the same kind of optimizer over the same parameters. Parameters that
        it has no state of begin anew. All ranks call this with the same.

        `steps` goes on from its step counts, and where it has none, as of SGD, from where it is.

        Raises:
            ConfigError: its groups or states are others. Nothing has changed.
            RuntimeError: gradients have come since the last step: step() or zero_grad() first.
            CollectiveError: the ranks were given other states, or another rank failed.
            TransferError: the drive failed. Until this or `load` succeeds, the engine refuses to
                train.
        """
        self._check_between_steps("load_optimizer_state_dict", loads=True)
        self._saves.in_flight.wait_for_values()
        self._saves.note_change()
        steps = load_optimizer_state_dict(self._parts, self._loads, state_dict)
        if steps is not None:
            self._continue_from(steps)
        for parameter in self._parts.trained:
            parameter.note_values()

    def _check_room_for_copies(self, nbytes: int, instead: str) -> None:
        """Refuse copies on the host that would not fit: the kernel would kill the process."""
        free = self._parts.ranks.memory_for_copies(free_for_copies())
        if nbytes > free:
            raise CapacityError(
                tier=Tier.HOST.name,
                asked=nbytes,
                free=free,
                limit=probe_memory().usable_bytes,
                change=f"{instead}, or give the process more memory beside the budget's host",
            )

    @_held
    def state_of(self, parameter: torch.nn.Parameter) -> Mapping[str, torch.Tensor | int]:
        """Return copies of a parameter's fp32 master and moments, in its shape, and its step count.

        Also of its gradient, if one has come since the last step: in fp32, unscaled and averaged,
        not clipped. Early updates leave none.

        Raises:
            ConfigError: the engine does not train it.
        """
        self._check_whole()
        known = self._known.get(id(parameter))
        if not isinstance(known, TrainedParameter):
            expected = "a parameter that the optimizer was made of and that requires a gradient"
            raise ConfigError(field="parameter", value=_described(parameter), expected=expected)
        number = known.number
        # Early updates change states: they end before these are read.
        self._parts.early.finish()
        self._parts.gradients.start_writing()
        flat, steps = dict(self._parts.states.state_of(number)), self._parts.states.steps_of(number)
        gradient = self._window.gradient_of(number)
        if gradient is not None:
            flat["gradient"] = gradient
        flat, steps = self._parts.ranks.states(known, flat, steps)
        shaped: dict[str, torch.Tensor | int] = {
            name: values.view(parameter.shape) for name, values in flat.items()
        }
        return {**shaped, "step": steps}

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
        pending: PendingGradients | str = PendingGradients.REFUSE,
        frozen: FrozenParameters | str = FrozenParameters.SAVE,
    ) -> str:
        """Save all that the run needs to go on with the same bits; return the checkpoint's tag.

        The directory `path` holds the checkpoints of a run; all ranks share it. What is saved:
        parameters, masters, moments, step counts, buffers, the loss scale, the optimizer's groups,
        random generators of every rank, schedulers that the engine steps (`follow_schedule`), its
        settings, and the state dicts of what `extra` names: your own schedulers, samplers. A
        checkpoint is there whole or not at all; when this returns, it survives a power loss. With
        `keep`, all but so many of the newest are removed after this one was read back and found
        whole. All ranks call this.

        With `wait=False`, it returns as soon as training may go on, and a thread writes beside it
        what there is now. An error of the drive appears at the next step, save, load or close. A
        save that is still under way is waited for first. `last_save()` says how it stands.

        With `on_error="warn"`, an error of the drive or of another rank is a warning, whenever it
        appears. No checkpoint has the returned tag then: `last_save().state` is FAILED. Other
        errors are raised all the same.

        With `pending="leave_out"`, it saves between the micro-batches of a step as well, without
        their gradients: a run that goes on from there makes that step of the rest.

        With `frozen="leave_out"`, the values of frozen parameters, such as the base of adapters,
        are not written; buffers are. `load` then needs a model that has the same frozen values. The
        first such save reads these values once, before it returns, for their checksums.

        Raises:
            RuntimeError: gradients have come since the last step: step() or zero_grad() first. Or
                they are left out, and updates of this step have begun early.
            ConfigError: `tag` cannot be a tag, or a checkpoint has it already.
            CapacityError: the host's budget has less than 1.2 MiB free.
            TransferError: the drive is full or failed. Earlier checkpoints are as they were, and
                training can go on.
            DamagedCheckpoint, ChecksumError: with `keep`, what was read back is not what was
                written. Earlier checkpoints are as they were. With `on_error="warn"`, it is a
                warning.
            TypeError: a state dict holds what cannot be kept without pickling: where, and what to
                do.
            CollectiveError: another rank failed.
        """
        self._check_between_steps("save", pending=chosen(PendingGradients, pending, "pending"))
        request = SaveRequest(
            path=Path(path).absolute(),  # a thread writes there, whatever directory is current then
            tag=tag,
            extra=extra or {},
            keep=keep,
            wait=wait,
            on_error=chosen(OnError, on_error, "on_error"),
            frozen=chosen(FrozenParameters, frozen, "frozen"),
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
            RuntimeError: updates of this step have begun early: step() or zero_grad() first.
            CollectiveError: another rank failed.
        """
        chosen_dtype = export_dtype(dtype)
        # Weights are what they are, whatever gradients wait for a step.
        self._check_between_steps("export", pending=PendingGradients.LEAVE_OUT)
        self._saves.finish()
        return export_weights(
            self._parts,
            Path(path),
            chosen_dtype,
            trainable_only=trainable_only,
            shard_bytes=shard_bytes,
        )

    def last_save(self) -> SaveReport:
        """Return how the newest save stands: tag, bytes, seconds, how long training waited."""
        return self._saves.in_flight.report

    def autosave(
        self,
        path: str | os.PathLike[str],
        *,
        every: int | str,
        keep: int | None = None,
        extra: Mapping[str, Stateful] | None = None,
        wait: bool = False,
        on_error: OnError | str = OnError.WARN,
        frozen: FrozenParameters | str = FrozenParameters.SAVE,
    ) -> str | None:
        """Save if it is time, and return the tag then; None if it is not.

        Call it at the end of the loop's body, on all ranks. `every` is a number of steps or a time:
        500, "30min", "1.5h". The other arguments are those of `save`. An error of the drive is a
        warning by default; other errors of `save` are raised. Between the micro-batches of a step,
        it does nothing.

        From the first call on, SIGTERM lets the next call save, close the engine and raise
        SystemExit(75), unless the program has a handler of its own. That one can call `preempt()`,
        which has the same effect.

        Raises:
            ConfigError: `every` is neither.
            CapacityError: the host's budget has less than 1.2 MiB free.
            TransferError: the process was told to stop, and its last save failed.
            SystemExit: the process was told to stop, and the checkpoint is there.
        """
        self._ending.check_process()
        self._ending.check_open()
        # From the first call on, whether or not a save is due.
        self._saves.schedule.watch()
        tag, stops = self._autosave_if_due(
            path,
            every,
            keep=keep,
            extra=extra,
            wait=wait,
            on_error=on_error,
            frozen=chosen(FrozenParameters, frozen, "frozen"),
        )
        if stops:
            # Nothing is read back: the checkpoint has the values, and time may be short.
            self.close(restore=False)
            raise SystemExit(PREEMPTED_EXIT_CODE)
        return tag

    def preempt(self) -> None:
        """Let the next `autosave` save and end the process.

        Signal handlers and other threads may call it.
        """
        self._saves.schedule.stop()

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
        frozen: FrozenParameters,
    ) -> tuple[str | None, bool]:
        """Save if it is time or the process has to stop; return the tag, and whether it has to."""
        self._saves.schedule.begin(every, self.steps)
        # A deferred update still has the gradients of its step: these are no new ones.
        waiting = self._parts.gradients.any and not self._updates.under_way
        if waiting or self._window.accumulation.count or not self.steps:
            return None, False
        due, stops = self._saves.schedule.decide(self.steps)
        if not due and not stops:
            return None, False
        # The save in flight may be the one that is needed.
        if stops:
            self._saves.finish_before_last()
            if self._saves.has_saved(Path(path).absolute(), extra or {}, frozen):
                return self.last_save().tag, True
            # Waited for, and errors raise: the process ends after it.
            return self.save(path, extra=extra, keep=keep, frozen=frozen), True
        tag = self.save(path, extra=extra, keep=keep, wait=wait, on_error=on_error, frozen=frozen)
        return tag, False

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

        Frozen parameters that the save left out stay as they are. They have to be those of the save
        in name, shape, dtype and values, which their checksums tell: the load reads them once.

        Raises:
            IncompleteCheckpoint: there is no such checkpoint, or files of it are missing.
            DamagedCheckpoint, ChecksumError: it is damaged: the tensor's file is named. If that
                shows while values are being read, the engine refuses to train until a load
                succeeds.
            ManifestMismatch: it is of another model or optimizer.
            CapacityError: the host has no room for the state dicts in it, whose size is named.
            RuntimeError: gradients have come since the last step: step() or zero_grad() first.
            CollectiveError: another rank failed.
        """
        self._check_between_steps("load", loads=True)
        # A save in flight reads the states that this overwrites.
        self._saves.finish()
        self._saves.note_change()
        loaded = self._loads.load(
            Path(path),
            tag,
            extra or {},
            strict=strict,
            weights_only=weights_only,
        )
        if not weights_only:
            self._continue_from(loaded.step)
        if not self._parts.modules.fetches:
            # Values are loaded without telling autograd, as updates are made.
            increment_version([known.parameter for known in self._parts.trained])
        for parameter in self._parts.trained:
            parameter.note_values()
        return loaded

    def resume(
        self, path: str | os.PathLike[str], *, extra: Mapping[str, Stateful] | None = None
    ) -> bool:
        """Load the newest checkpoint if there is any; return whether there is. See `load`."""
        if CheckpointDirectory(path).latest() is None:
            return False
        self.load(path, extra=extra)
        return True

    def _continue_from(self, steps: int) -> None:
        self._updates.continue_from(steps)
        self._saves.schedule.continue_from(steps)

    def _check_between_steps(
        self,
        what: str,
        *,
        loads: bool = False,
        pending: PendingGradients = PendingGradients.REFUSE,
    ) -> None:
        """Finish what is in flight. With `loads`, an earlier load may have failed half-way.

        Raises:
            RuntimeError: gradients have come since the last step, and are not left out.
        """
        self._ending.check_process()
        self._leave_no_half(half_loaded_too=loads)
        self._parts.early.finish()
        self._parts.gradients.start_writing()
        # Early updates have used some of them: half of the values would be new.
        may_wait = pending is PendingGradients.LEAVE_OUT and not self._parts.early.begun
        if not may_wait and (self._parts.gradients.any or self._window.accumulation.count):
            raise RuntimeError(
                "Gradients have come since the last step, and a checkpoint has none. Call step() "
                f"or zero_grad() before {what}()"
            )

    @property
    def plan(self) -> StepPlan:
        """What each update moves where, and when. With strategy auto, it may be replaced."""
        return self._updates.plan

    @property
    def device(self) -> torch.device:
        """The device where modules compute, and where batches have to be."""
        return self._parts.accelerator.torch_device

    @property
    def steps(self) -> int:
        """How many updates were made."""
        return self._updates.made

    def usage(self) -> tuple[Usage, ...]:
        """Return what each tier holds and has held at most, with its budget."""
        return self._parts.ledger.usage()

    def fetching(self) -> FetchingStats:
        """Return how many parameters modules had fetched: none where they stay on the device."""
        return self._parts.fetcher.stats

    def timeline(self) -> Timeline:
        """Return what was recorded of the newest steps."""
        return self._parts.telemetry.timeline()

    def report(self) -> StepReport:
        """Return the figures of the newest step that has ended; printed, they are a small table.

        Raises:
            RuntimeError: there is none.
        """
        # The running step has no end yet.
        ended = [step for step in self.timeline().steps if step.end_ns is not None]
        if not ended:
            raise RuntimeError(
                "There is no step to report on. Call step() first, with the setting "
                'telemetry.recording="timeline"'
            )
        drives = self._parts.drives
        step, rates = ended[-1], drives.rates_of_update(ended[-1])
        return report_of(step, self.usage(), drives.uses(step), rates)

    def in_step(self, batches: Iterable[_B]) -> Iterator[tuple[_B, bool]]:
        """Yield this rank's batches, each with True, until every rank has had all of its own.

        A rank that has no more batches gets its last one again, with False, so that it takes part
        in the collectives of the others: do not count its result. On one rank, each batch comes
        once, with True. All ranks iterate to the end.

        Raises:
            CollectiveError: another rank does something else, or has failed.
            ConfigError: a rank has no batch at all, and another one has.
        """
        rest = iter(batches)
        last: list[_B] = []
        while True:
            # One at a time: none is taken that this rank does not train on.
            new = list(islice(rest, 1))
            self._ending.check_open()
            # Every rank asks in each round, or those with batches would wait for the others.
            if not self._parts.ranks.any_has_more(has_more=bool(new), has_had=bool(last)):
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
        """Remove all hooks and return all memory except the parameters'. Again: do nothing.

        Parameters that were fetched get ordinary memory with their values, if the machine and its
        memory cgroup have enough; if not, they show NaN and a warning says so. With `restore=False`
        they show NaN and nothing is read: for a model that was saved. All ranks pass the same
        value.
        """
        try:
            self._close(None, restore=restore)
        # SIGTERM does again what it did before, whatever closing raises.
        finally:
            self._saves.schedule.close()

    @_held
    def _close(self, reason: BaseException | None, *, restore: bool = True) -> None:
        """Close. Tell the other ranks the `reason`, if there is one."""
        self._ending.close(reason, restore=restore)

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
            self._saves.schedule.close()

    def __del__(self) -> None:
        """Drop the model first, and then end: a model that goes too needs nothing restored."""
        # Python calls this before the finalizer of `Ending`, which sees whether the model is gone.
        self.__dict__.clear()

    def __deepcopy__(self, _memo: object) -> Engine:
        """Refuse: states, hooks and memory cannot be copied."""
        raise TypeError(
            "An engine cannot be copied. Initialize another one for a copy of the model"
        )

    def __reduce__(self) -> str:
        """Refuse likewise."""
        raise TypeError(
            "An engine cannot be pickled: its states are in memory of this process. Use "
            "engine.save()"
        )

    def _begin(self) -> None:
        """Begin to record a step, unless one is being recorded."""
        self._ending.check_process()
        self._ending.check_open()
        self._window.accumulation.note_call()
        # True: optimizer.zero_grad() or model.zero_grad() was called.
        if self._window.placeholders.hide():
            # Refuses where gradients of earlier micro-batches would go unnoticed.
            self._window.check_may_drop()
            self.zero_grad()
        if not self._parts.telemetry.in_step:
            self._parts.telemetry.begin_step(self.steps)

    def _check_whole(self, *, deferred_too: bool = True) -> None:
        """Refuse to go on after half a step; `deferred_too`: finish a deferred update first."""
        self._ending.check_process()
        self._leave_no_half(deferred_too=deferred_too)

    def _leave_no_half(self, *, deferred_too: bool = True, half_loaded_too: bool = False) -> None:
        self._ending.check_open()
        half_loaded = frozenset() if half_loaded_too else self._loads.half_loaded
        if Overwritten.WEIGHTS in half_loaded:
            raise RuntimeError(
                "A load failed half-way, so some values are the checkpoint's and the rest are "
                "older. Call load() again until it succeeds"
            )
        if half_loaded:
            raise RuntimeError(
                "A load failed half-way, so some of the optimizer's states are new and the rest "
                "are older. Call load_optimizer_state_dict() or load() again until it succeeds"
            )
        # A deferred update that has failed goes on first.
        self._updates.tell()
        self._updates.resume()
        if self._updates.under_way:
            if deferred_too:
                self._updates.end()
            return
        if self._parts.states.begun:
            raise RuntimeError(
                "A step was interrupted in its update, so some parameters are new and the rest "
                "old. Call step() again, which finishes it"
            )


def close_at_its_end(engine: Engine, resources: ExitStack) -> None:
    """Close `resources` when the engine is closed, or when the caller drops it."""
    engine._ending.attach(engine, resources)


def _tensors_of(value: Any) -> tuple[Any, ...]:
    """Return what a value of a state dict is made of: its tiles, or itself."""
    return value.tiles if isinstance(value, TiledValues) else (value,)


def _described(parameter: object) -> str:
    """Describe what was passed in place of a parameter."""
    if isinstance(parameter, torch.Tensor):
        return f"one of shape {tuple(parameter.shape)}"
    return f"{parameter!r}, which is no parameter"
