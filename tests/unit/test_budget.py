from __future__ import annotations

import copy
import dataclasses
import json
import pickle
from decimal import Decimal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from infinity_engine.errors import CapacityError, ConfigError
from infinity_engine.plan import Budget, Capacity, Percent, ResolvedBudget
from infinity_engine.units import GiB

PATIENT = settings(deadline=None)
PERCENTS = st.decimals("0.001", 100, places=3).map(lambda value: f"{value}%")
SIZES = st.one_of(st.none(), st.integers(0, 2**60), PERCENTS, st.just("12GiB"))
DRIVES = st.dictionaries(
    st.text("abc", min_size=1, max_size=5).map("/mnt/{}".format), SIZES, max_size=4
)
BUDGETS = st.builds(Budget, device=SIZES, host=SIZES, nvme=DRIVES)

MACHINE = Capacity(device=20 * GiB, host=60 * GiB, nvme={"/mnt/a": 1000, "/mnt/b": 2000})


# --- percent ---


@pytest.mark.parametrize("value", ["0", "-1", "100.001", "NaN", "Infinity"])
def test_a_percentage_is_more_than_0_and_at_most_100(value: str) -> None:
    with pytest.raises(ConfigError, match=r"more than 0% and at most 100%"):
        Percent(Decimal(value))


def test_a_percentage_of_bytes_is_rounded_down() -> None:
    assert Percent(Decimal("39.9")).of(10) == 3


def test_a_hundred_percent_is_all_of_it_however_much_it_is() -> None:
    assert Percent(Decimal(100)).of(2**90 + 1) == 2**90 + 1


@pytest.mark.parametrize(
    ("value", "text"), [("100", "100%"), ("80.50", "80.5%"), ("0.001", "0.001%")]
)
def test_a_percentage_is_shown_without_needless_digits(value: str, text: str) -> None:
    assert str(Percent(Decimal(value))) == text


# --- budget ---


def test_a_budget_takes_bytes_text_and_percentages() -> None:
    budget = Budget(device="20GiB", host="80%", nvme={"/mnt/a": 400, "/mnt/b": "1.5 GB"})

    assert (budget.device, budget.host) == (20 * GiB, Percent(Decimal(80)))
    assert budget.nvme == {"/mnt/a": 400, "/mnt/b": 1_500_000_000}


def test_a_budget_that_says_nothing_leaves_every_tier_to_the_machine_and_uses_no_drive() -> None:
    budget = Budget()

    assert (budget.device, budget.host, dict(budget.nvme)) == (None, None, {})


def test_equal_budgets_are_equal_however_they_were_written() -> None:
    one = Budget(host="80%", nvme={"/mnt/a/": "1 GiB"})
    other = Budget(host="80.0 %", nvme={"/mnt/a": GiB})

    assert one == other
    assert hash(one) == hash(other)


def test_a_budget_cannot_be_changed() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        Budget(host=1).host = 2  # type: ignore[misc]


@PATIENT
@given(BUDGETS)
def test_a_budget_survives_pickling_copying_and_replacing_nothing(budget: Budget) -> None:
    assert (
        pickle.loads(pickle.dumps(budget))
        == copy.deepcopy(budget)
        == dataclasses.replace(budget)
        == budget
    )


@PATIENT
@given(BUDGETS)
def test_a_budget_survives_the_way_through_json_with_its_drives_in_order(budget: Budget) -> None:
    again = Budget.from_mapping(json.loads(json.dumps(budget.to_mapping())))

    assert again == budget
    assert list(again.nvme) == list(budget.nvme)


@pytest.mark.parametrize("size", ["0%", "100.1%", "-5%", "80 percent%", "%", "nan%", "1e1%", "5%%"])
def test_a_percentage_out_of_range_or_garbled_is_refused(size: str) -> None:
    with pytest.raises(
        ConfigError, match=r"^Budget\.host: expected more than 0% and at most 100%, such as '80%'"
    ):
        Budget(host=size)


@pytest.mark.parametrize("size", [True, 0.8, [1], b"1 GiB"])
def test_a_size_of_a_wrong_type_is_refused_with_all_the_right_ones(size: object) -> None:
    with pytest.raises(
        ConfigError,
        match=r"^Budget\.device: expected bytes, text such as '12 GiB' or '80%', or None",
    ):
        Budget(device=size)  # type: ignore[arg-type]


def test_a_wrong_size_of_a_drive_is_refused_by_the_drives_name() -> None:
    with pytest.raises(
        ConfigError, match=r"^Budget\.nvme\['/mnt/a'\]: .*write '12 GiB' or '12 GB'"
    ):
        Budget(nvme={"/mnt/a": "12G"})


def test_a_directory_named_twice_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"^Budget\.nvme: expected each directory once"):
        Budget(nvme={"/mnt/a": 1, "/mnt/a/": 1})


@pytest.mark.parametrize("nvme", [None, "/mnt/a", ["/mnt/a"], 5])
def test_drives_that_are_no_mapping_are_refused(nvme: object) -> None:
    with pytest.raises(
        ConfigError, match=r"^Budget\.nvme: expected a mapping from directories to sizes"
    ):
        Budget(nvme=nvme)  # type: ignore[arg-type]


def test_a_budget_from_a_mapping_has_defaults_for_what_is_left_out() -> None:
    assert Budget.from_mapping({"host": "1 GiB"}) == Budget(host=GiB)


@pytest.mark.parametrize(
    ("mapping", "place"),
    [
        ({"hots": 1}, r"budget\.hots: expected one of device, host, nvme \(nearest: host\)"),
        ({"host": "12G"}, r"budget\.host: "),
        ({"nvme": {"/mnt/a": -1}}, r"budget\.nvme\['/mnt/a'\]: "),
        ({"nvme": 5}, r"budget\.nvme: "),
        ([1], r"budget: expected a mapping with keys out of device, host, nvme"),
    ],
)
def test_a_wrong_mapping_is_refused_by_its_dotted_path(mapping: object, place: str) -> None:
    with pytest.raises(ConfigError, match=f"^{place}"):
        Budget.from_mapping(mapping)


# --- resolving ---


def test_a_budget_resolves_to_bytes_of_the_machine() -> None:
    budget = Budget(device="10 GiB", host="50%", nvme={"/mnt/b": "25%", "/mnt/a/": 900})

    assert budget.resolve(MACHINE) == ResolvedBudget(
        device=10 * GiB, host=30 * GiB, nvme={"/mnt/b": 500, "/mnt/a": 900}
    )


def test_a_resolved_budget_keeps_the_drives_in_the_order_of_the_budget() -> None:
    assert list(Budget(nvme={"/mnt/b": 1, "/mnt/a": 1}).resolve(MACHINE).nvme) == [
        "/mnt/b",
        "/mnt/a",
    ]


def test_what_a_budget_leaves_open_is_all_that_the_machine_has_to_give() -> None:
    assert Budget(nvme={"/mnt/a": None}).resolve(MACHINE) == ResolvedBudget(
        device=20 * GiB, host=60 * GiB, nvme={"/mnt/a": 1000}
    )


def test_all_of_a_tier_may_be_taken() -> None:
    assert Budget(host=60 * GiB).resolve(MACHINE).host == 60 * GiB


@pytest.mark.parametrize(
    ("budget", "tier", "directory", "asked", "free"),
    [
        (Budget(device=20 * GiB + 1), "DEVICE", None, 20 * GiB + 1, 20 * GiB),
        (Budget(host="61 GiB"), "HOST", None, 61 * GiB, 60 * GiB),
        (Budget(nvme={"/mnt/a": "100%", "/mnt/b": 2001}), "NVME", "/mnt/b", 2001, 2000),
    ],
)
def test_more_than_the_machine_has_is_refused(
    budget: Budget, tier: str, directory: str | None, asked: int, free: int
) -> None:
    with pytest.raises(CapacityError) as caught:
        budget.resolve(MACHINE)

    error = caught.value
    assert (error.tier, error.directory, error.asked, error.free, error.limit) == (
        tier,
        directory,
        asked,
        free,
        free,
    )
    assert f"lower this budget to {free} B" in error.change


def test_a_drive_that_the_machine_does_not_have_is_refused_with_the_nearest_that_it_has() -> None:
    with pytest.raises(
        ConfigError, match=r"one of /mnt/a, /mnt/b \(nearest: /mnt/[ab]\), got '/mnt/c'"
    ):
        Budget(nvme={"/mnt/c": 1}).resolve(MACHINE)


@PATIENT
@given(BUDGETS, st.integers(0, 2**60))
def test_a_budget_resolves_within_the_machine_or_not_at_all(budget: Budget, nbytes: int) -> None:
    capacity = Capacity(device=nbytes, host=nbytes, nvme=dict.fromkeys(budget.nvme, nbytes))
    limits = (budget.device, budget.host, *budget.nvme.values())

    if any(isinstance(limit, int) and limit > nbytes for limit in limits):
        with pytest.raises(CapacityError):
            budget.resolve(capacity)
    else:
        resolved = budget.resolve(capacity)
        assert all(
            0 <= taken <= nbytes
            for taken in (resolved.device, resolved.host, *resolved.nvme.values())
        )


@pytest.mark.parametrize("kind", [Capacity, ResolvedBudget])
def test_what_is_in_bytes_is_a_value_and_refuses_what_is_not(
    kind: type[Capacity | ResolvedBudget],
) -> None:
    made = kind(device=1, host=2, nvme={"/mnt/a/": 3})

    assert hash(made) == hash(kind(device=1, host=2, nvme={"/mnt/a": 3}))
    assert pickle.loads(pickle.dumps(made)) == made
    for wrong in ({"device": -1}, {"host": -1}, {"nvme": {"/mnt/a": -1}}):
        with pytest.raises(ConfigError, match=rf"^{kind.__name__}\.{next(iter(wrong))}"):
            dataclasses.replace(made, **wrong)


def test_a_capacity_that_was_given_as_text_holds_numbers() -> None:
    assert Capacity(device="1 KiB", host=2, nvme={"/mnt/a": "3 B"}) == Capacity(  # type: ignore[arg-type, dict-item]
        device=1024, host=2, nvme={"/mnt/a": 3}
    )


def test_a_capacity_is_no_resolved_budget() -> None:
    capacity: object = Capacity(device=1, host=1)

    assert capacity != ResolvedBudget(device=1, host=1)
