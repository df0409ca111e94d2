"""Models in numbers: parameters to the published count, arithmetic by hand, activations against
what autograd saves.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from infinity_engine.errors import ConfigError
from infinity_engine.placement.models import ModelShape
from infinity_engine.sim.configs import model_of_config, open_config
from infinity_engine.sim.presets import PRESETS, preset


def forward_flops(model: ModelShape, sequence: int) -> int:
    """Return the operations of a forward for one token."""
    return sum(module.flops(sequence) for module in model.modules)


def read_config(path: Path) -> ModelShape:
    """Return the model that a config.json describes, or the one in this directory."""
    config, name = open_config(path)
    return model_of_config(config, name=name)


# As their authors publish them, with each shared parameter counted once.
PUBLISHED = {
    "gpt2": 124_439_808,
    "gpt2-medium": 354_823_168,
    "gpt2-large": 774_030_080,
    "gpt2-xl": 1_557_611_200,
    "llama-2-7b": 6_738_415_616,
    "llama-2-13b": 13_015_864_320,
    "llama-2-70b": 68_976_648_192,
    "llama-3-8b": 8_030_261_248,
    "llama-3-70b": 70_553_706_496,
    "llama-3.1-8b": 8_030_261_248,
    "llama-3.1-70b": 70_553_706_496,
    "llama-3.1-405b": 405_853_388_800,
    "llama-3.2-1b": 1_235_814_400,
    "llama-3.2-3b": 3_212_749_824,
    "mistral-7b": 7_241_732_096,
    "mixtral-8x7b": 46_702_792_704,
    "mixtral-8x22b": 140_620_634_112,
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-1.5b": 1_543_714_304,
    "qwen2.5-3b": 3_085_938_688,
    "qwen2.5-7b": 7_615_616_512,
    "qwen2.5-14b": 14_770_033_664,
    "qwen2.5-32b": 32_763_876_352,
    "qwen2.5-72b": 72_706_203_648,
    "qwen3-0.6b": 596_049_920,
    "qwen3-1.7b": 1_720_574_976,
    "qwen3-4b": 4_022_468_096,
    "qwen3-8b": 8_190_735_360,
    "qwen3-14b": 14_768_307_200,
    "qwen3-32b": 32_762_123_264,
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen3-235b-a22b": 235_093_634_560,
    "gemma-3-1b": 999_885_952,
    "phi-4": 14_659_507_200,
    "olmo-2-7b": 7_298_617_344,
    "olmo-2-13b": 13_716_198_400,
    "olmo-2-32b": 32_234_279_936,
    "opt-125m": 125_239_296,
    "opt-350m": 331_196_416,
    "opt-1.3b": 1_315_758_080,
    "opt-2.7b": 2_651_596_800,
    "opt-6.7b": 6_658_473_984,
    "opt-13b": 12_853_473_280,
    "opt-30b": 29_974_540_288,
    "opt-66b": 65_719_701_504,
    "gpt-neox-20b": 20_554_567_680,
}
LLAMA = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 100,
    "max_position_embeddings": 512,
}

EXPERTS = {
    **LLAMA,
    "model_type": "qwen3_moe",
    "num_hidden_layers": 4,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "decoder_sparse_step": 2,
    "mlp_only_layers": [3],
}


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_has_the_published_number_of_parameters(name: str) -> None:
    assert preset(name).numel == PUBLISHED[name]


@pytest.mark.parametrize("name", PRESETS)
def test_every_parameter_has_a_name_of_its_own_and_elements(name: str) -> None:
    parameters = preset(name).parameters

    assert len({each.name for each in parameters}) == len(parameters)
    assert all(each.numel > 0 for each in parameters)


@pytest.mark.parametrize("name", ["llama-3-8b", "opt-6.7b", "gpt2-xl", "gpt-neox-20b"])
def test_a_forward_takes_two_operations_for_each_parameter_that_multiplies(name: str) -> None:
    model = preset(name)
    products = [module.numel for module in model.modules if module.flops_per_token]

    # biases, and a tied head
    assert forward_flops(model, 0) == pytest.approx(2 * sum(products), rel=0.12)


def test_attention_adds_four_operations_for_each_token_and_element() -> None:
    model = model_of_config(LLAMA, name="small")

    assert forward_flops(model, 10) - forward_flops(model, 0) == 2 * 4 * 10 * 64


@pytest.mark.parametrize(("name", "active"), [("mixtral-8x7b", 12.75e9), ("qwen3-30b-a3b", 3.03e9)])
def test_of_a_mixture_of_experts_only_the_chosen_ones_compute(name: str, active: float) -> None:
    # of 46.7 and 30.5 billion
    assert forward_flops(preset(name), 0) / 2 == pytest.approx(active, rel=0.01)


def test_the_experts_of_a_layer_are_needed_at_once() -> None:
    assert preset("mixtral-8x7b").deepest_numel == 8 * 3 * 4096 * 14336


def test_layers_without_experts_have_what_all_tokens_go_through() -> None:
    model = model_of_config(EXPERTS, name="small")

    mixed = [name for name in (each.name for each in model.modules) if name.endswith("experts")]
    dense = [name for name in (each.name for each in model.modules) if name.endswith("gate_proj")]
    assert mixed == [
        "model.layers.1.mlp.experts"
    ]  # every second one has, and of these the last is named as one without
    assert dense == [f"model.layers.{layer}.mlp.gate_proj" for layer in (0, 2, 3)]


def test_activations_are_those_of_the_layer_that_keeps_most() -> None:
    few = model_of_config(EXPERTS, name="small").activations
    many = model_of_config({**EXPERTS, "moe_intermediate_size": 4000}, name="small").activations
    none = model_of_config({**EXPERTS, "mlp_only_layers": [0, 1, 2, 3]}, name="small").activations
    assert few is not None
    assert many is not None

    assert few == none
    assert many.elements > few.elements


@pytest.mark.parametrize(("function", "inner"), [("gelu", 2), ("gelu_new", 6), (None, 6)])
def test_an_activation_function_of_one_operation_saves_less(
    function: str | None, inner: int
) -> None:
    config = {"model_type": "gpt2", "n_embd": 64, "n_layer": 2, "n_head": 2, "vocab_size": 100}
    config |= {"n_positions": 128, "activation_function": function}

    activations = model_of_config(config, name="small").activations

    assert activations is not None
    assert activations.inner == inner * 4 * 64
    assert activations.elements == 9 * 64 + activations.inner


def test_an_activation_function_that_is_no_text_is_refused() -> None:
    config = {"model_type": "gpt2", "n_embd": 64, "n_layer": 2, "n_head": 2, "vocab_size": 100}

    with pytest.raises(ConfigError, match="activation_function"):
        model_of_config({**config, "n_positions": 128, "activation_function": 3}, name="small")


@pytest.mark.parametrize(("kind", "sizes"), [("qwen3", (16, 16)), ("olmo2", (64, 32))])
def test_queries_and_keys_have_norms_of_a_head_or_of_all(kind: str, sizes: tuple[int, int]) -> None:
    model = model_of_config({**LLAMA, "model_type": kind}, name="small")

    numels = {each.name: each.numel for each in model.parameters}
    at = "model.layers.0.self_attn"
    assert (numels[f"{at}.q_norm.weight"], numels[f"{at}.k_norm.weight"]) == sizes


def test_products_that_are_one_have_the_parameters_of_all() -> None:
    fused = model_of_config({**LLAMA, "model_type": "phi3"}, name="small")
    apart = model_of_config(LLAMA, name="small")

    assert fused.numel == apart.numel
    assert forward_flops(fused, 7) == forward_flops(apart, 7)
    assert "model.layers.1.self_attn.qkv_proj.weight" in {each.name for each in fused.parameters}


def test_a_tied_head_has_no_parameters_and_reads_the_embedding() -> None:
    head = model_of_config({**LLAMA, "tie_word_embeddings": True}, name="small").modules[-1]

    assert (head.numel, head.shared_numel, head.flops_per_token) == (0, 6400, 2 * 6400)


def test_the_deepest_need_is_that_of_the_largest_module() -> None:
    assert preset("llama-3-8b").deepest_numel == 128256 * 4096


def test_a_bias_is_counted_where_the_config_has_one() -> None:
    without = model_of_config(LLAMA, name="small").numel
    with_bias = model_of_config(
        {**LLAMA, "attention_bias": True, "mlp_bias": True}, name="small"
    ).numel

    assert with_bias - without == 2 * (64 + 32 + 32 + 64 + 160 + 160 + 64)


def test_a_head_dim_of_its_own_is_taken() -> None:
    wide = model_of_config({**LLAMA, "head_dim": 32}, name="small")

    sizes = {each.name: each.numel for each in wide.parameters}
    assert sizes["model.layers.0.self_attn.q_proj.weight"] == 4 * 32 * 64
    assert sizes["model.layers.0.self_attn.k_proj.weight"] == 2 * 32 * 64


# --- activations ----------------------------------------------------------------------------------


def test_checkpointing_keeps_the_inputs_of_blocks_and_one_block() -> None:
    activations = preset("llama-3-8b").activations
    assert activations is not None

    whole = activations.nbytes(1, width=2, checkpointing=False)
    less = activations.nbytes(1, width=2, checkpointing=True)

    block = 2 * activations.elements + 4 * activations.fp32
    logits = 128256 * (2 + 12)
    assert whole == 32 * block + logits
    assert less == 32 * 4096 * 2 + block + logits


@pytest.mark.parametrize("checkpointing", [True, False])
def test_tiles_of_the_sequence_take_the_inner_elements_of_one_tile_and_gradients(
    checkpointing: bool,
) -> None:
    activations = preset("llama-3-8b").activations
    assert activations is not None

    whole, tiled = (
        activations.nbytes(4096, width=2, checkpointing=checkpointing, tile_tokens=tokens)
        for tokens in (None, 256)
    )

    blocks = 1 if checkpointing else 32
    outputs = 4096 * 2 * 4096
    assert activations.inner == 4 * 14336
    assert whole - tiled == 2 * activations.inner * (blocks * 4096 - 256 - 128) - outputs


@pytest.mark.parametrize("name", ["mixtral-8x7b", "qwen3-30b-a3b", "opt-1.3b"])
def test_layers_with_experts_or_without_a_feed_forward_block_have_no_tiles(name: str) -> None:
    known = preset(name).activations

    assert known is not None
    assert known.inner == 0


def test_activations_grow_with_tokens() -> None:
    activations = preset("gpt2").activations
    assert activations is not None

    one, many = (activations.nbytes(tokens, width=2, checkpointing=False) for tokens in (1, 1000))
    assert many == 1000 * one


def test_the_estimate_for_a_block_is_what_autograd_saves_of_it() -> None:
    torch = pytest.importorskip("torch")
    hidden, inner, tokens, heads, groups = 64, 160, 32, 4, 2
    saved: dict[int, int] = {}

    def keep(tensor: object) -> object:
        assert isinstance(tensor, torch.Tensor)
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            saved[storage.data_ptr()] = storage.nbytes()
            alive.append(tensor)
        return tensor

    def weight(out: int, into: int) -> object:
        return torch.nn.Parameter(torch.randn(out, into, dtype=torch.bfloat16) / 8)

    def norm(x: object, scale: object) -> object:
        wide = x.float()  # type: ignore[attr-defined]
        return scale * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(
            torch.bfloat16
        )

    width = hidden // heads
    shapes = [
        (hidden, hidden),
        (groups * width, hidden),
        (groups * width, hidden),
        (hidden, hidden),
    ]
    shapes += [(inner, hidden), (inner, hidden), (hidden, inner)]
    q, k, v, o, gate, up, down = (weight(*shape) for shape in shapes)
    scales = [torch.nn.Parameter(torch.ones(hidden, dtype=torch.bfloat16)) for _ in range(2)]
    weights = {each.untyped_storage().data_ptr() for each in (q, k, v, o, gate, up, down, *scales)}
    alive: list[object] = []
    x = torch.randn(1, tokens, hidden, dtype=torch.bfloat16, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        normal = norm(x, scales[0])
        linear = torch.nn.functional.linear
        parts = [
            linear(normal, each).view(1, tokens, -1, width).transpose(1, 2) for each in (q, k, v)
        ]
        mixed = torch.nn.functional.scaled_dot_product_attention(
            *parts, is_causal=True, enable_gqa=True
        )
        x = x + linear(mixed.transpose(1, 2).reshape(1, tokens, hidden), o)
        normal = norm(x, scales[1])
        x = x + linear(torch.nn.functional.silu(linear(normal, gate)) * linear(normal, up), down)

    activations = model_of_config({**LLAMA, "num_hidden_layers": 1}, name="small").activations
    assert activations is not None
    estimate = tokens * (2 * activations.elements + 4 * activations.fp32)
    assert sum(saved.values()) == pytest.approx(estimate, rel=0.25)


# --- configs --------------------------------------------------------------------------------------


def test_a_config_is_read_from_its_file_or_its_directory(tmp_path: Path) -> None:
    folder = tmp_path / "my-model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(LLAMA))

    assert read_config(folder) == read_config(folder / "config.json")
    assert read_config(folder).name == "my-model"
    assert read_config(folder).positions == 512


def test_an_unknown_type_of_model_without_sizes_is_refused_with_those_that_are_known() -> None:
    with pytest.raises(
        ConfigError, match=r"config\.model_type: expected one of gemma3_text, .*qwen2.*got 'mamba'"
    ):
        model_of_config({"model_type": "mamba", "hidden_size": 64}, name="small")


def test_a_model_of_an_unknown_type_is_planned_by_its_sizes_and_says_so() -> None:
    known = model_of_config({**LLAMA, "model_type": "llama"}, name="small")
    renamed = {"d_model": LLAMA["hidden_size"], "n_layers": LLAMA["num_hidden_layers"]}
    others = {
        name: value
        for name, value in LLAMA.items()
        if name not in {"hidden_size", "num_hidden_layers"}
    }
    novel = {**others, **renamed, "model_type": "novel", "tie_word_embeddings": False}
    alike = model_of_config(novel, name="small")

    assert alike.modules == known.modules
    assert known.notes == ()
    assert "models of type novel are not known" in alike.notes[0]


def test_the_text_part_of_an_unknown_model_of_several_counts() -> None:
    text = {**LLAMA, "tie_word_embeddings": False}
    inner = model_of_config({"model_type": "x", "text_config": text}, name="small")

    assert inner.numel == model_of_config(LLAMA, name="small").numel
    assert "and only its text part" in inner.notes[0]


def test_an_unknown_model_whose_config_does_not_say_it_has_a_tied_head() -> None:
    """Transformers writes it down only where it is not so."""
    tied, own = (
        model_of_config({**LLAMA, "model_type": "novel", **more}, name="small").numel
        for more in ({}, {"tie_word_embeddings": False})
    )

    assert own - tied == LLAMA["vocab_size"] * LLAMA["hidden_size"]  # type: ignore[operator]


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"is_encoder_decoder": True}, r"config\.is_encoder_decoder: expected one stack of layers"),
        ({"num_attention_heads": None}, r"config\.model_type: expected a family that is known"),
        ({"state_size": 16}, r"config\.model_type: expected a family that is known"),
        ({"vocab_size": None}, r"config\.vocab_size: expected a whole number: models of type nov"),
    ],
)
def test_an_unknown_model_that_is_like_none_is_refused(
    changed: dict[str, object], said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        model_of_config({**LLAMA, "model_type": "novel", **changed}, name="small")


# Sizes of families that are not known, small: what they have beside layers, width and vocabulary.
UNKNOWN: dict[str, dict[str, object]] = {
    "gemma2": {"head_dim": 16},
    "cohere": {},
    "glm4": {"head_dim": 16, "pad_token_id": 0},
    "starcoder2": {"hidden_act": "gelu_pytorch_tanh"},
    "phi": {"hidden_act": "gelu_new"},
    "falcon": {"multi_query": True, "activation": "gelu", "hidden_act": "gelu"},
    "qwen2_moe": {
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 48,
        "shared_expert_intermediate_size": 96,
    },
    "deepseek_v3": {
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 48,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "n_group": 1,
        "topk_group": 1,
        "q_lora_rank": 48,
        "kv_lora_rank": 32,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 16,
        "v_head_dim": 16,
    },
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 16},
}


@pytest.mark.parametrize("kind", UNKNOWN)
def test_the_estimate_of_an_unknown_family_is_within_a_sixth(kind: str) -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    sizes = {**LLAMA, "num_hidden_layers": 4, "vocab_size": 1000, **UNKNOWN[kind]}
    sizes.pop("model_type")
    config = transformers.AutoConfig.for_model(kind, **sizes)
    with torch.device("meta"):
        made = transformers.AutoModelForCausalLM.from_config(config)

    estimated = model_of_config({**config.to_dict(), "model_type": kind}, name="small")
    assert estimated.numel == pytest.approx(made.num_parameters(), rel=1 / 6)


def test_an_unknown_model_with_experts_has_them() -> None:
    everywhere = {
        **EXPERTS,
        "mlp_only_layers": [],
        "decoder_sparse_step": 1,
        "tie_word_embeddings": False,
    }
    experts = model_of_config({**everywhere, "model_type": "novel_moe"}, name="small")
    known = model_of_config(everywhere, name="small")

    assert experts.numel == pytest.approx(known.numel, rel=0.05)


def test_an_unknown_model_with_no_experts_is_dense() -> None:
    dense, none = (
        model_of_config({**LLAMA, "model_type": "novel", **more}, name="small")
        for more in ({}, {"num_local_experts": 0})
    )

    assert none == dense


def test_an_unknown_model_without_a_gate_has_two_products_in_a_block() -> None:
    given = {**LLAMA, "model_type": "novel", "hidden_act": "gelu"}
    names = [module.name for module in model_of_config(given, name="small").modules]

    assert any("dense_h_to_4h" in name for name in names)
    assert not any("gate" in name for name in names)


def test_a_quantized_model_is_planned_with_whole_parameters_and_says_so() -> None:
    given = {
        **LLAMA,
        "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]},
    }
    model = model_of_config(given, name="small")

    assert model.modules == model_of_config(LLAMA, name="small").modules
    assert "parameters are quantized (fp8)" in model.notes[0]


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"num_attention_heads": 5}, r"num_attention_heads: .*divides hidden_size \(64\), got 5"),
        (
            {"num_key_value_heads": 3},
            r"num_key_value_heads: .*divides num_attention_heads \(4\), got 3",
        ),
        (
            {"model_type": "gpt_neox", "num_attention_heads": 7},
            r"num_attention_heads: .*divides hidden_size \(64\)",
        ),
    ],
)
def test_heads_that_do_not_come_out_even_are_refused(changed: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        model_of_config({**LLAMA, **changed}, name="small")


@pytest.mark.parametrize("value", ["3", [1.5], [True], {"3": 1}])
def test_a_list_of_layers_that_is_none_is_refused(value: object) -> None:
    with pytest.raises(
        ConfigError, match=r"config\.mlp_only_layers: expected a list of whole numbers"
    ):
        model_of_config({**EXPERTS, "mlp_only_layers": value}, name="small")


@pytest.mark.parametrize("value", [None, 0, -1, 1.5, True, "64"])
def test_a_wrong_or_missing_size_is_refused_by_name(value: object) -> None:
    with pytest.raises(ConfigError, match=r"config\.hidden_size: expected a whole number"):
        model_of_config({**LLAMA, "hidden_size": value}, name="small")


@pytest.mark.parametrize(("name", "value"), [("hidden_size", [96, 192]), ("model_type", ["llama"])])
def test_a_list_in_place_of_one_value_of_an_unknown_model_is_refused(
    name: str, value: object
) -> None:
    with pytest.raises(ConfigError, match=rf"config\.{name}: expected a"):
        model_of_config({**LLAMA, "model_type": "novel", name: value}, name="small")


@pytest.mark.parametrize(
    ("name", "value", "most"),
    [
        ("hidden_size", 2**40, "16,777,216"),
        ("num_hidden_layers", 10**9, "1,000"),
        ("vocab_size", 2**31, "16,777,216"),
    ],
)
def test_a_size_that_no_model_has_is_refused_at_once(name: str, value: int, most: str) -> None:
    with pytest.raises(ConfigError, match=rf"config\.{name}: expected at most {most}, got {value}"):
        model_of_config({**LLAMA, name: value}, name="small")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "a file in JSON"),
        ("[" * 100_000, "a file in JSON"),
        ("[]", "a mapping"),
        ('{"a": 1}', "model_type"),
    ],
)
def test_a_file_that_is_no_config_is_refused(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "config.json"
    path.write_text(text)

    with pytest.raises(ConfigError, match=said):
        read_config(path)


def test_a_missing_file_is_refused_by_its_path(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"absent\.json.*|No such file"):
        read_config(tmp_path / "absent.json")


def test_an_unknown_preset_is_refused_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"nearest: llama-3-70b"):
        preset("llama3-70b")


def test_case_does_not_matter_in_a_preset() -> None:
    assert preset("Llama-3-8B") == preset("llama-3-8b")


def test_two_models_of_the_same_config_are_equal() -> None:
    assert isinstance(preset("gpt2"), ModelShape)
    assert preset("gpt2") == preset("gpt2")
