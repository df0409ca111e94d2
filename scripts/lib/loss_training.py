"""One step of a small Llama with a large vocabulary: what it takes, printed as JSON.

    python loss_training.py WAY TOKENS

A process of its own, so that no other way's memory is counted. WAY has "checkpoints", "chunked",
both or neither in it. The peak is that of resident memory during forward and backward, above what
the process had before; gradients are in it.
"""

from __future__ import annotations

import json
import os
import re
import sys
import time
from pathlib import Path
from typing import Any

__all__ = ["main"]

VOCABULARY, WIDTH, LAYERS = 32_000, 512, 4
MIB = 1 << 20


def main(way: str, tokens: int) -> None:
    """Train the model for two steps; the first is measured for its peak, the second for time."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    import torch

    model = small_llama()
    if "checkpoints" in way:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    if "chunked" in way:
        from infinity_engine.losses import chunk_loss

        chunk_loss(model)
    batch = torch.randint(VOCABULARY, (1, tokens), generator=torch.Generator().manual_seed(0))
    step(model, batch[:, :16])  # what libraries allocate once
    before = resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    loss = step(model, batch)
    peak = resident("VmHWM") - before
    began = time.perf_counter()
    step(model, batch)
    seconds = time.perf_counter() - began
    print(json.dumps({"peak": peak / MIB, "seconds": seconds, "loss": loss}))


def small_llama() -> Any:
    """Return the model, in fp32."""
    import torch
    import transformers

    transformers.logging.set_verbosity_error()
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        intermediate_size=1376,
        num_hidden_layers=LAYERS,
        num_attention_heads=8,
        use_cache=False,
    )
    return transformers.LlamaForCausalLM(config).train()


def step(model: Any, batch: Any) -> float:
    """Compute the loss and the gradients."""
    model.zero_grad()
    loss = model(input_ids=batch, labels=batch).loss
    loss.backward()
    return float(loss.detach())


def resident(what: str) -> int:
    """Return the bytes of memory that the kernel says this process has, or had at most."""
    found = re.search(rf"^{what}:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert found is not None, "the kernel has both"
    return int(found[1]) << 10


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
