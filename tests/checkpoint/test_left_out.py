"""A checkpoint that leaves out frozen tensors says so, in version 2 of the format; commands read it
or say what it does not have.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from deepnvme.volume.framing import framed
from infinity_engine.checkpoint import Kind, SavedTensor
from infinity_engine.checkpoint.directory import read_manifest
from infinity_engine.checkpoint.manifest import encode, parse
from infinity_engine.cli.main import main
from infinity_engine.errors import DamagedCheckpoint
from support.saved_streams import parameters_of, save, values_of

ADAPTERS = parameters_of({"up.weight": (30, 4), "down.weight": (4, 30)})
BASE = SavedTensor(
    name="base.weight", kind=Kind.FROZEN, shape=(30, 30), dtype="BF16", streams={"value": "BF16"}
).without_values(0x0123ABCD)
TENSORS = (*ADAPTERS, BASE)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    return save(tmp_path / "run", "tag", TENSORS, values_of(ADAPTERS), ranks=2)


def test_a_manifest_says_name_shape_dtype_and_checksum_of_what_is_left_out(saved: Path) -> None:
    assert read_manifest(saved).left_out == (BASE,)
    content = json.loads((saved / "manifest").read_bytes().partition(b"\n")[2])
    assert content["tensors"][2] == {
        "name": "base.weight",
        "kind": "frozen",
        "shape": [30, 30],
        "dtype": "BF16",
        "streams": {},
        "steps": 0,
        "aliases": [],
        "left_out": "0123abcd",
    }


def test_only_a_checkpoint_that_leaves_something_out_has_version_2(saved: Path) -> None:
    part = read_manifest(saved)
    assert encode(part).startswith(b"infinity-checkpoint 2 ")
    whole = encode(replace(part, tensors=ADAPTERS))
    assert whole.startswith(b"infinity-checkpoint 1 ")
    assert b"left_out" not in whole
    assert parse(whole).left_out == ()


def tensor(number: int, **fields: Any) -> Callable[[dict[str, Any]], object]:
    return lambda content: content["tensors"][number].update(fields)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (tensor(0, left_out="01234567"), "expected a frozen tensor without streams"),
        (tensor(2, streams={"value": "BF16"}), "expected a frozen tensor without streams"),
        (tensor(2, kind="buffer"), "expected a frozen tensor without streams"),
        (tensor(2, left_out=None), "no streams, and is not left out"),
        (tensor(2, left_out="0123ABCD"), "8 hexadecimal digits"),
        (tensor(2, left_out=7), "expected a text"),
        (lambda content: content["tensors"][2].pop("left_out"), "has the fields"),
    ],
)
def test_a_manifest_that_contradicts_itself_is_refused(
    saved: Path, change: Callable[[dict[str, Any]], object], said: str
) -> None:
    content = json.loads((saved / "manifest").read_bytes().partition(b"\n")[2])
    change(content)
    (saved / "manifest").write_bytes(framed("infinity-checkpoint", 2, content))
    with pytest.raises(DamagedCheckpoint, match=said):
        read_manifest(saved)


def test_a_manifest_of_version_1_leaves_nothing_out(saved: Path) -> None:
    content = json.loads((saved / "manifest").read_bytes().partition(b"\n")[2])
    (saved / "manifest").write_bytes(framed("infinity-checkpoint", 1, content))
    with pytest.raises(DamagedCheckpoint, match="has the fields"):
        read_manifest(saved)
    content["tensors"] = [
        {key: value for key, value in entry.items() if key != "left_out"}
        for entry in content["tensors"]
    ]
    (saved / "manifest").write_bytes(framed("infinity-checkpoint", 1, content))
    with pytest.raises(DamagedCheckpoint, match="no streams"):
        read_manifest(saved)


@pytest.mark.parametrize("data", [b"", b"hello", b"\x80\x03", b"infinity-store 1 2 3\n{}"])
def test_a_file_that_is_no_manifest_is_refused_with_what_to_do(saved: Path, data: bytes) -> None:
    (saved / "manifest").write_bytes(data)
    with pytest.raises(DamagedCheckpoint) as refused:
        read_manifest(saved)
    assert 'manifest cannot be used: expected it to begin with "infinity-checkpoint' in str(
        refused.value
    )
    assert "Load an earlier committed checkpoint" in str(refused.value)


def test_inspect_and_verify_say_what_is_left_out(
    saved: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["checkpoint", "inspect", str(saved), "--tensors"]) == 0
    text = capsys.readouterr().out
    assert "the values of 1 frozen tensors, 900 elements" in text
    assert main(["checkpoint", "inspect", str(saved), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [entry["left_out"] for entry in found["tensors"]] == [False, False, True]
    assert main(["checkpoint", "verify", str(saved)]) == 0
    assert "all as written\n1 frozen tensors were left out" in capsys.readouterr().out


@pytest.mark.parametrize("form", ["safetensors", "dcp"])
def test_an_export_has_what_was_trained_alone_or_is_refused(
    saved: Path, tmp_path: Path, form: str, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ["checkpoint", "export", str(saved), str(tmp_path / "out"), "--format", form]
    assert main(asked) == 2
    error = capsys.readouterr().err
    assert "leaves out 1 frozen tensors, such as base.weight" in error
    assert "--trainable-only" in error
    assert not (tmp_path / "out").exists()
    assert main([*asked, "--trainable-only"]) == 0
    assert "only what was trained: the checkpoint leaves out 1" in capsys.readouterr().out
    assert any((tmp_path / "out").iterdir())


def test_a_diff_compares_what_is_left_out_by_its_checksums(
    tmp_path: Path, saved: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, base in (
        ("same", BASE),
        ("other", replace(BASE, left_out=1)),
        ("whole", replace(BASE, left_out=None, streams={"value": "BF16"})),
    ):
        tensors = (*ADAPTERS, base)
        values = {**values_of(ADAPTERS), **values_of([base])}
        if base.streams:
            values["base.weight", "value"] = values["base.weight", "value"].astype("<u2")
        save(tmp_path / "run", name, tensors, values)
    said = {}
    for name in ("same", "other", "whole"):
        main(["checkpoint", "diff", str(saved), str(tmp_path / "run" / name)])
        said[name] = capsys.readouterr().out
    assert said["same"] == "no difference in any tensor\n"
    assert "base.weight: other values, by their checksums; both leave them out" in said["other"]
    assert "base.weight: shape (30, 30), left out in" in said["whole"]
