"""Models of Transformers with `chunk_loss`: the loss and gradients of the model itself, without
whole logits; and the same bits on every tier of an engine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from losses.test_cross_entropy import largest_tensor
from parity.test_transformers import (
    TIERS,
    batch_of,
    loaded,
    settings_of,
    trained_by_engine,
    trained_by_torch,
)
from torch import nn

import infinity_engine
from infinity_engine.errors import ConfigError
from infinity_engine.losses import ChunkedLoss, TokenLoss, chunk_loss
from infinity_engine.tiling import tile
from support.engine_bits import differing
from support.families import FAMILIES, Batch, Family, peft, saved, transformers
from support.nvme_training import RATES

pytestmark = [
    pytest.mark.usefixtures("deterministic"),
    pytest.mark.filterwarnings(
        "ignore:`(is_)?gradient_checkpointing.*` is deprecated:FutureWarning"
    ),
]

LENGTH = 16
SMALL = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
WORKSPACE = 16 << 10
"""Too little for all logits of a batch, so that there are several tiles."""


def causal(kind: str, **more: Any) -> Any:
    """Return a tiny decoder in fp32, with random weights that are always the same."""
    torch.manual_seed(0)
    config = getattr(transformers(), f"{kind}Config")(**{**SMALL, **more})
    model = getattr(transformers(), f"{kind.removesuffix('Text')}ForCausalLM")(config)
    return sharpened(model.train())


def sharpened(model: nn.Module) -> nn.Module:
    """Let the logits be large enough that a cap or a scale shows."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(3.0)
    return model


def of_family(name: str, **more: Any) -> Callable[[], Any]:
    def make() -> Any:
        torch.manual_seed(0)
        family = FAMILIES[name]
        config = family.config(LENGTH)
        config.update(more)
        return sharpened(getattr(transformers(), family.model)(config).eval())

    return make


MODELS: dict[str, Callable[[], Any]] = {
    "llama": of_family("llama"),
    "gpt2, tied": of_family("gpt2"),
    "llama, tied": of_family("llama", tie_word_embeddings=True),
    "opt": of_family("opt"),
    "falcon": of_family("falcon"),
    "gpt-neox": of_family("gpt-neox"),
    "mamba": of_family("mamba"),
    "phi3": of_family("phi3"),
    "qwen2-moe, with routers' loss": of_family("qwen2-moe"),
    "mixtral, with routers' loss": of_family("mixtral"),
    "gemma2, soft cap": lambda: causal("Gemma2", head_dim=16, final_logit_softcapping=3.0).eval(),
    "gemma3, soft cap": lambda: causal(
        "Gemma3Text", head_dim=16, final_logit_softcapping=3.0
    ).eval(),
    "cohere, scale": lambda: causal("Cohere", logit_scale=0.25).eval(),
    "granite, scale": lambda: causal("Granite", logits_scaling=5.0).eval(),
    "t5": of_family("t5"),
    "bart": of_family("bart"),
}


def batch_for(name: str) -> Batch:
    """Return a batch in which some tokens do not count."""
    family = FAMILIES.get(name.partition(",")[0], FAMILIES["llama"])
    batch = family.batch(0, LENGTH)
    batch["labels"] = batch["labels"].clone()
    batch["labels"][0, :5] = -100
    return batch


def differentiated(model: Any, batch: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Return the loss and all gradients."""
    model.zero_grad()
    loss = model(**batch).loss
    loss.backward()
    found = {
        name: parameter.grad.clone()
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }
    return {"loss": loss.detach(), **found}


def assert_near(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    """In fp32, sums of 64 logits and 32 tokens in another order differ by some roundings."""
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        bound = 2e-5 * float(value.abs().max()) + 1e-8
        assert float((found[name] - value).abs().max()) <= bound, name


@pytest.mark.parametrize("name", MODELS)
def test_loss_and_gradients_are_the_models_own(name: str) -> None:
    model, batch = MODELS[name](), batch_for(name)
    expected = differentiated(model, batch)

    with chunk_loss(model, workspace=WORKSPACE):
        found = differentiated(model, batch)
        again = differentiated(model, batch)

    assert_near(found, expected)
    assert_near(again, expected)


@pytest.mark.parametrize("name", ["llama", "qwen2-moe, with routers' loss", "t5"])
def test_a_closed_model_computes_its_loss_as_before(name: str) -> None:
    model, batch = MODELS[name](), batch_for(name)
    expected, logits = differentiated(model, batch), model(**batch).logits
    hooks = hooks_of(model)

    chunk_loss(model).close()

    found = differentiated(model, batch)
    assert differing(found, expected) == []
    assert torch.equal(model(**batch).logits, logits)
    assert hooks_of(model) == hooks


def hooks_of(model: nn.Module) -> list[list[int]]:
    return [[*module._forward_hooks, *module._forward_pre_hooks] for module in model.modules()]


def test_the_sum_is_divided_by_the_number_of_items_in_the_batch() -> None:
    model, batch = MODELS["qwen2-moe, with routers' loss"](), batch_for("qwen2-moe")
    items = {**batch, "num_items_in_batch": torch.tensor(37)}
    expected = differentiated(model, items)

    with chunk_loss(model, workspace=WORKSPACE):
        assert_near(differentiated(model, items), expected)


def test_labels_that_are_shifted_already_are_taken_as_they_are() -> None:
    model, batch = MODELS["llama"](), batch_for("llama")
    shifted = torch.randint(4, 64, batch["labels"].shape)
    given = {**batch, "shift_labels": shifted}
    expected = differentiated(model, given)

    with chunk_loss(model, workspace=WORKSPACE):
        assert_near(differentiated(model, given), expected)


@pytest.mark.parametrize("name", ["llama", "t5"])
def test_labels_by_position_and_tuples_are_known(name: str) -> None:
    import inspect

    model, batch = MODELS[name](), batch_for(name)
    names = list(inspect.signature(model.forward).parameters)
    args = [batch.get(key) for key in names[: names.index("labels") + 1]]
    expected = model(*args).loss

    with chunk_loss(model, workspace=WORKSPACE):
        torch.testing.assert_close(model(*args).loss, expected)
        loss, logits, *_ = model(**batch, return_dict=False)

    torch.testing.assert_close(loss, expected)
    assert logits.shape[1:] == (1, 64)


def test_logits_of_the_last_position_are_returned() -> None:
    model, batch = MODELS["gemma2, soft cap"](), batch_for("llama")
    expected = model(**batch).logits[:, -1:]

    with chunk_loss(model):
        torch.testing.assert_close(model(**batch).logits, expected)


def test_calls_without_labels_have_whole_logits() -> None:
    model, batch = MODELS["llama"](), batch_for("llama")
    tokens = batch["input_ids"]
    with torch.no_grad():
        expected = model(tokens).logits
        written = model.generate(tokens[:1, :4], max_new_tokens=4, do_sample=False)
        with chunk_loss(model):
            model(**batch)
            assert torch.equal(model(tokens).logits, expected)
            again = model.generate(tokens[:1, :4], max_new_tokens=4, do_sample=False)

    assert torch.equal(again, written)


def test_evaluation_has_the_loss_and_no_graph() -> None:
    model, batch = MODELS["llama"](), batch_for("llama")
    with torch.no_grad():
        expected = model(**batch).loss
        with chunk_loss(model, workspace=WORKSPACE):
            found = model(**batch).loss

    assert not found.requires_grad
    torch.testing.assert_close(found, expected)


def test_smoothing_and_z_loss_are_added() -> None:
    model, batch = MODELS["llama"](), batch_for("llama")
    logits = model(**batch).logits[:, :-1].flatten(0, 1).float()
    targets = batch["labels"][:, 1:].flatten()
    expected = nn.functional.cross_entropy(logits, targets, label_smoothing=0.1)
    expected = expected + 1e-2 * logits[targets != -100].logsumexp(1).square().mean()

    with chunk_loss(model, token_loss=TokenLoss(label_smoothing=0.1, z_loss=1e-2)):
        torch.testing.assert_close(model(**batch).loss, expected)


def test_no_operation_makes_a_tensor_of_all_logits() -> None:
    model = causal("Llama", vocab_size=4096, hidden_size=16)
    tokens = torch.randint(4, 4096, (2, 128))
    whole = tokens.numel() * 4096 * 4

    with largest_tensor() as plain:
        model(input_ids=tokens, labels=tokens).loss.backward()
    with chunk_loss(model, workspace="600KiB"), largest_tensor() as chunked:
        model(input_ids=tokens, labels=tokens).loss.backward()

    assert plain.largest == whole
    assert chunked.largest <= 600 << 10


def test_adapters_train_with_the_same_loss() -> None:
    model = MODELS["llama"]()
    torch.manual_seed(1)
    adapted = peft().get_peft_model(model, peft().LoraConfig(r=4, target_modules="all-linear"))
    batch = batch_for("llama")
    expected = differentiated(adapted, batch)

    with chunk_loss(adapted, workspace=WORKSPACE):
        found = differentiated(adapted, batch)

    assert len(found) > 1
    assert_near(found, expected)


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointed_blocks_train_with_the_same_loss(reentrant: bool) -> None:
    model, batch = MODELS["llama"]().train(), batch_for("llama")
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    model.enable_input_require_grads()
    expected = differentiated(model, batch)

    with chunk_loss(model, workspace=WORKSPACE):
        assert_near(differentiated(model, batch), expected)


def test_a_tiled_model_trains_with_the_same_loss() -> None:
    model, batch = MODELS["gpt2, tied"](), batch_for("gpt2")
    expected = differentiated(model, batch)
    names = tile(model, 2048).names

    with chunk_loss(model, workspace=WORKSPACE):
        found = differentiated(model, batch)

    assert {"lm_head", "transformer.wte"} <= set(names)
    assert_near({"loss": found["loss"]}, {"loss": expected["loss"]})
    tiles = [found[name] for name in found if name.startswith("transformer.wte.tiles")]
    whole = torch.cat(tiles)
    torch.testing.assert_close(whole, expected["transformer.wte.weight"], rtol=1e-4, atol=1e-6)


# --- what is refused ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("bert", "ForMaskedLM"),
        ("vit", "language model of Transformers"),
        ("whisper", "prepare its decoder's inputs"),
    ],
)
def test_a_model_with_another_loss_is_refused(name: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        chunk_loss(of_family(name)())


def test_a_module_of_your_own_is_refused_with_what_to_call() -> None:
    with pytest.raises(ConfigError, match=r"chunked_cross_entropy\(\)"):
        chunk_loss(nn.Linear(2, 2))


def test_a_loss_function_that_the_caller_has_set_is_refused() -> None:
    model = MODELS["llama"]()
    model.loss_function = lambda **_: torch.zeros(())

    with pytest.raises(ConfigError, match="ForCausalLMLoss"):
        chunk_loss(model)


def test_adapters_on_the_output_layer_are_refused() -> None:
    adapted = peft().get_peft_model(
        MODELS["llama"](), peft().LoraConfig(r=4, target_modules=["lm_head"])
    )

    with pytest.raises(ConfigError, match="leave the output layer alone"):
        chunk_loss(adapted)


def test_logits_that_a_model_changes_in_its_own_way_are_refused() -> None:
    class Doubled(transformers().LlamaForCausalLM):  # type: ignore[misc]
        def forward(self, *args: Any, labels: Any = None, **kwargs: Any) -> Any:
            output = super().forward(*args, **kwargs)
            output.logits = output.logits * 2
            if labels is not None:
                output.loss = self.loss_function(
                    output.logits, labels, self.config.vocab_size, **kwargs
                )
            return output

    model = Doubled(MODELS["llama"]().config)
    with (
        chunk_loss(model),
        pytest.raises(ConfigError, match="not the outputs of its output layer"),
    ):
        model(**batch_for("llama"))


def test_a_model_that_keeps_the_number_of_items_from_its_loss_is_refused() -> None:
    class Averaging(transformers().LlamaForCausalLM):  # type: ignore[misc]
        def forward(self, *args: Any, num_items_in_batch: Any = None, **kwargs: Any) -> Any:
            return super().forward(*args, **kwargs)

    model = Averaging(MODELS["llama"]().config)
    with chunk_loss(model), pytest.raises(ConfigError, match="num_items_in_batch"):
        model(**batch_for("llama"))


def test_labels_of_another_length_are_refused() -> None:
    model, batch = MODELS["llama"](), batch_for("llama")

    with chunk_loss(model), pytest.raises(ValueError, match="no logits_to_keep with labels"):
        model(**batch, logits_to_keep=3)


def test_a_call_that_raised_leaves_nothing_to_the_next() -> None:
    model, batch = MODELS["llama"](), batch_for("llama")
    expected = model(**batch).loss

    with chunk_loss(model):
        with pytest.raises(ValueError, match="labels"):
            model(**batch, logits_to_keep=3)
        head = model.get_output_embeddings()
        assert head(torch.zeros(*batch["labels"].shape, head.in_features)).shape[1] == LENGTH
        assert model(batch["input_ids"]).logits.shape[1] == LENGTH
        torch.testing.assert_close(model(**batch).loss, expected)


# --- under an engine ------------------------------------------------------------------------------


@pytest.fixture
def closed() -> Iterator[list[ChunkedLoss]]:
    """Close what is in the list when the test ends."""
    opened: list[ChunkedLoss] = []
    yield opened
    for chunked in opened:
        chunked.close()


@pytest.mark.parametrize(
    ("name", "variant"),
    [
        ("llama", "full"),
        ("gpt2", "full"),
        ("qwen2-moe", "full"),
        ("t5", "full"),
        ("llama", "lora"),
        ("llama", "reentrant checkpoints"),
        ("gemma3", "checkpoints"),
    ],
)
def test_training_has_plain_torchs_bits_on_every_tier(
    name: str,
    variant: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    closed: list[ChunkedLoss],
) -> None:
    family = FAMILIES[name]
    directory = saved(family, tmp_path / "model", length=LENGTH)
    (tmp_path / "drive").mkdir()

    def model() -> Any:
        made = loaded(family, directory, variant)
        closed.append(chunk_loss(made, workspace=WORKSPACE))
        return made

    def batch(step: int) -> Batch:
        return batch_of(family, step, LENGTH)

    expected, losses = trained_by_torch(model(), batch, 2, monkeypatch)
    for tier in TIERS:
        bits, same = trained_by_engine(model, batch, 2, tier, tmp_path / "drive")
        assert same == losses, tier
        assert differing(expected, bits) == [], tier


@pytest.mark.parametrize("tier", TIERS)
def test_hooks_that_are_set_after_the_engines_give_the_same_bits(tier: str, tmp_path: Path) -> None:
    from contextlib import ExitStack

    family = FAMILIES["llama"]
    directory = saved(family, tmp_path / "model", length=LENGTH)
    (tmp_path / "drive").mkdir()

    def losses_of(before: bool) -> list[float]:
        return _losses(family, directory, tier, tmp_path / "drive", ExitStack(), before=before)

    assert losses_of(before=True) == losses_of(before=False)


def _losses(
    family: Family, directory: Path, tier: str, drive: Path, stack: Any, *, before: bool
) -> list[float]:
    """Train some steps; the loss is chunked before the engine is made, or after."""
    with stack:
        model = loaded(family, directory, "full")
        if before:
            stack.enter_context(chunk_loss(model, workspace=WORKSPACE))
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        engine = stack.enter_context(
            infinity_engine.initialize(
                model,
                optimizer,
                accelerator="cpu",
                rates=RATES,
                **settings_of(tier, 64 << 20, drive, stack),
            )
        )
        if not before:
            stack.enter_context(chunk_loss(model, workspace=WORKSPACE))
        losses = []
        for step in range(3):
            loss = engine(**batch_of(family, step, LENGTH)).loss
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
        return losses
