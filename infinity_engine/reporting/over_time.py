"""`HeldPart` and `HeldOverTime`: what blocks held of their activations, and when in a step.

Pure: made from the spans of a step, or from what a run has written of them. Never imports torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from infinity_engine.units import format_bytes

__all__ = ["HeldOverTime", "HeldPart"]

_TIMES = 8  # equal parts of the time, in text


@dataclass(frozen=True, kw_only=True, slots=True)
class HeldPart:
    """Bytes that one block held, how, such as kept or on drives, and from when to when."""

    block: str
    held: str
    nbytes: int
    start_ns: int
    end_ns: int


@dataclass(frozen=True, slots=True)
class HeldOverTime:
    """All parts of one step; times are of the step."""

    parts: Sequence[HeldPart] = ()

    @property
    def start_ns(self) -> int:
        """When the first part began."""
        return min((part.start_ns for part in self.parts), default=0)

    @property
    def end_ns(self) -> int:
        """When the last part had ended."""
        return max((part.end_ns for part in self.parts), default=0)

    def ways(self) -> tuple[str, ...]:
        """Return how bytes were held, in the order in which that began."""
        return tuple(dict.fromkeys(part.held for part in self.parts))

    def points(self, held: str) -> list[tuple[int, int]]:
        """Return the bytes that were held so, each time that they changed."""
        changes: dict[int, int] = {self.start_ns: 0, self.end_ns: 0}
        for part in self.parts:
            if part.held == held:
                changes[part.start_ns] = changes.get(part.start_ns, 0) + part.nbytes
                changes[part.end_ns] = changes.get(part.end_ns, 0) - part.nbytes
        found, total = [], 0
        for at in sorted(changes):
            total += changes[at]
            found.append((at, total))
        return found

    def most(self, held: str, times: int = _TIMES) -> list[int]:
        """Return the most bytes that were held so in each of these equal parts of the time."""
        points, length = self.points(held), self.end_ns - self.start_ns
        edges = [self.start_ns + length * number // times for number in range(times + 1)]
        found = []
        for begin, end in pairwise(edges):
            before = next((nbytes for at, nbytes in reversed(points) if at <= begin), 0)
            found.append(max(before, *(nbytes for at, nbytes in points if begin < at < end), 0))
        return found

    def rows(self) -> list[tuple[str, str]]:
        """Return a row of text for each way of holding."""
        took_s = (self.end_ns - self.start_ns) / 1e9
        took = f"{took_s:.3f} s" if took_s >= 1 else f"{took_s * 1e3:.3f} ms"
        return [
            (
                f"activations {held}",
                f"at most {', '.join(map(format_bytes, self.most(held)))} in {_TIMES} equal parts "
                f"of {took}",
            )
            for held in self.ways()
        ]

    def to_mapping(self) -> Mapping[str, object]:
        """Return the most bytes over time, without blocks, ready for JSON."""
        return {
            "start_s": self.start_ns / 1e9,
            "end_s": self.end_ns / 1e9,
            "most_bytes": {held: self.most(held) for held in self.ways()},
        }
