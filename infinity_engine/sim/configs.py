"""Models of a Hugging Face config.json: the parameters of the families that are known, module by
module.

Reads sizes, never weights, and needs no torch. Names, order and sizes are those of the modules in
Transformers 5, where the experts of a layer are one module. Called by the command line; the presets
are in presets.py.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Literal, NamedTuple

from infinity_engine.errors import ConfigError
from infinity_engine.placement.models import Activations, ModelShape, ModuleShape, ParameterShape

__all__ = ["FAMILIES", "check_one_stack", "model_of_config", "open_config"]

# what is more is no size that is meant
_MOST, _MOST_TOKENS, _MOST_LAYERS, _MOST_EXPERTS = 2**24, 2**31, 1000, 1000


def open_config(path: Path) -> tuple[object, str]:
    """Return what a config.json says, or that in this directory, and the name of its model.

    Raises:
        ConfigError: there is none, or it is no JSON.
    """
    try:
        file = path / "config.json" if path.is_dir() else path
        given = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        expected = f"a config.json that can be read ({error.strerror})"
        raise ConfigError(field="model", value=str(path), expected=expected) from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(
            field="model", value=str(path), expected=f"a file in JSON ({error})"
        ) from error
    name = file.parent.name if file.name == "config.json" and file.parent.name else file.stem
    return given, name


def model_of_config(config: object, *, name: str) -> ModelShape:
    """Return the model that the contents of a config.json describe.

    Raises:
        ConfigError: it is of no known type, or lacks something; names the place.
    """
    if not isinstance(config, Mapping):
        raise ConfigError(
            field="config",
            value=type(config).__name__,
            expected="a mapping, as in a model's config.json",
        )
    notes = list(_quantization(config))
    kind = _Fields(config).word("model_type", default="None")
    family = FAMILIES.get(kind)
    if family is None:
        part = ", and only its text part" if isinstance(config.get("text_config"), Mapping) else ""
        config, family = _alike(config, kind)
        notes.append(
            f"models of type {kind} are not known: this one is planned by its layers, its width "
            f"and its vocabulary{part}, so its parameters are an estimate"
        )
    modules, activations, positions = family(_Fields(config))
    if kind in _OWN_LINEARS:
        modules = [replace(module, own_class=module.sides != (0, 0)) for module in modules]
    # `torch_dtype` before Transformers 5
    stated = config.get("dtype") or config.get("torch_dtype")
    return ModelShape(
        name=name,
        modules=tuple(modules),
        deepest_numel=max(module.numel for module in modules),
        activations=activations,
        positions=positions,
        notes=tuple(notes),
        dtype=None if stated is None else str(stated).removeprefix("torch."),
    )


def _quantization(config: Mapping[str, object]) -> Iterator[str]:
    """Yield a note where the config says that parameters are quantized."""
    quantized = config.get("quantization_config")
    if quantized is not None:
        method = quantized.get("quant_method") if isinstance(quantized, Mapping) else quantized
        yield (
            f"the config says that parameters are quantized ({method}): the engine trains whole "
            "ones, so the model is planned with these"
        )


def _stated(config: Mapping[str, object]) -> dict[str, object]:
    """Return the fields that are not null."""
    return {name: value for name, value in config.items() if value is not None}


class _Fields:
    """The fields of a config.json, checked when they are read."""

    def __init__(self, given: Mapping[str, object]) -> None:
        self._given = _stated(given)

    def whole(self, name: str, default: object = None, *, most: int = _MOST) -> int:
        """Return a whole number from 1 to `most`; `default` where it is missing or null."""
        value = self._given.get(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ConfigError(
                field=f"config.{name}", value=value, expected="a whole number, 1 or more"
            )
        if value > most:
            raise ConfigError(field=f"config.{name}", value=value, expected=f"at most {most:,}")
        return value

    def count(self, name: str) -> int:
        """Return a whole number, 0 or more; 0 where it is missing or null."""
        return 0 if self._given.get(name) in (None, 0) else self.whole(name)

    def divisor(self, name: str, default: int, *, of: str) -> int:
        """Return a whole number that divides the field `of` without remainder."""
        value, whole = self.whole(name, default), self.whole(of)
        if whole % value:
            raise ConfigError(
                field=f"config.{name}",
                value=value,
                expected=f"a number that divides {of} ({whole})",
            )
        return value

    def heads(self, hidden: int) -> _Heads:
        """Return the heads; without `head_dim` they divide the hidden elements among them."""
        number = self.whole("num_attention_heads")
        if "head_dim" not in self._given:
            self.divisor("num_attention_heads", number, of="hidden_size")
        groups = self.divisor("num_key_value_heads", number, of="num_attention_heads")
        return _Heads(number, groups, self.whole("head_dim", hidden // number))

    def indices(self, name: str) -> frozenset[int]:
        """Return the numbers of a list; none where it is missing or null."""
        value = self._given.get(name, [])
        if not isinstance(value, list) or not all(type(element) is int for element in value):
            raise ConfigError(
                field=f"config.{name}", value=value, expected="a list of whole numbers"
            )
        return frozenset(value)

    def word(self, name: str, *, default: str) -> str:
        """Return a text."""
        value = self._given.get(name, default)
        if not isinstance(value, str):
            raise ConfigError(field=f"config.{name}", value=value, expected="a text")
        return value

    def flag(self, name: str, *, default: bool) -> bool:
        """Return true or false."""
        value = self._given.get(name, default)
        if not isinstance(value, bool):
            raise ConfigError(field=f"config.{name}", value=value, expected="true or false")
        return value


_Model = tuple[list[ModuleShape], Activations, int | None]


def _linear(
    name: str, out: int, into: int, *, bias: bool, attention: int = 0, feed_forward: str = ""
) -> ModuleShape:
    """Return a linear module; `attention` is the width of the attention that feeds it, else 0, and
    `feed_forward` the block that it is a part of.
    """
    parameters = [ParameterShape(f"{name}.weight", out * into)]
    if bias:
        parameters.append(ParameterShape(f"{name}.bias", out))
    return ModuleShape(
        name=name,
        parameters=tuple(parameters),
        flops_per_token=2 * out * into,
        attention_width=attention,
        sides=(out, into),
        feed_forward=feed_forward,
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


# --- families -------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class _Gated:
    """What models with root-mean-square norms, grouped queries and gated feed-forward layers differ
    in.
    """

    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    fused: bool = False
    """Queries, keys and values are one product, and so are gate and up."""
    norm_of: Literal["nothing", "each head", "all heads"] = "nothing"
    """Which of queries and keys have a norm."""
    norms: tuple[str, ...] = ("input_layernorm", "post_attention_layernorm")
    tied: bool = False
    """Where the config does not say it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Experts:
    """The feed-forward layers of which each token goes through some."""

    count: int
    chosen: int
    inner: int
    layers: frozenset[int]
    """The layers that have them; others have one for all tokens."""
    gate_first: bool
    """Whether the gate is registered before them."""
    shared: int = 0
    """The inner width of what all tokens go through beside them."""


_NO_EXPERTS = _Experts(count=0, chosen=0, inner=0, layers=frozenset(), gate_first=False)


class _Heads(NamedTuple):
    """The heads of queries, the groups of them that share keys and values, and the width of
    each.
    """

    number: int
    groups: int
    width: int

    @property
    def queries(self) -> int:
        return self.number * self.width

    @property
    def keys(self) -> int:
        return self.groups * self.width


def _llama(config: _Fields) -> _Model:
    bias = config.flag("attention_bias", default=False)
    return _gated(
        config,
        _Gated(qkv_bias=bias, out_bias=bias, mlp_bias=config.flag("mlp_bias", default=False)),
    )


def _qwen3(config: _Fields) -> _Model:
    bias = config.flag("attention_bias", default=False)
    return _gated(config, _Gated(qkv_bias=bias, out_bias=bias, norm_of="each head"))


def _gemma3(config: _Fields) -> _Model:
    bias = config.flag("attention_bias", default=False)
    norms = tuple(
        f"{place}_layernorm"
        for place in ("input", "post_attention", "pre_feedforward", "post_feedforward")
    )
    return _gated(
        config, _Gated(qkv_bias=bias, out_bias=bias, norm_of="each head", norms=norms, tied=True)
    )


def _olmo2(config: _Fields) -> _Model:
    bias = config.flag("attention_bias", default=False)
    norms = ("post_attention_layernorm", "post_feedforward_layernorm")
    return _gated(config, _Gated(qkv_bias=bias, out_bias=bias, norm_of="all heads", norms=norms))


def _mixtral(config: _Fields) -> _Model:
    count = config.whole("num_local_experts", 8, most=_MOST_EXPERTS)
    experts = _Experts(
        count=count,
        chosen=min(config.whole("num_experts_per_tok", 2), count),
        inner=config.whole("intermediate_size"),
        layers=frozenset(range(config.whole("num_hidden_layers", most=_MOST_LAYERS))),
        gate_first=True,
    )
    return _gated(config, _Gated(), experts)


def _qwen3_moe(config: _Fields) -> _Model:
    count = config.whole("num_experts", 128, most=_MOST_EXPERTS)
    layers, every = (
        config.whole("num_hidden_layers", most=_MOST_LAYERS),
        config.whole("decoder_sparse_step", 1),
    )
    dense = config.indices("mlp_only_layers")
    experts = _Experts(
        count=count,
        chosen=min(config.whole("num_experts_per_tok", 8), count),
        inner=config.whole("moe_intermediate_size"),
        layers=frozenset(
            layer for layer in range(layers) if (layer + 1) % every == 0 and layer not in dense
        ),
        gate_first=False,
    )
    bias = config.flag("attention_bias", default=False)
    return _gated(config, _Gated(qkv_bias=bias, out_bias=bias, norm_of="each head"), experts)


def _with_experts(config: _Fields) -> _Model:
    """Return a model of a family that is not known, of which some layers have experts."""
    count = config.whole("num_local_experts", most=_MOST_EXPERTS)
    inner = config.whole("moe_intermediate_size", config.whole("intermediate_size"))
    layers = config.whole("num_hidden_layers", most=_MOST_LAYERS)
    shared = config.count("shared_expert_intermediate_size")
    experts = _Experts(
        count=count,
        chosen=min(config.whole("num_experts_per_tok", 2), count),
        inner=inner,
        layers=frozenset(range(config.count("first_k_dense_replace"), layers)),
        gate_first=True,
        shared=shared or config.count("n_shared_experts") * inner,
    )
    return _gated(config, _Gated(), experts)


def _gated(config: _Fields, kind: _Gated, experts: _Experts = _NO_EXPERTS) -> _Model:
    hidden, inner = config.whole("hidden_size"), config.whole("intermediate_size")
    layers, vocabulary = (
        config.whole("num_hidden_layers", most=_MOST_LAYERS),
        config.whole("vocab_size"),
    )
    heads = config.heads(hidden)
    modules = [_embedding("model.embed_tokens", vocabulary, hidden)]
    for layer in range(layers):
        at = f"model.layers.{layer}"
        modules += _attention(f"{at}.self_attn", kind, hidden, heads)
        if layer in experts.layers:
            modules += _mixture(f"{at}.mlp", hidden, experts)
        else:
            modules += _feed_forward(f"{at}.mlp", kind, hidden, inner)
        modules += [_norm(f"{at}.{name}", hidden, bias=False) for name in kind.norms]
    modules.append(_norm("model.norm", hidden, bias=False))
    modules.append(
        _head(
            "lm_head",
            vocabulary,
            hidden,
            tied=config.flag("tie_word_embeddings", default=kind.tied),
        )
    )
    # Gate, its activation, up and their product; what goes into an expert and comes out of it. The
    # most of any layer.
    one_for_all = 4 * inner if len(experts.layers) < layers else 0
    mixed = (
        (4 * experts.inner + 2 * hidden) * experts.chosen + 4 * experts.shared
        if experts.layers
        else 0
    )
    of_experts = experts.inner * experts.chosen + experts.shared
    queries, keys = heads.queries, heads.keys
    normed = queries + keys if kind.norm_of != "nothing" else 0
    activations = Activations(
        blocks=layers,
        hidden=hidden,
        # Each norm saves its fp32 input and what it has normalized, and its result is what the
        # products take.
        elements=2 * len(kind.norms) * hidden
        + 3 * queries
        + 2 * keys
        + 2 * normed
        + max(one_for_all, mixed),
        fp32=len(kind.norms) * hidden + normed,
        logits=vocabulary,
        inner=0 if experts.count else 4 * inner,
        # Of the product of a gate and what it lets pass, then of these two.
        gradients=2 * max(inner if one_for_all else 0, of_experts),
    )
    return (
        modules,
        activations,
        config.whole("max_position_embeddings", _MOST_TOKENS, most=_MOST_TOKENS),
    )


def _attention(at: str, kind: _Gated, hidden: int, heads: _Heads) -> list[ModuleShape]:
    """Return the parts of an attention in the order in which they are registered."""
    queries, keys = heads.queries, heads.keys
    out = _linear(f"{at}.o_proj", hidden, queries, bias=kind.out_bias, attention=queries)
    if kind.fused:
        return [out, _linear(f"{at}.qkv_proj", queries + 2 * keys, hidden, bias=kind.qkv_bias)]
    made = [_linear(f"{at}.q_proj", queries, hidden, bias=kind.qkv_bias)]
    made += [_linear(f"{at}.{name}_proj", keys, hidden, bias=kind.qkv_bias) for name in ("k", "v")]
    made.append(out)
    if kind.norm_of != "nothing":
        sizes = (heads.width, heads.width) if kind.norm_of == "each head" else (queries, keys)
        made += [
            _norm(f"{at}.{name}_norm", size, bias=False)
            for name, size in zip("qk", sizes, strict=True)
        ]
    return made


def _feed_forward(at: str, kind: _Gated, hidden: int, inner: int) -> list[ModuleShape]:
    if kind.fused:
        into = [
            _linear(f"{at}.gate_up_proj", 2 * inner, hidden, bias=kind.mlp_bias, feed_forward=at)
        ]
    else:
        into = [
            _linear(f"{at}.{name}_proj", inner, hidden, bias=kind.mlp_bias, feed_forward=at)
            for name in ("gate", "up")
        ]
    out = _linear(f"{at}.down_proj", hidden, inner, bias=kind.mlp_bias, feed_forward=at)
    return [*into, out]


def _mixture(at: str, hidden: int, experts: _Experts) -> list[ModuleShape]:
    """Return the experts of a layer, one module with the parameters of all, and the gate that
    chooses among them.
    """
    gate = _linear(f"{at}.gate", experts.count, hidden, bias=False)
    of_one = 3 * experts.inner * hidden
    all_of_them = ModuleShape(
        name=f"{at}.experts",
        parameters=(
            ParameterShape(
                f"{at}.experts.gate_up_proj", experts.count * 2 * experts.inner * hidden
            ),
            ParameterShape(f"{at}.experts.down_proj", experts.count * experts.inner * hidden),
        ),
        flops_per_token=2 * of_one * experts.chosen,
    )
    shared = (
        _feed_forward(f"{at}.shared_experts", _Gated(), hidden, experts.shared)
        if experts.shared
        else []
    )
    return [gate, all_of_them, *shared] if experts.gate_first else [all_of_them, gate]


def _gpt2(config: _Fields) -> _Model:
    hidden, layers = config.whole("n_embd"), config.whole("n_layer", most=_MOST_LAYERS)
    config.divisor("n_head", 1, of="n_embd")
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
            _linear(f"{at}.mlp.c_fc", inner, hidden, bias=True, feed_forward=f"{at}.mlp"),
            _linear(f"{at}.mlp.c_proj", hidden, inner, bias=True, feed_forward=f"{at}.mlp"),
        ]
    modules.append(_norm("transformer.ln_f", hidden, bias=True))
    modules.append(
        _head("lm_head", vocabulary, hidden, tied=config.flag("tie_word_embeddings", default=True))
    )
    # The activation function of this family is made of elementary operations, each of which saves
    # its input; torch's own saves one.
    whole = config.word("activation_function", default="gelu_new") in _WHOLE
    made = (2 if whole else 6) * inner
    activations = Activations(
        blocks=layers,
        hidden=hidden,
        elements=4 * hidden + 5 * hidden + made,
        fp32=0,
        logits=vocabulary,
        inner=made,
        gradients=2 * inner,
    )
    return modules, activations, positions


def _opt(config: _Fields) -> _Model:
    hidden, layers = (
        config.whole("hidden_size"),
        config.whole("num_hidden_layers", most=_MOST_LAYERS),
    )
    inner, vocabulary = config.whole("ffn_dim"), config.whole("vocab_size")
    positions = config.whole("max_position_embeddings", most=_MOST_TOKENS)
    config.divisor("num_attention_heads", 1, of="hidden_size")
    outer = config.whole("word_embed_proj_dim", hidden)
    bias, affine = (
        config.flag("enable_bias", default=True),
        config.flag("layer_norm_elementwise_affine", default=True),
    )
    modules = [
        _embedding("model.decoder.embed_tokens", vocabulary, outer),
        # the first two are never used
        _embedding("model.decoder.embed_positions", positions + 2, hidden),
    ]
    if outer != hidden:
        modules += [
            _linear("model.decoder.project_out", outer, hidden, bias=False),
            _linear("model.decoder.project_in", hidden, outer, bias=False),
        ]
    if config.flag("do_layer_norm_before", default=True) and not config.flag(
        "_remove_final_layer_norm", default=False
    ):
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
    modules.append(
        _head("lm_head", vocabulary, outer, tied=config.flag("tie_word_embeddings", default=True))
    )
    # ReLU saves its result, which is what the next product takes
    saved = 4 * hidden + 5 * hidden + inner
    activations = Activations(
        blocks=layers,
        hidden=hidden,
        elements=saved,
        fp32=0,
        logits=vocabulary,
        gradients=2 * inner,
    )
    return modules, activations, positions


def _gpt_neox(config: _Fields) -> _Model:
    hidden, layers = (
        config.whole("hidden_size"),
        config.whole("num_hidden_layers", most=_MOST_LAYERS),
    )
    inner, vocabulary = config.whole("intermediate_size"), config.whole("vocab_size")
    heads = config.heads(hidden)
    made, attended = heads.queries + 2 * heads.keys, heads.queries
    bias = config.flag("attention_bias", default=True)
    modules = [_embedding("gpt_neox.embed_in", vocabulary, hidden)]
    for layer in range(layers):
        at = f"gpt_neox.layers.{layer}"
        modules += [
            _norm(f"{at}.input_layernorm", hidden, bias=True),
            _norm(f"{at}.post_attention_layernorm", hidden, bias=True),
            _linear(f"{at}.attention.query_key_value", made, hidden, bias=bias),
            _linear(f"{at}.attention.dense", hidden, attended, bias=bias, attention=attended),
            _linear(f"{at}.mlp.dense_h_to_4h", inner, hidden, bias=True, feed_forward=f"{at}.mlp"),
            _linear(f"{at}.mlp.dense_4h_to_h", hidden, inner, bias=True, feed_forward=f"{at}.mlp"),
        ]
    modules.append(_norm("gpt_neox.final_layer_norm", hidden, bias=True))
    modules.append(
        _head("lm_head", vocabulary, hidden, tied=config.flag("tie_word_embeddings", default=False))
    )
    saved = 4 * hidden + 5 * hidden + 2 * inner
    activations = Activations(
        blocks=layers,
        hidden=hidden,
        elements=saved,
        fp32=0,
        logits=vocabulary,
        inner=2 * inner,
        gradients=2 * inner,
    )
    return (
        modules,
        activations,
        config.whole("max_position_embeddings", _MOST_TOKENS, most=_MOST_TOKENS),
    )


def check_one_stack(config: object) -> None:
    """Refuse a config of an encoder with a decoder."""
    if isinstance(config, Mapping) and config.get("is_encoder_decoder"):
        expected = "one stack of layers: encoders with decoders are not planned"
        raise ConfigError(field="config.is_encoder_decoder", value=True, expected=expected)


def _alike(config: Mapping[str, object], kind: str) -> tuple[Mapping[str, object], _Family]:
    """Return a config of a family that is known, with the sizes of one that is not.

    Raises:
        ConfigError: layers, width or vocabulary are missing, by every name that is known for them;
            or it is of a kind of which nothing like it is known.
    """
    inner = config.get("text_config")
    sizes = {**config, **inner} if isinstance(inner, Mapping) else dict(config)
    stated = _stated(sizes)
    named = {
        name: stated[other]
        for name, others in _OTHER_NAMES.items()
        for other in reversed(others)  # the first one that is stated stays
        if other in stated
    }
    planned_by = ("hidden_size", "num_hidden_layers", "vocab_size")
    missing = [name for name in planned_by if name not in named]
    if len(missing) == 1:
        expected = f"a whole number: models of type {kind} are planned by {', '.join(planned_by)}"
        raise ConfigError(field=f"config.{missing[0]}", value=None, expected=expected)
    if missing:
        raise ConfigError.unknown_name(field="config.model_type", name=kind, known=FAMILIES)
    if "num_attention_heads" not in named or "state_size" in stated:
        expected = (
            f"a family that is known ({', '.join(FAMILIES)}), or one like these: with attention"
        )
        raise ConfigError(field="config.model_type", value=kind, expected=expected)
    check_one_stack(sizes)
    if isinstance(hidden := named["hidden_size"], int):
        named.setdefault("intermediate_size", 4 * hidden)
    if sizes.get("multi_query") is True:
        named.setdefault("num_key_value_heads", 1)
    # Transformers leaves out of a config.json what most families have: a tied head.
    found = {"tie_word_embeddings": True, **stated, **named}
    # 0 is how some configs say that there are none.
    if named.get("num_local_experts", 0) != 0:
        return found, _with_experts
    # A gate is what activations such as silu are used with, and Gemmas; others have two products.
    activation = str(sizes.get("hidden_act", sizes.get("hidden_activation", "silu")))
    gated = activation in _GATES or "gemma" in str(sizes.get("model_type", kind))
    return found, _llama if gated else _gpt_neox


# Types of models that have linear layers of a class of their own.
_OWN_LINEARS = frozenset({"falcon", "gpt2", "openai-gpt"})
# Activation functions that are one operation of torch.
_WHOLE = frozenset({"gelu", "gelu_pytorch_tanh", "relu", "silu", "tanh"})
_GATES = frozenset({"silu", "swiglu", "geglu", "swish"})
_OTHER_NAMES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "hidden_size": ("hidden_size", "n_embd", "d_model", "hidden_dim"),
        "num_hidden_layers": ("num_hidden_layers", "n_layer", "n_layers", "num_layers"),
        "num_attention_heads": ("num_attention_heads", "n_head", "n_heads", "num_heads"),
        "num_key_value_heads": ("num_key_value_heads", "num_kv_heads", "n_head_kv"),
        "intermediate_size": ("intermediate_size", "ffn_dim", "n_inner", "d_ff"),
        "vocab_size": ("vocab_size",),
        "num_local_experts": ("num_local_experts", "num_experts", "n_routed_experts"),
        "num_experts_per_tok": ("num_experts_per_tok", "num_experts_per_token", "moe_top_k"),
    }
)
_Family = Callable[[_Fields], _Model]
FAMILIES: Mapping[str, _Family] = MappingProxyType(
    {
        "gemma3_text": _gemma3,
        "gpt2": _gpt2,
        "gpt_neox": _gpt_neox,
        "llama": _llama,
        "mistral": lambda config: _gated(config, _Gated()),
        "mixtral": _mixtral,
        "olmo2": _olmo2,
        "opt": _opt,
        "phi3": lambda config: _gated(config, _Gated(fused=True)),
        "qwen2": lambda config: _gated(config, _Gated(qkv_bias=True)),
        "qwen3": _qwen3,
        "qwen3_moe": _qwen3_moe,
    }
)
