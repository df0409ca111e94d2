"""A small byte-level GPT and real text to train it on, for the demo and the benches.

Plain PyTorch, nothing of ours.
"""

from __future__ import annotations

import platform
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

__all__ = ["VOCABULARY", "Block", "TinyGPT", "batches", "corpus", "fast_precision"]

VOCABULARY = 256


def fast_precision() -> str:
    """Return "bf16", or "fp32" where the CPU makes products in bf16 many times slower: an x86
    without AVX-512.
    """
    has_wide = "AVX512" in torch.backends.cpu.get_cpu_capability()
    return "bf16" if has_wide or platform.machine() != "x86_64" else "fp32"


class Block(nn.Module):
    """One pre-norm transformer block: causal attention, then a feed-forward of four times the
    width.

    With `recomputes`, it keeps what went into each of the two for the backward, and computes the
    rest again.
    """

    def __init__(self, width: int, heads: int, *, recomputes: bool = False) -> None:
        super().__init__()
        self.heads = heads
        self.recomputes = recomputes
        self.before_attention = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.before_mlp = nn.LayerNorm(width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map (batch, length, width) to the same shape."""
        for half in (self._attended, self._fed_forward):
            x = (
                torch.as_tensor(checkpoint(half, x, use_reentrant=False))
                if self.recomputes
                else half(x)
            )
        return x

    def _attended(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        qkv = self.qkv(self.before_attention(x)).view(
            batch, length, 3, self.heads, width // self.heads
        )
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        return x + torch.as_tensor(self.out(mixed.transpose(1, 2).reshape(batch, length, width)))

    def _fed_forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.as_tensor(self.mlp(self.before_mlp(x)))


class TinyGPT(nn.Module):
    """A GPT over bytes; the output layer shares the embedding's weight.

    See Block for `recomputes`.
    """

    def __init__(
        self, *, width: int, depth: int, heads: int, context: int, recomputes: bool = False
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.position = nn.Embedding(context, width)
        self.blocks = nn.ModuleList(
            Block(width, heads, recomputes=recomputes) for _ in range(depth)
        )
        self.norm = nn.LayerNorm(width)
        nn.init.normal_(self.embedding.weight, std=0.02)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the logits of the next byte at every position."""
        x = self.embedding(tokens) + self.position.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return functional.linear(self.norm(x), self.embedding.weight)

    def loss(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Return the mean cross entropy of predicting `targets`."""
        return functional.cross_entropy(self(inputs).flatten(0, 1), targets.flatten())


def corpus(root: Path) -> torch.Tensor:
    """Return the bytes of the project's own texts: English prose that is there wherever the project
    is.
    """
    texts = [
        path.read_bytes()
        for path in [root / "LICENSE", *sorted(root.glob("**/*.md"))]
        if _is_ours(root, path)
    ]
    return torch.frombuffer(bytearray(b"\n".join(texts)), dtype=torch.uint8).long()


def batches(
    text: torch.Tensor, *, sequences: int, length: int, seed: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield (inputs, targets) drawn at random places of `text`, the same ones for the same seed."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        starts = torch.randint(len(text) - length - 1, (sequences,), generator=generator).tolist()
        rows = torch.stack([text[start : start + length + 1] for start in starts])
        yield rows[:, :-1], rows[:, 1:]


def _is_ours(root: Path, path: Path) -> bool:
    return not any(part.startswith(".") or part == "build" for part in path.relative_to(root).parts)
