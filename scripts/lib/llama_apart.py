"""One training of a model of Transformers in a process of its own: plain, ours, Accelerate with
DeepSpeed, or QLoRA.

As a program it loads a model from a folder, trains it with one system, one sequence per step, and
prints what it measured as JSON, the last line of its output. Its Job is its argument. Imported, it
gives the other end, `train_llama_apart`. Imports torch and the systems only as a program.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rival_step_host import make_one_rank, memory_bytes

__all__ = ["LR", "Job", "train_llama_apart"]

LR = 1e-4
RANK = 8  # of the adapters


@dataclass(frozen=True)
class Job:
    """What one program trains, and with which system."""

    system: str
    model: str
    """A folder that save_pretrained could have written."""
    length: int
    """Tokens of a step's sequence."""
    steps: int
    threads: int
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Of the engine, or of DeepSpeed."""


def train_llama_apart(
    python: Path, environ: Mapping[str, str], job: Job, *, log: Path
) -> dict[str, Any]:
    """Run the job; return what its program has measured.

    Raises:
        RuntimeError: it failed, or the kernel killed it.
    """
    command = [str(python), str(Path(__file__).resolve()), json.dumps(asdict(job))]
    with log.open("w") as errors:
        ran = subprocess.run(
            command,
            env=dict(environ),
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            check=False,
        )
    if ran.returncode:
        lines = log.read_text(errors="replace").splitlines() or [""]
        words = f"it ended with status {ran.returncode}, its last words: {lines[-1]}"
        raise RuntimeError(f"{words} ({log.name} has the rest)")
    found: dict[str, Any] = json.loads(ran.stdout.splitlines()[-1])
    return found


# --- the end that trains --------------------------------------------------------------------------


@dataclass(frozen=True)
class _Trainer:
    """A model in the hands of one system."""

    model: Any
    forward: Callable[..., Any]
    backward: Callable[[Any], object]
    update: Callable[[], object]
    """Ends with no gradients left."""


def main(argument: str) -> None:
    """Train as the job says, and print what was measured."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what the systems print is no part of the answer
    os.environ["HF_HUB_OFFLINE"] = "1"
    import torch
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    job = Job(**json.loads(argument))
    torch.set_num_threads(job.threads)
    losses, seconds = [], []
    with ExitStack() as until_end:
        trainer = SYSTEMS[job.system](job, until_end)
        vocabulary = trainer.model.config.vocab_size
        for step in range(job.steps):
            generator = torch.Generator().manual_seed(step)
            tokens = torch.randint(vocabulary, (1, job.length), generator=generator)
            begun = time.perf_counter()
            loss = trainer.forward(input_ids=tokens, labels=tokens, use_cache=False).loss
            trainer.backward(loss)
            trainer.update()
            seconds.append(time.perf_counter() - begun)
            losses.append(loss.item())
        found = {"losses": losses, "seconds": seconds, "peak_bytes": memory_bytes("VmHWM")}
        print(json.dumps(found), file=answers, flush=True)


def _loaded(job: Job, dtype: str) -> Any:
    """Return the model in memory, ready to train."""
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(job.model, dtype=dtype)
    return _recomputing(model.train())


def _recomputing(model: Any) -> Any:
    """Let each layer compute its forward again in the backward."""
    model.gradient_checkpointing_enable({"use_reentrant": False})
    return model


def _adamw(model: Any) -> Any:
    import torch

    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return torch.optim.AdamW(trained, lr=LR, weight_decay=0.0)


def _plainly(model: Any, forward: Callable[..., Any]) -> _Trainer:
    optimizer = _adamw(model)

    def update() -> None:
        optimizer.step()
        optimizer.zero_grad()

    return _Trainer(model, forward, lambda loss: loss.backward(), update)


def _plain(job: Job, _until_end: ExitStack) -> _Trainer:
    """Train fp32 weights under bf16 autocast, as a Trainer with bf16=True does."""
    import torch

    model = _loaded(job, "float32")

    def forward(**batch: Any) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            return model(**batch)

    return _plainly(model, forward)


def _ours(job: Job, until_end: ExitStack) -> _Trainer:
    """Train with everything in memory."""
    return _in_engine(job, _loaded(job, "float32"), until_end)


def _ours_on_drives(job: Job, until_end: ExitStack) -> _Trainer:
    """Train a model that is loaded onto the drives."""
    import torch

    import infinity_engine

    model = infinity_engine.load_pretrained(
        job.model, job.settings["budget"], dtype=torch.float32
    ).train()
    return _in_engine(job, _recomputing(model), until_end)


def _in_engine(job: Job, model: Any, until_end: ExitStack) -> _Trainer:
    import infinity_engine

    engine = infinity_engine.initialize(
        model,
        _adamw(model),
        accelerator="cpu",
        update_threads=job.threads,
        calibration="off",
        **job.settings,
    )
    # At the end nothing of it is wanted back in memory.
    until_end.callback(engine.close, restore=False)
    return _Trainer(model, engine, engine.backward, engine.step)


def _deepspeed(job: Job, _until_end: ExitStack) -> _Trainer:
    """Train with Accelerate's DeepSpeed plugin, as one rank."""
    make_one_rank()
    import accelerate

    plugin = accelerate.DeepSpeedPlugin(hf_ds_config=dict(job.settings))
    accelerator = accelerate.Accelerator(deepspeed_plugin=plugin)
    model = _loaded(job, "bfloat16")  # built in parts: the plugin has switched ZeRO-3's Init on
    optimizer = accelerate.utils.DummyOptim(model.parameters(), lr=LR)
    engine, stepping = accelerator.prepare(model, optimizer)

    def update() -> None:
        stepping.step()
        stepping.zero_grad()

    return _Trainer(model, engine, accelerator.backward, update)


def _qlora(job: Job, until_end: ExitStack) -> _Trainer:
    """Train adapters on a base that is kept in 4 bits and streamed."""
    import infinity_engine

    base = infinity_engine.load_pretrained(job.model, job.settings["budget"], compact="nf4")
    return _in_engine(job, _adapted(base), until_end)


def _qlora_of_bitsandbytes(job: Job, _until_end: ExitStack) -> _Trainer:
    """Train adapters with plain PEFT on a base of bitsandbytes' layers."""
    import torch
    import transformers

    base = transformers.AutoModelForCausalLM.from_pretrained(
        job.model,
        dtype=torch.bfloat16,
        device_map={"": "cpu"},
        quantization_config=transformers.BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16
        ),
    )
    model = _adapted(base)
    return _plainly(model, model)


def _adapted(base: Any) -> Any:
    """Return a model with adapters in fp32, the same of every system."""
    import peft
    import torch

    config = peft.LoraConfig(r=RANK, target_modules="all-linear", task_type="CAUSAL_LM")
    model = peft.get_peft_model(base, config).train()
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = torch.randn(parameter.shape, generator=generator).mul_(0.02)
    model.enable_input_require_grads()
    return _recomputing(model)


SYSTEMS: Mapping[str, Callable[[Job, ExitStack], _Trainer]] = {
    "plain": _plain,
    "ours": _ours,
    "ours on drives": _ours_on_drives,
    "deepspeed": _deepspeed,
    "qlora": _qlora,
    "bitsandbytes": _qlora_of_bitsandbytes,
}


if __name__ == "__main__":
    main(sys.argv[1])
