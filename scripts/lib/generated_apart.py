"""One generation in a process of its own, within a memory limit: ours, or Accelerate's.

As a program it loads a model of Transformers from a folder, generates tokens with one system, and
prints what it measured as JSON, the last line of its output. Its Job is its argument. Imported, it
gives the other end, `generate_apart`. Imports torch and the systems only as a program.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from memory_group import memory_group

__all__ = ["Job", "generate_apart"]

PROMPT = 8  # tokens


@dataclass(frozen=True)
class Job:
    """What one program generates, and with which system."""

    system: str
    model: str
    """A folder that save_pretrained could have written."""
    folder: str
    """A directory that is the program's own, on the drive that it may use."""
    tokens: int
    sequences: int
    threads: int
    budget: Mapping[str, Any] = field(default_factory=dict)
    """Of the engine, where the system is ours."""


def generate_apart(
    python: Path, environ: Mapping[str, str], job: Job, *, log: Path, limit_bytes: int
) -> dict[str, Any]:
    """Run the job; return what its program has measured.

    Raises:
        GroupUnavailableError: memory cannot be limited here.
        RuntimeError: it failed, or the kernel killed it for its memory.
    """
    command = [str(python), str(Path(__file__).resolve()), json.dumps(asdict(job))]
    with memory_group(limit_bytes) as group, log.open("w") as errors:
        ran = subprocess.run(
            [*group.launcher, *command],
            env=dict(environ),
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            check=False,
        )
        killed = group.kills
    if ran.returncode:
        words = "the kernel killed it for its memory" if killed else f"status {ran.returncode}"
        raise RuntimeError(f"{words} ({log} has what it said)")
    found: dict[str, Any] = json.loads(ran.stdout.splitlines()[-1])
    return found


# --- the end that generates -----------------------------------------------------------------------


def main(argument: str) -> None:
    """Generate as the job says, and print what was measured."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    import torch
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    job = Job(**json.loads(argument))
    torch.set_num_threads(job.threads)
    prompt = torch.arange(4, 4 + PROMPT).repeat(job.sequences, 1)

    def generate(model: Any, tokens: int) -> Any:
        with torch.no_grad():
            return model.generate(
                prompt,
                max_new_tokens=tokens,
                min_new_tokens=tokens,
                do_sample=False,
                pad_token_id=0,
            )

    with ExitStack() as until_end:
        model = SYSTEMS[job.system](job, until_end)
        generate(model, 2)
        before, begun = _read_bytes(), time.perf_counter()
        written = generate(model, job.tokens)
        seconds = time.perf_counter() - begun
        print(
            json.dumps(
                {
                    "seconds": seconds,
                    "read_bytes": _read_bytes() - before,
                    "written": written[0, PROMPT:].tolist(),
                }
            )
        )


def _ours(job: Job, until_end: ExitStack) -> Any:
    """Return the model, its parameters on the drive."""
    import infinity_engine

    model = infinity_engine.load_pretrained(job.model, job.budget)
    engine = until_end.enter_context(
        infinity_engine.initialize(
            model.requires_grad_(False),
            budget=job.budget,
            parameters="nvme",
            accelerator="cpu",
        )
    )
    # At the end nothing of it is wanted back in memory.
    until_end.callback(engine.close, restore=False)
    return model


def _accelerate(job: Job, _until_end: ExitStack) -> Any:
    """Return the model with its layers offloaded to disk; all else stays in memory."""
    import transformers

    config = transformers.AutoConfig.from_pretrained(job.model)
    on_disk = {f"model.layers.{number}": "disk" for number in range(config.num_hidden_layers)}
    others = dict.fromkeys(
        ("model.embed_tokens", "model.norm", "model.rotary_emb", "lm_head"), "cpu"
    )
    return transformers.AutoModelForCausalLM.from_pretrained(
        job.model, dtype="auto", device_map={**others, **on_disk}, offload_folder=job.folder
    )


SYSTEMS: Mapping[str, Callable[[Job, ExitStack], Any]] = {
    "ours": _ours,
    "accelerate": _accelerate,
}


def _read_bytes() -> int:
    """Return the bytes that this process has read from drives, as the kernel counts."""
    lines: Sequence[str] = Path("/proc/self/io").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("read_bytes"))


if __name__ == "__main__":
    main(sys.argv[1])
