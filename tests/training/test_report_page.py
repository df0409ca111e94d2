"""The report of a run stands by itself, and is there whatever was recorded."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from infinity_engine.cli.main import main
from infinity_engine.training.records import BEGAN, ENDED, STEP, RecordedRun, RunDirectory, line_of
from infinity_engine.training.report_page import report_page

HOSTILE = '"><script>alert(1)</script><img src=x onerror=alert(2)>'
VOID = {"meta", "br", "img", "link"}


class WellFormed(HTMLParser):
    """Checks that each element is closed, and keeps the words that a reader sees."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: set[str] = set()
        self.attributes: set[str] = set()
        self.words: list[str] = []
        self.feed(page)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.tags.add(tag)
        self.attributes.update(name for name, _ in attrs)
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: Any) -> None:
        self.tags.add(tag)
        self.attributes.update(name for name, _ in attrs)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] != "style":
            self.words.append(data)


def made(number: int, **fields: Any) -> str:
    given = {
        "device": "cpu",
        "outcome": "updated",
        "loss": 3.0 / number,
        "lr": 1e-3,
        "tokens": 100,
        "seconds": 0.5,
        "turn_s": 0.5,
        "phases": {"forward": 0.1, "backward": 0.2, "update": 0.2},
        "waits": {"wait for reads": 0.05},
        "links": {
            "nvme read": {"bytes": {"states": 1 << 20}, "bytes_per_s": 1e9, "over": "over the step"}
        },
        "drives": {"/a": {"written_in_all": number * 10**9, "rated_bytes": 10**12}},
        "peaks": {"HOST": {"bytes": 3 << 20, "limit": 4 << 20}},
        "held": {"HOST": 2 << 20},
        "process_peak_bytes": 1 << 30,
    }
    return line_of(STEP, step=number, **{**given, **fields})


def run_of(folder: Path, *lines: str, **files: Any) -> Path:
    folder.mkdir(exist_ok=True)
    directory = RunDirectory(folder)
    directory.records.write_text("".join(lines))
    description = {"model": "/models/tiny", "steps": 4, "data": "3 documents", "files": ["/d.txt"]}
    directory.describe({**description, **files.pop("description", {})})
    if "timeline" in files:
        directory.timeline.write_text(json.dumps(files.pop("timeline")))
    return folder


def page_of(folder: Path) -> WellFormed:
    page = report_page(RecordedRun.read(folder))
    found = WellFormed(page)
    # Nothing is run, and nothing comes from elsewhere.
    assert not found.tags & {"script", "link", "iframe", "object", "base", "form"}
    assert not [name for name in found.attributes if re.fullmatch("on.*|src|href|action", name)]
    assert not re.search(r"url\(|@import|https?://", page)
    for chart in re.findall(r"<svg.*?</svg>", page, re.DOTALL):
        assert ElementTree.fromstring(chart).get("aria-label")
    return found


def words_of(folder: Path) -> str:
    return " ".join(page_of(folder).words)


def whole(folder: Path, **description: Any) -> Path:
    prediction = {
        "step_s": 0.25,
        "phases": {"forward": 0.1},
        "rates": {"nvme read": 2e9},
        "rates_are": "measured",
        "strips": {"host": [0.5, 1.0]},
        "shown_s": 0.3,
    }
    timeline = {
        "step": 4,
        "ns": 1000,
        "spans": [["", "forward", 0, 400], ["", "backward", 400, 800], ["host", "U", 800, 1000]],
    }
    return run_of(
        folder,
        line_of(BEGAN, step=0),
        *(made(number) for number in range(1, 5)),
        line_of(ENDED, how="finished"),
        description={"prediction": prediction, **description},
        timeline=timeline,
    )


def test_a_report_has_loss_memory_time_bandwidth_prediction_and_wear(tmp_path: Path) -> None:
    words = words_of(whole(tmp_path))

    assert "tiny: 4 of 4 steps" in words
    assert "It has finished." in words
    assert "loss: 3 at first, 0.75 at last" in words
    assert "host: at most 3 MiB of 4 MiB" in words
    assert "40% of the step" in words  # forward
    assert "As the planner expects it" in words
    assert re.search(r"drives read\W+1 MiB\W+1 GB/s\W+2 GB/s\W+50%\W+over the step", words)
    assert re.search(r"step\W+250 ms\W+500 ms\W+0\.50", words)
    assert re.search(r"/a\W+4 GB\W+1 TB\W+0\.4000%", words)
    assert re.search(r"wait for reads\W+50 ms", words)


def test_a_report_has_activations_over_time_by_block(tmp_path: Path) -> None:
    parts = [
        ["layers.0", "on drives", 3 << 20, 1_000_000, 9_000_000],
        ["layers.1", "kept", 2 << 20, 2_000_000, 5_000_000],
        ["layers.2", "kept", 1 << 20, 3_000_000, 4_000_000],
    ]
    words = words_of(run_of(tmp_path, made(1), timeline={"step": 1, "activations": parts}))

    assert "What blocks held in step 1" in words
    assert "kept: at most 3 MiB" in words
    assert "on drives: at most 3 MiB" in words
    assert re.search(r"layers\.1\W+kept\W+2 MiB\W+2\.000\W+5\.000", words)


def test_each_picture_has_its_figures_in_words_or_a_table(tmp_path: Path) -> None:
    found = page_of(whole(tmp_path))

    assert {"figure", "figcaption", "table", "caption", "th"} <= found.tags


def test_hostile_text_is_shown_as_text(tmp_path: Path) -> None:
    folder = run_of(
        tmp_path / "run",
        line_of(BEGAN, step=0),
        made(
            1,
            device=HOSTILE,
            outcome=HOSTILE,
            drives={HOSTILE: {"written_in_all": 5}},
            peaks={HOSTILE: {"bytes": 1, "limit": 2}},
            waits={HOSTILE: 1.0},
        ),
        line_of(HOSTILE, tag=HOSTILE, **{HOSTILE: 1}),
        line_of(ENDED, how="failed", error=HOSTILE),
        description={"model": f"/m/{HOSTILE}", "files": [HOSTILE], "engine": {HOSTILE: HOSTILE}},
        timeline={
            "step": 1,
            "ns": 9,
            "spans": [["host", HOSTILE, 0, 9]],
            "activations": [[HOSTILE, HOSTILE, 5, 0, 9]],
        },
    )

    found = page_of(folder)

    assert "img" not in found.tags
    assert sum(HOSTILE in text for text in found.words) >= 9


def test_a_killed_run_says_so(tmp_path: Path) -> None:
    words = words_of(run_of(tmp_path, line_of(BEGAN, step=0), made(1), made(2)[:50]))

    assert "It was killed" in words
    assert "--resume goes on from the last checkpoint" in words
    assert "1 damaged lines" in words
    assert "1 of 4 steps" in words


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("stopped", "It was told to stop, and saved first"),
        ("interrupted", "It was interrupted"),
        ("failed", "It has failed"),
        ("otherwise", "It has ended: otherwise."),
    ],
)
def test_the_report_says_how_a_run_has_ended(tmp_path: Path, how: str, said: str) -> None:
    ended = line_of(ENDED, how=how, error="no space left")

    words = words_of(run_of(tmp_path, line_of(BEGAN, step=0), ended))

    assert said in words
    assert "no space left" in words


def test_a_run_that_goes_on_says_so(tmp_path: Path) -> None:
    folder = run_of(tmp_path, line_of(BEGAN, step=0), made(1))
    with RunDirectory(folder).opened():
        assert "It goes on" in words_of(folder)


def test_an_empty_run_has_a_page(tmp_path: Path) -> None:
    words = words_of(tmp_path)

    assert "no step was recorded" in words
    assert "Nothing was recorded" in words
    assert "run.json is missing" in words


WRONG: tuple[Any, ...] = (None, True, "x", [], {}, [[]], {"a": {"b": []}}, -1, 10**400, 1e-320)


@pytest.mark.parametrize("wrong", WRONG, ids=lambda value: str(value)[:20])
def test_figures_of_another_kind_are_left_out(tmp_path: Path, wrong: Any) -> None:
    names = json.loads(made(1)).keys() - {"event", "step"}
    folder = run_of(
        tmp_path,
        json.dumps({"event": "step", "step": 1, **dict.fromkeys(names, wrong)}) + "\n",
        made(
            2, drives={"/a": wrong}, peaks={"HOST": wrong}, links={"d2h": wrong}, waits={"w": wrong}
        ),
        json.dumps({"event": "ended", "at": wrong, "how": wrong, "error": wrong}) + "\n",
        description={
            **dict.fromkeys(("model", "steps", "data", "files", "deciding", "engine"), wrong),
            "prediction": {
                **dict.fromkeys(("step_s", "phases", "rates", "rates_are", "shown_s"), wrong),
                "strips": {"host": wrong},
            },
        },
        timeline={
            "step": wrong,
            "ns": 5,
            "spans": [wrong, ["", "forward", wrong, wrong]],
            "activations": [wrong, ["0", "kept", wrong, 0, wrong], ["0", "kept", 1, 9, 2]],
        },
    )

    page_of(folder)
    for name in ("prediction", "deciding"):
        page_of(run_of(folder, made(1), description={name: wrong}, timeline={"spans": wrong}))


def test_a_long_run_has_a_page_of_bounded_size(tmp_path: Path) -> None:
    lines = [made(number) for number in range(1, 3001)]

    page = report_page(RecordedRun.read(run_of(tmp_path, *lines)))

    assert len(page) < 200_000
    assert "3,000 of 4 steps" in page


def test_a_loss_that_is_no_number_is_said(tmp_path: Path) -> None:
    words = words_of(run_of(tmp_path, made(1), made(2, loss=float("nan"))))

    assert "1 steps have a loss that is no number" in words


def test_times_of_an_emulated_device_are_marked(tmp_path: Path) -> None:
    words = words_of(run_of(tmp_path, made(1, device="emulated, on its virtual clock")))

    assert "Times are those of a device that is emulated" in words


def test_phases_that_are_only_launched_are_marked(tmp_path: Path) -> None:
    device = "cuda, whose phases are those of the host that launches its work"
    words = words_of(run_of(tmp_path, made(1, device=device)))

    assert f"Times are those of {device}." in words


def test_the_command_writes_the_page_and_says_where(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = whole(tmp_path / "run")

    assert main(["report", str(folder)]) == 0
    assert main(["report", str(folder), "--output", str(tmp_path / "page.html")]) == 0

    pages = [folder / "report.html", tmp_path / "page.html"]
    assert capsys.readouterr().out.split() == [str(page) for page in pages]
    assert pages[0].read_text() == pages[1].read_text()


def test_the_command_refuses_what_is_no_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["report", str(tmp_path / "none")]) == 2
    assert "expected the directory of a run" in capsys.readouterr().err
    assert main(["report", str(tmp_path)]) == 2
    assert "expected the directory of a run" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
    folder = whole(tmp_path / "run")
    assert main(["report", str(folder), "--output", str(tmp_path / "no" / "page.html")]) == 2
    assert "cannot write" in capsys.readouterr().err
