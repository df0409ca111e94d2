"""Calibration as data: what a figure can be, the way through JSON, and the rates that follow from
figures.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import math
import pickle
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infinity_engine.errors import ConfigError
from infinity_engine.plan import (
    BlockFigures,
    BlockShape,
    Calibration,
    ComputeRate,
    DriveFigures,
    DriveRates,
    Figure,
    HostUpdateFigures,
    LinkFigures,
    OwnWork,
    Rates,
    Unit,
)
from support.calibrations import calibration, drive, figure

RATE = st.floats(1e-3, 1e18)
TEXT = st.text(min_size=1, max_size=8)
RULE = st.sampled_from(["adamw", "adam", "lion", "adagrad", "sgd"])
COUNT = st.integers(1, 999)


def figures(unit: Unit) -> st.SearchStrategy[Figure]:
    return st.one_of(
        st.builds(Figure.of, st.lists(RATE, min_size=1, max_size=5), st.just(unit)),
        st.builds(Figure.missing, TEXT, st.just(unit)),
    )


BYTES, PARAMETERS, FLOPS, PARTS, SECONDS = map(figures, Unit)
DRIVES = st.builds(
    DriveFigures,
    drive=st.dictionaries(TEXT, TEXT, max_size=3),
    read=BYTES,
    write=BYTES,
    mixed=BYTES,
    mixed_beside_updates=PARTS,
    mixed_beside_blocks=PARTS,
    start=SECONDS,
    host_updates=st.dictionaries(RULE, st.dictionaries(COUNT, PARTS, max_size=3), max_size=3),
    blocks=PARTS,
    others_share=st.floats(0, 1),
)
UPDATES = st.builds(HostUpdateFigures, alone=PARAMETERS, beside_copies=PARTS, summing=PARTS)
CALIBRATIONS = st.builds(
    Calibration,
    machine=st.dictionaries(TEXT, TEXT, max_size=3),
    date=TEXT,
    memory_bytes=st.integers(1, 2**50),
    links=st.builds(
        LinkFigures,
        **dict.fromkeys(("h2d", "d2h", "duplex_h2d", "duplex_d2h"), BYTES),
        **dict.fromkeys(("h2d_beside_updates", "d2h_beside_updates"), PARTS),
        start=SECONDS,
    ),
    dram=st.dictionaries(COUNT, BYTES, max_size=3),
    host_updates=st.dictionaries(RULE, st.dictionaries(COUNT, UPDATES, max_size=3), max_size=3),
    device_updates=st.dictionaries(RULE, PARAMETERS, max_size=3),
    host_start=SECONDS,
    device_start=SECONDS,
    lease=SECONDS,
    matmul=st.dictionaries(st.sampled_from(["fp32", "bf16"]), FLOPS, max_size=2),
    blocks=st.dictionaries(
        st.sampled_from(["fp32", "bf16"]),
        st.dictionaries(
            st.builds(BlockShape, COUNT, COUNT),
            st.builds(BlockFigures, forward=FLOPS, backward=FLOPS, again=FLOPS),
            max_size=3,
        ),
        max_size=2,
    ),
    all_gather=BYTES,
    reduce_scatter=BYTES,
    drives=st.dictionaries(st.sampled_from(["/mnt/a", "/mnt/b", "swap"]), DRIVES, max_size=3),
)


# --- figures ---


def test_a_figure_is_the_median_of_its_rounds_between_the_least_and_the_most() -> None:
    assert Figure.of([3.0, 1.0, 2.0, 9.0], Unit.BYTES) == Figure(
        unit=Unit.BYTES, median=2.5, least=1.0, most=9.0, rounds=4
    )


def test_what_was_not_measured_has_a_reason_and_no_number() -> None:
    missing = Figure.missing("there is no GPU", Unit.FLOPS)

    assert (missing.median, missing.least, missing.most, missing.rounds) == (None, None, None, 0)
    assert missing.reason == "there is no GPU"


@pytest.mark.parametrize(
    "wrong",
    [
        {},
        {"reason": ""},
        {"median": 1.0, "least": 1.0, "most": 1.0},
        {"median": 1.0, "least": 2.0, "most": 3.0, "rounds": 1},
        {"median": 4.0, "least": 2.0, "most": 3.0, "rounds": 1},
        {"median": 0.0, "least": 0.0, "most": 0.0, "rounds": 1},
        {"median": math.nan, "least": 1.0, "most": 2.0, "rounds": 1},
        {"median": math.inf, "least": 1.0, "most": math.inf, "rounds": 1},
        {"median": 1.0, "rounds": 1},
        {"median": 1.0, "least": 1.0, "most": 1.0, "rounds": 1, "reason": "but"},
        {"rounds": 1, "reason": "but"},
    ],
)
def test_a_figure_is_either_whole_or_missing(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"^Figure: expected 0 < least <= median <= most"):
        Figure(unit=Unit.BYTES, **wrong)


# --- the way through JSON ---


@given(CALIBRATIONS)
def test_a_calibration_survives_the_way_through_json(measured: Calibration) -> None:
    assert Calibration.from_mapping(json.loads(json.dumps(measured.to_mapping()))) == measured


def test_a_calibration_is_a_value() -> None:
    one = calibration()

    assert pickle.loads(pickle.dumps(one)) == copy.deepcopy(one) == one
    assert hash(one) == hash(calibration())
    with pytest.raises(dataclasses.FrozenInstanceError):
        one.date = "today"  # type: ignore[misc]


@pytest.mark.parametrize("version", [0, 1, 2, 3, 4, 5, 7, "6", None, True])
def test_another_version_is_refused_with_what_to_do(version: object) -> None:
    with pytest.raises(
        ConfigError,
        match=r"^calibration\.version: expected version 6, .* `infinity calibrate` again",
    ):
        Calibration.from_mapping({**calibration().to_mapping(), "version": version})


def test_a_calibration_without_the_share_of_others_is_of_a_quiet_machine() -> None:
    mapping = calibration().to_mapping()
    del mapping["others_share"]

    assert Calibration.from_mapping(mapping) == calibration()
    assert not calibration().is_disturbed


def test_a_calibration_says_that_others_disturbed_it() -> None:
    busy = dataclasses.replace(calibration(), others_share=0.3)

    assert busy.is_disturbed
    assert Calibration.from_mapping(json.loads(json.dumps(busy.to_mapping()))) == busy


def test_figures_of_a_drive_say_that_others_disturbed_them() -> None:
    busy = dataclasses.replace(drive(), others_share=0.3)
    measured = calibration().with_drives({"/mnt/a": drive("serial 2"), "/mnt/b": busy})

    assert measured.is_disturbed
    assert measured.most_others_share == 0.3
    assert not measured.with_drives({}).is_disturbed


def test_figures_of_a_drive_without_the_share_of_others_are_of_a_quiet_machine() -> None:
    mapping = drive().to_mapping()
    del mapping["others_share"]

    assert DriveFigures.from_mapping(mapping, field="drive") == drive()


@pytest.mark.parametrize("share", [-0.1, 1.1, float("nan"), True, "0.3", None])
def test_a_share_of_others_that_is_no_part_is_refused(share: object) -> None:
    with pytest.raises(ConfigError, match=r"^calibration\.others_share: expected a part"):
        Calibration.from_mapping({**calibration().to_mapping(), "others_share": share})


@pytest.mark.parametrize(
    "name",
    [item.name for item in dataclasses.fields(Calibration) if item.name != "others_share"],
)
def test_every_part_has_to_be_there(name: str) -> None:
    mapping = calibration().to_mapping()
    del mapping[name]

    with pytest.raises(
        ConfigError, match=rf"^calibration\.{name}: expected a value: it is missing"
    ):
        Calibration.from_mapping(mapping)


@pytest.mark.parametrize(
    ("path", "value", "place"),
    [
        (
            ("links", "h2d", "median"),
            -1.0,
            r"calibration\.links\.h2d\.median: expected a positive number",
        ),
        (
            ("links", "h2d", "median"),
            "fast",
            r"calibration\.links\.h2d\.median: expected a positive number",
        ),
        (
            ("links", "h2d", "unit"),
            "flop/s",
            r"calibration\.links\.h2d\.unit: expected the unit bytes/s, got 'flop/s'",
        ),
        (
            ("links", "h2d", "rounds"),
            1.5,
            r"calibration\.links\.h2d\.rounds: expected a whole number",
        ),
        (("links", "h2d", "reason"), 1, r"calibration\.links\.h2d\.reason: expected text"),
        (
            ("links", "h2d", "mode"),
            1,
            r"calibration\.links\.h2d\.mode: .*expected one of unit, median",
        ),
        (("links", "up"), {}, r"calibration\.links\.up: expected one of h2d"),
        (("dram", "two"), {}, r"calibration\.dram: expected numbers of threads as keys"),
        (("dram", "0"), {}, r"calibration\.dram: expected numbers of threads as keys"),
        (
            ("host_updates", "adamw", "1"),
            {},
            r"calibration\.host_updates\['adamw'\]\['1'\]\.alone: expected a value",
        ),
        (
            ("drives", "/mnt/a", "read"),
            5,
            r"calibration\.drives\['/mnt/a'\]\.read: expected a mapping",
        ),
        (("drives", ""), {}, r"calibration\.drives\[''\]\.drive: "),
        (("matmul",), [1], r"calibration\.matmul: expected a mapping"),
        (("memory_bytes",), 0, r"calibration\.memory_bytes: expected a whole number of bytes"),
    ],
)
def test_what_is_wrong_is_refused_by_its_dotted_path(
    path: tuple[str, ...], value: object, place: str
) -> None:
    mapping = json.loads(json.dumps(calibration().to_mapping()))
    inner = mapping
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value

    with pytest.raises(ConfigError, match=f"^{place}"):
        Calibration.from_mapping(mapping)


@pytest.mark.parametrize("given", [None, 5, "x", [1]])
def test_what_is_no_mapping_is_refused(given: object) -> None:
    with pytest.raises(ConfigError, match=r"^calibration: expected a mapping"):
        Calibration.from_mapping(given)


# --- rates ---


def test_the_rates_are_the_medians() -> None:
    assert calibration().rates(optimizer="adamw", threads=2) == Rates(
        h2d_bytes_per_s=10e9,
        d2h_bytes_per_s=8e9,
        duplex_h2d_bytes_per_s=9e9,
        duplex_d2h_bytes_per_s=7e9,
        dram_bytes_per_s=30e9,
        host_update_params_per_s=0.9e9,
        device_update_params_per_s=25e9,
        host_start_s=5e-5,
        device_start_s=2e-5,
        copy_start_s=1e-5,
        io_start_s=1e-4,
        nvme={
            "/mnt/a": DriveRates(
                read_bytes_per_s=3e9, write_bytes_per_s=2e9, mixed_bytes_per_s=2.4e9
            ),
        },
    )


def test_an_operation_over_several_drives_costs_what_the_slowest_takes_to_start() -> None:
    slow = dataclasses.replace(drive(), start=figure(3e-4, Unit.SECONDS))
    measured = calibration().with_drives({"/mnt/a": drive(), "/mnt/b": slow})

    assert measured.rates().io_start_s == 3e-4


def test_without_a_number_all_threads_that_were_measured_update() -> None:
    assert calibration().rates().host_update_params_per_s == 1.2e9


@pytest.mark.parametrize(
    ("threads", "rate"), [(1, 0.5e9), (2, 0.9e9), (3, 1.05e9), (4, 1.2e9), (64, 1.2e9)]
)
def test_a_number_of_threads_that_was_not_measured_lies_between_its_neighbours(
    threads: int, rate: float
) -> None:
    assert calibration().rates(threads=threads).host_update_params_per_s == pytest.approx(rate)


def test_each_optimizer_has_its_own_rate() -> None:
    assert calibration().rates(optimizer="sgd", threads=1).host_update_params_per_s == 1e9


def test_an_optimizer_that_was_not_measured_is_refused_with_those_that_were() -> None:
    with pytest.raises(
        ConfigError,
        match=r"^optimizer: expected one of adamw, sgd \(nearest: adamw\), got 'adamww'",
    ):
        calibration().rates(optimizer="adamww")


def test_no_threads_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"^threads: expected 1 or more"):
        calibration().rates(threads=0)


def test_the_directories_asked_for_are_those_that_the_rates_have() -> None:
    both = calibration().with_drives({"/mnt/a": drive(), "/mnt/b": drive()})

    assert list(both.rates().nvme) == ["/mnt/a", "/mnt/b"]
    assert list(both.rates(directories=["/mnt/b/"]).nvme) == ["/mnt/b"]
    assert not both.rates(directories=[]).nvme


def test_a_directory_that_was_not_measured_is_refused_with_what_to_do() -> None:
    with pytest.raises(
        ConfigError, match=r"^directories: .*`infinity calibrate /mnt/c`, got '/mnt/c'"
    ):
        calibration().rates(directories=["/mnt/a", "/mnt/c"])


def test_beside_io_updates_and_drives_have_what_was_left_to_them() -> None:
    rates = calibration().rates(threads=4, beside_io=True)

    assert rates.host_update_params_per_s == pytest.approx(0.96e9)
    assert rates.nvme["/mnt/a"] == DriveRates(
        read_bytes_per_s=1.5e9, write_bytes_per_s=1e9, mixed_bytes_per_s=1.2e9
    )
    assert rates.h2d_bytes_per_s == 10e9


def test_beside_copies_updates_and_links_have_what_was_left_to_them() -> None:
    rates = calibration().rates(threads=4, beside_copies=True)

    assert rates.host_update_params_per_s == pytest.approx(0.8e9)
    assert (rates.h2d_bytes_per_s, rates.duplex_h2d_bytes_per_s) == pytest.approx((20e9 / 3, 6e9))
    assert rates.d2h_bytes_per_s == 8e9  # they were no slower
    assert rates.nvme["/mnt/a"].read_bytes_per_s == 3e9


def test_directories_on_one_drive_share_its_rates() -> None:
    nameless = dataclasses.replace(drive(), drive={})  # it counts as a drive of its own
    measured = calibration().with_drives(
        {
            "/mnt/a/0": drive(),
            "/mnt/a/1": drive(),
            "/mnt/b": drive("serial 2"),
            "/mnt/c": nameless,
        }
    )

    rates = measured.rates().nvme
    alone = measured.rates(directories=["/mnt/a/1"]).nvme

    assert {name: found.read_bytes_per_s for name, found in rates.items()} == {
        "/mnt/a/0": 1.5e9,
        "/mnt/a/1": 1.5e9,
        "/mnt/b": 3e9,
        "/mnt/c": 3e9,
    }
    assert alone["/mnt/a/1"].read_bytes_per_s == 3e9


def test_updates_lose_to_a_drive_once_as_beside_its_worst_directory() -> None:
    worse = dataclasses.replace(drive(), host_updates={"adamw": {4: figure(0.6, Unit.PART)}})
    measured = calibration().with_drives({"/mnt/a/0": drive(), "/mnt/a/1": worse})

    one, both = (
        measured.rates(threads=4, beside_io=True, directories=directories)
        for directories in (["/mnt/a/1"], None)
    )

    assert both.host_update_params_per_s == one.host_update_params_per_s


def test_disturbances_add_up_in_time_per_parameter() -> None:
    two = calibration().with_drives({"/mnt/a": drive(), "/mnt/b": drive("serial 2")})

    rates = two.rates(threads=4, beside_io=True, beside_copies=True)

    expected = 1 / 1.2e9 + 2 * (1 / 0.96e9 - 1 / 1.2e9) + (1 / 0.8e9 - 1 / 1.2e9)
    assert rates.host_update_params_per_s == pytest.approx(1 / expected)


def test_modules_keep_what_the_drive_that_takes_most_leaves_them() -> None:
    part = figure(0.4, Unit.PART)
    slower = dataclasses.replace(drive(), blocks=part)
    both = calibration().with_drives({"/mnt/a": drive(), "/mnt/b": slower})

    assert both.computing_beside_io(["/mnt/a"]) == 0.6
    assert both.computing_beside_io() == 0.4
    assert both.with_drives({}).computing_beside_io() == 1
    elsewhere = dataclasses.replace(drive(), blocks=Figure.missing("a GPU computes", Unit.PART))
    assert both.with_drives({"/mnt/a": elsewhere}).computing_beside_io() == 1


def test_drives_keep_beside_modules_what_they_keep_of_all_that_they_move_together() -> None:
    part = figure(0.2, Unit.PART)
    slower = dataclasses.replace(drive(), mixed=figure(0.6e9), mixed_beside_blocks=part)
    both = calibration().with_drives({"/mnt/a": drive(), "/mnt/b": slower})

    assert both.io_beside_computing(["/mnt/a"]) == 0.7
    assert both.io_beside_computing() == pytest.approx((0.7 * 2.4 + 0.2 * 0.6) / 3)
    assert both.with_drives({}).io_beside_computing() == 1


def test_checksums_take_as_much_from_updates_however_many_drives_there_are() -> None:
    two = calibration().with_drives({"/mnt/a": drive(), "/mnt/b": drive()})

    assert two.summing(threads=4) == calibration().with_drives({}).summing(threads=4) == 0.5
    assert two.summing(optimizer="lion") == 1  # not measured


def test_a_disturbance_never_makes_anything_faster() -> None:
    more = figure(1.5, Unit.PART)
    lucky = dataclasses.replace(
        drive(),
        mixed_beside_updates=more,
        mixed_beside_blocks=more,
        host_updates={"adamw": {4: more}},
        blocks=more,
    )
    measured = calibration().with_drives({"/mnt/a": lucky})

    assert measured.rates(threads=4, beside_io=True) == measured.rates(threads=4)
    assert measured.computing_beside_io() == measured.io_beside_computing() == 1


def test_what_is_missing_gives_no_rate_and_disturbs_nothing() -> None:
    nothing, no_part, no_start = (
        Figure.missing("not measured", unit) for unit in (Unit.BYTES, Unit.PART, Unit.SECONDS)
    )
    alone = figure(1e9, Unit.PARAMETERS)
    measured = dataclasses.replace(
        calibration(),
        links=LinkFigures(
            h2d=nothing,
            d2h=nothing,
            duplex_h2d=nothing,
            duplex_d2h=nothing,
            h2d_beside_updates=no_part,
            d2h_beside_updates=no_part,
            start=no_start,
        ),
        host_start=no_start,
        device_start=no_start,
        lease=no_start,
        dram={1: nothing},
        host_updates={
            "adamw": {1: HostUpdateFigures(alone=alone, beside_copies=no_part, summing=no_part)}
        },
        device_updates={},
        drives={},
    )

    assert measured.rates(beside_io=True, beside_copies=True) == Rates(host_update_params_per_s=1e9)
    assert measured.summing() == measured.computing_beside_io() == 1
    assert measured.own() == OwnWork()


def test_matrix_products_have_a_rate_for_each_dtype() -> None:
    assert calibration().flops_per_s("bf16") == 200e9
    with pytest.raises(ConfigError, match=r"^dtype: expected one of fp32, bf16"):
        calibration().flops_per_s("fp8")


def test_blocks_are_had_as_rates_where_all_ways_were_measured() -> None:
    measured = calibration()
    half = BlockFigures(
        forward=figure(1e9, Unit.FLOPS),
        backward=Figure.missing("no time", Unit.FLOPS),
        again=figure(1e9, Unit.FLOPS),
    )
    blocks = {
        "bf16": {**measured.blocks["bf16"], BlockShape(512, 256): half},
        "fp32": {BlockShape(512, 256): half},
    }
    found = dataclasses.replace(measured, blocks=blocks)

    rates = found.block_rates("bf16")
    assert rates is not None
    assert dict(rates.measured) == {BlockShape(1024, 256): ComputeRate(150e9, 120e9, 200e9)}
    assert found.block_rates("fp32") is None


@pytest.mark.parametrize("key", ["1024", "1024x", "x256", "0x256", "axb", "1024x256x3"])
def test_a_block_is_named_by_its_width_and_tokens(key: str) -> None:
    mapping: dict[str, Any] = calibration().to_mapping()
    mapping["blocks"] = {"bf16": {key: mapping["blocks"]["bf16"]["1024x256"]}}

    with pytest.raises(ConfigError, match=r"blocks\['bf16'\]: expected widths and tokens as keys"):
        Calibration.from_mapping(mapping)


@given(CALIBRATIONS, st.booleans(), st.booleans(), st.integers(1, 2000))
def test_rates_follow_from_every_calibration(
    measured: Calibration, io: bool, copies: bool, threads: int
) -> None:
    for optimizer in measured.host_updates:
        rates = measured.rates(
            optimizer=optimizer, threads=threads, beside_io=io, beside_copies=copies
        )
        alone = measured.rates(optimizer=optimizer, threads=threads)

        assert set(rates.nvme) == set(measured.drives)
        if (
            rates.host_update_params_per_s is not None
            and alone.host_update_params_per_s is not None
        ):
            assert rates.host_update_params_per_s <= alone.host_update_params_per_s * (1 + 1e-9)
