"""Reads documents from files of text or JSON lines, and names the place of each that is wrong.

Knows no tokens. Reads a piece at a time, so that a file may be larger than memory.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from infinity_engine.errors import ConfigError

__all__ = ["Document", "read_documents"]

_LINES = frozenset({".jsonl", ".ndjson", ".json"})
_PIECE = 1 << 20  # characters of a text file that are read at once, to the end of a line
_SHOWN = 80  # characters of a wrong line
_EXAMPLE = 'a JSON object such as {"text": "..."} or {"prompt": "...", "completion": "..."}'


class Document(NamedTuple):
    """A document, or a piece of a long one; what is in `prompt` is read and not trained on."""

    text: str
    prompt: str | None = None
    begins: bool = True
    ends: bool = True


def read_documents(paths: Sequence[Path]) -> Iterator[Document]:
    """Yield the documents of the files in order: each line of JSON lines, each other file whole.

    Raises:
        ConfigError: a file cannot be read, or a line is not what is expected; names its number.
    """
    for path in paths:
        try:
            with path.open("rb") as file:
                lines = _decoded(path, file)
                yield from _of_lines(path, lines) if path.suffix in _LINES else _of_text(lines)
        except OSError as error:
            expected = f"a file of text or JSON lines ({error.strerror})"
            raise ConfigError(field="data", value=str(path), expected=expected) from error


def _decoded(path: Path, lines: Iterable[bytes]) -> Iterator[str]:
    """Yield a file's lines as text, without the byte-order mark that it may begin with.

    Raises:
        ConfigError: a line is not UTF-8; names its number.
    """
    for number, line in enumerate(lines, start=1):
        try:
            text = line.decode("utf-8-sig" if number == 1 else "utf-8")
        except UnicodeDecodeError as error:
            place = f"{path}, line {number}"
            value = line.strip()[:_SHOWN].decode("utf-8", "backslashreplace")
            expected = f"text in UTF-8 ({error.reason} at byte {error.start + 1} of the line)"
            raise ConfigError(field=place, value=value, expected=expected) from error
        yield text


def _of_lines(path: Path, lines: Iterator[str]) -> Iterator[Document]:
    for number, line in enumerate(lines, start=1):
        if line.strip():
            yield _document(line, f"{path}, line {number}")


def _document(line: str, place: str) -> Document:
    try:
        given = json.loads(line)
    # RecursionError: JSON may nest deeper than Python reads.
    except (ValueError, RecursionError) as error:
        value = line.strip()[:_SHOWN]
        expected = f"{_EXAMPLE}; this line is not JSON ({error})"
        raise ConfigError(field=place, value=value, expected=expected) from error
    if isinstance(given, dict):
        if isinstance(given.get("text"), str):
            return Document(_whole(given["text"], place))
        if isinstance(given.get("prompt"), str) and isinstance(given.get("completion"), str):
            return Document(_whole(given["completion"], place), _whole(given["prompt"], place))
        found = ", ".join(f"{name} ({type(value).__name__})" for name, value in given.items())
        found = f"keys {found}" if found else "no keys"
    else:
        found = type(given).__name__
    raise ConfigError(field=place, value=found[:_SHOWN], expected=_EXAMPLE)


def _whole(text: str, place: str) -> str:
    """Return the text. Half of a surrogate pair, which JSON can name, is refused: it is no text."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        value = f"\\u{ord(text[error.start]):04x} at character {error.start + 1}"
        expected = "whole characters: this is half of a surrogate pair"
        raise ConfigError(field=place, value=value, expected=expected) from error
    return text


def _of_text(lines: Iterator[str]) -> Iterator[Document]:
    """Yield a text file as one document, in pieces that end with a line."""
    piece: list[str] = []
    length, is_first = 0, True
    for line in lines:
        if length >= _PIECE:
            yield Document("".join(piece), begins=is_first, ends=False)
            piece, length, is_first = [], 0, False
        piece.append(line)
        length += len(line)
    if piece:
        yield Document("".join(piece), begins=is_first)
