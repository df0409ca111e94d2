"""Which library saved a checkpoint that is to be imported, and the reader of its format."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from infinity_engine.checkpoint.exchange.dcp import is_dcp, open_dcp
from infinity_engine.checkpoint.exchange.deepspeed import is_deepspeed, open_deepspeed
from infinity_engine.checkpoint.exchange.found import ForeignCheckpoint
from infinity_engine.checkpoint.exchange.torch_files import OpenFiles
from infinity_engine.checkpoint.exchange.torch_states import open_torch
from infinity_engine.errors import IncompleteCheckpoint, UnsupportedCheckpoint

__all__ = ["open_foreign"]


def open_foreign(
    path: Path,
    files: OpenFiles,
    *,
    origin: str | None = None,
    names: Sequence[str] | None = None,
) -> ForeignCheckpoint:
    """Return what another library has saved at `path`; its files are read by way of `files`.

    `origin` is deepspeed, dcp or torch; without it, the files say. `names` are the optimizer's
    parameters in its order, for one that knows them by number.

    Raises:
        IncompleteCheckpoint: nothing is there, or files of it are missing.
        UnsupportedCheckpoint: it is of a kind that is not read.
        DamagedCheckpoint: a file is not what that library writes.
    """
    if not path.exists():
        raise IncompleteCheckpoint(path=str(path), missing=("a file or directory",))
    origin = origin or _origin(path)
    if origin == "deepspeed":
        return open_deepspeed(path, files)
    if origin == "dcp":
        return open_dcp(path, files, names=names)
    return open_torch(path, files, names=names)


def _origin(path: Path) -> str:
    if path.is_file():
        return "torch"
    if is_dcp(path):
        return "dcp"
    if is_deepspeed(path):
        return "deepspeed"
    raise UnsupportedCheckpoint(
        path=str(path),
        entry="the directory",
        flaw="it is neither DeepSpeed's, nor of torch.distributed.checkpoint, nor a file of "
        "torch.save",
        change="Pass the directory that has these files, or --from.",
    )
