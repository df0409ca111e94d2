"""`Surroundings`: what a block's run depends on beside its arguments, for a second run.

Reads and sets global state of torch; knows nothing of what is saved. Called by `BlockCall`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import torch

__all__ = ["Surroundings"]


class _Autocast(NamedTuple):
    enabled: bool
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What a block's run depends on beside its arguments: random state, autocast, torch's default
    device, and which modules train.
    """

    random: torch.Tensor
    device_random: torch.Tensor | None
    device: torch.device
    autocast: Mapping[str, _Autocast]
    caches_casts: bool
    default_device: torch.device
    modes: Sequence[tuple[torch.nn.Module, bool]]

    @classmethod
    def now(cls, block: torch.nn.Module, device: torch.device) -> Surroundings:
        """Return those of a call of `block` that computes on `device`."""
        kinds = dict.fromkeys(("cpu", device.type))
        return cls(
            random=torch.get_rng_state(),
            device_random=_random_of(device),
            device=device,
            autocast={
                kind: _Autocast(torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
                for kind in kinds
                if torch.amp.is_autocast_available(kind)
            },
            caches_casts=torch.is_autocast_cache_enabled(),
            default_device=torch.get_default_device(),
            modes=[(module, module.training) for module in block.modules()],
        )

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Have these in the body, and what was there before after it."""
        with ExitStack() as stack:
            before, device_before = torch.get_rng_state(), _random_of(self.device)
            stack.callback(torch.set_rng_state, before)
            torch.set_rng_state(self.random)
            if self.device_random is not None and device_before is not None:
                module = torch.get_device_module(self.device)
                stack.callback(module.set_rng_state, device_before, self.device)
                module.set_rng_state(self.device_random, self.device)
            for kind, (enabled, dtype) in self.autocast.items():
                stack.enter_context(
                    torch.autocast(
                        kind, dtype=dtype, enabled=enabled, cache_enabled=self.caches_casts
                    )
                )
            if self.default_device != torch.get_default_device():
                stack.enter_context(self.default_device)
            stack.callback(_set_modes, [(module, module.training) for module, _ in self.modes])
            _set_modes(self.modes)
            yield


def _set_modes(modes: Sequence[tuple[torch.nn.Module, bool]]) -> None:
    # A module comes before those inside it, which train() sets as well.
    for module, trains in modes:
        if module.training is not trains:
            module.train(trains)


def _random_of(device: torch.device) -> torch.Tensor | None:
    """Return the random state of a device, None of the CPU and of one that has none."""
    if device.type == "cpu":
        return None
    module = torch.get_device_module(device)
    if not hasattr(module, "get_rng_state"):
        return None
    state: torch.Tensor = module.get_rng_state(device)
    return state
