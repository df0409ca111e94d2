"""A running engine writes its weights for other programs, whatever tier they are on."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

import infinity_engine
from infinity_engine.checkpoint import CheckpointDirectory
from infinity_engine.engine.engine import Engine
from infinity_engine.errors import ConfigError, TransferError
from support.ranks import launched
from support.resident_memory import ResidentMemory

load_file = pytest.importorskip("safetensors.torch").load_file


class Tied(torch.nn.Module):
    """Has tied weights, a frozen weight, and buffers of both kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(50, 24)
        self.frozen = torch.nn.Linear(24, 24, bias=False)
        self.norm = torch.nn.BatchNorm1d(24)
        self.head = torch.nn.Linear(24, 50, bias=False)
        self.head.weight = self.embed.weight
        self.frozen.weight.requires_grad_(False)
        self.register_buffer("positions", torch.arange(3.0), persistent=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(self.norm(self.frozen(self.embed(tokens))))
        return logits


def trained(tmp_path: Path, **settings: Any) -> tuple[Tied, Engine]:
    torch.manual_seed(0)
    model = Tied().to(torch.bfloat16)
    optimizer = torch.optim.AdamW([item for item in model.parameters() if item.requires_grad])
    budget = {"host": "64MiB", "nvme": {str(tmp_path): "64MiB"}}
    given = {"strategy": "host_only", "accelerator": "cpu", "budget": budget, **settings}
    engine = infinity_engine.initialize(model, optimizer, **given)
    loss = engine(torch.arange(20)).float().pow(2).mean()
    engine.backward(loss)
    engine.step()
    return model, engine


PLACES: dict[str, dict[str, Any]] = {
    "host": {},
    "drives": {"strategy": "nvme_streamed", "storage": {"small_bytes": 0}},
    "parameters on drives": {
        "strategy": "nvme_streamed",
        "parameters": "nvme",
        "storage": {"small_bytes": 0},
    },
}


@pytest.mark.parametrize("place", PLACES)
def test_weights_are_written_as_modules_compute_with_them(tmp_path: Path, place: str) -> None:
    model, engine = trained(tmp_path, **PLACES[place])
    with engine:
        files = engine.export(tmp_path / "out")
        assert [file.name for file in files] == ["model.safetensors"]
        assert all(usage.peak_held <= usage.limit for usage in engine.usage())
    found = load_file(files[0])
    expected = model.state_dict()
    assert set(expected) - set(found) == {"head.weight"}  # which is the embedding's
    for name, tensor in found.items():
        assert tensor.dtype is expected[name].dtype
        assert torch.equal(tensor, expected[name]), name


def grown_while_exporting(path: Path) -> int:
    """Export 96 MiB of masters; return by how many bytes the process grew meanwhile."""
    model = torch.nn.Sequential(*(torch.nn.Linear(2048, 2048, bias=False) for _ in range(6)))
    optimizer = torch.optim.AdamW(model.parameters())
    settings = {"strategy": "host_only", "accelerator": "cpu", "budget": {"host": "1GiB"}}
    with infinity_engine.initialize(model, optimizer, settings) as engine:
        resident = ResidentMemory()
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
        engine.export(path, dtype=torch.bfloat16)
        return (resident.peak_bytes() or 0) - resident.baseline_bytes


def test_an_export_takes_little_memory_beside_the_model(tmp_path: Path) -> None:
    [grown] = launched(1, grown_while_exporting, tmp_path / "out")
    # 32 MiB are a checkpoint's part of the budget; a queue without drives has memory of its own.
    assert 0 <= grown < 64 << 20


def test_masters_are_rounded_to_the_dtype_that_was_asked_for(tmp_path: Path) -> None:
    _, engine = trained(tmp_path)
    with engine:
        exact = load_file(engine.export(tmp_path / "a", dtype=torch.float32)[0])
        for dtype in (torch.bfloat16, torch.float16):
            [file] = engine.export(tmp_path / str(dtype), dtype=dtype)
            for name, tensor in load_file(file).items():
                is_buffer = "running" in name or "num_batches" in name
                expected = exact[name] if is_buffer else exact[name].to(dtype)
                assert torch.equal(tensor, expected), name


def test_large_models_are_written_in_shards_with_an_index(tmp_path: Path) -> None:
    _, engine = trained(tmp_path)
    with engine:
        files = engine.export(tmp_path / "out", shard_bytes=2000)
        whole = load_file(engine.export(tmp_path / "whole")[0])
    assert files[-1].name == "model.safetensors.index.json"
    index = json.loads(files[-1].read_text())
    for name, file in index["weight_map"].items():
        assert torch.equal(load_file(tmp_path / "out" / file)[name], whole[name])
    assert set(index["weight_map"]) == set(whole)


def test_only_what_is_trained_is_written_where_that_is_asked_for(tmp_path: Path) -> None:
    _, engine = trained(tmp_path)
    with engine:
        [file] = engine.export(tmp_path / "out", trainable_only=True)
    assert set(load_file(file)) == {"embed.weight", "norm.weight", "norm.bias"}


def test_a_directory_with_weights_is_refused_and_left_alone(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "model.safetensors").write_bytes(b"mine")
    _, engine = trained(tmp_path)
    with engine:
        with pytest.raises(ConfigError, match=r"model\.safetensors"):
            engine.export(tmp_path / "out")
        with pytest.raises(ConfigError, match="dtype"):
            engine.export(tmp_path / "other", dtype=torch.int8)
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["model.safetensors"]
    assert not (tmp_path / "other").exists()


@pytest.mark.parametrize("call", ["begin", "commit"])
def test_a_drive_that_is_full_in_an_export_is_a_transfer_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    _, engine = trained(tmp_path)
    with engine:
        with monkeypatch.context() as patch:
            patch.setattr(CheckpointDirectory, call, full)
            with pytest.raises(TransferError, match="weights for ") as error:
                engine.export(tmp_path / "out")
        assert error.value.errno == errno.ENOSPC
        assert list((tmp_path / "out").iterdir()) == []
        engine.export(tmp_path / "out")


def test_an_export_between_micro_batches_has_the_weights_of_the_last_step(tmp_path: Path) -> None:
    _, engine = trained(tmp_path)
    with engine:
        engine.backward(engine(torch.arange(20)).float().pow(2).mean())
        before = engine.state_dict()
        [file] = engine.export(tmp_path / "out")
        found = load_file(file)
        assert [name for name in found if not torch.equal(found[name], before[name])] == []
        engine.step()
        assert not torch.equal(engine.state_dict()["embed.weight"], before["embed.weight"])


def test_what_a_killed_export_left_is_removed(tmp_path: Path) -> None:
    _, engine = trained(tmp_path)
    out = tmp_path / "out"
    with engine:
        engine.export(tmp_path / "whole", shard_bytes=2000)
        # As after a kill when the first of two shards had its place.
        (out / ".draft" / ".weights.writing").mkdir(parents=True)
        (out / ".export.writing").mkdir()
        shards = [f"model-0000{number}-of-00002.safetensors" for number in (1, 2)]
        index = {"weight_map": {str(number): name for number, name in enumerate(shards)}}
        (out / ".export.writing" / "model.safetensors.index.json").write_text(json.dumps(index))
        (out / shards[0]).write_bytes(b"half of a model")
        files = engine.export(out, shard_bytes=2000)
    assert sorted(entry.name for entry in out.iterdir()) == sorted(file.name for file in files)


def test_transformers_load_the_export_and_give_the_same_logits(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=97,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=True,
        pad_token_id=0,
    )
    # Buffers that no state dict has stay in fp32, as from_pretrained leaves them.
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    budget = {"host": "64MiB"}
    with infinity_engine.initialize(
        model,
        torch.optim.AdamW(model.parameters(), lr=1e-2),
        strategy="host_only",
        accelerator="cpu",
        budget=budget,
    ) as engine:
        tokens = torch.randint(0, 97, (2, 11))
        for _ in range(3):
            engine.backward(engine(input_ids=tokens, labels=tokens).loss)
            engine.step()
        engine.export(tmp_path, shard_bytes=10_000)
        config.save_pretrained(tmp_path)
        engine.eval()
        with torch.no_grad():
            expected = engine(input_ids=tokens).logits.clone()
    loaded = transformers.LlamaForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16).eval()
    with torch.no_grad():
        assert torch.equal(loaded(input_ids=tokens).logits, expected)


def test_load_into_fills_a_model_from_the_export(tmp_path: Path) -> None:
    model, engine = trained(tmp_path)
    with engine:
        engine.export(tmp_path / "out", shard_bytes=2000)
    (tmp_path / "drive").mkdir()
    with torch.device("meta"):
        other = Tied().to(torch.bfloat16)
    other.register_buffer("positions", torch.arange(3.0), persistent=False)  # no file has it
    budget = {"host": "128MiB", "nvme": {str(tmp_path / "drive"): "64MiB"}}
    settings: dict[str, Any] = {"strategy": "nvme_streamed", "parameters": "nvme"}
    infinity_engine.load_into(other, tmp_path / "out", budget)
    optimizer = torch.optim.AdamW([item for item in other.parameters() if item.requires_grad])
    with infinity_engine.initialize(
        other, optimizer, accelerator="cpu", budget=budget, **settings
    ) as second:
        found = second.state_dict()
    for name, value in model.state_dict().items():
        assert torch.equal(found[name], value), name
