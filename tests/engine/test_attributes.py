"""What an engine does not have, its model has: configuration, generation, listings.

What would do harm is refused.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import infinity_engine
from infinity_engine.engine.engine import Engine

safetensors = pytest.importorskip("safetensors.torch")
transformers = pytest.importorskip("transformers")

PLACES: dict[str, dict[str, Any]] = {
    "memory": {},
    "drives": {"strategy": "nvme_streamed", "parameters": "nvme"},
}


def language_model(*, tied: bool = False) -> Any:
    torch.manual_seed(0)
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
    }
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            **sizes, vocab_size=64, tie_word_embeddings=tied, eos_token_id=None
        )
    ).eval()


@contextmanager
def engine_of(
    model: nn.Module, place: str, folder: Path, precision: str = "fp32"
) -> Iterator[Engine]:
    budget: dict[str, Any] = {"host": "64MiB"}
    if place == "drives":
        budget["nvme"] = {str(folder): "64MiB"}
    settings = {"calibration": "off", "precision": precision, **PLACES[place]}
    with infinity_engine.initialize(
        model, "sgd", settings, accelerator="cpu", budget=budget
    ) as made:
        yield made


@pytest.mark.parametrize("place", PLACES)
def test_generation_through_an_engine_gives_the_same_tokens(place: str, tmp_path: Path) -> None:
    prompt = torch.tensor([[3, 5, 7]])
    model = language_model()
    expected = model.generate(prompt, max_new_tokens=4, do_sample=False)

    with engine_of(model, place, tmp_path) as engine:
        assert torch.equal(engine.generate(prompt, max_new_tokens=4, do_sample=False), expected)


def test_generation_runs_under_autocast_as_a_call_does(tmp_path: Path) -> None:
    seen = []
    model = language_model()
    model.lm_head.register_forward_hook(lambda *_: seen.append(torch.is_autocast_enabled("cpu")))

    with engine_of(model, "memory", tmp_path, "bf16_autocast") as engine:
        engine.generate(torch.tensor([[3]]), max_new_tokens=1, do_sample=False)

    assert seen == [True]


def test_an_engine_passes_on_what_its_model_has(tmp_path: Path) -> None:
    model = language_model()
    with engine_of(model, "memory", tmp_path) as engine:
        assert engine.module is model
        assert engine.config is model.config
        assert list(engine.parameters()) == list(model.parameters())
        assert dict(engine.named_modules()) == dict(model.named_modules())
        assert (engine.training, engine.dtype) == (False, torch.float32)
        assert not hasattr(engine, "no_such_thing")


@pytest.mark.parametrize(
    "name", ["to", "half", "load_state_dict", "merge_adapter", "requires_grad_"]
)
def test_methods_that_would_bypass_the_engine_are_refused(name: str, tmp_path: Path) -> None:
    refused = pytest.raises(AttributeError, match=rf"Engine has no {name}\(\): ")
    with engine_of(nn.Linear(2, 2), "memory", tmp_path) as engine, refused:
        getattr(engine, name)


@pytest.mark.parametrize("place", PLACES)
def test_saving_a_state_dict_writes_tied_weights_once(place: str, tmp_path: Path) -> None:
    with engine_of(language_model(tied=True), place, tmp_path) as engine:
        states = engine.state_dict()
        engine.save_pretrained(tmp_path / "saved", state_dict=dict(states))

    written = safetensors.load_file(tmp_path / "saved" / "model.safetensors")
    assert states.keys() - written.keys() == {"lm_head.weight"}
    assert all(torch.equal(value, states[name]) for name, value in written.items())
