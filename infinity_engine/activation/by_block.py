"""`BlockActivations`: what each block saves goes the block's own way, and all else one way.

Sees each call of a block begin and end. `BlockCall` runs a block again; `ActivationOffload` moves
what waits on the host or on drives; `Ways` decides.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

import torch

from infinity_engine.activation.blocks import ModuleMembers, RepeatedBlock, members_of
from infinity_engine.activation.lifetimes import CallLife, HeldAs, Lifetimes
from infinity_engine.activation.recompute import (
    BlockCall,
    Placeholder,
    UnknownArgument,
    without_cache,
)
from infinity_engine.activation.saved import (
    BlockUse,
    KeptActivations,
    SavedTensors,
    addresses_of,
    version_of,
)
from infinity_engine.placement.activations import BlockWay
from infinity_engine.plan import Tier

__all__ = [
    "BlockActivations",
    "FixedWays",
    "WatchedModules",
    "WayDecider",
    "cannot_run_again",
]

_KEPT = KeptActivations()
_HELD_AS = MappingProxyType(
    {Tier.DEVICE: HeldAs.KEPT, Tier.HOST: HeldAs.HOST, Tier.NVME: HeldAs.DRIVES}
)


class WayDecider(Protocol):
    """Decides the way of each call of a block, and learns what calls take."""

    def way(self, block: RepeatedBlock, *, inputs: int, held: int) -> BlockWay:
        """Return the way of a call with so many bytes of inputs, while so many bytes are held."""

    def expected(self, block: RepeatedBlock, way: BlockWay, *, inputs: int) -> int:
        """Return the bytes that a call that goes this way is going to keep where it computes."""

    def note_call(self, block: RepeatedBlock, *, saved: int, inputs: int, seconds: float) -> None:
        """Note what a call in a forward saved and took."""

    def note_run_again(self, block: RepeatedBlock, *, start: float, seconds: float) -> None:
        """Note that a block was run again, and when that began."""

    def end_forward(self, outside: int) -> None:
        """Note that a forward has ended, and the bytes that it saved outside of blocks."""

    def refuse_recompute(self, block: RepeatedBlock, why: str) -> None:
        """Note that a block cannot be run again."""

    def now(self) -> float:
        """Return the time in seconds, where calls are to be timed; else 0."""

    def end_step(self) -> None:
        """Note that a step has ended."""

    def described(self) -> str:
        """Return what was decided, and why; empty where there was nothing to decide."""


class WatchedModules(Protocol):
    """What second runs need of those who watch a model's modules."""

    def saving_again(self) -> AbstractContextManager[None]:
        """Return the context in which a second run saves what it saves."""

    def versions_of(
        self, used: Mapping[str, torch.Tensor], modules: Mapping[str, torch.nn.Module]
    ) -> Mapping[str, int]:
        """Return the version of each parameter and buffer that is used, by name, and of those that
        are registered as external of these modules, each by itself.
        """


class FixedWays:
    """One way for all blocks, which a setting says; `left_alone` says why there are none."""

    def __init__(self, way: BlockWay, left_alone: str = "") -> None:
        self._way = way
        self._left_alone = left_alone
        self._kept_whole: dict[str, str] = {}

    def way(self, block: RepeatedBlock, *, inputs: int, held: int) -> BlockWay:
        """Return the way that was set."""
        return self._way

    def expected(self, block: RepeatedBlock, way: BlockWay, *, inputs: int) -> int:
        """Return 0: nothing depends on it."""
        return 0

    def note_call(self, block: RepeatedBlock, *, saved: int, inputs: int, seconds: float) -> None:
        """Do nothing."""

    def note_run_again(self, block: RepeatedBlock, *, start: float, seconds: float) -> None:
        """Do nothing."""

    def end_forward(self, outside: int) -> None:
        """Do nothing."""

    def refuse_recompute(self, block: RepeatedBlock, why: str) -> None:
        """Remember the reason."""
        self._kept_whole[block.name] = why

    def now(self) -> float:
        """Return 0: nothing is timed."""
        return 0.0

    def end_step(self) -> None:
        """Do nothing."""

    def described(self) -> str:
        """Return which blocks cannot run again, and why."""
        return self._left_alone or cannot_run_again(self._kept_whole)


def cannot_run_again(reasons: Mapping[str, str]) -> str:
    """Return which blocks cannot run again, by reason."""
    by_reason: dict[str, list[str]] = {}
    for name, why in reasons.items():
        by_reason.setdefault(why, []).append(name)
    return "; ".join(
        f"{names[0]}{f' and {len(names) - 1} others' if len(names) > 1 else ''} kept: {why}"
        for why, names in by_reason.items()
    )


class _OtherRun(NamedTuple):
    """A block that runs without a way of its own: again, or as what is outside of blocks."""

    module: torch.nn.Module
    pack: Callable[[torch.Tensor], object]


@dataclass(slots=True)
class _FirstRun:
    """A block that runs in a forward and goes its way; `call` keeps what does not move as it is."""

    block: RepeatedBlock
    way: BlockWay
    keeper: SavedTensors
    life: CallLife
    call: BlockCall | None
    inputs: int
    given: Sequence[tuple[torch.Tensor, int]]
    own: frozenset[int]  # addresses of the model's own memory
    # The buffers themselves: the id of one that has gone may be that of another.
    buffers: Sequence[_BufferNow]
    started: float
    saved: dict[int, int] = field(default_factory=dict)  # bytes by address, as long as it runs

    @property
    def module(self) -> torch.nn.Module:
        return self.block.module

    def pack(self, tensor: torch.Tensor) -> object:
        self.saved.update(_storage_of(tensor, self.own))  # once, however often it is saved
        if self.call is not None:
            return self.call.pack(tensor)
        return _packed_by(self.keeper, tensor, self.life)

    @property
    def saved_bytes(self) -> int:
        return sum(self.saved.values())

    @property
    def runs_again(self) -> bool:
        return self.call is not None and self.call.runs_again

    @property
    def way_gone(self) -> BlockWay:
        """The way that the call has gone: a block that cannot run again is kept."""
        return BlockWay.KEEP if self.way.recomputes and not self.runs_again else self.way


@dataclass(frozen=True, slots=True)
class _Elsewhere:
    """A saved tensor that another keeper has; `life` ends with the last one of its call."""

    keeper: SavedTensors
    packed: object
    life: CallLife | None


def _packed_by(keeper: SavedTensors, tensor: torch.Tensor, life: CallLife | None = None) -> object:
    packed = keeper.pack(tensor)
    return packed if keeper is _KEPT else _Elsewhere(keeper, packed, life)


class BlockActivations:
    """Keeps what autograd saves: in `blocks` as `decider` says, `outside` of them in one way.

    `moved` keep what waits on a tier other than where it was made. `lifetimes` counts what calls
    hold.
    """

    offloads = True

    def __init__(
        self,
        blocks: Sequence[RepeatedBlock],
        decider: WayDecider,
        *,
        outside: SavedTensors,
        moved: Mapping[Tier, SavedTensors],
        lifetimes: Lifetimes,
    ) -> None:
        self._by_module = {id(block.module): block for block in blocks}
        self._decider = decider
        self._outside = outside
        self._keepers: dict[Tier, SavedTensors] = {Tier.DEVICE: _KEPT, **moved}
        self._running: list[_FirstRun | _OtherRun] = []
        self._second: BlockCall | None = None  # the call that runs again
        self._modules: WatchedModules | None = None
        self._forward = _Forward(())
        self._lifetimes = lifetimes
        self._uses: dict[str, BlockUse] = {}
        self._last: tuple[BlockUse, ...] = ()
        self._closed = False

    @property
    def blocks(self) -> tuple[RepeatedBlock, ...]:
        """The blocks that it knows, in the order of the model."""
        return tuple(self._by_module.values())

    @property
    def _every(self) -> Iterable[SavedTensors]:
        return dict.fromkeys((self._outside, *self._keepers.values()))

    def run_again_under(self, modules: WatchedModules) -> None:
        """Run blocks again as those say who watch the model's modules."""
        self._modules = modules

    @property
    def _watched(self) -> WatchedModules:
        assert self._modules is not None, "the engine has set it"
        return self._modules

    # --- blocks -----------------------------------------------------------------------------------

    def before_block(
        self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Begin a call of a block; return its arguments where they change."""
        if torch.compiler.is_compiling():
            return None  # a compiler's graph has no room for it: what the block saves is kept
        second = self._second
        if second is not None and second.block.module is module:
            self._running.append(_OtherRun(module, second.pack_again))
            # Hooks that came ahead of this one have changed the arguments in the first run already.
            return second.take_given()
        if self._closed or not _is_plain_forward():
            self._running.append(_OtherRun(module, self._pack_outside))
            return None
        block = self._by_module[id(module)]
        if module.training:
            args, kwargs = without_cache(args, kwargs)
        inputs = list(self._forward.new_inputs(_tensors((args, kwargs))))
        way = self._decider.way(block, inputs=sum(inputs), held=self._lifetimes.kept)
        self._expect(self._decider.expected(block, way, inputs=sum(inputs)))
        life = CallLife(block.name, self._lifetimes)
        given = [(tensor, version_of(tensor)) for tensor in _tensors((args, kwargs))]
        stays = way.recomputes or way is BlockWay.KEEP
        call = self._call_of(block, way, args, kwargs, life) if stays else None
        running = _FirstRun(
            block,
            way,
            self._keepers[way.home],
            life,
            call,
            inputs=sum(inputs),
            given=given,
            own=self._forward.own,
            buffers=_buffers_of(members_of(module)) if way.recomputes else (),
            started=self._decider.now(),
        )
        self._running.append(running)
        return args, kwargs

    def _expect(self, nbytes: int) -> None:
        """Let what is on its way out leave, where a block is going to keep so much."""
        self._lifetimes.expect(nbytes)
        if nbytes:
            self.make_room()

    def _call_of(
        self,
        block: RepeatedBlock,
        way: BlockWay,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        life: CallLife,
    ) -> BlockCall:
        if not way.recomputes:
            nothing = BlockCall.arguments(
                block, ((), {}), lambda tensor: (_KEPT, _KEPT.pack(tensor))
            )
            call = BlockCall(block, nothing, life)
            call.keep()
            return call
        try:
            arguments = BlockCall.arguments(
                block, (args, kwargs), lambda tensor: self._save_input(tensor, way)
            )
        except UnknownArgument as unknown:
            self._decider.refuse_recompute(
                block, f"an argument is a {unknown}, which its first run may change"
            )
            return self._call_of(block, BlockWay.KEEP, (), {}, life)
        return BlockCall(block, arguments, life)

    def _save_input(self, tensor: torch.Tensor, way: BlockWay) -> tuple[SavedTensors, object]:
        # What several blocks get, such as a mask, is there anyway: moving it once for each block
        # would not make it go.
        keeper = _KEPT if self._forward.is_shared(tensor) else self._keepers[way.home]
        return keeper, keeper.pack(tensor)

    def after_block(self, module: torch.nn.Module, output: object) -> None:
        """End a call of a block, and calls inside it that an exception left behind."""
        if torch.compiler.is_compiling():
            return
        at = len(self._running) - 1
        while at >= 0 and self._running[at].module is not module:
            at -= 1
        if at < 0:
            return
        running = self._running[at]
        del self._running[at:]
        if not isinstance(running, _FirstRun):
            return
        block, saved = running.block, running.saved_bytes
        if running.call is not None:
            self._end_call(running, running.call, block)
        moves = running.call is None or running.runs_again
        running.life.hold(
            _HELD_AS[running.way.home if moves else Tier.DEVICE],
            running.inputs if running.runs_again else saved,
            saved=saved,
        )
        self._decider.note_call(
            block,
            saved=saved,
            inputs=running.inputs,
            seconds=self._decider.now() - running.started,
        )
        use = self._uses.get(block.name, BlockUse(block.name, running.way.value, 0, 0))
        self._uses[block.name] = BlockUse(
            block.name,
            running.way_gone.value,
            max(use.saved, saved),
            max(use.held, running.life.kept),
        )

    def _end_call(self, running: _FirstRun, call: BlockCall, block: RepeatedBlock) -> None:
        if call.runs_again and any(version_of(tensor) != then for tensor, then in running.given):
            self._decider.refuse_recompute(block, "it changes its inputs in place")
            call.keep()
        now = members_of(running.module)
        if call.runs_again and _has_changed(now, running.buffers):
            self._decider.refuse_recompute(block, "it changes its buffers")
            call.keep()
        if call.runs_again and call.given_buffers:
            self._decider.refuse_recompute(
                block, "a module among its arguments has buffers, which anything may change"
            )
            call.keep()
        if call.runs_again and not block.has_its_parameters(now):
            self._decider.refuse_recompute(
                block,
                "its parameters are not those that it had in initialize (functional_call, or "
                "replaced since)",
            )
            call.keep()
        # Of frozen blocks, or where the model's own hooks keep it.
        if call.saves_nothing:
            call.keep()
        if call.runs_again and not all(map(self._forward.began_with, now.buffers.values())):
            self._decider.refuse_recompute(block, "it ran with other buffers than its own")
            call.keep()
        if call.runs_again and not all(map(self._forward.began_with, call.given().values())):
            self._decider.refuse_recompute(
                block, "a module among its arguments has other parameters than the model's own"
            )
            call.keep()
        if call.runs_again:
            used = call.used(now)
            call.drop_saved(used, self._watched.versions_of(used, call.modules(now)))

    # --- what autograd asks -----------------------------------------------------------------------

    def begin_forward(self, own: Iterable[torch.Tensor]) -> None:
        """Take the model's parameters and buffers as what stays anyway."""
        tensors = list(own)
        self._running.clear()  # of a call that was interrupted
        self._second = None
        self._lifetimes.settle()
        self._lifetimes.expect(0)
        self._decider.end_forward(sum(self._forward.outside.values()))
        self._forward = _Forward(tensors)
        for keeper in self._every:
            keeper.begin_forward(tensors)

    def pack(self, tensor: torch.Tensor) -> object:
        """Return what is saved in place of a tensor.

        Raises:
            AllMadeAgain: a block that runs again has made all that is needed.
            CapacityError: the host or the drives have no room for what has to leave.
            TransferError: what has to leave could not be written.
        """
        if self._running:
            return self._running[-1].pack(tensor)
        self._forward.note_outside(tensor)
        return self._pack_outside(tensor)

    def _pack_outside(self, tensor: torch.Tensor) -> object:
        return _packed_by(self._outside, tensor)

    def make_room(self) -> None:
        """Wait until no more is on its way than there is room for."""
        for keeper in self._every:
            keeper.make_room()

    def begin_backward(self) -> None:
        """Let what was moved begin to come back."""
        self._running.clear()  # of a call that was interrupted
        for keeper in self._every:
            keeper.begin_backward()

    def unpack(self, saved: object) -> torch.Tensor:
        """Return a saved tensor: fetched, or made again.

        Raises:
            RuntimeError: it was changed in place since it was saved, a block did something else
                when it ran again, or the engine was closed.
            CapacityError: there is no room for it; it can be asked for again.
            TransferError: it could not be read back; likewise.
        """
        if isinstance(saved, Placeholder):
            return _KEPT.unpack(self._made(saved))
        if isinstance(saved, _Elsewhere):
            return saved.keeper.unpack(saved.packed)
        return _KEPT.unpack(saved)

    def _made(self, placeholder: Placeholder) -> object:
        call = placeholder.call
        # Also while its first run is under way: a gradient within a block asks for it then.
        if placeholder.packed is not None:
            if call.has_dropped:
                return call.unpack(placeholder, self._watched.saving_again)
            return placeholder.packed
        if self._closed:
            raise RuntimeError(
                "The engine was closed before this backward, which would run blocks again. Call "
                "backward() before close(), or run the model again"
            )
        now = members_of(call.block.module)
        used = call.used(now)
        call.check_values(used, self._watched.versions_of(used, call.modules(now)))
        before, at = self._second, len(self._running)
        self._second, start = call, self._decider.now()
        call.life.make_again()
        try:
            return call.unpack(placeholder, self._watched.saving_again)
        finally:
            self._second = before
            del self._running[at:]
            self._decider.note_run_again(
                call.block, start=start, seconds=self._decider.now() - start
            )

    def end_step(self) -> None:
        """Note that a step has ended, and begin to count anew."""
        self._running.clear()
        self._lifetimes.settle()
        for keeper in self._every:
            keeper.end_step()
        self._decider.end_forward(sum(self._forward.outside.values()))
        self._decider.end_step()
        uses, self._uses = tuple(self._uses.values()), {}
        # The same object as long as nothing changes: telemetry remembers many steps.
        if uses != self._last:
            self._last = uses

    def uses(self) -> tuple[BlockUse, ...]:
        """Return what blocks saved in the step that has ended."""
        return self._last

    def described(self) -> str:
        """Return what was decided, and why."""
        return self._decider.described()

    def close(self) -> None:
        """Run no block again, and hold nothing of calls that were interrupted. Other keepers are
        closed by what has opened them.
        """
        self._closed = True
        self._running.clear()
        self._second = None
        self._forward = _Forward(())


class _Forward:
    """What blocks were given in one forward, and what was saved outside of them.

    `own` are the model's parameters and buffers, which stay anyway.
    """

    def __init__(self, own: Sequence[torch.Tensor]) -> None:
        self._began_with = {id(tensor): weakref.ref(tensor) for tensor in own}
        self.own = addresses_of(own)
        self.outside: dict[int, int] = {}  # bytes by address
        self._inputs: dict[int, weakref.ref[torch.Tensor]] = {}  # by id
        self._shared: set[int] = set()  # of those that several blocks got, by id

    def began_with(self, tensor: torch.Tensor) -> bool:
        """Tell whether a tensor was a parameter or buffer of the model when the forward began."""
        known = self._began_with.get(id(tensor))
        return known is not None and known() is tensor

    def new_inputs(self, tensors: Iterable[torch.Tensor]) -> Iterator[int]:
        """Yield the bytes of each tensor that no block has got before, but the model's own.

        `tensors` are those of one call, which may be given one of them twice.
        """
        for tensor in {id(tensor): tensor for tensor in tensors}.values():
            known = self._inputs.get(id(tensor))
            if known is not None and known() is tensor:
                self._shared.add(id(tensor))
                continue
            self._shared.discard(id(tensor))
            self._inputs[id(tensor)] = weakref.ref(tensor)
            yield from _storage_of(tensor, self.own).values()

    def is_shared(self, tensor: torch.Tensor) -> bool:
        """Tell whether an earlier block got this tensor as well."""
        return id(tensor) in self._shared

    def note_outside(self, tensor: torch.Tensor) -> None:
        """Count what is saved outside of blocks."""
        self.outside.update(_storage_of(tensor, self.own))


def _is_plain_forward() -> bool:
    """Tell whether a forward runs that a backward may follow.

    Not a block that the model's own code recomputes, in a backward; nor transforms of torch.func.
    """
    return (
        torch.is_grad_enabled()
        and torch._C._current_graph_task_id() == -1
        and torch._C._functorch.peek_interpreter_stack() is None
    )


def _storage_of(tensor: torch.Tensor, own: Container[int]) -> dict[int, int]:
    """Return the bytes of a tensor's memory, by its address.

    Nothing for memory at an address in `own`, or where a tensor has none of the usual.
    """
    if type(tensor) is not torch.Tensor or tensor.layout != torch.strided:
        return {}
    storage = tensor.untyped_storage()
    address = storage.data_ptr()
    return {} if address in own else {address: storage.nbytes()}


def _tensors(value: object) -> Iterator[torch.Tensor]:
    """Yield the tensors in arguments, but parameters."""
    if isinstance(value, torch.Tensor):
        if not isinstance(value, torch.nn.Parameter):
            yield value
    elif isinstance(value, tuple | list):
        for part in value:
            yield from _tensors(part)
    elif isinstance(value, Mapping):
        for part in value.values():
            yield from _tensors(part)


class _BufferNow(NamedTuple):
    """A buffer of a block, and its version."""

    name: str
    buffer: torch.Tensor
    version: int

    def is_as(self, before: _BufferNow) -> bool:
        """Tell whether it is what it was: the same tensor, not changed in place."""
        is_same = self.buffer is before.buffer
        return is_same and (self.name, self.version) == (before.name, before.version)


def _buffers_of(members: ModuleMembers) -> list[_BufferNow]:
    return [
        _BufferNow(name, buffer, version_of(buffer)) for name, buffer in members.buffers.items()
    ]


def _has_changed(members: ModuleMembers, before: Sequence[_BufferNow]) -> bool:
    now = _buffers_of(members)
    return len(now) != len(before) or not all(map(_BufferNow.is_as, now, before))
