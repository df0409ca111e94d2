"""Families that the planner does not know: planned with the parameters that Transformers makes."""

from __future__ import annotations

import json
import weakref
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoConfig, AutoModelForCausalLM

from infinity_engine.cli.main import main
from infinity_engine.integrations.model_shapes import shape_of_config
from infinity_engine.placement.models import ModelShape
from infinity_engine.sim.configs import model_of_config

SIZES: dict[str, Any] = {
    "vocab_size": 1000,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
EXPERTS = {
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
    "shared_expert_intermediate_size": 96,
}


def work_of(model: ModelShape, sequence: int) -> int:
    """Return the operations of a forward for one token."""
    return sum(module.flops(sequence) for module in model.modules)


def made(kind: str, **more: Any) -> tuple[dict[str, Any], ModelShape]:
    """Return a config of this family, and the model in numbers."""
    config = AutoConfig.for_model(kind, **{**SIZES, **more}).to_dict()
    shape = shape_of_config(config, name="small")
    assert shape is not None
    return config, shape


@pytest.mark.parametrize(
    ("kind", "more"),
    [
        ("gemma2", {"head_dim": 16}),
        ("starcoder2", {}),
        ("qwen2_moe", EXPERTS),
        ("llama", {}),
        ("mamba", {}),
    ],
)
def test_parameters_are_those_of_the_model_by_name_order_and_size(
    kind: str, more: dict[str, Any]
) -> None:
    _, shape = made(kind, **more)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **{**SIZES, **more}))

    expected = [(name, parameter.numel()) for name, parameter in model.named_parameters()]
    assert sorted((each.name, each.numel) for each in shape.parameters) == sorted(expected)
    assert f"models of type {kind} are not known" in shape.notes[0]


def test_work_and_adapters_are_those_of_a_family_that_is_known() -> None:
    config, shape = made("llama", tie_word_embeddings=False)
    known = model_of_config(config, name="small")

    assert work_of(shape, 256) == work_of(known, 256)
    assert [module.sides for module in shape.modules if module.sides != (0, 0)] == [
        module.sides for module in known.modules if module.sides != (0, 0)
    ]
    assert (shape.activations, shape.positions) == (known.activations, known.positions)
    assert shape.deepest_numel == known.deepest_numel


@pytest.mark.parametrize(("kind", "own"), [("falcon", True), ("llama", False)])
def test_a_linear_layer_of_another_class_is_told_from_those_of_torch(kind: str, own: bool) -> None:
    _, shape = made(kind)

    *inner, _ = (module for module in shape.modules if module.sides != (0, 0))
    assert {module.own_class for module in inner} == {own}


def test_a_tied_head_has_its_work_and_no_parameters_of_its_own() -> None:
    _, shape = made("gemma2", head_dim=16)

    head = shape.modules[-1]
    assert (head.numel, head.shared_numel) == (0, 64 * 1000)
    assert head.flops_per_token == 2 * 64 * 1000


def test_a_token_goes_through_some_of_the_experts() -> None:
    _, shape = made("qwen2_moe", **EXPERTS)
    _, all_of_them = made("qwen2_moe", **{**EXPERTS, "num_experts_per_tok": 8})

    experts = 3 * 48 * 64 * 8 * SIZES["num_hidden_layers"]
    work = work_of(shape, 0)
    assert work_of(all_of_them, 0) - work == 2 * experts * 6 // 8


@pytest.mark.parametrize(
    "config", [{"model_type": "novel"}, {"model_type": "qwen2_moe", "hidden_size": "wide"}]
)
def test_what_transformers_makes_no_model_of_is_none(config: dict[str, Any]) -> None:
    assert shape_of_config(config, name="small") is None


def test_a_plan_says_that_activations_alone_are_an_estimate(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config, shape = made("gemma2", head_dim=16)
    (tmp_path / "config.json").write_text(json.dumps(config, default=str))
    there = ("--gpu-mem", "8GiB", "--ram", "16GiB", "--sequence", "128", "--json")

    assert main(["plan", "--model", str(tmp_path), *there]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["parameters"] == shape.numel
    assert any("activations are an estimate" in note for note in answer["notes"])


# --- what a step takes ----------------------------------------------------------------------------


class Alive(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch has no annotations for it
    """Counts the bytes of tensors that operations make, and the most of them at one time."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = self.most = 0
        self.known: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> object:
        given = {id(tensor.untyped_storage()) for tensor in _tensors((args, kwargs))}
        found = func(*args, **(kwargs or {}))
        for tensor in _tensors(found):
            storage = tensor.untyped_storage()
            if id(storage) not in given and storage not in self.known:
                self.known.add(storage)
                self.now += storage.nbytes()
                weakref.finalize(storage, self.gone, storage.nbytes())
        self.most = max(self.most, self.now)
        return found

    def gone(self, nbytes: int) -> None:
        self.now -= nbytes


def _tensors(values: object) -> list[torch.Tensor]:
    return [value for value in tree_leaves(values) if isinstance(value, torch.Tensor)]


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable` is deprecated:FutureWarning")
@pytest.mark.parametrize("checkpointing", [True, False])
@pytest.mark.parametrize(
    ("kind", "more"),
    [
        ("llama", {}),
        ("mixtral", {"intermediate_size": 256, "num_local_experts": 4}),
        ("opt", {"ffn_dim": 512, "word_embed_proj_dim": 64, "dropout": 0.0}),
        ("gpt_neox", {}),
    ],
)
def test_a_step_takes_no_more_than_planned(
    kind: str, more: dict[str, Any], checkpointing: bool
) -> None:
    sizes = {**SIZES, "vocab_size": 8, "intermediate_size": 512, "use_cache": False, **more}
    config = AutoConfig.for_model(kind, **sizes)
    known = model_of_config(config.to_dict(), name="small").activations
    assert known is not None
    model = AutoModelForCausalLM.from_config(config).train()
    if checkpointing:
        model.gradient_checkpointing_enable()
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    tokens = torch.randint(8, (4, 256))

    with Alive() as alive:
        model(input_ids=tokens, labels=tokens).loss.backward()

    planned = known.nbytes(tokens.numel(), width=4, checkpointing=checkpointing)
    assert 0.8 * planned <= alive.most <= planned
