"""What planning has to know of a model: its parameters module by module, its arithmetic, and what autograd keeps.

Pure numbers, of a Hugging Face config.json or put together by whoever has a live model; reads no weights and needs no
torch. Called by the planner, the command line and the engine. The presets are in presets.py.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import isqrt
from pathlib import Path
from types import MappingProxyType

from infinity_engine.errors import ConfigError

__all__ = ["Activations", "ModelShape", "ModuleShape", "ParameterShape", "model_of_config", "read_config"]

_LOGITS_FP32 = 3  # a copy of the logits, their log-softmax, and its gradient
_MISSING = object()
_MOST, _MOST_TOKENS, _MOST_LAYERS, _MOST_EXPERTS = 2**24, 2**31, 1000, 1000  # what is more is no size that is meant


@dataclass(frozen=True, slots=True)
class ParameterShape:
    """One parameter. Frozen ones are not `trained`; `element_bytes` is given where it is not as modules compute."""

    name: str
    numel: int
    trained: bool = True
    element_bytes: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class ModuleShape:
    """A module with parameters of its own, or with arithmetic.

    `flops_per_token` are those of a forward, without attention between tokens; that is 4 operations for each token of
    the sequence and each of `attention_width` elements.
    """

    name: str
    parameters: tuple[ParameterShape, ...] = ()
    flops_per_token: int = 0
    attention_width: int = 0
    shared_numel: int = 0
    """Elements of another module's parameters that it reads."""

    @property
    def numel(self) -> int:
        """Elements of all its parameters."""
        return sum(each.numel for each in self.parameters)

    def flops(self, sequence: int) -> int:
        """Return the operations of a forward for one token of sequences that long; causal masks save none of them."""
        return self.flops_per_token + 4 * sequence * self.attention_width


@dataclass(frozen=True, kw_only=True, slots=True)
class Activations:
    """What autograd keeps between forward and backward, for each token, as the blocks' own code saves it.

    An estimate: `elements` have the width that modules compute with, `fp32` four bytes. Attention is taken to keep no
    matrix of scores. A checkpointed block keeps its input, `hidden` elements, and makes the rest when it is needed.
    """

    blocks: int
    hidden: int
    elements: int
    fp32: int
    logits: int

    def nbytes(self, tokens: int, *, width: int, checkpointing: bool) -> int:
        """Return the most bytes that are there at once, for so many tokens and elements of `width` bytes."""
        block = width * self.elements + 4 * self.fp32
        kept = width * self.hidden * self.blocks + block if checkpointing else block * self.blocks
        return tokens * (kept + self.logits * (width + 4 * _LOGITS_FP32))


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelShape:
    """A model in numbers. `modules` and their parameters have the order in which the model registers them."""

    name: str
    modules: tuple[ModuleShape, ...]
    deepest_numel: int
    """The most elements that modules within one another need at the same time."""
    activations: Activations | None = None
    """None where nothing is known of them."""
    positions: int | None = None
    """The longest sequence, None where there is no limit, or it is not known."""

    @property
    def parameters(self) -> tuple[ParameterShape, ...]:
        """All parameters, each once."""
        return tuple(parameter for module in self.modules for parameter in module.parameters)

    @property
    def numel(self) -> int:
        """Elements of all parameters."""
        return sum(module.numel for module in self.modules)

    @property
    def width(self) -> int:
        """The elements that a block makes of a token; where that is not known, the side of a middling product."""
        if self.activations is not None:
            return self.activations.hidden
        products = sorted(module.flops_per_token for module in self.modules if module.flops_per_token)
        return max(isqrt(products[len(products) // 2] // 2), 1) if products else 1

    def forward_flops_per_token(self, sequence: int) -> int:
        """Return the operations of a forward for one token; a backward has twice as many."""
        return sum(module.flops(sequence) for module in self.modules)


def read_config(path: Path) -> ModelShape:
    """Return the model that a config.json describes, or the one in this directory; its name is that of the path.

    Raises:
        ConfigError: there is none, it is no JSON object, or it describes no model that is known.
    """
    file = path / "config.json" if path.is_dir() else path
    try:
        given = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        expected = f"a config.json that can be read ({error.strerror})"
        raise ConfigError(field="model", value=str(path), expected=expected) from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(field="model", value=str(path), expected=f"a file in JSON ({error})") from error
    name = file.parent.name if file.name == "config.json" and file.parent.name else file.stem
    return model_of_config(given, name=name)


def model_of_config(config: object, *, name: str) -> ModelShape:
    """Return the model that the contents of a config.json describe.

    Raises:
        ConfigError: it is of no known type, or lacks something; names the place.
    """
    if not isinstance(config, Mapping):
        raise ConfigError(
            field="config", value=type(config).__name__, expected="a mapping, as in a model's config.json"
        )
    kind = str(config.get("model_type"))
    if kind not in _FAMILIES:
        raise ConfigError.unknown_name(field="config.model_type", name=kind, known=_FAMILIES)
    modules, activations, positions = _FAMILIES[kind](_Fields(config))
    return ModelShape(
        name=name,
        modules=tuple(modules),
        deepest_numel=max(module.numel for module in modules),
        activations=activations,
        positions=positions,
    )


class _Fields:
    """The fields of a config.json, checked when they are read."""

    def __init__(self, given: Mapping[str, object]) -> None:
        self._given = given

    def whole(self, name: str, default: object = _MISSING, *, most: int = _MOST) -> int:
        """Return a whole number from 1 to `most`; `default` where it is missing or null."""
        value = self._given.get(name)
        if value is None and default is not _MISSING:
            value = default
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ConfigError(field=f"config.{name}", value=value, expected="a whole number, 1 or more")
        if value > most:
            raise ConfigError(field=f"config.{name}", value=value, expected=f"at most {most:,}")
        return value

    def flag(self, name: str, *, default: bool) -> bool:
        """Return true or false."""
        value = self._given.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise ConfigError(field=f"config.{name}", value=value, expected="true or false")
        return value


_Model = tuple[list[ModuleShape], Activations, int | None]


def _linear(name: str, out: int, into: int, *, bias: bool, attention: int = 0) -> ModuleShape:
    """Return a linear module, with the attention whose result it takes."""
    parameters = [ParameterShape(f"{name}.weight", out * into)]
    if bias:
        parameters.append(ParameterShape(f"{name}.bias", out))
    return ModuleShape(
        name=name,
        parameters=tuple(parameters),
        flops_per_token=2 * out * into,
        attention_width=attention,
    )


def _embedding(name: str, rows: int, width: int) -> ModuleShape:
    return ModuleShape(name=name, parameters=(ParameterShape(f"{name}.weight", rows * width),))


def _norm(name: str, width: int, *, bias: bool) -> ModuleShape:
    parameters = [ParameterShape(f"{name}.weight", width)]
    if bias:
        parameters.append(ParameterShape(f"{name}.bias", width))
    return ModuleShape(name=name, parameters=tuple(parameters))


def _head(name: str, vocabulary: int, width: int, *, tied: bool) -> ModuleShape:
    """Return what makes the logits; tied to the embedding, it has no parameters of its own."""
    if tied:
        flops = 2 * vocabulary * width
        return ModuleShape(name=name, flops_per_token=flops, shared_numel=vocabulary * width)
    return _linear(name, vocabulary, width, bias=False)


# --- families --------------------------------------------------------------------------------------------------------


def _llama(config: _Fields) -> _Model:
    attention_bias = config.flag("attention_bias", default=False)
    return _gated(config, qkv_bias=attention_bias, out_bias=attention_bias)


def _mistral(config: _Fields) -> _Model:
    return _gated(config, qkv_bias=False, out_bias=False)


def _qwen2(config: _Fields) -> _Model:
    return _gated(config, qkv_bias=True, out_bias=False)


def _mixtral(config: _Fields) -> _Model:
    experts = config.whole("num_local_experts", 8, most=_MOST_EXPERTS)
    return _gated(
        config,
        qkv_bias=False,
        out_bias=False,
        experts=experts,
        chosen=min(config.whole("num_experts_per_tok", 2), experts),
    )


def _gated(config: _Fields, *, qkv_bias: bool, out_bias: bool, experts: int = 0, chosen: int = 1) -> _Model:
    """Return a model with root-mean-square norms, grouped queries and gated feed-forward layers, or experts of them."""
    hidden, inner = config.whole("hidden_size"), config.whole("intermediate_size")
    layers, heads = config.whole("num_hidden_layers", most=_MOST_LAYERS), config.whole("num_attention_heads")
    groups = config.whole("num_key_value_heads", heads)
    vocabulary = config.whole("vocab_size")
    width = config.whole("head_dim", hidden // heads)
    mlp_bias = config.flag("mlp_bias", default=False)
    queries, keys = heads * width, groups * width
    modules = [_embedding("model.embed_tokens", vocabulary, hidden)]
    for layer in range(layers):
        at = f"model.layers.{layer}"
        modules += [
            _linear(f"{at}.self_attn.q_proj", queries, hidden, bias=qkv_bias),
            _linear(f"{at}.self_attn.k_proj", keys, hidden, bias=qkv_bias),
            _linear(f"{at}.self_attn.v_proj", keys, hidden, bias=qkv_bias),
            _linear(f"{at}.self_attn.o_proj", hidden, queries, bias=out_bias, attention=queries),
        ]
        if experts:
            modules.append(_linear(f"{at}.block_sparse_moe.gate", experts, hidden, bias=False))
            modules += _experts(f"{at}.block_sparse_moe.experts", hidden, inner, experts, chosen)
        else:
            modules += [
                _linear(f"{at}.mlp.gate_proj", inner, hidden, bias=mlp_bias),
                _linear(f"{at}.mlp.up_proj", inner, hidden, bias=mlp_bias),
                _linear(f"{at}.mlp.down_proj", hidden, inner, bias=mlp_bias),
            ]
        modules += [
            _norm(f"{at}.input_layernorm", hidden, bias=False),
            _norm(f"{at}.post_attention_layernorm", hidden, bias=False),
        ]
    modules.append(_norm("model.norm", hidden, bias=False))
    modules.append(_head("lm_head", vocabulary, hidden, tied=config.flag("tie_word_embeddings", default=False)))
    feed_forward = 4 * inner + (hidden if experts else 0)  # gate, its activation, up, their product; rows gathered
    activations = Activations(
        blocks=layers,
        hidden=hidden,
        # Each norm saves its fp32 input and what it has normalized, and its result is what the products take.
        elements=4 * hidden + 3 * queries + 2 * keys + feed_forward * chosen,
        fp32=2 * hidden,
        logits=vocabulary,
    )
    return modules, activations, config.whole("max_position_embeddings", _MOST_TOKENS, most=_MOST_TOKENS)


def _experts(at: str, hidden: int, inner: int, experts: int, chosen: int) -> list[ModuleShape]:
    modules = []
    for expert in range(experts):
        for name, out, into in (("w1", inner, hidden), ("w2", hidden, inner), ("w3", inner, hidden)):
            made = _linear(f"{at}.{expert}.{name}", out, into, bias=False)
            flops = 2 * out * into * chosen // experts  # as many tokens for each expert
            modules.append(ModuleShape(name=made.name, parameters=made.parameters, flops_per_token=flops))
    return modules


def _gpt2(config: _Fields) -> _Model:
    hidden, layers = config.whole("n_embd"), config.whole("n_layer", most=_MOST_LAYERS)
    inner = config.whole("n_inner", 4 * hidden)
    vocabulary, positions = config.whole("vocab_size"), config.whole("n_positions")
    modules = [
        _embedding("transformer.wte", vocabulary, hidden),
        _embedding("transformer.wpe", positions, hidden),
    ]
    for layer in range(layers):
        at = f"transformer.h.{layer}"
        modules += [
            _norm(f"{at}.ln_1", hidden, bias=True),
            _linear(f"{at}.attn.c_attn", 3 * hidden, hidden, bias=True),
            _linear(f"{at}.attn.c_proj", hidden, hidden, bias=True, attention=hidden),
            _norm(f"{at}.ln_2", hidden, bias=True),
            _linear(f"{at}.mlp.c_fc", inner, hidden, bias=True),
            _linear(f"{at}.mlp.c_proj", hidden, inner, bias=True),
        ]
    modules.append(_norm("transformer.ln_f", hidden, bias=True))
    modules.append(_head("lm_head", vocabulary, hidden, tied=config.flag("tie_word_embeddings", default=True)))
    # The activation function of this family is made of elementary operations, each of which saves its input.
    saved = 4 * hidden + 5 * hidden + 6 * inner
    activations = Activations(blocks=layers, hidden=hidden, elements=saved, fp32=0, logits=vocabulary)
    return modules, activations, positions


def _opt(config: _Fields) -> _Model:
    hidden, layers = config.whole("hidden_size"), config.whole("num_hidden_layers", most=_MOST_LAYERS)
    inner, vocabulary = config.whole("ffn_dim"), config.whole("vocab_size")
    positions = config.whole("max_position_embeddings", most=_MOST_TOKENS)
    outer = config.whole("word_embed_proj_dim", hidden)
    bias, affine = config.flag("enable_bias", default=True), config.flag("layer_norm_elementwise_affine", default=True)
    modules = [
        _embedding("model.decoder.embed_tokens", vocabulary, outer),
        _embedding("model.decoder.embed_positions", positions + 2, hidden),  # the first two are never used
    ]
    if outer != hidden:
        modules += [
            _linear("model.decoder.project_out", outer, hidden, bias=False),
            _linear("model.decoder.project_in", hidden, outer, bias=False),
        ]
    if config.flag("do_layer_norm_before", default=True) and not config.flag("_remove_final_layer_norm", default=False):
        modules += [_norm("model.decoder.final_layer_norm", hidden, bias=True)] if affine else []
    for layer in range(layers):
        at = f"model.decoder.layers.{layer}"
        modules += [
            _linear(f"{at}.self_attn.k_proj", hidden, hidden, bias=bias),
            _linear(f"{at}.self_attn.v_proj", hidden, hidden, bias=bias),
            _linear(f"{at}.self_attn.q_proj", hidden, hidden, bias=bias),
            _linear(f"{at}.self_attn.out_proj", hidden, hidden, bias=bias, attention=hidden),
            *([_norm(f"{at}.self_attn_layer_norm", hidden, bias=True)] if affine else []),
            _linear(f"{at}.fc1", inner, hidden, bias=bias),
            _linear(f"{at}.fc2", hidden, inner, bias=bias),
            *([_norm(f"{at}.final_layer_norm", hidden, bias=True)] if affine else []),
        ]
    modules.append(_head("lm_head", vocabulary, outer, tied=config.flag("tie_word_embeddings", default=True)))
    saved = 4 * hidden + 5 * hidden + inner  # ReLU saves its result, which is what the next product takes
    activations = Activations(blocks=layers, hidden=hidden, elements=saved, fp32=0, logits=vocabulary)
    return modules, activations, positions


def _gpt_neox(config: _Fields) -> _Model:
    hidden, layers = config.whole("hidden_size"), config.whole("num_hidden_layers", most=_MOST_LAYERS)
    inner, vocabulary = config.whole("intermediate_size"), config.whole("vocab_size")
    bias = config.flag("attention_bias", default=True)
    modules = [_embedding("gpt_neox.embed_in", vocabulary, hidden)]
    for layer in range(layers):
        at = f"gpt_neox.layers.{layer}"
        modules += [
            _norm(f"{at}.input_layernorm", hidden, bias=True),
            _norm(f"{at}.post_attention_layernorm", hidden, bias=True),
            _linear(f"{at}.attention.query_key_value", 3 * hidden, hidden, bias=bias),
            _linear(f"{at}.attention.dense", hidden, hidden, bias=bias, attention=hidden),
            _linear(f"{at}.mlp.dense_h_to_4h", inner, hidden, bias=True),
            _linear(f"{at}.mlp.dense_4h_to_h", hidden, inner, bias=True),
        ]
    modules.append(_norm("gpt_neox.final_layer_norm", hidden, bias=True))
    modules.append(_head("embed_out", vocabulary, hidden, tied=config.flag("tie_word_embeddings", default=False)))
    saved = 4 * hidden + 5 * hidden + 2 * inner
    activations = Activations(blocks=layers, hidden=hidden, elements=saved, fp32=0, logits=vocabulary)
    return modules, activations, config.whole("max_position_embeddings", _MOST_TOKENS, most=_MOST_TOKENS)


_Family = Callable[[_Fields], _Model]
_FAMILIES: Mapping[str, _Family] = MappingProxyType(
    {
        "gpt2": _gpt2,
        "gpt_neox": _gpt_neox,
        "llama": _llama,
        "mistral": _mistral,
        "mixtral": _mixtral,
        "opt": _opt,
        "qwen2": _qwen2,
    }
)
