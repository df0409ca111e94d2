"""What training real models asks of host memory: parameter shapes as published, and the buffers of
one step over them.

`planned_step` is a step whose every lifetime is known; `events_of` makes leases and releases of it
that nobody planned. Pure arithmetic, no memory is taken. Used by the tests of layout and pool and
by scripts/bench/pinned_pool.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cached_property

from layout_search import Request

SUBGROUP = 2**24
WIRE_BYTES, STATE_BYTES = 2, 4  # bf16 parameters and gradients; fp32 master, momentum and variance
STATES = ("p", "m", "v")
LOAD_AHEAD, UPLOAD_AHEAD = 3, 2  # operators; DESIGN's pipeline of three hops
DOWNLOAD_BEHIND = 2


@dataclass(frozen=True)
class Operator:
    """A leaf module: the shapes of its parameters by their names."""

    parameters: tuple[tuple[str, tuple[int, ...]], ...]

    @property
    def sizes(self) -> dict[str, int]:
        """The number of elements of each parameter."""
        return {name: math.prod(shape) for name, shape in self.parameters}


@dataclass(frozen=True)
class Model:
    """A model's leaf modules in the order in which they run, `per_layer` of them in each layer."""

    name: str
    operators: tuple[Operator, ...]
    per_layer: int

    @cached_property
    def parameters(self) -> int:
        """The number of parameters in all."""
        return sum(sum(operator.sizes.values()) for operator in self.operators)


def _operator(name: str, *shape: int, bias: int = 0) -> Operator:
    weight = ((f"{name}.weight", shape),)
    return Operator(weight + (((f"{name}.bias", (bias,)),) if bias else ()))


def gpt2_xl() -> Model:
    """GPT-2 XL: 48 layers of width 1600; the output layer shares the embedding's weight."""
    width = 1600
    operators = [_operator("wte", 50257, width), _operator("wpe", 1024, width)]
    for layer in range(48):
        at = f"h.{layer}"
        operators += [
            _operator(f"{at}.ln_1", width, bias=width),
            _operator(f"{at}.attn.c_attn", width, 3 * width, bias=3 * width),
            _operator(f"{at}.attn.c_proj", width, width, bias=width),
            _operator(f"{at}.ln_2", width, bias=width),
            _operator(f"{at}.mlp.c_fc", width, 4 * width, bias=4 * width),
            _operator(f"{at}.mlp.c_proj", 4 * width, width, bias=width),
        ]
    return Model("GPT-2 XL", (*operators, _operator("ln_f", width, bias=width)), 6)


def llama_3_8b() -> Model:
    """Llama-3-8B: 32 layers of width 4096, 8 heads of 128 for keys and values, 14336 wide
    inside.
    """
    return _llama("Llama-3-8B", vocabulary=128256, experts=0)


def mixtral_8x7b() -> Model:
    """Mixtral-8x7B: as Llama with eight experts in each layer, all of which some token of a batch
    goes through.
    """
    return _llama("Mixtral-8x7B", vocabulary=32000, experts=8)


def _llama(name: str, *, vocabulary: int, experts: int) -> Model:
    width, keys, inner = 4096, 1024, 14336
    operators = [_operator("embed_tokens", vocabulary, width)]
    for layer in range(32):
        at = f"layers.{layer}"
        operators += [
            _operator(f"{at}.input_layernorm", width),
            _operator(f"{at}.self_attn.q_proj", width, width),
            _operator(f"{at}.self_attn.k_proj", keys, width),
            _operator(f"{at}.self_attn.v_proj", keys, width),
            _operator(f"{at}.self_attn.o_proj", width, width),
            _operator(f"{at}.post_attention_layernorm", width),
        ]
        if experts:
            operators.append(_operator(f"{at}.moe.gate", experts, width))
        for mlp in [f"{at}.moe.experts.{number}" for number in range(experts)] or [f"{at}.mlp"]:
            operators += [
                _operator(f"{mlp}.gate_proj", inner, width),
                _operator(f"{mlp}.up_proj", inner, width),
                _operator(f"{mlp}.down_proj", width, inner),
            ]
    ending = (_operator("norm", width), _operator("lm_head", vocabulary, width))
    return Model(name, (*operators, *ending), 6 + (1 + 3 * experts if experts else 3))


class Gradients(Enum):
    """Where gradients wait between their download and the update."""

    KEPT = "kept in host memory"
    STREAMED = "streamed to NVMe"


def planned_step(model: Model, *, gradients: Gradients, ahead: int = LOAD_AHEAD) -> list[Request]:
    """Return the buffers of a training step: each operator forward, then backward, then each
    subgroup's update.

    Parameters are loaded `ahead` operators before they are needed and uploaded UPLOAD_AHEAD before,
    in each direction. Where gradients are kept, so are the parameters of every fourth operator and
    the states of every fourth subgroup.
    """
    turn = 2 * len(model.operators)  # the first step of the updates
    subgroups = [
        min(SUBGROUP, model.parameters - begin) for begin in range(0, model.parameters, SUBGROUP)
    ]
    whole_step = (0, turn + len(subgroups))
    requests = []

    def ask(name: str, nbytes: int, first: int, last: int, *, kept: bool = False) -> None:
        kept_for = whole_step if kept else (max(first, 0), max(last, 0))
        requests.append(Request(name, nbytes, *kept_for))

    position = 0
    for number, operator in enumerate(model.operators):
        kept = gradients is Gradients.KEPT and number % 4 == 0
        back = turn - 1 - number
        down = back + DOWNLOAD_BEHIND
        for name, count in operator.sizes.items():
            nbytes = WIRE_BYTES * count
            ask(f"forward {name}", nbytes, number - ahead, number - UPLOAD_AHEAD, kept=kept)
            if not kept:
                ask(f"backward {name}", nbytes, back - ahead, back - UPLOAD_AHEAD)
            position += count
            updated = turn + (position - 1) // SUBGROUP
            ask(
                f"gradient {name}",
                nbytes,
                down,
                max(updated, down) if gradients is Gradients.KEPT else down + 1,
            )
    for number, count in enumerate(subgroups):  # one is loaded, one updated, one stored
        kept = gradients is Gradients.KEPT and number % 4 == 0
        step = turn + number
        for state in STATES:
            ask(f"subgroup {number}: {state}", STATE_BYTES * count, step - 1, step + 1, kept=kept)
        if gradients is Gradients.STREAMED:
            ask(f"subgroup {number}: gradient", WIRE_BYTES * count, step - 1, step)
        ask(f"subgroup {number}: parameter", WIRE_BYTES * count, step, step + 1)
    return requests


class Act(Enum):
    """What happens to a buffer."""

    LEASE = "lease"
    RELEASE = "release"


@dataclass(frozen=True)
class Event:
    """One buffer's lease or release."""

    act: Act
    name: str
    nbytes: int


def events_of(requests: Sequence[Request], *, seed: int) -> list[Event]:
    """Return the leases and releases of these requests, those of one step in an order drawn from
    `seed`.

    What ends in a step is released before what begins in the next one is leased. Everything is
    released at the end.
    """
    draw = random.Random(seed)
    drawn = [(request, draw.random(), draw.random()) for request in requests]
    releases = [(request.last, 1, key, Act.RELEASE, request) for request, key, _ in drawn]
    leases = [(request.first, 0, key, Act.LEASE, request) for request, _, key in drawn]
    order = sorted(releases + leases, key=lambda event: event[:3])
    return [Event(act, request.name, request.nbytes) for _, _, _, act, request in order]
