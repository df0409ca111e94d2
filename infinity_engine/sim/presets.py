"""Models by name: the shapes that their authors published as config.json, with what counts
parameters and operations.

Pure data; `preset` makes a ModelShape of one.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import MappingProxyType

from infinity_engine.errors import ConfigError
from infinity_engine.placement.models import ModelShape
from infinity_engine.sim.configs import model_of_config

__all__ = ["PRESETS", "PRESET_OF_ID", "preset", "preset_of_id"]


def _gpt2(hidden: int, layers: int, heads: int) -> Mapping[str, object]:
    return {
        "model_type": "gpt2",
        "n_embd": hidden,
        "n_layer": layers,
        "n_head": heads,
        "n_positions": 1024,
        "vocab_size": 50257,
    }


def _gated(
    kind: str, size: str, *, vocabulary: int, positions: int, **more: object
) -> Mapping[str, object]:
    """Return a model of `size` "hidden x inner, layers, heads / groups of them that share keys"."""
    hidden, inner, layers, heads, groups = map(int, re.findall(r"[0-9]+", size))
    return {
        "model_type": kind,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": groups,
        "vocab_size": vocabulary,
        "max_position_embeddings": positions,
        **more,
    }


def _qwen3(size: str, *, experts: int = 0, **more: object) -> Mapping[str, object]:
    """Return a dense model, or with 128 `experts` of this inner size in each layer."""
    kind = "qwen3_moe" if experts else "qwen3"
    chosen = (
        {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": experts}
        if experts
        else {}
    )
    return _gated(kind, size, vocabulary=151936, positions=40960, head_dim=128, **chosen, **more)


def _opt(hidden: int, layers: int, heads: int, **more: object) -> Mapping[str, object]:
    return {
        "model_type": "opt",
        "hidden_size": hidden,
        "ffn_dim": 4 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "max_position_embeddings": 2048,
        "vocab_size": 50272,
        "word_embed_proj_dim": hidden,
        **more,
    }


_TIED = MappingProxyType({"tie_word_embeddings": True})

PRESETS: Mapping[str, Mapping[str, object]] = MappingProxyType(
    {
        "gpt2": _gpt2(768, 12, 12),
        "gpt2-medium": _gpt2(1024, 24, 16),
        "gpt2-large": _gpt2(1280, 36, 20),
        "gpt2-xl": _gpt2(1600, 48, 25),
        "llama-2-7b": _gated(
            "llama", "4096 x 11008, 32, 32 / 32", vocabulary=32000, positions=4096
        ),
        "llama-2-13b": _gated(
            "llama", "5120 x 13824, 40, 40 / 40", vocabulary=32000, positions=4096
        ),
        "llama-2-70b": _gated(
            "llama", "8192 x 28672, 80, 64 / 8", vocabulary=32000, positions=4096
        ),
        "llama-3-8b": _gated(
            "llama", "4096 x 14336, 32, 32 / 8", vocabulary=128256, positions=8192
        ),
        "llama-3-70b": _gated(
            "llama", "8192 x 28672, 80, 64 / 8", vocabulary=128256, positions=8192
        ),
        "llama-3.1-8b": _gated(
            "llama", "4096 x 14336, 32, 32 / 8", vocabulary=128256, positions=131072
        ),
        "llama-3.1-70b": _gated(
            "llama", "8192 x 28672, 80, 64 / 8", vocabulary=128256, positions=131072
        ),
        "llama-3.1-405b": _gated(
            "llama", "16384 x 53248, 126, 128 / 8", vocabulary=128256, positions=131072
        ),
        "llama-3.2-1b": _gated(
            "llama", "2048 x 8192, 16, 32 / 8", vocabulary=128256, positions=131072, **_TIED
        ),
        "llama-3.2-3b": _gated(
            "llama", "3072 x 8192, 28, 24 / 8", vocabulary=128256, positions=131072, **_TIED
        ),
        "mistral-7b": _gated(
            "mistral", "4096 x 14336, 32, 32 / 8", vocabulary=32000, positions=32768
        ),
        "mixtral-8x7b": _gated(
            "mixtral",
            "4096 x 14336, 32, 32 / 8",
            vocabulary=32000,
            positions=32768,
            num_local_experts=8,
            num_experts_per_tok=2,
        ),
        "mixtral-8x22b": _gated(
            "mixtral",
            "6144 x 16384, 56, 48 / 8",
            vocabulary=32000,
            positions=65536,
            num_local_experts=8,
            num_experts_per_tok=2,
        ),
        "qwen2.5-0.5b": _gated(
            "qwen2", "896 x 4864, 24, 14 / 2", vocabulary=151936, positions=32768, **_TIED
        ),
        "qwen2.5-1.5b": _gated(
            "qwen2", "1536 x 8960, 28, 12 / 2", vocabulary=151936, positions=131072, **_TIED
        ),
        "qwen2.5-3b": _gated(
            "qwen2", "2048 x 11008, 36, 16 / 2", vocabulary=151936, positions=32768, **_TIED
        ),
        "qwen2.5-7b": _gated(
            "qwen2", "3584 x 18944, 28, 28 / 4", vocabulary=152064, positions=131072
        ),
        "qwen2.5-14b": _gated(
            "qwen2", "5120 x 13824, 48, 40 / 8", vocabulary=152064, positions=131072
        ),
        "qwen2.5-32b": _gated(
            "qwen2", "5120 x 27648, 64, 40 / 8", vocabulary=152064, positions=131072
        ),
        "qwen2.5-72b": _gated(
            "qwen2", "8192 x 29568, 80, 64 / 8", vocabulary=152064, positions=131072
        ),
        "qwen3-0.6b": _qwen3("1024 x 3072, 28, 16 / 8", **_TIED),
        "qwen3-1.7b": _qwen3("2048 x 6144, 28, 16 / 8", **_TIED),
        "qwen3-4b": _qwen3("2560 x 9728, 36, 32 / 8", **_TIED),
        "qwen3-8b": _qwen3("4096 x 12288, 36, 32 / 8"),
        "qwen3-14b": _qwen3("5120 x 17408, 40, 40 / 8"),
        "qwen3-32b": _qwen3("5120 x 25600, 64, 64 / 8"),
        "qwen3-30b-a3b": _qwen3("2048 x 6144, 48, 32 / 4", experts=768),
        "qwen3-235b-a22b": _qwen3("4096 x 12288, 94, 64 / 4", experts=1536),
        "gemma-3-1b": _gated(
            "gemma3_text",
            "1152 x 6912, 26, 4 / 1",
            vocabulary=262144,
            positions=32768,
            head_dim=256,
        ),
        "phi-4": _gated("phi3", "5120 x 17920, 40, 40 / 10", vocabulary=100352, positions=16384),
        "olmo-2-7b": _gated(
            "olmo2", "4096 x 11008, 32, 32 / 32", vocabulary=100352, positions=4096
        ),
        "olmo-2-13b": _gated(
            "olmo2", "5120 x 13824, 40, 40 / 40", vocabulary=100352, positions=4096
        ),
        "olmo-2-32b": _gated(
            "olmo2", "5120 x 27648, 64, 40 / 8", vocabulary=100352, positions=4096
        ),
        "opt-125m": _opt(768, 12, 12),
        "opt-350m": _opt(1024, 24, 16, word_embed_proj_dim=512, do_layer_norm_before=False),
        "opt-1.3b": _opt(2048, 24, 32),
        "opt-2.7b": _opt(2560, 32, 32),
        "opt-6.7b": _opt(4096, 32, 32),
        "opt-13b": _opt(5120, 40, 40),
        "opt-30b": _opt(7168, 48, 56),
        "opt-66b": _opt(9216, 64, 72),
        "gpt-neox-20b": {
            "model_type": "gpt_neox",
            "hidden_size": 6144,
            "intermediate_size": 24576,
            "num_hidden_layers": 44,
            "num_attention_heads": 64,
            "vocab_size": 50432,
            "max_position_embeddings": 2048,
        },
    }
)

PRESET_OF_ID: Mapping[str, str] = MappingProxyType(
    {
        "openai-community/gpt2": "gpt2",
        "openai-community/gpt2-medium": "gpt2-medium",
        "openai-community/gpt2-large": "gpt2-large",
        "openai-community/gpt2-xl": "gpt2-xl",
        "meta-llama/Llama-2-7b-hf": "llama-2-7b",
        "meta-llama/Llama-2-13b-hf": "llama-2-13b",
        "meta-llama/Llama-2-70b-hf": "llama-2-70b",
        "meta-llama/Meta-Llama-3-8B": "llama-3-8b",
        "meta-llama/Meta-Llama-3-70B": "llama-3-70b",
        "meta-llama/Llama-3.1-8B": "llama-3.1-8b",
        "meta-llama/Llama-3.1-70B": "llama-3.1-70b",
        "meta-llama/Llama-3.3-70B": "llama-3.1-70b",
        "meta-llama/Llama-3.1-405B": "llama-3.1-405b",
        "meta-llama/Meta-Llama-3.1-8B": "llama-3.1-8b",
        "meta-llama/Meta-Llama-3.1-70B": "llama-3.1-70b",
        "meta-llama/Meta-Llama-3.1-405B": "llama-3.1-405b",  # its first name
        "meta-llama/Llama-3.2-1B": "llama-3.2-1b",
        "meta-llama/Llama-3.2-3B": "llama-3.2-3b",
        "mistralai/Mistral-7B-v0.1": "mistral-7b",
        "mistralai/Mixtral-8x7B-v0.1": "mixtral-8x7b",
        "mistralai/Mixtral-8x22B-v0.1": "mixtral-8x22b",
        "Qwen/Qwen2.5-0.5B": "qwen2.5-0.5b",
        "Qwen/Qwen2.5-1.5B": "qwen2.5-1.5b",
        "Qwen/Qwen2.5-3B": "qwen2.5-3b",
        "Qwen/Qwen2.5-7B": "qwen2.5-7b",
        "Qwen/Qwen2.5-14B": "qwen2.5-14b",
        "Qwen/Qwen2.5-32B": "qwen2.5-32b",
        "Qwen/Qwen2.5-72B": "qwen2.5-72b",
        "Qwen/Qwen3-0.6B": "qwen3-0.6b",
        "Qwen/Qwen3-1.7B": "qwen3-1.7b",
        "Qwen/Qwen3-4B": "qwen3-4b",
        "Qwen/Qwen3-8B": "qwen3-8b",
        "Qwen/Qwen3-14B": "qwen3-14b",
        "Qwen/Qwen3-32B": "qwen3-32b",
        "Qwen/Qwen3-30B-A3B": "qwen3-30b-a3b",
        "Qwen/Qwen3-235B-A22B": "qwen3-235b-a22b",
        "google/gemma-3-1b-pt": "gemma-3-1b",
        "microsoft/phi-4": "phi-4",
        "allenai/OLMo-2-1124-7B": "olmo-2-7b",
        "allenai/OLMo-2-1124-13B": "olmo-2-13b",
        "allenai/OLMo-2-0325-32B": "olmo-2-32b",
        "facebook/opt-125m": "opt-125m",
        "facebook/opt-350m": "opt-350m",
        "facebook/opt-1.3b": "opt-1.3b",
        "facebook/opt-2.7b": "opt-2.7b",
        "facebook/opt-6.7b": "opt-6.7b",
        "facebook/opt-13b": "opt-13b",
        "facebook/opt-30b": "opt-30b",
        "facebook/opt-66b": "opt-66b",
        "EleutherAI/gpt-neox-20b": "gpt-neox-20b",
    }
)
"""The presets by their ids on Hugging Face's hub."""
_TUNED = frozenset({"base", "chat", "instruct", "it", "pt"})


def preset_of_id(given: str) -> str:
    """Return the preset of an id, also of a model that was tuned from it; empty: there is none."""
    names = {_untuned(known): name for known, name in PRESET_OF_ID.items()}
    return names.get(_untuned(given), "")


def _untuned(name: str) -> str:
    return "-".join(word for word in name.lower().split("-") if word not in _TUNED)


def preset(name: str) -> ModelShape:
    """Return the model of this name; case does not matter.

    Raises:
        ConfigError: there is none.
    """
    key = name.lower()
    if key not in PRESETS:
        raise ConfigError.unknown_name(field="model", name=name, known=PRESETS)
    return model_of_config(PRESETS[key], name=key)
