"""One training in a process of its own, within a memory limit where one is given: ours, plain
torch's or DeepSpeed's.

As a program it trains one GPT with one system, in whichever environment has that system: the Job is
its argument, each line of standard output an event in JSON; whatever else prints gets standard
error. Imported, it gives the other end, `train_apart`, for which a process that the kernel kills is
a result. Imports torch and the systems only as a program.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import asdict, dataclass, field
from enum import Enum
from functools import partial
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rival_activations import FORWARDS, Forward
from rival_step_host import PHASES, make_one_rank, memory_bytes

from memory_group import Group, GroupUnavailableError, memory_group

if TYPE_CHECKING:
    import torch

    from tiny_gpt import TinyGPT

__all__ = [
    "LR",
    "SYSTEMS",
    "Ending",
    "Job",
    "Ran",
    "Result",
    "Step",
    "Trainer",
    "deepspeed_config",
    "drive_bytes",
    "main",
    "parameters_of",
    "take_step",
    "train",
    "train_apart",
    "trainer_of",
    "words_of",
]

LR = 1e-4
_BEGINNING = 2  # steps, in which memory is taken that later ones have


@dataclass(frozen=True)
class Job:
    """What one program trains: which of SYSTEMS, a GPT of this shape, one sequence per step, with
    so many threads.
    """

    system: str
    width: int
    depth: int
    context: int
    steps: int
    threads: int
    text: str
    """A file whose bytes are trained on."""
    folder: str
    """A directory that is the program's own, on the drive that it may use."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """What the engine is initialized with, where the system is ours; what DeepSpeed's settings are
    to have beyond.
    """
    wants_digests: bool = False
    seed: int = 0
    """Of the model and of what it is trained on."""
    recomputes: bool = True
    """Whether each block computes its forward again in the backward."""
    checkpoints_blocks: bool = False
    """Whether torch's checkpoint runs each block again, as a whole."""
    made_in_memory: bool = False
    """Whether the model is made as plain torch makes it, also where its parameters go to drives."""
    dtype: str = "bfloat16"
    """What plain torch and DeepSpeed train in. Ours has its own setting."""

    @property
    def precision(self) -> str:
        """That setting of ours for the same."""
        return {"bfloat16": "bf16", "float32": "fp32"}[self.dtype]

    @property
    def parameter_bytes(self) -> int:
        """What a parameter takes where modules compute."""
        return {"bfloat16": 2, "float32": 4}[self.dtype]

    @property
    def state_bytes(self) -> int:
        """What a parameter's states take: the fp32 master, two moments, and what modules compute
        with where that is not the master.
        """
        return {"bfloat16": 14, "float32": 12}[self.dtype]


@dataclass(frozen=True)
class Step:
    """One step that has ended: its loss, and its seconds by phase."""

    loss: float
    seconds: dict[str, float]
    within: dict[str, float] = field(default_factory=dict)
    """What of them its system says it waited, and did beside computing, by cause."""


@dataclass(frozen=True)
class Result:
    """What a training that came to its end says of itself."""

    parameters: int
    baseline_bytes: int
    """Resident when everything is imported and one block was computed with, before the model is
    made.
    """
    computing_bytes: int
    """What torch takes to compute forward and backward, beyond parameters: what that block took,
    and what every other block keeps of a forward to be recomputed from."""
    peak_bytes: int
    """Resident at the most, by the end of the last step."""
    read_bytes: int
    """From drives in all steps, as the kernel counts for the process."""
    written_bytes: int
    tiers: dict[str, tuple[int, int]]
    """The most that each tier or directory held by the system's own accounts, and its limit."""
    digests: dict[str, str]
    """Of each parameter with its optimizer states, where they were wanted."""
    steady_bytes: int = 0
    """Resident at the most after the first two steps."""


class Ending(Enum):
    """How a training ended."""

    TRAINED = "trained"  # With a result.
    OUT_OF_MEMORY = "killed by the memory limit"  # By the kernel, which says so.
    FAILED = "failed"  # With an error of its own, for another reason, or not in time.


@dataclass(frozen=True)
class Ran:
    """A training that has ended, one way or the other."""

    ending: Ending
    words: str
    """What it was at when it was killed, or why it failed."""
    steps: list[Step]
    """Those that had ended."""
    result: Result | None
    group_peak_bytes: int | None
    """What it used at the most, page cache included; None where no control group could be made to
    tell.
    """


# --- the end that asks ----------------------------------------------------------------------------


def train_apart(
    python: Path,
    environ: Mapping[str, str],
    job: Job,
    *,
    log: Path,
    within_s: float,
    limit_bytes: int | None = None,
) -> Ran:
    """Train in a process that may use `limit_bytes` of memory, page cache included; its standard
    error becomes `log`.

    Raises:
        GroupUnavailableError: memory cannot be limited here.
    """
    with ExitStack() as until_end:
        group = _group(limit_bytes, until_end)
        with log.open("w") as errors:
            process = subprocess.Popen(
                [*(group.launcher if group else []), python, __file__, json.dumps(asdict(job))],
                env=environ,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )
        timer = threading.Timer(within_s, process.kill)
        timer.start()
        try:
            events = list(_events(process))
            status = process.wait()
        finally:
            timer.cancel()
            process.kill()
            process.wait()
        return _ran(
            events,
            status,
            log,
            kills=group.kills if group else 0,
            peak=group.peak_bytes if group else None,
        )


def _group(limit_bytes: int | None, until_end: ExitStack) -> Group | None:
    try:
        return until_end.enter_context(memory_group(limit_bytes))
    except GroupUnavailableError:
        if limit_bytes is not None:
            raise
        return None


def _events(process: subprocess.Popen[str]) -> Iterator[dict[str, Any]]:
    """Yield what the program tells. The line that it was at when it was killed may lack its end."""
    assert process.stdout is not None, "the program was started with a pipe"
    with process.stdout:
        for line in process.stdout:
            if line.endswith("\n"):
                yield json.loads(line)


def _ran(
    events: Sequence[dict[str, Any]], status: int, log: Path, *, kills: int, peak: int | None
) -> Ran:
    told = {name: value for event in events for name, value in event.items()}
    steps = [Step(**event["step"]) for event in events if "step" in event]
    at = told.get("at", "starting")
    if "result" in told:
        told["result"]["tiers"] = {
            name: (held, limit) for name, (held, limit) in told["result"]["tiers"].items()
        }
        return Ran(Ending.TRAINED, "", steps, Result(**told["result"]), peak)
    if kills:
        return Ran(Ending.OUT_OF_MEMORY, at, steps, None, peak)
    last = " | ".join(log.read_text(errors="replace").splitlines()[-3:])
    words = told.get(
        "failed", f"it ended with status {status} while it was {at}; its last words: {last}"
    )
    return Ran(Ending.FAILED, f"{words} ({log.name} has the rest)", steps, None, peak)


def parameters_of(width: int, depth: int, context: int) -> int:
    """Return how many parameters a model of this shape has, without making one."""
    import torch

    with torch.device("meta"):
        return sum(parameter.numel() for parameter in _gpt(width, depth, context).parameters())


# --- the end that trains --------------------------------------------------------------------------


@dataclass(frozen=True)
class Trainer:
    """A model in the hands of one system."""

    model: torch.nn.Module
    forward: Callable[[torch.Tensor], torch.Tensor]
    backward: Callable[[torch.Tensor], object]
    update: Callable[[], object]
    """Ends with no gradients left."""
    digests: Callable[[], dict[str, str]] = dict
    tiers: Callable[[], dict[str, tuple[int, int]]] = dict
    report: Callable[[], str] = str
    """What the system says of its last step."""
    within: Callable[[], dict[str, float]] = dict
    """The seconds that it waited in its last step, and did beside computing, by cause."""


System = Callable[[Job, "Callable[[], TinyGPT]"], Trainer]


def train(job: Job, tell: Callable[..., None]) -> Result:
    """Train as the job says; `tell` hears what is being done, and of each step."""
    import torch

    from tiny_gpt import batches

    tell(at="importing and warming up")
    torch.set_num_threads(job.threads)
    prepare, _ = SYSTEMS[job.system]
    prepare()
    computing = _computing_bytes(job)
    baseline = memory_bytes("VmRSS")
    text = torch.frombuffer(bytearray(Path(job.text).read_bytes()), dtype=torch.uint8)
    data = batches(text.long(), sequences=1, length=job.context, seed=job.seed)
    tell(at="making the model")
    trainer = trainer_of(job)
    before = drive_bytes()
    peak = 0
    for number in range(job.steps):
        if number == _BEGINNING:
            peak = memory_bytes("VmHWM")
            _begin_peak_anew()
        tell(step=asdict(take_step(trainer, next(data), partial(_tell_phase, tell, number + 1))))
    after, steady = drive_bytes(), memory_bytes("VmHWM")
    print(trainer.report())
    tell(at="reading back what it has trained")
    return Result(
        parameters=parameters_of(job.width, job.depth, job.context),
        baseline_bytes=baseline,
        computing_bytes=computing,
        peak_bytes=max(peak, steady),
        steady_bytes=steady,
        read_bytes=after["read_bytes"] - before["read_bytes"],
        written_bytes=after["write_bytes"] - before["write_bytes"],
        tiers=trainer.tiers(),
        digests=trainer.digests() if job.wants_digests else {},
    )


def trainer_of(job: Job) -> Trainer:
    """Return a new model in the hands of the job's system."""
    import torch

    torch.manual_seed(job.seed)
    _, system = SYSTEMS[job.system]
    return system(job, lambda: _made(job))


def _tell_phase(tell: Callable[..., None], step: int, phase: str) -> None:
    tell(at=f"in {phase} {step}")


def take_step(
    trainer: Trainer, batch: tuple[torch.Tensor, torch.Tensor], begins: Callable[[str], None]
) -> Step:
    """Train one step; `begins` hears of each phase before it."""
    from torch.nn import functional

    inputs, targets = batch
    times = [time.perf_counter()]
    begins("forward")
    loss = functional.cross_entropy(
        trainer.forward(inputs).flatten(0, 1).float(), targets.flatten()
    )
    times.append(time.perf_counter())
    begins("backward")
    trainer.backward(loss)
    times.append(time.perf_counter())
    begins("update")
    trainer.update()
    times.append(time.perf_counter())
    took = (end - start for start, end in pairwise(times))
    return Step(loss.item(), dict(zip(PHASES, took, strict=True)), trainer.within())


def _made(job: Job) -> TinyGPT:
    model = _gpt(job.width, job.depth, job.context, job.recomputes)
    if job.checkpoints_blocks:
        import rival_activations

        rival_activations.whole(model)
    return model


def _gpt(width: int, depth: int, context: int, recomputes: bool = True) -> TinyGPT:
    """Return a GPT; one that recomputes has activations that hardly grow with its depth, so that
    memory has nothing else to grow with.
    """
    from tiny_gpt import TinyGPT

    return TinyGPT(
        width=width, depth=depth, heads=max(1, width // 64), context=context, recomputes=recomputes
    )


def _computing_bytes(job: Job) -> int:
    """Compute one block, with which torch loads what it loads with the first one; return what all
    of them take.
    """
    import torch

    before = torch.get_default_dtype()
    dtype: torch.dtype = getattr(torch, job.dtype)
    torch.set_default_dtype(dtype)
    model = _gpt(job.width, 1, job.context)
    torch.set_default_dtype(before)
    tokens = torch.zeros(1, job.context, dtype=torch.long)
    resting = 0
    for _ in range(2):  # in the first one torch loads and makes what it keeps
        model.zero_grad()
        _begin_peak_anew()
        resting = memory_bytes("VmRSS")
        model(tokens).float().mean().backward()
    kept = (job.depth - 1) * job.context * job.width * dtype.itemsize
    return memory_bytes("VmHWM") - resting + kept


def _begin_peak_anew() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def drive_bytes() -> dict[str, int]:
    """Return what this process has read from drives and written to them, as the kernel counts."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return {name: int(count) for name, count in (line.split(": ") for line in lines)}


def _ours(job: Job, make: Callable[[], TinyGPT]) -> Trainer:
    import torch

    import infinity_engine

    settings = dict(job.settings)
    budget = infinity_engine.Budget(**settings.pop("budget", {}))
    streamed = settings.get("parameters") == "nvme" and not job.made_in_memory
    made_within: AbstractContextManager[object] = (
        infinity_engine.init_context(budget=budget) if streamed else nullcontext()
    )
    with made_within:
        model = make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
    engine = infinity_engine.initialize(
        model, optimizer, accelerator="cpu", budget=budget, update_threads=job.threads, **settings
    )

    def digests() -> dict[str, str]:
        return {name: digest(parameter) for name, parameter in model.named_parameters()}

    def digest(parameter: torch.nn.Parameter) -> str:
        total = hashlib.sha256()
        with engine.gathered([parameter]):
            total.update(_raw(parameter.detach()))
        for name, state in sorted(engine.state_of(parameter).items()):
            total.update(name.encode())
            total.update(_raw(state) if isinstance(state, torch.Tensor) else str(state).encode())
        return total.hexdigest()

    def tiers() -> dict[str, tuple[int, int]]:
        return {
            usage.directory or usage.tier.name: (usage.peak_held, usage.limit)
            for usage in engine.usage()
        }

    def within() -> dict[str, float]:
        report = engine.report()
        updates = {
            f"updates on {lane.value}": use.seconds or 0.0
            for lane, use in report.updates.items()
            if use.params
        }
        return {wait.value: seconds for wait, seconds in report.waits.items()} | updates

    return Trainer(
        model,
        engine,
        engine.backward,
        engine.step,
        digests,
        tiers,
        lambda: str(engine.report()),
        within,
    )


def _raw(tensor: torch.Tensor) -> bytes:
    import torch

    return tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def _plain(
    job: Job, make: Callable[[], TinyGPT], forward_of: Callable[[TinyGPT], Forward] | None = None
) -> Trainer:
    """Train with plain torch; `forward_of` a model says how another library runs its blocks."""
    import torch

    # In one dtype throughout, moments too: in bf16 8 bytes per parameter, which is the least that
    # plain torch can do; in fp32 16.
    torch.set_default_dtype(getattr(torch, job.dtype))
    model = make()
    forward = model if forward_of is None else forward_of(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, fused=True)

    def update() -> None:
        optimizer.step()
        optimizer.zero_grad()

    return Trainer(model, forward, torch.Tensor.backward, update)


def _deepspeed(job: Job, make: Callable[[], TinyGPT]) -> Trainer:
    import torch

    deepspeed: Any = import_module("deepspeed")
    config = deepspeed_config(job)
    with deepspeed.zero.Init(config_dict_or_path=config):
        model = make()
    with deepspeed.zero.GatheredParameters(model.embedding.weight, modifier_rank=0):
        # it was gone when the model did that
        torch.nn.init.normal_(model.embedding.weight, std=0.02)
    engine, *_ = deepspeed.initialize(model=model, config=config)
    return Trainer(model, engine, engine.backward, engine.step)


def deepspeed_config(job: Job) -> dict[str, Any]:
    """Return the settings with which DeepSpeed takes the least memory, of those tried: all on NVMe,
    smallest buffers.

    Without pipelining: that needs three times the buffers. A subgroup ends with the parameter that
    fills it, and no parameter stays (stage3_max_reuse_distance) or is held back from NVMe for being
    small.
    """
    largest = 4 * job.width**2
    leanest = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": 0.0,  # its default is 1.0, and nobody else clips here
        "bf16": {"enabled": job.dtype == "bfloat16"},
        "optimizer": {
            "type": "AdamW",
            "params": {"lr": LR, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.01},
        },
        "zero_optimization": {
            "stage": 3,
            "sub_group_size": largest,
            "stage3_max_live_parameters": largest,
            "stage3_max_reuse_distance": 0,
            # with more, recomputing fails: "already assigned swap buffer"
            "stage3_prefetch_bucket_size": 0,
            "stage3_param_persistence_threshold": 0,
            "reduce_bucket_size": largest,
            "overlap_comm": False,
            "contiguous_gradients": False,
            "offload_param": {
                "device": "nvme",
                "nvme_path": job.folder,
                "buffer_count": 5,
                "buffer_size": largest * 5 // 4,
                "max_in_cpu": 0,
            },
            "offload_optimizer": {
                "device": "nvme",
                "nvme_path": job.folder,
                "buffer_count": 4,
                "fast_init": True,
            },
        },
        "aio": {
            "block_size": 1 << 20,
            "queue_depth": 8,
            "overlap_events": True,
            "single_submit": False,
        },
    }
    return _with(leanest, job.settings)


def _with(settings: Mapping[str, Any], more: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings with others in their place or beside them; a section for another device
    replaces a whole one.
    """
    merged = dict(settings)
    for name, value in more.items():
        before = merged.get(name)
        merged[name] = value
        if isinstance(before, Mapping) and isinstance(value, Mapping):
            device = before.get("device")
            merged[name] = _with(before, value) if value.get("device", device) == device else value
    return merged


def _import_ours() -> None:
    import_module("infinity_engine.engine.engine")


def _import_deepspeed() -> None:
    make_one_rank()
    import_module("deepspeed")


SYSTEMS: Mapping[str, tuple[Callable[[], None], System]] = {
    "ours": (_import_ours, _ours),
    "plain": (lambda: None, _plain),
    "deepspeed": (_import_deepspeed, _deepspeed),
    **{
        name: (
            _import_deepspeed if name.startswith("deepspeed") else lambda: None,
            partial(_plain, forward_of=forward_of),
        )
        for name, forward_of in FORWARDS.items()
    },
}
"""Each loads what the system needs, and makes a model in the system's hands."""


def main() -> None:
    """Train; standard output belongs to the events alone."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def tell(**event: object) -> None:
        print(json.dumps(event), file=answers, flush=True)

    try:
        tell(result=asdict(train(Job(**json.loads(sys.argv[1])), tell)))
    except Exception as error:
        traceback.print_exc()
        tell(failed=words_of(error))
        raise SystemExit(1) from None


def words_of(error: BaseException) -> str:
    """Return an error in one line, and the one that it began with: what fails while cleaning up
    hides that.
    """
    first = error
    while first.__context__ is not None:
        first = first.__context__
    told = [error] if first is error else [first, error]
    return ", then ".join(" ".join(f"{type(each).__name__}: {each}".split()) for each in told)


if __name__ == "__main__":
    main()
