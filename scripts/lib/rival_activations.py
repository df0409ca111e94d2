"""What others do with activations: ways to run the blocks of a GPT that is trained by plain torch.

Each takes a model and returns its forward. Imports torch and the systems when it is called.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from tiny_gpt import TinyGPT

__all__ = ["FORWARDS", "Forward"]

Forward = Callable[["torch.Tensor"], "torch.Tensor"]


def save_on_cpu(model: TinyGPT) -> Forward:
    """Let all that autograd saves be copied to the host, as `torch.autograd.graph` does it."""
    from torch.autograd.graph import save_on_cpu

    def forward(tokens: torch.Tensor) -> torch.Tensor:
        with save_on_cpu():
            found: torch.Tensor = model(tokens)
            return found

    return forward


def selective(model: TinyGPT) -> Forward:
    """Keep the results of matrix products and attention of each block, and run the rest again."""
    import torch
    from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

    aten = torch.ops.aten
    kept = [
        aten.mm.default,
        aten.addmm.default,
        aten._scaled_dot_product_flash_attention_for_cpu.default,
        aten._scaled_dot_product_flash_attention.default,
    ]
    _run_blocks_by(
        model,
        partial(
            checkpoint,
            use_reentrant=False,
            context_fn=partial(create_selective_checkpoint_contexts, kept),
        ),
    )
    return model


def whole(model: TinyGPT) -> Forward:
    """Run each block again in the backward, as `torch.utils.checkpoint` does it."""
    from torch.utils.checkpoint import checkpoint

    _run_blocks_by(model, partial(checkpoint, use_reentrant=False))
    return model


def deepspeed(model: TinyGPT) -> Forward:
    """Run each block again by DeepSpeed's checkpointing, with its inputs where they were made."""
    return _deepspeed(model, inputs_on_host=False)


def deepspeed_on_host(model: TinyGPT) -> Forward:
    """Run each block again by DeepSpeed's checkpointing, with its inputs on the host.

    DeepSpeed 0.19.8 loses inputs that are on the host already, so this fails on the CPU.
    """
    return _deepspeed(model, inputs_on_host=True)


def _deepspeed(model: TinyGPT, *, inputs_on_host: bool) -> Forward:
    library: Any = import_module("deepspeed")
    # Its own wrapper of the process group, which its checkpointing asks for ranks.
    library.comm.init_distributed(dist_backend="gloo", verbose=False)
    checkpointing = library.checkpointing
    checkpointing.configure(None, checkpoint_in_cpu=inputs_on_host)
    _run_blocks_by(model, checkpointing.checkpoint)
    return model


def _run_blocks_by(model: TinyGPT, run: Callable[..., Any]) -> None:
    import torch

    class By(torch.nn.Module):
        """Runs a block by a function."""

        def __init__(self, block: torch.nn.Module) -> None:
            super().__init__()
            self.block = block

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            found: torch.Tensor = run(self.block, x)
            return found

    model.blocks = torch.nn.ModuleList(By(block) for block in model.blocks)


FORWARDS: Mapping[str, Callable[[TinyGPT], Forward]] = {
    "plain, save_on_cpu": save_on_cpu,
    "plain, checkpoint": whole,
    "plain, selective": selective,
    "deepspeed, checkpoint": deepspeed,
    "deepspeed, checkpoint on host": deepspeed_on_host,
}
"""By the name that a system has in trained_apart."""
