from __future__ import annotations

import dataclasses
import json
import math
import pickle

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from infinity_engine.errors import ConfigError
from infinity_engine.plan import DriveRates, Rates

PATIENT = settings(deadline=None)
SCALARS = tuple(field.name for field in dataclasses.fields(Rates) if field.name != "nvme")
DRIVE_SCALARS = tuple(field.name for field in dataclasses.fields(DriveRates))
RATE = st.one_of(
    st.none(), st.floats(0, exclude_min=True, allow_infinity=False), st.integers(1, 2**70)
)
DRIVES = st.builds(DriveRates, **dict.fromkeys(DRIVE_SCALARS, RATE))
NVME = st.dictionaries(
    st.text("abc", min_size=1, max_size=5).map("/mnt/{}".format), DRIVES, max_size=3
)
RATES = st.builds(Rates, nvme=NVME, **dict.fromkeys(SCALARS, RATE))


def test_ranks_divide_the_host_and_each_drive_among_those_that_use_it_and_no_links() -> None:
    drive = DriveRates(read_bytes_per_s=6e9, mixed_bytes_per_s=3e9)
    alone = Rates(
        h2d_bytes_per_s=1e9,
        dram_bytes_per_s=8e9,
        host_update_params_per_s=2e9,
        device_update_params_per_s=3e9,
        nvme={"/a": drive, "/b": drive},
    )

    divided = alone.divided(4, users={"/a": 3, "/b": 1})

    assert (
        divided.h2d_bytes_per_s,
        divided.d2h_bytes_per_s,
        divided.device_update_params_per_s,
    ) == (1e9, None, 3e9)
    assert (divided.dram_bytes_per_s, divided.host_update_params_per_s) == (2e9, 0.5e9)
    assert dict(divided.nvme) == {
        "/a": DriveRates(read_bytes_per_s=2e9, mixed_bytes_per_s=1e9),
        "/b": drive,
    }
    assert alone.divided(2).nvme["/b"] == DriveRates(read_bytes_per_s=3e9, mixed_bytes_per_s=1.5e9)


def test_what_was_not_measured_is_none() -> None:
    assert all(getattr(Rates(), name) is None for name in SCALARS)
    assert not Rates().nvme


@pytest.mark.parametrize("name", [*SCALARS, *DRIVE_SCALARS])
def test_every_rate_has_its_unit_in_its_name(name: str) -> None:
    assert name.endswith(("_bytes_per_s", "_params_per_s", "_start_s"))


@pytest.mark.parametrize("value", [0, -1.0, math.nan, math.inf, 10**400, True, "fast"], ids=str)
@pytest.mark.parametrize("name", SCALARS)
def test_a_rate_is_a_positive_finite_number(name: str, value: object) -> None:
    with pytest.raises(
        ConfigError,
        match=rf"^Rates\.{name}: expected a positive number of "
        "((bytes|parameters) per second|seconds)",
    ):
        Rates(**{name: value})  # type: ignore[arg-type]


@pytest.mark.parametrize("value", [0, math.inf])
@pytest.mark.parametrize("name", DRIVE_SCALARS)
def test_a_rate_of_a_drive_is_a_positive_finite_number(name: str, value: float) -> None:
    with pytest.raises(
        ConfigError, match=rf"^DriveRates\.{name}: expected a positive number of bytes per second"
    ):
        DriveRates(**{name: value})


@pytest.mark.parametrize("name", [name for name in SCALARS if name.endswith("_bytes_per_s")])
def test_bytes_per_second_may_be_given_as_text(name: str) -> None:
    rates = Rates(**{name: "55 GB/s"})  # type: ignore[arg-type]

    assert rates == Rates(**{name: 55e9})  # type: ignore[arg-type]
    assert rates == Rates.from_mapping({"version": 1, name: "55 GB/s"})


@pytest.mark.parametrize("name", DRIVE_SCALARS)
def test_the_rates_of_a_drive_may_be_given_as_text(name: str) -> None:
    assert Rates.from_mapping({"version": 1, "nvme": {"/mnt/a": {name: "6.5 GB/s"}}}) == Rates(
        nvme={"/mnt/a": DriveRates(**{name: 6.5e9})}
    )


def test_bytes_per_second_without_the_seconds_are_refused_with_the_right_form() -> None:
    with pytest.raises(
        ConfigError, match=r"^rates\.h2d_bytes_per_s: expected a rate: write '55 GB/s', got '55 GB'"
    ):
        Rates.from_mapping({"version": 1, "h2d_bytes_per_s": "55 GB"})


@pytest.mark.parametrize("name", [name for name in SCALARS if name.endswith("_params_per_s")])
def test_parameters_are_not_counted_in_bytes(name: str) -> None:
    with pytest.raises(
        ConfigError,
        match=rf"^Rates\.{name}: expected a positive number of parameters per second, got '",
    ):
        Rates(**{name: "2 GB/s"})  # type: ignore[arg-type]


def test_rates_are_a_value() -> None:
    one = Rates(h2d_bytes_per_s=5, nvme={"/mnt/a/": DriveRates(read_bytes_per_s=3e9)})
    other = Rates(h2d_bytes_per_s=5.0, nvme={"/mnt/a": DriveRates(read_bytes_per_s=3e9)})

    assert one == other
    assert hash(one) == hash(other)
    assert pickle.loads(pickle.dumps(one)) == one


def test_rates_cannot_be_changed() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        Rates().dram_bytes_per_s = 1.0  # type: ignore[misc]


def test_a_directory_named_twice_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"^Rates\.nvme: expected each directory once"):
        Rates(nvme={"/mnt/a": DriveRates(), "/mnt/a/": DriveRates()})


@PATIENT
@given(RATES)
def test_rates_survive_the_way_through_json(rates: Rates) -> None:
    assert Rates.from_mapping(json.loads(json.dumps(rates.to_mapping()))) == rates


def test_the_json_form_carries_its_version() -> None:
    assert Rates().to_mapping()["version"] == 1


@pytest.mark.parametrize("version", [2, 0, "1", None, True])
def test_another_version_is_refused_with_what_to_do(version: object) -> None:
    with pytest.raises(
        ConfigError, match=r"^rates\.version: expected version 1, .* calibrate again"
    ):
        Rates.from_mapping({**Rates().to_mapping(), "version": version})


def test_a_mapping_without_a_version_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"^rates\.version: expected version 1, .*got None"):
        Rates.from_mapping({"h2d_bytes_per_s": 1.0})


def test_another_version_is_refused_before_its_unknown_names() -> None:
    with pytest.raises(ConfigError, match=r"^rates\.version"):
        Rates.from_mapping({"version": 2, "matmul_flops": 1})


@pytest.mark.parametrize(
    ("mapping", "place"),
    [
        ({"h2d_bytes_per_sec": 1}, r"rates\.h2d_bytes_per_sec: .*\(nearest: h2d_bytes_per_s\)"),
        ({"h2d_bytes_per_s": 0}, r"rates\.h2d_bytes_per_s: "),
        (
            {"nvme": {"/mnt/a": {"reed_bytes_per_s": 1}}},
            r"rates\.nvme\['/mnt/a'\]\.reed_bytes_per_s: ",
        ),
        (
            {"nvme": {"/mnt/a": {"read_bytes_per_s": "x"}}},
            r"rates\.nvme\['/mnt/a'\]\.read_bytes_per_s: ",
        ),
        ({"nvme": {"/mnt/a": 5}}, r"rates\.nvme\['/mnt/a'\]: expected a mapping"),
        ({"nvme": {"": {}}}, r"rates\.nvme: expected directories as text"),
        ({"nvme": [5]}, r"rates\.nvme: expected a mapping from directories"),
    ],
)
def test_a_wrong_mapping_is_refused_by_its_dotted_path(
    mapping: dict[str, object], place: str
) -> None:
    with pytest.raises(ConfigError, match=f"^{place}"):
        Rates.from_mapping({"version": 1, **mapping})


def test_what_is_no_mapping_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"^rates: expected a mapping"):
        Rates.from_mapping([1])


def test_a_drive_takes_the_time_of_what_it_reads_and_writes_at_once_and_of_the_rest() -> None:
    drive = DriveRates(read_bytes_per_s=10, write_bytes_per_s=4, mixed_bytes_per_s=8)

    assert drive.seconds(50, 16) == 32 / 8 + 34 / 10
    assert drive.seconds(0, 16) == 4
    assert drive.seconds(0, 0) == 0


@given(
    read=st.floats(1e6, 1e10),
    write=st.floats(1e6, 1e10),
    part=st.floats(0.1, 1.0) | st.none(),
    reads=st.integers(0, 10**12),
    writes=st.integers(0, 10**12),
)
def test_reads_and_writes_at_once_end_when_the_drive_has_moved_both(
    read: float, write: float, part: float | None, reads: int, writes: int
) -> None:
    """`part`: what the drive keeps of twice its slower rate while it does both."""
    mixed = None if part is None else part * 2 * min(read, write)
    drive = DriveRates(read_bytes_per_s=read, write_bytes_per_s=write, mixed_bytes_per_s=mixed)

    both = drive.both_at_once(reads, writes)

    assert both.read_bytes_per_s is not None
    assert both.write_bytes_per_s is not None
    longer = max(reads / both.read_bytes_per_s, writes / both.write_bytes_per_s)
    assert longer == pytest.approx(drive.seconds(reads, writes))


@given(
    read=st.floats(1e6, 1e10),
    write=st.floats(1e6, 1e10),
    part=st.floats(0.1, 1.0),
    reads=st.integers(0, 10**12),
    more=st.integers(1, 10**12),
    writes=st.integers(0, 10**12),
)
def test_reads_one_after_the_other_end_when_the_drive_has_moved_all(
    read: float, write: float, part: float, reads: int, more: int, writes: int
) -> None:
    mixed = part * 2 * min(read, write)
    drive = DriveRates(read_bytes_per_s=read, write_bytes_per_s=write, mixed_bytes_per_s=mixed)

    first, then = (
        drive.both_at_once(reads, writes),
        drive.reading_more(more, reads=reads, writes=writes),
    )

    assert first.read_bytes_per_s
    assert then.read_bytes_per_s
    assert then.write_bytes_per_s
    read_s = reads / first.read_bytes_per_s + more / then.read_bytes_per_s
    longer = max(read_s, writes / then.write_bytes_per_s)
    assert longer == pytest.approx(drive.seconds(reads + more, writes))


def test_what_is_left_of_one_way_has_the_link_alone() -> None:
    rates = Rates(
        h2d_bytes_per_s=20,
        d2h_bytes_per_s=20,
        duplex_h2d_bytes_per_s=10,
        duplex_d2h_bytes_per_s=10,
    )

    both = rates.both_at_once(up_and_down=(100, 40))
    assert both.d2h_bytes_per_s == 10
    assert both.h2d_bytes_per_s == 100 / (4 + 3)
    assert rates.both_at_once(up_and_down=(100, 0)).h2d_bytes_per_s == 20
    assert rates.both_at_once().h2d_bytes_per_s == 10


def test_one_way_of_a_link_gets_no_more_beside_the_other_than_alone() -> None:
    rates = Rates(h2d_bytes_per_s=20, d2h_bytes_per_s=20, duplex_h2d_bytes_per_s=21)

    assert rates.both_at_once().h2d_bytes_per_s == 20
    assert rates.both_at_once(up_and_down=(100, 40)).h2d_bytes_per_s == 20
    assert Rates(duplex_h2d_bytes_per_s=21).both_at_once().h2d_bytes_per_s == 21


def test_what_is_left_of_writes_has_the_drive_alone() -> None:
    drive = DriveRates(read_bytes_per_s=6e9, write_bytes_per_s=4e9, mixed_bytes_per_s=4e9)

    more_writes = drive.both_at_once(10 * 10**9, 14 * 10**9)
    assert more_writes.read_bytes_per_s == 2e9
    assert more_writes.write_bytes_per_s == pytest.approx(14e9 / (5 + 1))
    assert drive.both_at_once(0, 10**9).write_bytes_per_s == pytest.approx(4e9)
    assert drive.both_at_once(10**9, 0).read_bytes_per_s == pytest.approx(6e9)
    assert drive.both_at_once(0, 0) == drive.both_at_once()


def test_where_the_rate_of_both_at_once_is_not_known_they_take_their_times_one_after_the_other() -> (
    None
):
    assert DriveRates(read_bytes_per_s=10, write_bytes_per_s=4).seconds(50, 16) == 9


def test_what_a_drive_takes_is_not_known_where_a_rate_that_it_needs_is_not() -> None:
    assert DriveRates(read_bytes_per_s=10).seconds(50, 16) is None
    assert DriveRates(read_bytes_per_s=10).seconds(50, 0) == 5
