"""`Saves`: writes checkpoints of one engine's run, beside training or while the caller waits.

What is small is taken at once; states are written by a thread from where they lie, and an update
waits until what it changes is written (decision 0030). Ranks meet in the checkpoint's directory.
"""

from __future__ import annotations

import json
import shutil
import threading
import time
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from enum import Enum
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from deepnvme import IOQueue, Pool
from infinity_engine.checkpoint import (
    CheckpointDirectory,
    CheckpointReader,
    Manifest,
    SavedFile,
    SavedTensor,
    Slice,
    SliceSink,
)
from infinity_engine.checkpoint.directory import tag_of_step
from infinity_engine.checkpoint.objects import RankObjects, objects_file
from infinity_engine.checkpoint.sharing import LEAST_BYTES, SharedFile, share_runs
from infinity_engine.checkpoint.streams import SHARD
from infinity_engine.checkpoint.writer import FILE_BYTES, shard_names, write_shard
from infinity_engine.engine.checkpoints.autosave import Autosave
from infinity_engine.engine.checkpoints.checkpointing import (
    CheckpointMemory,
    Run,
    Stateful,
    as_transfer,
    check_extra,
    random_state,
    reserve_together,
)
from infinity_engine.engine.checkpoints.frozen import frozen_checksums
from infinity_engine.engine.checkpoints.sources import (
    SmallBuffers,
    StateStreams,
    UntrainedStreams,
    frozen_slices,
    hand_out,
)
from infinity_engine.errors import (
    CollectiveError,
    ConfigError,
    DamagedCheckpoint,
    TransferError,
)
from infinity_engine.kept_errors import again, kept
from infinity_engine.lanes.meter import Wait
from infinity_engine.parameters.parameters import ModelParameter
from infinity_engine.ranks.together import ManyRanks, OneRank
from infinity_engine.storage import Place
from infinity_engine.telemetry import Telemetry
from infinity_engine.update.captured import CapturedStates

__all__ = [
    "FrozenParameters",
    "OnError",
    "PendingGradients",
    "SaveInFlight",
    "SaveReport",
    "SaveRequest",
    "SaveState",
    "Saves",
]

_SMALL_FILES = 64 << 20  # of a drive, for headers, the manifest and state dicts of a checkpoint
_FAILED = ".failed"
_POLL_S = 0.02  # how often rank 0 looks for the parts of other ranks
_ORPHAN_S = 30.0  # for which rank 0 waits for other ranks after its own main thread has ended


class OnError(Enum):
    """What becomes of an error of the drive in a save."""

    RAISE = "raise"  # It is raised: by save, or the next step, save, load or close.
    WARN = "warn"  # It is a warning, and training goes on.


class PendingGradients(Enum):
    """What becomes of a save between the micro-batches of a step."""

    REFUSE = "refuse"  # It raises: a run that goes on from it would lack these gradients.
    LEAVE_OUT = "leave_out"  # It is made, without them.


class FrozenParameters(Enum):
    """What a save does with parameters that nothing trains, such as the base of adapters."""

    SAVE = "save"  # It writes their values.
    # It writes their names and checksums. A load then needs a model that has the values.
    LEAVE_OUT = "leave_out"


class SaveState(Enum):
    """How far a save has come."""

    NONE = "none"  # There was none.
    WRITING = "writing"
    COMMITTED = "committed"
    FAILED = "failed"


@dataclass(frozen=True, kw_only=True, slots=True)
class SaveReport:
    """The newest save of an engine, as far as it has come.

    `seconds` are from its begin to its commit. For `stall_seconds` of them, training waited for it.
    """

    path: Path = Path()
    """The directory with the checkpoints."""
    tag: str = ""
    step: int = -1
    extra: frozenset[str] = frozenset()
    """The names of the further state dicts in it."""
    frozen: FrozenParameters = FrozenParameters.SAVE
    state: SaveState = SaveState.NONE
    nbytes: int = 0
    shared_nbytes: int = 0
    """Of `nbytes`, what was not copied: the file system shares these blocks with the swap file."""
    seconds: float = 0.0
    stall_seconds: float = 0.0
    error: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class SaveRequest:
    """What a call of `Engine.save` asks for."""

    path: Path
    tag: str | None
    extra: Mapping[str, Stateful]
    keep: int | None
    wait: bool
    on_error: OnError
    frozen: FrozenParameters
    steps: int
    """How many updates the run has made."""

    def __post_init__(self) -> None:
        check_extra(self.extra)
        if self.keep is not None and self.keep < 1:
            expected = "how many checkpoints to keep, 1 or more; None: all"
            raise ConfigError(field="keep", value=self.keep, expected=expected)


class SaveInFlight:
    """The save that no call has waited for yet, if there is one, and how the newest one stands.

    Knows neither engine nor model, so that what closes an engine can wait when both are gone.
    """

    def __init__(self, telemetry: Telemetry, ranks: OneRank | ManyRanks) -> None:
        self.save: _Save | None = None
        self._captured = CapturedStates.nothing()
        self._report = SaveReport()
        self._stall_s = 0.0
        self._telemetry = telemetry
        self._ranks = ranks

    @property
    def report(self) -> SaveReport:
        """Return how the newest save stands."""
        save = self.save
        return self._report if save is None else save.report(self._stall_s)

    def begin(self, save: _Save, *, beside: bool) -> None:
        """Let a save go on, `beside` training or not."""
        self._captured = save.captured
        save.start(beside=beside)
        self.save = save

    def note_failure(self, tag: str, step: int, error: Exception) -> None:
        """Note that a save has failed before it could go on beside training."""
        self._report = SaveReport(tag=tag, step=step, state=SaveState.FAILED, error=str(error))

    def forget_stall(self) -> None:
        """Count from nothing: another save begins."""
        self._stall_s = 0.0

    def finish_alone(self) -> None:
        """Wait for the save that is under way without other ranks, which may be gone."""
        save = self.save
        if save is not None:
            if self._ranks.size > 1:
                # This rank's own part first: only waiting for others is given up.
                save.written.wait()
                save.give_up("the run was closed before all ranks had written their parts")
            save.join()
            self.leave(save)

    def wait_for_values(self) -> None:
        """Return when all parameters may change: the user is about to write to some."""
        save = self.save
        if save is not None and not save.written.is_set():
            with self.stalling():
                save.written.wait()

    def wait_for(self, index: int) -> None:
        """Return when what a subgroup has in memory may change."""
        # Without the lock: a subgroup leaves the set and never comes back.
        if self._captured.is_left(index):
            with self.stalling():
                self._captured.wait_for(index)

    def reads(self, place: Place) -> bool:
        """Tell whether what is at this place on the drives has to stay there."""
        return self._captured.reads(place)

    def wait_for_place(self, place: Place) -> None:
        """Return when that may change."""
        with self.stalling():
            self._captured.wait_for_place(place)

    @contextmanager
    def stalling(self) -> Iterator[None]:
        """Count the time of the body as one in which training waits."""
        began = time.perf_counter()
        try:
            with self._telemetry.timed(Wait.CHECKPOINT.value):
                yield
        finally:
            self._stall_s += time.perf_counter() - began

    def leave(self, save: _Save) -> None:
        """Forget a save that has ended but for its report."""
        self._report = save.report(self._stall_s)
        self.save, self._captured = None, CapturedStates.nothing()


class Saves:
    """The saves of one engine, one after another. The engine calls it from one thread."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._ranks = run.ranks
        self.in_flight = SaveInFlight(run.telemetry, self._ranks)
        self.schedule = Autosave(run.ranks)
        self._looked_at = -1  # the step at which the ranks have asked one another
        self._changed = False  # the run has, since the newest save began
        # Asked before an op changes a subgroup.
        run.states.before_changes(self.in_flight)

    def save(self, request: SaveRequest) -> str:
        """Save the run as it is; return the tag. See `Engine.save`."""
        self.finish()
        self.in_flight.forget_stall()
        with self.in_flight.stalling():
            path = str(request.path.resolve())
            told = {
                "path": path,
                "tag": request.tag,
                "keep": request.keep,
                "frozen": request.frozen.value,
            }
            # Ranks that write to different directories would never see each other's parts.
            self._ranks.agree_on("where the checkpoint is saved", told)
            tag = request.tag or tag_of_step(request.steps)
            try:
                save = self._begin(request)
            except (TransferError, CollectiveError) as error:
                self.in_flight.note_failure(tag, request.steps, error)
                if request.on_error is OnError.RAISE:
                    raise
                _warn(tag, error)
                return tag
            # What the queue has lent must be back before training uses the drives again.
            waits = request.wait or save.has_lent_memory
            self.in_flight.begin(save, beside=not waits)
            self._changed = False
        if waits:
            self.finish()
        return save.tag

    def note_change(self) -> None:
        """Note that the run is no longer what the newest save has: an update, a load."""
        self._changed = True

    def has_saved(self, path: Path, extra: Collection[str], frozen: FrozenParameters) -> bool:
        """Tell whether the newest save is there, at `path`, with all that the run is now."""
        last = self.in_flight.report
        wanted = (SaveState.COMMITTED, path, frozenset(extra), frozen)
        return not self._changed and (last.state, last.path, last.extra, last.frozen) == wanted

    def finish_before_last(self) -> None:
        """Do as `finish`, but warn of an error: it must not prevent the run's last save."""
        if self.in_flight.save is not None:
            self.in_flight.save.only_warn()
        self.finish()

    def finish(self) -> None:
        """Wait for the save that is under way, on all ranks; show its error as it was asked for.

        Raises:
            TransferError: the drive is full or failed.
            CollectiveError: another rank failed.
        """
        save = self.in_flight.save
        if save is None:
            return
        with self.in_flight.stalling():
            error = self._end(save)
        save.note_end(error)
        self.in_flight.leave(save)
        if error is not None:
            self._show(save, error)
        save.warn_of_older_ones()

    def look(self, steps: int) -> None:
        """Show the error of a save that has failed in the background; `steps` were made.

        Raises:
            TransferError: the drive is full or failed, and errors are to be raised.
            CollectiveError: the same, on another rank.
        """
        save = self.in_flight.save
        if save is None:
            return
        if self._ranks.size == 1:
            if save.ended:
                self.finish()
        # A step that failed after this is made again by its rank alone: it must not ask again.
        elif self._looked_at != steps:
            self._looked_at = steps
            # Together, so that all ranks raise at the same step.
            if all(self._ranks.tell("whether the checkpoint is written", save.ended)):
                self.finish()

    def _end(self, save: _Save) -> Exception | None:
        """Wait for a save on all ranks; return what failed: an error on all of them, or on none."""
        if self._ranks.size == 1:
            save.join()
            return save.error
        save.written.wait()
        # That another rank has failed, this rank may have seen in the directory already. The ranks
        # tell one another why below, and that is the error to show.
        error = None if isinstance(save.error, _AnotherRankError) else save.error
        try:
            told = self._ranks.tell("writing the checkpoint", error and str(error))
            try:
                self._ranks.check("writing the checkpoint", told)
            except Exception as failure:
                # Else rank 0 would wait for a part that never comes.
                save.give_up(str(failure))
                error = error or kept(failure)
            save.join()
            # Only now does rank 0 know whether the checkpoint is committed.
            told = self._ranks.tell("committing the checkpoint", save.error and str(save.error))
            error = error or save.error
            if error is None:
                self._ranks.check("committing the checkpoint", told)
        except Exception as failure:
            save.give_up(str(failure))
            save.join()
            return error or kept(failure)
        return error

    def _show(self, save: _Save, error: Exception) -> None:
        if save.show():
            if save.on_error is OnError.RAISE:
                raise again(error)
            _warn(save.tag, error)

    # --- what is done before training goes on -----------------------------------------------------

    def _begin(self, request: SaveRequest) -> _Save:
        """Begin a checkpoint on all ranks, and take what changes before the next update."""
        run, ranks, directory = self._run, self._ranks, CheckpointDirectory(request.path)
        began = time.perf_counter()
        with ExitStack() as ends:
            memory = reserve_together(run, ends)
            queue = run.queue or ends.enter_context(IOQueue())

            def begin() -> str:
                with as_transfer(request.path):
                    if request.tag is None:
                        return directory.begin_step(request.steps)
                    directory.begin(request.tag)
                return request.tag

            tag = str(ranks.on_rank_0("beginning the checkpoint", begin))
            try:
                draft, captured = self._take(request, directory, tag, queue=queue, memory=memory)
                save = _Save(
                    draft,
                    captured,
                    on_error=request.on_error,
                    extra=frozenset(request.extra),
                    frozen=request.frozen,
                    began=began,
                )
            except BaseException:
                if ranks.rank == 0:
                    directory.abandon(tag)
                raise
            # Memory and queue go with the save, which outlives this call.
            save.owns(ends.pop_all())
        return save

    def _take(
        self,
        request: SaveRequest,
        directory: CheckpointDirectory,
        tag: str,
        *,
        queue: IOQueue,
        memory: CheckpointMemory,
    ) -> tuple[_Draft, CapturedStates]:
        """Take what changes before the next update; return the draft, and the states to write.

        The draft has `directory`, which keeps it locked, from here on.
        """
        run, ranks = self._run, self._ranks
        folder = directory.draft_of(tag)
        tensors = {tensor.name: tensor for tensor in run.saved_tensors()}
        left_out = self._left_out(request.frozen, memory)
        frozen = [] if request.frozen is FrozenParameters.LEAVE_OUT else run.frozen
        in_memory = [known for known in frozen if run.has_in_memory(known) and known.numel]
        objects: list[RankObjects] = []
        small = SmallBuffers(run.model, tensors)

        def write() -> dict[str, Any]:
            objects.append(RankObjects(self._objects(request.extra)))
            with as_transfer(request.path):
                others = UntrainedStreams(
                    run,
                    tensors,
                    [known for known in frozen if not run.has_in_memory(known)],
                    is_first=ranks.rank == 0,
                    copied=small.names,
                )
                files = self._write_now(folder, objects[0], others, queue=queue, memory=memory)
            return {
                "files": [[file.name, file.nbytes, list(file.checksums)] for file in files],
                "objects": objects[0].structure,
            }

        written = ranks.on_all("writing the checkpoint", write)
        # Notes where states lie, and copies nothing.
        captured = run.states.capture() if ranks.has_states else CapturedStates.nothing()
        manifest = Manifest(
            tag=tag,
            step=request.steps,
            created=datetime.now(timezone.utc).isoformat(timespec="microseconds"),
            ranks=ranks.size,
            tensors=tuple(
                tensor.without_values(left_out[tensor.name]) if tensor.name in left_out else tensor
                for tensor in run.saved_tensors(self._steps_of())
            ),
            files=(),
            run=self._facts(),
            objects={
                objects_file(rank): written_by_rank["objects"]
                for rank, written_by_rank in enumerate(written)
            },
        )
        files = [_saved_file(entry) for entry in written[ranks.rank]["files"]]
        source = _BackgroundStreams(run, captured, tensors, in_memory)
        source.add(objects[0], small.copies() if ranks.rank == 0 else ())

        def share() -> None:
            with as_transfer(request.path):
                source.share(folder, shard_names(ranks.rank, _shards(files)), ranks.size)

        try:
            ranks.on_all("sharing what rests on drives", share)
        except BaseException:
            source.close_shared_files()
            raise
        draft = _Draft(
            directory,
            manifest,
            files,
            source,
            keep=request.keep,
            ranks=(ranks.rank, ranks.size),
            memory=memory,
            queue=queue,
        )
        return draft, source.captured

    def _write_now(
        self,
        draft: Path,
        objects: RankObjects,
        others: UntrainedStreams,
        *,
        queue: IOQueue,
        memory: CheckpointMemory,
    ) -> list[SavedFile]:
        """Write what is too large to be copied, and what a thread cannot read."""
        if not draft.is_dir():
            raise ConfigError(
                field="path",
                value=str(draft.parent),
                expected="a directory that all ranks share: rank 0 has begun a checkpoint there, "
                "this rank sees none",
            )
        files: list[SavedFile] = []
        # Memory for nothing would cost the call more than all else that it does.
        if not others.is_empty:
            with _rooms(memory) as rooms:
                others.use(rooms[0])
                files += write_shard(
                    draft, self._ranks.rank, others, queue=queue, staging_bytes=memory.small
                )
        if objects.must_be_written:
            files.append(
                objects.write(draft, self._ranks.rank, queue=queue, staging_bytes=memory.small)
            )
        return files

    def _left_out(self, frozen: FrozenParameters, memory: CheckpointMemory) -> Mapping[str, int]:
        """Return the checksums of the tensors that are left out, by name."""
        if frozen is FrozenParameters.SAVE:
            return {}
        with _rooms(memory) as rooms:
            return frozen_checksums(self._run, rooms[0])

    def _steps_of(self) -> Callable[[int], int]:
        """Return how often each parameter was updated; a rank that owns none of it cannot know."""
        mine = [self._run.states.steps_of(known.number) for known in self._run.trained]
        said = self._ranks.tell("updates of each parameter", mine)
        return [max(steps) for steps in zip(*said, strict=True)].__getitem__

    def _facts(self) -> dict[str, Any]:
        return {
            "infinity_engine": _version("infinity-engine"),
            "torch": torch.__version__,
            "optimizer": type(self._run.optimizer).__name__,
            "optimizer_parameters": self._run.group_members(),
            "loss_scale": self._run.scale.value,
            "configuration": dict(self._run.settings),
        }

    def _objects(self, extra: Mapping[str, Stateful]) -> dict[str, Any]:
        groups = [
            # The parameters themselves are no state: "optimizer_parameters" names them.
            {name: value for name, value in group.items() if name != "params"}
            for group in self._run.optimizer.param_groups
        ]
        return {
            "loss_scale": self._run.scale.state_dict(),
            "optimizer_groups": groups,
            "schedulers": [scheduler.state_dict() for scheduler in self._run.schedulers],
            "random": random_state(),
            "extra": {name: stateful.state_dict() for name, stateful in extra.items()},
        }


class _AnotherRankError(RuntimeError):
    """What is in the directory shows that another rank could not write its part."""


class _Draft:
    """A checkpoint that is being written: this rank's part of it, and on rank 0 its commit."""

    def __init__(
        self,
        directory: CheckpointDirectory,
        manifest: Manifest,
        files: list[SavedFile],
        source: _BackgroundStreams,
        *,
        keep: int | None,
        ranks: tuple[int, int],
        memory: CheckpointMemory,
        queue: IOQueue,
    ) -> None:
        self.directory = directory
        self.manifest = manifest
        self.memory = memory
        self.shared_nbytes = source.shared_nbytes
        self.not_removed = ""  # why older checkpoints stay that were to go
        self._files = files
        self._sources = [source]  # until `write`: its views of states end with that call
        self._keep = keep
        self._rank, self._size = ranks
        self._queue = queue
        # Read by the thread that waits for other ranks; not empty: wait no longer.
        self._given_up = ""

    @property
    def nbytes(self) -> int:
        """The bytes of the files so far."""
        return sum(file.nbytes for file in self._files)

    def write(self, *, beside: bool) -> None:
        """Write this rank's part, `beside` training or not; tell rank 0 what it wrote."""
        draft = self.directory.draft_of(self.manifest.tag)
        source, memory = self._sources.pop(), self.memory
        leave = source.nbytes_of(self._size)
        source.captured.make_room(leave + leave // 16 + _SMALL_FILES, self._size, beside=beside)
        with source.shared_files() as shared, _rooms(memory) as rooms:
            source.use(rooms)
            # First what updates wait for. What is shared is safe from them.
            self._files += write_shard(
                draft,
                self._rank,
                source,
                queue=self._queue,
                staging_bytes=memory.small,
                first_file=_shards(self._files) + len(shared),
            )
            # Updates may go on before what follows, and the parts of other ranks, are there.
            source.captured.let_go()
            self._files += source.write_objects(
                draft, self._rank, queue=self._queue, staging_bytes=memory.small
            )
            self._files += [file.finish(self._queue, rooms) for file in shared]
        if self._rank:
            files = [[file.name, file.nbytes, list(file.checksums)] for file in self._files]
            path = draft / f"{_part(self._rank)}.tmp"
            path.write_text(json.dumps(files))
            # By rename, so that rank 0 never reads half of it.
            path.replace(draft / _part(self._rank))

    def commit(self) -> None:
        """On rank 0: wait for the parts of all ranks, and let the checkpoint be there."""
        if self._rank:
            return
        files, tag = list(self._files), self.manifest.tag
        draft = self.directory.draft_of(tag)
        for rank in range(1, self._size):
            part = draft / _part(rank)
            self._wait_for_part(rank, part)
            files += [_saved_file(entry) for entry in json.loads(part.read_text())]
            # A committed directory has the checkpoint's own files only.
            part.unlink()
        self._files = files
        manifest = replace(self.manifest, files=tuple(files))
        if self._keep is None:
            self.directory.commit(tag, manifest)
        else:  # Older checkpoints are about to go, so the new one is read back first.
            self.directory.commit(tag, manifest, self._read_back)
            try:
                self.directory.retire(self._keep)
            # The new checkpoint is there, whatever becomes of older ones.
            except OSError as error:
                self.not_removed = str(error)

    def give_up(self, why: str) -> None:
        """Wait for no other rank."""
        self._given_up = why

    @property
    def is_gone(self) -> bool:
        """Whether rank 0 has removed it."""
        return self._rank > 0 and not self.directory.draft_of(self.manifest.tag).is_dir()

    def abandon(self, error: Exception) -> None:
        """Remove what was written, on rank 0; on others, tell rank 0."""
        if self._rank == 0:
            self.directory.abandon(self.manifest.tag)
        else:
            # The drive may be what failed; rank 0 then learns it from the exchange.
            with suppress(OSError):
                failed = self.directory.draft_of(self.manifest.tag) / _part(self._rank)
                failed.with_suffix(_FAILED).write_text(str(error))

    def _wait_for_part(self, rank: int, part: Path) -> None:
        main, orphaned_s = threading.main_thread(), 0.0
        while not part.exists():
            if part.with_suffix(_FAILED).exists():
                raise _AnotherRankError(f"rank {rank} could not write its part")
            if self._given_up:
                raise RuntimeError(self._given_up)
            # This thread is no daemon: it goes on after the main thread has ended.
            orphaned_s += 0.0 if main.is_alive() else _POLL_S
            if orphaned_s > _ORPHAN_S:
                raise RuntimeError(f"rank {rank} has not written its part, and training has ended")
            time.sleep(_POLL_S)

    def _read_back(self, draft: Path) -> None:
        """Compare all that was written with its checksums.

        Raises:
            DamagedCheckpoint: a block differs.
        """
        nbytes = self.memory.large
        with CheckpointReader(draft, queue=self._queue, staging_bytes=nbytes) as reader:
            reader.check_slices()
            damage = next(reader.verify(), None)
        if damage is not None:
            flaw = (
                f"a block at byte {damage.offset} differs from what was written. This checkpoint "
                "was dropped, and older ones are as they were. Check the drive and the memory"
            )
            raise DamagedCheckpoint(path=str(draft), entry=damage.file, flaw=flaw)


class _Save:
    """One save: its thread writes this rank's states; that of rank 0 commits when all have."""

    def __init__(
        self,
        draft: _Draft,
        captured: CapturedStates,
        *,
        on_error: OnError,
        extra: frozenset[str],
        frozen: FrozenParameters,
        began: float,
    ) -> None:
        self.on_error = on_error
        self.captured = captured
        self.written = threading.Event()  # this rank's part is, or has failed
        self.error: Exception | None = None
        self._shown = False  # the error was
        self._draft = draft
        self._report = SaveReport(
            path=draft.directory.path,
            tag=draft.manifest.tag,
            step=draft.manifest.step,
            extra=extra,
            frozen=frozen,
        )
        self._began = began
        self._ended_s: float | None = None
        self._ends = ExitStack()
        self._beside = False  # training
        self._thread = threading.Thread(target=self._run, name=f"checkpoint {self.tag}")

    @property
    def tag(self) -> str:
        """The tag of the checkpoint."""
        return self._report.tag

    def owns(self, ends: ExitStack) -> None:
        """Give its memory back at its end."""
        self._ends = ends

    def start(self, *, beside: bool) -> None:
        """Let it go on beside the caller, who trains meanwhile or only waits."""
        self._beside = beside
        try:
            self._thread.start()
        except BaseException:  # the interpreter is about to end
            self._draft.abandon(RuntimeError("no thread could be started"))
            # No thread will write: updates need not wait for it.
            self.captured.let_go()
            self._ends.close()
            raise

    @property
    def has_lent_memory(self) -> bool:
        """Whether the engine cannot go on before it has ended."""
        return self._draft.memory.lent

    @property
    def ended(self) -> bool:
        """Whether nothing of it is left to do."""
        return self._ended_s is not None

    def join(self) -> None:
        """Wait for its end."""
        self._thread.join()

    def only_warn(self) -> None:
        """Let its error be a warning, whatever was asked for."""
        self.on_error = OnError.WARN

    def give_up(self, why: str) -> None:
        """Wait for no other rank."""
        self._draft.give_up(why)

    def note_end(self, error: Exception | None) -> None:
        """Note how it ended on all ranks: another rank's failure is this one's too."""
        self.error = error

    def warn_of_older_ones(self) -> None:
        """Warn where it is there, and older checkpoints could not be removed."""
        if self._draft.not_removed:
            warnings.warn(
                f"The checkpoint {self.tag} was saved. Older checkpoints could not be removed: "
                f"{self._draft.not_removed}. The next save with `keep` tries again",
                RuntimeWarning,
                stacklevel=6,
            )

    def show(self) -> bool:
        """Tell whether its error has not been shown before, and is from now on."""
        first, self._shown = not self._shown, True
        return first

    def report(self, stall_s: float) -> SaveReport:
        """Return how it stands."""
        end, state, error = time.perf_counter(), SaveState.WRITING, ""
        if self._ended_s is not None:
            end, state = self._ended_s, SaveState.COMMITTED
            if self.error is not None:
                state, error = SaveState.FAILED, str(self.error)
        return replace(
            self._report,
            state=state,
            nbytes=self._draft.nbytes,
            shared_nbytes=self._draft.shared_nbytes,
            seconds=end - self._began,
            stall_seconds=stall_s,
            error=error,
        )

    def _run(self) -> None:
        try:
            with as_transfer(self._draft.directory.path):
                self._draft.write(beside=self._beside)
                self.written.set()
                self._draft.commit()
        except Exception as error:
            # Rank 0 removes the directory under the files of all ranks where its own part fails.
            another = _AnotherRankError("rank 0 has given up the checkpoint")
            self.error = kept(another if self._draft.is_gone else error)
            self._draft.abandon(error)
        finally:
            # Also after a failure: updates wait until this is called.
            self.captured.let_go()
            self.written.set()
            self._ends.close()
            # Last: `ended` says that nothing is left to do, and that the error is known.
            self._ended_s = time.perf_counter()


# --- streams --------------------------------------------------------------------------------------


class _BackgroundStreams:
    """What a thread writes: this rank's states, frozen parameters in memory, copies of buffers."""

    def __init__(
        self,
        run: Run,
        captured: CapturedStates,
        tensors: Mapping[str, SavedTensor],
        frozen: Sequence[ModelParameter],
    ) -> None:
        self._states = StateStreams(run, captured, tensors)
        self._objects: RankObjects | None = None
        self._shared: list[SharedFile] = []
        values = (known.home.detach().view(-1) for known in frozen)
        self._whole = list(zip(frozen_slices(run, tensors, frozen), values, strict=True))
        self._rooms: Sequence[memoryview] = ()

    @property
    def captured(self) -> CapturedStates:
        """The states that are copied."""
        return self._states.captured

    def add(self, objects: RankObjects, copies: Iterable[tuple[Slice, torch.Tensor]]) -> None:
        """Write these too: objects, unless they were written already, and copies of buffers."""
        self._objects = None if objects.must_be_written else objects
        self._whole += copies

    def write_objects(
        self, draft: Path, rank: int, *, queue: IOQueue, staging_bytes: int
    ) -> list[SavedFile]:
        """Write the file of the objects, where it is not there yet."""
        if self._objects is None:
            return []
        return [self._objects.write(draft, rank, queue=queue, staging_bytes=staging_bytes)]

    def share(self, draft: Path, names: Iterator[str], ranks: int) -> None:
        """Let files of the checkpoint share what rests on drives, where the file system can.

        The next update may change that at once: it writes to new blocks. A drive that has no room
        for these, and for what this save copies, of all ranks, lets a copy fail now, as a save;
        sharing would let a later update fail.
        """
        if _free_bytes(draft) < self.nbytes_of(ranks):
            return
        runs = [run for run in self.captured.runs_on_drives() if run.nbytes >= LEAST_BYTES]
        slices = [(run, [self._states.slice_of(piece) for piece in run.pieces]) for run in runs]
        self._shared = share_runs(draft, names, slices, FILE_BYTES)
        if self._shared:
            self._states.leave_out(runs)

    def nbytes_of(self, ranks: int) -> int:
        """Return what so many ranks have to write, if each writes as much as this one."""
        return ranks * sum(part.nbytes for part in self.slices())

    @property
    def shared_nbytes(self) -> int:
        """How many bytes are in the checkpoint without a copy."""
        return sum(file.nbytes for file in self._shared)

    @contextmanager
    def shared_files(self) -> Iterator[Sequence[SharedFile]]:
        """Have the files that share their bytes, to be finished in the body."""
        try:
            yield self._shared
        finally:
            self.close_shared_files()

    def close_shared_files(self) -> None:
        """Let go of them, finished or not."""
        for file in self._shared:
            file.close()

    def use(self, rooms: Sequence[memoryview]) -> None:
        """Copy and read through this memory."""
        self._rooms = rooms

    def slices(self) -> list[Slice]:
        """Return what is written."""
        return [*self._states.slices(), *(part for part, _ in self._whole)]

    def hand_out(self, sink: SliceSink) -> None:
        """Hand out the bytes of all slices."""
        self._states.hand_out(sink, self._rooms)
        for part, values in self._whole:
            hand_out(part, values, self._rooms[0], sink)


def _free_bytes(path: Path) -> int:
    """Return what the drive has free; 0 where it does not say, so that nothing is shared."""
    try:
        return shutil.disk_usage(path).free
    except OSError:
        return 0


def _shards(files: Sequence[SavedFile]) -> int:
    """Return how many of these files are shards."""
    return sum(file.name.startswith(SHARD) for file in files)


def _saved_file(entry: Sequence[Any]) -> SavedFile:
    """Return what the manifest says of a file, from what JSON had of it."""
    name, nbytes, checksums = entry
    return SavedFile(name=name, nbytes=nbytes, checksums=tuple(checksums))


def _warn(tag: str, error: Exception) -> None:
    warnings.warn(
        f"Saving the checkpoint {tag} failed: {error}. Earlier checkpoints are as they were, and "
        "training goes on",
        RuntimeWarning,
        stacklevel=6,
    )


@contextmanager
def _rooms(memory: CheckpointMemory) -> Iterator[list[memoryview]]:
    """Have the large part of the memory as rooms, page-aligned."""
    count, nbytes = memory.rooms()
    # Counted already: `memory` has reserved it, or was lent it.
    pool = Pool(count * nbytes)
    yield [memoryview(pool.buffer(nbytes)) for _ in range(count)]


def _part(rank: int) -> str:
    return f"rank-{rank:05d}.part"


@cache  # It is looked for in the folders of all installed packages.
def _version(distribution: str) -> str:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return "unknown"
