"""What the commands of `infinity checkpoint` do: read checkpoints, and print.

Memory stays within about 100 MiB, whatever the size of the checkpoint.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType

import numpy as np
from rich.table import Table
from rich.text import Text

from deepnvme.cli.report import Output
from deepnvme.memory.arrays import ITEMSIZES
from infinity_engine.checkpoint.directory import LATEST, CheckpointDirectory
from infinity_engine.checkpoint.exchange.dcp_export import export_dcp
from infinity_engine.checkpoint.exchange.origins import open_foreign
from infinity_engine.checkpoint.exchange.torch_files import OpenFiles
from infinity_engine.checkpoint.export import Dtype, export
from infinity_engine.checkpoint.manifest import MANIFEST, Kind, Manifest, SavedTensor
from infinity_engine.checkpoint.reader import CheckpointReader
from infinity_engine.checkpoint.rewriting import import_foreign, reshard
from infinity_engine.checkpoint.streams import SavedStream
from infinity_engine.errors import ConfigError, DamagedCheckpoint, IncompleteCheckpoint
from infinity_engine.units import format_bytes

__all__ = ["COMMANDS"]

_COMPARED_BYTES = 4 << 20  # of a stream at once, from each of the two checkpoints


def _resolved(path: Path, tag: str | None) -> Path:
    """Return the checkpoint that is meant: `path` itself, or that tag of it."""
    return (
        path
        if tag is None and (path / MANIFEST).exists()
        else CheckpointDirectory(path).resolve(tag or LATEST)
    )


def _inspect(options: argparse.Namespace) -> int:
    with CheckpointReader(_resolved(options.path, options.tag)) as reader:
        manifest = reader.manifest
        if options.json:
            print(json.dumps(_as_json(reader.path, manifest), indent=2))
            return 0
        console = Output()
        facts = Table.grid(padding=(0, 2))
        for label, value in _facts(reader.path, manifest):
            facts.add_row(Text(label, style="dim"), Text(value))
        console.print(facts)
        if options.tensors:
            console.print(_tensor_table(manifest.tensors))
    return 0


def _facts(path: Path, manifest: Manifest) -> Iterator[tuple[str, str]]:
    yield "checkpoint", str(path)
    yield "step", f"{manifest.step:,}"
    yield (
        "written",
        f"{manifest.created}, by {manifest.ranks} rank{'s' if manifest.ranks > 1 else ''}",
    )
    yield (
        "bytes",
        f"{format_bytes(sum(file.nbytes for file in manifest.files))} in {len(manifest.files)} "
        "files",
    )
    for kind in Kind:
        chosen = [tensor for tensor in manifest.tensors if tensor.kind is kind]
        if chosen:
            yield (
                kind.value,
                f"{len(chosen):,} tensors, {sum(tensor.numel for tensor in chosen):,} elements",
            )
    if manifest.left_out:
        elements = sum(tensor.numel for tensor in manifest.left_out)
        yield (
            "left out",
            f"the values of {len(manifest.left_out):,} frozen tensors, {elements:,} elements",
        )
    for key, value in sorted(manifest.run.items()):
        yield key, value if isinstance(value, str) else json.dumps(value)
    if manifest.objects:
        yield "objects", ", ".join(sorted(manifest.objects))


def _tensor_table(tensors: Iterable[SavedTensor]) -> Table:
    table = Table(box=None, pad_edge=False)
    for column in ("tensor", "kind", "dtype", "shape", "streams", "updates"):
        table.add_column(
            column, justify="right" if column == "updates" else "left", overflow="fold"
        )
    for tensor in tensors:
        shape = " x ".join(map(str, tensor.shape)) or "one number"
        table.add_row(
            Text(" = ".join((tensor.name, *tensor.aliases))),
            tensor.kind.value,
            tensor.dtype,
            shape,
            ", ".join(tensor.streams) or "left out",
            f"{tensor.steps:,}",
        )
    return table


def _as_json(path: Path, manifest: Manifest) -> dict[str, object]:
    return {
        "schema": 1,
        "path": str(path),
        "tag": manifest.tag,
        "step": manifest.step,
        "created": manifest.created,
        "ranks": manifest.ranks,
        "bytes": sum(file.nbytes for file in manifest.files),
        "run": dict(manifest.run),
        "objects": sorted(manifest.objects),
        "tensors": [
            {
                "name": tensor.name,
                "kind": tensor.kind.value,
                "dtype": tensor.dtype,
                "shape": tensor.shape,
                "streams": dict(tensor.streams),
                "updates": tensor.steps,
                "aliases": tensor.aliases,
                "left_out": tensor.left_out is not None,
            }
            for tensor in manifest.tensors
        ],
    }


def _verify(options: argparse.Namespace) -> int:
    path = _resolved(options.path, options.tag)
    try:
        with CheckpointReader(path) as reader:
            return _verified(reader)
    # Damage is the answer of this command, and no error of it.
    except (DamagedCheckpoint, IncompleteCheckpoint) as damage:
        print(damage)
        return 1


def _verified(reader: CheckpointReader) -> int:
    read: list[int] = []
    damaged = 0
    for damage in reader.verify(read.append):
        damaged += 1
        # Damage outside of all tensors is in the header.
        inside = ", ".join(damage.tensors) or "its header"
        print(
            f"{damage.file}: {damage.flaw}"
            if damage.flaw
            else f"{damage.file}: damaged within the MiB at offset {damage.offset}: {inside}"
        )
    # Named only: other files do no harm.
    for name in reader.strange_files():
        print(f"{name}: not a file of this checkpoint")
    if damaged:
        print(
            f"{damaged} of the checkpoint's MiB or files are damaged: load an earlier one, and "
            "check the drive"
        )
        return 1
    # Raises where slices do not cover a stream: caught in _verify().
    reader.check_slices()
    print(
        f"{reader.path}: {format_bytes(sum(read))} in {len(reader.manifest.files)} files, all "
        "as written"
    )
    left_out = len(reader.manifest.left_out)
    if left_out:
        print(f"{left_out:,} frozen tensors were left out of it: there is nothing to read of them")
    return 0


def _diff(options: argparse.Namespace) -> int:
    with (
        CheckpointReader(_resolved(options.path, options.tag)) as one,
        CheckpointReader(_resolved(options.other, options.other_tag)) as other,
    ):
        differences = list(_differences(one, other))
    for line in differences:
        print(line)
    print(f"{len(differences)} differences" if differences else "no difference in any tensor")
    return 1 if differences else 0


def _differences(one: CheckpointReader, other: CheckpointReader) -> Iterator[str]:
    mine, theirs = (
        {tensor.name: tensor for tensor in reader.manifest.tensors} for reader in (one, other)
    )
    # In the order of the first, then what only the second has.
    for name in [*mine, *(name for name in theirs if name not in mine)]:
        if name not in mine or name not in theirs:
            yield f"{name}: only in {(one if name in mine else other).path}"
            continue
        first, second = mine[name], theirs[name]
        if (first.shape, dict(first.streams)) != (second.shape, dict(second.streams)):
            yield f"{name}: {_kind_of(first)} in {one.path}, {_kind_of(second)} in {other.path}"
            continue
        if first.steps != second.steps:
            yield f"{name}: {first.steps} updates in {one.path}, {second.steps} in {other.path}"
        if first.left_out != second.left_out:
            yield f"{name}: other values, by their checksums; both leave them out"
        for stream in first.streams:
            yield from _stream_difference(one, other, first.stream(stream))


def _kind_of(tensor: SavedTensor) -> str:
    if tensor.left_out is not None:
        return f"shape {tensor.shape}, left out"
    return (
        f"shape {tensor.shape} with "
        f"{', '.join(f'{name} {dtype}' for name, dtype in tensor.streams.items())}"
    )


def _stream_difference(
    one: CheckpointReader, other: CheckpointReader, stream: SavedStream
) -> Iterator[str]:
    """Say how many elements of a stream differ, and for fp32 by how much at most."""
    width = ITEMSIZES[stream.dtype]
    step = _COMPARED_BYTES // width
    unlike, most = 0, 0.0
    for first in range(0, stream.numel, step):
        numel = min(step, stream.numel - first)
        # As bytes: numbers would make NaN differ from itself, and -0.0 equal 0.0.
        mine, theirs = np.empty((numel, width), np.uint8), np.empty((numel, width), np.uint8)
        one.read(stream, first, mine)
        other.read(stream, first, theirs)
        differ = (mine != theirs).any(axis=1)
        unlike += int(differ.sum())
        if stream.dtype == "F32" and differ.any():
            # Infinity less infinity is NaN, which nanmax leaves out.
            with np.errstate(invalid="ignore"):
                gap = np.abs(mine.view(np.float32) - theirs.view(np.float32))
            most = max(most, float(np.nanmax(gap)) if not np.isnan(gap).all() else 0.0)
    if unlike:
        by = f", by {most:.3g} at most" if stream.dtype == "F32" else ""
        count = f"{unlike:,} of {stream.numel:,} elements"
        yield f"{stream.parameter}: {count} of {stream.name} differ{by}"


def _export(options: argparse.Namespace) -> int:
    is_dcp = options.format == "dcp"
    dtype = Dtype(options.dtype or ("fp32" if is_dcp else "model"))
    write = export_dcp if is_dcp else export
    with CheckpointReader(_resolved(options.path, options.tag)) as reader:
        files = write(reader, options.to, dtype=dtype, trainable_only=options.trainable_only)
        left_out = len(reader.manifest.left_out)
    nbytes = format_bytes(sum(file.stat().st_size for file in files))
    print(f"{options.to}: {len(files)} files, {nbytes}")
    if left_out:
        print(f"only what was trained: the checkpoint leaves out {left_out:,} frozen tensors")
    return 0


def _reshard(options: argparse.Namespace) -> int:
    with CheckpointReader(_resolved(options.path, options.tag)) as reader:
        directory = CheckpointDirectory(options.to)
        path = reshard(reader, directory, options.ranks, tag=options.to_tag)
        # Read before the reader is closed.
        before = reader.manifest.ranks
    print(f"{path}: as {options.ranks} ranks would have saved it, not {before}")
    return 0


def _import(options: argparse.Namespace) -> int:
    names = None
    if options.names is not None:
        try:
            text = options.names.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            expected = f"a file of names in UTF-8 ({error.reason} at byte {error.start})"
            raise ConfigError(
                field="--names", value=str(options.names), expected=expected
            ) from error
        names = [line for line in map(str.strip, text.splitlines()) if line]
    with OpenFiles() as files:
        foreign = open_foreign(options.path, files, origin=options.origin, names=names)
        # The files are read twice then: once to check them, once to import.
        if not options.no_check:
            files.check()
        path = import_foreign(
            foreign, CheckpointDirectory(options.to), options.ranks, tag=options.to_tag
        )
    elements = sum(tensor.numel for tensor in foreign.tensors)
    print(f"{path}: {foreign.format}, step {foreign.step:,}")
    print(f"{len(foreign.tensors):,} tensors, {elements:,} elements")
    print("not carried over:")
    for left in foreign.left_behind:
        print(f"  {left}")
    return 0


COMMANDS: Mapping[str, Callable[[argparse.Namespace], int]] = MappingProxyType(
    {
        "inspect": _inspect,
        "verify": _verify,
        "diff": _diff,
        "export": _export,
        "import": _import,
        "reshard": _reshard,
    }
)
"""What each command does; it returns the exit status."""
