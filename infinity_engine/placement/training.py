"""What a plan is asked for: the training, and the means of one machine with any number of ranks.

Pure data, and the Sizing that follows. Ranks divide parameters and states among them, and the
machine's host memory and drives; each computes whole modules on its own device. Made by the command
line and the engine, read by the planner.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from types import MappingProxyType

from infinity_engine.errors import ConfigError
from infinity_engine.optim import FloatFormat, Formats, Subgroup
from infinity_engine.placement.models import ModelShape, ParameterShape
from infinity_engine.placement.sizing import Sizing, cut
from infinity_engine.plan import (
    BlockRates,
    ComputeRate,
    Lane,
    OwnWork,
    Rates,
    ResolvedBudget,
    Tier,
)

__all__ = ["Means", "Training", "beside_inputs"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Training:
    """A model, and how it is trained.

    `batch` sequences of `sequence` tokens are one micro-batch of one rank.
    """

    model: ModelShape
    batch: int
    sequence: int
    accumulation_steps: int
    checkpointing: bool
    formats: Formats
    """How parameters are stored, but for those of a shape that says another width."""
    state_names: tuple[str, ...]
    """What the optimizer keeps of each parameter, beside its master."""
    small_bytes: int
    """Parameters of fewer bytes stay in memory."""
    inputs_moved: bool = False
    """Whether the inputs of checkpointed blocks wait on the host or on drives."""
    chunked_loss: bool = False
    """Whether the loss is computed without whole logits."""
    tile_positions: int | None = None
    """Positions that feed-forward blocks compute at a time; None: all."""
    overlap: bool | None = True
    """Whether an update's end may go on beside the next forward; None: where a step is shorter."""

    def __post_init__(self) -> None:
        for name in ("batch", "sequence", "accumulation_steps", "tile_positions"):
            given = getattr(self, name)
            if given is not None and given < 1:
                raise ConfigError(field=name, value=given, expected="a whole number, 1 or more")
        most = self.model.positions
        if most is not None and self.sequence > most:
            expected = f"at most {most} tokens, which is what {self.model.name} has positions for"
            raise ConfigError(field="sequence", value=self.sequence, expected=expected)
        known = self.model.activations
        if self.tile_positions is not None and not known.inner:
            raise ConfigError(
                field="tile_positions",
                value=self.tile_positions,
                expected="nothing with this model: it has experts, or no block of which it is "
                "known that it handles each position alone",
            )
        if not any(parameter.trained and parameter.numel for parameter in self.model.parameters):
            raise ConfigError(
                field="model", value=self.model.name, expected="a model with parameters to train"
            )

    @property
    def width(self) -> int:
        """Bytes of one element as modules compute with it."""
        return self.formats.width

    @property
    def tokens(self) -> int:
        """Tokens of one micro-batch of one rank."""
        return self.batch * self.sequence

    @property
    def tiles(self) -> int:
        """How many tiles of the sequence feed-forward blocks compute one after another."""
        return -(-self.sequence // (self.tile_positions or self.sequence))

    @property
    def tile_tokens(self) -> int | None:
        """Tokens of one of several tiles; None where all tokens are computed at once."""
        return None if self.tiles == 1 else self.batch * (self.tile_positions or 1)

    @property
    def may_be_tiled(self) -> bool:
        """Whether feed-forward blocks could compute in tiles, and do not yet."""
        return self.tile_positions is None and self.model.activations.inner > 0

    def runs_again(self, place: int) -> int:
        """Return how often a backward runs the module at that place of the model again."""
        modules = self.model.modules
        checkpointed = self.checkpointing and place < len(modules) - 1
        return int(checkpointed) + int(self.tiles > 1 and bool(modules[place].feed_forward))

    def activation_bytes(self) -> int:
        """Return what autograd keeps at most, 0 where that is not known."""
        return self.model.activations.nbytes(
            self.tokens,
            width=self.width,
            checkpointing=self.checkpointing,
            inputs_moved=self.inputs_moved,
            chunked_loss=self.chunked_loss,
            tile_tokens=self.tile_tokens,
        )

    def gradients_in_the_making(self) -> int:
        """Return the most elements of gradients that autograd makes at the same time: of one
        parameter; of a feed-forward block in tiles, the sums of all, and what is added to one.
        """
        together: dict[str, list[int]] = {}
        for module in self.model.modules:
            block = module.feed_forward if self.tiles > 1 else ""
            together.setdefault(block, []).extend(
                parameter.numel for parameter in module.parameters if parameter.trained
            )
        return max(
            max(numels, default=0) + (sum(numels) if block else 0)
            for block, numels in together.items()
        )

    def input_bytes(self) -> int:
        """Return what the inputs of all blocks take, 0 where that is not known."""
        known = self.model.activations
        return known.blocks * known.input_bytes(self.tokens, width=self.width)

    def tile_bytes(self) -> int:
        """Return what one tile of the sequence takes while it computes, 0 where there are none."""
        known, tokens = self.model.activations, self.tile_tokens
        return known.tile_bytes(self.tokens, width=self.width, tile_tokens=tokens)

    def passing_bytes(self) -> int:
        """Return what comes on top of what autograd keeps for a while, 0 where it is not known."""
        return self.model.activations.passing_bytes(
            self.tokens, width=self.width, chunked=self.chunked_loss, tile_tokens=self.tile_tokens
        )

    def logits_bytes(self) -> int:
        """Return what the logits and their loss take of that."""
        known = self.model.activations
        return known.logits_bytes(self.tokens, width=self.width, chunked=self.chunked_loss)

    def formats_of(self, parameter: ParameterShape) -> Formats:
        """Return how a parameter is stored: one of another width is taken to be bf16, or fp32."""
        if parameter.element_bytes in {None, self.width}:
            return self.formats
        return Formats() if self.formats.has_copies else Formats(parameter=FloatFormat.BF16)

    def ordered(self) -> tuple[ParameterShape, ...]:
        """Return the parameters as the engine numbers them: those that are frozen come last."""
        # sorted is stable: among the trained ones the model's order stays.
        return tuple(sorted(self.model.parameters, key=lambda parameter: not parameter.trained))


@dataclass(frozen=True, kw_only=True, slots=True)
class Means:
    """What there is to train with.

    `budget` has the bytes of one device, and those of the host and the drives that all ranks have
    together. `rates` and `flops_per_s` are one rank's while all work; None where compute is not
    known, which then takes no time. `blocks` are what was measured of transformer blocks, and go
    before them. `unified`: device and host are one memory, and one set of cores. `io_bytes` of the
    host, for each rank, are what using the drives takes.
    """

    budget: ResolvedBudget
    rates: Rates
    ranks: int = 1
    flops_per_s: float | None = None
    blocks: BlockRates | None = None
    unified: bool = False
    io_bytes: int = 0
    alone: Rates | None = None
    """The rates of each while nothing else works; None: `rates` hold whatever else works."""
    computing_beside_io: float = 1.0
    """The part of their rate that modules keep while drives work, where device and host are one
    memory and `alone` is known.
    """
    io_beside_computing: float = 1.0
    """The part of their rates that drives keep while modules compute, likewise."""
    summing: float = 1.0
    """The part of its rate that an update on the host keeps of states on drives, as it makes their
    checksums.
    """
    own: OwnWork = OwnWork()  # noqa: RUF009  # it is frozen
    """What the engine's own work takes of the time that modules have, where device and host are one
    memory.
    """
    wire_bytes_per_s: float | None = None
    """What one rank sends the others, one way; None: not known, so that takes no time."""
    for_all: bool = True
    """Whether PyTorch's own memory, for activations and autograd, is of the budget as well."""
    whole: ResolvedBudget | None = None
    """The budget before `beside_inputs` took moved inputs off; None: it took nothing."""
    activation_bytes: int = 0
    """What the plan leaves to activations where not `for_all` of it is."""

    def __post_init__(self) -> None:
        if self.ranks < 1:
            raise ConfigError(field="ranks", value=self.ranks, expected="a whole number, 1 or more")

    def of_one_rank(self) -> ResolvedBudget:
        """Return one rank's budget."""
        drives = {name: limit // self.ranks for name, limit in self.budget.nvme.items()}
        return replace(self.budget, host=self.budget.host // self.ranks, nvme=drives)

    def before_inputs(self) -> Means:
        """Return the means before `beside_inputs` took moved inputs of blocks off."""
        return self if self.whole is None else replace(self, budget=self.whole, whole=None)

    def moved_inputs(self) -> Mapping[Tier, int]:
        """Return the bytes that `beside_inputs` took of the host and of the drives."""
        whole, budget = self.whole or self.budget, self.budget
        return {
            Tier.HOST: whole.host - budget.host,
            Tier.NVME: sum(whole.nvme.values()) - sum(budget.nvme.values()),
        }

    def room_for_layers(self, training: Training) -> int:
        """Return the bytes that layers and what updates pass have together, as `tiling="auto"`
        counts them.
        """
        budget = self.of_one_rank()
        room = budget.host if self.unified else budget.device
        return max(room - self._activations(training), 0)

    def free_lanes(self) -> frozenset[Lane]:
        """Return the links over which nothing goes: those of one memory."""
        return frozenset({Lane.H2D, Lane.D2H}) if self.unified else frozenset()

    def lanes_instead(self) -> Mapping[Lane, Lane]:
        """Return in which lanes ops of others run: in one memory, the host makes all updates."""
        return MappingProxyType({Lane.DEVICE: Lane.HOST} if self.unified else {})

    def undisturbed(self, reads: int, writes: int) -> Rates:
        """Return the rates that no update exceeds in which drives do so much of both, however
        little its parts work at the same time.
        """
        beside = self.rates.both_at_once(reads, writes)
        if self.alone is None:
            return beside
        alone = self.alone.both_at_once(reads, writes)

        def fastest(name: str, one: object, other: object) -> float | None:
            found: tuple[float | None, float | None] = getattr(one, name), getattr(other, name)
            return None if None in found else max(rate for rate in found if rate is not None)

        drives = {
            name: replace(
                drive,
                **{
                    key: fastest(key, drive, beside.nvme[name])
                    for key in ("read_bytes_per_s", "write_bytes_per_s")
                },
            )
            for name, drive in alone.nvme.items()
        }
        links = ("host_update_params_per_s", "h2d_bytes_per_s", "d2h_bytes_per_s")
        return replace(alone, **{key: fastest(key, alone, beside) for key in links}, nvme=drives)

    def compute_rate(self, training: Training) -> ComputeRate | None:
        """Return how fast the modules of a training compute, None where that is not known."""
        if self.blocks is not None:
            return self.blocks.at(training.model.width, training.tokens)
        return None if self.flops_per_s is None else ComputeRate.of_both(self.flops_per_s)

    def sizing(self, training: Training, subgroup_numel: int) -> Sizing:
        """Return what one rank has to hold, with states in subgroups of up to so many elements."""
        ordered = training.ordered()
        # An equal part for each rank, rounded up.
        numels = [-(-parameter.numel // self.ranks) for parameter in ordered]
        trained = tuple(
            (numel, training.formats_of(parameter))
            for numel, parameter in zip(numels, ordered, strict=True)
            if parameter.trained
        )
        width = training.width
        return Sizing(
            subgroups=_cut(
                trained, subgroup_numel, training.small_bytes if self.budget.nvme else None
            ),
            state_names=training.state_names,
            parameters=tuple(
                numel * (parameter.element_bytes or width)
                for numel, parameter in zip(numels, ordered, strict=True)
            ),
            deepest=width * training.model.deepest_numel,
            unified=self.unified,
            sums=training.accumulation_steps > 1,
            # Gradients are fp32 sums over the ranks.
            gradient_width=FloatFormat.FP32.nbytes if self.ranks > 1 else None,
            activations=self._activations(training),
        )

    def _activations(self, training: Training) -> int:
        return training.activation_bytes() if self.for_all else self.activation_bytes


def beside_inputs(training: Training, means: Means) -> Means:
    """Return the means less what moved inputs of blocks take of the drives, or else of the host.

    What the inputs of another training took before is given back.
    """
    means = means.before_inputs()
    if not training.inputs_moved:
        return means
    budget, nbytes = means.budget, means.ranks * training.input_bytes()
    drives = sum(budget.nvme.values())
    if drives > nbytes:
        nvme = {name: limit - nbytes * limit // drives for name, limit in budget.nvme.items()}
        left = replace(budget, nvme=nvme)
    else:
        left = replace(budget, host=max(budget.host - nbytes, 0))
    return replace(means, budget=left, whole=budget)


@lru_cache(maxsize=8)
def _cut(
    parameters: tuple[tuple[int, Formats], ...], subgroup_numel: int, small_bytes: int | None
) -> tuple[Subgroup, ...]:
    """Return what `cut` does: trainings that differ in batch or sequence alone are cut alike."""
    return cut(parameters, subgroup_numel, small_bytes=small_bytes)
