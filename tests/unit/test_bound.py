"""The bound: the linear program against its closed form, the papers' numbers, and every share on a
grid.
"""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infinity_engine.errors import ConfigError
from infinity_engine.optim.policies import eq1_ratio
from infinity_engine.plan import BytesPerParameter, Rates
from infinity_engine.sim import Resource, update_bound

# Per GPU, as in Deep Optimizer States.
H100 = Rates(
    h2d_bytes_per_s=55e9,
    d2h_bytes_per_s=55e9,
    host_update_params_per_s=2e9,
    device_update_params_per_s=25e9,
)
V100 = Rates(
    h2d_bytes_per_s=12e9,
    d2h_bytes_per_s=12e9,
    host_update_params_per_s=2e9,
    device_update_params_per_s=35e9,
)
RATE = st.integers(1, 10**12).map(float)
RATES = st.builds(
    Rates,
    h2d_bytes_per_s=RATE,
    d2h_bytes_per_s=RATE,
    host_update_params_per_s=RATE,
    device_update_params_per_s=RATE,
    dram_bytes_per_s=st.none() | RATE,
)
BYTES = st.builds(BytesPerParameter, states=st.integers(1, 24), parameter=st.integers(1, 4))
PART = st.fractions(0, 1, max_denominator=20)


# --- by hand and by formula -----------------------------------------------------------------------


def test_on_the_h100_the_cpu_and_the_link_up_end_together() -> None:
    bound = update_bound(H100)

    assert bound.best_share == Fraction(17, 25)
    assert bound.binding == (Resource.HOST, Resource.H2D)
    assert bound.least_ns(10**9) == 160_000_000
    assert bound.speedup == Fraction(25, 8)


def test_on_the_v100_a_quarter_visits() -> None:
    bound = update_bound(V100)

    assert bound.best_share == Fraction(1, 4)
    assert bound.least_ns(10**9) == 375_000_000
    assert bound.speedup == Fraction(4, 3)


@given(RATE, RATE, BYTES, st.fractions(0, Fraction(19, 20), max_denominator=20))
def test_where_the_link_up_binds_the_share_and_the_speedup_have_a_closed_form(
    h2d: float, host: float, per_parameter: BytesPerParameter, resident: Fraction
) -> None:
    rates = Rates(
        h2d_bytes_per_s=h2d,
        d2h_bytes_per_s=24 * h2d,
        host_update_params_per_s=host,
        device_update_params_per_s=1e20,
    )
    up, down = per_parameter.parameter, per_parameter.states
    bytes_per_update = Fraction(h2d) / Fraction(host)

    bound = update_bound(rates, per_parameter=per_parameter, resident=resident)

    if bytes_per_update > up and down > up:
        assert bound.best_share == (1 - resident) * (bytes_per_update - up) / (
            bytes_per_update + down - up
        )
        assert bound.speedup == 1 + (bytes_per_update - up) / down
    elif down > up:
        assert bound.best_share == 0
        assert bound.speedup == 1


def test_all_resident_takes_the_device_and_nothing_else() -> None:
    bound = update_bound(H100, resident=Fraction(1))

    assert bound.best_share == 0
    assert bound.binding == (Resource.DEVICE,)
    assert bound.least_ns(25) == 1


def test_slow_host_memory_binds_once_it_is_measured() -> None:
    bound = update_bound(replace(H100, dram_bytes_per_s=100e9))

    assert bound.binding == (Resource.DRAM,)
    assert bound.best_share == 1  # A visit takes less of it than an update on the host.
    assert bound.least_ns(10**9) == 240_000_000


def test_of_parameters_at_home_nothing_goes_up_and_what_the_device_updated_comes_down() -> None:
    rates = replace(H100, host_update_params_per_s=5e9)
    resident = Fraction(1, 2)

    bound = update_bound(rates, resident=resident, at_home=True)

    assert update_bound(rates, at_home=True).seconds_per_param(Fraction(0)) == Fraction(
        1, 5 * 10**9
    )
    assert bound.seconds_per_param(Fraction(1, 4)) == Fraction(12, 4 * 55 * 10**9) + Fraction(
        3 * 2, 4 * 55 * 10**9
    )


# --- against every share --------------------------------------------------------------------------


@given(RATES, BYTES, PART, PART)
def test_no_share_takes_less_than_the_best(
    rates: Rates, per_parameter: BytesPerParameter, resident: Fraction, part: Fraction
) -> None:
    bound = update_bound(rates, per_parameter=per_parameter, resident=resident)

    assert bound.seconds_per_param(part * (1 - resident)) >= bound.seconds_per_param(
        bound.best_share
    )


@given(RATES, PART)
def test_the_bound_is_the_largest_of_what_each_resource_needs(rates: Rates, part: Fraction) -> None:
    visit, stay = part, 1 - part
    host, device, up, down = (
        Fraction(rate or 1)
        for rate in (
            rates.host_update_params_per_s,
            rates.device_update_params_per_s,
            rates.h2d_bytes_per_s,
            rates.d2h_bytes_per_s,
        )
    )
    needs = [stay / host, (12 * visit + 2 * stay) / up, 12 * visit / down, visit / device]
    if rates.dram_bytes_per_s is not None:
        needs.append((32 * stay + 24 * visit) / Fraction(rates.dram_bytes_per_s))

    assert update_bound(rates).seconds_per_param(part) == max(needs)


# --- Eq. 1 of the paper ---------------------------------------------------------------------------


def test_eq1_gives_half_a_cpu_subgroup_for_each_of_the_device_at_the_papers_own_rates() -> None:
    ratio = eq1_ratio(H100, downscale_params_per_s=15.5e9)

    assert float(ratio) == pytest.approx(0.49, abs=0.005)


def test_eq1_gives_about_two_on_the_v100_where_two_is_printed() -> None:
    assert round(eq1_ratio(V100, downscale_params_per_s=8.7e9)) == 2


def test_the_share_of_eq1_is_near_the_best_on_the_h100() -> None:
    share = 1 / (1 + eq1_ratio(H100, downscale_params_per_s=15.5e9))

    assert float(share) == pytest.approx(float(update_bound(H100).best_share), abs=0.01)


def test_the_stride_that_the_paper_chose_on_the_v100_is_slower_than_no_visits_by_the_same_rates() -> (
    None
):
    bound = update_bound(V100)

    assert bound.seconds_per_param(Fraction(1, 2)) > bound.seconds_per_param(Fraction(0))


def test_eq1_has_no_solution_where_the_link_is_slower_than_the_cpu() -> None:
    with pytest.raises(ConfigError, match=r"Eq\. 1 has no solution"):
        eq1_ratio(replace(H100, h2d_bytes_per_s=3e9))


# --- what is refused ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    [
        "h2d_bytes_per_s",
        "d2h_bytes_per_s",
        "host_update_params_per_s",
        "device_update_params_per_s",
    ],
)
def test_a_rate_that_is_missing_is_named(name: str) -> None:
    rates = replace(H100, **{name: None})  # type: ignore[arg-type]

    with pytest.raises(ConfigError, match=rf"Rates\.{name}"):
        update_bound(rates)
    with pytest.raises(ConfigError, match=rf"Rates\.{name}"):
        eq1_ratio(rates)


@pytest.mark.parametrize("resident", [Fraction(-1, 100), Fraction(101, 100)])
def test_no_more_than_all_can_be_resident(resident: Fraction) -> None:
    with pytest.raises(ConfigError, match="resident"):
        update_bound(H100, resident=resident)


def test_what_is_resident_cannot_visit() -> None:
    with pytest.raises(ConfigError, match="which is what is not resident"):
        update_bound(H100, resident=Fraction(1, 2)).seconds_per_param(Fraction(3, 5))
