"""`infinity simulate`: a plan on a machine that changes after it was made."""

from __future__ import annotations

import json
from typing import Any

import pytest

from infinity_engine.cli.main import main

ON_DRIVES = ("--model", "llama-3.2-1b", "--gpu-mem", "6GiB", "--ram", "8GiB", "--nvme", "100GB")


@pytest.fixture
def simulate(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that runs `infinity simulate`, and returns its exit status, output and
    errors.
    """

    def run(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setenv("COLUMNS", "200")
        status = main(["simulate", *arguments])
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return run


def test_slower_drives_make_the_same_plan_longer_and_planning_again_shortens_it(
    simulate: Any,
) -> None:
    status, out, _ = simulate(*ON_DRIVES, "--drives-at", "0.25", "--json")
    answer = json.loads(out)

    assert status == 0
    planned, same, again = (
        answer[name]["step_s"] for name in ("planned", "same_plan", "planned_again")
    )
    assert 2 * planned < same < 4.1 * planned
    assert again <= 1.001 * same
    assert "backward" in answer["planned"]["phases"]


def test_a_change_of_nothing_that_is_used_changes_no_second(simulate: Any) -> None:
    fits = ("--model", "gpt2", "--gpu-mem", "24GiB", "--ram", "64GiB")
    answer = json.loads(simulate(*fits, "--updates-at", "0.5", "--json")[1])

    assert answer["same_plan"] == answer["planned"]


def test_where_a_failed_drive_leaves_too_little_the_plan_cannot_be_carried_out(
    simulate: Any,
) -> None:
    status, out, _ = simulate(*ON_DRIVES, "--drives-left", "0.05")

    assert status == 1
    assert "cannot be carried out: the drives that are left hold too little" in out
    assert "nothing fits" in out


def test_drives_that_are_left_hold_the_moved_inputs_as_well(simulate: Any) -> None:
    moved = ("--sequence", "32768", "--loss", "chunked", "--tile-sequence", "2048")
    there = ("--gpu-mem", "6GiB", "--ram", "4GiB", "--nvme", "40GB")
    asked = ("--model", "llama-3.2-1b", *moved, "--offload-inputs", *there)

    assert simulate(*asked, "--drives-left", "0.4")[0] == 0
    # A part of the room beside the inputs would be enough.
    assert simulate(*asked, "--drives-left", "0.35")[0] == 1


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "--drives-at: expected what changes: one of --drives-at, --links-at"),
        (("--drives-at", "0"), "--drives-at: expected a number from 0.001 to 1000"),
        (("--drives-left", "1.5"), "--drives-left: expected a number from 0.001 to 1,"),
        (("--links-at", "nan"), "--links-at: expected a number from 0.001"),
        (("--compute-at", "1e-320"), "--compute-at: expected a number from 0.001"),
        (("--drives-at", "1e-300"), "--drives-at: expected a number from 0.001"),
    ],
)
def test_a_change_that_is_none_is_refused_by_its_option(
    simulate: Any, arguments: tuple[str, ...], said: str
) -> None:
    status, out, err = simulate(*ON_DRIVES, *arguments)

    assert (status, out) == (2, "")
    assert said in err


def test_where_there_is_no_plan_no_settings_of_the_engine_are_named(simulate: Any) -> None:
    small = ("--gpu-mem", "24GiB", "--ram", "16GiB", "--nvme", "1TB", "--subgroup", "1000000000")
    status, _, err = simulate("--model", "llama-3-8b", *small, "--links-at", "0.5")

    assert status == 1
    assert "HOST cannot hold" in err
    assert "`infinity plan`, asked the same, says what would do" in err
    assert "subgroup_numel" not in err


def test_drives_that_a_plan_lacks_cannot_change(simulate: Any) -> None:
    status, _, err = simulate(*ON_DRIVES[:6], "--drives-at", "0.5")

    assert status == 2
    assert "--drives-at: expected --nvme or --drive beside it" in err


def test_links_that_a_cpu_alone_lacks_cannot_change(simulate: Any) -> None:
    status, _, err = simulate(
        "--model", "gpt2", "--gpus", "0", "--ram", "16GiB", "--links-at", "0.5"
    )

    assert status == 2
    assert "--links-at: expected a machine with a GPU" in err


def test_where_the_rate_of_computing_is_unknown_no_step_is_promised(simulate: Any) -> None:
    there = ("--model", "gpt2", "--gpus", "0", "--ram", "16GiB")
    status, out, _ = simulate(*there, "--updates-at", "0.5")
    refused, _, err = simulate(*there, "--compute-at", "0.5")

    assert status == 0
    assert " a step" not in out.split("Notes")[0]
    assert "forward and backward: unknown" in out
    assert refused == 2
    assert "--compute-at: expected --tflops" in err


def test_what_is_assumed_is_said(simulate: Any) -> None:
    answer = json.loads(simulate(*ON_DRIVES, "--drives-at", "0.5", "--json")[1])

    assert any("assumed to be those of a desktop" in note for note in answer["notes"])


def test_what_never_fits_has_no_plan_to_change(simulate: Any) -> None:
    status, _, err = simulate(
        "--model", "llama-3-70b", "--gpu-mem", "8GiB", "--ram", "16GiB", "--links-at", "0.5"
    )

    assert status == 1
    assert "there is no plan" in err
    assert "`infinity plan`, asked the same, says what would do" in err
