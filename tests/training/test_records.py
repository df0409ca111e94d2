"""A run's directory is written so that a kill loses one line, and read whatever is in it."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from infinity_engine.errors import ConfigError
from infinity_engine.training.records import BEGAN, ENDED, STEP, RecordedRun, RunDirectory, line_of


def recorded(folder: Path, *lines: str) -> RecordedRun:
    (folder / "records.jsonl").write_text("".join(lines))
    return RecordedRun.read(folder)


def step(number: int, **fields: Any) -> str:
    return line_of(STEP, step=number, **fields)


def test_steps_that_were_made_again_count_once(tmp_path: Path) -> None:
    run = recorded(
        tmp_path,
        line_of(BEGAN, step=0),
        *(step(number, loss=number) for number in (1, 2, 3, 4)),
        line_of(BEGAN, step=2),
        step(3, loss=30),
    )

    assert [(made.number, made.figure("loss")) for made in run.steps] == [(1, 1), (2, 2), (3, 30)]


def test_bytes_of_steps_that_were_made_again_have_been_written(tmp_path: Path) -> None:
    def writes(number: int, in_all: int) -> str:
        return step(number, drives={"/a": {"written_in_all": in_all}})

    run = recorded(
        tmp_path,
        line_of(BEGAN, step=0),
        *(writes(1, 10), writes(2, 20)),
        line_of(BEGAN, step=1),
        writes(2, 12),
    )

    assert run.written == {"/a": 32}


def test_a_line_that_a_kill_has_cut_short_is_counted_and_left_out(tmp_path: Path) -> None:
    run = recorded(tmp_path, line_of(BEGAN, step=0), step(1), step(2)[:20])

    assert [made.number for made in run.steps] == [1]
    assert "records.jsonl has 1 damaged lines; a kill leaves one" in run.damage


def test_what_is_added_after_a_line_that_was_cut_short_is_read(tmp_path: Path) -> None:
    recorded(tmp_path, step(1), step(2)[:20])
    with RunDirectory(tmp_path).opened() as records:
        records.write(step(2))

    assert [made.number for made in RecordedRun.read(tmp_path).steps] == [1, 2]


def test_numbers_that_json_does_not_have_are_left_out(tmp_path: Path) -> None:
    line = step(1, loss=float("nan"), rate={"of": [float("inf"), 1.5]})

    assert json.loads(line)["loss"] is None
    assert json.loads(line)["rate"] == {"of": [None, 1.5]}
    assert recorded(tmp_path, line).steps[0].figure("loss") is None


@pytest.mark.parametrize("value", ["text", True, None, [1], {"a": 1}, 10**400])
def test_what_is_no_number_is_not_believed(tmp_path: Path, value: Any) -> None:
    line = json.dumps({"event": "step", "step": 1, "loss": value, "links": value}) + "\n"

    made = recorded(tmp_path, line).steps[0]

    assert made.figure("loss") is None
    assert made.figure("links", "d2h", "bytes") is None


def test_a_run_has_ended_where_its_last_words_say_so(tmp_path: Path) -> None:
    began, ended = line_of(BEGAN, step=0), line_of(ENDED, how="stopped")
    saving = line_of("saving", step=1, tag="t")

    assert recorded(tmp_path, began, ended, saving).ended is not None
    assert recorded(tmp_path, began, ended, began).ended is None
    assert recorded(tmp_path).ended is None


def test_an_empty_directory_and_broken_files_are_read(tmp_path: Path) -> None:
    assert set(RecordedRun.read(tmp_path).damage) == {
        "run.json is missing",
        "records.jsonl is missing",
    }
    for name in ("run.json", "timeline.json", "records.jsonl"):
        (tmp_path / name).write_bytes(b"\xff\x00[" + os.urandom(64))
    assert len(RecordedRun.read(tmp_path).damage) == 3


def test_what_is_no_directory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="run: expected the directory of a run"):
        RecordedRun.read(tmp_path / "none")


def test_one_process_at_a_time_trains_a_run(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path)
    with directory.opened():
        assert RecordedRun.read(tmp_path).goes_on
        with pytest.raises(ConfigError, match="a run that no other process trains"):
            directory.opened()

    assert not RecordedRun.read(tmp_path).goes_on
    directory.opened().close()


def test_a_run_is_begun_again_only_where_that_was_asked_for(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path / "run")
    assert directory.begin(resume=False) is None
    directory.describe({"steps": 5})
    # Nothing was trained yet, so nothing can be lost.
    assert directory.begin(resume=False) is None
    directory.records.write_text(step(1))
    with pytest.raises(ConfigError, match="--resume to go on"):
        directory.begin(resume=False)
    assert directory.begin(resume=True) == {"schema": 1, "steps": 5}
    directory.description.write_text("{")
    with pytest.raises(ConfigError, match=r"a run\.json that can be read"):
        directory.begin(resume=True)


def test_a_directory_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")

    with pytest.raises(ConfigError, match="a directory that can be written"):
        RunDirectory(tmp_path / "file" / "run").begin(resume=False)
