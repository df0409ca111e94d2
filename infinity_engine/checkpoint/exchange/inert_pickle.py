"""Reads pickles as data: dicts, lists, texts and numbers. Calls and imports nothing that they name.

[Note: why pickles cannot harm here] Python's unpickler runs whatever callable a pickle names. This
module is no such unpickler: it steps through the opcodes itself. A name becomes a `Named`, which is
two texts. A call becomes a `Built`, which keeps the name and the arguments, or what `reduce` makes
of it: a function of this package that knows a few names. So no opcode can reach a module, a class
or an attribute of this process. Time and memory follow from the length of the pickle, which is
limited, as is the number of its opcodes (decision 0031).
"""

from __future__ import annotations

import pickletools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from deepnvme.volume.framing import shown

__all__ = ["MOST_BYTES", "MOST_OPCODES", "Built", "Named", "plain_pickle"]

MOST_BYTES = 256 << 20
"""The longest pickle that is read."""

MOST_OPCODES = 16_000_000
"""The most opcodes of one pickle: about a gigabyte of objects."""

_Scalar = str | bytes | int | float | bool | None


@dataclass(frozen=True, slots=True)
class Named:
    """A class or function that a pickle names: the two texts, nothing else."""

    module: str
    name: str

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"


# eq=False: hashed by identity, so it can be a key of a dict whatever it holds.
@dataclass(eq=False, slots=True)
class Built:
    """What a pickle wants to have built: by what, of which arguments, and with which state."""

    by: object
    arguments: tuple[Any, ...]
    state: Any = None
    items: dict[Any, Any] = field(default_factory=dict)

    def give(self, state: object) -> None:
        """Note the state that it was to get."""
        self.state = state

    def get(self, name: str, default: Any = None) -> Any:
        """Return an attribute of its state, as an object of a plain class has it."""
        return self.state.get(name, default) if isinstance(self.state, dict) else default

    def __repr__(self) -> str:
        return f"<{self.by}>"  # never its content, which may hold itself


_CONSTANTS = frozenset(
    {
        "INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1", "LONG4", "FLOAT", "BINFLOAT",
        "STRING", "BINSTRING", "SHORT_BINSTRING", "UNICODE", "BINUNICODE", "SHORT_BINUNICODE",
        "BINUNICODE8", "BINBYTES", "SHORT_BINBYTES", "BINBYTES8", "BYTEARRAY8",
    }
)  # fmt: skip
_MADE: Mapping[str, Callable[[], Any]] = MappingProxyType(
    {
        "NONE": lambda: None,
        "NEWTRUE": lambda: True,
        "NEWFALSE": lambda: False,
        "EMPTY_LIST": list,
        "EMPTY_SET": list,  # in the order of the pickle
        "EMPTY_TUPLE": tuple,
        "EMPTY_DICT": dict,
    }
)


def plain_pickle(
    data: bytes,
    *,
    reduce: Callable[[object, tuple[Any, ...]], object] = Built,
    persistent: Callable[[object], object] = lambda known_by: Built(
        "a persistent object", (known_by,)
    ),
) -> Any:
    """Return what a pickle holds, as data.

    `reduce` gets each call, `persistent` each object that is kept outside the pickle.

    Raises:
        ValueError: it is no pickle, or a damaged one, or larger than what is read here; the text
            says why.
    """
    if len(data) > MOST_BYTES:
        raise ValueError(f"its pickle has {len(data)} B, of which at most {MOST_BYTES} are read")
    machine = _Machine(reduce, persistent)
    try:
        # genops decodes opcodes and their arguments. It looks no name up and calls nothing.
        for number, (opcode, argument, _) in enumerate(pickletools.genops(data)):
            if number == MOST_OPCODES:
                raise ValueError(f"its pickle has more than {MOST_OPCODES} opcodes")
            if opcode.name == "STOP":
                return machine.pop()
            machine.do(opcode.name, argument)
    # What a damaged pickle leads to: an empty stack, a missing memo entry, items of a number.
    except (IndexError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as flaw:
        raise ValueError(f"its pickle is damaged: {type(flaw).__name__}") from None
    raise ValueError("its pickle does not end")


class _Machine:
    """The stack and the memo of one pickle."""

    def __init__(
        self,
        reduce: Callable[[object, tuple[Any, ...]], object],
        persistent: Callable[[object], object],
    ) -> None:
        self._stack: list[Any] = []
        self._marks: list[int] = []
        self._memo: dict[int, Any] = {}
        self._reduce = reduce
        self._persistent = persistent

    def do(self, name: str, argument: Any) -> None:
        """Carry out one opcode."""
        if name in _CONSTANTS:
            self._stack.append(argument)
            return
        if name in _MADE:
            self._stack.append(_MADE[name]())
            return
        method = _OPCODES.get(name)
        if method is None:
            raise ValueError(f"its pickle uses the opcode {name}, which no checkpoint needs")
        method(self, argument)

    def pop(self) -> Any:
        """Return the last item."""
        # Below the mark lie items of another list.
        if self._marks and self._marks[-1] == len(self._stack):
            raise ValueError("its pickle is damaged: it takes an item that is not there")
        return self._stack.pop()

    def _pop_marked(self) -> list[Any]:
        start = self._marks.pop()
        items = self._stack[start:]
        del self._stack[start:]
        return items

    def _drop_marked(self, _: Any) -> None:
        self._pop_marked()

    def _mark(self, _: Any) -> None:
        self._marks.append(len(self._stack))

    def _pop_one(self, _: Any) -> None:
        # As in Python's own: a POP right behind a MARK takes the mark away.
        if self._marks and self._marks[-1] == len(self._stack):
            self._marks.pop()
        else:
            self._stack.pop()

    def _duplicate(self, _: Any) -> None:
        self._stack.append(self._stack[-1])

    def _list_of_marked(self, _: Any) -> None:
        self._stack.append(self._pop_marked())

    def _tuple_of_marked(self, _: Any) -> None:
        self._stack.append(tuple(self._pop_marked()))

    def tuple_of_last(self, count: int) -> None:
        """Put a tuple in the place of the last items."""
        last_first = [self.pop() for _ in range(count)]
        self._stack.append(tuple(reversed(last_first)))

    def _dict_of_marked(self, _: Any) -> None:
        made: dict[Any, Any] = {}
        _fill(made, self._pop_marked())
        self._stack.append(made)

    def _append(self, _: Any) -> None:
        value = self.pop()
        _extend(self._stack[-1], [value])

    def _appends(self, _: Any) -> None:
        values = self._pop_marked()
        _extend(self._stack[-1], values)

    def _set_item(self, _: Any) -> None:
        value, key = self.pop(), self.pop()
        _fill(self._stack[-1], [key, value])

    def _set_items(self, _: Any) -> None:
        items = self._pop_marked()
        _fill(self._stack[-1], items)

    def _memoize(self, _: Any) -> None:
        # Numbered by what is there, as Python's own does.
        self._memo[len(self._memo)] = self._stack[-1]

    def _put(self, number: int) -> None:
        self._memo[int(number)] = self._stack[-1]

    def _get(self, number: int) -> None:
        self._stack.append(self._memo[int(number)])

    def _global(self, named: str) -> None:
        module, _, name = named.partition(" ")
        self._stack.append(Named(module, name))

    def _stack_global(self, _: Any) -> None:
        name, module = self.pop(), self.pop()
        if not isinstance(name, str) or not isinstance(module, str):
            raise ValueError("its pickle is damaged: a name is no text")
        self._stack.append(Named(module, name))

    def _call(self, by: object, arguments: Any) -> None:
        if not isinstance(arguments, tuple):
            raise ValueError("its pickle is damaged: the arguments of a call are no tuple")
        self._stack.append(self._reduce(by, arguments))

    def _reduce_call(self, _: Any) -> None:
        arguments, by = self.pop(), self.pop()
        self._call(by, arguments)

    def _new_with_names(self, _: Any) -> None:
        # Keyword arguments are not kept.
        _names, arguments, by = self.pop(), self.pop(), self.pop()
        self._call(by, arguments)

    def _instance(self, named: str) -> None:
        module, _, name = named.partition(" ")
        self._call(Named(module, name), tuple(self._pop_marked()))

    def _object(self, _: Any) -> None:
        by, *arguments = self._pop_marked()
        self._call(by, tuple(arguments))

    def _build(self, _: Any) -> None:
        state = self.pop()
        target = self._stack[-1]
        if isinstance(target, Built):
            target.give(state)
        # The attributes of a dict, such as the _metadata of a module's state dict, are not needed.

    def _persistent_object(self, _: Any) -> None:
        self._stack.append(self._persistent(self.pop()))


def _extend(target: Any, values: Sequence[Any]) -> None:
    if isinstance(target, list):
        target.extend(values)
    elif isinstance(target, Built):  # a list of a class of its own
        target.items.update(
            (len(target.items) + number, value) for number, value in enumerate(values)
        )
    else:
        raise ValueError(f"its pickle is damaged: it appends to a {type(target).__name__}")


def _fill(target: Any, items: Sequence[Any]) -> None:
    into = target.items if isinstance(target, Built) else target
    if not isinstance(into, dict) or len(items) % 2:
        raise ValueError(f"its pickle is damaged: it sets items of a {type(target).__name__}")
    for at in range(0, len(items), 2):
        into[_key(items[at])] = items[at + 1]


def _key(key: Any) -> Any:
    """Return a key if its hash is cheap: tuples in tuples could take for ever."""
    parts = key if isinstance(key, tuple) else (key,)
    if len(parts) <= 16 and all(isinstance(part, _Scalar | Named | Built) for part in parts):
        return key
    raise ValueError(
        f"its pickle has a key of the type {shown(type(key).__name__)}, which no checkpoint needs"
    )


_OPCODES: Mapping[str, Callable[[_Machine, Any], None]] = MappingProxyType(
    {
        "PROTO": lambda machine, _: None,
        "FRAME": lambda machine, _: None,
        "MARK": _Machine._mark,
        "POP": _Machine._pop_one,
        "POP_MARK": _Machine._drop_marked,
        "DUP": _Machine._duplicate,
        "LIST": _Machine._list_of_marked,
        "FROZENSET": _Machine._list_of_marked,
        "TUPLE": _Machine._tuple_of_marked,
        "TUPLE1": lambda machine, _: machine.tuple_of_last(1),
        "TUPLE2": lambda machine, _: machine.tuple_of_last(2),
        "TUPLE3": lambda machine, _: machine.tuple_of_last(3),
        "DICT": _Machine._dict_of_marked,
        "APPEND": _Machine._append,
        "APPENDS": _Machine._appends,
        "ADDITEMS": _Machine._appends,
        "SETITEM": _Machine._set_item,
        "SETITEMS": _Machine._set_items,
        "MEMOIZE": _Machine._memoize,
        "PUT": _Machine._put,
        "BINPUT": _Machine._put,
        "LONG_BINPUT": _Machine._put,
        "GET": _Machine._get,
        "BINGET": _Machine._get,
        "LONG_BINGET": _Machine._get,
        "GLOBAL": _Machine._global,
        "STACK_GLOBAL": _Machine._stack_global,
        "REDUCE": _Machine._reduce_call,
        # Nothing is made here, so __new__ with arguments is as a call with them.
        "NEWOBJ": _Machine._reduce_call,
        "NEWOBJ_EX": _Machine._new_with_names,
        "INST": _Machine._instance,
        "OBJ": _Machine._object,
        "BUILD": _Machine._build,
        "BINPERSID": _Machine._persistent_object,
    }
)
