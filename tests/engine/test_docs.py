"""docs/memory.md keeps its word: its program runs, and prints what it says that it prints."""

from __future__ import annotations

import re
from pathlib import Path

from support.nvme_programs import output_of, run_program

ROOT = Path(__file__).resolve().parents[2]


def test_the_program_of_the_memory_page_runs_and_prints_what_the_page_says(tmp_path: Path) -> None:
    page = (ROOT / "docs/memory.md").read_text()
    blocks = re.findall(r"^```(python|text)\n(.*?)^```$", page, flags=re.MULTILINE | re.DOTALL)
    program = "\n".join(text for language, text in blocks if language == "python")
    said = [text.strip() for language, text in blocks if language == "text"]
    said += [
        comment.split(":")[0].strip() for comment in re.findall(r"^\s*print\(.*\)  # (.*)$", program, re.MULTILINE)
    ]

    printed = output_of(run_program(program, folder=tmp_path, python=["-W", "error"])).splitlines()

    assert sorted(printed) == sorted(said)
