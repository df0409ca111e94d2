"""The bench harness: rounds, figures, targets, the JSON document and the pages made of it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import datetime, timezone
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts" / "lib"))
import bench

ROOT = Path(__file__).resolve().parents[2]
FINITE = st.floats(allow_nan=False, allow_infinity=False, width=32)
PAGES = Path(__file__).resolve().parents[2] / "docs" / "benchmarks"
DATE = datetime(2026, 11, 21, 12, 30, tzinfo=timezone.utc)


def counting(calls: list[str], name: str, value: float = 1.0) -> Callable[[], float]:
    """Return a measurement that notes each of its calls."""

    def measure() -> float:
        calls.append(name)
        return value

    return measure


def a_bench(**systems: float) -> bench.Bench:
    run = bench.Bench("demo", quick=False)
    for name, value in systems.items():
        run.system(name, lambda value=value: value, unit="s")  # type: ignore[misc]
    return run


def refuses() -> float:
    raise bench.UnavailableError("the rival is not installed; pip install rival")


# --- rounds ---------------------------------------------------------------------------------------


def test_what_a_run_has_no_time_left_for_is_not_begun_and_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bench.need(1e9)  # this run has no limit, so it does not raise
    monkeypatch.setattr(time, "time", lambda: 100.0)
    monkeypatch.setenv(bench.UNTIL, "130")
    run = a_bench(short=2.0)

    def long() -> float:
        bench.need(31)
        return 1.0

    run.system("long", long, unit="s")
    run.figure("ratio", unit="ratio", target="> 0", uses=["long"])
    (figure,) = run.run(1)

    bench.need(30)
    assert figure.reason == "long: it takes 31 s, and 30 s were left"


def test_every_system_is_warmed_up_and_then_measured_once_per_round() -> None:
    calls: list[str] = []
    run = bench.Bench("demo", quick=False)
    for name in "abc":
        run.system(name, counting(calls, name), unit="s")

    run.run(4)

    assert [calls.count(name) for name in "abc"] == [5, 5, 5]
    assert len(run.rounds) == 4


def test_without_a_warm_up_what_is_measured_first_is_a_round() -> None:
    calls: list[str] = []
    run = bench.Bench("demo", quick=False, warm_up=False)
    for name in "abc":
        run.system(name, counting(calls, name), unit="s")
    run.system("rival", refuses, unit="s")

    heard: list[int] = []
    run.run(3, heard.append)

    assert heard == [0, 1, 2]
    assert calls == [*"abc", *"bca", *"cab"]
    assert [sorted(measured) for measured in run.rounds] == [list("abc")] * 3


def test_each_round_starts_with_another_system() -> None:
    calls: list[str] = []
    run = bench.Bench("demo", quick=False)
    for name in "abc":
        run.system(name, counting(calls, name), unit="s")

    run.run(4)

    rounds = ["".join(calls[start : start + 3]) for start in range(3, len(calls), 3)]
    assert rounds == ["abc", "bca", "cab", "abc"]


def test_the_warm_up_is_not_in_the_numbers() -> None:
    numbers = iter([100.0, 1.0, 2.0, 3.0])
    run = bench.Bench("demo", quick=False)
    run.system("ours", lambda: next(numbers), unit="s")
    run.figure("time", unit="s", target="<= 5", uses=["ours"])

    [figure] = run.run(3)

    assert figure.rounds == (1.0, 2.0, 3.0)


def test_a_system_may_measure_several_things_by_name() -> None:
    run = bench.Bench("demo", quick=False)
    run.system("ours", lambda: {"wall": 2.0, "CPU": 1.0}, unit="s")
    run.figure(
        "CPU share",
        unit="ratio",
        target="<= 1",
        uses=["ours: CPU", "ours: wall"],
        value=lambda c, w: c / w,
    )

    [figure] = run.run(1)

    assert figure.value == 0.5
    assert run.rounds == [{"ours: wall": 2.0, "ours: CPU": 1.0}]


# --- figures --------------------------------------------------------------------------------------


def test_a_ratio_is_taken_within_each_round_and_then_the_median() -> None:
    ours, rival = iter([0.0, 1.0, 9.0, 4.0]), iter([1.0, 2.0, 10.0, 100.0])
    run = bench.Bench("demo", quick=False)
    run.system("ours", lambda: next(ours), unit="s")
    run.system("rival", lambda: next(rival), unit="s")
    run.figure(
        "ratio", unit="ratio", target="<= 0.6", uses=["ours", "rival"], value=lambda a, b: a / b
    )

    [figure] = run.run(3)

    assert figure.rounds == (0.5, 0.9, 0.04)
    assert figure.value == 0.5  # not the ratio of the medians, 4 / 10
    assert figure.holds


def test_a_document_has_every_measurement_of_a_round_once() -> None:
    run = a_bench(ours=1.0, rival=2.0, context=3.0)
    run.figure("time", unit="s", target="<= 1", uses=["ours"])
    run.figure(
        "ratio",
        unit="ratio",
        target="<= 1",
        uses=["ours", "rival"],
        value=lambda ours, rival: ours / rival,
    )

    result = bench.document(run, run.run(1), date=DATE, machine={"name": "Example"}, versions={})

    assert result["rounds"] == [{"ours": 1.0, "rival": 2.0, "context": 3.0}]
    assert [figure["rounds"] for figure in result["figures"]] == [[1.0], [0.5]]


def test_a_figure_whose_system_is_unavailable_has_no_value_but_the_reason_and_does_not_hold() -> (
    None
):
    run = a_bench(ours=1.0)
    run.system("rival", refuses, unit="s")
    run.figure(
        "ratio", unit="ratio", target=">= 0", uses=["ours", "rival: wall"], value=lambda a, b: a / b
    )
    run.figure("ours", unit="s", target="<= 1", uses=["ours"])

    ratio, ours = run.run(2)

    assert (ratio.value, ratio.holds) == (None, False)
    assert ratio.reason == "rival: the rival is not installed; pip install rival"
    assert ratio.rounds == ()
    assert run.rounds == [{"ours": 1.0}, {"ours": 1.0}]
    assert ours.holds


def test_where_no_system_is_available_every_figure_says_so() -> None:
    run = bench.Bench("demo", quick=False)
    run.system("rival", refuses, unit="s")
    run.figure("time", unit="s", target="<= 1", uses=["rival"])

    [figure] = run.run(5)

    assert (figure.value, figure.rounds) == (None, ())


@pytest.mark.parametrize(
    "value", [lambda a: a / 0.0, lambda a: a * float("inf"), lambda a: a * float("nan")]
)
def test_a_result_that_is_no_number_is_a_missing_value_with_its_reason(
    value: Callable[..., float],
) -> None:
    run = a_bench(ours=1.0)
    run.figure("strange", unit="ratio", target=">= 0", uses=["ours"], value=value)

    [figure] = run.run(1)

    assert (figure.value, figure.holds) == (None, False)
    assert figure.reason is not None
    assert "computed from [1.0]" in figure.reason


def test_an_error_of_a_system_under_test_stops_the_bench() -> None:
    run = bench.Bench("demo", quick=False)
    run.system("ours", lambda: 1 / 0, unit="s")

    with pytest.raises(ZeroDivisionError):
        run.run(1)


@pytest.mark.parametrize("measured", [float("nan"), {"wall": 1.0, "CPU": float("inf")}])
def test_a_measurement_that_is_no_number_stops_the_bench(
    measured: float | dict[str, float],
) -> None:
    run = bench.Bench("demo", quick=False)
    run.system("ours", lambda: measured, unit="s")

    with pytest.raises(ValueError, match="ours measured"):
        run.run(1)


def test_a_figure_that_uses_what_nobody_measures_is_refused_before_the_first_round() -> None:
    calls: list[str] = []
    run = bench.Bench("demo", quick=False)
    run.system("ours", counting(calls, "ours"), unit="s")
    run.figure("time", unit="s", target="<= 1", uses=["ourz"])

    with pytest.raises(ValueError, match=r"'ourz'; measured are \['ours'\]"):
        run.run(3)
    assert calls == ["ours"]


# --- targets --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "target", "expected"),
    [
        (0.97, ">= 0.97", True),
        (0.969, ">= 0.97", False),
        (1.15, "<= 1.15", True),
        (1.16, "<=1.15", False),
        (1.0, "> 1", False),
        (0.9, "< 1", True),
        (0.0, "== 0", True),
        (1e-9, "== 0", False),
        (-3.0, "<= -2.5e0", True),
    ],
)
def test_a_target_holds_by_value_alone(value: float, target: str, expected: bool) -> None:
    assert bench.holds(value, target) is expected


def test_a_missing_value_meets_no_target() -> None:
    assert not any(bench.holds(None, target) for target in ("<= 1", ">= 0", "== 0"))


@pytest.mark.parametrize("target", ["", "0.97", "=> 1", "at least 1", ">= fast", ">= 1 or so"])
def test_a_target_that_is_no_comparison_is_refused_when_registered(target: str) -> None:
    with pytest.raises(ValueError, match=r"such as '>= 0\.97'"):
        a_bench(ours=1.0).figure("time", unit="s", target=target, uses=["ours"])


# --- spread and cost ------------------------------------------------------------------------------


def test_the_spread_of_known_numbers() -> None:
    assert bench.spread([5, 1, 100, 2, 3]) == bench.Spread(median=3, low=1, high=100, mad=2)


@given(st.lists(FINITE, min_size=1))
def test_the_median_lies_between_the_extremes_and_the_mad_within_their_distance(
    numbers: list[float],
) -> None:
    found = bench.spread(numbers)

    assert found.low <= found.median <= found.high
    assert 0 <= found.mad <= found.high - found.low


def test_cpu_seconds_count_children_that_were_waited_for() -> None:
    busy = "import time\nwhile time.process_time() < 0.3: pass"

    cost = bench.cost_of(lambda: subprocess.run([sys.executable, "-c", busy], check=True))

    assert cost.cpu_s >= 0.3


# --- the document ---------------------------------------------------------------------------------


def a_document(*, quick: bool = False) -> bench.Document:
    run = bench.Bench("demo", quick=quick)
    run.system("ours", lambda: 0.5, unit="s")
    run.system("rival", refuses, unit="s")
    run.figure("ours", unit="s", target="<= 1", uses=["ours"])
    run.figure("slow", unit="s", target="<= 0.1", uses=["ours"])
    run.figure(
        "over rival", unit="ratio", target="<= 1", uses=["ours", "rival"], value=lambda a, b: a / b
    )
    machine = {"name": "Example CPU @ 2.5GHz, 2 cores", "memory": "8 GiB"}
    return bench.document(
        run, run.run(2), date=DATE, machine=machine, versions={"python": "3.11.2"}
    )


def test_the_document_has_exactly_the_agreed_keys() -> None:
    result = a_document()

    assert list(result) == ["bench", "date", "machine", "versions", "rounds", "figures"]
    assert list(result["figures"][0]) == ["name", "value", "unit", "target", "holds", "rounds"]
    assert list(result["figures"][2]) == [
        "name",
        "value",
        "unit",
        "target",
        "holds",
        "rounds",
        "reason",
    ]
    assert result["date"] == "2026-11-21T12:30:00+00:00"
    assert json.loads(json.dumps(result, allow_nan=False)) == result


def test_the_document_says_what_holds_and_what_does_not() -> None:
    assert [figure["holds"] for figure in a_document()["figures"]] == [True, False, False]


def test_a_quick_run_says_so_in_its_document_and_on_its_page() -> None:
    result = a_document(quick=True)

    assert result["bench"] == "demo (quick)"
    assert "A quick run" in bench.render(result)
    assert "A quick run" not in bench.render(a_document())


def test_a_run_with_flags_says_so_in_its_document() -> None:
    run = bench.Bench("demo", quick=True, flags=frozenset({"once"}))

    result = bench.document(run, run.run(1), date=DATE, machine={"name": "Example"}, versions={})

    assert result["bench"] == "demo (once) (quick)"
    assert "A quick run" in bench.render(result)


def test_a_bench_that_measures_in_its_own_way_says_how() -> None:
    run = bench.Bench("demo", quick=False, method="Each of them ran once.")

    result = bench.document(run, run.run(1), date=DATE, machine={"name": "Example"}, versions={})

    assert "## Method\n\nEach of them ran once.\n" in bench.render(result)
    assert bench.ROUNDS not in bench.render(result)
    assert bench.ROUNDS in bench.render(a_document())


# --- pages ----------------------------------------------------------------------------------------


def test_a_page_shows_targets_that_do_not_hold_and_why() -> None:
    page = bench.render(a_document())

    assert "1 of 3 targets hold." in page
    assert "| slow | 0.5 | 0.5 .. 0.5 | 0 | s | <= 0.1 | NO |" in page
    assert "- slow: 0.5, target <= 0.1" in page
    assert "- over rival: rival: the rival is not installed; pip install rival, target <= 1" in page


def test_a_page_names_machine_and_versions_and_holds_every_raw_number() -> None:
    page = bench.render(a_document())

    assert page.startswith("# demo: Example CPU @ 2.5GHz, 2 cores, 2026-11-21\n")
    assert "| memory | 8 GiB |" in page
    assert "| python | 3.11.2 |" in page
    assert (
        "|  | 1 | 2 |\n| --- | --- | --- |\n| ours | 0.5 | 0.5 |\n| figure: ours | 0.5 | 0.5 |"
        in page
    )


def test_every_table_row_of_a_page_has_as_many_cells_as_its_title() -> None:
    result = a_document()
    result["machine"]["name"] = "a | b"
    blocks = [
        block.splitlines() for block in bench.render(result).split("\n\n") if block.startswith("| ")
    ]

    assert len(blocks) == 3
    for block in blocks:
        assert len({line.replace("\\|", "").count("|") for line in block}) == 1


def test_a_page_is_named_by_what_hardware_and_date_with_its_numbers_beside_it(
    tmp_path: Path,
) -> None:
    result = a_document()

    page = bench.write_page(result, tmp_path)

    assert page.name == "demo_example-cpu-2-5ghz-2-cores_2026-11-21.md"
    assert json.loads(page.with_suffix(".json").read_text()) == result


@pytest.mark.parametrize("page", sorted(PAGES.glob("*_*.md")), ids=lambda page: page.stem)
def test_a_committed_page_shows_the_numbers_beside_it(page: Path) -> None:
    assert page.read_text() == bench.render(json.loads(page.with_suffix(".json").read_text()))


# --- the programs ---------------------------------------------------------------------------------

SCRIPT = f"""#!/usr/bin/env python3
'''A bench for the test of the harness.'''
import sys
import time
sys.path.insert(0, {str(ROOT / "scripts" / "lib")!r})
import bench
def define(run):
    run.system("ours", lambda: 2.0 if run.quick else 1.0, unit="s")
    run.figure("time", unit="s", target="<= 1.5", uses=["ours"])
if __name__ == "__main__":
    raise SystemExit(bench.main(__file__, define, rounds=3, quick_rounds=2))
"""


def program(
    *command: str | Path, monkeypatch: pytest.MonkeyPatch
) -> subprocess.CompletedProcess[str]:
    monkeypatch.setenv(bench.THIS_PYTHON, "1")
    line = [sys.executable, *map(str, command)]
    return subprocess.run(line, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(("options", "rounds", "holds"), [([], 3, True), (["--quick"], 2, False)])
def test_a_bench_script_prints_its_table_and_writes_its_json(
    options: list[str], rounds: int, holds: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine").write_text(SCRIPT)

    done = program(
        tmp_path / "mine", *options, "--json", tmp_path / "raw.json", monkeypatch=monkeypatch
    )

    assert done.returncode == 0, done.stderr
    assert f"<= 1.5   {'yes' if holds else 'NO'}" in done.stdout
    result = json.loads((tmp_path / "raw.json").read_text())
    assert [(len(figure["rounds"]), figure["holds"]) for figure in result["figures"]] == [
        (rounds, holds)
    ]
    assert {"python", "kernel", "torch", "numpy", "infinity-engine", "commit"} == set(
        result["versions"]
    )
    assert {"name", "cpu", "cores", "memory", "gpus"} <= set(result["machine"])
    assert not (tmp_path / "raw.json.part").exists()


def test_a_bench_that_is_killed_leaves_the_rounds_that_it_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ends_in_the_last = "lambda: os._exit(9) if len(run.rounds) == 2 else 1.0"
    source = SCRIPT.replace("lambda: 2.0 if run.quick else 1.0", ends_in_the_last)
    (tmp_path / "mine").write_text(source.replace("import sys", "import os, sys", 1))

    done = program(tmp_path / "mine", "--json", tmp_path / "raw.json", monkeypatch=monkeypatch)

    assert done.returncode == 9
    assert not (tmp_path / "raw.json").exists()
    left = json.loads((tmp_path / "raw.json.part").read_text())
    [figure] = left["figures"]
    assert figure["rounds"] == [1.0, 1.0]
    assert "The bench did not end: rounds are missing." in bench.render(left)
    assert "did not end" not in bench.render(a_document())


def test_a_bench_script_shows_what_only_some_rounds_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    phases = SCRIPT.replace(
        "lambda: 2.0 if run.quick else 1.0",
        "lambda: {'update': 1.0} | ({} if len(run.rounds) == 2 else {'overlap': 3.0})",
    ).replace('uses=["ours"]', 'uses=["ours: update"]')
    figure = 'run.figure("late", unit="s", target="<= 1.5", uses=["ours: overlap"])'
    (tmp_path / "mine").write_text(phases)

    done = program(tmp_path / "mine", "--json", tmp_path / "raw.json", monkeypatch=monkeypatch)

    assert done.returncode == 0, done.stderr
    assert "ours: overlap" in done.stdout
    result = json.loads((tmp_path / "raw.json").read_text())
    assert "| ours: overlap | 3 | 3 |  |" in bench.render(result)
    # A figure of it has no value, and the others keep theirs.
    (tmp_path / "mine").write_text(phases.replace("if __name__", f"    {figure}\nif __name__", 1))
    done = program(tmp_path / "mine", "--json", tmp_path / "raw.json", monkeypatch=monkeypatch)
    [update, late] = json.loads((tmp_path / "raw.json").read_text())["figures"]
    assert (update["value"], late["value"]) == (1.0, None)
    assert late["reason"] == "a round measured no ours: overlap"


def test_a_bench_script_is_told_which_of_its_own_flags_were_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = SCRIPT.replace("if run.quick", 'if "long" in run.flags').replace(
        "quick_rounds=2", "quick_rounds=2, flags={'long': 'for long'}"
    )
    (tmp_path / "mine").write_text(source)

    for options, value in ([], 1.0), (["--long"], 2.0):
        done = program(
            tmp_path / "mine", *options, "--json", tmp_path / "raw.json", monkeypatch=monkeypatch
        )

        assert done.returncode == 0, done.stderr
        assert json.loads((tmp_path / "raw.json").read_text())["figures"][0]["value"] == value


def test_a_json_file_that_cannot_be_written_is_refused_before_measuring(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine").write_text(SCRIPT)

    done = program(
        tmp_path / "mine", "--json", tmp_path / "missing" / "raw.json", monkeypatch=monkeypatch
    )

    assert done.returncode == 2
    assert "is not a directory; make it first" in done.stderr


def with_benches(folder: Path, **sources: str) -> Path:
    """Copy scripts/bench/all into a tree of its own, beside the benches given; return it."""
    benches = folder / "scripts" / "bench"
    benches.mkdir(parents=True)
    (folder / "scripts" / "lib").symlink_to(ROOT / "scripts" / "lib")
    for name, source in sources.items():
        (benches / name).write_text(source)
    (benches / "all").write_text((ROOT / "scripts" / "bench" / "all").read_text())
    return benches / "all"


def test_all_runs_the_other_benches_when_one_fails_and_says_which(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = with_benches(tmp_path, broken="raise SystemExit(1)", mine=SCRIPT)

    done = program(
        script,
        "--quick",
        "--out",
        tmp_path / "out",
        "--json",
        tmp_path / "all.json",
        monkeypatch=monkeypatch,
    )

    assert done.returncode == 1
    assert (
        "== 1 ran, 1 failed, 1 targets not met\n  failed: broken\n  not met: mine (quick): time"
        in done.stdout
    )
    assert [result["bench"] for result in json.loads((tmp_path / "all.json").read_text())] == [
        "mine (quick)"
    ]
    assert sorted(path.suffix for path in (tmp_path / "out").iterdir()) == [".json", ".md"]


def test_all_runs_only_the_benches_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = with_benches(tmp_path, broken="raise SystemExit(1)", mine=SCRIPT)

    done = program(script, "--out", tmp_path / "out", "mine", monkeypatch=monkeypatch)

    assert done.returncode == 0, done.stderr
    assert "== 1 ran, 0 failed, 0 targets not met" in done.stdout


def test_all_refuses_a_bench_that_is_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = program(with_benches(tmp_path, mine=SCRIPT), "minne", monkeypatch=monkeypatch)

    assert done.returncode == 2
    assert "no bench named minne; there are: mine" in done.stderr


@pytest.mark.parametrize(
    "script", sorted((ROOT / "scripts" / "bench").iterdir()), ids=lambda path: path.name
)
def test_every_bench_is_executable_and_takes_the_agreed_options(
    script: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = program(script, "--help", monkeypatch=monkeypatch)

    assert os.access(script, os.X_OK)
    assert "--quick" in done.stdout
    assert "--json FILE" in done.stdout
