"""`init_context`, `load_into`, `load_pretrained`: doors to models larger than the host's memory.

Import torch, native code and the rest of the engine when they are used, and not before.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from infinity_engine.config import EngineConfig, RanksConfig
from infinity_engine.errors import ConfigError
from infinity_engine.machine.packages import require_torch
from infinity_engine.plan import Budget, ResolvedBudget
from infinity_engine.units import parse_bytes

if TYPE_CHECKING:
    import torch

    from infinity_engine.building.built import BuiltModel
    from infinity_engine.compact import CompactKind
    from infinity_engine.progress import Progress

__all__ = ["init_context", "load_into", "load_pretrained"]


@contextmanager
def init_context(
    *,
    budget: Budget | Mapping[str, object],
    cache: int | str | None = None,
    ranks: RanksConfig | Mapping[str, object] | None = None,
    progress: Callable[[Progress], object] | None = None,
) -> Iterator[BuiltModel]:
    """Build the model in the body, its parameters going to the drives: same seed, same bits.

    `budget` is that of `initialize`, with one directory of NVMe at least; the device's part is not
    used. `cache` is how many bytes, as a number or text such as "2GiB", parameters take of the
    host's budget while the model is built: by default a quarter of what I/O leaves of it. Only what
    one call needs, or other tensors show, is more; never more than the budget. `progress`, such
    as print, is called now and then with the bytes that were written to the drives.

    Of several ranks, all build the same, each with its part of the budget, and keep a shard of each
    parameter: `ranks` is what `initialize` takes under that name.

    Raises:
        MissingDependencyError: torch is missing or older than the engine supports.
        ConfigError: the budget names no directory, or one that cannot be used; or the cache is no
            size.
        CapacityError: the drives or the host cannot hold what they would have to; also in the body,
            where it happens.
        CollectiveError: the ranks do not build the same, or one of them has failed; also in the
            body.
        TransferError: a drive failed, in the body or at its end.
    """
    # Before torch is imported, so that the error names the extra to install.
    require_torch("infinity_engine.init_context")
    size = None if cache is None else parse_bytes(cache, field="cache of init_context")
    chosen = _ranks(ranks)
    # Here and not above: importing the package must not import torch.
    from infinity_engine.building.building import building
    from infinity_engine.progress import ProgressReporter
    from infinity_engine.ranks.ranks import together

    reporter = ProgressReporter(progress)
    with (
        together(chosen, partial(_resolved, budget)) as (others, mine),
        building(mine, size, reporter, others) as built,
    ):
        yield built


def load_into(
    model: torch.nn.Module,
    directory: str | os.PathLike[str],
    budget: Budget | Mapping[str, object],
    *,
    ranks: RanksConfig | Mapping[str, object] | None = None,
    progress: Callable[[Progress], object] | None = None,
) -> BuiltModel:
    """Fill a model on the meta device from a directory's safetensors files, by way of the drives.

    The parameters stay the objects that they are, and their values go piece by piece from the files
    to the budget's directories; buffers get ordinary memory. A number is converted where the model
    has another dtype than the file. `progress`, such as print, is called now and then with the
    bytes that are there.

    Of several ranks, each reads its slices and keeps them, in its part of the budget: `ranks` is
    what `initialize` takes under that name.

    Raises:
        MissingDependencyError: torch is missing or older than the engine supports.
        CollectiveError: the ranks do not load the same, or one of them has failed. The model is as
            it was.
        ConfigError: a name is missing or not the model's, a shape is another one; the budget names
            no directory, or one that cannot be used. The model is as it was.
        CapacityError: the drives cannot hold the model. The model is as it was.
        TransferError: a drive failed. The model is as it was.
    """
    require_torch("infinity_engine.load_into")
    chosen = _ranks(ranks)
    from infinity_engine.building.loading import load
    from infinity_engine.progress import ProgressReporter
    from infinity_engine.ranks.ranks import together

    with together(chosen, partial(_resolved, budget)) as (others, mine):
        return load(model, directory, mine, ProgressReporter(progress), others)


def load_pretrained(
    directory: str | os.PathLike[str],
    budget: Budget | Mapping[str, object],
    *,
    dtype: torch.dtype | str = "auto",
    model_class: type | None = None,
    compact: CompactKind | str | None = None,
    cache: int | str | None = None,
    ranks: RanksConfig | Mapping[str, object] | None = None,
    progress: Callable[[Progress], object] | None = None,
) -> Any:
    """Return a model of Transformers from its directory, its parameters on the budget's drives.

    Its tensors are those of Transformers' `from_pretrained(directory, dtype=dtype)`: tied weights
    are tied, buffers made, and parameters that a model keeps in fp32 are. "auto" is the dtype that
    the configuration names, else that of the files. `model_class` is a class such as
    transformers.AutoModelForCausalLM; without it, the configuration names the class. Files are
    safetensors, in shards or whole. The network is never asked.

    `compact`, "nf4" or "int8", keeps the weights of linear layers in 4 or 8 bits: each is rounded
    as it is read, and the drives have the rounded one alone. What Transformers leaves whole when it
    quantizes stays so: output layers, tied weights, embeddings. A directory that bitsandbytes has
    quantized to nf4 is compact without it.

    The model is in eval() mode and has no values until `initialize` takes it. `budget`, `cache`,
    `ranks` and `progress` are those of `init_context`. A parameter that is converted on the way
    needs room for both of its forms at once.

    Raises:
        MissingDependencyError: torch or Transformers is missing or older than this needs.
        ConfigError: the directory is not there, or has no such model; shards or tensors are missing
            or do not fit; the architecture is unknown. Or the budget names no directory that can
            be used.
        CapacityError: the drives or the host cannot hold what they would have to.
        CollectiveError: the ranks do not load the same, or one of them has failed.
        TransferError: a file or a drive failed.
    """
    require_torch("infinity_engine.load_pretrained")
    from infinity_engine.building.pretrained import Pretrained
    from infinity_engine.compact import CompactKind

    kind = None if compact is None else CompactKind.of(compact, "compact")
    found = Pretrained(directory, dtype, model_class, kind)
    with init_context(budget=budget, cache=cache, ranks=ranks, progress=progress) as built:
        return found.fill(built)


def _ranks(given: RanksConfig | Mapping[str, object] | None) -> RanksConfig:
    if isinstance(given, RanksConfig):
        return given
    # By the engine's settings, so that mistakes are refused in the same words.
    return RanksConfig() if given is None else EngineConfig.from_mapping({"ranks": given}).ranks


def _resolved(given: object) -> ResolvedBudget:
    wanted = given if isinstance(given, Budget) else Budget.from_mapping(given)
    if not wanted.nvme:
        expected = "at least one directory, where the parameters are to live"
        raise ConfigError(field="budget.nvme", value=dict(wanted.nvme), expected=expected)
    from infinity_engine.machine.capacity import probe_capacity

    # Building uses no device, so a budget need not name one.
    without_device = Budget(host=wanted.host, nvme=wanted.nvme)
    return without_device.resolve(probe_capacity(wanted.nvme))
