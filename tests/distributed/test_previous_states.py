"""Ranks that take over the states of an optimizer: each has its shard of them, and all have the
same. Gloo.
"""

from __future__ import annotations

from functools import partial

import pytest

from support import rank_training as programs
from support.ranks import launched


@pytest.mark.parametrize("stage", ["optimizer", "parameters"])
def test_each_rank_takes_over_its_part_of_the_states(stage: str) -> None:
    assert launched(2, programs.takes_over, stage) == [[], []]


def test_ranks_whose_optimizers_have_other_states_are_told() -> None:
    for told in launched(2, partial(programs.takes_over, differs=True), "parameters"):
        assert "agreement on the optimizer's states: the ranks differ in exp_avg of" in told
