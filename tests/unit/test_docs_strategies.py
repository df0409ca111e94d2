"""docs/strategies.md keeps its word: its programs print what it shows, its tables are what the
simulator says.
"""

from __future__ import annotations

import re
from fractions import Fraction
from pathlib import Path

import pytest
from simulated_step import step_ns

from infinity_engine.optim.policies import BUILT_IN, eq1, interleaved
from infinity_engine.optim.policy import Limits, OffloadPolicy
from infinity_engine.plan import Lane, Rates, SubgroupSpec
from infinity_engine.plan import ops as plan_ops
from infinity_engine.sim import simulate, update_bound
from support.nvme_programs import output_of, run_program

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs/strategies.md").read_text()
SUBGROUPS = tuple(SubgroupSpec(index=at, numel=100_000_000, first_use=at) for at in range(46))
LIMITS = Limits(resident_bytes=0, staging_bytes=1 << 40)
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
DOWNSCALING = ((H100, 15.5e9), (V100, 8.7e9))


def blocks(language: str) -> list[str]:
    """Return the code blocks of a language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", PAGE, flags=re.MULTILINE | re.DOTALL)


def rows(section: str, *, cells: int) -> list[list[str]]:
    """Return the rows of the section's tables that have so many cells, without their heads."""
    text = PAGE.split(f"\n## {section}\n")[1].split("\n## ")[0]
    found = [
        [cell.strip() for cell in line[1:-1].split("|")]
        for line in text.splitlines()
        if line.startswith("|")
    ]
    rules = [number for number, row in enumerate(found) if set(row[0]) == {"-"}]
    return [
        row
        for number, row in enumerate(found)
        if len(row) == cells and number not in rules and number + 1 not in rules
    ]


def test_the_programs_print_what_the_page_shows(tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="the page shows the engine, which trains with torch")
    program = "\n".join(blocks("python"))

    printed = output_of(run_program(program, folder=tmp_path, python=["-W", "error"]))

    assert printed == "".join(blocks("text"))


def test_a_policy_of_ones_own_takes_ten_lines() -> None:
    [policy] = [block for block in blocks("python") if "@offload_policy" in block]
    lines = [line for line in policy.splitlines() if line]

    assert len(lines) <= 10


def test_every_policy_is_on_the_page() -> None:
    listed = [row[0].strip("`") for row in rows("Which there are", cells=3)]

    assert set(listed) == {*BUILT_IN, "static_split"}


def test_every_op_is_on_the_page_with_its_lane() -> None:
    kinds = (
        *("UpdateOnHost", "UploadParameters", "UploadStates", "UpdateOnDevice", "DownloadStates"),
        *("DownloadParameters", "LoadStates", "StoreStates"),
    )

    assert [(row[0].strip("`"), Lane(row[1])) for row in rows("Plans", cells=3)] == [
        (kind, getattr(plan_ops, kind).lane) for kind in kinds
    ]


def measured(policy: OffloadPolicy, rates: Rates) -> list[str]:
    """Return the three cells that say what a policy takes at these rates."""
    least_ns = update_bound(rates).least_ns(sum(one.numel for one in SUBGROUPS))
    simulation = simulate(policy(SUBGROUPS, rates, LIMITS), rates)
    ratio = float(least_ns / simulation.end_ns)
    whole_ns = step_ns(simulation, int(least_ns))
    return [f"{simulation.end_ns / 1e6:,.0f} ms", f"{ratio:.3f}", f"{whole_ns / 1e6:,.0f} ms"]


def policy_of(row: str, downscale_params_per_s: float) -> OffloadPolicy:
    """Return the policy that a row of the tables is about."""
    if row.endswith("%"):
        return interleaved(Fraction(int(row[:-1]), 100))
    if row == "`eq1`":
        return eq1(downscale_params_per_s=downscale_params_per_s)
    return BUILT_IN[row.strip("`")]


@pytest.mark.parametrize("row", rows("How good ours are", cells=7), ids=lambda row: row[0])
def test_a_row_of_the_tables_is_what_the_simulator_says(row: list[str]) -> None:
    cells = [
        cell
        for rates, downscale in DOWNSCALING
        for cell in measured(policy_of(row[0], downscale), rates)
    ]

    assert row[1:] == cells


@pytest.mark.parametrize("row", rows("How good ours are", cells=9), ids=lambda row: row[0])
def test_a_row_of_the_table_of_lanes_is_how_busy_the_simulator_has_them(row: list[str]) -> None:
    updates = [
        simulate(policy_of(row[0], 0)(SUBGROUPS, rates, LIMITS), rates) for rates in (H100, V100)
    ]
    lanes = (Lane.HOST, Lane.DEVICE, Lane.H2D, Lane.D2H)

    assert row[1:] == [
        f"{update.utilisation.get(lane, 0):.0%}" for update in updates for lane in lanes
    ]


def test_the_tables_have_the_shares_from_none_to_all() -> None:
    for cells in (7, 9):
        shares = [row[0] for row in rows("How good ours are", cells=cells) if row[0].endswith("%")]
        assert shares == [f"{share}%" for share in range(0, 101, 10)]


@pytest.mark.parametrize(
    ("rates", "said"), [(H100, "736 ms on the H100"), (V100, "1,725 ms on the V100")]
)
def test_the_bounds_are_what_the_page_says(rates: Rates, said: str) -> None:
    assert said in PAGE
    assert (
        update_bound(rates).least_ns(46 * 10**8)
        == int(said.split(maxsplit=1)[0].replace(",", "")) * 10**6
    )


@pytest.mark.parametrize(("sets", "lost"), [(2, 0.03), (1, 0.34)])
def test_fewer_staging_sets_lose_what_the_page_says(sets: int, lost: float) -> None:
    limits = Limits(resident_bytes=0, staging_bytes=1 << 40, staging_sets=sets)
    fewer, three = (
        simulate(interleaved()(SUBGROUPS, H100, given), H100).end_ns for given in (limits, LIMITS)
    )

    assert 1 - three / fewer == pytest.approx(lost, abs=0.01)


def test_links_lead_somewhere() -> None:
    for target in re.findall(r"\]\(([^)]+)\)", PAGE):
        assert (ROOT / "docs" / target).exists(), target
