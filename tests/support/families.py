"""Tiny random models of the families that Transformers has, as `from_pretrained` gives them, and
batches for them.

Each is saved to a directory and loaded from there: that decides dtypes and buffers as users get
them. No network. Transformers takes seconds to import, so the tests that need it import it through
here, when they run.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch

__all__ = ["FAMILIES", "Batch", "Family", "peft", "saved", "transformers"]

VOCABULARY = 64
Batch = dict[str, torch.Tensor]
_LAYERS, _WIDTH, _HEADS, _INNER = 2, 32, 2, 48
_SIDE, _PATCH = 16, 8  # of images


def transformers() -> Any:
    """Return the module, quiet and off the network; skip the test where it cannot be imported."""
    os.environ["HF_HUB_OFFLINE"] = "1"  # read once, when it is imported
    module = pytest.importorskip(
        "transformers", reason="it is models of Transformers that run", exc_type=ImportError
    )
    module.logging.set_verbosity_error()
    module.logging.disable_progress_bar()
    return module


def peft() -> Any:
    """Return the module that makes adapters; skip the test where it cannot be imported."""
    transformers()
    return pytest.importorskip("peft", reason="adapters of LoRA are peft's", exc_type=ImportError)


@dataclass(frozen=True, kw_only=True)
class Family:
    """How a family's tiny model is made, and what it is trained on."""

    model: str
    config: Callable[[int], Any]
    """The configuration for sequences of at most that many tokens."""
    batch: Callable[[int, int], Batch]
    """The inputs of a step, by its seed and the length of the sequences."""
    rotary: bool = False
    adapted: str | list[str] = "all-linear"
    """The modules that get LoRA adapters, in peft's words."""

    def load(self, directory: Path, dtype: torch.dtype) -> Any:
        """Return the saved model as users load it, ready to train."""
        return getattr(transformers(), self.model).from_pretrained(directory, dtype=dtype).train()


def saved(family: Family, directory: Path, *, length: int) -> Path:
    """Save the family's model with random weights to `directory`; attention looks sharply at
    positions.
    """
    torch.manual_seed(0)
    model = getattr(transformers(), family.model)(family.config(length))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if family.rotary and any(
                part in name for part in ("q_proj.w", "k_proj.w", "query_key_value.w", "qkv_proj.w")
            ):
                parameter.mul_(12)
    model.save_pretrained(directory)
    return directory


# --- batches --------------------------------------------------------------------------------------


def _tokens(seed: int, length: int, batch: int = 2) -> torch.Tensor:
    # 0 to 3 are left to tokens with a meaning, such as padding.
    return torch.randint(
        4, VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(seed)
    )


def _noise(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def _language(seed: int, length: int) -> Batch:
    tokens = _tokens(seed, length, batch=2 if length < 512 else 1)
    return {"input_ids": tokens, "labels": tokens}


def _image(seed: int, length: int) -> Batch:
    return {"pixel_values": _noise(seed, 2, 3, _SIDE, _SIDE), "labels": torch.tensor([seed % 2, 1])}


def _image_and_text(seed: int, length: int) -> Batch:
    tokens = _tokens(seed, length)
    tokens[:, -1] = VOCABULARY - 1  # ends the text
    return {
        "pixel_values": _noise(seed, 2, 3, _SIDE, _SIDE),
        "input_ids": tokens,
        "return_loss": torch.tensor(True),
    }


def _speech(seed: int, length: int) -> Batch:
    return {"input_features": _noise(seed, 2, 8, 2 * length), "labels": _tokens(seed, length // 2)}


# --- configurations -------------------------------------------------------------------------------


def _config(kind: str, **more: Any) -> Callable[[int], Any]:
    """Return what makes a configuration in the names that most families use."""

    def make(length: int) -> Any:
        settings = {
            "vocab_size": VOCABULARY,
            "hidden_size": _WIDTH,
            "intermediate_size": _INNER,
            "num_hidden_layers": _LAYERS,
            "num_attention_heads": _HEADS,
            "max_position_embeddings": length + 2,
            "pad_token_id": 0,
            "bos_token_id": 1,
            "eos_token_id": 2,
            **more,
        }
        return getattr(transformers(), f"{kind}Config")(**settings)

    return make


def _gpt2(length: int) -> Any:
    return transformers().GPT2Config(
        vocab_size=VOCABULARY, n_embd=_WIDTH, n_layer=_LAYERS, n_head=_HEADS, n_positions=length
    )


def _t5(length: int) -> Any:
    return transformers().T5Config(
        vocab_size=VOCABULARY,
        d_model=_WIDTH,
        d_kv=_WIDTH // _HEADS,
        d_ff=_INNER,
        num_layers=_LAYERS,
        num_heads=_HEADS,
        feed_forward_proj="gated-gelu",
        decoder_start_token_id=0,
    )


def _bart(length: int) -> Any:
    return transformers().BartConfig(
        vocab_size=VOCABULARY,
        d_model=_WIDTH,
        encoder_layers=_LAYERS,
        decoder_layers=_LAYERS,
        encoder_attention_heads=_HEADS,
        decoder_attention_heads=_HEADS,
        encoder_ffn_dim=_INNER,
        decoder_ffn_dim=_INNER,
        max_position_embeddings=length,
    )


def _whisper(length: int) -> Any:
    return transformers().WhisperConfig(
        vocab_size=VOCABULARY,
        num_mel_bins=8,
        d_model=_WIDTH,
        encoder_layers=_LAYERS,
        decoder_layers=_LAYERS,
        encoder_attention_heads=_HEADS,
        decoder_attention_heads=_HEADS,
        encoder_ffn_dim=_INNER,
        decoder_ffn_dim=_INNER,
        max_source_positions=length,
        max_target_positions=length,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=3,
    )


def _clip(length: int) -> Any:
    shared = {
        "hidden_size": _WIDTH,
        "intermediate_size": _INNER,
        "num_hidden_layers": _LAYERS,
        "num_attention_heads": _HEADS,
    }
    text = {
        "vocab_size": VOCABULARY,
        "max_position_embeddings": length,
        "eos_token_id": VOCABULARY - 1,
    }
    vision = {"image_size": _SIDE, "patch_size": _PATCH}
    return transformers().CLIPConfig(
        text_config={**shared, **text}, vision_config={**shared, **vision}, projection_dim=_WIDTH
    )


def _mamba(length: int) -> Any:
    return transformers().MambaConfig(
        vocab_size=VOCABULARY,
        hidden_size=_WIDTH,
        num_hidden_layers=_LAYERS,
        state_size=4,
        time_step_rank=4,
    )


_ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
_EXPERTS: dict[str, Any] = {
    "num_experts_per_tok": 2,
    "num_key_value_heads": 1,
    "output_router_logits": True,
}


def _causal(
    kind: str, *, rotary: bool = True, adapted: str | list[str] = "all-linear", **more: Any
) -> Family:
    model = f"{kind}ForCausalLM"
    return Family(
        model=model, config=_config(kind, **more), batch=_language, rotary=rotary, adapted=adapted
    )


FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        "bart": Family(model="BartForConditionalGeneration", config=_bart, batch=_language),
        "bert": Family(model="BertForMaskedLM", config=_config("Bert"), batch=_language),
        "clip": Family(model="CLIPModel", config=_clip, batch=_image_and_text),
        "falcon": _causal("Falcon", new_decoder_architecture=True, num_kv_heads=1),
        "gemma": _causal("Gemma", num_key_value_heads=1, head_dim=16),
        "gemma3": Family(
            model="Gemma3ForCausalLM",
            config=_config("Gemma3Text", num_key_value_heads=1, head_dim=16, sliding_window=16),
            batch=_language,
            rotary=True,
        ),
        "gpt2": Family(model="GPT2LMHeadModel", config=_gpt2, batch=_language),
        "gpt-neox": _causal("GPTNeoX"),
        "llama": _causal("Llama", num_key_value_heads=1),
        "mamba": Family(
            model="MambaForCausalLM", config=_mamba, batch=_language, adapted=["in_proj", "x_proj"]
        ),
        "mistral": _causal("Mistral", num_key_value_heads=1, sliding_window=16),
        "mixtral": _causal("Mixtral", num_local_experts=4, adapted=_ATTENTION, **_EXPERTS),
        "olmo2": _causal("Olmo2"),
        "opt": _causal("OPT", rotary=False, word_embed_proj_dim=_WIDTH, ffn_dim=_INNER),
        "phi3": _causal("Phi3"),
        "qwen2-moe": _causal(
            "Qwen2Moe",
            adapted=_ATTENTION,
            num_experts=4,
            moe_intermediate_size=16,
            shared_expert_intermediate_size=16,
            **_EXPERTS,
        ),
        "qwen3": _causal("Qwen3", num_key_value_heads=1, head_dim=16),
        "roberta": Family(model="RobertaForMaskedLM", config=_config("Roberta"), batch=_language),
        "t5": Family(model="T5ForConditionalGeneration", config=_t5, batch=_language),
        "vit": Family(
            model="ViTForImageClassification",
            config=_config("ViT", image_size=_SIDE, patch_size=_PATCH),
            batch=_image,
        ),
        "whisper": Family(model="WhisperForConditionalGeneration", config=_whisper, batch=_speech),
    }
)
