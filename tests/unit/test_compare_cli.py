"""`infinity compare`, and machines that are described by parts or are the one at hand."""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import infinity_engine.calibration
import infinity_engine.machine.capacity
import infinity_engine.machine.gpus
from infinity_engine.cli.main import main
from infinity_engine.machine.gpus import Gpu, Gpus
from infinity_engine.plan import Capacity
from infinity_engine.units import GiB
from support.calibrations import calibration, drive

SMALL = ("--model", "llama-3.2-1b")


@pytest.fixture
def infinity(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that runs a command line, and returns its exit status, output and
    errors.
    """

    def run(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setenv("COLUMNS", "200")
        status = main(arguments)
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return run


def test_the_lines_in_the_documentation_are_those_that_are_printed(infinity: Any) -> None:
    page = (Path(__file__).parents[2] / "docs" / "planner.md").read_text()
    [(command, told)] = re.findall(r"```console\n\$ infinity (compare .*)\n([^`]*)```", page)

    _, out, _ = infinity(*shlex.split(command))

    printed = [" ".join(line.split()) for line in out.splitlines()]
    for line in told.splitlines():
        shown = " ".join(line.split()).removesuffix("...")
        assert any(each.startswith(shown) for each in printed), shown


@pytest.fixture
def this_machine(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that makes this machine one with an A100, calibrated or not."""

    def make(
        *,
        calibrated: bool,
        gpu: str = "NVIDIA A100-SXM4-80GB",
        free: int = 70 * GiB,
        host: int = 50 * GiB,
    ) -> None:
        one = Gpu(
            name=gpu,
            total_bytes=80 * GiB,
            free_bytes=free,
            bus_id=None,
            numa_node=None,
            link=None,
        )
        gpus = Gpus(
            devices=(one,),
            driver="570",
            cuda="12.8",
            reason=None,
            visible_devices=None,
            visible_count=1,
        )
        monkeypatch.setattr(infinity_engine.machine.gpus, "probe_gpus", lambda: gpus)
        monkeypatch.setattr(
            infinity_engine.machine.capacity,
            "probe_capacity",
            lambda directories, *, device_free_bytes: Capacity(
                device=max(device_free_bytes - GiB, 0),
                host=host,
                nvme=dict.fromkeys(directories, 100 * GiB),
            ),
        )
        kept = calibration() if calibrated else None
        monkeypatch.setattr(
            infinity_engine.calibration, "kept_calibration", lambda directories: kept
        )

    return make


# --- parts ----------------------------------------------------------------------------------------


def test_a_gpu_and_drives_by_name_bring_their_memory_rates_and_life(infinity: Any) -> None:
    asked = ("plan", "--model", "llama-3-8b", "--ram", "64GiB", "--json")
    drives = ("--drive", "samsung 990 pro", "--drive", "990 pro 4tb")
    answer = json.loads(infinity(*asked, "--gpu", "4090", *drives)[1])

    assert answer["memory"]["device"]["limit_bytes"] == pytest.approx(0.95 * 24 * GiB, rel=1e-6)
    assert answer["memory"]["nvme"]["limit_bytes"] == pytest.approx(0.95 * 6e12, rel=1e-6)
    assert answer["wear"]["rated_bytes"] == 3600 * 10**12
    assert any("as published of RTX 4090 24 GB and" in note for note in answer["notes"])
    assert any("it also fits Samsung 990 PRO 4 TB" in note for note in answer["notes"])


def test_a_slower_slot_makes_a_longer_step(infinity: Any) -> None:
    asked = ("plan", *SMALL, "--gpu", "5090", "--gpu-mem", "8GiB", "--ram", "64GiB", "--json")
    fast, slow = (
        json.loads(infinity(*asked, *more)[1])["step_s"] for more in ((), ("--pcie", "3"))
    )

    assert slow > 1.1 * fast


def test_energy_of_a_run_is_that_of_the_gpus_where_no_other_is_given(infinity: Any) -> None:
    asked = ("plan", *SMALL, "--gpu", "4090", "--ram", "64GiB", "--steps", "1000", "--json")
    answer = json.loads(infinity(*asked)[1])

    run = answer["advice"]["run"]
    assert run["kwh"] == pytest.approx(450 * run["seconds"] / 3.6e6)
    assert any("the GPUs alone" in note for note in answer["notes"])


def test_energy_of_a_known_machine_is_that_of_its_gpus_in_the_catalogue(infinity: Any) -> None:
    asked = ("plan", *SMALL, "--machine", "h200_node", "--steps", "1000", "--json")
    run = json.loads(infinity(*asked)[1])["advice"]["run"]

    assert run["kwh"] == pytest.approx(8 * 700 * run["seconds"] / 3.6e6)


def test_without_gpus_energy_needs_watts(infinity: Any, this_machine: Any) -> None:
    this_machine(calibrated=True)
    asked = ("plan", *SMALL, "--here", "--gpus", "0", "--steps", "10")
    run = json.loads(infinity(*asked, "--json")[1])["advice"]["run"]
    status, _, err = infinity(*asked, "--price-kwh", "0.3")

    assert run["kwh"] is None
    assert status == 2
    assert "--price-kwh: expected --watts beside it" in err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--gpu", "voodoo", "--ram", "64GiB"), "--gpu: expected one of RTX"),
        (
            ("--gpu", "voodoo", "--ram", "64GiB"),
            "to plan for another GPU, give --gpu-mem and --tflops (about 0.4 of the data sheet's)",
        ),
        (
            ("--gpu", "4070", "--ram", "64GiB"),
            "--gpu: expected one of RTX 4070 Ti 12 GB, or another name that `infinity plan --models`",
        ),
        (("--gpu", "4090", "--ram", "64GiB", "--drive", "floppy"), "--drive: expected one of"),
        (("--here", "--gpu", "4090"), "--here: expected without --machine, --gpu and --drive"),
        (("--pcie", "4"), "--pcie: expected --gpu beside it"),
        (
            ("--gpu", "4090", "--ram", "64GiB", "--pcie", "4", "--rates", "r.json"),
            "--pcie: expected nothing beside --rates",
        ),
        (("--gpu", "4090", "--gpus", "0", "--ram", "64GiB"), "--gpu: expected nothing, as there"),
        (("--machine", "gh200", "--nvme", "2TB"), "--nvme: expected --drive beside it: a GH200"),
        (("--here", "/absent"), "--here: expected a directory that can be used"),
    ],
)
def test_wrong_parts_are_refused_by_the_name_of_their_option(
    infinity: Any, arguments: tuple[str, ...], said: str
) -> None:
    status, out, err = infinity("plan", *SMALL, *arguments)

    assert (status, out) == (2, "")
    assert said in err


# --- this machine ---------------------------------------------------------------------------------


@pytest.mark.parametrize("arguments", [(), ("--here",)])
def test_without_sizes_the_machine_at_hand_is_planned_for(
    infinity: Any, this_machine: Any, arguments: tuple[str, ...]
) -> None:
    this_machine(calibrated=True)
    status, out, _ = infinity("plan", *SMALL, *arguments, "--json")
    answer = json.loads(out)

    assert status == 0
    assert answer["memory"]["device"]["limit_bytes"] == 69 * GiB
    assert answer["memory"]["host"]["limit_bytes"] == 50 * GiB
    assert answer["advice"]["rates_are"] == "measured"
    assert any("of one process of this machine" in note for note in answer["notes"])


def test_a_plan_is_for_the_gpu_that_the_environment_leaves_visible(
    infinity: Any, this_machine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    this_machine(calibrated=False)
    gpus = infinity_engine.machine.gpus.probe_gpus()
    other = replace(gpus.devices[0], name="NVIDIA GeForce RTX 3090", free_bytes=20 * GiB)
    two = replace(gpus, devices=(*gpus.devices, other), visible_devices="1")
    monkeypatch.setattr(infinity_engine.machine.gpus, "probe_gpus", lambda: two)
    answer = json.loads(infinity("plan", *SMALL, "--here", "--json")[1])

    assert answer["memory"]["device"]["limit_bytes"] == 19 * GiB
    assert any("as published of RTX 3090" in note for note in answer["notes"])


def test_a_gpu_with_nothing_free_holds_nothing(infinity: Any, this_machine: Any) -> None:
    this_machine(calibrated=False, free=0)

    assert infinity("plan", *SMALL, "--here", "--json")[0] == 1


def test_a_machine_without_calibration_has_published_rates_of_its_gpu(
    infinity: Any, this_machine: Any
) -> None:
    this_machine(calibrated=False)
    notes = json.loads(infinity("plan", *SMALL, "--here", "--json")[1])["notes"]

    assert any("as published of A100 SXM 80 GB" in note for note in notes)
    assert any("which is kept for this command" in note for note in notes)


def test_a_gpu_that_the_catalogue_lacks_has_the_rates_of_the_desktop(
    infinity: Any, this_machine: Any
) -> None:
    this_machine(calibrated=False, gpu="Voodoo 2")
    notes = json.loads(infinity("plan", *SMALL, "--here", "--json")[1])["notes"]

    assert any("assumed to be those of a desktop with one RTX 4090" in note for note in notes)


def test_more_gpus_than_this_machine_has_are_refused_unless_their_memory_is_given(
    infinity: Any, this_machine: Any
) -> None:
    this_machine(calibrated=False)
    status, _, err = infinity("plan", *SMALL, "--here", "--gpus", "2")

    assert status == 2
    assert "--gpus: expected at most 1, as this machine has no more" in err
    assert infinity("plan", *SMALL, "--here", "--gpus", "2", "--gpu-mem", "80GiB")[0] == 0


def test_a_gpu_computes_fp32_at_its_rate_without_tensor_cores(infinity: Any) -> None:
    asked = ("plan", "--model", "gpt2-xl", "--gpu", "a100 sxm", "--ram", "200GiB", "--json")
    fast, slow = (
        json.loads(infinity(*asked, "--precision", precision)[1])
        for precision in ("bf16_autocast", "fp32")
    )

    assert slow["step_s"] > 10 * fast["step_s"]
    assert any("without TF32" in note for note in slow["notes"])


def test_drives_of_directories_hold_what_memory_does_not(infinity: Any, this_machine: Any) -> None:
    this_machine(calibrated=False)
    asked = ("plan", "--model", "llama-3-8b", "--here", "/mnt/a", "/mnt/b", "--gpu-mem", "8GiB")
    status, out, _ = infinity(*asked, "--ram", "40GiB", "--json")
    answer = json.loads(out)

    assert status == 0
    assert answer["memory"]["nvme"]["limit_bytes"] == 200 * GiB
    assert answer["memory"]["nvme"]["held_bytes"] > 0


@pytest.mark.parametrize("calibrated", [False, True])
def test_two_directories_of_one_drive_have_its_rate_once(
    infinity: Any, this_machine: Any, monkeypatch: pytest.MonkeyPatch, calibrated: bool
) -> None:
    small = ("--gpu-mem", "6GiB", "--ram", "8GiB", "--tflops", "100", "--overlap", "off", "--json")

    def step_s(*directories: str, sharing: int) -> float:
        this_machine(calibrated=calibrated)
        if calibrated:
            # Drives of their own have identities of their own.
            kept = calibration().with_drives(
                {name: drive("one" if sharing > 1 else name) for name in directories}
            )
            monkeypatch.setattr(infinity_engine.calibration, "kept_calibration", lambda _: kept)
        monkeypatch.setattr(
            infinity_engine.machine.capacity,
            "directories_beside",
            lambda names: dict.fromkeys(names, sharing),
        )
        answer = json.loads(infinity("plan", *SMALL, "--here", *directories, *small)[1])
        assert answer["memory"]["nvme"]["held_bytes"] > 0
        return float(answer["step_s"])

    one = step_s("/mnt/a", sharing=1)

    assert step_s("/mnt/a", "/mnt/b", sharing=2) > 0.95 * one
    assert step_s("/mnt/a", "/mnt/b", sharing=1) < 0.8 * one


def test_directories_of_here_choose_among_those_of_a_calibration_file(
    infinity: Any, this_machine: Any, tmp_path: Path
) -> None:
    this_machine(calibrated=False)
    files = {}
    for names in (("/mnt/a",), ("/mnt/a", "/mnt/b")):
        measured = calibration().with_drives({name: drive(name) for name in names})
        files[names] = tmp_path / f"{len(names)}.json"
        files[names].write_text(json.dumps(measured.to_mapping()))
    small = ("--gpu-mem", "6GiB", "--ram", "8GiB", "--tflops", "100", "--overlap", "off", "--json")

    one, both = (
        json.loads(infinity("plan", *SMALL, "--here", "/mnt/a", *small, "--rates", str(file))[1])
        for file in files.values()
    )

    assert both["memory"]["nvme"]["held_bytes"] > 0
    assert both["step_s"] == one["step_s"]

    named = drive("one")
    named = replace(named, drive={**named.drive, "directory": "/mnt/a"})
    other = tmp_path / "other.json"
    other.write_text(json.dumps(calibration().with_drives({"a": named}).to_mapping()))
    out = infinity("plan", *SMALL, "--here", "/mnt/a", *small, "--rates", str(other))[1]
    assert json.loads(out)["step_s"] == one["step_s"]


def test_a_directory_that_a_calibration_file_lacks_is_refused(
    infinity: Any, this_machine: Any, tmp_path: Path
) -> None:
    this_machine(calibrated=False)
    file = tmp_path / "figures.json"
    file.write_text(json.dumps(calibration().to_mapping()))

    asked = ("plan", *SMALL, "--here", "/mnt/a", "/mnt/b", "--rates", str(file))
    status, _, err = infinity(*asked)

    assert status == 2
    assert f"`infinity calibrate /mnt/a /mnt/b --json {file}`, got '/mnt/b'" in err
    assert infinity(*asked, "--nvme", "0")[0] == 0  # no drive is used


def test_a_directory_of_here_that_was_not_measured_is_refused(
    infinity: Any, this_machine: Any
) -> None:
    this_machine(calibrated=True)
    status, _, err = infinity("plan", *SMALL, "--here", "/mnt/a", "/mnt/b")

    assert status == 2
    assert "run `infinity calibrate /mnt/b`, got '/mnt/b'" in err


def test_a_remedy_for_this_machine_fits_when_it_is_given(infinity: Any, this_machine: Any) -> None:
    """A size without --here would describe another machine, which has no other size."""
    this_machine(calibrated=False, free=6 * GiB, host=8 * GiB)
    drive, *sizes = offered(infinity, *SMALL)

    assert drive.startswith("--here DIR, a directory on a drive with ")
    assert infinity("plan", *SMALL, "--here", "/mnt/a")[0] == 0
    assert sizes
    for given in sizes:
        assert infinity("plan", *SMALL, *given.split())[0] == 0, given


def test_a_remedy_keeps_the_drives_that_are_given_beside_here(
    infinity: Any, this_machine: Any
) -> None:
    this_machine(calibrated=False, free=2 * GiB, host=GiB // 8)
    found = offered(infinity, *SMALL, "--here", "/mnt/a")

    assert any("--gpu-mem" in options for options in found)
    assert not any("--here --" in options for options in found)


def test_a_size_of_drives_is_planned_for_beside_here(infinity: Any, this_machine: Any) -> None:
    this_machine(calibrated=False, free=6 * GiB, host=8 * GiB)

    assert infinity("plan", *SMALL, "--here", "--nvme", "100GiB")[0] == 0


def test_more_drives_for_a_machine_without_any_are_offered_by_name(infinity: Any) -> None:
    """Nothing is known of the rates of drives that a GH200 has not got."""
    asked = (*SMALL, "--machine", "gh200", "--gpu-mem", "6GiB", "--ram", "8GiB")
    drive = offered(infinity, *asked)[0]

    assert re.fullmatch(r"--nvme \d+GiB --drive NAME", drive)
    nvme = drive.split()[:2]
    assert infinity("plan", *asked, *nvme, "--drive", "990 pro")[0] == 0


def offered(infinity: Any, *asked: str) -> list[str]:
    """Return the options of each remedy that has memory."""
    _, out, _ = infinity("plan", *asked, "--json")
    changes = [remedy["change"] for remedy in json.loads(out)["remedies"]]
    return [change.split("(")[1].rstrip(")") for change in changes if "more of" in change]


# --- compare --------------------------------------------------------------------------------------


def test_machines_are_compared_in_a_line_each(infinity: Any, this_machine: Any) -> None:
    this_machine(calibrated=True)
    machines = ("4090 + 64GiB", "4090 + 24GiB + samsung 990 pro", "4GiB", "h200_node", "here")
    status, out, _ = infinity("compare", *SMALL, *machines)

    assert status == 0
    lines = out.split("\nNotes\n")[0].splitlines()
    assert len(lines) == 1 + len(machines)
    assert re.search(
        r"^4090 \+ 64GiB +[\d.]+ m?s +[\d.]+ m?s to [\d.]+ m?s +[\d,]+ +nothing", out, re.M
    )
    assert "does not fit" in lines[3]


def test_a_comparison_is_what_plan_answers_of_each(infinity: Any) -> None:
    machine = "2 x 4090 + 40GiB + 500GB + 2 x samsung 990 pro"
    _, out, _ = infinity("compare", *SMALL, machine, "--json")
    parts = ("--gpu", "4090", "--gpus", "2", "--ram", "40GiB", "--nvme", "500GB")
    drives = ("--drive", "samsung 990 pro") * 2
    planned = json.loads(infinity("plan", *SMALL, *parts, *drives, "--json")[1])

    [compared] = json.loads(out)["machines"]
    assert compared["step_s"] == planned["step_s"]
    assert compared["step_range_s"] == planned["advice"]["step_range_s"]


def test_where_no_machine_is_enough_the_status_says_so(infinity: Any) -> None:
    assert infinity("compare", "--model", "llama-3-8b", "4090 + 8GiB", "16GiB")[0] == 1


def test_a_comparison_says_what_is_assumed_once_for_all_machines(
    infinity: Any, tmp_path: Path
) -> None:
    folder = tmp_path / "novel"
    folder.mkdir()
    sizes = {"hidden_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = {"model_type": "novel", "vocab_size": 1000, **sizes}
    (folder / "config.json").write_text(json.dumps(config))
    machines = ("4090 + 64GiB", "990 pro + 4090 + 16GiB", "16MiB")

    out = infinity("compare", "--model", str(folder), *machines)[1].split("Notes")[1]
    told = json.loads(infinity("compare", "--model", str(folder), *machines, "--json")[1])

    assert out.count("models of type novel are not known") == 1
    assert re.search(r"^990 pro \+ 4090 \+ 16GiB +--drive 990 pro is taken to be", out, re.M)
    assert all("novel" in str(machine["notes"]) for machine in told["machines"])


def test_inputs_that_wait_on_the_host_are_taken_off_it_in_a_comparison_as_well(
    infinity: Any,
) -> None:
    asked = ("--model", "opt-1.3b", "--batch", "8", "--offload-inputs")

    assert infinity("plan", *asked, "--gpu", "3090", "--ram", "8GiB")[0] == 1
    assert infinity("compare", *asked, "3090 + 8GiB")[0] == 1
    assert infinity("compare", *asked, "3090 + 9GiB")[0] == 0


def test_gpus_of_two_kinds_are_no_machine_of_a_plan(infinity: Any) -> None:
    status, _, err = infinity("compare", *SMALL, "4090 + 5090 + 64GiB")

    assert status == 2
    assert "GPUs of one kind" in err


def test_this_machine_can_have_drives_in_a_comparison(infinity: Any, this_machine: Any) -> None:
    this_machine(calibrated=False)
    _, out, _ = infinity("compare", "--model", "llama-2-13b", "here", "here + /mnt/a", "--json")

    assert [machine["fits"] for machine in json.loads(out)["machines"]] == [False, True]


def test_more_drives_than_a_machine_holds_are_refused(infinity: Any) -> None:
    status, _, err = infinity("compare", *SMALL, "4090 + 64GiB + 65 x samsung 990 pro")

    assert status == 2
    assert "MACHINE: expected at most 64 drives of a kind in a machine" in err
    assert infinity("compare", *SMALL, "4090 + 64GiB + 64 x samsung 990 pro")[0] == 0


@pytest.mark.parametrize(
    "machine", ["voodoo + 64GiB", "1GiB + 2GiB + 3GiB", "4090", "+", "0 x 4090 + 64GiB"]
)
def test_a_machine_that_is_none_is_refused(infinity: Any, machine: str) -> None:
    status, out, err = infinity("compare", *SMALL, machine)

    assert (status, out) == (2, "")
    assert err.startswith("infinity compare: error: MACHINE: expected ")


def test_several_gpus_that_do_not_suffice_have_the_note_of_those_that_do(infinity: Any) -> None:
    asked = ("compare", "--model", "llama-3-70b", "2 x 4090 + 16GiB", "--json")
    [refused] = json.loads(infinity(*asked)[1])["machines"]

    assert not refused["fits"]
    assert any("refuses several ranks on GPUs" in note for note in refused["notes"])


@pytest.mark.parametrize(
    ("machine", "said"),
    [
        ("4070 + 64GiB", "'4070' is none of them (nearest: RTX 4070 Ti 12 GB), got"),
        ("4090 + 64", "'64' is none of them (nearest: 64GiB"),
        ("4099 + 64GiB", "'4099' is none of them (nearest: RTX 4090 24 GB), got"),
        ("4090 + 64GiB + samsung 980", "'samsung 980' is none of them (nearest: Samsung 980 PRO"),
        ("4090 + 64GiB + samsung 991 pro 4TB", "(nearest: Samsung 990 PRO"),
        ("GTX 1650 4GB + 64GiB", "'GTX 1650 4GB' is none of them, got"),
        ("b300 + 64GiB", "'b300' is none of them (nearest: B200"),
        ("4090 + 64GiB + floppy", "'floppy' is none of them, got"),
        ("here + /absent", "MACHINE: expected a directory that can be used"),
    ],
)
def test_a_part_that_is_none_is_named(infinity: Any, machine: str, said: str) -> None:
    _, _, err = infinity("compare", *SMALL, machine)

    assert said in err


def test_what_binds_a_step_of_many_micro_batches_is_computing(infinity: Any) -> None:
    asked = ("--model", "llama-3-8b", "4090 + 64GiB + samsung 990 pro", "--json")
    [few] = json.loads(infinity("compare", *asked)[1])["machines"]
    [many] = json.loads(infinity("compare", *asked, "--accumulation", "64")[1])["machines"]

    assert few["bound_by"] == "reads and writes of the drives"
    assert many["bound_by"] == "compute"
