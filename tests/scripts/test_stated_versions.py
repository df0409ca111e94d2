"""Supported versions are decided in pyproject.toml; whoever repeats one says the same."""

from __future__ import annotations

import re
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

import env
from infinity_engine.machine.packages import OLDEST_TORCH

Pyproject = dict[str, Any]


def text_of(name: str) -> str:
    return (env.ROOT / name).read_text()


def required(pyproject: Pyproject) -> dict[str, SpecifierSet]:
    """Return everything that building and running ask for, extras included."""
    project = pyproject["project"]
    extras = [line for extra in project["optional-dependencies"].values() for line in extra]
    listed = map(
        Requirement, [*pyproject["build-system"]["requires"], *project["dependencies"], *extras]
    )
    cmake = SpecifierSet(pyproject["tool"]["scikit-build"]["cmake"]["version"])
    return {"cmake": cmake, **{one.name: one.specifier for one in listed}}


def pins() -> list[Requirement]:
    files = ("scripts/requirements.txt", "scripts/requirements-check.txt")
    lines = [
        line
        for name in files
        for line in text_of(name).splitlines()
        if line and not line.startswith("#")
    ]
    return [Requirement(line) for line in [*lines, env.TORCH]]


# --- Python ---------------------------------------------------------------------------------------


def test_the_scripts_use_the_pythons_that_the_classifiers_name(pyproject: Pyproject) -> None:
    prefix = "Programming Language :: Python :: "
    named = [
        line.removeprefix(prefix)
        for line in pyproject["project"]["classifiers"]
        if line.startswith(prefix)
    ]

    assert tuple(named) == env.SUPPORTED
    assert named == [f"3.{minor}" for minor in range(int(named[0][2:]), int(named[-1][2:]) + 1)]


def test_the_oldest_python_is_what_the_package_requires_and_what_the_tools_check_for(
    pyproject: Pyproject,
) -> None:
    oldest = env.SUPPORTED[0]

    assert pyproject["project"]["requires-python"] == f">={oldest}"
    assert pyproject["tool"]["mypy"]["python_version"] == oldest
    assert pyproject["tool"]["ruff"]["target-version"] == f"py{oldest.replace('.', '')}"


@pytest.mark.parametrize(
    "page",
    ["README.md", "CONTRIBUTING.md", "docs/nvme.md", "distributions/deepnvme/README.md"],
)
def test_every_page_names_the_same_pythons(page: str) -> None:
    ranges = re.findall(r"Python\s+(3\.\d+)\s*(?:-|to)\s*(3\.\d+)", text_of(page))

    assert set(ranges) == {(env.SUPPORTED[0], env.SUPPORTED[-1])}


# --- libraries and tools --------------------------------------------------------------------------


def test_the_engine_refuses_the_torch_that_the_extra_refuses(pyproject: Pyproject) -> None:
    assert str(required(pyproject)["torch"]) == f">={'.'.join(map(str, OLDEST_TORCH))}"


def test_cmake_itself_asks_for_the_version_that_the_wheel_asks_for(pyproject: Pyproject) -> None:
    asked = re.findall(
        r"^cmake_minimum_required\(VERSION ([\d.]+)\.\.\.", text_of("CMakeLists.txt"), re.MULTILINE
    )

    assert [f">={oldest}" for oldest in asked] == [str(required(pyproject)["cmake"])]


def test_the_decision_on_dependencies_names_the_versions_required(pyproject: Pyproject) -> None:
    rows = re.findall(r"^\| (.+?) \|", text_of("docs/decisions/0001-dependencies.md"), re.MULTILINE)
    told = {name: bound for row in rows for name, bound in re.findall(r"([\w-]+) >= ([\d.]+)", row)}

    bounds = {name: str(bound).removeprefix(">=") for name, bound in required(pyproject).items()}
    assert told == {name: bound for name, bound in bounds.items() if "cupy" not in name}


def test_what_is_pinned_is_allowed_and_whatever_is_required_is_pinned(pyproject: Pyproject) -> None:
    bounds = required(pyproject)

    for pin in pins():
        assert re.fullmatch(r"==[\d.]+", str(pin.specifier)), f"{pin} is not pinned to one version"
        assert bounds.get(pin.name, SpecifierSet()).contains(str(pin.specifier)[2:]), (
            f"{pin}: wanted {bounds[pin.name]}"
        )
    assert {name for name in bounds if "cupy" not in name} <= {pin.name for pin in pins()}
