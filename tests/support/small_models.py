"""Small models of every kind that the engine must train exactly, each with batches and a loss."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import nn
from torch.nn import functional

__all__ = ["MODELS", "Task"]


class Task(nn.Module, ABC):
    """A model that returns its loss for a batch that it draws from a seed."""

    @abstractmethod
    def batch(self, seed: int) -> torch.Tensor:
        """Return the input of one micro-batch."""

    @abstractmethod
    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        """Return the loss."""


def tokens(seed: int, shape: tuple[int, ...], vocabulary: int = 32) -> torch.Tensor:
    return torch.randint(vocabulary, shape, generator=torch.Generator().manual_seed(seed))


def noise(seed: int, shape: tuple[int, ...]) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


class Attention(nn.Module):
    # No bias of keys: its gradient is zero but for rounding, and Adam makes steps of that.
    def __init__(self, width: int, heads: int, *, bias: bool = True) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=bias)

    def forward(self, x: torch.Tensor, causal: bool = True) -> torch.Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        scores = q @ k.transpose(-1, -2) / k.shape[-1] ** 0.5
        if causal:
            scores = scores.masked_fill(
                torch.ones(length, length, dtype=torch.bool, device=x.device).triu(1), float("-inf")
            )
        return torch.as_tensor(
            self.out((scores.softmax(-1) @ v).transpose(1, 2).reshape(batch, length, width))
        )


class GPT(Task):
    """Learned positions, LayerNorm, tied embedding, checkpointed blocks where asked."""

    def __init__(self, checkpointing: str | None = None) -> None:
        super().__init__()
        self.checkpointing = checkpointing
        self.embed = nn.Embedding(32, 24)
        self.position = nn.Parameter(torch.zeros(12, 24))
        self.blocks = nn.ModuleList(
            nn.ModuleDict(
                {
                    "a": nn.LayerNorm(24),
                    "attention": Attention(24, 4),
                    "b": nn.LayerNorm(24),
                    "mlp": nn.Sequential(nn.Linear(24, 96), nn.GELU(), nn.Linear(96, 24)),
                }
            )
            for _ in range(3)
        )
        self.scale = nn.Parameter(torch.tensor(1.0))
        self.empty = nn.Parameter(torch.zeros(0, 3))

    def batch(self, seed: int) -> torch.Tensor:
        return tokens(seed, (3, 12))

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        x = self.embed(batch) + self.position
        for block in self.blocks:
            if self.checkpointing is None:
                x = self.run(block, x)
            else:
                from torch.utils.checkpoint import checkpoint

                x = checkpoint(self.run, block, x, use_reentrant=self.checkpointing == "reentrant")
        logits = functional.linear(x * self.scale, self.embed.weight)
        return functional.cross_entropy(
            logits[:, :-1].flatten(0, 1).float(), batch[:, 1:].flatten()
        )

    def run(self, block: Any, x: torch.Tensor) -> torch.Tensor:
        x = x + block["attention"](block["a"](x))
        return x + torch.as_tensor(block["mlp"](block["b"](x)))


class Llama(Task):
    """RMS norms, gated feed-forward, no biases, an output layer of its own, a frozen embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(32, 24)
        self.embed.weight.requires_grad_(False)
        self.norms = nn.ParameterList(nn.Parameter(torch.ones(24)) for _ in range(4))
        self.attention = nn.ModuleList(Attention(24, 4, bias=False) for _ in range(2))
        self.gate = nn.ModuleList(nn.Linear(24, 64, bias=False) for _ in range(2))
        self.up = nn.ModuleList(nn.Linear(24, 64, bias=False) for _ in range(2))
        self.down = nn.ModuleList(nn.Linear(64, 24, bias=False) for _ in range(2))
        self.head = nn.Linear(24, 32, bias=False)

    def batch(self, seed: int) -> torch.Tensor:
        return tokens(seed, (3, 10))

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        x = self.embed(batch)
        for layer in range(2):
            x = x + self.attention[layer](self.norm(x, 2 * layer))
            y = self.norm(x, 2 * layer + 1)
            x = x + self.down[layer](functional.silu(self.gate[layer](y)) * self.up[layer](y))
        return functional.cross_entropy(
            self.head(x)[:, :-1].flatten(0, 1).float(), batch[:, 1:].flatten()
        )

    def norm(self, x: torch.Tensor, which: int) -> torch.Tensor:
        return torch.as_tensor(
            x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.norms[which]
        )


class MixtureOfExperts(Task):
    """Each batch goes to one of four experts: the others get no gradient in that step."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, 48)
        self.experts = nn.ModuleList(nn.Linear(48, 48) for _ in range(4))
        self.last = nn.Linear(48, 1)

    def batch(self, seed: int) -> torch.Tensor:
        return noise(seed, (6, 16)) + seed % 4

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        expert = self.experts[int(batch.float().mean().round().item()) % 4]
        x = torch.relu(self.first(batch.to(self.first.weight.dtype)))
        return torch.as_tensor(self.last(torch.relu(expert(x)))).float().pow(2).mean()


class ConvNet(Task):
    """Convolutions, batch norm with its buffers, pooling."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1, bias=False),
            nn.BatchNorm2d(8),
            nn.ReLU(),
            nn.Conv2d(8, 16, 3, stride=2),
            nn.ReLU(),
        )
        self.head = nn.Linear(16, 4)

    def batch(self, seed: int) -> torch.Tensor:
        return noise(seed, (4, 3, 9, 9))

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        x = self.layers(batch.to(self.head.weight.dtype)).mean((2, 3))
        return torch.as_tensor(self.head(x)).float().logsumexp(-1).pow(2).mean()


class EncoderDecoder(Task):
    """Two halves that share an embedding, and a decoder block that is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(32, 24)
        self.encoder = Attention(24, 2)
        self.decoder = Attention(24, 2)
        self.mix = nn.Bilinear(24, 24, 24)

    def batch(self, seed: int) -> torch.Tensor:
        return tokens(seed, (3, 16))

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        source, target = self.embed(batch[:, :8]), self.embed(batch[:, 8:])
        memory = self.encoder(source, causal=False)
        x = self.decoder(self.decoder(target) + memory)
        logits = functional.linear(self.mix(x, memory.contiguous()), self.embed.weight)
        return functional.cross_entropy(logits.flatten(0, 1).float(), batch[:, 8:].flatten())


MODELS: Mapping[str, Callable[[], Task]] = MappingProxyType(
    {
        "gpt": GPT,
        "gpt, checkpointed": lambda: GPT("without reentry"),
        "gpt, checkpointed reentrantly": lambda: GPT("reentrant"),
        "llama": Llama,
        "mixture of experts": MixtureOfExperts,
        "conv net": ConvNet,
        "encoder-decoder": EncoderDecoder,
    }
)
