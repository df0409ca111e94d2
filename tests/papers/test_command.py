"""`scripts/papers/reproduce`: what it prints and writes, and how it refuses."""

from __future__ import annotations

import json
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import pytest

from papers.command import main

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
REFUSE_TORCH = """
import sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "torch":
            raise ImportError("torch is refused here")
sys.meta_path.insert(0, Refuse())
from papers.command import main
sys.exit(main(sys.argv[1:]))
"""


@pytest.fixture(autouse=True)
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "160")


class Tags(HTMLParser):
    """Collects what a page is made of and what it would fetch."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.fetched: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.fetched += [value or "" for name, value in attrs if name in {"src", "href"}]


def run(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> str:
    status = main([*map(str, arguments)])
    shown = capsys.readouterr()

    assert (status, shown.err) == (0, "")
    return shown.out


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    status = main(arguments)
    shown = capsys.readouterr()

    assert (status, shown.out) == (2, "")
    return shown.err


def test_a_figure_shows_published_beside_computed_with_the_status(
    capsys: pytest.CaptureFixture[str],
) -> None:
    out = run(capsys, "--paper", "dos", "--figure", "7")

    assert "Figure 7, figure 9: Iterations" in out
    [row] = [
        line
        for line in out.splitlines()
        if line.startswith("20B: iteration, times faster than ZeRO-3")
    ]
    assert row.rstrip().split("  ")[-1].startswith("matches (+1%)")
    assert "2-2.5 x" in row


def test_a_figure_shows_the_points_of_its_plot(capsys: pytest.CaptureFixture[str]) -> None:
    out = run(capsys, "--paper", "dos", "--figure", "15")

    _, plot = out.split("15: busy by share")
    shares = [line.split() for line in plot.splitlines() if line[:1].strip() == "" and line.split()]
    rows = {row[0]: row[1:] for row in shares if len(row) == 5 and row[0].isdigit()}
    assert list(rows) == [str(share) for share in range(0, 101, 10)]
    assert rows["0"][1] == "0"  # none visits: the GPU updates nothing
    assert rows["100"][0] == "0"  # all do: the CPU does not


def test_json_has_the_points_of_plots(capsys: pytest.CaptureFixture[str]) -> None:
    report = json.loads(run(capsys, "--paper", "dos", "--figure", "15", "--json"))

    [chart] = report["comparisons"][0]["charts"]
    assert [series["name"] for series in chart["series"]] == [
        "CPU",
        "GPU updates",
        "PCIe up",
        "PCIe down",
    ]
    assert all(len(series["points"]) == 11 for series in chart["series"])


def test_what_does_not_match_says_why(capsys: pytest.CaptureFixture[str]) -> None:
    out = run(capsys, "--paper", "zero-infinity", "--table", "1")

    assert "inconsistent in the paper" in out
    assert "the abstract needs 800 GPUs" in out


def test_a_figure_without_its_letter_is_all_of_its_parts(
    capsys: pytest.CaptureFixture[str],
) -> None:
    out = run(capsys, "--paper", "zero-infinity", "--figure", "5")

    assert [line[:9] for line in out.splitlines() if line.startswith("Figure")] == [
        "Figure 5a",
        "Figure 5b",
        "Figure 5c",
    ]


@pytest.mark.parametrize(("paper", "least"), [("zero-infinity", 13), ("dos", 15)])
def test_json_has_every_comparison_with_the_summary(
    capsys: pytest.CaptureFixture[str], paper: str, least: int
) -> None:
    report = json.loads(run(capsys, "--paper", paper, "--json"))
    statuses = [cell["status"] for one in report["comparisons"] for cell in one["cells"]]

    assert report["schema"] == 1
    assert len(report["comparisons"]) >= least
    assert {status: statuses.count(status) for status in report["summary"]} == report["summary"]


@pytest.mark.parametrize(
    "what", [("--paper", "dos"), ("--paper", "zero-infinity"), ("--scale",)], ids=" ".join
)
def test_a_page_stands_by_itself_with_its_plots(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, what: tuple[str, ...]
) -> None:
    run(capsys, *what, "--html", tmp_path / "page.html")
    tags = Tags()
    tags.feed((tmp_path / "page.html").read_text())

    assert "svg" in tags.tags
    assert "script" not in tags.tags
    assert tags.fetched == []


def test_plots_are_written_one_to_a_file(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    run(capsys, "--scale", "--machine", "dgx2", "--svg", tmp_path / "new")
    files = sorted((tmp_path / "new").iterdir())

    assert [file.name for file in files] == ["scale-dgx2-strong.svg", "scale-dgx2-weak.svg"]
    assert all(ElementTree.parse(file) for file in files)


def test_scale_as_json_has_each_point_with_its_seconds(capsys: pytest.CaptureFixture[str]) -> None:
    report = json.loads(run(capsys, "--scale", "--machine", "h200_node", "--json"))

    assert len(report["points"]) == 5 * 6 * 2 * 2
    fits = [point for point in report["points"] if point["fits"]]
    assert all(point["step_s"] >= point["passes_s"]["compute"] for point in fits)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--paper", "dos", "--figure", "1"), "expected one of 2, 7, 9"),
        (("--paper", "dos", "--table", "9"), "expected one of 1, 2"),
        (("--paper", "dos", "--machine", "dgx2"), "expected --scale beside it"),
        (("--scale", "--figure", "2"), "expected --paper beside it"),
        (
            ("--scale", "--machine", "dgx_2"),
            "--machine: expected one of dgx2, h200_node (nearest: dgx2)",
        ),
        (
            ("--scale", "--machine", "desktop_4090"),
            "--machine: expected one of dgx2, h200_node, got 'desktop_4090'",
        ),
    ],
)
def test_what_is_not_there_is_refused_with_what_is(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], said: str
) -> None:
    assert said in refused(capsys, *arguments)


def test_a_file_that_cannot_be_written_is_told(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    status = main(["--paper", "dos", "--figure", "2", "--html", str(tmp_path / "no" / "page.html")])

    assert status == 1
    assert "cannot write" in capsys.readouterr().err


def test_a_paper_or_scale_has_to_be_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main([])
    assert "one of the arguments --paper --scale --plans is required" in capsys.readouterr().err


@pytest.mark.parametrize("what", [("--paper", "dos"), ("--scale",)], ids=" ".join)
def test_it_needs_no_torch(what: tuple[str, ...]) -> None:
    run = subprocess.run(
        [sys.executable, "-c", REFUSE_TORCH, *what],
        cwd=SCRIPTS,
        capture_output=True,
        text=True,
        check=False,
    )

    assert run.returncode == 0, run.stderr
