"""Models that keep parameters in several dtypes on purpose, as transformers, PEFT and bitsandbytes
make them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

import torch
from torch import nn
from torch.nn import functional

from support.small_models import Task, tokens

__all__ = ["MIXED", "Mixed"]

WIDTH = 64


class Mixed(Task):
    """A 16-bit base with rotary fp32 buffers, and in fp32 norms, a router, T5's `wo` and adapters
    on frozen codes.
    """

    inv_freq: torch.Tensor
    mean: torch.Tensor

    def __init__(self, head: torch.dtype = torch.bfloat16, *, keeps_mean: bool = True) -> None:
        super().__init__()
        dtype = torch.bfloat16
        self.keeps_mean = keeps_mean
        self.embed = nn.Embedding(32, WIDTH).to(dtype)
        self.norms = nn.ParameterList(nn.Parameter(torch.ones(WIDTH)) for _ in range(2))
        self.query = nn.Linear(WIDTH, WIDTH, bias=False).to(dtype)
        self.wi = nn.Linear(WIDTH, 2 * WIDTH).to(dtype)
        self.wo = nn.Linear(2 * WIDTH, WIDTH, bias=False)
        self.router = nn.Linear(WIDTH, 2, bias=False)
        self.codes = nn.Parameter(
            torch.randint(-127, 127, (WIDTH, WIDTH), dtype=torch.int8), requires_grad=False
        )
        self.scales = nn.Parameter(
            torch.full((WIDTH,), 2.0**-9).to(torch.float8_e5m2), requires_grad=False
        )
        self.mask = nn.Parameter(torch.rand(WIDTH) < 0.9, requires_grad=False)
        self.down = nn.Parameter(torch.randn(WIDTH, 4) / 8)
        self.up = nn.Parameter(torch.zeros(4, WIDTH))
        self.empty = nn.Parameter(torch.zeros(0, 3))
        self.head = nn.Linear(WIDTH, 32, bias=False).to(head)
        self.register_buffer(
            "inv_freq", 1 / 10_000 ** (torch.arange(0, WIDTH, 2) / WIDTH), persistent=False
        )
        self.register_buffer("mean", torch.zeros(WIDTH))

    def batch(self, seed: int) -> torch.Tensor:
        return tokens(seed, (3, 12))

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        x = self.embed(batch)
        dtype = x.dtype
        angles = (
            torch.arange(4096, 4096 + x.shape[1], device=x.device)[:, None] * self.inv_freq
        ).repeat(1, 2)
        query = self.query(self.norm(x, 0))
        turned = torch.cat([-query[..., WIDTH // 2 :], query[..., : WIDTH // 2]], -1)
        x = x + query * angles.cos().to(dtype) + turned * angles.sin().to(dtype)
        gate = self.router(x.float()).softmax(-1)[..., :1].to(dtype)
        y = functional.gelu(self.wi(self.norm(x, 1)))
        x = x + gate * self.wo(y.to(self.wo.weight.dtype)).to(dtype)
        weight = self.codes.to(dtype) * self.scales.to(dtype)[:, None] * self.mask
        x = x + functional.linear(x, weight) + (x.float() @ self.down @ self.up).to(dtype)
        if self.keeps_mean:
            self.mean.lerp_(x.detach().float().mean((0, 1)), 0.1)
        logits = self.head((x - self.mean.to(dtype)).to(self.head.weight.dtype)).float()
        return functional.cross_entropy(logits[:, :-1].flatten(0, 1), batch[:, 1:].flatten())

    def norm(self, x: torch.Tensor, which: int) -> torch.Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        return torch.as_tensor((self.norms[which] * wide).to(x.dtype))


MIXED: Mapping[str, Callable[[], Task]] = MappingProxyType(
    {
        "mixed": Mixed,
        "mixed with fp16": lambda: Mixed(head=torch.float16),
    }
)
