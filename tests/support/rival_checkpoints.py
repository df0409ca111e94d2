"""Trains a small model with DeepSpeed, saves in between, and says the losses.

Runs in DeepSpeed's own environment, one process a rank. Tests import the model and the batches.
Usage: rank, ranks, port, directory, ZeRO stage, precision.
"""

from __future__ import annotations

import json
import os
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

__all__ = ["SAVED_AT", "STEPS", "Small", "adamw", "loss_of"]

SAVED_AT, STEPS, BATCH = 3, 5, 8
TOKENS = 37


class Small(torch.nn.Module):
    """Has tied weights, a frozen weight, a buffer, and sizes that no number of ranks divides."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(TOKENS, 24)
        self.norm = torch.nn.LayerNorm(24)
        self.up = torch.nn.Linear(24, 51)
        self.frozen = torch.nn.Linear(51, 24, bias=False)
        self.head = torch.nn.Linear(24, TOKENS, bias=False)
        self.head.weight = self.embed.weight
        self.frozen.weight.requires_grad_(False)
        self.scale: torch.Tensor
        self.register_buffer("scale", torch.tensor([0.5, 2.0]))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the logits of each token's successor."""
        hidden = self.norm(self.embed(tokens))
        wide = torch.nn.functional.gelu(self.up(hidden))
        logits: torch.Tensor = self.head(hidden + self.frozen(wide) * self.scale[1])
        return logits


def loss_of(model: Any, step: int, part: slice = slice(None)) -> torch.Tensor:
    """Return the loss of a part of a step's batch."""
    made = torch.Generator().manual_seed(step)
    tokens = torch.randint(0, TOKENS, (BATCH, 12), generator=made)[part]
    logits = model(tokens[:, :-1]).float().reshape(-1, TOKENS)
    return torch.nn.functional.cross_entropy(logits, tokens[:, 1:].reshape(-1))


def adamw(model: torch.nn.Module, *, lr: float, weight_decay: float) -> torch.optim.AdamW:
    """Return an optimizer of two groups: only matrices decay."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups: list[dict[str, Any]] = [
        {"params": [item for item in trained if item.dim() > 1], "weight_decay": weight_decay},
        {"params": [item for item in trained if item.dim() == 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=lr)


def main() -> None:
    """Train as one of several ranks."""
    import torch.distributed as dist

    deepspeed = import_module("deepspeed")
    rank, ranks, port, folder, stage, precision = sys.argv[1:]
    os.environ.update(
        RANK=rank,
        LOCAL_RANK=rank,
        WORLD_SIZE=ranks,
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=port,
        GLOO_SOCKET_IFNAME="lo",
    )
    torch.manual_seed(0)
    torch.set_num_threads(1)
    deepspeed.init_distributed("gloo")
    model = Small()
    share = BATCH // int(ranks)
    config = {
        "train_micro_batch_size_per_gpu": share,
        "gradient_clipping": 0.0,
        "zero_optimization": {
            "stage": int(stage),
            "sub_group_size": 1000,
            "stage3_param_persistence_threshold": 0,
        },
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "bf16": {"enabled": precision == "bf16"},
    }
    optimizer = adamw(model, lr=1e-2, weight_decay=0.1)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    losses = []
    for step in range(STEPS):
        if step == SAVED_AT:
            engine.save_checkpoint(folder, client_state={"mine": {"epoch": 2}})
        loss = loss_of(engine, step, slice(int(rank) * share, (int(rank) + 1) * share))
        engine.backward(loss)
        engine.step()
        whole = loss.detach().clone()
        dist.all_reduce(whole)
        losses.append(float(whole) / int(ranks))
    if rank == "0":
        (Path(folder) / "losses.json").write_text(json.dumps(losses))
    dist.barrier()


if __name__ == "__main__":
    main()
