"""`strategy="auto"` with rates on several ranks: the planner's choice, the same on all, and no
other bits. Gloo.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from infinity_engine.plan import Rates
from support import rank_training as programs
from support.rank_training import RATES, Run
from support.ranks import launched

pytestmark = pytest.mark.usefixtures("deterministic")

FAST_HOST = replace(RATES, host_update_params_per_s=2e10, device_update_params_per_s=2e8)
RUN = Run(
    emulated=True,
    settings={
        # less than all states take beside whole parameters
        "budget": {"host": "64MiB", "device": "320KiB"},
        "storage": {"small_bytes": 0},
        "ranks": {"bucket_bytes": 8192},
        "precision": "bf16",
    },
)


def planned(*rates: Rates | None) -> list[dict[str, Any]]:
    return launched(len(rates), programs.plan_together, RUN, rates)


@pytest.mark.parametrize("rates", [RATES, FAST_HOST], ids=["fast device", "fast host"])
def test_all_ranks_carry_out_the_planners_choice(rates: Rates) -> None:
    first, second = planned(rates, rates)

    assert first["as planned"]
    assert second["as planned"]


def test_the_choice_changes_no_bit() -> None:
    by_what_fits, _ = planned(None, None)
    chosen, _ = planned(RATES, RATES)

    assert by_what_fits["homes"] is None
    assert chosen["homes"] is not None
    assert chosen["losses"] == by_what_fits["losses"]
    states = by_what_fits["states"]
    assert [
        name for name, each in chosen["states"].items() if not torch.equal(each, states[name])
    ] == []


def test_where_one_rank_lacks_rates_what_fits_decides_on_all() -> None:
    for rank in planned(RATES, Rates(h2d_bytes_per_s=1e9)):
        assert rank["homes"] is None
