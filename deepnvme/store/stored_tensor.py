"""`StoredTensor`: one tensor of a store, of which parts are read and written as of an array.

Knows no drives: the store that made it does the reading and writing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from deepnvme.store.lane import StoreFuture
    from deepnvme.store.manifest import Record

__all__ = ["StoredTensor"]


class _Parts(Protocol):
    """What a store does for its tensors."""

    def record(self, name: str) -> Record: ...

    def _get_part(self, name: str, key: Any, out: Any) -> Any: ...

    def _put_part(self, name: str, key: Any, tensor: Any, *, copy: bool) -> None: ...

    def _get_part_async(self, name: str, key: Any, out: Any) -> StoreFuture[Any]: ...

    def _put_part_async(
        self, name: str, key: Any, tensor: Any, *, copy: bool
    ) -> StoreFuture[None]: ...


class StoredTensor:
    """A tensor on the drives. `stored[2:5]` reads these rows; `stored[2:5] = rows` writes them, and
    `stored[2:5] = 0.0` fills them.

    A key is an integer, a slice with a positive step, an Ellipsis, or a tuple of these. Of the rest
    of the tensor only what shares a page with the part is read, or a MiB where the store has
    checksums, and gaps in the part that are cheaper to read than to skip.
    Made by `TensorStore.get_slice`. It stays valid while the name has a tensor.
    """

    def __init__(self, parts: _Parts, name: str) -> None:
        self.name = name
        self._parts = parts

    @property
    def shape(self) -> tuple[int, ...]:
        """The sizes of its dimensions."""
        return self._parts.record(self.name).shape

    @property
    def dtype(self) -> str:
        """The code of its dtype, as safetensors names them: "F32", "BF16"."""
        return self._parts.record(self.name).dtype

    @property
    def nbytes(self) -> int:
        """How many bytes it has."""
        return self._parts.record(self.name).nbytes

    def __len__(self) -> int:
        """Return the size of the first dimension."""
        if not self.shape:
            raise TypeError(f"{self.name!r} has no dimensions, so it has no length")
        return self.shape[0]

    def get(self, key: Any, out: Any = None) -> Any:
        """Return a part, read into `out` if given, which must have its dtype and shape.

        Raises:
            IndexError, TypeError, ValueError: the key names no part, or `out` does not fit it.
            ChecksumError: the drive returned other bytes than were put.
        """
        return self._parts._get_part(self.name, key, out)

    def put(self, key: Any, tensor: Any, *, copy: bool = False) -> None:
        """Write a tensor of the part's dtype and shape over the part, or fill it with a number.

        The first such write after a commit copies the whole tensor, as the commit keeps the old
        one. In a store without commits, and after that in any other, only the part is written.
        Where that fails, or while another thread reads, the part may hold old and new bytes.

        Raises:
            IndexError, TypeError, ValueError: the key names no part, or `tensor` does not fit it.
            VolumeFullError: there is no room for the copy.
            ChecksumError: the drive returned other bytes than were put beside the part.
        """
        self._parts._put_part(self.name, key, tensor, copy=copy)

    def get_async(self, key: Any, out: Any = None) -> StoreFuture[Any]:
        """Begin to `get` a part."""
        return self._parts._get_part_async(self.name, key, out)

    def put_async(self, key: Any, tensor: Any, *, copy: bool = False) -> StoreFuture[None]:
        """Begin to `put` a part, after the puts that were begun before.

        `tensor` must not change until the future has ended.
        """
        return self._parts._put_part_async(self.name, key, tensor, copy=copy)

    def __getitem__(self, key: Any) -> Any:
        """As `get`."""
        return self.get(key)

    def __setitem__(self, key: Any, tensor: Any) -> None:
        """As `put`."""
        self.put(key, tensor)

    def __repr__(self) -> str:
        """Show name, dtype and shape."""
        return f"StoredTensor({self.name!r}, {self.dtype}, shape {self.shape})"
