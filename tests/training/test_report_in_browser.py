"""The report of a run in a headless browser, on a desk and on a phone, light and dark."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from infinity_engine.training.records import BEGAN, ENDED, STEP, RecordedRun, RunDirectory, line_of
from infinity_engine.training.report_page import report_page
from support.browser import browser

PHONE = {"deviceMetrics": {"width": 390, "height": 844, "pixelRatio": 3.0, "touch": True}}
LONG = "/mnt/a-directory-with-a-very-long-name/and-another-one-within-it/for-states-and-parameters"


def page_of(folder: Path) -> Path:
    """Return the page of a run with all that a report can have, long names among it."""
    strip = {"host": [0.5, 1.0], "nvme read": [1.0, 0.0]}
    directory = RunDirectory(folder)
    directory.path.mkdir()
    directory.describe(
        {
            "model": f"{LONG}/model",
            "steps": 40,
            "data": "12 documents, 137 tokens, 12 sequences, padded: each document begins one",
            "files": [f"{LONG}/lines.jsonl"],
            "deciding": {"lr": 1e-3},
            "engine": {"budget": str({"host": "16GiB", "nvme": {LONG: "100GiB"}})},
            "prediction": {
                "step_s": 0.4,
                "phases": {"forward": 0.1, "backward": 0.2, "update": 0.1},
                "rates": {"nvme read": 3e9, "nvme write": 2e9},
                "rates_are": "measured",
                "strips": strip,
                "shown_s": 0.4,
            },
        }
    )
    link: dict[str, Any] = {"bytes": {"states": 1 << 28}, "bytes_per_s": 2.5e9}
    with directory.records.open("w") as records:
        records.write(line_of(BEGAN, step=0))
        for number in range(1, 41):
            fields = {
                "device": "cpu",
                "outcome": "updated",
                "loss": 4.0 / number + 1,
                "lr": 1e-3,
                "gradient_norm": 1.5,
                "tokens": 4096,
                "seconds": 0.5,
                "turn_s": 0.5 + number / 100,
                "phases": {"forward": 0.1, "backward": 0.25, "update": 0.15},
                "waits": {"wait for parameters": 0.02},
                "links": {
                    "nvme read": {**link, "over": "over the step"},
                    "nvme write": {**link, "over": "over the step"},
                },
                "drives": {LONG: {"written_in_all": number << 28, "rated_bytes": 6 * 10**14}},
                "peaks": {
                    "HOST": {"bytes": 3 << 30, "limit": 4 << 30},
                    LONG: {"bytes": 5 << 30, "limit": 100 << 30},
                },
                "held": {"HOST": 2 << 30, LONG: 5 << 30},
                "process_peak_bytes": 5 << 30,
            }
            records.write(line_of(STEP, step=number, **fields))
        records.write(line_of(ENDED, how="finished"))
    spans = [["", "forward", 0, 400], ["", "backward", 400, 800], ["host", "Update", 800, 1000]]
    directory.replace_json(directory.timeline, {"step": 40, "ns": 1000, "spans": spans})
    directory.report.write_text(report_page(RecordedRun.read(folder)))
    return directory.report


@pytest.mark.slow
@pytest.mark.parametrize("is_phone", [False, True], ids=["1280", "390"])
@pytest.mark.parametrize("is_dark", [False, True], ids=["light", "dark"])
def test_the_report_is_readable_without_console_errors(
    tmp_path: Path, is_phone: bool, is_dark: bool
) -> None:
    page = page_of(tmp_path / "run")
    options = {"mobileEmulation": PHONE} if is_phone else {}

    with browser(tmp_path, "--window-size=1280,900", **options) as session:
        scheme = {"name": "prefers-color-scheme", "value": "dark" if is_dark else "light"}
        session.call(
            "/goog/cdp/execute",
            {"cmd": "Emulation.setEmulatedMedia", "params": {"features": [scheme]}},
        )
        session.call("/url", {"url": page.as_uri()})
        width = session.value("innerWidth")
        widest = session.value("document.documentElement.scrollWidth")
        console = session.console()
        outside = session.value(
            "performance.getEntriesByType('resource').map((entry) => entry.name)"
        )
        smallest = session.value(
            "Math.min(...[...document.querySelectorAll('body *')].filter((part) => "
            "[...part.childNodes].some((node) => node.nodeType === 3 && node.data.trim()))"
            ".map((part) => parseFloat(getComputedStyle(part).fontSize)))"
        )
        drawn = session.value(
            "[...document.querySelectorAll('svg')].every((svg) => "
            "svg.getBoundingClientRect().width > 150 && svg.getBoundingClientRect().height > 15)"
        )
        behind = session.value("getComputedStyle(document.body).backgroundColor")
        words = session.value("getComputedStyle(document.body).color")

    assert console == []
    assert outside == []
    assert width == (390 if is_phone else pytest.approx(1280, abs=20))
    assert widest <= width
    assert smallest >= 12
    assert drawn
    assert contrast(behind, words) >= 7
    assert (luminance(behind) < 0.5) == is_dark


def luminance(colour: str) -> float:
    """Return how light a colour such as "rgb(1, 2, 3)" is, as WCAG has it."""
    parts = [int(part) / 255 for part in colour[colour.index("(") + 1 : -1].split(",")[:3]]
    linear = [
        part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts
    ]
    return sum(weight * part for weight, part in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def contrast(one: str, other: str) -> float:
    """Return the contrast of two colours, as WCAG has it."""
    darker, lighter = sorted((luminance(one), luminance(other)))
    return (lighter + 0.05) / (darker + 0.05)
