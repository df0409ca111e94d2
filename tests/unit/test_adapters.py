"""Models of which a part is frozen, models with adapters, and where the command line finds them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from infinity_engine.cli.main import main
from infinity_engine.errors import ConfigError
from infinity_engine.placement.adapters import freeze, with_compact_base, with_lora
from infinity_engine.placement.models import ModelShape
from infinity_engine.sim.configs import model_of_config
from infinity_engine.sim.presets import PRESET_OF_ID, PRESETS, preset

MODEL = preset("llama-3.2-1b")
CONFIG = {
    "model_type": "qwen2",
    "hidden_size": 64,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "vocab_size": 1000,
}


def trained(model: ModelShape) -> int:
    return sum(parameter.numel for parameter in model.parameters if parameter.trained)


def test_adapters_of_rank_16_are_as_many_as_peft_makes() -> None:
    # PEFT's print_trainable_parameters() for r=16 and target_modules="all-linear"
    assert trained(with_lora(preset("llama-3-8b"), 16)) == 41_943_040


def test_only_adapters_are_trained_in_fp32_and_the_logits_have_none() -> None:
    adapted = with_lora(MODEL, 8)

    assert adapted.numel == MODEL.numel + trained(adapted)
    assert {it.element_bytes for it in adapted.parameters if it.trained} == {4}
    assert all("lora_" in it.name for it in adapted.parameters if it.trained)
    assert not any("lm_head" in it.name for it in adapted.parameters if it.trained)


def test_a_frozen_module_has_half_of_the_backward() -> None:
    adapted = with_lora(MODEL, 8)
    [whole] = [it for it in MODEL.modules if it.name == "model.layers.0.mlp.up_proj"]
    [frozen] = [it for it in adapted.modules if it.name == whole.name]

    assert whole.backward_flops(1) == 2 * whole.flops(1)
    assert frozen.backward_flops(1) == frozen.flops(1)


def test_attention_has_its_whole_backward_beside_frozen_parameters() -> None:
    adapted = with_lora(MODEL, 8)
    [out] = [it for it in adapted.modules if it.name == "model.layers.0.self_attn.o_proj"]

    grown = out.backward_flops(2048) - out.backward_flops(1024)
    assert grown == 2 * 4 * 1024 * out.attention_width


def test_a_block_with_adapters_keeps_what_autograd_keeps_of_one() -> None:
    """17,080 bytes a token: the block of this model as peft adapts it at rank 16, in bf16."""
    sizes = {"hidden_size": 256, "intermediate_size": 688, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    config = {**CONFIG, **sizes, **heads, "model_type": "llama"}
    known = with_lora(model_of_config(config, name="small"), 16).activations

    assert known is not None
    assert known.block_bytes(1, width=2) == pytest.approx(17_080, rel=0.25)


@pytest.mark.parametrize("kind", ["int8", "nf4"])
def test_a_compact_base_has_the_parameters_that_the_engine_makes(kind: str) -> None:
    torch = pytest.importorskip("torch")
    from infinity_engine.compact import CompactKind, CompactLinear

    config = {**CONFIG, "attention_bias": True}
    compact = with_compact_base(with_lora(model_of_config(config, name="small"), 4), kind)

    [planned] = [it for it in compact.modules if it.name == "model.layers.0.self_attn.k_proj"]
    layer = torch.nn.Linear(64, 64)
    made = CompactLinear(64, 64, kind=CompactKind(kind), bias=layer.bias)
    assert [(it.name.rpartition(".")[2], it.numel) for it in planned.parameters] == [
        (name, parameter.numel()) for name, parameter in made.named_parameters()
    ]
    assert [it.element_bytes for it in planned.parameters[:3]] == [
        parameter.itemsize for parameter in (made.weight, made.scale, made.values)
    ]


def test_a_compact_base_computes_as_a_whole_one_and_counts_as_many_parameters() -> None:
    adapted = with_lora(MODEL, 8)
    compact = with_compact_base(adapted, "nf4")

    assert compact.size == adapted.size == adapted.numel
    assert compact.numel < adapted.numel
    assert [it.flops(9) for it in compact.modules] == [it.flops(9) for it in adapted.modules]


def test_the_largest_compact_weight_is_expanded_beside_all_else() -> None:
    adapted = with_lora(MODEL, 8)
    known, compact = adapted.activations, with_compact_base(adapted, "int8").activations

    assert known is not None
    assert compact is not None
    more = compact.nbytes(1, width=2, checkpointing=True) - known.nbytes(
        1, width=2, checkpointing=True
    )
    assert more == 2 * 8192 * 2048 + 6 * (4 << 20)


def test_a_base_that_is_trained_cannot_be_compact() -> None:
    with pytest.raises(ConfigError, match="--base: expected frozen linear layers: give --lora"):
        with_compact_base(MODEL, "nf4")


FALCON = {**CONFIG, "model_type": "falcon", "multi_query": True, "hidden_act": "gelu"}


@pytest.mark.parametrize("kind", ["int8", "nf4"])
@pytest.mark.parametrize(
    "model", [preset("gpt2"), model_of_config(FALCON, name="falcon")], ids=lambda it: it.name
)
def test_a_base_with_linear_layers_of_its_own_class_is_refused(
    model: ModelShape, kind: str
) -> None:
    adapted = with_lora(model, 8)

    with pytest.raises(ConfigError, match=f"those of {model.name} are of a class of their own"):
        with_compact_base(adapted, kind)


@pytest.mark.parametrize("rank", [0, -1, 10_000])
def test_a_rank_that_is_none_is_refused(rank: int) -> None:
    with pytest.raises(ConfigError, match="--lora: expected a rank from 1 to 4096"):
        with_lora(MODEL, rank)


def test_parameters_are_frozen_by_their_names() -> None:
    frozen = freeze(MODEL, r"embed_tokens|layers\.[0-7]\.")

    left = {it.name for it in frozen.parameters if it.trained}
    assert not any("embed" in name or ".layers.3." in name for name in left)
    assert any(".layers.8." in name for name in left)
    assert frozen.numel == MODEL.numel


@pytest.mark.parametrize(
    ("pattern", "said"),
    [("(", "a regular expression"), ("nowhere", "some names have"), (".", "but not all")],
)
def test_a_pattern_that_freezes_nothing_or_all_is_refused(pattern: str, said: str) -> None:
    with pytest.raises(ConfigError, match=f"--freeze: expected .*{said}"):
        freeze(MODEL, pattern)


# --- on the command line --------------------------------------------------------------------------


@pytest.fixture
def plan(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that runs `infinity plan` on a desktop, and returns status, output and
    errors.
    """

    def run(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setenv("COLUMNS", "200")
        status = main(["plan", "--gpu", "4090", "--ram", "32GiB", *arguments])
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return run


def test_adapters_let_a_model_fit_that_does_not_as_a_whole(plan: Any) -> None:
    whole, _, _ = plan("--model", "llama-3-8b")
    status, out, _ = plan("--model", "llama-3-8b", "--lora", "16")

    assert (whole, status) == (1, 0)
    assert "41,943,040 of them trained" in out


def test_a_base_in_4_bits_takes_a_third_of_the_memory(plan: Any) -> None:
    def parameters(*more: str) -> int:
        _, out, _ = plan("--model", "llama-3-8b", "--lora", "16", *more, "--json")
        held = json.loads(out)["memory"]["device"]["holdings"]
        [nbytes] = [part["bytes"] for part in held if part["what"] == "parameters"]
        return int(nbytes)

    assert parameters("--base", "nf4") < 0.4 * parameters()


def test_a_chunked_loss_lets_a_sequence_fit_and_is_offered(plan: Any) -> None:
    asked = ("--model", "qwen2.5-1.5b", "--sequence", "32768")
    refused, words, _ = plan(*asked)
    status, out, _ = plan(*asked, "--loss", "chunked")

    assert (refused, status) == (1, 0)
    assert "a loss without whole logits (--loss chunked)" in words
    assert "no whole logits" in out


def test_a_quantized_model_is_answered_with_a_note(plan: Any, tmp_path: Path) -> None:
    quantized = {**CONFIG, "quantization_config": {"quant_method": "bitsandbytes"}}
    (tmp_path / "config.json").write_text(json.dumps(quantized))
    status, out, _ = plan("--model", str(tmp_path))

    assert status == 0
    assert "parameters are quantized (bitsandbytes)" in out


def cached(folder: Path, *, reference: bool) -> None:
    """Put a model into a cache as Hugging Face's libraries lay it out."""
    repository = folder / "models--some--model"
    snapshot = repository / "snapshots" / "0123abc"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text(json.dumps(CONFIG))
    if reference:
        (repository / "refs").mkdir()
        (repository / "refs" / "main").write_text("0123abc")


@pytest.mark.parametrize("reference", [True, False])
@pytest.mark.parametrize(
    ("variable", "value", "folder"),
    [
        ("HF_HUB_CACHE", "~", ""),
        ("HF_HOME", "~/models", "models/hub"),
        ("XDG_CACHE_HOME", "~/caches", "caches/huggingface/hub"),
        (None, "", ".cache/huggingface/hub"),
    ],
)
def test_an_id_of_hugging_face_is_found_in_the_local_cache(
    plan: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    variable: str | None,
    value: str,
    folder: str,
    reference: bool,
) -> None:
    for name in ("HF_HUB_CACHE", "HF_HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    if variable is not None:
        monkeypatch.setenv(variable, value)
    cached(tmp_path / folder, reference=reference)

    assert plan("--model", "some/model")[0] == 0


def test_an_id_that_is_not_in_the_cache_is_refused_without_asking_the_network(
    plan: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    status, _, err = plan("--model", "some/model")

    assert status == 2
    assert f"with its config.json in {tmp_path}, or the id of a preset, as this command asks" in err


def test_the_id_of_a_preset_is_the_preset_unless_the_cache_has_its_config(
    plan: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    status, out, _ = plan("--model", "meta-llama/Llama-3.2-1B")
    cached(tmp_path, reference=True)
    (tmp_path / "models--some--model").rename(tmp_path / "models--meta-llama--Llama-3.2-1B")
    _, from_cache, _ = plan("--model", "meta-llama/Llama-3.2-1B")

    assert status == 0
    assert "llama-3.2-1b fits" in out
    assert "it is planned as the preset llama-3.2-1b" in out
    assert "preset" not in from_cache


def test_every_preset_has_an_id_on_the_hub() -> None:
    assert set(PRESET_OF_ID.values()) == set(PRESETS)
