"""More of any resource never makes a planned step longer, as far as a search can promise that."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from infinity_engine.advice.means import with_compute, with_drives, with_links, with_updates
from infinity_engine.errors import CapacityError
from infinity_engine.placement.training import Means
from infinity_engine.sim.planner import decide
from support.plannings import random_case

_MORE = 1.2
_SEARCH = 1.01  # times the shorter step: the search is no proof (decision 0034)


def with_more(means: Means) -> Iterator[tuple[str, Means]]:
    """Yield the means with a fifth more of each resource."""
    budget = means.budget
    yield "host", replace(means, budget=replace(budget, host=int(_MORE * budget.host)))
    if not means.unified:
        device = int(_MORE * budget.device)
        yield "device", replace(means, budget=replace(budget, device=device))
        yield "links", with_links(means, _MORE)
    if budget.nvme:
        drives = {name: int(_MORE * limit) for name, limit in budget.nvme.items()}
        yield "nvme", replace(means, budget=replace(budget, nvme=drives))
        yield "drives", with_drives(means, _MORE)
    yield "updates", with_updates(means, _MORE)
    yield "compute", with_compute(means, _MORE)


def longer_steps(seed: int) -> list[tuple[int, str, float]]:
    """Return which resources make a random machine's step longer, and how many times as long."""
    training, means = random_case(seed)
    try:
        before_ns = decide(training, means).best.timeline.ns
    except CapacityError:
        return []
    times = [
        (seed, name, decide(training, more).best.timeline.ns / max(before_ns, 1))
        for name, more in with_more(means)
    ]
    return [found for found in times if found[2] > _SEARCH]


@pytest.mark.parametrize("seed", [1, 2, 4, 5])
def test_more_of_a_resource_makes_no_step_longer(seed: int) -> None:
    assert longer_steps(seed) == []


@pytest.mark.parametrize(
    ("seed", "name"), [(130, "device"), (152, "links"), (156, "updates"), (199, "compute")]
)
def test_more_of_a_resource_makes_no_rugged_step_longer(seed: int, name: str) -> None:
    """A search that ends where its work does finds steps up to 1.1% longer there."""
    training, means = random_case(seed)
    before, after = (
        decide(training, given).best.timeline.ns for given in (means, dict(with_more(means))[name])
    )

    assert after <= _SEARCH * before


def test_a_kind_of_plan_that_is_long_with_large_subgroups_is_tried_with_small_ones() -> None:
    """At an edge, large subgroups have one staging set and three buffers: 1.6 times the estimate.

    With small ones the search walks along the edge, where estimates have to know what fits.
    """
    training, means = random_case(114)
    before, after = (
        decide(training, given).best.timeline.ns for given in (means, with_updates(means, _MORE))
    )

    assert after <= _SEARCH * before


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("first", range(0, 200, 20))
def test_more_of_a_resource_makes_no_step_longer_at_a_thousand_points(first: int) -> None:
    """On 200 machines, each with up to seven resources: more than 1,000 points."""
    assert [found for seed in range(first, first + 20) for found in longer_steps(seed)] == []
