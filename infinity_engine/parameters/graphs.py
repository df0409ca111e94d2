"""Reads autograd's graphs: which parameters custom functions keep, and what modules did not use.

Looks at nodes only. Changes no graph, and starts no fetch.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import Node

__all__ = ["GraphParts", "custom_functions", "nodes_of", "tensors_kept_by"]

_DEPTH = 5  # of containers within containers


def nodes_of(tensors: Iterable[torch.Tensor]) -> Collection[Node]:
    """Return every node of the graphs that made these tensors, once."""
    waiting = [tensor.grad_fn for tensor in tensors if tensor.grad_fn is not None]
    # Paths share nodes: without this, the walk could take for ever.
    seen: dict[Node, None] = {}
    while waiting:
        node = waiting.pop()
        if node not in seen:
            seen[node] = None
            for source, _ in node.next_functions:
                if source is not None:
                    waiting.append(source)
    return seen.keys()


def custom_functions(tensors: Iterable[torch.Tensor]) -> list[Node]:
    """Return the nodes of each `torch.autograd.Function` in these graphs: a node is the `ctx`."""
    custom: Any = BackwardCFunction  # torch does not declare it as a Node
    return [node for node in nodes_of(tensors) if isinstance(node, custom)]


def tensors_kept_by(node: Node) -> Iterator[torch.Tensor]:
    """Yield the tensors that a function keeps as attributes of its `ctx`, also in containers."""
    return _tensors_in(vars(node), _DEPTH)


def _tensors_in(value: Any, depth: int) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif depth and isinstance(value, Mapping):
        for part in value.values():
            yield from _tensors_in(part, depth - 1)
    elif depth and isinstance(value, list | tuple):
        for part in value:
            yield from _tensors_in(part, depth - 1)
    elif depth and hasattr(value, "__dict__") and not callable(value):  # modules fetch their own
        yield from _tensors_in(vars(value), depth - 1)


class GraphParts:
    """Which parts of the graphs of a step modules made; all else the caller's code made."""

    def __init__(self) -> None:
        self._made: deque[tuple[int, int]] = deque(maxlen=4096)  # first and last sequence number
        self._begun = 0

    def begin(self) -> None:
        """Note that the outermost module begins to run."""
        self._begun = _next_sequence_number()

    def end(self) -> None:
        """Note that it has returned."""
        self._made.append((self._begun, _next_sequence_number()))

    def clear(self) -> None:
        """Forget all parts."""
        self._made.clear()

    def used_outside(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Return the parameters that this tensor depends on and that no module used for it."""
        found: dict[int, torch.Tensor] = {}
        for node in nodes_of([tensor]):
            # torch numbers nodes in the order in which they were made, by thread.
            number = node._sequence_nr()
            if any(first <= number < last for first, last in self._made):
                continue  # a module made it
            for source, _ in node.next_functions:
                parameter = getattr(source, "variable", None)  # of nodes that accumulate
                if parameter is not None:
                    found[id(parameter)] = parameter
        return list(found.values())


def _next_sequence_number() -> int:
    return int(torch.autograd._get_sequence_nr())  # type: ignore[attr-defined]  # torch lists it nowhere
