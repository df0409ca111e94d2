"""Settings of other libraries, turned into the engine's: pure data in, pure data out."""

from __future__ import annotations

from infinity_engine.migration.deepspeed import (
    Fate,
    MigratedKey,
    Migration,
    is_deepspeed,
    migrate_deepspeed,
    read_json,
)
from infinity_engine.migration.schedules import Warmup

__all__ = [
    "Fate",
    "MigratedKey",
    "Migration",
    "Warmup",
    "is_deepspeed",
    "migrate_deepspeed",
    "read_json",
]
