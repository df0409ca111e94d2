"""The page that plans in a browser: it answers as the command line does, without a network."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from plan_page.ask import ask

from infinity_engine.cli.main import main
from infinity_engine.cli.plan_answer import show
from support.browser import browser

ROOT = Path(__file__).resolve().parents[2]
SMALL = "--model llama-3.2-1b --gpu 4090"
QUESTIONS = (
    f"{SMALL} --ram 64GiB",
    f"{SMALL} --ram 16GiB",
    f"{SMALL} --ram 8GiB --drive '990 pro'",
    f"{SMALL} --ram 4GiB",
    f"{SMALL} --ram 64GiB --accumulation 8",
    f"{SMALL} --ram 64GiB --optimizer lion --full",
    f"{SMALL} --ram 64GiB --precision fp32",
    f"{SMALL} --ram 64GiB --lora 16",
    f"{SMALL} --ram 64GiB --no-checkpointing --batch 2",
    f"{SMALL} --ram 64GiB --sequence 131072",
    f"{SMALL} --ram 64GiB --tokens 10M --watts 600 --price-kwh 0.3",
    f"{SMALL} --ram 32GiB --nvme 1TB --tbw 600TB --strategy nvme_streamed",
    f"{SMALL} --ram 64GiB --gpus 4",
    f"{SMALL} --ram 64GiB --overlap off --parameters host",
    "--model qwen2.5-0.5b --gpus 0 --ram 16GiB",
    "--model llama-3-8b --gpu 4090 --ram 64GiB --nvme 2TB",
    "--model llama-3-8b --gpu 4090 --ram 64GiB",
    "--model mixtral-8x7b --machine h200_node",
    "--model no-such-model --gpu 4090 --ram 64GiB",
    "--gpu 4090 --no-such-option",
)


def as_command(question: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    """Return the exit status of the command, and what it prints."""
    capsys.readouterr()
    try:
        status = main(["plan", *shlex.split(question)])
    except SystemExit as error:
        status = int(error.code or 0)
    return status, capsys.readouterr().out


def printed(answer: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    """Return an answer of the page as the command would print it."""
    capsys.readouterr()
    show([(title, [tuple(row) for row in rows]) for title, rows in answer["sections"]])
    return answer["status"], capsys.readouterr().out


@pytest.mark.parametrize("question", [QUESTIONS[0], QUESTIONS[3], QUESTIONS[18], QUESTIONS[19]])
def test_what_the_page_runs_answers_as_the_command_does(
    question: str, capsys: pytest.CaptureFixture[str]
) -> None:
    answer = json.loads(ask(question))

    assert printed(answer, capsys) == as_command(question, capsys)
    assert bool(answer["wrong"]) == (answer["status"] == 2)


@pytest.mark.parametrize("question", ["--model gpt2", "--model gpt2 --here"])
def test_the_page_asks_for_a_machine_where_none_is_described(
    question: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "infinity_engine.calibration", None)
    answer = json.loads(ask(question))

    assert answer["status"] == 2
    assert "describe one, with --machine, or with --gpu and --ram" in answer["wrong"]


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_page_answers_twenty_questions_without_network_as_the_command_does(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if shutil.which("npm") is None:
        pytest.skip("needs npm, to get what runs the page")
    page = tmp_path / "index.html"
    subprocess.run(
        [sys.executable, ROOT / "scripts" / "plan_page", "--output", page],
        check=True,
        env={**os.environ, "INFINITY_THIS_PYTHON": "1"},
    )

    with browser(tmp_path) as session:
        session.call("/url", {"url": page.as_uri()})
        wrong = [
            question
            for question in QUESTIONS
            if printed(session.ask(question), capsys) != as_command(question, capsys)
        ]

    assert wrong == []
