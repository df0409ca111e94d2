"""Optimizers without torch: update rules, the subgroups they work on, and their kernels.

The rules give the same bits on every CPU and GPU, whatever the number of threads. What updates is
imported when it is first used: plans need none of it.
"""

from __future__ import annotations

from importlib import import_module
from types import MappingProxyType
from typing import TYPE_CHECKING

from infinity_engine.optim.formats import FloatFormat, Formats, Master, Moments, Values
from infinity_engine.optim.rules import SGD, Adagrad, Adam, AdamW, Lion, Rule
from infinity_engine.optim.subgroup import (
    NORM_BLOCK,
    Segment,
    Subgroup,
    SubgroupState,
    cut_into_subgroups,
)

if TYPE_CHECKING:
    from infinity_engine.optim.from_torch import check_rules, missing_states, rules_of
    from infinity_engine.optim.host import HostKernels, SummedMemory, Sums
    from infinity_engine.optim.records import Update, update_records
    from infinity_engine.optim.statistics import GradientNorm, GradientSums, gradient_factor
    from infinity_engine.optim.threads import UpdateThreads

__all__ = [
    "NORM_BLOCK",
    "SGD",
    "Adagrad",
    "Adam",
    "AdamW",
    "FloatFormat",
    "Formats",
    "GradientNorm",
    "GradientSums",
    "HostKernels",
    "Lion",
    "Master",
    "Moments",
    "Rule",
    "Segment",
    "Subgroup",
    "SubgroupState",
    "SummedMemory",
    "Sums",
    "Update",
    "UpdateThreads",
    "Values",
    "check_rules",
    "cut_into_subgroups",
    "gradient_factor",
    "missing_states",
    "rules_of",
    "update_records",
]

_MODULES = MappingProxyType(
    {
        "GradientNorm": "statistics",
        "GradientSums": "statistics",
        "HostKernels": "host",
        "SummedMemory": "host",
        "Sums": "host",
        "Update": "records",
        "UpdateThreads": "threads",
        "gradient_factor": "statistics",
        "check_rules": "from_torch",
        "missing_states": "from_torch",
        "rules_of": "from_torch",
        "update_records": "records",
    }
)

# With a __getattr__, type checkers would take any name for one of ours.
if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        if name not in _MODULES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        globals()[name] = getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
        return globals()[name]
