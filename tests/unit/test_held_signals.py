"""Signals are held back in a body, act at its end or at a safe point, and go where they went before it."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from types import FrameType

import pytest

from infinity_engine.engine import signals as signals_module
from infinity_engine.engine.signals import HeldSignals
from support.interrupts import interruptions


class Told(BaseException):
    pass


class Handler:
    """Counts what comes, and raises where it is told to."""

    def __init__(self, *, raises: bool) -> None:
        self.raises = raises
        self.came: list[tuple[int, bool]] = []  # and whether it has a frame

    def __call__(self, number: int, frame: FrameType | None) -> None:
        self.came.append((number, frame is not None))
        if self.raises:
            raise Told


@pytest.fixture
def handlers() -> Iterator[dict[int, Handler]]:
    made = {signal.SIGINT: Handler(raises=True), signal.SIGTERM: Handler(raises=False)}
    before = {number: signal.signal(number, handler) for number, handler in made.items()}
    yield {int(number): handler for number, handler in made.items()}
    for number, handler in before.items():
        signal.signal(number, handler)


def in_place(handlers: dict[int, Handler]) -> bool:
    return all(signal.getsignal(number) is handler for number, handler in handlers.items())


def test_what_comes_within_a_hold_acts_when_it_has_ended(handlers: dict[int, Handler]) -> None:
    seen: list[list[tuple[int, bool]]] = []

    def body() -> None:
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGINT)
        seen.extend(list(each.came) for each in handlers.values())

    with pytest.raises(Told):
        HeldSignals().holding(body)()

    assert seen == [[], []]
    assert handlers[signal.SIGTERM].came == [(signal.SIGTERM, True)]
    assert handlers[signal.SIGINT].came == [(signal.SIGINT, True)]
    assert in_place(handlers)


def test_a_hold_within_another_ends_with_it(handlers: dict[int, Handler]) -> None:
    held = HeldSignals()
    with held, HeldSignals():
        with held:
            signal.raise_signal(signal.SIGTERM)
        assert handlers[signal.SIGTERM].came == []
    assert handlers[signal.SIGTERM].came == [(signal.SIGTERM, True)]
    assert in_place(handlers)


def test_at_a_safe_point_it_acts_within_the_hold(handlers: dict[int, Handler]) -> None:
    held = HeldSignals()
    with held:
        held.let_through()
        signal.raise_signal(signal.SIGINT)
        with pytest.raises(Told):
            held.let_through()
        held.let_through()
    assert len(handlers[signal.SIGINT].came) == 1


def test_what_the_body_raises_comes_with_what_the_handler_raises(handlers: dict[int, Handler]) -> None:
    def body() -> None:
        signal.raise_signal(signal.SIGINT)
        raise ValueError("of the body")

    with pytest.raises(Told) as told:
        HeldSignals().holding(body)()
    assert isinstance(told.value.__context__, ValueError)
    assert in_place(handlers)


def test_while_somebody_watches_signals_act_at_once_but_in_holds(handlers: dict[int, Handler]) -> None:
    held = HeldSignals()
    with held.watching():
        with pytest.raises(Told):
            signal.raise_signal(signal.SIGINT)
        with held:
            signal.raise_signal(signal.SIGTERM)
            assert handlers[signal.SIGTERM].came == []
        assert len(handlers[signal.SIGTERM].came) == 1
        assert not in_place(handlers)
    assert in_place(handlers)


def test_a_handler_that_somebody_sets_within_a_hold_stays(handlers: dict[int, Handler]) -> None:
    newer = Handler(raises=False)
    with HeldSignals():
        signal.signal(signal.SIGINT, newer)
    assert signal.getsignal(signal.SIGINT) is newer


@pytest.mark.parametrize("ignored", [signal.SIG_IGN, signal.SIG_DFL])
def test_what_python_does_not_handle_is_left_alone(ignored: signal.Handlers, handlers: dict[int, Handler]) -> None:
    signal.signal(signal.SIGTERM, ignored)
    with HeldSignals():
        assert signal.getsignal(signal.SIGTERM) is ignored
    assert not handlers[signal.SIGTERM].came


def test_another_thread_holds_nothing(handlers: dict[int, Handler]) -> None:
    held, inside, leave = HeldSignals(), threading.Event(), threading.Event()

    def hold() -> None:
        with held, held.watching():
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


def test_wherever_it_is_interrupted_itself_no_signal_is_lost_and_none_is_held_for_ever() -> None:
    before = signal.getsignal(signal.SIGINT)
    held = HeldSignals()

    def use() -> None:
        with held.watching(), held, held:
            pass

    for _ in interruptions(lambda: use, signals_module):
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt), held:
            signal.raise_signal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    with held:
        pass
    assert before is signal.default_int_handler
