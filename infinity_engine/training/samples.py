"""The sequences of a training: documents as tokens in files of the run, and the order of a seed.

Tokens go to files, so that memory does not grow with the data, and a run that is resumed reads the
same ones. Knows no model; never imports torch.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from array import array
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import IO, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from infinity_engine.errors import ConfigError
from infinity_engine.training.documents import Document, read_documents
from infinity_engine.training.settings import Framing

__all__ = [
    "DataPosition",
    "MicroBatch",
    "Samples",
    "SamplesSummary",
    "Tokenizer",
    "Tokens",
    "fingerprint",
    "micro_batches",
    "prepare",
]

_IGNORED = -100  # the label of a token that is not trained on, as torch's losses have it
_TOKENS, _TRAINED, _SAMPLES, _SUMMARY = "tokens.bin", "trained.bin", "samples.npy", "summary.json"
_TOGETHER = 256  # documents that are tokenized at once: tokenizers use several cores
_READ = 1 << 20

Tokens = npt.NDArray[np.int64]


class Tokenizer(Protocol):
    """What turns texts into tokens; `end` closes a document, where there is such a token."""

    @property
    def begin(self) -> int | None:
        """The token before a document."""

    @property
    def end(self) -> int | None:
        """The token after a document."""

    @property
    def pad(self) -> int:
        """A token that stands where there is none."""

    def tokens_of(self, texts: Sequence[str]) -> Sequence[Sequence[int]]:
        """Return the tokens of each text, without those that begin or end a document."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplesSummary:
    """What the data is: for the user, and to see whether it is still the same."""

    fingerprint: str
    framing: str
    sequence: int
    documents: int
    tokens: int
    largest_token: int
    sequences: int
    padded: int
    """Sequences that are shorter than the longest possible."""
    cut: int
    """Documents with prompts that are longer than a sequence: their end is not trained on."""
    left_out: int
    """Sequences without a token to train on."""

    def __str__(self) -> str:
        """Return it in a sentence or two."""
        how = {
            Framing.PACK.value: f"packed: cut at {self.sequence:,} tokens, without gaps",
            Framing.PAD.value: f"padded: each document begins one, of {self.sequence:,} tokens at "
            "most",
        }[self.framing]
        said = f"{self.documents:,} documents, {self.tokens:,} tokens, {self.sequences:,} sequences"
        said += f", {how}"
        if self.cut:
            said += f". Cut off at that length: {self.cut:,} documents"
        if self.left_out:
            said += f". Left out: {self.left_out:,} sequences without a token to train on"
        return said


class MicroBatch(NamedTuple):
    """Sequences of one length; `trained` counts the tokens that are predicted."""

    tokens: Tokens
    labels: Tokens
    mask: Tokens
    trained: int


class Samples:
    """The sequences of a prepared folder, by number."""

    def __init__(self, folder: Path, pad: int) -> None:
        self._folder, self._pad = folder, pad
        self.summary = _summary(folder)
        # A row each: the first token, how many, and how many of them are predicted.
        self._rows: Tokens = np.load(folder / _SAMPLES)

    def __len__(self) -> int:
        return len(self._rows)

    def micro_batch(self, numbers: Sequence[int]) -> MicroBatch:
        """Return these sequences, padded to the longest of them."""
        rows = [(int(start), int(length)) for start, length, _ in self._rows[list(numbers)]]
        longest = max(length for _, length in rows)
        if self.summary.framing == Framing.PACK.value:
            longest = self.summary.sequence  # the same for all, also the last
        tokens = np.full((len(rows), longest), self._pad, dtype=np.int64)
        labels = np.full((len(rows), longest), _IGNORED, dtype=np.int64)
        mask = np.zeros((len(rows), longest), dtype=np.int64)
        for at, (start, length) in enumerate(rows):
            read = np.fromfile(self._folder / _TOKENS, np.uint32, length, offset=4 * start)
            trained = np.fromfile(self._folder / _TRAINED, np.uint8, length, offset=start)
            tokens[at, :length] = read
            labels[at, :length] = np.where(trained == 1, tokens[at, :length], _IGNORED)
            mask[at, :length] = 1
        # The first token of a sequence has none before it that would predict it.
        return MicroBatch(tokens, labels, mask, int((labels[:, 1:] != _IGNORED).sum()))


# --- the order ------------------------------------------------------------------------------------


@dataclass(slots=True)
class DataPosition:
    """How many micro-batches a run has used: saved with its checkpoints."""

    used: int = 0

    def state_dict(self) -> dict[str, int]:
        """Return what a checkpoint keeps."""
        return {"used": self.used}

    def advance(self, micro_batches: int) -> None:
        """Note that so many more were used."""
        self.used += micro_batches

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        """Go on from there."""
        self.used = state_dict["used"]


def micro_batches(samples: Samples, *, batch: int, seed: int, first: int) -> Iterator[MicroBatch]:
    """Yield micro-batches without end from number `first` on: every sequence once in each round.

    The order of a round follows from the seed and the round's number alone.
    """
    number, shuffled_for, order = first * batch, -1, np.zeros(0, np.int64)
    while True:
        wanted = []
        for position in range(number, number + batch):
            round_, at = divmod(position, len(samples))
            if round_ != shuffled_for:
                order = np.random.default_rng([seed, round_]).permutation(len(samples))
                shuffled_for = round_
            wanted.append(int(order[at]))
        yield samples.micro_batch(wanted)
        number += batch


# --- preparing ------------------------------------------------------------------------------------


def fingerprint(paths: Sequence[Path], *settings: object) -> str:
    """Return a text that differs where the content of a file, or a setting, does.

    Raises:
        ConfigError: a file cannot be read.
    """
    summed = hashlib.blake2b(repr(settings).encode(), digest_size=16)
    for path in paths:
        try:
            with path.open("rb") as file:
                summed.update(b"file")
                while read := file.read(_READ):
                    summed.update(read)
        except OSError as error:
            expected = f"a file that can be read ({error.strerror})"
            raise ConfigError(field="data", value=str(path), expected=expected) from error
    return summed.hexdigest()


def prepare(
    folder: Path,
    paths: Sequence[Path],
    tokenizer: Tokenizer,
    *,
    sequence: int,
    framing: Framing,
    known_as: str,
) -> Samples:
    """Return the sequences of the files; made anew unless `folder` has them under that fingerprint.

    Raises:
        ConfigError: there is nothing to train on, or a file or line is wrong.
    """
    try:
        if _summary(folder).fingerprint == known_as:
            return Samples(folder, tokenizer.pad)
    except (OSError, ValueError, TypeError):
        pass  # there is none, or an interrupted one
    making = folder.with_name(f".{folder.name}")
    for old in (making, folder):
        shutil.rmtree(old, ignore_errors=True)
    making.mkdir(parents=True)
    _write(making, paths, tokenizer, sequence=sequence, framing=framing, known_as=known_as)
    making.rename(folder)
    return Samples(folder, tokenizer.pad)


def _summary(folder: Path) -> SamplesSummary:
    return SamplesSummary(**json.loads((folder / _SUMMARY).read_text(encoding="utf-8")))


def _write(
    folder: Path,
    paths: Sequence[Path],
    tokenizer: Tokenizer,
    *,
    sequence: int,
    framing: Framing,
    known_as: str,
) -> None:
    """Write tokens and sequences; the summary comes last, and says that all is there."""
    with ExitStack() as opened:
        tokens = opened.enter_context((folder / _TOKENS).open("wb"))
        trained = opened.enter_context((folder / _TRAINED).open("wb"))
        written = _tokenize(paths, tokenizer, tokens, trained)
    if framing is Framing.AUTO:
        framing = Framing.PAD if written.prompted else Framing.PACK
    if framing is Framing.PACK:
        pieces, cut = _cut(0, written.count, sequence), 0
    else:
        pieces, cut = _padded(written, sequence)
    counted = [(start, length, length - 1) for start, length in pieces]
    if written.prompted:
        flags = np.fromfile(folder / _TRAINED, np.uint8)
        counted = [
            (start, length, int(flags[start + 1 : start + length].sum()))
            for start, length in pieces
        ]
    kept = [row for row in counted if row[2]]
    if not kept:
        shown = ", ".join(map(str, paths))
        expected = "files with two tokens at least, of which one is trained on"
        raise ConfigError(
            field="data", value=f"{written.count} tokens in {shown}", expected=expected
        )
    np.save(folder / _SAMPLES, np.array(kept, dtype=np.int64))
    summary = SamplesSummary(
        fingerprint=known_as,
        framing=framing.value,
        sequence=sequence,
        documents=len(written.ends),
        tokens=written.count,
        largest_token=written.largest,
        sequences=len(kept),
        padded=sum(length < sequence for _, length, _ in kept),
        cut=cut,
        left_out=len(counted) - len(kept),
    )
    (folder / _SUMMARY).write_text(json.dumps(asdict(summary)), encoding="utf-8")


@dataclass(slots=True)
class _Written:
    """The tokens in the files: how many, where each document ends, and which have prompts."""

    count: int
    largest: int
    ends: list[int]
    prompted: set[int]

    def note(self, document: Document, whole: array[int]) -> None:
        """Note a document, or a piece of one, that was written."""
        self.count += len(whole)
        self.largest = max(self.largest, max(whole, default=0))
        if document.prompt is not None:
            self.prompted.add(len(self.ends))
        if document.ends:
            self.ends.append(self.count)


def _tokenize(
    paths: Sequence[Path], tokenizer: Tokenizer, tokens: IO[bytes], trained: IO[bytes]
) -> _Written:
    written = _Written(0, 0, [], set())
    documents = read_documents(paths)
    while together := list(islice(documents, _TOGETHER)):
        prompts = [document for document in together if document.prompt is not None]
        of_prompts = iter(tokenizer.tokens_of([str(document.prompt) for document in prompts]))
        of_texts = tokenizer.tokens_of([document.text for document in together])
        for document, text in zip(together, of_texts, strict=True):
            begin = [tokenizer.begin] if document.begins and tokenizer.begin is not None else []
            end = [tokenizer.end] if document.ends and tokenizer.end is not None else []
            prompt: Sequence[int] = ()
            read_only = 0
            if document.prompt is not None:
                prompt = next(of_prompts)
                read_only = len(begin) + len(prompt)
            whole = array("I", [*begin, *prompt, *text, *end])
            tokens.write(whole.tobytes())
            trained.write(bytes(read_only) + b"\1" * (len(whole) - read_only))
            written.note(document, whole)
    return written


def _cut(start: int, end: int, sequence: int) -> list[tuple[int, int]]:
    return [(at, min(sequence, end - at)) for at in range(start, end, sequence)]


def _padded(written: _Written, sequence: int) -> tuple[list[tuple[int, int]], int]:
    """Return where sequences begin and how long they are, and how many documents are cut off."""
    pieces, cut, start = [], 0, 0
    for number, end in enumerate(written.ends):
        found = _cut(start, end, sequence)
        if number in written.prompted:
            # What comes after its prompt has left the sequence would be trained on without it.
            cut += len(found) > 1
            found = found[:1]
        pieces += found
        start = end
    return pieces, cut
