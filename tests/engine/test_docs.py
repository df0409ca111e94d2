"""The pages on the engine keep their word: programs run and print what is said, the table of
settings is the code's.
"""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path

import pytest

from settings_table import settings_table
from support.nvme_programs import output_of
from support.warm_programs import run_warm

ROOT = Path(__file__).resolve().parents[2]


def test_the_table_of_settings_is_that_of_the_code() -> None:
    page = (ROOT / "docs/quickstart.md").read_text()
    rows = [
        f"| `{row.name}` | {row.kind} | `{row.default}` | {row.meaning} |"
        for row in settings_table()
    ]

    assert page.split("## Settings")[1].strip().splitlines()[-len(rows) :] == rows


@pytest.mark.parametrize(
    "name",
    [
        "building",
        "calibration",
        "checkpoints",
        "memory",
        "migrate-from-deepspeed",
        "quickstart",
        "ranks",
    ],
)
def test_the_program_of_a_page_runs_and_prints_what_the_page_says(
    name: str, tmp_path: Path
) -> None:
    run_page(name, tmp_path)


def test_the_quickstart_that_was_stopped_ends_with_the_same_bits(tmp_path: Path) -> None:
    page = (ROOT / "docs/quickstart.md").read_text()
    program, *_ = re.findall(r"^```python\n(.*?)^```$", page, flags=re.MULTILINE | re.DOTALL)
    program += "\nprint(torch.cat([value.flatten() for value in model.parameters()]).tolist())\n"
    stopped = program.replace("eng.steps < 20", "eng.steps < 11").replace('"30min"', "1")
    assert stopped != program.replace('"30min"', "1")
    straight, resumed = tmp_path / "straight", tmp_path / "resumed"
    straight.mkdir()
    resumed.mkdir()
    expected = output_of(run_warm(program, folder=straight))
    assert output_of(run_warm(stopped, folder=resumed)) != expected
    assert output_of(run_warm(program, folder=resumed)) == expected


def test_the_program_of_the_page_on_hugging_face_runs_as_the_page_says(tmp_path: Path) -> None:
    for package in ("transformers", "peft"):
        if find_spec(package) is None:
            pytest.skip(f"the page is about {package}, which is not installed")

    # peft and the page use the old names
    names = ("gradient_checkpointing_enable", "is_gradient_checkpointing")
    run_page("huggingface", tmp_path, *(f"ignore:`{name}` is dep:FutureWarning" for name in names))


def test_the_program_of_the_page_on_activations_runs_as_the_page_says(tmp_path: Path) -> None:
    if find_spec("transformers") is None:
        pytest.skip("the page is about transformers as well, which is not installed")

    run_page("activations", tmp_path)


def run_page(name: str, folder: Path, *allowed: str) -> None:
    """Run the program of a page, where warnings but those `allowed` are errors, and compare what it
    prints.
    """
    page = (ROOT / f"docs/{name}.md").read_text()
    blocks = re.findall(r"^```(python|text)\n(.*?)^```$", page, flags=re.MULTILINE | re.DOTALL)
    program = "\n".join(text for language, text in blocks if language == "python")
    said = [line for language, text in blocks if language == "text" for line in text.splitlines()]
    said += [
        comment.split(": ")[0].strip()
        for comment in re.findall(r"^\s*print\(.*\)  # (.*)$", program, re.MULTILINE)
    ]

    printed = output_of(run_warm(program, folder=folder, warned=("error", *allowed))).splitlines()

    assert sorted(printed) == sorted(said)


def test_the_program_of_the_page_on_drives_runs_within_its_budget(tmp_path: Path) -> None:
    page = (ROOT / "docs/larger-than-ram.md").read_text()
    programs = re.findall(r"^```python\n(.*?)^```$", page, flags=re.MULTILINE | re.DOTALL)

    printed = output_of(run_warm(programs[0], folder=tmp_path, warned=("error",)))

    assert re.search(r"^nvme read .*gradients .*states ", printed, re.MULTILINE)
    assert re.search(r"^nvme write .*gradients ", printed, re.MULTILINE)
    held = re.findall(r"^(?:HOST|NVME) (\d+) of (\d+)$", printed, re.MULTILINE)
    assert len(held) == 2
    assert all(0 < int(peak) <= int(limit) for peak, limit in held)
