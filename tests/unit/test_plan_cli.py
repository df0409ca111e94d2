"""`infinity plan`, as a new user would try it: tables, JSON, a page, and what is said of wrong or
missing input.
"""

from __future__ import annotations

import errno
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from infinity_engine.cli.main import main
from infinity_engine.config import ActivationsConfig, EngineConfig
from infinity_engine.plan import Calibration, DriveRates, Rates, Unit
from infinity_engine.sim.configs import FAMILIES
from infinity_engine.sim.hardware import DESKTOP_4090
from support.calibrations import calibration, drive, figure
from support.plannings import equal_questions_searched_once

DESKTOP = ("--gpus", "1", "--gpu-mem", "24GiB", "--ram", "64GiB", "--nvme", "2TB")

CONFIG = {
    "model_type": "qwen2",
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "vocab_size": 32000,
}


@pytest.fixture(scope="module", autouse=True)
def equal_questions_are_searched_once() -> Iterator[None]:
    with equal_questions_searched_once():
        yield


@pytest.fixture
def plan(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that runs `infinity plan`, and returns its exit status, output and
    errors.
    """

    def run(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setenv("COLUMNS", "200")
        status = main(["plan", *arguments])
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return run


def test_a_large_model_on_a_desktop_is_answered(plan: Any) -> None:
    status, out, _ = plan("--model", "llama-3-70b", *DESKTOP, "--tbw", "1200TB")

    assert status == 0
    assert re.search(r"llama-3-70b fits: \d+ s a step", out)
    assert "70,553,706,496" in out
    assert re.search(r"nvme +[\d.]+ GiB of 1\.728 TiB: states", out)
    assert "bound by reads of the drives" in out
    assert "TB in a day of steps" in out
    assert "1,200 TB rated" in out
    assert "measure yours" in out


def test_the_default_answer_fits_one_screen_and_full_has_every_figure(plan: Any) -> None:
    asked = ("--model", "llama-3-8b", *DESKTOP, "--tbw", "1200TB", "--tokens", "10M")
    _, short, _ = plan(*asked)
    _, full, _ = plan(*asked, "--full")

    assert len(short.splitlines()) <= 47
    for title in ("What else fits", "Bytes over each link", "least update"):
        assert title in full
        assert title not in short


def test_an_answer_says_how_sure_it_is_and_what_to_buy_next(plan: Any, tmp_path: Path) -> None:
    asked = ("--model", "llama-3-8b", *DESKTOP)
    _, published, _ = plan(*asked)
    _, measured, _ = plan(*asked, "--rates", measured_file(tmp_path))

    assert re.search(r"a step \([\d.]+ s to [\d.]+ s with published rates\)", published)
    assert "with measured rates)" in measured
    assert re.search(r"64 GiB more RAM +[\d.]+ s -> [\d.]+ s a step, .* -> 0\.0 TB", published)
    assert re.search(r"no gain +.*a link twice as fast", published)
    assert re.search(r"1 GB/s of drive writes more: [\d.]+ s", published)


def test_a_run_is_told_in_days_writes_energy_and_cost(plan: Any) -> None:
    prices = ("--watts", "600", "--price-kwh", "0.3", "--price-hour", "0.1")
    asked = ("--model", "llama-3-8b", *DESKTOP, "--tbw", "1200TB", "--json")
    _, out, _ = plan(*asked[:-1], "--tokens", "10M", *prices)
    run = json.loads(plan(*asked, "--steps", "4883", *prices)[1])["advice"]["run"]

    assert re.search(
        r"10,000,384 tokens +4,883 steps, [\d.]+ days, [\d.]+ TB written \([\d.]+% of the TBW\), "
        r"[\d.]+ kWh, cost [\d.]+",
        out,
    )
    assert re.search(r"--accumulation 8 +611 steps of 8 times the tokens, ", out)
    assert (run["tokens"], run["steps"]) == (10_000_384, 4883)


@pytest.mark.parametrize(
    ("steps", "said"),
    [
        ("1", r"1 step, [\d.]+ s, [\d.]+ GB written, [\d.]+ Wh"),
        ("50", r"50 steps, [\d.]+ minutes, [\d.]+ TB written, [\d.]+ Wh"),
    ],
)
def test_a_short_run_is_told_in_units_that_fit_it(plan: Any, steps: str, said: str) -> None:
    _, out, _ = plan("--model", "llama-3-8b", *DESKTOP, "--steps", steps, "--watts", "600")
    [told] = re.findall(said, out)

    assert not re.search(r" 0(\.0+)? ", told)


@pytest.mark.parametrize(
    ("given", "taken"),
    [
        ("meta-llama/Llama-3.1-8B", "llama-3.1-8b"),
        ("meta-llama/Meta-Llama-3-8B-Instruct", "llama-3-8b"),
        ("meta-llama/Llama-2-7b-chat-hf", "llama-2-7b"),
        ("Qwen/Qwen3-8B-Base", "qwen3-8b"),
        ("google/gemma-3-1b-it", "gemma-3-1b"),
    ],
)
def test_a_tuned_model_is_planned_as_the_one_that_it_was_tuned_from(
    plan: Any, given: str, taken: str
) -> None:
    _, out, _ = plan("--model", given, *DESKTOP)

    assert out.startswith(f"{taken} fits")
    assert f"{given} is not in the local cache: it is planned as the preset {taken}" in " ".join(
        out.split()
    )


def test_an_id_that_is_not_known_is_refused_with_the_nearest(plan: Any) -> None:
    status, _, err = plan("--model", "Qwen/Qwen2.5-9B", *DESKTOP)

    assert status == 2
    assert "(nearest: Qwen/Qwen2.5-7B)" in err


def test_an_encoder_with_a_decoder_is_refused_whoever_would_make_it(
    plan: Any, tmp_path: Path
) -> None:
    config = {"model_type": "bart", "is_encoder_decoder": True, "d_model": 64, "vocab_size": 99}
    (tmp_path / "config.json").write_text(json.dumps(config))

    status, _, err = plan("--model", str(tmp_path), *DESKTOP)

    assert status == 2
    assert "config.is_encoder_decoder: expected one stack of layers" in err


def test_what_is_assumed_of_a_drives_writes_is_said(plan: Any) -> None:
    desktop = ("--model", "llama-3-8b", "--gpu", "4090", "--ram", "64GiB", "--drive")

    _, assumed, _ = plan(*desktop, "samsung 990 pro 2tb")
    _, measured, _ = plan(*desktop, "samsung pm9a3")

    told = "a Samsung 990 PRO 2 TB is taken to write 1.4 GB/s, as such drives do once their cache"
    assert told in " ".join(assumed.split())
    assert measured.startswith("llama-3-8b fits")
    assert "is taken to write" not in measured


def test_purchases_beyond_the_best_three_are_named_with_their_steps(plan: Any) -> None:
    _, out, _ = plan(
        "--model", "llama-3-8b", "--gpu", "4090", "--ram", "64GiB", "--drive", "samsung 990 pro 2tb"
    )

    assert re.search(r"\nsmaller gains +RTX 5090 32 GB in a PCIe 5 slot: [\d.]+ s", out)


def test_the_answers_in_the_documentation_are_those_that_are_given(plan: Any) -> None:
    page = (Path(__file__).parents[2] / "docs" / "planner.md").read_text()
    blocks = re.findall(r"```console\n\$ infinity plan (.*)\n([^`]*)```", page)
    assert len(blocks) == 2

    for command, answer in blocks:
        _, out, _ = plan(*command.split())
        given = [" ".join(line.split()) for line in out.splitlines()]
        for line in answer.splitlines():
            shown = " ".join(line.split())
            assert shown == "..." or any(each.startswith(shown) for each in given), shown


def test_the_answer_needs_no_torch() -> None:
    source = (
        "import sys\n"
        "from infinity_engine.cli.main import main\n"
        f"status = main(['plan', '--model', 'llama-3-70b', *{DESKTOP!r}])\n"
        "assert 'torch' not in sys.modules, 'torch was imported'\n"
        "sys.exit(status)\n"
    )
    run = subprocess.run(
        [sys.executable, "-c", source], capture_output=True, text=True, check=False
    )

    assert run.returncode == 0, run.stderr


def test_in_json_it_is_one_object_with_the_plan(plan: Any) -> None:
    status, out, _ = plan("--model", "gpt2", *DESKTOP, "--json")

    answer = json.loads(out)
    assert status == 0
    assert (answer["schema"], answer["fits"], answer["model"]) == (1, True, "gpt2")
    assert answer["settings"]["strategy"] == "device_only"
    assert {each["op"] for each in answer["plan"]["ops"]} == {"UpdateOnDevice"}
    assert (
        sum(each["bytes"] for each in answer["memory"]["device"]["holdings"])
        == answer["memory"]["device"]["held_bytes"]
    )


def test_no_step_is_longer_with_a_little_more_gpu_memory(plan: Any) -> None:
    """On a few GiB, whether updates go on beside what a forward fetches turns here."""
    asked = ("--model", "llama-3-8b", "--ram", "256GiB", "--sequence", "256", "--json")
    steps = [
        json.loads(plan(*asked, "--gpu-mem", memory)[1])["step_s"]
        for memory in ("6GiB", "6.5GiB", "8GiB")
    ]

    assert steps[1] <= 1.005 * steps[0]
    assert steps[2] <= 1.005 * steps[1]


@pytest.mark.parametrize("memory", [pytest.param("24GiB", marks=pytest.mark.slow), "48GiB"])
def test_what_is_worth_something_is_worth_buying(plan: Any, memory: str) -> None:
    large = ("--model", "llama-3.1-405b", "--gpus", "1", "--ram", "512GiB", "--nvme", "10TB")
    _, text, _ = plan(*large, "--gpu-mem", memory, "--json")
    answer = json.loads(text)
    saved = {it["what"]: it["saved"] for it in answer["advice"]["purchases"]}
    units = {it["unit"] for it in answer["advice"]["worth"]}

    assert saved["512 GiB more RAM"] > 0.02
    assert saved["twice the GPU memory"] < 0.01
    assert units == {"GiB of RAM", "GB/s of drive writes"}


def test_what_does_not_fit_is_refused_with_what_would_do(plan: Any) -> None:
    status, out, _ = plan(
        "--model", "llama-3-8b", "--gpus", "1", "--gpu-mem", "8GiB", "--ram", "16GiB"
    )

    assert status == 1
    assert "llama-3-8b does not fit" in out
    assert re.search(r"1\.\s+[\d.]+ GiB more of NVMe", out)
    assert re.search(r"GiB more of the host", out)


@pytest.mark.parametrize(
    "arguments",
    [
        ("--gpu-mem", "8GiB", "--ram", "16GiB"),
        ("--gpu-mem", "24GiB", "--ram", "64GiB", "--strategy", "device_only"),
        (
            "--gpu-mem",
            "24GiB",
            "--ram",
            "400GiB",
            "--strategy",
            '{"name": "static_split", "ratio": 0.9}',
        ),
        ("--gpus", "4", "--gpu-mem", "16GiB", "--ram", "64GiB"),
        ("--gpus", "0", "--ram", "64GiB"),
        ("--model", "opt-1.3b", "--batch", "8", "--offload-inputs", "--gpu", "3090", "--ram=8GiB"),
        ("--model", "opt-1.3b", "--batch", "64", "--gpu", "3090", "--ram", "24GiB"),
        ("--gpu-mem", "1GiB", "--ram", "64GiB", "--sequence", "256", "--tiling", "auto"),
        ("--gpus", "0", "--ram", "3GiB", "--nvme", "200GB", "--tiling", "auto"),
        ("--gpu-mem", "12GiB", "--ram", "32GiB", "--batch", "16", "--tiling", "auto"),
        ("--gpu-mem=24GiB", "--ram=48GiB", "--nvme=100GB", "--batch", "8", "--no-checkpointing"),
        ("--gpu-mem", "2GiB", "--ram", "24GiB", "--nvme", "100GB", "--strategy", "nvme_streamed"),
    ],
)
def test_what_a_remedy_says_fits_when_it_is_given(plan: Any, arguments: tuple[str, ...]) -> None:
    asked = ("--model", "llama-3-8b", *arguments)
    status, out, _ = plan(*asked, "--json")
    changes = [re.findall(r"--[^()]*", each["change"]) for each in json.loads(out)["remedies"]]

    assert status == 1
    assert changes
    for options in changes:
        assert options
        given = [word for option in options for word in option.replace(",", "").split()]
        assert plan(*without_drives(asked, given), *given)[0] == 0, given


def test_what_fits_with_another_strategy_and_a_change_is_offered(plan: Any) -> None:
    there = ("--gpus", "1", "--gpu-mem", "8GiB", "--ram", "32GiB", "--nvme", "500GB")
    asked = ("--model", "llama-3.2-1b", *there, "--batch", "48", "--strategy", "device_only")
    remedies = json.loads(plan(*asked, "--json")[1])["remedies"]
    change = remedies[0]["change"]

    assert change.startswith("what is best, left to the planner (--strategy auto), with ")
    options = [word for option in re.findall(r"--[^()]*", change) for word in option.split()]
    assert len(options) > 2
    assert plan(*asked, *options)[0] == 0


def test_inputs_of_smaller_batches_take_less_of_the_drives_that_a_remedy_adds(plan: Any) -> None:
    """Without drives they are on the host; with some, these take them as well."""
    batch = ("--lora", "8", "--batch", "16", "--offload-inputs")
    asked = ("--model", "llama-3-8b", *batch, "--gpus", "1", "--gpu-mem", "8GiB", "--ram", "16GiB")
    remedies = json.loads(plan(*asked, "--json")[1])["remedies"]
    [change] = [it["change"] for it in remedies if it["change"].startswith("16 micro-batches")]

    options = [word for option in re.findall(r"--[^()]*", change) for word in option.split()]
    assert options[:4] == ["--batch", "1", "--accumulation", "16"]
    assert plan(*asked, *options)[0] == 0
    enough = int(options[-1].removesuffix("GiB"))
    assert plan(*asked, *options[:-1], f"{0.95 * enough:.2f}GiB")[0] == 1


def without_drives(asked: tuple[str, ...], given: list[str]) -> list[str]:
    """Return what is asked, without drives where they are given: they may be said once."""
    words = [part for word in asked for part in word.split("=")]
    if "--nvme" in given and "--nvme" in words:
        place = words.index("--nvme")
        del words[place : place + 2]
    return words


def test_a_little_of_several_tiers_is_offered_beside_much_of_the_device(plan: Any) -> None:
    asked = ("--model", "llama-3-8b", "--gpu-mem", "2GiB", "--ram", "100GiB")
    _, out, _ = plan(*asked, "--json")

    drives, host, device, *_ = [remedy["more_bytes"] for remedy in json.loads(out)["remedies"]]
    assert device["device"] > 5 * drives["device"]
    assert drives["device"] == host["device"] > 4 * 2**30
    assert drives["host"] == host["nvme"] == 0
    assert plan(*asked, "--gpu-mem", "7GiB", "--ram", "130GiB")[0] == 0
    assert plan(*asked, "--gpu-mem", "6GiB", "--ram", "130GiB")[0] == 1
    assert plan(*asked, "--gpu-mem", "7GiB", "--ram", "126GiB")[0] == 1


def test_what_was_asked_for_can_be_left_to_the_planner(plan: Any) -> None:
    roomy = ("--gpu-mem", "24GiB", "--ram", "64GiB", "--nvme", "500GB")
    status, out, _ = plan(
        "--model", "llama-3-8b", *roomy, "--strategy", "host_only", "--subgroup", "2000000000"
    )
    _, both, _ = plan(
        "--model", "llama-3-8b", *roomy, "--strategy", "nvme_streamed", "--subgroup", "8000000000"
    )

    assert status == 1
    assert re.search(r"1\.\s+what is best, left to the planner \(--strategy auto\)", out)
    assert re.search(r"1\.\s+what is best, left to the planner \(no --subgroup\)", both)


def test_too_small_subgroups_are_refused_before_remedies_are_looked_for(plan: Any) -> None:
    little = ("--gpu-mem", "8GiB", "--ram", "16GiB")
    status, _, err = plan("--model", "llama-3-8b", *little, "--subgroup", "150000")

    assert status == 2
    assert "--subgroup: expected at least 160605" in err


def test_a_refusal_in_json_has_bytes(plan: Any) -> None:
    status, out, _ = plan("--model", "llama-3-8b", "--gpu-mem", "8GiB", "--ram", "16GiB", "--json")

    answer = json.loads(out)
    assert status == 1
    assert answer["fits"] is False
    assert answer["remedies"][0]["more_bytes"]["nvme"] > 100 * 2**30


@pytest.mark.parametrize(
    ("machine", "tiers"),
    [
        (("--gpu-mem", "8GiB", "--ram", "16GiB"), "device and host together"),
        (
            ("--gpus", "2", "--gpu-mem", "8GiB", "--ram", "16GiB", "--nvme", "20GB"),
            "device, host and drives together, for each rank,",
        ),
        (("--gpus", "0", "--ram", "16GiB"), "the host"),
    ],
)
def test_the_reason_names_all_tiers_that_are_too_small_together(
    plan: Any, machine: tuple[str, ...], tiers: str
) -> None:
    _, out, _ = plan("--model", "llama-3-8b", *machine, "--json")

    assert json.loads(out)["reason"].startswith(f"{tiers} cannot hold ")


def test_the_page_stands_by_itself(plan: Any, tmp_path: Path) -> None:
    file = tmp_path / "plan.html"
    status, _, _ = plan("--model", "llama-3.2-3b", *DESKTOP, "--html", str(file))

    text = file.read_text()
    assert status == 0
    assert not re.search(r"<script|<link|src=|href=|https?://(?!www\.w3\.org)", text)
    charts = [
        ElementTree.fromstring(each) for each in re.findall(r"<svg.*?</svg>", text, re.DOTALL)
    ]
    assert len(charts) >= 3
    labels = [chart.get("aria-label") for chart in charts]
    assert "memory of the device over the step" in labels
    assert labels[-1] == "what is busy over the step"
    for chart in charts:
        assert_drawn_within_its_box(chart)
        words = [each.text or "" for each in chart.iter("text")]
        assert all(words)
        assert any(re.search(r"\d%|\d B|iB", each) for each in words), "how much it is"
        assert any(re.search(r"\d s$", each) for each in words), "how long it is"


def test_a_refusal_says_what_is_assumed_of_the_model(plan: Any, tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps({**CONFIG, "model_type": "novel"}))
    asked = ("--model", str(file), "--gpu-mem", "1GiB", "--ram", "2GiB", "--sequence", "65536")

    status, out, _ = plan(*asked)

    assert status == 1
    assert "models of type novel are not known" in out
    assert any("novel" in note for note in json.loads(plan(*asked, "--json")[1])["notes"])


def test_the_page_says_what_a_run_takes_and_what_to_buy(plan: Any, tmp_path: Path) -> None:
    file = tmp_path / "plan.html"
    plan("--model", "llama-3-8b", *DESKTOP, "--tokens", "1M", "--html", str(file))
    page = file.read_text()

    for words in ("Next purchase", "The run", "Wear", "Activations", "published rates"):
        assert words in page


def test_tiles_of_the_sequence_are_planned_and_said(plan: Any) -> None:
    asked = ("--model", "gpt2", "--sequence", "1024", *DESKTOP)
    _, whole, _ = plan(*asked, "--json")
    _, tiled, _ = plan(*asked, "--tile-sequence", "256", "--json")
    _, said, _ = plan(*asked, "--tile-sequence", "256")

    assert json.loads(tiled)["step_s"] > json.loads(whole)["step_s"]
    assert "feed-forward blocks in 4 tiles of the sequence" in said


@pytest.mark.parametrize(
    ("arguments", "kept", "held"),
    [
        ((*DESKTOP, "--offload-inputs"), r"on drives \(128 MiB\)", "device"),
        ((*DESKTOP[:6], "--offload-inputs"), r"on the host \(128 MiB\)", "device"),
        (("--gpus", "0", "--ram", "64GiB", "--tflops", "1"), "the rest is recomputed", "host"),
        ((*DESKTOP, "--no-checkpointing"), "all are kept for the backward", "device"),
    ],
)
def test_the_answer_says_what_is_kept_of_activations_and_where(
    plan: Any, arguments: tuple[str, ...], kept: str, held: str
) -> None:
    _, out, _ = plan("--model", "llama-3.2-1b", *arguments)

    assert re.search(rf"^activations +.*{kept}", out, re.MULTILINE)
    assert re.search(rf'^activations="auto" +.*with at most [\d.]+ [MG]iB of the {held}', out, re.M)
    assert "saves 220 MiB where it is kept, its inputs of 8 MiB where it is recomputed" in out


def test_moved_inputs_are_said_to_take_no_time_in_a_plan(plan: Any) -> None:
    _, out, _ = plan("--model", "gpt2", "--offload-inputs", *DESKTOP, "--json")

    assert any("is in no phase" in note for note in json.loads(out)["notes"])


def test_a_refusal_has_a_page_with_what_would_do(plan: Any, tmp_path: Path) -> None:
    file = tmp_path / "plan.html"
    status, _, err = plan(
        "--model", "llama-3-8b", "--gpu-mem", "8GiB", "--ram", "16GiB", "--html", str(file)
    )

    text = file.read_text()
    assert status == 1
    assert err == ""
    assert "<h1>llama-3-8b does not fit</h1>" in text
    assert "more of NVMe (--nvme " in text


def test_the_page_shows_settings_as_people_write_them(plan: Any, tmp_path: Path) -> None:
    file = tmp_path / "plan.html"
    plan("--model", "gpt2", *DESKTOP, "--strategy", "interleaved", "--html", str(file))

    assert "{&#x27;" not in file.read_text()
    assert "<td>interleaved(" in file.read_text()


def test_without_a_rate_of_computing_only_the_update_is_promised(plan: Any) -> None:
    asked = ("--model", "llama-3.2-1b", "--gpus", "0", "--ram", "64GiB")
    _, out, _ = plan(*asked)
    _, answer, _ = plan(*asked, "--json")
    _, known, _ = plan(*asked, "--tflops", "1")

    between = r"\([\d.]+ m?s to [\d.]+ m?s with published rates\)"
    assert re.search(rf"fits: update [\d.]+ m?s {between} \+ forward and backward: unknown", out)
    assert "tokens/s" not in out
    assert re.search(r"^backward +unknown", out, re.MULTILINE)
    assert "bound by nothing" not in out
    told = json.loads(answer)
    assert told["tokens_per_s"] is None
    least_s, most_s = told["advice"]["update_range_s"]
    assert least_s <= told["update_s"] < most_s
    assert re.search(r"fits: [\d.]+ s a step", known)
    _, run, _ = plan(*asked, "--steps", "10")
    assert "The run" not in run
    assert "what a run takes is unknown" in run
    assert "tokens/s" in known


def test_what_ranks_exchange_takes_time_and_what_the_engine_refuses_is_said(plan: Any) -> None:
    asked = ("--model", "llama-3.2-1b", "--gpu-mem", "24GiB", "--ram", "256GiB")
    one, eight = (json.loads(plan(*asked, "--gpus", gpus, "--json")[1]) for gpus in ("1", "8"))

    assert one["gathering_s"] == 0
    # Three times the others' 2-byte parameters: two gathers, and gradients as large.
    sent = 3 * 2 * one["parameters"] * 7 / 8
    assert eight["gathering_s"] == pytest.approx(sent / (89.6e9 / 16), rel=0.01)
    assert eight["step_s"] > one["step_s"] + 0.5 * eight["gathering_s"]
    assert any("refuses several ranks on GPUs" in note for note in eight["notes"])
    assert not any("ranks" in note for note in one["notes"])


def test_a_phase_is_bound_by_the_exchange_between_ranks_where_that_takes_longest(
    plan: Any,
) -> None:
    asked = ("--model", "llama-3.2-1b", "--gpu-mem", "24GiB", "--ram", "256GiB", "--gpus", "8")
    many = ("--accumulation", "3", "--tile-sequence", "512")
    for more in ((), many):
        answer = json.loads(plan(*asked, *more, "--json")[1])
        _, forward, backward = answer["phases"]
        exchanged = sum(
            phase["seconds"] * phase["utilisation"]["exchange between ranks"]
            for phase in (forward, backward)
        )

        assert forward["binding"] == backward["binding"] == "exchange between ranks"
        assert exchanged == pytest.approx(answer["gathering_s"] / answer["micro_batches"], rel=1e-6)
    assert "bound by exchange between ranks" in plan(*asked)[1]
    fast = json.loads(plan("--model", "llama-3-8b", "--machine", "h200_node", "--json")[1])
    assert fast["phases"][-1]["binding"] == "compute"


@pytest.mark.parametrize(
    ("arguments", "precision", "activations"),
    [
        (("--precision", "bf16_autocast"), "bf16_autocast", {"recompute": "blocks"}),
        (("--precision", "fp32", "--no-checkpointing"), "fp32", {}),
        (("--lora", "8"), "model", {"recompute": "blocks"}),
        (("--offload-inputs",), "bf16", {"at": "nvme", "recompute": "blocks"}),
        (
            ("--offload-inputs", "--nvme", "0", "--machine", "desktop_4090"),
            "bf16",
            {"at": "host", "recompute": "blocks", "host_bytes": 16 * 2048 * 2048 * 2},
        ),
    ],
)
def test_the_settings_of_an_answer_make_the_training_that_was_planned(
    plan: Any, arguments: tuple[str, ...], precision: str, activations: dict[str, Any]
) -> None:
    there = () if "--machine" in arguments else DESKTOP
    asked = ("--model", "llama-3.2-1b", *there, "--accumulation", "4", *arguments)
    answer = json.loads(plan(*asked, "--json")[1])

    config = EngineConfig.from_mapping(answer["settings"])
    assert config.precision.value == precision
    assert config.accumulation_steps == 4
    assert config.activations == ActivationsConfig(**activations)
    assert config.subgroup_numel == answer["settings"]["subgroup_numel"]
    is_other = precision == "model"
    assert is_other == any("load the base in 16 bits" in note for note in answer["notes"])
    said = plan(*asked)[1]
    assert re.search(rf"^precision +{precision}", said, re.MULTILINE)
    recomputes = re.search(r"^activations .*recompute=blocks", said, re.MULTILINE)
    assert bool(recomputes) == bool(activations)


def test_a_refusal_of_several_gpus_says_that_the_engine_takes_one(plan: Any) -> None:
    asked = ("--model", "llama-3.2-1b", "--gpu-mem", "4GiB", "--ram", "9GiB", "--gpus")
    one, four = (plan(*asked, gpus, "--json") for gpus in ("1", "4"))

    assert (one[0], four[0]) == (1, 1)
    assert any("refuses several ranks on GPUs" in note for note in json.loads(four[1])["notes"])
    assert "refuses several ranks on GPUs" in plan(*asked, "4")[1]
    assert "several ranks" not in one[1]


def assert_drawn_within_its_box(chart: ElementTree.Element) -> None:
    """Assert that there is something in a chart, and that all of it can be seen."""
    _, _, width, height = map(float, (chart.get("viewBox") or "").split())
    across, down = [], []
    for shape in chart.iter():
        across += [float(shape.attrib[name]) for name in ("x", "x1", "x2") if name in shape.attrib]
        down += [float(shape.attrib[name]) for name in ("y", "y1", "y2") if name in shape.attrib]
        for point in shape.get("points", "").split():
            at, value = map(float, point.split(","))
            across.append(at)
            down.append(value)
    assert sum(shape.tag in {"polygon", "rect"} for shape in chart.iter()) > 1
    assert all(0 <= at <= width for at in across)  # nor is one of them not a number
    assert all(0 <= value <= height for value in down)


def test_a_config_of_ones_own_is_planned(plan: Any, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))

    status, out, _ = plan("--model", str(tmp_path), *DESKTOP)

    assert status == 0
    assert f"{tmp_path.name} fits" in out


def test_a_config_whose_type_is_a_list_is_refused(plan: Any, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**CONFIG, "model_type": ["llama"]}))

    status, _, err = plan("--model", str(tmp_path), *DESKTOP)

    assert status == 2
    assert "config.model_type: expected a text, got ['llama']" in err


@pytest.mark.parametrize(
    ("stated", "as_if"),
    [
        ({"dtype": "bfloat16"}, "bf16"),
        ({"torch_dtype": "float16"}, "fp16"),
        ({"dtype": "torch.float32"}, "fp32"),
    ],
)
def test_precision_model_is_what_the_config_states(
    plan: Any, tmp_path: Path, stated: dict[str, str], as_if: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**CONFIG, **stated}))

    _, out, _ = plan("--model", str(tmp_path), *DESKTOP, "--precision", "model")

    assert out == plan("--model", str(tmp_path), *DESKTOP, "--precision", as_if)[1]


@pytest.mark.parametrize(
    ("stated", "said"), [({}, "states no dtype"), ({"dtype": "float8"}, "states float8")]
)
def test_precision_model_is_refused_where_no_known_dtype_is_stated(
    plan: Any, tmp_path: Path, stated: dict[str, str], said: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**CONFIG, **stated}))

    status, _, err = plan("--model", str(tmp_path), *DESKTOP, "--precision", "model")

    assert status == 2
    assert f"--precision: expected bf16, fp16 or fp32: {tmp_path.name} {said}" in err


def test_a_known_machine_brings_its_memory_and_its_rates(plan: Any) -> None:
    status, out, _ = plan("--model", "llama-3-8b", "--machine", "h200_node")

    assert status == 0
    assert "8 x 1 x 1 sequences" in out
    assert "gathers and reductions take" in out
    assert "as published of a DGX H200" in out


def test_an_update_can_be_asked_to_end_before_the_forward_begins(plan: Any) -> None:
    arguments = ("--model", "llama-3.2-1b", *DESKTOP, "--json", "--overlap")
    beside, after = (json.loads(plan(*arguments, overlap)[1]) for overlap in ("on", "off"))

    assert [each["name"] for each in beside["phases"]] == ["update and forward", "backward"]
    assert [each["name"] for each in after["phases"]] == ["update", "forward", "backward"]
    assert "overlap" not in beside["settings"]
    assert after["settings"]["overlap"] == "off"
    assert json.loads(plan(*arguments, "auto")[1])["step_s"] <= min(
        beside["step_s"], after["step_s"]
    )


def test_without_a_gpu_there_is_one_memory(plan: Any) -> None:
    status, out, _ = plan("--model", "gpt2", "--gpus", "0", "--ram", "16GiB")

    assert status == 0
    assert "device:" not in out
    assert "host_only" in out


@pytest.mark.parametrize("strategy", ["device_only", "interleaved"])
def test_without_a_gpu_the_cpu_makes_all_updates_whatever_the_strategy(
    plan: Any, strategy: str
) -> None:
    asked = ("--model", "gpt2", "--gpus", "0", "--ram", "16GiB", "--json", "--strategy")
    alone, other = (json.loads(plan(*asked, name)[1]) for name in ("host_only", strategy))

    assert other["update_s"] == pytest.approx(alone["update_s"], rel=1e-3)
    assert other["least_update_s"] == pytest.approx(alone["least_update_s"], rel=1e-3)
    assert other["update_utilisation"].keys() == {"host"}


def test_models_and_machines_are_listed(plan: Any) -> None:
    status, out, _ = plan("--models")

    assert status == 0
    assert "llama-3-70b" in out
    assert "70.55 billion" in out
    assert "desktop_4090" in out
    assert "RTX 4090 24 GB" in out
    assert "Samsung 990 PRO 2 TB" in out


def test_models_and_machines_are_listed_in_json(plan: Any) -> None:
    status, out, _ = plan("--models", "--json")

    listed = json.loads(out)
    assert status == 0
    assert {"name": "gpt2", "parameters": 124_439_808} in listed["models"]
    assert "desktop_4090" in {machine["name"] for machine in listed["machines"]}
    [gpu] = (gpu for gpu in listed["gpus"] if gpu["name"] == "RTX 4090 24 GB")
    assert (gpu["memory_bytes"], gpu["flops_per_s"]) == (24 << 30, 165.2e12)
    [drive] = (drive for drive in listed["drives"] if drive["name"] == "Samsung 990 PRO 2 TB")
    assert drive["rated_bytes"] == 1200 * 10**12


def test_the_program_of_the_page_runs_without_torch_and_commands_of_the_page_are_understood(
    plan: Any,
) -> None:
    page = (Path(__file__).resolve().parents[2] / "docs/planner.md").read_text()
    [program] = re.findall(r"^```python\n(.*?)^```$", page, flags=re.MULTILINE | re.DOTALL)
    source = f"import sys\nsys.modules['torch'] = None\n{program}"
    run = subprocess.run(
        [sys.executable, "-W", "error", "-c", source], capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr
    assert "is bound by" in run.stdout

    commands = re.findall(r"^\$ infinity plan (.*)$", page, flags=re.MULTILINE)
    assert [plan(*command.split())[0] for command in commands] == [0, 1]
    assert f"its directory: {', '.join(FAMILIES)} |" in page


# --- rates ----------------------------------------------------------------------------------------


def rates_file(folder: Path, **more: float | None) -> Path:
    rates = Rates(
        h2d_bytes_per_s=20e9,
        d2h_bytes_per_s=20e9,
        host_update_params_per_s=1e9,
        device_update_params_per_s=3e10,
        nvme={"/mnt/a": DriveRates(read_bytes_per_s=3e9, write_bytes_per_s=2e9, **more)},
    )
    file = folder / "rates.json"
    file.write_text(json.dumps(rates.to_mapping()))
    return file


def test_rates_of_a_file_are_used(plan: Any, tmp_path: Path) -> None:
    file = rates_file(tmp_path, mixed_bytes_per_s=1e9)
    _, slow, _ = plan("--model", "llama-3-8b", *DESKTOP, "--rates", str(file), "--json")
    _, fast, _ = plan("--model", "llama-3-8b", *DESKTOP, "--json")

    assert json.loads(slow)["step_s"] > 1.5 * json.loads(fast)["step_s"]
    assert any("rates are those of" in note for note in json.loads(slow)["notes"])


def test_a_calibration_is_a_file_of_rates(plan: Any, tmp_path: Path) -> None:
    file = tmp_path / "calibration.json"
    file.write_text(json.dumps(calibration().to_mapping()))

    status, out, err = plan(
        "--model", "gpt2", "--gpus", "0", "--ram", "16GiB", "--rates", str(file), "--json"
    )

    assert status == 0, err
    assert any("rates were measured" in note for note in json.loads(out)["notes"])


def measured_file(folder: Path, measured: Calibration | None = None) -> str:
    file = folder / "calibration.json"
    file.write_text(json.dumps((measured or calibration()).to_mapping()))
    return str(file)


def test_a_machine_without_its_gpu_computes_at_no_rate_that_the_gpu_had(
    plan: Any, tmp_path: Path
) -> None:
    of_gpu = replace(calibration(), machine={"cpu": "Imaginary 9000", "device": "cuda: RTX 4090"})
    there = ("--gpus", "0", "--ram", "16GiB", "--rates", measured_file(tmp_path, of_gpu))

    answer = json.loads(plan("--model", "gpt2", *there, "--json")[1])
    assert any("modules computed on a GPU then" in note for note in answer["notes"])
    given = json.loads(plan("--model", "gpt2", *there, "--tflops", "0.2", "--json")[1])
    assert given["step_s"] > 2 * answer["step_s"]  # of the update alone


def test_what_drives_keep_beside_modules_is_that_of_the_calibration(
    plan: Any, tmp_path: Path
) -> None:
    def step_s(part: float) -> float:
        kept = replace(drive(), mixed_beside_blocks=figure(part, Unit.PART))
        file = measured_file(tmp_path, calibration().with_drives({"/mnt/a": kept}))
        there = ("--gpus", "0", "--ram", "6GiB", "--nvme", "100GB", "--rates", file)
        asked = ("--model", "llama-3.2-1b", "--sequence", "32", "--parameters", "nvme", *there)
        status, out, err = plan(*asked, "--json")
        assert status == 0, err
        answered: float = json.loads(out)["step_s"]
        return answered

    assert step_s(0.1) > 1.1 * step_s(1.0)


@pytest.mark.parametrize("of_drive", [False, True])
def test_rates_of_a_busy_machine_count_as_given_by_hand(
    plan: Any, tmp_path: Path, of_drive: bool
) -> None:
    busy = replace(calibration(), others_share=0.3)
    if of_drive:
        busy = calibration().with_drives({"/mnt/a": replace(drive(), others_share=0.3)})
    there = ("--gpus", "0", "--ram", "16GiB", "--rates", measured_file(tmp_path, busy))
    asked = ("--model", "gpt2", *there, "--json")
    _, out, _ = plan(*asked, *(("--nvme", "100GB") if of_drive else ()))

    if of_drive:  # which a plan without drives does not use
        assert json.loads(plan(*asked)[1])["advice"]["rates_are"] == "measured"
    answer = json.loads(out)
    assert answer["advice"]["rates_are"] == "given"
    assert any("other processes used 30% of the processors" in note for note in answer["notes"])


def test_ranks_divide_what_a_calibration_measured_of_one_process(plan: Any, tmp_path: Path) -> None:
    small = (
        "--model",
        "llama-3.2-1b",
        "--gpu-mem",
        "8GiB",
        "--ram",
        "16GiB",
        "--nvme",
        "100GB",
        "--overlap",
        "off",
    )
    # What checksums take depends on how much is swapped, which is another part on four ranks.
    measured, none = calibration(), figure(1.0, Unit.PART)
    adamw = {
        threads: replace(figures, summing=none)
        for threads, figures in measured.host_updates["adamw"].items()
    }
    file = measured_file(tmp_path, replace(measured, host_updates={"adamw": adamw}))
    streamed = (*small, "--strategy", "nvme_streamed", "--rates", file, "--json")
    one, four = (json.loads(plan(*streamed, "--gpus", ranks)[1]) for ranks in ("1", "4"))

    assert four["least_update_s"] > 0.9 * one["least_update_s"]
    # Each rank pays for its own operations meanwhile, and has a quarter of them.
    assert four["update_s"] * four["update_utilisation"]["host"] == pytest.approx(
        one["update_s"] * one["update_utilisation"]["host"], rel=0.03
    )


def test_how_fast_modules_compute_changes_nothing_of_updates(plan: Any, tmp_path: Path) -> None:
    there = (
        "--gpu-mem",
        "8GiB",
        "--ram",
        "16GiB",
        "--strategy",
        "nvme_streamed",
        "--overlap",
        "off",
        "--json",
    )
    asked = ("--model", "llama-3.2-1b", *there, "--nvme", "2TB", "--rates", measured_file(tmp_path))
    measured, given = (json.loads(plan(*asked, *more)[1]) for more in ((), ("--tflops", "50")))

    assert given["update_s"] == measured["update_s"]
    assert given["step_s"] < 0.5 * measured["step_s"]


def test_the_host_holds_what_drives_need_to_be_used(plan: Any) -> None:
    _, out, _ = plan("--model", "llama-3-8b", *DESKTOP, "--json")

    holdings = {
        each["what"]: each["bytes"] for each in json.loads(out)["memory"]["host"]["holdings"]
    }
    assert holdings["the I/O queue's own"] == 16 << 20


def test_what_updates_take_from_drives_is_in_the_rates_of_a_known_machine_as_well(
    plan: Any, tmp_path: Path
) -> None:
    there = (
        "--gpu-mem",
        "8GiB",
        "--ram",
        "16GiB",
        "--strategy",
        "nvme_streamed",
        "--overlap",
        "off",
        "--json",
    )
    asked = ("--model", "llama-3.2-1b", *there, "--rates", measured_file(tmp_path))
    known, given = (
        json.loads(plan(*asked, *more)[1])["update_s"]
        for more in (("--machine", "desktop_4090"), ("--nvme", "2TB"))
    )

    assert known == pytest.approx(given, rel=0.01)


@pytest.mark.parametrize("drives", [(), ("--drive", "samsung 990 pro 2tb")])
def test_nvme_0_plans_without_the_drives_of_a_machine(plan: Any, drives: tuple[str, ...]) -> None:
    large = ("--model", "llama-3-70b", "--machine", "desktop_4090", *drives)

    assert plan(*large)[0] == 0
    status, out, _ = plan(*large, "--nvme", "0")
    assert status == 1
    assert "more of NVMe (--nvme " in out


@pytest.mark.parametrize(
    "more", [("--gpu-mem", "8GiB"), ("--gpus", "0", "--nvme", "2TB", "--strategy", "nvme_streamed")]
)
def test_a_rate_that_is_missing_is_told_with_how_to_get_it(
    plan: Any, tmp_path: Path, more: tuple[str, ...]
) -> None:
    file = tmp_path / "rates.json"
    file.write_text(
        json.dumps(
            Rates(host_update_params_per_s=1e9, device_update_params_per_s=1e10).to_mapping()
        )
    )

    status, _, err = plan("--model", "llama-3.2-1b", "--ram", "32GiB", *more, "--rates", str(file))

    assert status == 2
    assert re.search(
        r"--rates: expected a file with Rates\.[\w.]+, which this plan uses: `infinity calibrate DIR`",
        err,
    )


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "a file in JSON"),
        ("[" * 100_000, "a file in JSON"),
        ('{"version": 9}', r"--rates\.version"),
        ('{"h2d": 1}', r"--rates"),
        ('{"version": 2, "calibration": {}}', "infinity calibrate --json FILE"),
    ],
)
def test_a_file_without_rates_is_refused(plan: Any, tmp_path: Path, text: str, said: str) -> None:
    file = tmp_path / "rates.json"
    file.write_text(text)

    status, _, err = plan("--model", "gpt2", *DESKTOP, "--rates", str(file))

    assert status == 2
    assert re.search(said, err)


@pytest.mark.parametrize(
    ("drive", "name", "value"),
    [
        (False, "h2d_bytes_per_s", 1e-300),
        (False, "host_update_params_per_s", 1e-320),
        (False, "host_start_s", 1e300),
        (True, "read_bytes_per_s", 1e-320),
        (True, "write_bytes_per_s", 1e300),
    ],
)
def test_rates_that_no_machine_has_are_refused(
    plan: Any, tmp_path: Path, drive: bool, name: str, value: float
) -> None:
    file = rates_file(tmp_path)
    rates = json.loads(file.read_text())
    (rates["nvme"]["/mnt/a"] if drive else rates)[name] = value
    file.write_text(json.dumps(rates))
    status, _, err = plan("--model", "llama-3-8b", *DESKTOP, "--rates", str(file))

    assert status == 2
    place = "--rates.nvme['/mnt/a']" if drive else "--rates"
    assert f"{place}.{name}: expected a number from " in err


def test_a_config_with_a_wrong_size_is_refused_by_the_name_of_the_option(
    plan: Any, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**CONFIG, "vocab_size": 0}))
    _, _, err = plan("--model", str(tmp_path), *DESKTOP)

    assert "--model: config.vocab_size: expected a whole number, 1 or more, got 0" in err


# --- wrong input ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "--model: expected a preset"),
        (("--model", "llama3-8b", *DESKTOP), "nearest: llama-3-8b"),
        (("--model", "/absent/config.json", *DESKTOP), "No such file"),
        (("--model", "gpt2", "--ram", "64GiB"), "--gpu-mem: expected a size such as"),
        (("--model", "gpt2", "--gpu-mem", "24GiB"), "--ram: expected a size such as"),
        (("--model", "gpt2", "--gpu-mem", "24G", "--ram", "64GiB"), "--gpu-mem: expected"),
        (("--model", "gpt2", "--gpu-mem", "0", "--ram", "64GiB"), "more than 0 bytes"),
        (("--model", "gpt2", "--machine", "h100"), "--machine: expected one of"),
        (("--model", "gpt2", "--gpus", "-1", "--ram", "64GiB"), "--gpus: expected a number"),
        (("--model", "gpt2", *DESKTOP, "--gpus", "1000000"), "0 to 64: a plan is for one machine"),
        (("--model", "gpt2", "--gpu-mem", "24", "--ram", "64GiB"), 'did you mean "24GiB"?'),
        (("--model", "gpt2", "--gpu-mem", "24.5", "--ram", "64GiB"), 'did you mean "24.5GiB"?'),
        (("--model", "gpt2", *DESKTOP, "--tbw", "1200"), 'did you mean "1200TB"?'),
        (("--model", "gpt2", *DESKTOP[:6], "--tbw", "1200TB"), "--tbw: expected a size in --nvme"),
        (
            ("--model", "gpt2", *DESKTOP, "--nvme", "1TB"),
            "--nvme: expected one size, of all drives together: give the sum, got '2TB and 1TB'",
        ),
        (("--model", "gpt2", *DESKTOP, "--batch", "0"), "--batch: expected a whole number"),
        (("--model", "gpt2", *DESKTOP, "--batch", "9" * 400), "--batch: expected at most 1,000"),
        (
            ("--model", "gpt2", *DESKTOP, "--accumulation", "9" * 400),
            "--accumulation: expected at most 1,000,000,000",
        ),
        (("--model", "gpt2", *DESKTOP, "--steps", "9" * 5000), "--steps: expected a number such"),
        (("--model", "n" * 300, *DESKTOP), "--model: expected one of gpt2"),
        (("--model", "o/" + "n" * 300, *DESKTOP), "or the id of a preset"),
        (("--model", "gpt2", *DESKTOP, "--freeze", "a{99999999999}"), "a regular expression"),
        (("--model", "gpt2", *DESKTOP, "--sequence", "4096"), "--sequence: expected at most 1024"),
        (("--model", "gpt2", *DESKTOP, "--strategy", "best"), "--strategy: expected one of auto"),
        (("--model", "gpt2", *DESKTOP, "--strategy", "{x"), "--strategy: expected a name, or JSON"),
        (("--model", "gpt2", *DESKTOP, "--tflops", "0"), "--tflops: expected a positive number"),
        (("--model", "gpt2", *DESKTOP, "--tflops", "nan"), "--tflops: expected a positive number"),
        (("--model", "gpt2", *DESKTOP, "--tflops", "inf"), "--tflops: expected a positive number"),
        (
            ("--model", "gpt2", *DESKTOP, "--tflops", "1e-300"),
            "--tflops: expected a positive number",
        ),
        (
            ("--model", "gpt2", "--gpus", "0", "--gpu-mem", "8GiB", "--ram", "64GiB"),
            "--gpu-mem: expected nothing, as there are no GPUs",
        ),
        (
            ("--model", "gpt2", *DESKTOP[:6], "--strategy", "nvme_streamed"),
            "--nvme: expected a size",
        ),
        (("--model", "gpt2", *DESKTOP[:6], "--parameters", "nvme"), "--nvme: expected a size"),
        (("--model", "gpt2", *DESKTOP, "--subgroup", "10"), "--subgroup: expected at least"),
        (
            ("--model", "llama-3-8b", *DESKTOP, "--subgroup", "8192"),
            "--subgroup: expected at least 160605, as more than 50,000 subgroups take over ten",
        ),
        (("--model", "gpt2", *DESKTOP, "--rates", "/absent.json"), "--rates: expected a file"),
        (("--model", "gpt2", *DESKTOP, "--tokens", "10Q"), "--tokens: expected a number such as"),
        (("--model", "gpt2", *DESKTOP, "--steps", "0"), "--steps: expected a number such as"),
        (("--model", "gpt2", *DESKTOP, "--steps", "1.5"), "--steps: expected a number such as"),
        (
            ("--model", "gpt2", *DESKTOP, "--offload-inputs", "--no-checkpointing"),
            "--offload-inputs: expected --checkpointing with it",
        ),
        (
            ("--model", "gpt2", "--gpus", "0", "--ram", "64GiB", "--offload-inputs"),
            "--offload-inputs: expected drives with more than 18 MiB free for them (--nvme SIZE)",
        ),
        (
            ("--model", "gpt2", "--gpus=0", "--ram=64GiB", "--nvme=10MiB", "--offload-inputs"),
            "without a GPU, inputs of blocks are in the host's memory already",
        ),
        (
            ("--model", "gpt2", *DESKTOP, "--tile-sequence", "0"),
            "--tile-sequence: expected a whole number, 1 or more",
        ),
        (
            ("--model", "mixtral-8x7b", *DESKTOP, "--tile-sequence", "256"),
            "--tile-sequence: expected nothing with this model: it has experts",
        ),
        (
            ("--model", "gpt2", *DESKTOP, "--steps", "5", "--tokens", "1M"),
            "--steps: expected --tokens or --steps, not both",
        ),
        (
            ("--model", "gpt2", *DESKTOP, "--steps", "5", "--price-kwh", "1"),
            "--price-kwh: expected --watts beside it",
        ),
        (
            ("--model", "gpt2", *DESKTOP, "--steps", "5", "--watts", "-5"),
            "--watts: expected a number above 0",
        ),
        (
            ("--model", "gpt2", *DESKTOP, "--price-hour", "1"),
            "--price-hour: expected --tokens or --steps beside it",
        ),
        (
            ("--model", "gpt2", *DESKTOP, "--html", "/absent/plan.html"),
            "--html: expected a file that can be written",
        ),
    ],
)
def test_wrong_or_missing_input_is_told_by_the_name_of_its_option(
    plan: Any, arguments: tuple[str, ...], said: str
) -> None:
    status, out, err = plan(*arguments)

    assert status == 2
    assert said in err
    assert err.startswith("infinity plan: error: ")
    assert out == ""


def test_a_config_that_may_not_be_looked_for_is_refused(
    plan: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def closed(*_: object, **__: object) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(Path, "stat", closed)
    monkeypatch.setattr(Path, "read_text", closed)
    status, _, err = plan("--model", "/closed/config.json", *DESKTOP)

    assert status == 2
    assert "a config.json that can be read (Permission denied), got '/closed/config.json'" in err


def test_without_a_home_an_id_is_refused_and_not_the_user(
    plan: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HOME", raising=False)
    for name in ("HF_HUB_CACHE", "HF_HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os, "getuid", lambda: 2**31 - 7)
    status, _, err = plan("--model", "some/model", *DESKTOP)

    assert status == 2
    assert "with its config.json in ~/.cache/huggingface/hub" in err


LARGE_HEAD = ("--ram", "64GiB", "--gpu-mem", "1800MiB", "--sequence", "64")


def large_head(folder: Path) -> str:
    path = folder / "config.json"
    path.write_text(json.dumps({**CONFIG, "vocab_size": 512_000}))
    return str(path)


def test_a_giant_layer_is_refused_with_tiles_as_a_way_out(plan: Any, tmp_path: Path) -> None:
    status, out, _ = plan("--model", large_head(tmp_path), *LARGE_HEAD)

    assert status == 1
    assert "model.embed_tokens and lm_head in 20 tiles" in out
    assert "--tiling auto" in out


def test_a_plan_with_tiles_says_what_is_cut_why_and_what_more_would_do(
    plan: Any, tmp_path: Path
) -> None:
    status, out, _ = plan("--model", large_head(tmp_path), *LARGE_HEAD, "--tiling", "auto")

    assert status == 0
    assert re.search(r"tiling=\"auto\" +model.embed_tokens and lm_head in 20 tiles", out)
    assert "whole, the largest works with 1.953 GiB, more than half of" in out
    assert re.search(r"with whole layers +nothing fits", out)
    assert re.search(r"with 1 GiB more +10 tiles of at most 200 MiB", out)
    assert re.search(r"tiling +auto", out)

    _, out, _ = plan("--model", large_head(tmp_path), *LARGE_HEAD, "--tiling", "auto", "--json")
    tiling = json.loads(out)["tiling"]
    assert tiling["layers"] == ["model.embed_tokens", "lm_head"]
    assert tiling["step_s_with_whole_layers"] is None


def test_layers_are_cut_anew_for_the_memory_that_a_remedy_adds(plan: Any) -> None:
    asked = ("--model", "llama-3-8b", "--gpu-mem", "1GiB", "--ram", "230GiB", "--tiling", "auto")
    status, out, _ = plan(*asked)
    assert status == 1
    offered, with_chunked_loss = re.findall(r"--gpu-mem (\d+)GiB", out)

    assert plan(*asked, "--gpu-mem", f"{offered}GiB")[0] == 0
    assert plan(*asked, "--gpu-mem", f"{int(offered) - 1}GiB")[0] == 1
    chunked = (*asked, "--loss", "chunked", "--gpu-mem")
    assert plan(*chunked, f"{with_chunked_loss}GiB")[0] == 0
    assert plan(*chunked, f"{int(with_chunked_loss) - 1}GiB")[0] == 1


def test_layers_are_cut_anew_for_the_training_that_a_remedy_changes(plan: Any) -> None:
    asked = ("--model", "llama-3-8b", "--gpu-mem", "1GiB", "--ram", "230GiB", "--tiling", "auto")
    _, out, _ = plan(*asked)
    length = re.search(r"--sequence (\d+)", out)

    assert length is not None
    assert plan(*asked, "--sequence", length[1])[0] == 0
    assert plan(*asked, "--sequence", str(int(length[1]) + 128))[0] == 1


def test_tiling_that_cuts_nothing_says_so(plan: Any, tmp_path: Path) -> None:
    given = ("--model", large_head(tmp_path), "--ram", "64GiB", "--gpu-mem", "24GiB")
    _, out, _ = plan(*given, "--tiling", "auto", "--sequence", "64")

    assert 'tiling="auto" cuts no layer' in out


def test_a_large_micro_batch_that_fits_is_offered_with_as_many_sequences_a_step(
    plan: Any,
) -> None:
    asked = ("--model", "opt-1.3b", "--gpu", "3090", "--ram", "24GiB")
    status, out, _ = plan(*asked, "--batch", "64")
    assert status == 1
    offered = re.search(r"--batch (\d+) --accumulation (\d+)", out)
    assert offered is not None
    batch, steps = int(offered[1]), int(offered[2])

    assert batch * steps == 64
    assert plan(*asked, "--batch", str(batch), "--accumulation", str(steps))[0] == 0
    twice = ("--batch", str(2 * batch), "--accumulation", str(steps // 2))
    assert plan(*asked, *twice)[0] == 1


def test_a_smaller_micro_batch_makes_no_larger_step(plan: Any) -> None:
    asked = ("--model", "opt-1.3b", "--gpu", "3090", "--ram", "24GiB", "--batch")

    assert "2 micro-batches of 7 in a step" in plan(*asked, "14")[1]
    assert "2 micro-batches of 9 in a step" in plan(*asked, "17")[1]


def test_without_a_rate_of_computing_no_life_of_drives_is_promised(plan: Any) -> None:
    asked = ("--model", "llama-3-8b", "--gpus", "0", "--ram", "32GiB", "--nvme", "2TB")
    _, text, _ = plan(*asked, "--tbw", "1200TB")
    _, told, _ = plan(*asked, "--json")

    answer = json.loads(told)
    assert "forward and backward: unknown" in text
    assert "drives' life" not in text
    assert "a day" not in text
    assert answer["wear"] is None
    assert answer["advice"]["step_range_s"] is None


def test_tflops_is_said_to_be_what_a_model_reaches_of_the_data_sheet(
    plan: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(["plan", "--help"])
    said = " ".join(capsys.readouterr().out.split())
    _, _, refused = plan("--model", "gpt2", *DESKTOP, "--tflops", "0")
    page = (Path(__file__).parents[2] / "docs" / "planner.md").read_text()
    gpu = replace(DESKTOP_4090.gpu, achieved_flops_per_s=None, peak_flops_per_s=1.0)

    part = f"about {gpu.training_flops_per_s(fp32=False):g} of the data sheet's"
    for text in (said, refused, page):
        assert "the rate that your model reaches" in text
        assert part in text


def test_the_time_of_further_micro_batches_has_its_line(plan: Any) -> None:
    asked = ("--model", "llama-3-8b", *DESKTOP, "--accumulation", "8")
    _, text, _ = plan(*asked)
    answer = json.loads(plan(*asked, "--json")[1])

    phases = sum(phase["seconds"] for phase in answer["phases"])
    assert re.search(r"7 micro-batches more +[\d.]+ s, forward and backward again", text)
    assert answer["step_s"] == pytest.approx(phases + answer["further_micro_batches_s"])


def test_larger_gpus_of_the_catalogue_are_offered_by_name(plan: Any) -> None:
    asked = ("--model", "llama-3-8b", "--gpu", "4090", "--ram", "64GiB", "--nvme", "1TB")
    offers = {it["what"] for it in json.loads(plan(*asked, "--json")[1])["advice"]["purchases"]}
    typed = {
        it["what"]
        for it in json.loads(plan(*asked, "--tflops", "60", "--json")[1])["advice"]["purchases"]
    }

    assert {"RTX 5090 32 GB in a PCIe 5 slot", "RTX 6000 Ada 48 GB"} < offers
    assert "twice the GPU memory" in typed
