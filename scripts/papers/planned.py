"""Published trainings, planned: what the planner says of them, over what was measured.

Pure. Every run has its settings as they are printed, and says what a plan cannot express of them
and what is assumed. The planner is asked twice: for the plan that comes nearest to what was run,
and for its own choice. Rates are those of the machine's data sheets, as `infinity plan` uses them.
Nothing is fitted, but for two runs that have a cost of their own log: `PublishedRun.start_s`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from infinity_engine.errors import CapacityError
from infinity_engine.machine.capacity import capacity_of
from infinity_engine.machine.catalogue import find_drive
from infinity_engine.optim import FloatFormat, Formats
from infinity_engine.placement.models import ModelShape
from infinity_engine.placement.training import Means, Training, beside_inputs
from infinity_engine.plan import (
    DeviceOnly,
    HostOnly,
    Interleaved,
    NvmeStreamed,
    ResolvedBudget,
    Strategy,
    Tier,
)
from infinity_engine.sim.configs import model_of_config
from infinity_engine.sim.hardware import (
    DESKTOP_4090,
    H200_NODE,
    Drives,
    Host,
    MachineModel,
    sharing_memory,
)
from infinity_engine.sim.planner import decide
from infinity_engine.sim.presets import preset
from infinity_engine.units import GiB
from papers.machines import DGX2, JLSE_H100

__all__ = [
    "RUNS",
    "PlannedRun",
    "PublishedRun",
    "Setting",
    "means_of",
    "planned",
    "rows",
    "training_of",
]

_RECOMPUTED = 8  # operations for a parameter and a token, with a second forward
_TERA = 10**12

_ZI = "ZeRO-Infinity"
_DOS = "Deep Optimizer States"
_LOG = "a log of Deep Optimizer States' authors"
_SF = "SlideFormer's repository, bench/DeepSpeed, February 2026"
_MT = "MegaTrain's repository, README"
_MLP = "MLP-Offload's repository, logs of November 2024"

_CHECKPOINTS_DOWN = (
    "activation checkpoints on the host: a plan has them on the drives, and counts no time for them"
)
_EMBEDDINGS = "embeddings: vocabulary of 50,257 assumed"
_BATCH_SPLIT = "the batch is split into micro-batches that fit, with fp32 sums of gradients"
_PAGEABLE = "copies from pageable memory, and waits between parts of a step"
_LIGER = "fused kernels, but for the loss"
_SLICED = "tensor slicing over 4 GPUs"
_PARALLEL_FILES = "a third of the states in a parallel file system, beside the drives"
_ONE_DRIVE = "rates of the drives are not printed: those of one data-center drive are assumed"
_SHAPE_OF_LOG = (
    "the model's shape is assumed: a family of its authors' that has the 5.95 B parameters of the "
    "log"
)
_SUBGROUP_OF_LOG = 10_000_000  # parameters: 595 subgroups
_START_OF_LOG_S = 4.3e-3  # of each of them, whatever its size


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """A way to train: a strategy, where parameters stay, and how many of them a subgroup has.

    None: the planner chooses.
    """

    strategy: Strategy | None = None
    parameters: Tier | None = None
    subgroup_numel: int | None = None


_ZERO3_HOST = Setting(strategy=HostOnly(), parameters=Tier.HOST)
_ZERO3_DRIVES = Setting(strategy=NvmeStreamed(), parameters=Tier.NVME)
_STATES_ON_DRIVES = Setting(strategy=NvmeStreamed(), parameters=Tier.HOST)
_ZERO2_HOST = Setting(strategy=HostOnly(), parameters=Tier.DEVICE)
_STATES_ALONE_ON_DRIVES = Setting(strategy=NvmeStreamed(), parameters=Tier.DEVICE)
_ON_GPUS = Setting(strategy=DeviceOnly(), parameters=Tier.DEVICE)
_ALTERNATING = Setting(strategy=Interleaved(share=0.5), parameters=Tier.DEVICE)


@dataclass(frozen=True, kw_only=True, slots=True)
class PublishedRun:
    """A training that was published; `seconds` is its step, or None where only that it ran."""

    what: str
    source: str
    model: Callable[[], ModelShape]
    machine: MachineModel
    ranks: int
    batch: int
    sequence: int
    setting: Setting
    accumulation: int = 1
    checkpointing: bool = True
    inputs_moved: bool = False
    chunked_loss: bool = False
    start_s: float | None = None
    """What each update of a subgroup costs, on the host or the device, however small it is."""
    tflops: float | None = None
    """Of each GPU, as published, at 8 operations for a parameter and a token."""
    seconds: float | None = None
    lacks: tuple[str, ...] = ()
    """What a plan cannot express, and what was assumed."""

    def step_s(self) -> float | None:
        """Return the published step."""
        if self.tflops is None:
            return self.seconds
        tokens = self.batch * self.accumulation * self.sequence
        return _RECOMPUTED * self.model().numel * tokens / (self.tflops * _TERA)


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedRun:
    """What the planner says of a published run; seconds are None where it refuses."""

    run: PublishedRun
    near_s: float | None
    """The plan that is nearest to what was run."""
    best_s: float | None
    """The planner's own choice."""

    @property
    def ratio(self) -> float | None:
        """The nearest plan's step over the published one, None where one is missing."""
        published = self.run.step_s()
        return None if published is None or self.near_s is None else self.near_s / published

    def to_mapping(self) -> dict[str, object]:
        """Return it as a mapping, ready for JSON."""
        return {
            "what": self.run.what,
            "source": self.run.source,
            "published_s": self.run.step_s(),
            "planned_s": self.near_s,
            "planners_choice_s": self.best_s,
            "planned_over_published": self.ratio,
            "lacks": list(self.run.lacks),
        }


def rows(plans: Iterable[PlannedRun]) -> Iterator[tuple[str, ...]]:
    """Yield a table: its head, and a line for each run."""
    yield (
        *("run", "published", "planned alike", "over published", "planner's choice"),
        "not expressed, or assumed",
    )
    for plan in plans:
        published = plan.run.step_s()
        yield (
            plan.run.what,
            "it ran" if published is None else f"{published:.3g} s",
            _in_words(plan.near_s),
            "" if plan.ratio is None else f"{plan.ratio:.2f}",
            _in_words(plan.best_s),
            "; ".join(plan.run.lacks),
        )


def _in_words(seconds: float | None) -> str:
    return "does not fit" if seconds is None else f"{seconds:.3g} s"


def planned(run: PublishedRun) -> PlannedRun:
    """Return what the planner says of a run."""
    return PlannedRun(run=run, near_s=_step_s(run, run.setting), best_s=_step_s(run, Setting()))


def _step_s(run: PublishedRun, setting: Setting) -> float | None:
    training = training_of(run)
    try:
        found = decide(
            training,
            beside_inputs(training, means_of(run)),
            strategy=setting.strategy,
            parameters=setting.parameters,
            subgroup_numel=setting.subgroup_numel,
        )
    except CapacityError:
        return None
    return found.best.step_s


def training_of(run: PublishedRun) -> Training:
    """Return what a run trained."""
    return Training(
        model=run.model(),
        batch=run.batch,
        sequence=run.sequence,
        accumulation_steps=run.accumulation,
        checkpointing=run.checkpointing,
        inputs_moved=run.inputs_moved,
        chunked_loss=run.chunked_loss,
        formats=Formats(parameter=FloatFormat.BF16),
        state_names=("exp_avg", "exp_avg_sq"),
        small_bytes=65536,
        overlap=None,
    )


def means_of(run: PublishedRun) -> Means:
    """Return what a run had to train with, as `infinity plan` takes it for such a machine."""
    machine = run.machine
    drives = machine.drives
    nvme = {} if drives is None else {machine.drives_name: drives.capacity_bytes}
    free = capacity_of(device=machine.gpu.memory_bytes, host=machine.host.memory_bytes, nvme=nvme)
    has_rates = drives is not None and drives.read_bytes_per_s is not None
    alone = replace(machine.rates(run.ranks), host_start_s=run.start_s, device_start_s=run.start_s)
    return Means(
        budget=ResolvedBudget(
            device=free.device, host=free.host, nvme=free.nvme if has_rates else {}
        ),
        rates=sharing_memory(alone, links=True, drives=has_rates),
        alone=alone,
        ranks=run.ranks,
        flops_per_s=machine.gpu.training_flops_per_s(fp32=False),
        wire_bytes_per_s=machine.wire_bytes_per_s(run.ranks),
        io_bytes=16 << 20 if has_rates else 0,
    )


def _gpt(
    layers: int, hidden: int, heads: int = 16, *, tokens: int = 2048
) -> Callable[[], ModelShape]:
    config: Mapping[str, object] = MappingProxyType(
        {
            "model_type": "gpt2",
            "n_embd": hidden,
            "n_layer": layers,
            "n_head": heads,
            "vocab_size": 50257,
            "n_positions": tokens,
        }
    )
    return lambda: model_of_config(dict(config), name=f"GPT, {layers} x {hidden}")


def _llama(layers: int, hidden: int, heads: int, feed_forward: int) -> Callable[[], ModelShape]:
    """Return a model of MLP-Offload's authors: Megatron's, with 4 heads of keys and values."""
    config: Mapping[str, object] = MappingProxyType(
        {
            "model_type": "llama",
            "hidden_size": hidden,
            "num_hidden_layers": layers,
            "num_attention_heads": heads,
            "num_key_value_heads": 4,
            "intermediate_size": feed_forward,
            "vocab_size": 50304,
            "max_position_embeddings": 2048,
            "tie_word_embeddings": False,
        }
    )
    return lambda: model_of_config(dict(config), name=f"Llama, {layers} x {hidden}")


def _with_ram(machine: MachineModel, gib: int, *, drives: Drives | None = None) -> MachineModel:
    host: Host = replace(machine.host, memory_bytes=gib * GiB)
    return replace(machine, host=host, drives=drives)


_PC_4090 = _with_ram(DESKTOP_4090, 256)
_PC_4090_DRIVES = _with_ram(DESKTOP_4090, 256, drives=DESKTOP_4090.drives)
_ONE_H100 = replace(JLSE_H100, drives=None)
_ONE_H200 = _with_ram(H200_NODE, 1536)
_V100 = replace(DGX2, drives=None)
_DATA_CENTER_DRIVE = find_drive("pm9a3")[0]
_JLSE_DRIVES = replace(
    JLSE_H100,
    drives=Drives(
        capacity_bytes=3 * _TERA,  # as JLSE_H100 has it
        read_bytes_per_s=_DATA_CENTER_DRIVE.read_bytes_per_s,
        write_bytes_per_s=_DATA_CENTER_DRIVE.write_bytes_per_s,
    ),
)


def _infinity(
    what: str, layers: int, hidden: int, batch: int, setting: Setting, *, part: int = 1,
    tflops: float | None = None, lacks: tuple[str, ...] = (),
) -> PublishedRun:  # fmt: skip
    """Return a run of ZeRO-Infinity on one DGX-2; `part` micro-batches make the batch."""
    return PublishedRun(
        what=f"{what}, 16 V100",
        source=f"{_ZI}, Table 1 and Figure 5c" if tflops else f"{_ZI}, Table 4 and Figure 6a",
        model=_gpt(layers, hidden),
        machine=DGX2,
        ranks=16,
        batch=batch // part,
        accumulation=part,
        sequence=1024,
        setting=setting,
        inputs_moved=_CHECKPOINTS_DOWN in lacks,
        tflops=tflops,
        lacks=(_EMBEDDINGS, *((_BATCH_SPLIT,) if part > 1 else ()), *lacks),
    )


def _runs() -> Iterator[PublishedRun]:
    over = "printed as over 40 TFLOP/s"
    yield _infinity("10B", 50, 4096, 8, _ON_GPUS, tflops=40, lacks=(over,))
    yield _infinity(
        "50B", 62, 8192, 26, _STATES_ON_DRIVES, part=13, tflops=40, lacks=(over, _CHECKPOINTS_DOWN)
    )
    yield _infinity(
        "100B", 125, 8192, 24, _STATES_ON_DRIVES, part=12, tflops=40,
        lacks=(over, _CHECKPOINTS_DOWN),
    )  # fmt: skip
    yield _infinity("0.5T", 124, 18432, 8, _ZERO3_DRIVES, part=8, lacks=(_CHECKPOINTS_DOWN,))
    yield _infinity("1T", 128, 25600, 7, _ZERO3_DRIVES, part=7, lacks=(_CHECKPOINTS_DOWN,))
    yield _infinity("1.4B, data parallel", 40, 1536, 1, _ON_GPUS, lacks=("copies on each GPU",))
    yield _infinity("10B, ZeRO-2", 50, 4096, 1, _ON_GPUS, lacks=("whole parameters on each GPU",))
    yield _infinity(
        "13B, ZeRO-Offload", 64, 4096, 1, _ZERO2_HOST, lacks=("whole parameters on each GPU",)
    )
    yield _infinity("20B, ZeRO-3", 98, 4096, 1, _ON_GPUS)
    yield _infinity("70B, ZeRO-Inf-CPU", 125, 8192, 1, _ZERO3_HOST)
    yield _infinity("1000B, ZeRO-Inf-NVMe", 128, 25600, 5, _ZERO3_DRIVES, part=5, lacks=(_SLICED,))
    for what, seconds, setting in (
        ("ZeRO-3 offload", 7.10, _ZERO3_HOST),
        ("Deep Optimizer States", 2.906, _ALTERNATING),
    ):
        yield PublishedRun(
            what=f"20B, {what}, 4 H100",
            source=f"{_DOS}, Figure 9, a hundredth of it",
            model=_gpt(98, 4096, 32),
            machine=_ONE_H100,
            ranks=4,
            batch=1,
            sequence=2048,
            setting=setting,
            seconds=seconds,
            lacks=(_EMBEDDINGS, _PAGEABLE),
        )
    yield from _log_of_one_h100()
    for batch, seconds in ((8, 8.9672), (16, 11.9340), (32, 18.2987)):
        yield PublishedRun(
            what=f"Llama-3.1-8B, DeepSpeed ZeRO-3 offload, batch {batch}, 1 RTX 4090",
            source=_SF,
            model=lambda: preset("llama-3-8b"),
            machine=_PC_4090,
            ranks=1,
            batch=batch,
            sequence=1024,
            setting=_ZERO3_HOST,
            chunked_loss=True,
            seconds=seconds,
            lacks=("the host is assumed: 256 GiB, DDR of a desktop", _LIGER, _PAGEABLE),
        )
    for gpus, tflops in ((1, 272.0), (4, 1290.0 / 4)):
        yield PublishedRun(
            what=f"Qwen2.5-7B, MegaTrain, {gpus} H100",
            source=_MT,
            model=lambda: preset("qwen2.5-7b"),
            machine=_with_ram(JLSE_H100, 1024),
            ranks=gpus,
            batch=1,
            accumulation=158,
            sequence=1024,
            setting=_ZERO3_HOST,
            tflops=tflops,
            lacks=(
                "its batch of 158 is of its own configuration, here in micro-batches of 1",
                "the host is assumed",
                "bf16 parameters without fp32 masters",
                "how operations were counted is assumed",
            ),
        )
    yield PublishedRun(
        what="120B, MegaTrain, 1 H200",
        source=f"{_MT}: trains with 1.5 TB of host memory",
        model=_gpt(80, 11264, 88),
        machine=_ONE_H200,
        ranks=1,
        batch=1,
        sequence=1024,
        setting=_ZERO3_HOST,
        lacks=("the model's shape is assumed", "bf16 parameters without fp32 masters"),
    )
    yield PublishedRun(
        what="175B, LoHan, 1 RTX 4090, 256 GB",
        source="LoHan, abstract",
        model=_gpt(96, 12288, 96),
        machine=replace(
            _PC_4090_DRIVES,
            drives=Drives(
                capacity_bytes=12 * 3_840_000_000_000, read_bytes_per_s=30e9, write_bytes_per_s=20e9
            ),
        ),
        ranks=1,
        batch=1,
        sequence=1024,
        setting=_ZERO3_DRIVES,
        inputs_moved=True,
        lacks=(
            "drives and batch are not in the abstract, and are assumed",
            "of activations, a plan has the inputs of blocks on drives, and counts no time for it",
        ),
    )
    yield PublishedRun(
        what="123B, SlideFormer, 1 RTX 4090",
        source="SlideFormer, abstract",
        model=lambda: model_of_config(
            {
                "model_type": "mistral",
                "hidden_size": 12288,
                "num_hidden_layers": 88,
                "num_attention_heads": 96,
                "num_key_value_heads": 8,
                "intermediate_size": 28672,
                "vocab_size": 32768,
                "max_position_embeddings": 32768,
                "head_dim": 128,
                "tie_word_embeddings": False,
            },
            name="123B",
        ),
        machine=_PC_4090_DRIVES,
        ranks=1,
        batch=1,
        sequence=1024,
        setting=_ZERO3_DRIVES,
        lacks=("host and drives are not in the abstract, and are assumed",),
    )
    yield PublishedRun(
        what="13B, ZeRO-Offload, 1 V100",
        source="ZeRO-Offload: up to 13 billion parameters on a single GPU",
        model=_gpt(65, 4096),
        machine=_V100,
        ranks=1,
        batch=1,
        sequence=1024,
        setting=_ZERO2_HOST,
        lacks=("layers and width are assumed", _EMBEDDINGS),
    )
    yield PublishedRun(
        what="10B, ZeRO-Offload, 1 V100",
        source="DeepSpeed's tutorial of ZeRO-Offload; its rate from the paper's abstract",
        model=_gpt(50, 4096, 32),
        machine=_V100,
        ranks=1,
        batch=10,
        sequence=1024,
        setting=_ZERO2_HOST,
        tflops=40,
        lacks=("a sequence of 1,024 is assumed", "micro-batches of the measurement", _EMBEDDINGS),
    )
    yield from _mlp_offload()


def _log_of_one_h100() -> Iterator[PublishedRun]:
    """Yield the log's two runs with the planner's subgroups, and again with what the log has."""
    for count, subgroup_numel, start_s, lacks in (
        ("", None, None, ("595 subgroups, and a cost for each",)),
        (
            " in 595 subgroups",
            _SUBGROUP_OF_LOG,
            _START_OF_LOG_S,
            ("595 subgroups at 4.3 ms each are of this log", "no cost of a copy"),
        ),
    ):
        for what, seconds, setting in (
            ("ZeRO-3 offload", 9.48, _ZERO3_HOST),
            ("Deep Optimizer States", 6.82, _ALTERNATING),
        ):
            yield PublishedRun(
                what=f"7B, {what}{count}, 1 H100",
                source=_LOG,
                model=_llama(32, 4096, 32, 11008),
                machine=_ONE_H100,
                ranks=1,
                batch=1,
                sequence=2048,
                setting=replace(setting, subgroup_numel=subgroup_numel),
                start_s=start_s,
                seconds=seconds,
                lacks=(*lacks, _PAGEABLE, _SHAPE_OF_LOG),
            )


def _mlp_offload() -> Iterator[PublishedRun]:
    """Yield the logs of MLP-Offload: medians of the steps after the first one."""
    shapes = {
        "40B": _llama(128, 5120, 40, 20480),
        "52B": _llama(64, 8192, 64, 21824),
        "70B": _llama(80, 8192, 64, 28672),
        "100B": _llama(124, 8192, 64, 28672),
    }
    beside = "MLP-Offload"
    for what, how, seconds in (
        ("40B", "ZeRO-3", 242.0),
        ("52B", "ZeRO-3", 238.7),
        ("70B", "ZeRO-3", 370.2),
        ("100B", "ZeRO-3", 571.6),
        ("52B", beside, 92.8),
        ("70B", beside, 151.3),
        ("100B", beside, 275.6),
    ):
        yield PublishedRun(
            what=f"{what}, {how} on NVMe, 4 H100",
            source=_MLP,
            model=shapes[what],
            machine=_JLSE_DRIVES,
            ranks=4,
            batch=1,
            sequence=2048,
            setting=_STATES_ALONE_ON_DRIVES,
            seconds=seconds,
            lacks=(
                "which machine ran it is assumed: that of Deep Optimizer States",
                _ONE_DRIVE,
                *((_PARALLEL_FILES,) if how == beside else ()),
            ),
        )


RUNS: tuple[PublishedRun, ...] = tuple(_runs())
