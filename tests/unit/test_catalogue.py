"""The catalogue of GPUs and drives: every line has its source, and names find what people mean."""

from __future__ import annotations

import re

import pytest

from infinity_engine.cli.main import main
from infinity_engine.errors import ConfigError
from infinity_engine.machine.catalogue import (
    DRIVE_SHEETS,
    GPU_SHEETS,
    PCIE_BYTES_PER_S,
    SUSTAINED_BYTES_PER_S,
    DriveSheet,
    GpuSheet,
    better_gpus,
    find_drive,
    find_gpu,
)
from infinity_engine.sim.hardware import DESKTOP_4090, H200_NODE, machine
from infinity_engine.units import GB, GiB


@pytest.mark.parametrize("gpu", GPU_SHEETS, ids=[gpu.name for gpu in GPU_SHEETS])
def test_a_gpu_has_a_dated_source_and_sound_figures(gpu: GpuSheet) -> None:
    assert re.search(r"\(20\d\d\)", gpu.source)
    assert 8 * GiB <= gpu.memory_bytes <= 192 * GiB
    assert 50e12 <= gpu.flops_per_s <= 2.5e15
    assert 250 * GB <= gpu.memory_bytes_per_s <= 8000 * GB
    assert gpu.pcie in PCIE_BYTES_PER_S
    assert 70 <= gpu.watts <= 1000
    named = float(gpu.name.split()[-2])
    assert 0.93 * named <= gpu.memory_bytes / GiB <= named  # checks of errors take a part


@pytest.mark.parametrize("drive", DRIVE_SHEETS, ids=[drive.name for drive in DRIVE_SHEETS])
def test_a_drive_has_a_source_and_holds_less_than_its_burst(drive: DriveSheet) -> None:
    assert re.search(r"\(20\d\d\)|as \w+ measured it", drive.source)
    assert drive.write_bytes_per_s <= drive.burst_bytes_per_s <= drive.read_bytes_per_s
    if drive.sustained_bytes_per_s is None:
        assert drive.write_bytes_per_s == SUSTAINED_BYTES_PER_S
    assert 300 <= drive.rated_bytes / drive.capacity_bytes <= 200_000


@pytest.mark.parametrize("sheet", [*GPU_SHEETS, *DRIVE_SHEETS], ids=lambda sheet: sheet.name)
def test_a_line_says_which_figures_were_compared_and_which_were_not(
    sheet: GpuSheet | DriveSheet,
) -> None:
    figures = "memory" if isinstance(sheet, GpuSheet) else "reads|writes|TBW|whole drive"

    assert re.search(figures, sheet.compared)


def test_the_list_of_parts_says_which_figures_are_from_memory(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["plan", "--models"]) == 0

    lines = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    [unsure] = [line for line in lines if line.startswith("SK hynix Platinum P41 2 TB")]
    [sure] = [line for line in lines if line.startswith("Samsung 990 PRO 2 TB")]
    assert unsure.endswith("; from memory: its TBW")
    assert "memory" not in sure


def test_a_drive_that_a_review_wrote_whole_is_planned_with_what_it_held() -> None:
    [t500] = find_drive("crucial t500")

    assert t500.write_bytes_per_s == 0.64 * GB


def test_names_are_not_given_twice() -> None:
    for sheets in (GPU_SHEETS, DRIVE_SHEETS):
        names = [sheet.name for sheet in sheets]
        assert len(set(names)) == len(names)


@pytest.mark.parametrize(
    ("name", "first"),
    [
        ("4090", "RTX 4090 24 GB"),
        ("rtx4090", "RTX 4090 24 GB"),
        ("5070", "RTX 5070 12 GB"),
        ("5070 Ti", "RTX 5070 Ti 16 GB"),
        ("a100 40", "A100 PCIe 40 GB"),
        ("A100 40GB", "A100 PCIe 40 GB"),
        ("l40", "L40 48 GB"),
        ("NVIDIA GeForce RTX 3090", "RTX 3090 24 GB"),
        ("NVIDIA A100-SXM4-80GB", "A100 SXM 80 GB"),
        ("NVIDIA H100 80GB HBM3", "H100 SXM 80 GB"),
        ("NVIDIA RTX 6000 Ada Generation", "RTX 6000 Ada 48 GB"),
        ("4070ti", "RTX 4070 Ti 12 GB"),
        (
            "NVIDIA RTX PRO 6000 Blackwell Workstation Edition",
            "RTX PRO 6000 Blackwell 96 GB",
        ),
    ],
)
def test_a_gpu_is_found_by_what_people_and_drivers_call_it(name: str, first: str) -> None:
    assert find_gpu(name)[0].name == first


def test_a_drive_is_found_with_others_that_the_name_fits() -> None:
    assert [drive.name for drive in find_drive("samsung 990 pro")] == [
        "Samsung 990 PRO 2 TB",
        "Samsung 990 PRO 4 TB",
    ]


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("4070", "RTX 4070 Ti 12 GB"),
        ("NVIDIA GeForce RTX 4070", "RTX 4070 Ti 12 GB"),
        ("4080 Super", "RTX 4080 16 GB"),
        ("3090 Ti", "RTX 3090 24 GB"),
        ("a100 sxm 40", "A100 PCIe 80 GB, A100 SXM 80 GB, A100 PCIe 40 GB"),
        ("h100 sxm 94", "H100 SXM 80 GB, H100 PCIe 80 GB, H100 NVL 94 GB"),
        ("4091", "RTX 4090 24 GB"),
    ],
)
def test_a_board_without_a_line_is_refused_with_near_names(name: str, near: str) -> None:
    with pytest.raises(ConfigError, match=f"gpu: expected one of {near}, or another name"):
        find_gpu(name)


def test_a_name_fits_no_variant_that_it_does_not_say() -> None:
    assert [gpu.name for gpu in find_gpu("5070")] == ["RTX 5070 12 GB"]
    with pytest.raises(ConfigError, match="drive: expected one of Samsung 980 PRO 2 TB, or"):
        find_drive("samsung 980")
    assert len(find_drive("samsung")) > 2  # no model is named


@pytest.mark.parametrize("name", ["", "  ", "1111", "voodoo 2"])
def test_a_name_that_nothing_has_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="--gpu: expected one of RTX 3080"):
        find_gpu(name, field="--gpu")


def test_the_desktop_has_the_figures_of_its_line_in_the_catalogue() -> None:
    [sheet] = find_gpu("4090")
    described = DESKTOP_4090.with_gpu(sheet)

    assert described.gpu.peak_flops_per_s == DESKTOP_4090.gpu.peak_flops_per_s
    assert described.gpu.memory_bytes == DESKTOP_4090.gpu.memory_bytes
    assert described.gpu.update_params_per_s == DESKTOP_4090.gpu.update_params_per_s
    assert described.link == DESKTOP_4090.link


def test_several_drives_add_up() -> None:
    found = machine("desktop_4090").with_drives([find_drive("990 pro")[0]] * 2).drives

    assert found is not None
    assert found.read_bytes_per_s == pytest.approx(2 * 7.45 * GB)
    assert found.write_bytes_per_s == pytest.approx(2 * SUSTAINED_BYTES_PER_S)
    assert found.capacity_bytes == 4 * 10**12


def test_gpus_that_nvlink_joins_exchange_over_it_and_others_through_the_host() -> None:
    [h100] = find_gpu("h100 sxm")
    [rtx] = find_gpu("4090")

    assert DESKTOP_4090.with_gpu(h100).wire_bytes_per_s(1) == 450 * GB
    assert H200_NODE.with_gpu(rtx).wire_bytes_per_s(1) < 30 * GB


@pytest.mark.parametrize(
    ("gpu", "better"),
    [
        ("4090", ["RTX 5090 32 GB", "RTX 6000 Ada 48 GB"]),
        ("a100 pcie 80", ["H100 NVL 94 GB"]),
        ("h100 sxm", ["H200 SXM 141 GB", "B200 180 GB"]),
        ("h200", ["B200 180 GB"]),
        ("b200", []),
        ("rtx pro 6000", []),
    ],
)
def test_better_gpus_fit_the_slot_and_are_worse_in_nothing(gpu: str, better: list[str]) -> None:
    assert [sheet.name for sheet in better_gpus(find_gpu(gpu)[0])] == better


def test_an_h200_has_the_same_memory_as_a_part_and_in_its_node() -> None:
    assert find_gpu("h200")[0].memory_bytes == H200_NODE.gpu.memory_bytes
