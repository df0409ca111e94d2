"""Settings of other libraries, turned into the engine's: pure data in, pure data out."""

from __future__ import annotations

from infinity_engine.migration.deepspeed import (
    Fate,
    Migration,
    is_deepspeed,
    migrate_deepspeed,
    read_json,
)
from infinity_engine.migration.schedules import Warmup

__all__ = [
    "Fate",
    "Migration",
    "Warmup",
    "is_deepspeed",
    "migrate_deepspeed",
    "read_json",
]
