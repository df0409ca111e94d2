"""What the others are told when a rank does something else, raises, dies or is stuck: who it was,
in bounded time.
"""

from __future__ import annotations

import re
import signal
from functools import cache
from random import Random

import pytest

from infinity_engine.errors import CollectiveError
from infinity_engine.partition import Collectives
from support import rank_programs as programs
from support.ranks import Rank, launch

TIMEOUT_S = 2.0


@cache
def disagreements() -> list[dict[str, CollectiveError]]:
    """Return what each of three ranks raised in each of several cases, of one launch."""
    ranks = launch(3, programs.disagreements)
    for rank in ranks:
        assert rank.error is None, rank.trace
    return [rank.value for rank in ranks]


def reasons(case: str) -> list[str]:
    """Return what the three ranks were told, which is about themselves but for that the same."""
    errors = [found[case] for found in disagreements()]
    assert [(error.group, error.rank) for error in errors] == [(case, rank) for rank in range(3)]
    return [re.sub(r", digest \w+", "", error.reason) for error in errors]


def test_ranks_that_go_another_way_are_named_with_what_they_do() -> None:
    [told] = set(reasons("other_order"))

    assert told == (
        "the ranks have started different collectives; ranks 0, 2: gather of layer c (collective 3); "
        "rank 1: gather of layer d (collective 3)"
    )


@pytest.mark.parametrize(
    ("case", "apart"),
    [("other_size", "ranks 0, 1:|rank 2:"), ("other_buffer", "rank 0:|ranks 1, 2:")],
)
def test_ranks_that_would_send_other_sizes_are_told_apart_before_they_do(
    case: str, apart: str
) -> None:
    [told] = set(reasons(case))

    assert told.count("gather of layer a (collective 1)") == 2
    assert all(part in told for part in apart.split("|"))


def test_ranks_that_have_other_values_are_told_them() -> None:
    [told] = set(reasons("other_value"))

    assert "ranks 0, 1: agreement on the model: 10 layers" in told
    assert "rank 2: agreement on the model: 11 layers" in told


def test_nothing_works_after_a_failure_and_the_first_one_is_told_again() -> None:
    told = reasons("one_after_another")

    assert all("agreement on who: 1" in each for each in told)


def test_a_rank_that_has_ended_is_named_by_those_who_go_on() -> None:
    told = [found.get("one_more") for found in disagreements()]

    assert told[0] is None
    for error in told[1:]:
        assert error is not None
        assert error.op == "gather of layer b"
        assert "rank 0 has left after 1 collectives" in error.reason


@pytest.mark.parametrize(("killed", "size"), [(0, 2), (1, 3)])
def test_those_who_wait_for_a_killed_rank_are_told_in_time(killed: int, size: int) -> None:
    ranks = launch(size, programs.dies, killed, 600.0)

    assert ranks.pop(killed).exitcode == -signal.SIGKILL
    for error in told_in_time(ranks):
        assert error.op == "gather of layer c"
        assert re.search(
            rf"rank {killed} \(process \d+ of this machine\) has ended without a report",
            error.reason,
        )


@pytest.mark.parametrize("count", [3, pytest.param(30, marks=pytest.mark.slow)])
def test_whenever_a_rank_is_killed_the_others_are_told_in_time(count: int) -> None:
    random = Random(count)
    for _ in range(count):
        killed = random.randrange(3)
        ranks = launch(3, programs.works_until, killed, random.uniform(0.0, 0.2))

        assert ranks.pop(killed).exitcode == -signal.SIGKILL
        for error in told_in_time(ranks):
            assert re.search(
                rf"rank {killed} \(process \d+ of this machine\) has ended", error.reason
            )


def test_those_who_wait_for_a_rank_that_raised_are_told_what() -> None:
    ranks = launch(3, programs.raises, 2, 600.0)

    assert ranks.pop(2).value is None
    for error in told_in_time(ranks):
        assert "rank 2 has left with ZeroDivisionError: division by zero" in error.reason


def test_those_who_wait_for_a_stuck_rank_are_told_after_the_timeout() -> None:
    ranks = launch(3, programs.is_stuck, 1, TIMEOUT_S)

    ranks.pop(1)
    for error in told_in_time(ranks):
        assert (
            "rank 1 has not answered for 2 s: it has died, or its program is busy elsewhere"
            in error.reason
        )


def test_an_error_of_gloo_is_told_by_its_first_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    reset = (
        "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer "
        "[10.0.0.2]:51123. This could be because a remote rank exited early. Check the logs of the "
        "other ranks.\nException raised from readable at /pytorch/third_party/gloo/pair.cc:12"
    )

    def fail(_: object) -> None:
        raise RuntimeError(reset)

    with Collectives.alone() as ranks:
        monkeypatch.setattr("infinity_engine.partition.collectives._Done.wait", fail)
        with pytest.raises(CollectiveError) as told:
            ranks.agree("the model", "10 layers")

    assert told.value.reason == "Connection closed by peer [10.0.0.2]:51123"
    assert str(told.value.__cause__) == reset  # which has the rest, for who looks for it


def told_in_time(ranks: list[Rank]) -> list[CollectiveError]:
    """Return the errors of ranks that were told, and ended, before the launcher's patience did:
    their own is longer.
    """
    errors = []
    for rank in ranks:
        assert rank.error is None, rank.trace
        assert rank.exitcode == 0
        assert isinstance(rank.value, CollectiveError)
        assert not re.search(r"\.(cc|cpp|h):\d|This could be|\n", rank.value.reason)
        errors.append(rank.value)
    return errors
