"""`BuiltParameter`: a parameter of a model that is being built, and where its values are.

Takes values away from a parameter and gives them back; counts and decides nothing.
`BuiltParameters` has them all.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter
from torch.utils.weak import TensorWeakRef

from deepnvme.memory.buffers import memory_of
from infinity_engine.partition import Shard, ShardSpec
from infinity_engine.partition.digest import digest_of
from infinity_engine.storage import Place, SwapFile

__all__ = ["BuiltParameter", "absent", "is_plain", "nbytes_of", "plainly"]

_LONGEST_WAIT = 1024  # so often at most a parameter is passed over after it could not leave


class _PassedOver:
    """How often a parameter is passed over before the next attempt to evict it."""

    def __init__(self) -> None:
        self._left = self._before = 0  # from now on, and before the last attempt

    def count_down(self) -> bool:
        """Count a call; tell whether to make an attempt."""
        self._left -= 1
        return self._left < 0

    def note_failure(self) -> None:
        """Pass it over twice as often as before: 1, 3, 7 times and so on."""
        self._before = self._left = min(2 * self._before + 1, _LONGEST_WAIT)


class BuiltParameter:
    """Where one parameter's values are: `held` bytes of host memory, and `place` on the drives.

    Where there are values in memory, they count. Of a parameter cut over ranks, as `spec` says, the
    drives have `part` only; there is no place where that part is empty.
    """

    def __init__(self, parameter: torch.Tensor, name: str, place: Place | None = None) -> None:
        self.name = name
        self.held = 0
        self.place = place
        self._cut: tuple[ShardSpec, Shard] | tuple[None, None] = (None, None)
        # On all ranks: a use gathers it, although its memory may still be here.
        self.is_away = False
        self.digest = ""  # of the whole values, where this rank has seen all of them
        # The NaN that it shows while it is absent. Weak: others may show it longer.
        self.shown = weakref.ref(parameter.untyped_storage())
        # torch's weak reference also finds a tensor that only C++ still has.
        self._parameter = TensorWeakRef(parameter)
        self._kept: torch.Tensor | None = None
        # Strides of dense memory, as files have values; evict() notes the parameter's own.
        self._stride = torch.empty(parameter.shape, device="meta").stride()
        self._pinned = False
        self._passed_over = _PassedOver()

    # --- the parameter ----------------------------------------------------------------------------

    @property
    def parameter(self) -> torch.Tensor | None:
        """The parameter, as long as it is referenced."""
        found: torch.Tensor | None = self._parameter()
        return found

    @property
    def is_kept(self) -> bool:
        """Whether a reference here keeps it alive."""
        return self._kept is not None

    def keep_reference(self) -> None:
        """Keep the parameter alive by a reference, if it still is."""
        self._kept = self.parameter

    def drop_reference(self) -> None:
        """Drop that reference: the parameter lives only as long as other code has it."""
        self._kept = None

    @property
    def spec(self) -> ShardSpec | None:
        """How it is cut over ranks, where it is."""
        return self._cut[0]

    @property
    def part(self) -> Shard | None:
        """Of a cut parameter, the part of this rank."""
        return self._cut[1]

    @property
    def is_absent(self) -> bool:
        """Whether its values are on the drives alone."""
        # A shard of no elements has a part and no place.
        return not self.held and (self.place is not None or self.part is not None)

    # --- what is counted --------------------------------------------------------------------------

    def count(self, nbytes: int) -> None:
        """Note how many bytes of host memory it has."""
        self.held = nbytes

    def replace_place(self, place: Place | None) -> Place | None:
        """Replace the place, or have none; return the one before."""
        before, self.place = self.place, place
        return before

    def cut(self, spec: ShardSpec | None, rank: int) -> None:
        """Have this part on the drives; None: it was never there."""
        self._cut = (None, None) if spec is None else (spec, spec.shards[rank])

    def mark_away(self, digest: str | None = None) -> None:
        """Mark it as away, on all ranks; `digest` is of the values that this rank has all seen."""
        self.is_away = True
        self.digest = digest or self.digest

    def mark_back(self) -> None:
        """Mark it as not away any more."""
        self.is_away = False

    def bytes_to_store(self, parameter: torch.Tensor) -> int:
        """Return how many bytes of it belong on the drives of this rank."""
        return self.own_numel(parameter) * parameter.element_size()

    def own_numel(self, parameter: torch.Tensor) -> int:
        """Return how many of its elements are this rank's."""
        return parameter.numel() if self.part is None else self.part.numel

    def pin(self) -> None:
        """Stay in host memory for good: other code has its address, and nothing shows how long."""
        self._pinned = True

    def count_down_to_retry(self) -> bool:
        """Count a call; tell whether to try to evict it. A failed try doubles the calls between."""
        return self._passed_over.count_down()

    def may_leave(self, parameter: torch.Tensor) -> bool:
        """Tell whether it can be evicted, provided that no other tensor shows its memory."""
        storage = parameter.untyped_storage()
        return (
            not self._pinned
            # the NaN shown in place of a single element could be written to
            and parameter.numel() > 1
            # Else a graph has the parameter itself, and not a view. torch's stubs do not know how
            # many have it.
            and parameter._use_count() == 1  # type: ignore[attr-defined]
            and storage.nbytes() == nbytes_of(parameter)  # else another tensor uses the rest
            # Negated and conjugated values are not in the bytes; shared memory is other processes'.
            and not (parameter.is_conj() or parameter.is_neg() or storage.is_shared())
        )

    # --- values -----------------------------------------------------------------------------------

    def store(self, parameter: torch.Tensor, swap: SwapFile) -> None:
        """Write the values in memory to its place."""
        with plainly():
            values = parameter.detach().contiguous()
            if self.part is not None:
                # While the whole values are still here.
                self.digest = digest_of(values)
                # What is written is this rank's part of the flat values.
                values = values.view(-1)[self.part.first_element : self.part.end]
            if self.place is None:  # an empty part
                return
            # Waited for: the memory may leave next.
            swap.write(self.place, memory_of(values, writable=False), what=self.name).wait()

    # [Note: which memory leaves] A parameter leaves host memory only where no other tensor can see
    # that memory. It is written to the drives and its data is replaced; if its storage is still
    # alive after that, a view of it exists somewhere, and the parameter gets the storage back. So
    # what is written through a view counts, whenever it is written.
    def evict(self, parameter: torch.Tensor) -> bool:
        """Replace the data of a parameter that was stored; tell whether its memory is free.

        [Note: which memory leaves]
        """
        # Weak: a reference of ours would look like a view.
        storage = weakref.ref(parameter.untyped_storage())
        # Kept for the values' return: a transposed parameter comes back transposed.
        offset, self._stride = int(parameter.storage_offset()), parameter.stride()
        self.show_nan(parameter)
        # Alive without us: a view, a graph or other code has it.
        kept = storage()
        if kept is None:
            self.held, self._passed_over = 0, _PassedOver()
            return True
        with plainly():
            values = torch.empty(0, dtype=parameter.dtype, device="cpu")
            parameter.data = values.set_(kept, offset, parameter.shape, self._stride)
        self._passed_over.note_failure()
        return False

    def show_nan(self, parameter: torch.Tensor) -> None:
        """Let the parameter show NaN in a new storage, which no other tensor shows yet."""
        # The old stand-in is looked at before it goes: a write to it would be lost in silence.
        if self.is_absent:
            self.check_untouched(parameter)
        with plainly():
            values = absent(parameter)
            self.shown = weakref.ref(values.untyped_storage())
            parameter.data = values

    def check_untouched(self, parameter: torch.Tensor) -> None:
        """Refuse to go on where the stand-in that a parameter shows was written to.

        Raises:
            RuntimeError: that is so.
        """
        with plainly():
            storage = parameter.untyped_storage()
            # As bytes, because NaN is not equal to itself.
            # Its own stand-in, and unchanged: other storage was set by other code.
            if self.shown() is storage and torch.equal(
                _raw(storage), _raw(absent(parameter).untyped_storage())
            ):
                return
        raise RuntimeError(
            f"{self.name} was changed while its values were on the drives. The change would be "
            "lost: the values on the drives replace it. Change it in the body of init_context, "
            "or under `with engine.gathered([parameter], modify=True)` after engine.initialize"
        )

    def fill(self, parameter: torch.Tensor, swap: SwapFile) -> None:
        """Give the parameter new memory and read its values into it."""
        assert self.place is not None, "what is absent is on the drives"
        self.check_untouched(parameter)
        with plainly():
            values = torch.empty(parameter.shape, dtype=parameter.dtype, device="cpu")
            swap.read(self.place, memory_of(values, writable=True), what=self.name).wait()
            self.set_values(parameter, values)

    def set_values(self, parameter: torch.Tensor, values: torch.Tensor) -> None:
        """Let the parameter show `values`, in the order of its dimensions, with its own strides."""
        with plainly():
            # Its own order in memory, as code before the eviction saw it.
            if values.stride() != self._stride:
                turned = torch.empty_strided(
                    parameter.shape, self._stride, dtype=parameter.dtype, device="cpu"
                )
                values = turned.copy_(values)
            parameter.data = values


def _raw(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device="cpu").set_(storage)


def nbytes_of(parameter: torch.Tensor) -> int:
    """Return the bytes of a parameter's values."""
    return parameter.numel() * parameter.element_size()


def is_plain(tensor: torch.Tensor) -> bool:
    """Tell whether it is a dense tensor in host memory that stores its values as such."""
    return (
        not isinstance(tensor, UninitializedParameter | UninitializedBuffer)
        and type(tensor).__torch_dispatch__ is torch.Tensor.__torch_dispatch__
        and tensor.layout == torch.strided
        and not (tensor.is_quantized or tensor.is_nested)
        and tensor.device.type == "cpu"
    )


def absent(parameter: torch.Tensor) -> torch.Tensor:
    """Return the stand-in of an evicted parameter: reading gives NaN, writing raises an error.

    torch raises that error, for all writes but `fill_()` and `zero_()`, which `check_untouched`
    finds later.
    """
    dtype = parameter.dtype
    try:
        nothing = math.nan if dtype.is_floating_point or dtype.is_complex else 0
        one = torch.full((), nothing, dtype=dtype, device="cpu")
    except NotImplementedError:  # a dtype of two four-bit numbers in a byte, which has no NaN
        one = torch.zeros(dtype.itemsize, dtype=torch.uint8, device="cpu").view(dtype)[0]
    # One element stands for all: torch refuses to write to an expanded tensor.
    return one.expand(parameter.shape)


@contextmanager
def plainly() -> Iterator[None]:
    """Make ordinary tensors in the body, whatever modes the caller is in; none sees the calls."""
    with torch._C.DisableTorchFunction(), torch.inference_mode(False), torch.no_grad():
        yield
