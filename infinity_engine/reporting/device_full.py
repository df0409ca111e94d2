"""The error for a device budget without room for modules: each holder's part, and what would fit.

Composes an error; changes nothing. torch's own error stays beside it, as the cause.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import torch

from infinity_engine.accel import Accelerator
from infinity_engine.errors import CapacityError
from infinity_engine.memory.ledger import Usage
from infinity_engine.plan import Tier
from infinity_engine.units import format_bytes, parse_bytes

__all__ = ["no_room_for_modules"]

# torch's own words, as no attribute of its error has the number.
_ASKED = re.compile(r"Tried to allocate ([\d.]+ \w+)")


def no_room_for_modules(
    error: torch.OutOfMemoryError, accelerator: Accelerator, usage: Sequence[Usage]
) -> CapacityError | None:
    """Return the engine's error in place of torch's; None where the budget was not the limit."""
    taken = accelerator.taken_by_torch()
    device = next((tier_usage for tier_usage in usage if tier_usage.tier is Tier.DEVICE), None)
    if taken is None or device is None:
        return None
    # What torch has taken contains what the engine holds of it.
    of_engine = min(device.held, taken)
    of_modules = taken - of_engine
    # torch may word its error in another way one day: then at least one byte was asked for.
    found = _ASKED.search(str(error))
    # torch writes small amounts as "512 bytes".
    words = "1 B" if found is None else found[1].replace("bytes", "B")
    asked = parse_bytes(words, field="torch's words")
    # What the plan has not reserved is left to modules.
    room = format_bytes(max(device.limit - device.reserved, 0))
    return CapacityError(
        tier=Tier.DEVICE.name,
        asked=asked,
        free=max(device.limit - taken, 0),
        limit=device.limit,
        holders=(("the engine", of_engine), ("modules", of_modules)),
        change="compute less at once, with a smaller micro-batch (and accumulation_steps) or "
        "checkpointed modules, or blocks that the engine runs again "
        '(activations={"recompute": "blocks"}): '
        f"this plan leaves modules {room}. Or let the plan leave more: set activation_bytes to "
        f"{format_bytes(of_modules + asked)} at least, or raise the budget's device",
    )
