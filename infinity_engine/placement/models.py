"""What planning has to know of a model: parameters by module, arithmetic, and what autograd keeps.

Pure numbers, put together of a Hugging Face config.json (configs.py), or of a live model by the
engine. Called by the planner, the command line and the engine.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import isqrt

from infinity_engine.units import parse_bytes

__all__ = [
    "LOSS_WORKSPACE",
    "UNKNOWN_ACTIVATIONS",
    "Activations",
    "ModelShape",
    "ModuleShape",
    "ParameterShape",
]

LOSS_WORKSPACE = "64MiB"  # what the tiles of a chunked loss take
_MOVING_INPUTS = 4  # blocks whose inputs are on their way, or fetched ahead
_GRADIENTS_OF_TILE = 2  # the part of inner elements that has gradients at the same time
_LOGITS_FP32 = 3  # a copy of the logits, their log-softmax, and its gradient
_PIECE = 4 << 20  # elements of a compact weight that are expanded at once
_EXPANDING = 6  # bytes that the work on each of them takes


@dataclass(frozen=True, slots=True)
class ParameterShape:
    """One parameter.

    Frozen ones are not `trained`; `element_bytes` is given where it is not as modules compute.
    `stands_for` is the number of a model's parameters that this one is, where that is not `numel`:
    compact weights have more elements than integers, and their scales are none.
    """

    name: str
    numel: int
    trained: bool = True
    element_bytes: int | None = None
    stands_for: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class ModuleShape:
    """A module with parameters of its own, or with arithmetic.

    `flops_per_token` are those of a forward, without attention between tokens; that is 4 operations
    for each token of the sequence and each of `attention_width` elements.
    """

    name: str
    parameters: tuple[ParameterShape, ...] = ()
    flops_per_token: int = 0
    attention_width: int = 0
    shared_numel: int = 0
    """Elements of another module's parameters that it reads."""
    sides: tuple[int, int] = (0, 0)
    """Of a linear module, the elements that come out for a token and that go in; else zeros."""
    feed_forward: str = ""
    """The feed-forward block that it is a part of; empty where it is a part of none."""
    own_class: bool = False
    """Whether it is a linear module of another class than `torch.nn.Linear`: it stays whole."""

    @property
    def numel(self) -> int:
        """Elements of all its parameters."""
        return sum(parameter.numel for parameter in self.parameters)

    def flops(self, sequence: int) -> int:
        """Return the operations of a forward for one token of sequences that long.

        Causal masks save none of them.
        """
        return self.flops_per_token + 4 * sequence * self.attention_width

    def backward_flops(self, sequence: int) -> int:
        """Return the operations of a backward: gradients of what goes in, and of its parameters.

        Frozen parameters have no gradients, so a module of nothing else has half of the work.
        Attention has both halves: its inputs are two.
        """
        frozen = bool(self.parameters) and not any(
            parameter.trained for parameter in self.parameters
        )
        products = self.flops_per_token * (1 if frozen else 2)
        return products + 2 * 4 * sequence * self.attention_width


@dataclass(frozen=True, kw_only=True, slots=True)
class Activations:
    """What autograd keeps of each token between forward and backward, as the blocks save it.

    An estimate: `elements` have the width that modules compute with, `fp32` four bytes. Attention
    is taken to keep no matrix of scores. A checkpointed block keeps its input, `hidden` elements,
    and makes the rest when it is needed.
    """

    blocks: int
    hidden: int
    elements: int
    fp32: int
    logits: int
    expanded: int = 0
    """Elements of the largest compact weight: it is expanded while its layer computes."""
    inner: int = 0
    """Of `elements`, those that the feed-forward block makes and saves; 0 where there is none that
    handles each position alone, or it is not known."""
    gradients: int = 0
    """Elements of gradients that the backward of one block has at the same time, at most."""

    @property
    def are_known(self) -> bool:
        """Whether anything is known of them; else they count as nothing."""
        return self.blocks > 0

    def nbytes(
        self,
        tokens: int,
        *,
        width: int,
        checkpointing: bool,
        inputs_moved: bool = False,
        chunked_loss: bool = False,
        tile_tokens: int | None = None,
    ) -> int:
        """Return the most bytes at once for so many tokens, with elements of `width` bytes.

        `inputs_moved`: those of checkpointed blocks wait on the host or on drives. `chunked_loss`:
        there are no whole logits. `tile_tokens`: feed-forward blocks compute so many at a time.
        """
        block = self.block_bytes(tokens, width=width, tile_tokens=tile_tokens)
        tile = self.tile_bytes(tokens, width=width, tile_tokens=tile_tokens)
        inputs = min(self.blocks, _MOVING_INPUTS) if inputs_moved else self.blocks
        # Checkpointed, one block at a time has everything beside the inputs of all.
        kept = (
            self.input_bytes(tokens, width=width) * inputs + block
            if checkpointing
            else block * self.blocks
        )
        kept += tile + width * self.expanded + _EXPANDING * min(self.expanded, _PIECE)
        return kept + self.passing_bytes(
            tokens, width=width, chunked=chunked_loss, tile_tokens=tile_tokens
        )

    def block_bytes(self, tokens: int, *, width: int, tile_tokens: int | None = None) -> int:
        """Return what one block saves; of a feed-forward block in tiles, its input alone."""
        inner = 0 if tile_tokens is None else self.inner
        return tokens * (width * (self.elements - inner) + 4 * self.fp32)

    def tile_bytes(self, tokens: int, *, width: int, tile_tokens: int | None) -> int:
        """Return what a feed-forward block in tiles takes while it computes: one tile's inner
        elements and their gradients, and beside its output the outputs of tiles, or their
        gradients.
        """
        if tile_tokens is None:
            return 0
        inner = tile_tokens * self.inner
        return width * (inner + inner // _GRADIENTS_OF_TILE + tokens * self.hidden)

    def input_bytes(self, tokens: int, *, width: int) -> int:
        """Return what one block is given."""
        return tokens * width * self.hidden

    def passing_bytes(
        self, tokens: int, *, width: int, chunked: bool, tile_tokens: int | None
    ) -> int:
        """Return what comes on top for a while: the logits and their loss, or after them the
        gradients of one block; `tile_bytes` has those of a block in tiles.
        """
        gradients = tokens * width * self.gradients if tile_tokens is None else 0
        return max(self.logits_bytes(tokens, width=width, chunked=chunked), gradients)

    def logits_bytes(self, tokens: int, *, width: int, chunked: bool = False) -> int:
        """Return what the logits and their loss take of that.

        A chunked loss takes a workspace, and keeps the gradient of the hidden states.
        """
        whole = tokens * self.logits * (width + 4 * _LOGITS_FP32)
        if not chunked:
            return whole
        return min(whole, parse_bytes(LOSS_WORKSPACE)) + tokens * width * self.hidden


UNKNOWN_ACTIVATIONS = Activations(blocks=0, hidden=0, elements=0, fp32=0, logits=0)


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelShape:
    """A model in numbers.

    `modules` and their parameters have the order in which the model registers them.
    """

    name: str
    modules: tuple[ModuleShape, ...]
    deepest_numel: int
    """The most elements that modules within one another need at the same time."""
    activations: Activations = UNKNOWN_ACTIVATIONS
    positions: int | None = None
    """The longest sequence, None where there is no limit, or it is not known."""
    notes: tuple[str, ...] = ()
    """What an answer about it has to say, such as what was estimated."""
    dtype: str | None = None
    """What its parameters are saved in, as torch calls it; None where that is not known."""

    @property
    def parameters(self) -> tuple[ParameterShape, ...]:
        """All parameters, each once."""
        return tuple(parameter for module in self.modules for parameter in module.parameters)

    @property
    def numel(self) -> int:
        """Elements of all parameters."""
        return sum(module.numel for module in self.modules)

    @property
    def size(self) -> int:
        """How many parameters it has, however they are kept."""
        return sum(
            parameter.numel if parameter.stands_for is None else parameter.stands_for
            for parameter in self.parameters
        )

    @property
    def width(self) -> int:
        """The elements that a block makes of a token; if unknown, a middling product's side."""
        if self.activations.are_known:
            return self.activations.hidden
        products = sorted(
            module.flops_per_token for module in self.modules if module.flops_per_token
        )
        # A product of side n takes 2 n² operations for a token.
        return max(isqrt(products[len(products) // 2] // 2), 1) if products else 1
