"""Signals are held back in a body, act at its end, Ctrl-C at a safe point too, and go where they
went before it.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from types import FrameType

import pytest
import torch

from infinity_engine import signals as signals_module
from infinity_engine.signals import HeldEnd, HeldSignals
from support.interrupts import interruptions


class Told(BaseException):
    pass


class Handler:
    """Counts what comes, and raises where it is told to."""

    def __init__(self, *, raises: bool = False) -> None:
        self.raises = raises
        self.came: list[tuple[int, bool]] = []  # and whether it has a frame

    def __call__(self, number: int, frame: FrameType | None) -> None:
        self.came.append((number, frame is not None))
        if self.raises:
            raise Told


@pytest.fixture
def handlers() -> Iterator[dict[int, Handler]]:
    made = {signal.SIGINT: Handler(raises=True), signal.SIGTERM: Handler()}
    before = {number: signal.signal(number, handler) for number, handler in made.items()}
    yield {int(number): handler for number, handler in made.items()}
    for number, handler in before.items():
        signal.signal(number, handler)


def in_place(handlers: dict[int, Handler]) -> bool:
    return all(signal.getsignal(number) is handler for number, handler in handlers.items())


def in_a_hold(body: Callable[[], object]) -> None:
    HeldSignals().holding(body)()


def test_what_comes_within_a_hold_acts_when_it_has_ended(handlers: dict[int, Handler]) -> None:
    seen: list[list[tuple[int, bool]]] = []

    def body() -> None:
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGINT)
        seen.extend(list(each.came) for each in handlers.values())

    with pytest.raises(Told):
        in_a_hold(body)

    assert seen == [[], []]
    assert handlers[signal.SIGTERM].came == [(signal.SIGTERM, True)]
    assert handlers[signal.SIGINT].came == [(signal.SIGINT, True)]
    assert in_place(handlers)


def test_what_came_behind_one_whose_handler_raises_acts_as_well(
    handlers: dict[int, Handler],
) -> None:
    def body() -> None:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGTERM)

    with pytest.raises(Told):
        in_a_hold(body)

    assert handlers[signal.SIGTERM].came == [(signal.SIGTERM, True)]


def test_what_comes_several_times_acts_once(handlers: dict[int, Handler]) -> None:
    with HeldSignals():
        for _ in range(5):
            signal.raise_signal(signal.SIGTERM)
    assert handlers[signal.SIGTERM].came == [(signal.SIGTERM, True)]


@pytest.mark.parametrize("number", signals_module._SIGNALS)
def test_whatever_may_raise_is_held(number: signal.Signals) -> None:
    handler = Handler(raises=True)
    before = signal.signal(number, handler)
    try:
        with pytest.raises(Told):
            in_a_hold(lambda: signal.raise_signal(number))
    finally:
        signal.signal(number, before)
    assert len(handler.came) == 1


def test_a_hold_within_another_ends_with_it(handlers: dict[int, Handler]) -> None:
    held = HeldSignals()
    with held, HeldSignals():
        with held:
            signal.raise_signal(signal.SIGTERM)
        assert handlers[signal.SIGTERM].came == []
    assert handlers[signal.SIGTERM].came == [(signal.SIGTERM, True)]
    assert in_place(handlers)


@pytest.mark.parametrize("moment", ["_replace", "_restore"])
def test_what_a_handler_calls_as_a_hold_begins_or_ends_holds_as_well(
    handlers: dict[int, Handler], monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    signals = HeldSignals()
    came: list[int] = []

    @signals.holding
    def of_the_handler() -> None:
        signal.raise_signal(signal.SIGTERM)
        came.append(len(handlers[signal.SIGTERM].came))

    act = getattr(HeldSignals, moment)

    def interrupted(held: HeldSignals, *args: object) -> None:
        monkeypatch.setattr(HeldSignals, moment, act)
        if moment == "_restore":
            act(held, *args)
        of_the_handler()  # what a handler calls that comes right then
        if moment == "_replace":
            act(held, *args)

    monkeypatch.setattr(HeldSignals, moment, interrupted)
    with signals:
        pass

    assert came == [0]
    assert len(handlers[signal.SIGTERM].came) == 1
    assert in_place(handlers)


def test_a_function_that_holds_is_only_called_within_a_hold(
    handlers: dict[int, Handler], monkeypatch: pytest.MonkeyPatch
) -> None:
    entered: list[HeldSignals] = []
    enter = HeldSignals.__enter__

    def noted(held: HeldSignals) -> None:
        entered.append(held)
        enter(held)

    monkeypatch.setattr(HeldSignals, "__enter__", noted)
    signals = HeldSignals()

    @signals.holding
    def inner() -> None:
        signal.raise_signal(signal.SIGTERM)

    @signals.holding
    def outer() -> None:
        inner()
        assert not handlers[signal.SIGTERM].came

    outer()
    assert entered == [signals]
    assert handlers[signal.SIGTERM].came == [(signal.SIGTERM, True)]


def test_at_a_safe_point_ctrl_c_acts_within_the_hold() -> None:
    held = HeldSignals()
    with held:
        held.safe_point()
        signal.raise_signal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            held.safe_point()
        held.safe_point()


def test_handlers_of_others_which_may_call_the_engine_act_when_the_hold_has_ended(
    handlers: dict[int, Handler],
) -> None:
    held = HeldSignals()
    with held:
        signal.raise_signal(signal.SIGTERM)
        held.safe_point()
        assert handlers[signal.SIGTERM].came == []
    assert len(handlers[signal.SIGTERM].came) == 1


def test_a_handler_is_not_held_itself() -> None:
    came: list[str] = []

    def handler(_number: int, _frame: FrameType | None) -> None:
        try:
            signal.raise_signal(signal.SIGINT)
        except KeyboardInterrupt:
            came.append("Ctrl-C within the handler")

    before = signal.signal(signal.SIGUSR1, handler)
    try:
        in_a_hold(lambda: signal.raise_signal(signal.SIGUSR1))
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert came == ["Ctrl-C within the handler"]


def test_what_the_body_raises_comes_with_what_the_handler_raises(
    handlers: dict[int, Handler],
) -> None:
    def body() -> None:
        signal.raise_signal(signal.SIGINT)
        raise ValueError("of the body")

    with pytest.raises(Told) as told:
        in_a_hold(body)
    assert isinstance(told.value.__context__, ValueError)
    assert in_place(handlers)


def test_while_somebody_watches_signals_act_at_once_but_in_holds(
    handlers: dict[int, Handler],
) -> None:
    held = HeldSignals()
    end = HeldEnd(held)
    with end as stack, end:
        with held:
            held.watch(stack)
        with pytest.raises(Told):
            signal.raise_signal(signal.SIGINT)
        with held:
            signal.raise_signal(signal.SIGTERM)
            assert handlers[signal.SIGTERM].came == []
        assert len(handlers[signal.SIGTERM].came) == 1
        assert not in_place(handlers)
    assert in_place(handlers)


def test_a_handler_that_somebody_sets_within_a_hold_stays(handlers: dict[int, Handler]) -> None:
    newer = Handler()
    with HeldSignals():
        signal.signal(signal.SIGINT, newer)
    assert signal.getsignal(signal.SIGINT) is newer


@pytest.mark.parametrize("ignored", [signal.SIG_IGN, signal.SIG_DFL])
def test_what_python_does_not_handle_is_left_alone(
    ignored: signal.Handlers, handlers: dict[int, Handler]
) -> None:
    signal.signal(signal.SIGTERM, ignored)
    with HeldSignals():
        assert signal.getsignal(signal.SIGTERM) is ignored
    assert not handlers[signal.SIGTERM].came


def test_another_thread_holds_nothing(handlers: dict[int, Handler]) -> None:
    held, inside, leave = HeldSignals(), threading.Event(), threading.Event()

    def hold() -> None:
        with held, ExitStack() as stack:
            held.watch(stack)
            held.safe_point()
            inside.set()
            leave.wait(60)

    thread = threading.Thread(target=hold)
    thread.start()
    assert inside.wait(60)
    with pytest.raises(Told):
        signal.raise_signal(signal.SIGINT)
    leave.set()
    thread.join()
    assert in_place(handlers)


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_child_that_another_thread_forks_in_a_hold_is_not_held() -> None:
    left: list[int] = []

    def fork() -> None:
        child = os.fork()
        if not child:
            signal.raise_signal(signal.SIGUSR1)  # whose handler ends it
            os._exit(1)
        left.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))

    before = signal.signal(signal.SIGUSR1, lambda *_: os._exit(42))
    try:
        with HeldSignals():
            thread = threading.Thread(target=fork)
            thread.start()
            thread.join()
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert left == [42]


def test_what_a_compiler_traces_has_no_holds() -> None:
    held = HeldSignals().holding(lambda x: x + 1)

    @torch.compile(backend="eager", fullgraph=True)
    def compiled(x: torch.Tensor) -> torch.Tensor:
        return torch.as_tensor(held(x))

    assert compiled(torch.zeros(1)).item() == 1
    torch._dynamo.reset()


def test_wherever_it_is_interrupted_itself_no_signal_is_lost_and_handlers_go_back() -> None:
    held = HeldSignals()
    closed: list[str] = []

    def use() -> None:
        end = HeldEnd(held)
        with end as stack, end:
            with held:
                held.watch(stack)
                stack.callback(lambda: closed.append("a context"))
            with held, held:
                pass

    for nth in interruptions(lambda: use, signals_module):
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler, nth
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            held.holding(lambda: signal.raise_signal(signal.SIGINT))()
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler, nth
    assert closed
