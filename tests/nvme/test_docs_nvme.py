"""docs/nvme.md and README.md keep their word: their programs run without torch, their tables and
flags are real.
"""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import fields
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

import deepnvme
from deepnvme import errors
from deepnvme.cli import bench, cp, doctor, ls, tune, verify
from deepnvme.cli.main import main
from deepnvme.machine.backends import BACKEND_VARIABLE, CHAIN
from deepnvme.machine.profile import PROFILE_VARIABLE, Settings
from deepnvme.queue.queue import DriveStats, IOQueue, QueueStats
from deepnvme.sizes import format_bytes
from support.nvme_programs import output_of, run_program

ROOT = Path(__file__).resolve().parents[2]
PAGES = ("README.md", "docs/nvme.md", "distributions/deepnvme/README.md")
NVME_PAGE = (ROOT / "docs/nvme.md").read_text()
COMMANDS = (doctor.NAME, bench.NAME, tune.NAME, ls.NAME, cp.NAME, verify.NAME)
WARNED = ("error", "default::deepnvme.BackendFallbackWarning")
WITHOUT_TORCH = """
import sys


class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "torch":
            raise ImportError("torch is refused here")


sys.meta_path.insert(0, Refuse())
"""


def sections(text: str) -> dict[str, str]:
    """Return the text under each heading of the second level."""
    parts = re.split(r"^## (.+)$", text, flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def blocks(text: str, language: str) -> list[str]:
    """Return the code blocks of a language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL)


def programs() -> dict[str, str]:
    """Return, by page and section, what its Python blocks amount to when they run one after the
    other.
    """
    found = {}
    for page in PAGES:
        for title, text in sections((ROOT / page).read_text()).items():
            if program := "\n".join(blocks(text, "python")):
                found[f"{page}: {title}"] = program
    return found


PROGRAMS = programs()


def imports_torch(program: str) -> bool:
    return re.search(r"^import torch$", program, flags=re.MULTILINE) is not None


def script_of(programs: Iterable[str], folder: Path, *, prelude: str = "") -> str:
    """Return what runs them one after the other, as a reader would who copies them into files."""
    start = [prelude, "import os, runpy"]
    for number, program in enumerate(programs):
        place = folder / str(number)
        place.mkdir()
        (place / "example.py").write_text(program)
        start += [f"os.chdir({str(place)!r})", "runpy.run_path('example.py', run_name='__main__')"]
    return "\n".join(start)


def run(programs: Iterable[str], folder: Path, *, prelude: str = "") -> None:
    """Run them with warnings as errors."""
    script = script_of(programs, folder, prelude=prelude)
    fallbacks = [part for warned in WARNED for part in ("-W", warned)]
    output_of(
        run_program(script, folder=folder, python=fallbacks, environment={PROFILE_VARIABLE: ""})
    )


@pytest.mark.parametrize(
    "name", [name for name, program in PROGRAMS.items() if not imports_torch(program)]
)
def test_a_program_of_the_docs_runs_without_torch(name: str, tmp_path: Path) -> None:
    run([PROGRAMS[name]], tmp_path, prelude=WITHOUT_TORCH)


@pytest.mark.skipif(find_spec("torch") is None, reason="torch is not installed")
def test_the_programs_of_the_docs_that_are_for_torch_run(tmp_path: Path) -> None:
    from support.warm_programs import run_warm  # which has imported torch, as that takes seconds

    script = script_of(filter(imports_torch, PROGRAMS.values()), tmp_path)
    output_of(run_warm(script, folder=tmp_path, warned=WARNED))


def test_only_the_sections_for_torch_import_it() -> None:
    assert [
        name for name, program in PROGRAMS.items() if "torch" in program and imports_torch(program)
    ] == [
        "README.md: The engine in 15 lines",
        "docs/nvme.md: With torch",
        "docs/nvme.md: State dicts",
    ]


def test_the_promised_scripts_are_there_and_whole() -> None:
    for title in ("With numpy alone", "With asyncio"):
        program = PROGRAMS[f"docs/nvme.md: {title}"]
        assert program.startswith('"""')
        assert '\nif __name__ == "__main__":\n' in program


def test_the_refusal_of_torch_works(tmp_path: Path) -> None:
    done = run_program(f"{WITHOUT_TORCH}\nimport torch", folder=tmp_path)

    assert "torch is refused here" in done.stderr


def test_a_program_that_fails_is_noticed(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="exit status 1"):
        run(["assert 1 == 1", "assert 1 == 2"], tmp_path)


# --- the command line -----------------------------------------------------------------------------


def flags_of(command: str, capsys: pytest.CaptureFixture[str]) -> set[str]:
    """Return the options that `--help` names."""
    with pytest.raises(SystemExit):
        main([command, "--help"])
    return set(re.findall(r"--[a-z][a-z-]*", capsys.readouterr().out)) - {"--help"}


def shown_commands() -> list[str]:
    """Return every command line with deepnvme that a page shows, in a block or in the text."""
    found = []
    for page in PAGES:
        text = (ROOT / page).read_text()
        found += re.findall(
            r"^\$ (deepnvme .+)$", "\n".join(blocks(text, "console")), flags=re.MULTILINE
        )
        found += re.findall(r"`(deepnvme [a-z]+[^`]*)`", text)
    return found


@pytest.mark.parametrize("command", COMMANDS)
def test_every_flag_of_a_command_is_documented(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    [text] = re.findall(
        rf"^\*\*`deepnvme {command} .*?(?=^\*\*`|^All of them)", NVME_PAGE, re.MULTILINE | re.DOTALL
    )

    assert flags_of(command, capsys) == set(re.findall(r"--[a-z][a-z-]*", text))


@pytest.mark.parametrize("line", shown_commands())
def test_a_command_that_is_shown_exists_with_its_flags(
    line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    command = line.split()[1]

    assert command in COMMANDS
    assert set(re.findall(r"--[a-z][a-z-]*", line)) <= flags_of(command, capsys)


def test_every_command_is_shown_with_its_output() -> None:
    shown = blocks(sections(NVME_PAGE)["The command line"], "console")

    assert [block.split()[2] for block in shown] == list(COMMANDS)
    assert all(len(block.splitlines()) > 5 for block in shown)


def test_the_command_is_installed() -> None:
    done = subprocess.run(
        [sys.executable, "-c", "from importlib.metadata import entry_points as e;"
         "print([p.value for p in e(group='console_scripts') if p.name == 'deepnvme'])"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip

    # An editable install keeps the function's name of the day that it was made.
    assert done.stdout.startswith("['deepnvme.cli.start:")


@pytest.mark.parametrize("file", ["pyproject.toml", "distributions/deepnvme/pyproject.toml"])
def test_the_installed_command_is_the_one_that_owns_the_process(file: str) -> None:
    text = (Path(__file__).parents[2] / file).read_text()

    assert '\ndeepnvme = "deepnvme.cli.start:command"\n' in text


# --- the tables -----------------------------------------------------------------------------------


def table(section: str, *, cells: int) -> list[list[str]]:
    """Return the rows of the section's tables that have so many cells, headings left out."""
    rows = [
        [cell.strip() for cell in line.split("|")]
        for line in re.findall(r"^\|(.+)\|$", sections(NVME_PAGE)[section], flags=re.MULTILINE)
    ]
    return [row for row in rows if len(row) == cells and row[0].startswith("`")]


def names(cell: str) -> list[str]:
    return re.findall(r"`([A-Za-z_0-9]+)`", cell)


def test_every_setting_is_documented_with_its_default() -> None:
    shown = {row[0].strip("` "): row[1].strip("` ") for row in table("Settings", cells=3)}

    parameters = dict(inspect.signature(IOQueue).parameters)
    assert set(shown) == set(parameters)
    for name, parameter in parameters.items():
        default: Any = getattr(Settings(), name, parameter.default)
        if name in ("chunk_bytes", "inflight_bytes"):
            assert shown[name] == format_bytes(default)
        elif name in ("user_memory", "when_full"):
            assert shown[name] == f"{type(default).__name__}.{default.name}"
        else:
            assert shown[name] == repr(default).replace("'", '"')


def test_every_error_is_documented_with_what_else_it_is() -> None:
    shown = {names(row[0])[0]: names(row[1]) for row in table("Errors", cells=3)}

    classes = {
        name: value for name in errors.__all__ if inspect.isclass(value := getattr(errors, name))
    }
    assert set(shown) == set(classes)
    for name, error in classes.items():
        assert shown[name] == [
            base.__name__ for base in error.__bases__ if base is not errors.NVMeError
        ]


def test_every_statistic_is_documented() -> None:
    shown = [name for row in table("Statistics", cells=2) for name in names(row[0])]

    assert shown == [field.name for field in fields(DriveStats)]
    for field in fields(QueueStats):
        assert f"`{field.name}`" in sections(NVME_PAGE)["Statistics"]


def test_every_backend_is_documented_in_the_order_of_the_chain() -> None:
    assert tuple(names(row[0])[0] for row in table("Backends", cells=3)) == CHAIN


def test_every_public_name_is_mentioned() -> None:
    missing = [name for name in deepnvme.__all__ if name not in NVME_PAGE]

    assert missing == []


@pytest.mark.parametrize("variable", [BACKEND_VARIABLE, PROFILE_VARIABLE, "XDG_CONFIG_HOME"])
def test_the_environment_variables_are_documented(variable: str) -> None:
    assert variable in NVME_PAGE


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str) -> None:
    path = ROOT / page
    text = path.read_text()
    anchors = {
        re.sub(r"[^a-z0-9 -]", "", heading.lower()).replace(" ", "-")
        for heading in re.findall(r"^#+ (.+)$", text, flags=re.MULTILINE)
    }

    for target in re.findall(r"\]\(([^)]+)\)", text):
        place, _, anchor = target.partition("#")
        assert not anchor or anchor in anchors, target
        assert not place or place.startswith("https:") or (path.parent / place).exists(), target
