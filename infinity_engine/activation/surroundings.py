"""`Surroundings`: what a block's run depends on beside its arguments, for a second run.

Reads and sets global state of torch; knows nothing of what is saved. Called by `BlockCall`.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from infinity_engine.activation.blocks import members_of

__all__ = ["Surroundings"]

_ATTENTION = ("flash", "mem_efficient", "math", "cudnn", "overrideable")


class _Autocast(NamedTuple):
    enabled: bool
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What a block's run depends on beside its arguments: random state, autocast, torch's default
    device, the implementations of attention that torch may use, and which modules train.
    """

    random: _Random
    device: torch.device
    autocast: Mapping[str, _Autocast]
    caches_casts: bool
    default_device: torch.device
    attention: _Attention
    modes: Sequence[tuple[torch.nn.Module, bool]]

    @classmethod
    def now(cls, modules: Sequence[torch.nn.Module], device: torch.device) -> Surroundings:
        """Return those of a call of these modules that computes on `device`."""
        kinds = dict.fromkeys(("cpu", device.type))
        return cls(
            random=_Random.now(device),
            device=device,
            autocast={
                kind: _Autocast(torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
                for kind in kinds
                if torch.amp.is_autocast_available(kind)
            },
            caches_casts=torch.is_autocast_cache_enabled(),
            default_device=torch.get_default_device(),
            attention=_Attention.now(),
            modes=[
                (inner, inner.training)
                for module in modules
                for inner in members_of(module).modules.values()
            ],
        )

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Have these in the body, and what was there before after it.

        Random state and the kernels of attention are the process's: no other thread may use them in
        the meantime.
        """
        with ExitStack() as stack:
            stack.callback(_Random.now(self.device).restore, self.device)
            self.random.restore(self.device)
            for kind, (enabled, dtype) in self.autocast.items():
                stack.enter_context(
                    torch.autocast(
                        kind, dtype=dtype, enabled=enabled, cache_enabled=self.caches_casts
                    )
                )
            if self.default_device != torch.get_default_device():
                stack.enter_context(self.default_device)
            attention = _Attention.now()
            if attention != self.attention:
                stack.callback(attention.restore)
                self.attention.restore()
            stack.callback(_set_modes, [(module, module.training) for module, _ in self.modes])
            _set_modes(self.modes)
            yield


def _set_modes(modes: Sequence[tuple[torch.nn.Module, bool]]) -> None:
    # A module comes before those inside it, which train() sets as well.
    for module, trains in modes:
        if module.training is not trains:
            module.train(trains)


class _Attention(NamedTuple):
    """The kernels of attention that torch may use on any device, and their order, as `sdpa_kernel`
    sets them. A release of torch may lack some.
    """

    allowed: Mapping[str, bool]
    order: Sequence[int]

    @classmethod
    def now(cls) -> _Attention:
        own: Any = torch._C
        return cls(
            {
                name: getattr(own, f"_get_{name}_sdp_enabled")()
                for name in _ATTENTION
                if hasattr(own, f"_get_{name}_sdp_enabled")
            },
            own._get_sdp_priority_order() if hasattr(own, "_get_sdp_priority_order") else (),
        )

    def restore(self) -> None:
        own: Any = torch._C
        for name, enabled in self.allowed.items():
            getattr(own, f"_set_sdp_use_{name}")(enabled)
        if self.order:
            own._set_sdp_priority_order(self.order)


class _Random(NamedTuple):
    """The state of the generators that a block may draw from; None where there is none."""

    cpu: torch.Tensor
    device: torch.Tensor | None
    python: Any
    numpy: Any

    @classmethod
    def now(cls, device: torch.device) -> _Random:
        own: Any = None if device.type == "cpu" else torch.get_device_module(device)
        numpy = sys.modules.get("numpy")  # a program that does not use it has no state of it
        return cls(
            torch.get_rng_state(),
            own.get_rng_state(device) if hasattr(own, "get_rng_state") else None,
            random.getstate(),
            None if numpy is None else numpy.random.get_state(),
        )

    def restore(self, device: torch.device) -> None:
        torch.set_rng_state(self.cpu)
        if self.device is not None:
            torch.get_device_module(device).set_rng_state(self.device, device)
        random.setstate(self.python)
        if self.numpy is not None:
            sys.modules["numpy"].random.set_state(self.numpy)
