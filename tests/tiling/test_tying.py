"""`tie_weights()` of models whose layers are in tiles."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from typing import Any

import pytest
import torch
from torch import nn

from infinity_engine.tiling import TiledEmbedding, TiledLinear, tile


class Language(nn.Module):
    """Two embeddings, and output layers that are tied to them as a model of Transformers does."""

    def __init__(self, *, ties: bool = True) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, 8)
        self.head = nn.Linear(8, 64, bias=False)
        self.small_embed = nn.Embedding(4, 8)
        self.small_head = nn.Linear(8, 4, bias=False)
        if ties:
            self.tie_weights()

    def tie_weights(self) -> None:
        self.head.weight = self.embed.weight
        self.small_head.weight = self.small_embed.weight


def tiles_of(layer: Any) -> list[int]:
    assert isinstance(layer, TiledLinear | TiledEmbedding)
    return [id(parameter) for parameter in layer.tiles.parameters()]


def test_tied_tiles_stay_tied_and_the_rest_is_tied() -> None:
    model = Language()
    assert tile(model, 256).names == ("embed", "head")
    tiles = tiles_of(model.embed)
    model.small_head.weight = nn.Parameter(torch.zeros(4, 8))

    model.tie_weights()

    assert tiles_of(model.embed) == tiles_of(model.head) == tiles
    assert model.small_head.weight is model.small_embed.weight


def test_tiles_that_were_not_tied_are_refused_and_all_is_as_before() -> None:
    model = Language(ties=False)
    tile(model, 256)
    before = {name: id(parameter) for name, parameter in model.named_parameters()}

    with pytest.raises(RuntimeError, match=r"would tie head\.weight .* before the layers are cut"):
        model.tie_weights()

    assert {name: id(parameter) for name, parameter in model.named_parameters()} == before
    assert len(tiles_of(model.head)) > 1


def test_a_whole_layer_cannot_be_tied_to_tiles() -> None:
    model = Language(ties=False)
    model.head.register_forward_hook(lambda *_: None)
    assert "hooks" in tile(model, 256).left["head.weight"]

    with pytest.raises(RuntimeError, match=r"would tie head\.weight"):
        model.tie_weights()

    assert model.head.weight.device.type == "cpu"


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copy_ties_itself(copied: Any) -> None:
    model = Language()
    tile(model, 256)
    other = copied(model)
    other.small_head.weight = nn.Parameter(torch.zeros(4, 8))

    other.tie_weights()

    assert other.small_head.weight is other.small_embed.weight is not model.small_embed.weight


def test_a_model_in_tiles_goes_with_its_last_reference() -> None:
    model = Language()
    tile(model, 256)
    watched = weakref.ref(model)
    gc.disable()
    try:
        del model
        assert watched() is None
    finally:
        gc.enable()


def test_a_model_without_tiles_ties_as_its_class_does() -> None:
    model = Language()

    tile(model, "1MiB")

    assert "tie_weights" not in vars(model)


def test_a_model_of_transformers_ties_its_weights_again() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=512,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        tie_word_embeddings=True,
    )
    model = transformers.LlamaForCausalLM(config)
    assert set(tile(model, "16KiB").names) == {"lm_head", "model.embed_tokens"}
    tokens = torch.randint(512, (1, 8))
    before = model(input_ids=tokens).logits

    model.tie_weights()

    assert tiles_of(model.lm_head) == tiles_of(model.model.embed_tokens)
    assert torch.equal(model(input_ids=tokens).logits, before)
