"""Updates of the host on a thread of their own: their order, their ends, and the ends of processes."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest

from infinity_engine.update.host_thread import HostThread, Times


@pytest.fixture
def thread() -> Iterator[HostThread]:
    made = HostThread(time.perf_counter_ns)
    yield made
    made.close()


def test_updates_are_made_one_after_the_other_and_noted_where_their_end_is_seen(
    thread: HostThread,
) -> None:
    gate = threading.Event()
    made: list[str] = []
    noted: list[tuple[str, bool, bool]] = []

    def note(name: str, times: Times) -> None:
        here = threading.current_thread() is threading.main_thread()
        noted.append((name, here, times.start_ns <= times.end_ns))

    updates = [
        thread.begin(
            lambda name=name: made.append(name) if gate.wait(60) else None,  # type: ignore[misc]
            lambda times, name=name: note(name, times),  # type: ignore[misc]
        )
        for name in ("first", "second")
    ]
    assert not updates[0].done()
    assert (made, noted) == ([], [])
    gate.set()
    updates[1].wait()
    assert updates[0].done()
    updates[0].wait()
    updates[1].wait()

    assert made == ["first", "second"]
    assert noted == [("second", True, True), ("first", True, True)]


def test_an_update_that_fails_has_ended_raises_when_it_is_waited_for_and_is_not_noted(
    thread: HostThread,
) -> None:
    failed = thread.begin(lambda: 1 // 0, lambda _times: pytest.fail("it is not noted"))
    with pytest.raises(ZeroDivisionError):
        failed.wait()
    assert failed.done()
    with pytest.raises(ZeroDivisionError):
        failed.wait()


def test_closing_waits_for_what_is_under_way_and_begins_nothing_more() -> None:
    thread = HostThread(time.perf_counter_ns)
    begun, gate, made = threading.Event(), threading.Event(), []

    def long() -> None:
        begun.set()
        gate.wait(60)
        made.append("long")

    thread.begin(long, lambda _times: None)
    thread.begin(lambda: made.append("queued"), lambda _times: None)
    begun.wait(60)
    threading.Timer(0.05, gate.set).start()
    thread.close()

    assert made == ["long"]


def printed_by(program: str) -> str:
    preface = (
        "import os, threading, time\n"
        "from infinity_engine.update.host_thread import HostThread\n"
        "thread = HostThread(time.perf_counter_ns)\n"
        "made = []\n"
        "begin = lambda name: thread.begin(lambda: made.append(name), lambda _times: None)\n"
    )
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", preface + program],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_thread_of_the_program_can_train_on_after_the_main_thread_has_ended() -> None:
    program = (
        "begin('before').wait()\n"
        "def goes_on():\n"
        "    threading.main_thread().join()\n"
        "    begin('after').wait()\n"
        "    print(made)\n"
        "threading.Thread(target=goes_on).start()\n"
    )
    assert printed_by(program) == "['before', 'after']\n"


def test_a_forked_process_is_refused_instead_of_waiting_for_ever() -> None:
    program = (
        "gate = threading.Event()\n"
        "under_way = thread.begin(gate.wait, lambda _times: None)\n"
        "child = os.fork()\n"
        "if child == 0:\n"
        "    for wait in (under_way.wait, lambda: begin('there')):\n"
        "        try:\n"
        "            wait()\n"
        "        except RuntimeError as told:\n"
        "            print('forked from it' in str(told), flush=True)\n"
        "    os._exit(0)\n"
        "os.waitpid(child, 0)\n"
        "gate.set()\n"
        "under_way.wait()\n"
        "print('parent', flush=True)\n"
    )
    assert printed_by(program) == "True\nTrue\nparent\n"
