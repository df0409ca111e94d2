"""deepnvme.store.manifest: what is encoded is parsed again, and whatever else the bytes are is refused by
a ManifestError.
"""

from __future__ import annotations

import copy
import gc
import json
import pickle
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from deepnvme.errors import StoreError
from deepnvme.memory.arrays import ITEMSIZES, nbytes_of
from deepnvme.memory.checksum import CHECKSUM_BYTES, crc32c
from deepnvme.sizes import PAGE
from deepnvme.store.manifest import Manifest, ManifestError, Record, check_name, encode, parse
from deepnvme.volume.extents import Extent

VOLUME = "5f1c0f6e2f0b4d8ea3a1c2d3e4f50617"
CAPACITIES = (1 << 30, 1 << 32)
WEIGHT = Record(
    "F32",
    (1000, 700),
    (Extent(0, 4096, 1_400_832), Extent(1, 8192, 1_399_168)),
    (1, 0xFFFFFFFF, 0xABC),
)
EXAMPLE = Manifest(
    VOLUME,
    7,
    {
        "weight": WEIGHT,
        "bias": Record("BF16", (3,), (Extent(0, 1_409_024, 6),), None),
        "empty": Record("U8", (0, 5), (), ()),
        "größe/✓": Record("I64", (), (Extent(1, 4096, 8),), (0x01020304,)),
    },
    {"model": {"dict": [["weight", {"tensor": "weight"}], [0, 0.5]]}, "": None},
)


def read(data: bytes) -> Manifest:
    return parse(data, volume=VOLUME, capacities=CAPACITIES)


def framed(content: Any) -> bytes:
    """Return the file of any content, with the length and checksum that belong to it."""
    text = content if isinstance(content, bytes) else json.dumps(content).encode()
    return f"deepnvme-store 1 {len(text)} {crc32c(text):08x}\n".encode() + text


def content_of(manifest: Manifest) -> Any:
    return json.loads(encode(manifest).split(b"\n", 1)[1])


def changed(path: tuple[Any, ...], value: Any) -> bytes:
    """Return the example with something else at that place of its JSON."""
    content = content_of(EXAMPLE)
    place = content
    for step in path[:-1]:
        place = place[step]
    place[path[-1]] = value
    return framed(content)


# --- what is encoded is parsed --------------------------------------------------------------------


def test_a_manifest_is_parsed_as_it_was_encoded() -> None:
    assert read(encode(EXAMPLE)) == EXAMPLE


def test_an_empty_manifest_is_valid() -> None:
    manifest = Manifest(VOLUME, 1, {}, {})

    assert read(encode(manifest)) == manifest


def test_order_is_kept() -> None:
    assert list(read(encode(EXAMPLE)).tensors) == ["weight", "bias", "empty", "größe/✓"]


def test_the_first_line_says_what_it_is() -> None:
    line, payload = encode(EXAMPLE).split(b"\n", 1)

    assert line == f"deepnvme-store 1 {len(payload)} {crc32c(payload):08x}".encode()


def test_a_manifest_is_compact_text_and_a_checksum_eight_digits() -> None:
    assert b'"crc32c":"00000001ffffffff00000abc"' in encode(EXAMPLE)
    assert "größe/✓".encode() in encode(EXAMPLE)


@pytest.mark.parametrize("count", [0, 1, 127, 128, 129, 1000])
def test_a_manifest_is_the_json_of_its_content_however_many_tensors_it_has(count: int) -> None:
    tensors = {
        f'"{n}"': Record("F32", (64,), (Extent(0, PAGE * (n + 1), 256),), (n,))
        for n in range(count)
    }

    data = encode(Manifest(VOLUME, 3, tensors, EXAMPLE.trees))

    content = {
        "volume": VOLUME,
        "generation": 3,
        "tensors": {
            name: {
                "dtype": "F32",
                "shape": [64],
                "extents": [[0, PAGE * (n + 1), 256]],
                "crc32c": f"{n:08x}",
            }
            for n, name in enumerate(tensors)
        },
        "trees": EXAMPLE.trees,
    }
    assert (
        data.split(b"\n", 1)[1]
        == json.dumps(content, ensure_ascii=False, separators=(",", ":")).encode()
    )


def test_a_record_knows_its_bytes_and_where_they_are() -> None:
    assert WEIGHT.nbytes == 2_800_000
    assert WEIGHT.extents == (Extent(0, 4096, 1_400_832), Extent(1, 8192, 1_399_168))
    assert EXAMPLE.tensors["empty"].extents == ()


def test_of_many_records_the_garbage_collector_looks_after_little() -> None:
    record = EXAMPLE.tensors["größe/✓"]
    gc.collect()
    assert not any(map(gc.is_tracked, (record.shape, record.places, record.checksums)))


def test_many_tensors_take_little_room() -> None:
    tensors = {
        f"layers.{n}.weight": Record("F32", (64,), (Extent(0, 4096 * (n + 1), 256),), (n,))
        for n in range(5000)
    }
    manifest = Manifest(VOLUME, 1, tensors, {})

    data = encode(manifest)

    assert len(data) < 5000 * 150
    assert read(data) == manifest


names = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
plain = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63)
    | st.floats(allow_nan=False, allow_infinity=False)
)
trees = st.recursive(
    plain | names,
    lambda node: st.lists(node, max_size=3) | st.dictionaries(names, node, max_size=3),
    max_leaves=8,
)


@st.composite
def manifests(draw: st.DrawFn) -> Manifest:
    """Tensors that follow one another in their members, in one to three pieces, some with
    checksums.
    """
    ends = [PAGE] * len(CAPACITIES)
    tensors = {}
    for name in draw(st.lists(names, unique=True, max_size=5)):
        dtype = draw(st.sampled_from(sorted(ITEMSIZES)))
        shape = tuple(draw(st.lists(st.integers(0, 100), max_size=3)))
        nbytes = nbytes_of(dtype, shape)
        pages = st.integers(0, nbytes // PAGE).map(lambda count: count * PAGE)
        cuts = sorted({0, nbytes, *draw(st.lists(pages, max_size=2))})
        extents = []
        for first, last in pairwise(cuts):
            member = draw(st.integers(0, len(CAPACITIES) - 1))
            offset = ends[member] + PAGE * draw(st.integers(0, 3))
            extents.append(Extent(member, offset, last - first))
            ends[member] = extents[-1].end
        count = -(-nbytes // CHECKSUM_BYTES)
        sums = draw(
            st.none()
            | st.lists(st.integers(0, 2**32 - 1), min_size=count, max_size=count).map(tuple)
        )
        tensors[name] = Record(dtype, shape, tuple(extents), sums)
    return Manifest(
        VOLUME,
        draw(st.integers(1, 2**63 - 1)),
        tensors,
        draw(st.dictionaries(names, trees, max_size=2)),
    )


@given(manifests())
def test_every_manifest_is_parsed_as_it_was_encoded(manifest: Manifest) -> None:
    assert read(encode(manifest)) == manifest


# --- damage ---------------------------------------------------------------------------------------


@given(manifests(), st.data())
def test_a_flipped_bit_is_always_refused(manifest: Manifest, data: st.DataObject) -> None:
    damaged = bytearray(encode(manifest))
    damaged[data.draw(st.integers(0, len(damaged) - 1))] ^= 1 << data.draw(st.integers(0, 7))

    with pytest.raises(ManifestError):
        read(bytes(damaged))


def test_every_flipped_bit_of_the_example_is_refused() -> None:
    whole = encode(EXAMPLE)
    believed = []
    for place in range(8 * len(whole)):
        damaged = bytearray(whole)
        damaged[place // 8] ^= 1 << place % 8
        try:
            read(bytes(damaged))
        except ManifestError:
            continue
        believed.append(place)

    assert believed == []


@given(manifests(), st.data())
def test_a_manifest_that_was_cut_or_added_to_is_refused(
    manifest: Manifest, data: st.DataObject
) -> None:
    whole = encode(manifest)
    shorter = whole[: data.draw(st.integers(0, len(whole) - 1))]

    for damaged in (shorter, whole + b"\0", whole + b" ", whole + whole):
        with pytest.raises(ManifestError):
            read(damaged)


@given(st.binary(max_size=300))
@example(b"")
@example(b"\0" * 4096)
@example(b"deepnvme-store 1 0 00000000\n")
@example(b"deepnvme-store 1 ")
@example(b"deepnvme-store 1 99999999999999999999999 00000000\n")
def test_bytes_that_are_no_manifest_are_refused(data: bytes) -> None:
    with pytest.raises(ManifestError):
        read(data)


@given(st.binary(max_size=300))
@example(b"\xff")
@example(b'{"volume": "\xed\xa0\x80"}')
@example(b"")
@example(b"null")
@example(b"[" * 100_000)
@example(b'{"a":' * 100_000)
@example(b"9" * 100_000)
@example(b"-" + b"9" * 100_000)
@example(b"1e999")
@example(b"NaN")
@example(b"-Infinity")
@example(b"1." + b"1" * 100_000)
def test_a_frame_around_any_bytes_is_refused(payload: bytes) -> None:
    with pytest.raises(ManifestError):
        read(framed(payload))


def nodes(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Return the path of everything in a JSON value."""
    inner: Any = (
        value.items()
        if isinstance(value, dict)
        else enumerate(value)
        if isinstance(value, list)
        else ()
    )
    return [path, *(found for key, each in inner for found in nodes(each, (*path, key)))]


STRANGE: list[Any] = [
    None, True, False, 0, 1, -1, 4096, 4097, 2**31, 2**63 - 1, 2**63, 2**64, 10**300, 0.0, 1.5, 1e308, "", "F32", "U8",
    "0", "00000000", "\ud800", "weight", [], [[]], [0], [0, 4096, 6], {}, {"": 0}, {"dict": []},
]  # fmt: skip


def mutate(content: Any, data: st.DataObject) -> Any:
    """Replace, remove or double something in the JSON."""
    content = copy.deepcopy(content)
    paths = nodes(content)
    path = data.draw(st.sampled_from(paths))
    if not path:
        return data.draw(st.sampled_from(STRANGE))
    place = content
    for step in path[:-1]:
        place = place[step]
    kind = data.draw(st.sampled_from(["replace", "remove", "double", "other"]))
    if kind == "remove":
        del place[path[-1]]
    elif kind == "double" and isinstance(place, list):
        place.insert(path[-1], copy.deepcopy(place[path[-1]]))
    elif kind == "double":
        place[f"{path[-1]}'"] = copy.deepcopy(place[path[-1]])
    else:
        value: Any = (
            content_of(EXAMPLE) if kind == "other" else data.draw(st.sampled_from(STRANGE) | trees)
        )
        for step in data.draw(st.sampled_from(nodes(value))):
            value = value[step]
        place[path[-1]] = value
    return content


def check_sound(manifest: Manifest) -> None:
    """State, in other words than the parser's, what a manifest promises whoever reads tensors by
    it.
    """
    pages: set[tuple[int, int]] = set()
    for record in manifest.tensors.values():
        elements = 1
        for size in record.shape:
            assert type(size) is int
            assert 0 <= size < 2**63
            elements *= size
        nbytes = elements * ITEMSIZES[record.dtype]
        assert record.nbytes == nbytes
        assert (
            record.checksums is None
            or len(record.checksums) == (nbytes + CHECKSUM_BYTES - 1) // CHECKSUM_BYTES
        )
        for extent in record.extents:
            assert extent.offset >= PAGE
            assert extent.offset % PAGE == 0
            assert extent.offset + extent.nbytes <= PAGE + CAPACITIES[extent.member]
            own = {
                (extent.member, page) for page in range(extent.offset // PAGE, extent.end // PAGE)
            }
            assert not own & pages
            pages |= own
    assert manifest.volume == VOLUME
    assert type(manifest.generation) is int
    assert 1 <= manifest.generation < 2**63


@settings(max_examples=400)
@given(manifests() | st.just(EXAMPLE), st.data())
def test_a_forged_manifest_is_sound_or_refused(manifest: Manifest, data: st.DataObject) -> None:
    content = mutate(content_of(manifest), data)
    if data.draw(st.booleans()):
        content = mutate(content, data)

    try:
        parsed = read(framed(content))
    except ManifestError:
        return
    check_sound(parsed)
    assert read(encode(parsed)) == parsed


# --- what is refused, and with which words --------------------------------------------------------

Change = tuple[tuple[Any, ...], Any, str]
WEIGHT_AT = ("tensors", "weight")
CHANGES: tuple[Change, ...] = (
    (("volume",), "0" * 32, "of the volume '0000"),
    (("volume",), 7, "of the volume 7"),
    (("generation",), 0, "generation as a whole number from 1"),
    (("generation",), True, "got True"),
    (("generation",), 7.0, r"got 7\.0"),
    (("generation",), 2**63, "got 9223372036854775808"),
    (("generation",), "7", "got '7'"),
    (("generation",), 10**40, r"number 10000000000000000000\.\.\. is too long"),
    (("tensors",), [], r"tensors as an object, got \[\]"),
    (("trees",), None, "trees as an object, got None"),
    (("more",), 1, "'more'"),
    (("tensors", "a\ud800"), {}, "half of a surrogate pair"),
    (("trees", "a\ud800"), {}, "half of a surrogate pair"),
    (("trees", "model"), {"dict": [["\udfff", 1]]}, "tree 'model': .* half of a surrogate pair"),
    (
        (*WEIGHT_AT, "more"),
        1,
        "tensor 'weight': expected an object with dtype, shape, extents, crc32c",
    ),
    (WEIGHT_AT, [], "tensor 'weight'"),
    ((*WEIGHT_AT, "dtype"), "F33", "one of the dtypes .* got 'F33'"),
    ((*WEIGHT_AT, "dtype"), ["F32"], r"dtype as text, got \['F32'\]"),
    ((*WEIGHT_AT, "shape"), [1000], r"extents hold 2800000 B, F32 of shape \[1000\] takes 4000"),
    ((*WEIGHT_AT, "shape"), [1000, 700.0], "list of whole numbers"),
    ((*WEIGHT_AT, "shape"), [True], "list of whole numbers"),
    ((*WEIGHT_AT, "shape"), [-1000, -700], "sizes from 0"),
    ((*WEIGHT_AT, "shape"), [2**62, 2**62], r"less than 2\*\*63 bytes"),
    ((*WEIGHT_AT, "shape"), [1] * 65, "64 dimensions at most, got 65"),
    ((*WEIGHT_AT, "shape"), "1000", "list of whole numbers"),
    ((*WEIGHT_AT, "extents"), None, "extents as a list"),
    ((*WEIGHT_AT, "extents"), [], "extents hold 0 B"),
    ((*WEIGHT_AT, "extents", 0), [0, 4096], r"\[member, offset, bytes\]"),
    ((*WEIGHT_AT, "extents", 0, 0), 2, "member as a whole number from 0 to 1, got 2"),
    ((*WEIGHT_AT, "extents", 0, 0), -1, "member as a whole number"),
    ((*WEIGHT_AT, "extents", 0, 0), False, "member as a whole number"),
    ((*WEIGHT_AT, "extents", 0, 1), 0, "offset as a whole number from 4096"),
    ((*WEIGHT_AT, "extents", 0, 1), 4097, "multiple of 4096"),
    ((*WEIGHT_AT, "extents", 0, 1), 1 << 30, "reaches beyond the end of that member, 1073745920"),
    ((*WEIGHT_AT, "extents", 0, 1), 2**63 - 4096, "reaches beyond the end"),
    ((*WEIGHT_AT, "extents", 0, 2), 0, "bytes as a whole number from 1"),
    ((*WEIGHT_AT, "extents", 0, 2), 1_400_832 + PAGE, "extents hold 2804096 B"),
    ((*WEIGHT_AT, "extents", 0, 2), 1_400_833, "all its extents but the last must be whole pages"),
    (
        (*WEIGHT_AT, "crc32c"),
        "00000001ffffffff",
        "3 checksums of 8 hexadecimal digits each for 2800000 B",
    ),
    ((*WEIGHT_AT, "crc32c"), "00000001FFFFFFFF00000abc", "hexadecimal digits"),
    ((*WEIGHT_AT, "crc32c"), " 0000001ffffffff00000abc", "hexadecimal digits"),
    ((*WEIGHT_AT, "crc32c"), [1, 2, 3], "hexadecimal digits"),
    (
        ("tensors", "bias", "extents", 0, 1),
        1_400_832,
        "tensors 'weight' and 'bias' overlap: in member 0",
    ),
    (("tensors", "bias", "extents", 0, 1), 4096, "overlap"),
    (
        ("tensors", "weight", "extents", 1),
        [0, 4096, 1_399_168],
        "tensors 'weight' and 'weight' overlap",
    ),
)


@pytest.mark.parametrize(("path", "value", "message"), CHANGES)
def test_what_is_wrong_is_named(path: tuple[Any, ...], value: Any, message: str) -> None:
    with pytest.raises(ManifestError, match=f"not a valid manifest: .*{message}"):
        read(changed(path, value))


@pytest.mark.parametrize("field", ["dtype", "shape", "extents", "crc32c"])
def test_a_missing_field_is_named(field: str) -> None:
    content = content_of(EXAMPLE)
    del content["tensors"]["bias"][field]

    with pytest.raises(ManifestError, match=f"tensor 'bias': expected an object with .*{field}"):
        read(framed(content))


def test_tensors_may_touch_and_reach_the_very_end() -> None:
    last = CAPACITIES[0]  # the header's page before it makes this the last one
    tensors = {
        "a": Record("U8", (5,), (Extent(0, last - PAGE, 5),), None),
        "b": Record("U8", (PAGE,), (Extent(0, last, PAGE),), None),
    }
    manifest = Manifest(VOLUME, 1, tensors, {})

    assert read(encode(manifest)) == manifest


def test_a_tensor_beyond_the_last_page_is_refused_though_its_bytes_would_fit_elsewhere() -> None:
    tensors = {"a": Record("U8", (1,), (Extent(0, PAGE + CAPACITIES[0], 1),), None)}

    with pytest.raises(ManifestError, match="reaches beyond the end"):
        read(encode(Manifest(VOLUME, 1, tensors, {})))


def test_a_name_that_stands_twice_is_refused() -> None:
    text = encode(EXAMPLE).split(b"\n", 1)[1].replace(b'"bias":', b'"weight":')

    with pytest.raises(ManifestError, match="'weight' stands twice in one object"):
        read(framed(text))


def test_half_a_surrogate_pair_is_refused_and_a_whole_one_is_text() -> None:
    whole = Manifest(VOLUME, 1, {}, {"🙂": "🙂"})
    escaped = json.dumps(content_of(whole)).encode()

    assert b"\\ud83d" in escaped
    assert read(framed(escaped)) == whole


def test_another_version_of_the_format_is_told_apart_from_damage() -> None:
    with pytest.raises(
        ManifestError, match="version 2 of the format, this deepnvme reads 1: use a newer one"
    ):
        read(b"deepnvme-store 2 whatever comes then")


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", r'begin with "deepnvme-store 1 ", got b\'\''),
        (b"deepnvme-volume 1 2 00000000\n{}", "begin with"),
        (b"deepnvme-store 01 2 00000000\n{}", "begin with"),
        (b"deepnvme-store 1 02 00000000\n{}", "length, a checksum"),
        (b"deepnvme-store 1 2 0000000G\n{}", "length, a checksum"),
        (b"deepnvme-store 1 3 00000000\n{}", "announces 3 B, 2 follow: it was cut or added to"),
        (
            b"deepnvme-store 1 2 00000000\n{}",
            "checksum is [0-9a-f]{8}, its first line says 00000000: it is damaged",
        ),
    ],
)
def test_a_damaged_frame_says_what_is_wrong(data: bytes, message: str) -> None:
    with pytest.raises(ManifestError, match=message):
        read(data)


def nested(depth: int, wrap: Callable[[Any], Any]) -> Any:
    value: Any = 0
    for _ in range(depth):
        value = wrap(value)
    return value


def test_a_tree_nested_deeper_than_any_state_is_refused() -> None:
    wrap: Callable[[Any], Any] = lambda value: [value]  # noqa: E731 - as an argument it would need no name

    assert read(framed({**content_of(EXAMPLE), "trees": {"t": nested(300, wrap)}})).trees[
        "t"
    ] == nested(300, wrap)
    with pytest.raises(ManifestError, match="tree 't': it is nested more than"):
        read(framed({**content_of(EXAMPLE), "trees": {"t": nested(450, wrap)}}))


def test_nesting_that_exhausts_the_stack_is_refused() -> None:
    with pytest.raises(ManifestError, match="nested too deeply"):
        read(framed(b"[" * sys.getrecursionlimit() * 100))


def test_a_message_stays_short_whatever_was_stored() -> None:
    with pytest.raises(ManifestError) as refusal:
        read(changed(("tensors", "x" * 1_000_000), {"y" * 1_000_000: 0}))

    assert len(str(refusal.value)) < 1000


# --- the error and the names ----------------------------------------------------------------------


def test_the_error_names_the_file_and_is_a_store_error_and_a_value_error() -> None:
    with pytest.raises(ManifestError, match=r"'/store/manifest\.1'") as refusal:
        parse(b"", volume=VOLUME, capacities=CAPACITIES, path="/store/manifest.1")

    assert isinstance(refusal.value, StoreError)
    assert isinstance(refusal.value, ValueError)
    assert refusal.value.path == "/store/manifest.1"
    assert str(pickle.loads(pickle.dumps(refusal.value))) == str(refusal.value)


@pytest.mark.parametrize("name", ["", "weight", "a/b", "größe", "🙂", "\0", "x" * 10_000])
def test_any_text_is_a_name(name: str) -> None:
    assert check_name(name) == name
    manifest = replace(EXAMPLE, tensors={name: WEIGHT})
    assert read(encode(manifest)) == manifest


def test_what_is_no_text_is_no_name() -> None:
    with pytest.raises(TypeError, match="a name as str, got int"):
        check_name(7)
    with pytest.raises(ValueError, match=re.escape(r"got 'a\ud800'")):
        check_name("a\ud800")
