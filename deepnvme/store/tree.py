"""A state dict as its structure, which is JSON, and its leaves: tensors and arrays, each under a
name of its own.

Nothing is pickled, and building a state runs no code. What cannot be kept exactly is refused, with
what to do. A structure that was read is not trusted: `leaves` and `unflatten` check it. Called by
the store and `deepnvme.checkpoint`.
"""

from __future__ import annotations

import base64
import math
import re
import struct
import sys
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping
from types import MappingProxyType
from typing import Any

from deepnvme.memory.arrays import Returns, code_of, numpy_dtype
from deepnvme.memory.buffers import torch_of
from deepnvme.store.manifest import ManifestError, check_name
from deepnvme.volume.framing import shown

__all__ = ["MAX_DEPTH", "flatten", "leaves", "unflatten"]

MAX_DEPTH = 64
"""How deep containers may be nested."""

_Path = tuple[object, ...]

_MAX_PLAIN = (1 << 53) - 1  # every reader of JSON has numbers up to here exactly
_NAMELESS = "_"
_MOST_PLAIN_BYTES = 4096  # more lie in extents, as tensors do, and not in the structure
_LEAVES = MappingProxyType({"tensor": Returns.TORCH, "array": Returns.NUMPY, "blob": Returns.BYTES})


def flatten(state: Any) -> tuple[Any, dict[str, Any]]:
    """Return the structure of `state` and its tensors, arrays and long bytes by name.

    Kept exactly: dicts and OrderedDicts in their order, lists, tuples, keys and values that are
    str, int, bool, float or None, bytes, and numpy's scalars. One tensor in several places stays
    one tensor, also where several objects refer to it, as in the state dict of tied weights. Views
    that share only a part of their bytes become separate tensors. A Parameter comes back as a
    tensor. Attributes of containers, such as the `_metadata` of a module's state dict, are not
    kept.

    A name is made of the keys on the way to the leaf, with dots between them. Only the structure
    says where a leaf belongs. No name has a slash: callers put one before it.

    Raises:
        TypeError: it has something else in it: where, what it is, what to do.
        ValueError: it is nested too deeply, perhaps in itself, or text in it is not valid.
    """
    flattening = _Flattening()
    structure = flattening.node(state, ())
    return structure, flattening.leaves


def leaves(structure: Any) -> dict[str, Returns]:
    """Return the names of the leaves, each with its kind: a tensor (TORCH), an array (NUMPY) or
    bytes.

    Raises:
        ManifestError: it is not a structure that `flatten` makes.
    """
    found: dict[str, Returns] = {}

    def note(name: str, kind: Returns) -> None:
        if found.setdefault(name, kind) is not kind:
            raise ValueError(f"the leaf {name!r} is of two kinds")

    _built(structure, note)
    return found


def unflatten(structure: Any, tensors: Mapping[str, Any]) -> Any:
    """Return the state of this structure, with `tensors` as its leaves.

    Raises:
        ManifestError: it is not a structure that `flatten` makes, or a leaf is missing.
    """
    blobs: dict[str, bytes] = {}

    def leaf(name: str, kind: Returns) -> Any:
        if name not in tensors:
            raise ValueError(f"the {kind.name.lower()} leaf {name!r} is missing")
        if kind is not Returns.BYTES:
            return tensors[name]
        if name not in blobs:
            blobs[name] = bytes(tensors[name])
        return blobs[name]

    return _built(structure, leaf)


# --- taking apart ---------------------------------------------------------------------------------


class _Flattening:
    """The leaves found so far."""

    def __init__(self) -> None:
        self.leaves: dict[str, Any] = {}
        self._names: dict[Hashable, str] = {}  # of the leaves, by their _identity()
        self._used: dict[str, int] = {}  # how many leaves wanted a name

    def node(self, value: Any, path: _Path) -> Any:
        """Return the JSON of `value`."""
        kind = type(value)
        if kind in (dict, OrderedDict, list, tuple):
            if len(path) == MAX_DEPTH:
                raise ValueError(
                    f"{_place(path)} lies in {MAX_DEPTH} containers, the most there may be; is one "
                    "in itself?"
                )
            return self._container(value, path)
        if kind is bytes and len(value) > _MOST_PLAIN_BYTES:
            return {"blob": self._name_of(value, path)}
        if value is None or kind in (bool, int, float, str, bytes):
            return _plain(value, path)
        tag = _leaf_tag(value)
        if tag is None:
            return _numpy_scalar(value, path)
        try:
            code_of(value)
        except TypeError as refusal:
            raise TypeError(f"{_place(path)}: {refusal}") from None
        return {tag: self._name_of(value, path)}

    def _container(self, value: Any, path: _Path) -> Any:
        if isinstance(value, dict):
            pairs = [
                [_key(key, path), self.node(item, (*path, key))] for key, item in value.items()
            ]
            return {"ordered" if type(value) is OrderedDict else "dict": pairs}
        nodes = [self.node(item, (*path, index)) for index, item in enumerate(value)]
        return nodes if type(value) is list else {"tuple": nodes}

    def _name_of(self, leaf: Any, path: _Path) -> str:
        known = _identity(leaf)
        if known not in self._names:
            # A slash parts a state's name from its leaf's. Keys with dots can give two leaves the
            # same name, which the loop below tells apart.
            wanted = ".".join(str(part) for part in path).replace("/", "%2F") or _NAMELESS
            name = wanted
            while name in self.leaves:
                self._used[wanted] = self._used.get(wanted, 1) + 1
                name = f"{wanted}~{self._used[wanted]}"
            self._names[known] = name
            self.leaves[name] = leaf
        return self._names[known]


def _identity(leaf: Any) -> Hashable:
    """Return what is equal for two leaves that are one: same memory seen in the same way."""
    torch = torch_of(leaf)
    if torch is not None:
        if (
            leaf.layout == torch.strided
            and leaf.numel()
            and leaf.device.type != "meta"
            # The address of a tensor without memory is 0: two such tensors are not one.
            and leaf.data_ptr()
        ):
            # A lazy view shares memory with its base, and has other values.
            bits = (leaf.is_conj(), leaf.is_neg())
            return (
                "tensor",
                leaf.device,
                leaf.data_ptr(),
                leaf.dtype,
                tuple(leaf.shape),
                leaf.stride(),
                bits,
            )
    elif not isinstance(leaf, bytes) and leaf.size:
        return "array", leaf.ctypes.data, leaf.dtype.str, leaf.shape, leaf.strides
    return id(leaf)


def _key(key: Any, path: _Path) -> Any:
    if key is not None and type(key) not in (bool, int, float, str):
        raise TypeError(
            f"{_place(path)} has the key {shown(key)}, a {_kind(key)}: expected str, int, bool, "
            "float or None; convert it first"
        )
    return _plain(key, (*path, key))


def _plain(value: Any, path: _Path) -> Any:
    if isinstance(value, bytes):
        return {"bytes": base64.b64encode(value).decode()}
    if isinstance(value, str):
        try:
            return check_name(value)
        except ValueError:
            raise ValueError(
                f"{_place(path)}: the text {shown(value)} has half of a surrogate pair, which "
                "UTF-8 cannot keep: give it as bytes"
            ) from None
    # By its bits: JSON has no such number, and so a NaN keeps its payload.
    if isinstance(value, float) and not math.isfinite(value):
        return {"float": struct.pack(">d", value).hex()}
    if isinstance(value, int) and not -_MAX_PLAIN <= value <= _MAX_PLAIN:
        return {"int": hex(value)}
    return value


def _leaf_tag(value: Any) -> str | None:
    """Return the tag of a leaf, None of anything else. Imports neither torch nor numpy."""
    if torch_of(value) is not None:
        return "tensor"
    numpy = sys.modules.get("numpy")
    return "array" if numpy is not None and isinstance(value, numpy.ndarray) else None


def _numpy_scalar(value: Any, path: _Path) -> Any:
    numpy = sys.modules.get("numpy")
    # numpy's texts are also Python's: they are refused with the advice to make them plain.
    if numpy is None or not isinstance(value, numpy.generic) or isinstance(value, (str, bytes)):
        raise TypeError(
            f"{_place(path)} is a {_kind(value)}, which a state dict cannot keep: {_advice(value)}"
        )
    try:
        return {"numpy": [code_of(value), value.tobytes().hex()]}
    except TypeError as refusal:
        raise TypeError(f"{_place(path)}: {refusal}") from None


def _advice(value: Any) -> str:
    for kind, advice in (
        (tuple, "make it a plain tuple first: tuple(...)"),
        (dict, "make it a plain dict first: dict(...)"),
        (list, "make it a plain list first: list(...)"),
        (
            (int, float, str, bytes),
            "make it a plain value first: int(...), float(...), str(...), bytes(...)",
        ),
        ((bytearray, memoryview), "make it bytes, or an array: numpy.frombuffer(...)"),
        ((set, frozenset), "make it a list first: sorted(...)"),
    ):
        if isinstance(value, kind):
            return advice
    if type(value).__module__.split(".")[0] == "torch":
        return "give its str(...), and make it anew from that"
    return "give its state as a dict of tensors, arrays and plain values, or its pickle as bytes"


def _kind(value: object) -> str:
    kind = type(value)
    return (
        kind.__qualname__
        if kind.__module__ == "builtins"
        else f"{kind.__module__}.{kind.__qualname__}"
    )


# --- building again -------------------------------------------------------------------------------


def _built(structure: Any, leaf: Callable[[str, Returns], Any]) -> Any:
    try:
        return _value(structure, leaf, ())
    except ValueError as flaw:
        raise ManifestError(f"not the structure of a state dict: {flaw}") from None


def _value(node: Any, leaf: Callable[[str, Returns], Any], path: _Path) -> Any:
    if isinstance(node, list):
        return _values(node, leaf, path)
    if not isinstance(node, dict):
        return _plain_value(node, path)
    if len(node) != 1:
        raise _refusal(path, "an object with one tag", node)
    [(tag, content)] = node.items()
    if tag in ("dict", "ordered"):
        return _mapping(content, leaf, path, OrderedDict if tag == "ordered" else dict)
    if tag == "tuple":
        return tuple(_values(content, leaf, path))
    if tag in _LEAVES:
        if not isinstance(content, str):
            raise _refusal(path, "the name of a leaf", content)
        return leaf(content, _LEAVES[tag])
    return _tagged_value(tag, content, path)


def _values(nodes: Any, leaf: Callable[[str, Returns], Any], path: _Path) -> list[Any]:
    _check_container(nodes, path)
    return [_value(node, leaf, (*path, index)) for index, node in enumerate(nodes)]


def _mapping(
    pairs: Any, leaf: Callable[[str, Returns], Any], path: _Path, kind: type[dict[Any, Any]]
) -> dict[Any, Any]:
    _check_container(pairs, path)
    found = kind()
    for pair in pairs:
        if not isinstance(pair, list) or len(pair) != 2:
            raise _refusal(path, "a key and a value", pair)
        key = _key_value(pair[0], path)
        if key in found:
            raise ValueError(f"{_place(path)} has the key {shown(key)} twice")
        found[key] = _value(pair[1], leaf, (*path, key))
    return found


def _check_container(nodes: Any, path: _Path) -> None:
    if not isinstance(nodes, list):
        raise _refusal(path, "a list", nodes)
    if len(path) == MAX_DEPTH:
        raise ValueError(f"{_place(path)} lies in more than {MAX_DEPTH} containers")


def _key_value(node: Any, path: _Path) -> Any:
    if isinstance(node, dict) and len(node) == 1 and ("int" in node or "float" in node):
        [(tag, content)] = node.items()
        return _tagged_value(tag, content, path)
    if isinstance(node, dict | list):
        raise _refusal(path, "a plain value as a key", node)
    return _plain_value(node, path)


def _plain_value(node: Any, path: _Path) -> Any:
    if node is not None and not isinstance(node, bool | int | float | str):
        raise _refusal(path, "JSON", node)
    return node


def _tagged_value(tag: str, content: Any, path: _Path) -> Any:
    if tag == "int" and isinstance(content, str) and re.fullmatch("-?0x[0-9a-f]+", content):
        return int(content, 16)
    if tag == "float" and isinstance(content, str) and re.fullmatch("[0-9a-f]{16}", content):
        return struct.unpack(">d", bytes.fromhex(content))[0]
    if tag == "bytes" and isinstance(content, str):
        try:
            return base64.b64decode(content, validate=True)
        except ValueError as flaw:
            raise ValueError(
                f"{_place(path)}: expected bytes in base64, got {shown(content)} ({flaw})"
            ) from None
    if tag == "numpy" and isinstance(content, list) and len(content) == 2:
        return _numpy_value(content[0], content[1], path)
    raise _refusal(path, "a tag of this format with its content", {tag: content})


def _numpy_value(code: Any, digits: Any, path: _Path) -> Any:
    import numpy as np

    try:
        [value] = np.frombuffer(bytes.fromhex(digits), numpy_dtype(code))
    except (TypeError, ValueError, KeyError) as flaw:
        raise ValueError(f"{_place(path)} is no scalar of numpy: {flaw}") from None
    if value.tobytes().hex() != digits:  # a bool of 2, or spaces between the digits
        raise ValueError(
            f"{_place(path)} is no scalar of numpy: {code} is never written as {shown(digits)}"
        )
    return value


def _refusal(path: _Path, expected: str, node: Any) -> ValueError:
    return ValueError(f"{_place(path)}: expected {expected}, got {shown(node)}")


def _place(path: _Path) -> str:
    """Return the place in the state, as Python would write it."""
    return "state" + "".join(f"[{shown(part)}]" for part in path)
