"""`CheckpointDirectory`: the checkpoints of one run by tag: commits new ones, removes old ones.

A name without a leading dot is a whole checkpoint, put there by one rename. A name with a leading
dot is being written or removed; the next save removes what a killed run left of it. Reads and
writes no tensors.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import stat
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from deepnvme.volume.syncing import sync_directory, sync_file
from infinity_engine.checkpoint.manifest import MANIFEST, MOST_BYTES, Manifest, encode, parse
from infinity_engine.errors import (
    CheckpointError,
    ConfigError,
    DamagedCheckpoint,
    IncompleteCheckpoint,
)

__all__ = ["LATEST", "CheckpointDirectory", "open_regular", "read_manifest", "tag_of_step"]

LATEST = "latest"
"""The name of the file that holds the newest checkpoint's tag, and what `load` calls it."""

# No leading dot, which belongs to the writer, and no slash, so a tag never leads elsewhere.
_TAG = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}")
_UNFINISHED = re.compile(rf"\.{_TAG.pattern}\.(writing|removing)")
# More than any tag has, so a damaged `latest` of any length costs nothing.
_MOST_TAG_BYTES = 256
# How long a save waits for another one that begins or commits in the same directory: longer than
# either takes. After that it goes on, as one that was stopped must not stop all others.
_TURN_S, _POLL_S = 30.0, 0.01


def tag_of_step(step: int) -> str:
    """Return the tag that a checkpoint has where its user gives none."""
    return f"step-{step:08d}"


class CheckpointDirectory:
    """The directory `path`, which holds checkpoints of one run."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._locks: dict[str, _DraftLock] = {}  # by tag

    # --- looking ----------------------------------------------------------------------------------

    def tags(self) -> list[str]:
        """Return the tags of all whole checkpoints, the oldest first.

        Raises:
            ConfigError: the path is that of a file.
        """
        self._check_no_file()
        try:
            found = [
                entry
                # `latest` has a name that a tag could have.
                for entry in self.path.iterdir()
                if _TAG.fullmatch(entry.name) and entry.name != LATEST and _is_whole(entry)
            ]
        except FileNotFoundError:
            return []
        return [entry.name for entry in sorted(found, key=_age)]

    def latest(self) -> str | None:
        """Return the newest checkpoint's tag; None where there is no checkpoint."""
        try:
            with open_regular(self.path / LATEST) as descriptor:
                # Bytes that are no ASCII become U+FFFD, which no tag has: the match below fails.
                named = os.read(descriptor, _MOST_TAG_BYTES).decode("ascii", "replace").strip()
        except OSError:
            named = ""
        if _TAG.fullmatch(named) and _is_whole(self.path / named):
            return named
        tags = self.tags()  # the file is missing or damaged: the checkpoints speak for themselves
        return tags[-1] if tags else None

    def resolve(self, tag: str = LATEST) -> Path:
        """Return where the checkpoint of a tag is.

        Raises:
            ConfigError: `tag` cannot be the tag of a checkpoint, or the path is that of a file.
            IncompleteCheckpoint: there is no such checkpoint, or none at all.
        """
        self._check_no_file()
        found = self.latest() if tag == LATEST else _checked(tag)
        if found is None:
            missing = "any checkpoint"
            if _is_whole(self.path):
                missing += f" (it is one itself: pass {self.path.parent}, and its name as the tag)"
            raise IncompleteCheckpoint(path=str(self.path), missing=(missing,))
        if not _is_whole(self.path / found):
            raise IncompleteCheckpoint(path=str(self.path / found), missing=(MANIFEST,))
        return self.path / found

    # --- saving -----------------------------------------------------------------------------------

    def free_tag(self, tag: str) -> str:
        """Return this tag, or where a checkpoint has it, this tag with a number behind it.

        A run that went back to an older checkpoint comes to the same step again. Another program
        may be writing one at the moment.
        """
        number, free = 1, tag
        # lexists: a dangling link takes the name as well, and the rename of `commit` would fail.
        while os.path.lexists(self.path / free) or _is_locked(self.draft_of(free)):
            number += 1
            free = f"{tag}.{number}"
        return free

    def begin(self, tag: str) -> Path:
        """Return a new directory for a checkpoint's files; remove first what killed runs have left.

        Raises:
            ConfigError: `tag` cannot be a tag, a checkpoint has it already, or a file is where the
                directory should be.
        """
        _checked(tag)
        self._check_no_file()
        _make_durably(self.path)
        with self._turn():
            return self._begin(tag)

    def begin_step(self, step: int) -> str:
        """Begin a checkpoint as `begin` does, with a free tag for this step; return the tag."""
        self._check_no_file()
        _make_durably(self.path)
        # In one turn: two programs that save the same step get two tags.
        with self._turn():
            tag = self.free_tag(tag_of_step(step))
            self._begin(tag)
        return tag

    def _begin(self, tag: str) -> Path:
        if os.path.lexists(self.path / tag):
            raise ConfigError(
                field="tag",
                value=tag,
                expected=f"a tag that no checkpoint in {self.path} has: remove that one, or choose "
                "another tag",
            )
        # Before mkdir: a killed save of this very tag left a directory of the draft's name.
        self._sweep()
        draft = self.draft_of(tag)
        if _is_locked(draft):
            expected = f"a tag that no other save is writing to {self.path} at the moment"
            raise ConfigError(field="tag", value=tag, expected=expected)
        draft.mkdir()
        self._locks[tag] = _DraftLock(draft)
        return draft

    def draft_of(self, tag: str) -> Path:
        """Return where a checkpoint's files are while they are being written."""
        return self.path / f".{_checked(tag)}.writing"

    def commit(
        self,
        tag: str,
        manifest: Manifest,
        check: Callable[[Path], object] = lambda draft: None,
    ) -> Path:
        """Make what `begin` has begun a checkpoint, all or nothing, and let `latest` name it.

        The files are written and synced by now. `check` may read them back and raise. When this
        returns, the checkpoint survives a power loss.
        """
        return self._commit(tag, manifest, check, lambda: True)

    def commit_rewritten(self, tag: str, manifest: Manifest) -> Path:
        """Commit as `commit` does, but leave `latest` where it names a newer checkpoint.

        What was rewritten keeps its age, and a run goes on from its newest checkpoint.
        """

        def is_newest() -> bool:
            latest = self.latest()
            age = (0, manifest.created, manifest.step)
            return latest is None or _age(self.path / latest)[:3] <= age

        return self._commit(tag, manifest, lambda draft: None, is_newest)

    def _commit(
        self,
        tag: str,
        manifest: Manifest,
        check: Callable[[Path], object],
        is_newest: Callable[[], bool],
    ) -> Path:
        draft, target = self.draft_of(tag), self.path / tag
        # The manifest comes last: every file that it names is whole by now.
        path = draft / MANIFEST
        path.write_bytes(encode(manifest))
        sync_file(path)
        # The names of the files are content of the directory. Without this sync, a power loss could
        # keep the rename and lose them.
        sync_directory(draft)
        check(draft)
        # In one turn: another save neither replaces the new pointer nor removes it as a leftover.
        with self._turn():
            latest = self.path / LATEST
            if latest.is_dir() and not latest.is_symlink():
                raise ConfigError(
                    field="path",
                    value=str(latest),
                    expected="a file, or nothing: move this directory away",
                )
            # Written before the rename, so that a full drive refuses here, and not half-way.
            pointer = self._pointer_to(tag) if is_newest() else None
            # The commit. A kill before it leaves a draft for the next save to remove.
            draft.rename(target)
            sync_directory(self.path)
            # A kill before this leaves `latest` at the checkpoint before: a whole one as well.
            if pointer is not None:
                pointer.replace(self.path / LATEST)
                sync_directory(self.path)
        self._unlock(tag)
        return target

    def abandon(self, tag: str) -> None:
        """Remove what `begin` has begun."""
        shutil.rmtree(self.draft_of(tag), ignore_errors=True)
        self._unlock(tag)

    def retire(self, keep: int) -> list[str]:
        """Remove all but the newest `keep` checkpoints; return the tags of those removed.

        The one that `latest` names stays. So do those with manifests that cannot be read, as their
        age is unknown.
        """
        leaving: dict[str, Path] = {}
        # In one turn: another save that removes old ones as well finds each of them once.
        with self._turn():
            # The age of a checkpoint with a damaged manifest begins with -1.
            tags = [tag for tag in self.tags() if _age(self.path / tag)[0] >= 0]
            latest = self.latest()
            for tag in tags[: max(0, len(tags) - keep)]:
                if tag == latest:
                    continue
                leaving[tag] = self.path / f".{tag}.removing"
                # What a killed run left of the same tag: a rename does not replace a directory with
                # files.
                shutil.rmtree(leaving[tag], ignore_errors=True)
                # from here on it is no checkpoint, and not half of one
                (self.path / tag).rename(leaving[tag])
            sync_directory(self.path)
        # Only after the sync: a power loss must not bring a tag back without its files.
        for path in leaving.values():
            shutil.rmtree(path, ignore_errors=True)
        return list(leaving)

    def _check_no_file(self) -> None:
        """Refuse a path that is no directory, or leads through something else."""
        there = next((path for path in (self.path, *self.path.parents) if path.exists()), None)
        if there is not None and not there.is_dir():
            raise ConfigError(
                field="path",
                value=str(self.path),
                expected=f"the directory of a run's checkpoints; {there} is a file",
            )

    @contextlib.contextmanager
    def _turn(self) -> Iterator[None]:
        """Begin, commit or remove checkpoints within the body, while no other save does.

        A file system without locks lets all of them do it at once.
        """
        descriptor = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        end = time.monotonic() + _TURN_S
        try:
            with contextlib.suppress(OSError):
                while not _has_locked(descriptor) and time.monotonic() < end:
                    time.sleep(_POLL_S)
            yield
        finally:
            # Explicitly: a forked process may have the descriptor too.
            with contextlib.suppress(OSError):
                fcntl.flock(descriptor, fcntl.LOCK_UN)
            os.close(descriptor)

    def _pointer_to(self, tag: str) -> Path:
        """Write what is to become `latest`; return where it is."""
        # Replaced, never written in place: a reader sees the old tag or the new one, no half of
        # one.
        pointer = self.path / f".{LATEST}.writing"
        pointer.write_text(f"{tag}\n")
        sync_file(pointer)
        return pointer

    def _unlock(self, tag: str) -> None:
        if tag in self._locks:
            self._locks.pop(tag).release()

    def _sweep(self) -> None:
        """Remove what killed runs have left: nothing but what this class itself names so, and no
        draft that another save is still writing.
        """
        for entry in self.path.iterdir():
            # A link is left alone: this class makes none, and it may lead anywhere.
            if not _UNFINISHED.fullmatch(entry.name) or entry.is_symlink():
                continue
            if _is_locked(entry):
                continue
            if entry.is_dir():
                shutil.rmtree(entry, ignore_errors=True)
            else:
                with contextlib.suppress(OSError):
                    entry.unlink()


def read_manifest(path: Path) -> Manifest:
    """Return the manifest of the checkpoint in the directory `path`.

    Raises:
        IncompleteCheckpoint: it has none.
        DamagedCheckpoint: it is damaged, of a newer version, or no manifest at all.
    """
    try:
        with (
            open_regular(path / MANIFEST) as descriptor,
            # dup: `fdopen` closes its own descriptor, and `open_regular` closes the other.
            os.fdopen(os.dup(descriptor), "rb") as file,
        ):
            # One byte more than allowed tells a longer file from one of just this length.
            data = file.read(MOST_BYTES + 1)
    except FileNotFoundError:
        raise IncompleteCheckpoint(path=str(path), missing=(MANIFEST,)) from None
    except OSError as problem:
        raise DamagedCheckpoint(path=str(path), entry=MANIFEST, flaw=str(problem)) from None
    if len(data) > MOST_BYTES:
        raise DamagedCheckpoint(
            path=str(path), entry=MANIFEST, flaw=f"it has more than {MOST_BYTES} B"
        )
    try:
        return parse(data)
    except ValueError as flaw:
        raise DamagedCheckpoint(path=str(path), entry=MANIFEST, flaw=str(flaw)) from None


@contextlib.contextmanager
def open_regular(path: Path) -> Iterator[int]:
    """Open a file to read: a regular one, no link, pipe or device. Yield its descriptor.

    Raises:
        OSError: it cannot be opened, or is something else.
    """
    # Without O_NONBLOCK, opening a pipe waits for a writer. O_NOFOLLOW refuses a link.
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(f"{path} is no regular file")
        yield descriptor
    finally:
        os.close(descriptor)


class _DraftLock:
    """Locks a draft for as long as its writer lives. A file system without locks lets it be."""

    def __init__(self, draft: Path) -> None:
        self._descriptor = os.open(draft, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        with contextlib.suppress(OSError):
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def release(self) -> None:
        """Unlock it, explicitly: a forked process may have the descriptor too."""
        with contextlib.suppress(OSError):
            fcntl.flock(self._descriptor, fcntl.LOCK_UN)
        os.close(self._descriptor)
        self._descriptor = -1

    def __del__(self) -> None:
        """Close it where its writer was dropped; a forked process leaves the lock to its parent."""
        if self.__dict__.get("_descriptor", -1) >= 0:
            os.close(self._descriptor)


def _has_locked(descriptor: int) -> bool:
    """Lock an open directory, unless another one has it; tell whether it is locked."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _is_locked(draft: Path) -> bool:
    """Tell whether a save is still writing a draft, in this process or another one."""
    try:
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
        descriptor = os.open(draft, flags)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return False


def _make_durably(path: Path) -> None:
    """Make a directory and those above it, so that their names survive a power loss."""
    # Looked at before mkdir makes them.
    missing = [folder for folder in (path, *path.parents) if not folder.exists()]
    path.mkdir(parents=True, exist_ok=True)
    for folder in missing:
        # A directory's name is content of its parent, so the parent is synced.
        sync_directory(folder.absolute().parent)


def _checked(tag: str) -> str:
    given: object = tag  # as the caller passed it
    if not isinstance(given, str) or not _TAG.fullmatch(given) or given == LATEST:
        expected = (
            "1 to 128 of the characters A-Z a-z 0-9 . _ -, none of . and - first, and not 'latest'"
        )
        raise ConfigError(field="tag", value=tag, expected=expected)
    return tag


def _is_whole(path: Path) -> bool:
    # The manifest tells a checkpoint from a directory of yours. A link may lead to another run.
    return path.is_dir() and not path.is_symlink() and (path / MANIFEST).is_file()


def _age(path: Path) -> tuple[int, str, int, str]:
    """Return the key that sorts checkpoints by age, damaged ones first.

    It is what their manifests say: a file that was copied has another time.
    """
    try:
        manifest = read_manifest(path)
    except CheckpointError:
        return (-1, "", 0, path.name)
    # Time before step: a run that went back has newer checkpoints of lower steps.
    return (0, manifest.created, manifest.step, path.name)
