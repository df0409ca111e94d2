"""`infinity train`: the plan comes first, wrong questions are answered by option, and a run prints
how far it is.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from infinity_engine.advice.doubt import RateSource
from infinity_engine.cli.main import main
from infinity_engine.cli.plan_machine import AskedMachine
from infinity_engine.cli.runs import train as command
from infinity_engine.cli.runs.plan_first import PlannedTraining, _question, plan_first
from infinity_engine.errors import ConfigError
from infinity_engine.placement.training import Means
from infinity_engine.plan import ResolvedBudget
from infinity_engine.training.settings import TrainingSettings
from support.calibrations import calibration
from support.families import transformers
from support.nvme_training import RATES
from support.tiny_directory import LINES, TEXT, json_lines, tiny_directory

transformers()
pytest.importorskip("tokenizers", reason="it makes the model's tokenizer")

Command = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_directory(tmp_path_factory.mktemp("model") / "tiny", dtype=torch.bfloat16)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "text.txt"
    path.write_text(TEXT)
    return path


@pytest.fixture
def infinity(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Command:
    """Return what runs `infinity train` in an empty directory: status, output and errors."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments: object) -> tuple[int, str, str]:
        try:
            status = main(["train", "--accelerator", "cpu", *map(str, arguments)])
        except SystemExit as error:
            status = int(error.code or 0)
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return run


def test_a_dry_run_shows_the_plan_and_ends(infinity: Command, model: Path, text: Path) -> None:
    status, out, err = infinity(model, text, "--host", "256MiB", "--sequence", "32", "--dry-run")

    assert (status, err) == (0, "")
    assert re.search(r"^tiny fits: update", out)
    assert re.search(r"^host +[\d.]+ [KM]iB of 256 MiB", out, re.MULTILINE)
    assert re.search(r"^step +1 x 1 x 1 sequences of 32 tokens", out, re.MULTILINE)
    assert not Path("run").exists()


def test_a_training_prints_its_plan_its_steps_and_where_all_is(
    infinity: Command, model: Path, text: Path
) -> None:
    status, out, _ = infinity(
        *(model, text, "--host", "256MiB", "--sequence", "32", "--batch", "4"),
        *("--accumulation-steps", "2", "--lr", "1e-2", "--run", "r"),
    )

    assert status == 0
    assert out.index("fits:") < out.index("Data: 1 documents") < out.index("step 1/5  loss 5.")
    assert re.search(r"^step 5/5  loss \d\.\d{4}  [\d,]+ tokens/s  [\d.]+ s  HOST ", out, re.M)
    assert out.splitlines()[-2:] == ["weights  r/weights", "report   r/report.html"]
    described = json.loads(Path("r/run.json").read_text())
    assert described["engine"]["strategy"] == "host_only"
    assert described["prediction"]["rates_are"] == "published"
    assert "Settings" in Path("r/report.html").read_text()


def test_a_budget_that_is_too_small_is_refused_with_what_would_do(
    infinity: Command, model: Path, text: Path, tmp_path: Path
) -> None:
    status, out, _ = infinity(model, text, "--host", "200KiB", "--sequence", "32")

    assert status == 1
    assert "tiny does not fit" in out
    assert "Any of these would do" in out
    assert not Path("run").exists()


WIDE = {"hidden_size": 512, "intermediate_size": 16384, "vocab_size": 1000}
DEEP = {"hidden_size": 1024, "intermediate_size": 1024, "vocab_size": 1000}
DEEP["num_hidden_layers"] = 32
LARGE_HEAD = {"hidden_size": 512, "intermediate_size": 4096, "vocab_size": 32000}


@pytest.mark.parametrize(
    ("sizes", "device_mib", "drives", "engine", "offers"),
    [
        (WIDE, 440, 0, {}, "--batch 1 --accumulation-steps 4"),
        (DEEP, 280, 0, {}, '{"activations": {"at": "host"}} in the file of --config'),
        (DEEP, 280, 8 << 30, {}, '{"activations": {"at": "nvme"}} in the file of --config'),
        (LARGE_HEAD, 64, 0, {}, '{"tiling": "auto"} in the file of --config'),
        (WIDE, 900, 0, {"strategy": "device_only"}, "--strategy auto"),
    ],
)
def test_a_refusal_offers_only_options_of_this_command(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    sizes: dict[str, int],
    device_mib: int,
    drives: int,
    engine: dict[str, Any],
    offers: str,
) -> None:
    budget = ResolvedBudget(
        device=device_mib << 20, host=8 << 30, nvme={"d": drives} if drives else {}
    )
    asked = {**engine, "budget": {"nvme": dict.fromkeys(budget.nvme)}}
    said = refusal_of(tmp_path, monkeypatch, sizes, budget, asked)
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)

    assert offers in said
    assert set(re.findall(r"--[a-z-]+", said)) <= parser._option_string_actions.keys()


def test_tiles_are_not_offered_where_drives_keep_layers_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    budget = ResolvedBudget(device=64 << 20, host=8 << 30, nvme={"d": 8 << 30})
    asked = {"budget": {"nvme": {"d": None}}}

    assert "tiles" not in refusal_of(tmp_path, monkeypatch, LARGE_HEAD, budget, asked)


def test_layers_are_cut_anew_for_the_memory_that_a_refusal_asks_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def planned(device: float) -> PlannedTraining:
        budget = ResolvedBudget(device=int(device * 2**20), host=8 << 30, nvme={})
        return planned_of(tmp_path, monkeypatch, LARGE_HEAD, budget, {"tiling": "auto"})

    refused = "\n".join(row for _, rows in planned(4).sections for _, row in rows)
    [more] = re.findall(r"([\d.]+) MiB more of the device", refused)

    assert planned(4 + 1.001 * float(more)).fits
    assert not planned(0.97 * (4 + float(more))).fits


def test_drives_are_offered_for_whole_layers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the engine leaves whole where there are drives needs more of the device, too."""
    small = ResolvedBudget(device=16 << 20, host=700 << 20, nvme={})
    said = {
        tiling: refusal_of(tmp_path, monkeypatch, LARGE_HEAD, small, {"tiling": tiling})
        for tiling in ("off", "auto")
    }

    drives = {
        tiling: re.findall(r".*more of NVMe \(--nvme DIR, .*", text)
        for tiling, text in said.items()
    }
    assert drives["auto"] == drives["off"]
    assert drives["auto"]
    assert "MiB more of the host" in said["auto"]


def refusal_of(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    sizes: dict[str, int],
    budget: ResolvedBudget,
    engine: dict[str, Any],
) -> str:
    """Return what is said of a training that does not fit."""
    planned = planned_of(folder, monkeypatch, sizes, budget, engine)
    assert planned.fits is False
    return "\n".join(row for _, rows in planned.sections for _, row in rows)


def planned_of(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    sizes: dict[str, int],
    budget: ResolvedBudget,
    engine: dict[str, Any],
) -> PlannedTraining:
    """Return what is said of a training."""
    family = {"model_type": "llama", "num_hidden_layers": 4, "num_attention_heads": 8}
    (folder / "config.json").write_text(json.dumps({**family, **sizes, "dtype": "bfloat16"}))
    large_head = sizes is LARGE_HEAD
    settings = TrainingSettings(
        model=folder,
        data=(Path("text"),),
        run=Path("run"),
        sequence=8 if large_head else 1024,
        batch=1 if large_head else 4,
        chunk_loss=large_head,
    )
    means = Means(budget=budget, rates=RATES)
    machine = AskedMachine(means, (), RateSource.PUBLISHED, None, None)
    monkeypatch.setattr("infinity_engine.cli.runs.plan_first.machine_of", lambda *_: machine)
    return plan_first(settings, engine, uses_gpu=True)


def test_more_than_the_machine_has_is_refused_before_planning(
    infinity: Command, model: Path, text: Path
) -> None:
    status, out, _ = infinity(model, text, "--host", "900TiB")

    assert status == 1
    assert "HOST cannot hold 989560464998400 B (900.00 TiB)" in " ".join(out.split())


def test_the_budgets_strategy_and_settings_reach_the_engine(
    infinity: Command, model: Path, text: Path, tmp_path: Path
) -> None:
    (tmp_path / "drive").mkdir()
    more = {"storage": {"small_bytes": 0}, "telemetry": {"keep_steps": 3}, "precision": "fp32"}
    (tmp_path / "more.json").write_text(json.dumps(more))

    status, out, err = infinity(
        *(model, text, "--host", "64MiB", "--nvme", "drive=256MiB", "--tbw", "2TB"),
        *("--strategy", "nvme_streamed", "--parameters", "nvme", "--config", "more.json"),
        *("--sequence", "32", "--steps", "2", "--max-grad-norm", "0", "--save-every", "1"),
    )

    assert status == 0, err
    engine = json.loads(Path("run/run.json").read_text())["engine"]
    assert engine["max_grad_norm"] == "None"
    assert engine["precision"] == "fp32"
    assert "nvme_streamed" in engine["strategy"]
    assert engine["parameters"] == "nvme"
    assert "keep_steps" in engine["telemetry"]
    assert re.search(r"step 2/2 .* drive [\d.]+ [KM]iB of [\d.]+ MiB  nvme", out)
    page = Path("run/report.html").read_text()
    assert "<td>2 TB</td>" in page
    assert "drives write" in page


def test_options_take_the_place_of_settings_in_the_file(tmp_path: Path) -> None:
    in_file = {
        "accelerator": "cuda",
        "max_grad_norm": 0.5,
        "parameters": "nvme",
        "precision": "fp32",
        "strategy": "nvme_streamed",
    }
    (tmp_path / "file.json").write_text(json.dumps(in_file))
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)

    def settings(*options: str) -> dict[str, Any]:
        file = ("--config", str(tmp_path / "file.json"))
        return command._engine(parser.parse_args(["model", "text", *file, *options]))

    assert settings() == in_file
    left_open = settings(
        *("--accelerator", "auto", "--max-grad-norm", "2", "--parameters", "auto"),
        *("--precision", "model", "--strategy", "auto"),
    )
    assert left_open == {
        "accelerator": "auto",
        "max_grad_norm": 2,
        "parameters": "auto",
        "precision": "model",
        "strategy": "auto",
    }
    assert settings("--max-grad-norm", "0")["max_grad_norm"] is None


def test_micro_batches_are_those_of_the_option_else_of_the_file(
    infinity: Command, model: Path, text: Path, tmp_path: Path
) -> None:
    (tmp_path / "file.json").write_text('{"accumulation_steps": 2}')
    asked = (model, text, "--host", "64MiB", "--sequence", "32", "--steps", "1")
    for number, (option, expected) in enumerate((((), 2), (("--accumulation-steps", "3"), 3))):
        status, _, err = infinity(*asked, "--config", "file.json", "--run", f"r{number}", *option)

        assert status == 0, err
        told = json.loads(Path(f"r{number}/run.json").read_text())
        assert told["deciding"]["accumulation_steps"] == expected


def test_rates_of_the_file_are_the_engines() -> None:
    planned = {"strategy": "host_only", "rates": {"h2d_bytes_per_s": 1}}

    assert command._of_plan(planned, {}) == planned
    assert "rates" not in command._of_plan(planned, {"rates": {"h2d_bytes_per_s": 2}})
    assert "rates" not in command._of_plan(planned, {"calibration": "off"})
    assert "rates" in command._of_plan(planned, {"calibration": "auto"})


def test_a_run_is_resumed_by_the_same_command(infinity: Command, model: Path, text: Path) -> None:
    asked = (model, text, "--host", "64MiB", "--sequence", "32", "--steps", "2", "--resume")

    statuses = [infinity(*asked)[0] for _ in range(2)]

    assert statuses == [0, 0]
    status, _, err = infinity(*asked[:-1])
    assert status == 2
    assert "--run: expected a new directory, or --resume" in err
    status, _, err = infinity(*asked, "--lr", "1")
    assert status == 2
    assert "--lr: expected what the run began with, 2e-05" in err


def test_a_family_that_the_planner_does_not_know_is_planned_by_the_engine(
    infinity: Command, model: Path, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unknown(_: object) -> None:
        raise ConfigError.unknown_name(field="config.model_type", name="new", known=["llama"])

    monkeypatch.setattr("infinity_engine.cli.runs.plan_first.model_of", unknown)

    status, out, err = infinity(model, text, "--host", "64MiB", "--sequence", "16", "--steps", "1")

    assert status == 0, err
    said = "None before the model is loaded, as the planner does not know it"
    assert said in " ".join(out.split())
    assert "step 1/1" in out


@pytest.mark.parametrize(("more", "loss"), [((), "whole"), (("--loss", "chunked"), "chunked")])
def test_the_plan_has_the_loss_of_the_training(
    infinity: Command,
    model: Path,
    text: Path,
    monkeypatch: pytest.MonkeyPatch,
    more: tuple[str, ...],
    loss: str,
) -> None:
    def asked_for(options: argparse.Namespace, *_: object) -> None:
        raise ConfigError(field="loss", value=options.loss, expected="nothing, to end here")

    monkeypatch.setattr("infinity_engine.cli.runs.plan_first.training_of", asked_for)

    _, _, err = infinity(model, text, "--host", "64MiB", "--sequence", "16", *more)

    assert f"got '{loss}'" in err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("none", "t"), "MODEL_DIR: expected a local directory of Transformers"),
        (("MODEL", "none.txt"), "DATA: expected a file that can be read"),
        (("MODEL", "bad.jsonl"), "bad.jsonl, line 2: expected a JSON object"),
        (("MODEL", "empty.txt"), "DATA: expected files with two tokens at least"),
        (("MODEL", "TEXT", "--sequence", "0"), "--sequence: expected 2 tokens or more, got 0"),
        (("MODEL", "TEXT", "--sequence", "4096"), "--sequence: expected at most 128 tokens"),
        (("MODEL", "TEXT", "--batch", "0"), "--batch: expected a whole number, 1 or more"),
        (("MODEL", "TEXT", "--accumulation-steps", "0"), "--accumulation-steps: expected"),
        (("MODEL", "TEXT", "--lora", "0"), "--lora: expected a whole number"),
        (("MODEL", "TEXT", "--host", "64"), '--host: expected a size with its unit: did you mean'),
        (("MODEL", "TEXT", "--nvme", "none=1GiB"), "--nvme: expected a directory"),
        (("MODEL", "TEXT", "--nvme", "=1GiB"), "--nvme: expected directories as text"),
        (("MODEL", "TEXT", "--max-grad-norm", "nan"), "--max-grad-norm: expected a positive"),
        (("MODEL", "TEXT", "--strategy", "fastest"), "error: --strategy: expected one of"),
        (("MODEL", "TEXT", "--strategy", "{"), "--strategy: expected a name, or JSON"),
        (("MODEL", "TEXT", "--config", "none.json"), "--config: expected a file with a JSON"),
        (("MODEL", "TEXT", "--config", "wrong.json"), "error: --config: strategie"),
        (("MODEL", "TEXT", "--config", "ds.json"), "`infinity migrate ds.json` prints what"),
        (("MODEL", "TEXT", "--config", "off.json"), 'telemetry.recording: expected "timeline"'),
        (("MODEL", "TEXT", "--config", "budget.json"), "error: --config: budget: expected"),
        (("MODEL", "TEXT", "--config", "drives.json", "--nvme", "."), "error: --config: budget.nvme"),
        (("MODEL", "TEXT", "--config", "storage.json", "--tbw", "6TB"), "error: --config: storage:"),
        (("MODEL", "TEXT", "--config", "wrong.json", "--strategy", "auto"), "--config: strategie"),
        (("MODEL", "TEXT", "--config", "deep.json"), "--config: expected a file with a JSON"),
        (("MODEL", "TEXT", "--config", "nan.json"), "--config: expected a file with a JSON"),
        (("MODEL", "TEXT", "--save-every", "soon"), "--save-every: expected"),
        (("MODEL", "TEXT", "--dry-run", "--save-every", "soon"), "--save-every: expected"),
        (("MODEL", "TEXT", "--run", "bad.jsonl"), "--run: expected a directory that can be"),
    ],
)  # fmt: skip
def test_a_wrong_question_is_answered_by_its_option(
    infinity: Command,
    model: Path,
    text: Path,
    tmp_path: Path,
    arguments: tuple[str, ...],
    said: str,
) -> None:
    (tmp_path / "bad.jsonl").write_text('{"text": "a"}\nnot json\n')
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "wrong.json").write_text('{"strategie": 1}')
    (tmp_path / "ds.json").write_text('{"zero_optimization": {"stage": 3}}')
    (tmp_path / "off.json").write_text('{"telemetry": {"recording": "off"}}')
    (tmp_path / "budget.json").write_text('{"budget": "16GiB"}')
    (tmp_path / "drives.json").write_text('{"budget": {"nvme": 5}}')
    (tmp_path / "storage.json").write_text('{"storage": "x"}')
    (tmp_path / "deep.json").write_text('{"a":' * 100_000)
    (tmp_path / "nan.json").write_text('{"max_grad_norm": 1e999}')
    named = {"MODEL": str(model), "TEXT": str(text)}

    status, _, err = infinity(*(named.get(argument, argument) for argument in arguments))

    assert status == 2
    assert err.startswith("infinity train: error: ")
    assert said in err
    assert "Traceback" not in err


def test_several_ranks_are_refused(
    infinity: Command, model: Path, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")

    status, _, err = infinity(model, text)

    assert status == 2
    assert "this command trains in one process" in err


def test_a_model_without_tokenizer_is_named(infinity: Command, model: Path, text: Path) -> None:
    Path("bare").mkdir()
    for name in ("config.json", "model.safetensors"):
        (Path("bare") / name).write_bytes((model / name).read_bytes())

    status, _, err = infinity("bare", text)

    assert status == 2
    assert "MODEL_DIR: expected a directory with the tokenizer's files" in err


def test_adapters_without_peft_are_refused(
    infinity: Command, model: Path, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    absent = "infinity_engine.integrations.language_models.find_spec"
    monkeypatch.setattr(absent, lambda _: None)

    status, _, err = infinity(model, text, "--lora", "4", "--sequence", "32", "--host", "64MiB")

    assert status == 2
    assert "--lora: expected no adapters, as peft is not installed" in err


def test_ctrl_c_says_how_to_go_on(
    infinity: Command, model: Path, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(command._Printer, "on_step", interrupt)

    status, _, err = infinity(model, text, "--sequence", "32", "--host", "64MiB")

    assert status == 130
    assert "interrupted; go on with --resume --run run" in err
    assert "It was interrupted" in Path("run/report.html").read_text()


def test_a_terminal_has_one_line_that_changes(
    infinity: Command,
    tmp_path: Path,
    model: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lines = json_lines(tmp_path / "lines.jsonl", LINES)
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "40")

    status, out, _ = infinity(model, lines, "--sequence", "32", "--host", "64MiB", "--steps", "3")

    assert status == 0
    shown = out.split("\r\x1b[2K")[-3:]
    assert [line[:8] for line in shown] == ["step 1/3", "step 2/3", "step 3/3"]
    assert [line.count("\n") for line in shown] == [0, 0, 3]
    assert all(len(line) < 40 for line in shown[:2])


def test_a_run_is_planned_for_the_one_process_that_it_has() -> None:
    settings = TrainingSettings(
        model=Path("model"), data=(Path("text"),), run=Path("run"), sequence=16
    )

    assert _question(settings, {}, uses_gpu=True).gpus == 1
    assert _question(settings, {}, uses_gpu=False).gpus == 0


def test_drives_with_endurances_of_their_own_are_rated_together() -> None:
    settings = TrainingSettings(
        model=Path("model"), data=(Path("text"),), run=Path("run"), sequence=16
    )
    engine: dict[str, dict[str, Any]] = {
        "budget": {"nvme": {"a": "1GiB", "b": "1GiB"}},
        "storage": {"endurance": {"a": "2TB", "b": 3 * 10**12}},
    }

    assert _question(settings, engine, uses_gpu=False).tbw == f"{5 * 10**12} B"
    engine["storage"]["endurance"].pop("b")
    assert _question(settings, engine, uses_gpu=False).tbw is None


def test_a_directory_that_was_not_measured_is_left_to_the_engine(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = TrainingSettings(model=model, data=(Path("text"),), run=Path("run"), sequence=16)
    monkeypatch.setattr(
        "infinity_engine.calibration.kept_calibration", lambda _: calibration().with_drives({})
    )

    budget = {"host": "64MiB", "nvme": {str(tmp_path): "64MiB"}}
    planned = plan_first(settings, {"budget": budget}, uses_gpu=False)

    assert (planned.fits, planned.settings) == (None, {})
    assert f"infinity calibrate {tmp_path}" in str(planned.sections)


def test_a_plan_for_all_that_is_free_leaves_some_to_what_begins_until_then(model: Path) -> None:
    settings = TrainingSettings(model=model, data=(Path("text"),), run=Path("run"), sequence=16)
    stated = plan_first(settings, {"budget": {"host": "64MiB"}}, uses_gpu=False)
    free = plan_first(settings, {}, uses_gpu=False)

    assert stated.fits
    assert free.fits
    assert stated.settings["activation_bytes"] != 0
    assert free.settings["activation_bytes"] == 0  # of a small model


def test_blocks_that_the_engine_runs_again_are_planned_so() -> None:
    settings = TrainingSettings(
        model=Path("model"),
        data=(Path("text"),),
        run=Path("run"),
        sequence=16,
        checkpointing=False,
    )

    assert not _question(settings, {}, uses_gpu=False).checkpointing
    engine = {"activations": {"recompute": "blocks"}}
    assert _question(settings, engine, uses_gpu=False).checkpointing


def test_activations_that_leave_are_left_to_the_engine_where_they_have_no_room(
    infinity: Command, model: Path, text: Path, tmp_path: Path
) -> None:
    (tmp_path / "drive").mkdir()
    (tmp_path / "leave.json").write_text('{"activations": "nvme"}')
    asked: tuple[object, ...] = (model, text, "--host", "20MiB", "--nvme", "drive=64MiB")
    asked += ("--sequence", "32", "--batch", "256", "--no-checkpointing", "--dry-run")

    refused, _, _ = infinity(*asked)
    status, out, err = infinity(*asked, "--config", "leave.json")

    assert refused == 1
    assert (status, err) == (0, "")
    assert "None before the model is loaded" in " ".join(out.split())


def test_a_training_is_planned_with_the_layers_that_the_engine_cuts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = {"hidden_size": 512, "intermediate_size": 1024, "vocab_size": 32000}
    family = {"model_type": "llama", "num_hidden_layers": 2, "num_attention_heads": 8}
    (tmp_path / "config.json").write_text(json.dumps({**family, **sizes, "dtype": "bfloat16"}))
    settings = TrainingSettings(
        model=tmp_path, data=(Path("text"),), run=Path("run"), sequence=8, chunk_loss=True
    )
    small = Means(budget=ResolvedBudget(device=48 << 20, host=2 << 30, nvme={}), rates=RATES)
    machine = AskedMachine(small, (), RateSource.PUBLISHED, None, None)
    monkeypatch.setattr("infinity_engine.cli.runs.plan_first.machine_of", lambda *_: machine)

    whole, cut = (
        plan_first(settings, {"tiling": tiling}, uses_gpu=True) for tiling in ("off", "auto")
    )

    assert (whole.fits, cut.fits) == (False, True)


def test_a_config_of_a_model_may_have_an_infinity(tmp_path: Path) -> None:
    config = '{"max_position_embeddings": 64, "time_step_limit": [0.0, Infinity]}'
    (tmp_path / "config.json").write_text(config)

    assert command._most_tokens(tmp_path) == 64
