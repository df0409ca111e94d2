"""Ranks that choose ways together choose from the values of the rank that is worst off."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

from infinity_engine.activation.agreeing import ChoiceBasis, ChosenAlone, ChosenTogether
from infinity_engine.placement.activations import ActivationRates, ActivationRoom, BlockCost


def basis_of(
    *,
    saved: int = 10,
    seconds: float = 1.0,
    again: float | None = 1.0,
    device: int = 100,
    to_drives: float | None = 5.0,
) -> ChoiceBasis:
    cost = BlockCost(
        saved=saved, inputs=1, forward_s=seconds, backward_s=2 * seconds, recompute_s=again
    )
    return ChoiceBasis(
        costs=(cost,),
        room=ActivationRoom(device=device, drives=50),
        rates=ActivationRates(to_drives=to_drives, from_drives=4.0),
    )


def together(other: ChoiceBasis) -> ChosenTogether:
    """Return the agreement of a rank with another one, which has these values."""

    def tell(_what: str, value: object) -> list[Any]:
        return [json.loads(json.dumps(told)) for told in (value, asdict(other))]

    return ChosenTogether(tell)


def test_one_rank_chooses_from_what_it_has_measured() -> None:
    own = basis_of()
    assert ChosenAlone().basis(own) is own
    assert ChosenAlone().any_rank("what", True, False) == (True, False)


def test_ranks_choose_from_most_bytes_and_least_room() -> None:
    found = together(basis_of(saved=30, device=40)).basis(basis_of(saved=10, device=100))
    assert found == basis_of(saved=30, device=40)


def test_ranks_choose_from_most_seconds_and_least_rates() -> None:
    found = together(basis_of(seconds=3.0, to_drives=2.0)).basis(basis_of())
    assert found == basis_of(seconds=3.0, to_drives=2.0)


def test_a_block_that_one_rank_cannot_run_again_runs_again_on_none() -> None:
    assert together(basis_of(again=None)).basis(basis_of()).costs[0].recompute_s is None


def test_a_drive_that_one_rank_could_not_measure_is_used_by_none() -> None:
    assert together(basis_of(to_drives=None)).basis(basis_of()).rates.to_drives is None


def test_what_one_rank_has_seen_holds_for_all() -> None:
    agreement = ChosenTogether(lambda _, here: [here, [False, True, False]])
    assert agreement.any_rank("what", True, False, False) == (True, True, False)
