"""Files become sequences: what is trained on, how they are cut, and in which order they come."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from infinity_engine.errors import ConfigError
from infinity_engine.training.documents import Document, read_documents
from infinity_engine.training.samples import (
    DataPosition,
    Samples,
    fingerprint,
    micro_batches,
    prepare,
)
from infinity_engine.training.settings import Framing
from support.tiny_directory import json_lines

END, PAD = 1000, 999


class Letters:
    """A tokenizer with a token for each letter: its number in Unicode."""

    begin: int | None = None
    end: int | None = END
    pad = PAD

    def tokens_of(self, texts: Sequence[str]) -> Sequence[Sequence[int]]:
        return [[ord(letter) for letter in text] for text in texts]


def prepared(folder: Path, *paths: Path, **options: Any) -> Samples:
    given = {"sequence": 4, "framing": Framing.AUTO, "known_as": "x", **options}
    return prepare(folder / "data", paths, given.pop("tokenizer", Letters()), **given)


def text(tokens: Any) -> str:
    special = {END: "|", PAD: "_", -100: "."}
    return "".join(special[token] if token in special else chr(token) for token in tokens.tolist())


def sequences(samples: Samples) -> list[tuple[str, str]]:
    """Return the tokens and the labels of each sequence, as text."""
    found = [samples.micro_batch([number]) for number in range(len(samples))]
    return [(text(batch.tokens[0]), text(batch.labels[0])) for batch in found]


def test_documents_of_json_lines_are_packed_without_gaps(tmp_path: Path) -> None:
    path = json_lines(tmp_path / "a.jsonl", [{"text": "abc"}, {"text": "defgh"}])

    samples = prepared(tmp_path, path)

    assert sequences(samples) == [("abc|", "abc|"), ("defg", "defg"), ("h|__", "h|..")]
    assert samples.summary.framing == "pack"
    assert (samples.summary.documents, samples.summary.tokens) == (2, 10)


def test_a_text_file_is_one_document(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("ab\n\ncd")

    assert [tokens for tokens, _ in sequences(prepared(tmp_path, path))] == ["ab\n\n", "cd|_"]


def test_a_long_text_file_is_read_in_pieces_that_end_with_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.txt"
    path.write_text("one\ntwo\nthree\n")
    monkeypatch.setattr("infinity_engine.training.documents._PIECE", 5)

    assert list(read_documents([path])) == [
        Document("one\ntwo\n", begins=True, ends=False),
        Document("three\n", begins=False, ends=True),
    ]


def test_padded_documents_each_begin_a_sequence(tmp_path: Path) -> None:
    path = json_lines(tmp_path / "a.jsonl", [{"text": "ab"}, {"text": "cdefgh"}])

    samples = prepared(tmp_path, path, framing=Framing.PAD)

    assert sequences(samples) == [("ab|", "ab|"), ("cdef", "cdef"), ("gh|", "gh|")]
    batch = samples.micro_batch([0, 1])
    assert [text(row) for row in batch.tokens] == ["ab|_", "cdef"]
    assert batch.mask.tolist() == [[1, 1, 1, 0], [1, 1, 1, 1]]
    assert batch.trained == 2 + 3


def test_prompts_are_read_and_not_trained_on(tmp_path: Path) -> None:
    path = json_lines(tmp_path / "a.jsonl", [{"prompt": "ab", "completion": "c"}])

    samples = prepared(tmp_path, path)

    assert sequences(samples) == [("abc|", "..c|")]
    assert samples.summary.framing == "pad"


def test_a_completion_after_its_prompt_has_left_the_sequence_is_cut(tmp_path: Path) -> None:
    rows = [{"prompt": "a", "completion": "bcdef"}, {"prompt": "abcdef", "completion": "g"}]

    samples = prepared(tmp_path, json_lines(tmp_path / "a.jsonl", rows))

    assert sequences(samples) == [("abcd", ".bcd")]
    assert (samples.summary.cut, samples.summary.left_out) == (2, 1)
    assert "Cut off at that length: 2 documents" in str(samples.summary)


def test_a_tokenizer_with_a_first_token_begins_each_document_with_it(tmp_path: Path) -> None:
    tokenizer = Letters()
    tokenizer.begin, tokenizer.end = ord("^"), None
    path = json_lines(tmp_path / "a.jsonl", [{"text": "ab"}, {"prompt": "c", "completion": "d"}])

    found = sequences(prepared(tmp_path, path, tokenizer=tokenizer))

    assert found == [("^ab", "^ab"), ("^cd", "..d")]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{'text': 1}", "this line is not JSON"),
        ("[1]", "got 'list'"),
        ('{"words": "a", "n": 1}', "got 'keys words (str), n (int)'"),
        ('{"text": 5}', "got 'keys text (int)'"),
        ('{"prompt": "a"}', "got 'keys prompt (str)'"),
        ("[" * 100_000, "this line is not JSON"),
    ],
)
def test_a_wrong_line_is_named_by_its_number(tmp_path: Path, line: str, said: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(f'{{"text": "a"}}\n\n{line}\n')

    with pytest.raises(ConfigError, match=re.escape(said)) as error:
        prepared(tmp_path, path)

    assert error.value.field == f"{path}, line 3"


@pytest.mark.parametrize("content", ["", "\n\n", '{"text": ""}'])
def test_files_without_tokens_are_refused(tmp_path: Path, content: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(content)

    with pytest.raises(ConfigError, match="data: expected files with two tokens at least"):
        prepared(tmp_path, path)

    assert not (tmp_path / "data").exists()


def test_a_file_that_is_missing_or_no_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"a\xff")

    with pytest.raises(ConfigError, match="No such file"):
        prepared(tmp_path, tmp_path / "none.txt")
    with pytest.raises(ConfigError, match="in UTF-8"):
        prepared(tmp_path, tmp_path / "a.txt")
    with pytest.raises(ConfigError, match="Is a directory"):
        prepared(tmp_path, tmp_path)


def test_a_line_that_is_not_utf_8_is_named(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    # Beyond what Python's own reader decodes at once, in whose pieces places are counted.
    path.write_bytes(b'{"text": "a"}\n' * 1000 + b'{"text": "caf\xe9"}\n')

    with pytest.raises(ConfigError, match=r"text in UTF-8 .* at byte 14 of the line") as error:
        prepared(tmp_path, path)

    assert error.value.field == f"{path}, line 1001"
    assert "caf\\xe9" in str(error.value.value)


@pytest.mark.parametrize("name", ["a.jsonl", "a.txt"])
def test_a_byte_order_mark_is_no_part_of_the_text(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    content = '{"text": "ab"}' if name == "a.jsonl" else "ab"
    path.write_text(content, encoding="utf-8-sig")

    assert list(read_documents([path])) == [Document("ab")]


@pytest.mark.parametrize(
    "line", ['{"text": "a\\ud83d"}', '{"prompt": "\\ud83d", "completion": "a"}']
)
def test_half_of_a_surrogate_pair_is_refused(tmp_path: Path, line: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "\\ud83d\\ude00"}\n' + line)

    with pytest.raises(ConfigError, match="half of a surrogate pair") as error:
        prepared(tmp_path, path)

    assert error.value.field == f"{path}, line 2"


def test_prepared_data_is_read_again_until_the_files_change(tmp_path: Path) -> None:
    class Counting(Letters):
        asked = 0

        def tokens_of(self, texts: Sequence[str]) -> Sequence[Sequence[int]]:
            self.asked += 1
            return super().tokens_of(texts)

    path, tokenizer = json_lines(tmp_path / "a.jsonl", [{"text": "abc"}]), Counting()
    for known_as in ("one", "one", "two"):
        prepared(tmp_path, path, tokenizer=tokenizer, known_as=known_as)

    assert tokenizer.asked == 2 * 2  # prompts and texts, twice


def test_data_whose_preparation_was_interrupted_is_made_anew(tmp_path: Path) -> None:
    path = json_lines(tmp_path / "a.jsonl", [{"text": "abc"}])
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "tokens.bin").write_bytes(b"half")

    assert sequences(prepared(tmp_path, path)) == [("abc|", "abc|")]


def test_a_fingerprint_follows_the_content_and_the_settings(tmp_path: Path) -> None:
    one, two = tmp_path / "a", tmp_path / "b"
    one.write_text("same")
    two.write_text("same")
    before = fingerprint([one], 1)

    assert fingerprint([two], 1) == before
    assert fingerprint([one], 2) != before
    two.write_text("sane")
    assert fingerprint([two], 1) != before


def numbered(folder: Path, count: int) -> Samples:
    rows = [{"text": chr(97 + number) * 3} for number in range(count)]
    return prepared(folder, json_lines(folder / "a.jsonl", rows))


def order_of(samples: Samples, count: int, *, first: int = 0, seed: int = 0) -> str:
    batches = islice(micro_batches(samples, batch=2, seed=seed, first=first), count)
    return "".join(chr(int(row[0])) for batch in batches for row in batch.tokens)


def test_every_sequence_comes_once_in_each_round(tmp_path: Path) -> None:
    samples = numbered(tmp_path, 5)

    found = order_of(samples, 10)

    rounds = [found[start : start + 5] for start in range(0, 20, 5)]
    assert all(sorted(letters) == list("abcde") for letters in rounds)
    assert len(set(rounds)) > 1


def test_the_order_follows_from_the_seed_and_goes_on_where_it_was(tmp_path: Path) -> None:
    samples = numbered(tmp_path, 5)
    whole = order_of(samples, 9)

    assert order_of(samples, 9) == whole
    assert order_of(samples, 9, seed=1) != whole
    for first in range(9):
        assert order_of(samples, 9 - first, first=first) == whole[2 * first :]


def test_the_position_in_the_data_goes_through_a_checkpoint() -> None:
    position = DataPosition(used=7)
    again = DataPosition()

    again.load_state_dict(position.state_dict())

    assert again == position


def test_labels_are_those_of_the_tokens_themselves(tmp_path: Path) -> None:
    batch = numbered(tmp_path, 3).micro_batch([0, 2])

    assert np.array_equal(batch.tokens, batch.labels)
    assert batch.trained == 2 * 3
