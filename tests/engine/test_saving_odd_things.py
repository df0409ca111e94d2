"""Buffers that are no plain tensors, arguments that cannot be right, state that no engine writes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import infinity_engine
from deepnvme.formats.safetensors import SafetensorsError
from deepnvme.volume.framing import framed
from infinity_engine.checkpoint import CheckpointDirectory
from infinity_engine.engine.engine import Engine
from infinity_engine.errors import (
    CheckpointError,
    ConfigError,
    IncompleteCheckpoint,
    ManifestMismatch,
)
from support.engine_bits import bits_of, differing
from support.saved_engines import one_step, small

pytestmark = pytest.mark.usefixtures("deterministic")


def with_buffer(buffer: torch.Tensor) -> tuple[torch.nn.Module, Engine]:
    """Return a model that has a buffer called `0.odd`, and its engine."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 4))
    model[0].register_buffer("odd", buffer)
    optimizer = torch.optim.AdamW(model.parameters())
    return model, infinity_engine.initialize(
        model, optimizer, budget={"host": "64MiB"}, accelerator="cpu"
    )


# --- buffers --------------------------------------------------------------------------------------

VIEWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "expanded": lambda values: values[:, :1].expand(-1, 3),
    "expanded twice": lambda values: values[:1, :1].expand(2, 3),
    "transposed": lambda values: values.t(),
    "every other": lambda values: values[:, ::2],
    "conjugate": lambda values: torch.complex(values, values + 1).conj(),
    "imaginary part of a conjugate": lambda values: torch.complex(values, values).conj().imag,
    "without dimensions": lambda values: values[0, 0],
}


@pytest.mark.parametrize("rows", [4, 1 << 18], ids=["small", "too large for a copy"])
@pytest.mark.parametrize("wait", [True, False])
@pytest.mark.parametrize("view", VIEWS)
def test_buffers_that_are_views_are_saved_and_loaded_by_their_values(
    tmp_path: Path, view: str, wait: bool, rows: int
) -> None:
    _, engine = with_buffer(VIEWS[view](torch.arange(3.0 * rows).view(rows, 3)))
    with engine:
        expected = engine.state_dict()["0.odd"].clone()
        engine.save(tmp_path, wait=wait)
    model, engine = with_buffer(VIEWS[view](torch.zeros(rows, 3)))
    with engine:
        engine.load(tmp_path)
        found = dict(model.named_buffers())["0.odd"]
        assert torch.equal(found.resolve_conj().resolve_neg(), expected.resolve_conj())


def test_an_expanded_buffer_refuses_values_that_it_cannot_have(tmp_path: Path) -> None:
    _, engine = with_buffer(torch.arange(3.0))
    with engine:
        engine.save(tmp_path)
    _, engine = with_buffer(torch.ones(1).expand(3))
    with engine, pytest.raises(ManifestMismatch, match=r"0\.odd should be .*along dimension 0"):
        engine.load(tmp_path)


ODD: dict[str, Callable[[], torch.Tensor]] = {
    "sparse": lambda: torch.eye(3).to_sparse(),
    "meta": lambda: torch.empty(3, device="meta"),
    "quantized": lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.quint8),
}


@pytest.mark.filterwarnings("ignore")  # torch warns of its own old quantization
@pytest.mark.parametrize("kind", ODD)
def test_a_buffer_that_cannot_be_saved_is_named(tmp_path: Path, kind: str) -> None:
    model, engine = with_buffer(torch.ones(3))
    linear = model.get_submodule("0")
    with engine:
        linear.odd = ODD[kind]()
        with pytest.raises(TypeError, match=r"0\.odd"):
            engine.save(tmp_path)
        linear.odd = torch.ones(3)
        engine.save(tmp_path)


# --- arguments ------------------------------------------------------------------------------------


@pytest.mark.parametrize("below", [".", "runs/mine"])
def test_a_file_where_checkpoints_should_be_is_named(tmp_path: Path, below: str) -> None:
    file = tmp_path / "file"
    file.write_text("mine")
    _, _, engine = small()
    calls: list[Callable[[Path], Any]] = [
        engine.save,
        lambda path: engine.save(path, "tag", wait=False),
        engine.load,
        lambda path: engine.load(path, "tag"),
        engine.resume,
    ]
    with engine:
        for call in calls:
            with pytest.raises(ConfigError, match=r"file is a file, got '.*file"):
                call(file / below)
        one_step(engine)
    assert file.read_text() == "mine"


def test_a_name_that_no_file_can_have_is_refused_with_the_reason(tmp_path: Path) -> None:
    model = torch.nn.Linear(3, 3)
    model.register_parameter("half \ud800", torch.nn.Parameter(torch.zeros(3)))
    with infinity_engine.initialize(
        model,
        torch.optim.AdamW(model.parameters()),
        budget={"host": "64MiB"},
        accelerator="cpu",
    ) as engine:
        for write in (engine.save, engine.export):
            with pytest.raises(SafetensorsError, match="half of a surrogate pair"):
                write(tmp_path / write.__name__)
        assert CheckpointDirectory(tmp_path / "save").tags() == []


def test_an_export_to_a_file_names_it(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    _, _, engine = small()
    with engine, pytest.raises(ConfigError, match=r"^path: expected a directory: a file is there"):
        engine.export(tmp_path / "file")
    assert (tmp_path / "file").read_text() == "mine"


def test_a_checkpoint_in_place_of_the_directory_of_them_is_explained(tmp_path: Path) -> None:
    _, _, engine = small()
    with engine:
        tag = engine.save(tmp_path)
        with pytest.raises(IncompleteCheckpoint, match="it is one itself: pass "):
            engine.load(tmp_path / tag)


@pytest.mark.parametrize("tag", [3, b"step-1", Path("tag"), ""])
def test_a_tag_that_is_no_text_is_refused(tmp_path: Path, tag: Any) -> None:
    _, _, engine = small()
    with engine:
        for call in (engine.save, engine.load):
            with pytest.raises(ConfigError, match=r"^tag: expected 1 to 128 of the characters"):
                call(tmp_path, tag)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("extra", "said"),
    [
        ([1], r"^extra: expected a dict"),
        ({3: torch.nn.Linear(1, 1)}, r"^extra: expected a dict"),
        ({"epoch": 3}, r"^extra\['epoch'\]: expected an object with state_dict\(\)"),
    ],
)
def test_extra_that_holds_no_states_is_refused_by_name(
    tmp_path: Path, extra: Any, said: str
) -> None:
    _, _, engine = small()
    with engine:
        one_step(engine)
        calls: list[Callable[[], Any]] = [
            lambda: engine.save(tmp_path, extra=extra),
            lambda: engine.load(tmp_path, extra=extra),
            lambda: engine.autosave(tmp_path, every=1, extra=extra),
        ]
        for call in calls:
            with pytest.raises(ConfigError, match=said):
                call()
    assert list(tmp_path.iterdir()) == []


# --- state that no engine writes ------------------------------------------------------------------


def replaced(node: Any, value: Any, *keys: str) -> None:
    """Replace what lies under some keys of a structure, as a malicious writer would."""
    *within, last = keys
    for key in within:
        [node] = [item for name, item in node["dict"] if name == key]
    node["dict"] = [[name, item] for name, item in node["dict"] if name != last]
    if value is not None:
        node["dict"].append([last, value])


STRANGE: dict[str, Callable[[Any], object]] = {
    "no state dicts": lambda top: replaced(top, None, "extra"),
    "a list of them": lambda top: replaced(top, [1, 2], "extra"),
    "no loss scale": lambda top: replaced(top, None, "loss_scale"),
    "a loss scale of 0": lambda top: replaced(top, 0.0, "loss_scale", "value"),
    "an infinite loss scale": lambda top: replaced(
        top, {"float": "7ff0000000000000"}, "loss_scale", "value"
    ),
    "a loss scale in words": lambda top: replaced(top, "many", "loss_scale", "value"),
    "groups that are numbers": lambda top: replaced(top, [3], "optimizer_groups"),
    "a group with parameters": lambda top: replaced(
        top, [{"dict": [["params", []], ["lr", 1.0]]}], "optimizer_groups"
    ),
    "random numbers in words": lambda top: replaced(top, "seed", "random"),
    "no generator of torch": lambda top: replaced(top, None, "random", "torch"),
    "another generator of Python": lambda top: replaced(top, {"tuple": [4]}, "random", "python"),
    "another generator of NumPy": lambda top: replaced(top, ["PCG64", 1], "random", "numpy"),
}


def settings_of(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """Return the optimizer's groups, and which parameters are in them."""
    groups = optimizer.param_groups
    return [{**group, "params": [*map(id, group["params"])]} for group in groups]


@pytest.mark.parametrize("kind", STRANGE)
def test_state_that_no_engine_writes_is_refused_before_anything_changes(
    tmp_path: Path, kind: str
) -> None:
    _, optimizer, engine = small()
    with engine:
        one_step(engine)
        path = tmp_path / engine.save(tmp_path) / "manifest"
        content = json.loads(path.read_bytes().partition(b"\n")[2])
        STRANGE[kind](content["objects"]["objects-00000.safetensors"])
        path.write_bytes(framed("infinity-checkpoint", 1, content))
        one_step(engine)
        before = bits_of(engine), torch.get_rng_state(), settings_of(optimizer)
        with pytest.raises(CheckpointError, match=r"objects-00000\.safetensors"):
            engine.load(tmp_path, strict=False)
        assert differing(before[0], bits_of(engine)) == []
        assert torch.equal(before[1], torch.get_rng_state())
        assert settings_of(optimizer) == before[2]
        engine.load(tmp_path, weights_only=True)
        one_step(engine)
