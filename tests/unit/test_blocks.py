"""Repeated blocks are found in the tree of modules: decoders, encoder-decoders, vision, Mamba."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from infinity_engine.activation.blocks import (
    blocks_held_whole,
    find_blocks,
    members_of,
    recomputing_modules,
)
from support.families import FAMILIES, transformers
from support.small_models import MODELS


def names_of(model: nn.Module) -> list[str]:
    return [block.name for block in find_blocks(model)]


def kinds_of(model: nn.Module) -> list[int]:
    return [block.kind for block in find_blocks(model)]


def wide(width: int = 8) -> nn.Sequential:
    return nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))


def test_children_of_one_class_and_shape_are_blocks_of_one_kind() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.ModuleList(wide() for _ in range(3)))
    assert names_of(model) == ["1.0", "1.1", "1.2"]
    assert kinds_of(model) == [0, 0, 0]


def test_children_of_a_sequential_are_blocks_too() -> None:
    assert names_of(nn.Sequential(wide(), wide(), nn.Linear(8, 2))) == ["0", "1"]


def test_single_layers_are_no_blocks() -> None:
    assert names_of(nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU())) == []


def test_children_of_other_shapes_alone_are_no_blocks() -> None:
    assert names_of(nn.Sequential(wide(8), wide(16))) == []


def test_stages_of_other_shapes_are_searched_for_their_blocks() -> None:
    stages = nn.ModuleList(
        nn.ModuleDict({"blocks": nn.ModuleList(wide(width) for _ in range(2))}) for width in (8, 16)
    )
    assert names_of(stages) == ["0.blocks.0", "0.blocks.1", "1.blocks.0", "1.blocks.1"]
    assert kinds_of(stages) == [0, 0, 1, 1]


def test_experts_within_a_block_are_part_of_it() -> None:
    class Mixture(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.experts = nn.ModuleList(wide() for _ in range(4))

    assert names_of(nn.ModuleList(Mixture() for _ in range(3))) == ["0", "1", "2"]


def test_a_first_block_with_a_parameter_more_is_a_block_of_another_kind() -> None:
    class Biased(nn.Module):
        def __init__(self, biased: bool) -> None:
            super().__init__()
            self.inner = wide()
            if biased:
                self.bias = nn.Parameter(torch.zeros(3))

    assert kinds_of(nn.ModuleList(Biased(number == 0) for number in range(3))) == [0, 1, 1]


def test_dense_layers_among_others_are_blocks_of_another_kind() -> None:
    class Layer(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(8, width), nn.Linear(width, 8)

    layers = nn.ModuleList(Layer(width) for width in (16, 32, 16, 32))
    assert kinds_of(layers) == [0, 1, 0, 1]


def test_a_frozen_block_is_of_another_kind() -> None:
    layers = nn.ModuleList(wide() for _ in range(3))
    layers[0].requires_grad_(False)
    assert kinds_of(layers) == [0, 1, 1] or kinds_of(layers) == [0, 0, 0]
    assert kinds_of(layers) == [0, 1, 1]


def test_a_module_that_is_listed_twice_is_one_block() -> None:
    shared = wide()
    assert names_of(nn.Sequential(shared, wide(), shared)) == ["0", "1"]


def test_the_model_itself_can_be_the_list() -> None:
    assert names_of(nn.Sequential(*(wide() for _ in range(2)))) == ["0", "1"]


def test_dicts_that_are_never_called_are_no_blocks() -> None:
    # Their parts are called one by one: nothing shows where such a block begins.
    assert names_of(MODELS["gpt"]()) == []


EXPECTED = {
    "llama": ["model.layers"],
    "qwen2-moe": ["model.layers"],
    "t5": ["encoder.block", "decoder.block"],
    "bart": ["model.encoder.layers", "model.decoder.layers"],
    "vit": ["vit.layers"],
    "mamba": ["backbone.layers"],
    "gpt2": ["transformer.h"],
}


@pytest.mark.parametrize("family", EXPECTED)
def test_blocks_of_transformers_are_its_layers(family: str) -> None:
    known = FAMILIES[family]
    with torch.device("meta"):
        model = getattr(transformers(), known.model)(known.config(16))
    assert names_of(model) == [f"{at}.{number}" for at in EXPECTED[family] for number in range(2)]


def test_models_that_recompute_themselves_are_known() -> None:
    known = FAMILIES["llama"]
    with torch.device("meta"):
        model = getattr(transformers(), known.model)(known.config(16))
    assert recomputing_modules(model) == ()
    # Transformers 5 has renamed it.
    getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)()
    assert recomputing_modules(model)


@pytest.mark.parametrize("layers", [1, 2])
def test_layers_that_recompute_themselves_are_held_whole(layers: int) -> None:
    config = FAMILIES["llama"].config(16)
    config.num_hidden_layers = layers
    with torch.device("meta"):
        model = getattr(transformers(), FAMILIES["llama"].model)(config)
    assert blocks_held_whole(model) == frozenset()
    getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)()
    assert blocks_held_whole(model) == {f"model.layers.{number}" for number in range(layers)}


MAKERS: dict[str, Callable[[], Any]] = {"list": lambda: nn.ModuleList([]), "leaf": nn.Identity}


@pytest.mark.parametrize("maker", MAKERS)
def test_models_without_blocks_have_none(maker: str) -> None:
    assert find_blocks(MAKERS[maker]()) == ()


class Backwards(nn.Sequential):
    """Lists its parameters in another order than torch does."""

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        return reversed(list(super().named_parameters(*args, **kwargs)))


def test_blocks_that_list_their_parameters_themselves_have_those_that_they_had() -> None:
    model = nn.Sequential(*[Backwards(nn.Linear(4, 4), nn.GELU()) for _ in range(2)])
    blocks = find_blocks(model)
    assert len(blocks) == 2
    for found in blocks:
        assert found.has_its_parameters(members_of(found.module))
        found.module.get_submodule("0").bias = nn.Parameter(torch.zeros(4))
        assert not found.has_its_parameters(members_of(found.module))


class Shared(nn.Module):
    """Has one module, one parameter and one buffer under two names each, and names of nothing."""

    def __init__(self) -> None:
        super().__init__()
        linear, norm = nn.Linear(4, 4), nn.BatchNorm1d(4)
        self.first = nn.Sequential(linear, norm)
        self.again = linear
        self.tied = nn.Linear(4, 4, bias=False)
        self.tied.weight = linear.weight
        self.register_buffer("seen", norm.running_mean)
        self.register_buffer("weight_too", self.tied.weight, persistent=False)
        self.register_module("nothing", None)


@pytest.mark.parametrize("make", [*MODELS.values(), Shared])
def test_members_are_what_torch_lists_in_its_order(make: Callable[[], nn.Module]) -> None:
    model = make()
    members = members_of(model)
    assert list(members.modules.items()) == list(model.named_modules())
    for own, listed in (
        (members.parameters, model.named_parameters()),
        (members.buffers, model.named_buffers()),
    ):
        assert [(name, id(tensor)) for name, tensor in own.items()] == [
            (name, id(tensor)) for name, tensor in listed
        ]
