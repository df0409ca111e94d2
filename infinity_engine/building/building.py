"""`building`: what an init_context does while its body runs: sees parameters and torch's calls.

Reads back from the drives what a call needs and lets the other parameters be evicted.
`BuiltParameters` decides which.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode, handle_torch_function, has_torch_function

from infinity_engine.building.built import BuiltModel
from infinity_engine.building.built_parameters import BuiltParameters, first_sizes
from infinity_engine.building.sharded_parameters import ShardedParameters
from infinity_engine.memory import Ledger
from infinity_engine.parameters.hooks import Hooks
from infinity_engine.plan import ResolvedBudget
from infinity_engine.progress import ProgressReporter
from infinity_engine.ranks.ranks import Ranks
from infinity_engine.storage import SwapFile

__all__ = ["building", "opened"]

_T = torch.Tensor
# Calls that are right without the values, as identity, shape and dtype are always there.
_NEED_NO_VALUES = frozenset(
    {
        *(
            getattr(_T, name).__get__
            for name in (
                "shape", "dtype", "device", "layout", "ndim", "requires_grad", "is_leaf", "grad",
                "grad_fn", "is_meta", "is_cuda", "is_sparse", "is_quantized", "is_nested",
                "itemsize", "nbytes", "_version", "_backward_hooks",
            )
        ),
        *(getattr(_T, name).__set__ for name in ("requires_grad", "grad")),
        *(
            getattr(_T, name)
            for name in (
                "size", "dim", "ndimension", "numel", "nelement", "element_size",
                "is_floating_point", "is_complex", "is_signed", "requires_grad_", "retain_grad",
                "register_hook", "register_post_accumulate_grad_hook", "__len__",
            )
        ),
        torch.is_floating_point,
        torch.is_complex,
        torch.numel,
        torch._has_compatible_shallow_copy_type,
    }
)  # fmt: skip
# Calls that return the memory's address. The engine cannot see how long the address is used, so
# these parameters stay in memory for good.
_GIVE_AN_ADDRESS = frozenset({_T.data_ptr, _T.numpy, _T.__array__, _T.__dlpack__})
# Calls that run Python again, which is not seen: a checkpointed part of a forward.
_CALL_BACK = frozenset({_T.backward, torch.autograd.backward, torch.autograd.grad})
_GET_DATA, _SET_DATA = _T.data.__get__, _T.data.__set__  # type: ignore[attr-defined]


@contextmanager
def building(
    budget: ResolvedBudget, cache: int | None, reporter: ProgressReporter, ranks: Ranks | None
) -> Iterator[BuiltModel]:
    """Offload the parameters that modules register in the body. See `init_context` for errors.

    With several `ranks`, all of them enter it, and `budget` is this rank's.
    """
    # Two contexts would both take over the same parameters.
    if _open() is not None:
        raise RuntimeError(
            "An init_context is open in this thread already: build the whole model in one `with "
            "init_context(...)`"
        )
    with ExitStack() as failed:
        with reporter.part("building on the drives", None) as written:
            built, records = opened(budget, cache, failed, written, ranks)
            mode = _Building(records)
            # Where the body fails, the modules built so far have no values, and refuse to run.
            failed.callback(lambda: built.guard(mode.modules()))
            hooks = Hooks()
            hooks.on_registration(mode.gets_parameter, mode.gets_submodule)
            try:
                with mode:
                    yield built
            finally:
                hooks.remove()
            mode.finish()
            # Collective, after the body: ranks that built something else would mix their shards.
            records.agree()
            built.guard(
                module
                for module in mode.modules()
                # Modules without absent parameters may run.
                if any(parameter in built for parameter in module.parameters())
            )
        failed.pop_all()


def opened(
    budget: ResolvedBudget,
    cache: int | None,
    failed: ExitStack,
    written: Callable[[int], None],
    ranks: Ranks | None,
) -> tuple[BuiltModel, BuiltParameters]:
    """Return an empty BuiltModel, with files in each directory of the budget; `failed` undoes it.

    `written` is called with the bytes of each parameter that leaves host memory.
    """
    ledger = Ledger(budget)
    swap = SwapFile(first_sizes(budget.nvme), ledger, holder="values of a model")
    # Undone last first: the built model closes before its swap file does.
    failed.callback(swap.close)
    records = (
        BuiltParameters(swap, ledger, budget.nvme, cache, written)
        if ranks is None
        else ShardedParameters(swap, ledger, budget.nvme, cache, written, ranks=ranks)
    )
    built = BuiltModel(records, swap, ledger, ranks)

    # By push and not callback: it gets the error, which the other ranks are sent.
    def close(_kind: object, error: BaseException | None, _trace: object) -> None:
        built.close(error)

    failed.push(close)
    return built, records


def _open() -> _Building | None:
    """Return the context that is open in this thread."""
    # A call of our own function: only a mode of ours answers it with itself.
    if has_torch_function((None,)):
        found: _Building | None = handle_torch_function(_open, (None,))
        return found
    return None


class _Building(TorchFunctionMode):
    """The torch-function mode of a context: sees torch's calls and parameters that modules get."""

    def __init__(self, records: BuiltParameters) -> None:
        super().__init__()
        self._records = records
        self._thread = threading.get_ident()
        # Weak: modules that the body drops must not live on.
        self._modules: dict[int, weakref.ref[torch.nn.Module]] = {}
        # Deep copies under way: the memo in which a copy appears, and the id of its original.
        self._copies: list[tuple[dict[int, object], int]] = []
        # Parameters of no known module, so that the search is not made at each of their calls.
        self._strangers: dict[int, weakref.ref[torch.Tensor]] = {}
        self._own_calls = False

    # --- modules ----------------------------------------------------------------------------------

    def gets_parameter(self, module: torch.nn.Module, name: str, parameter: object) -> None:
        """Take over a parameter that a module is about to register."""
        # Hooks are global: other threads build models of their own.
        if threading.get_ident() == self._thread and isinstance(parameter, torch.nn.Parameter):
            with self._calling():
                self._adopt_copies()
                self._know(module)
                self._records.adopt(parameter, f"{type(module).__name__}.{name}")

    def gets_submodule(self, module: torch.nn.Module, _name: str, submodule: object) -> None:
        """Take over all parameters of a module that another module is about to register."""
        if threading.get_ident() == self._thread and isinstance(submodule, torch.nn.Module):
            with self._calling():
                self._adopt_copies()
                self._know(module)
                for inner in submodule.modules():
                    self._know(inner)
                    self._adopt_own_of(inner)

    def modules(self) -> list[torch.nn.Module]:
        """Return the modules that were built here, and those within them."""
        return list(
            # Once each, although a module may be within several.
            {id(inner): inner for module in self._alive() for inner in module.modules()}.values()
        )

    def finish(self) -> None:
        """Evict all values: the body has ended and builds nothing any more.

        A parameter that is in none of the modules built here gets its values back.
        """
        # Copies that no call of torch has shown yet.
        self._adopt_copies()
        self._copies.clear()
        modules = self.modules()
        for module in modules:
            # Parameters that came without registration, by unpickling for instance.
            self._adopt_own_of(module)
        of_modules = {
            id(parameter) for module in modules for parameter in module.parameters(recurse=False)
        }
        # From here on only the model's own references keep parameters.
        self._records.drop_unreferenced()
        strays = [
            parameter for parameter in self._records.parameters() if id(parameter) not in of_modules
        ]
        for parameter in strays:
            # Brought back into memory by being used; nothing else is to be done with it.
            with self._records.using([parameter]):
                pass
            self._records.forget(parameter)
        self._records.evict_all()
        self._records.shrink()

    def _know(self, module: torch.nn.Module) -> None:
        self._modules[id(module)] = weakref.ref(module)

    def _alive(self) -> list[torch.nn.Module]:
        return [
            module for reference in self._modules.values() if (module := reference()) is not None
        ]

    def _adopt_own_of(self, module: torch.nn.Module) -> None:
        for name, parameter in module.named_parameters(recurse=False):
            self._records.adopt(parameter, f"{type(module).__name__}.{name}")
        for buffer in module.buffers(recurse=False):
            # A buffer may have been made of an evicted parameter, and shows NaN.
            self._records.revive(buffer)

    @contextmanager
    def _calling(self) -> Iterator[None]:
        """Mark torch's calls in the body as the engine's own, which need no values read back."""
        before, self._own_calls = self._own_calls, True
        try:
            yield
        finally:
            self._own_calls = before

    # --- calls ------------------------------------------------------------------------------------

    # [Note: how calls are seen] torch's TorchFunctionMode reports every call of torch in this
    # thread before it runs, property getters included. So a parameter's values are read back before
    # any code reads or writes them, whichever variable that code uses. The mode does not see what a
    # C library or another thread does with a parameter.
    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """[Note: how calls are seen]."""
        given = kwargs or {}
        # The question of _open(): this context is in this thread.
        if func is _open:
            return self
        # Calls of the records themselves: reading values back for them would not end.
        if self._own_calls or func in _NEED_NO_VALUES:
            return func(*args, **given)
        # Before the arguments are looked at: a finished copy may be among them.
        self._adopt_copies()
        used: dict[int, torch.Tensor] = {}
        # Arguments may be nested.
        for tensor in _tensors((args, given)):
            if isinstance(tensor, torch.nn.Parameter):
                self._look_at(tensor)
            if tensor in self._records:
                used[id(tensor)] = tensor
            # A tensor made of an evicted parameter gets its memory before the call sees it.
            else:
                self._records.revive(tensor)
        # Python code that runs within them uses parameters that are no arguments.
        if func in _CALL_BACK:
            used = {id(parameter): parameter for parameter in self._records.parameters()}
        if not used:
            return func(*args, **given)
        # Setting `.data` needs no value from before, unless it is set to itself.
        target = args[0] if func == _SET_DATA and args[1] is not args[0] else None
        # The call may change values, shape and dtype: they are noted as the body ends.
        with self._records.using(used.values(), used.get(id(target))):
            result = func(*args, **given)
        # After the call: the address is known to other code from here on.
        if func in _GIVE_AN_ADDRESS:
            for parameter in used.values():
                self._records.pin(parameter)
        elif func == _GET_DATA:
            self._note_copy(args[0], sys._getframe(1))
        return result

    def _look_at(self, parameter: torch.nn.Parameter) -> None:
        """Find the module of a parameter that no registration announced.

        Modules that are copied or unpickled get parameters without registering them, so the known
        modules are searched.
        """
        stranger = self._strangers.get(id(parameter))
        # The id may be used again: a stranger counts only while it is the same object.
        if parameter in self._records or (stranger is not None and stranger() is parameter):
            return
        for module in self._alive():
            self._adopt_own_of(module)
        if parameter not in self._records:
            self._strangers[id(parameter)] = weakref.ref(parameter)

    def _note_copy(self, parameter: torch.Tensor, frame: Any) -> None:
        """Where a deep copy of a parameter begins, remember the memo that the copy will be in.

        A copied module registers nothing, and whole lists of copies are made before a module
        registers the list.
        """
        # The copy's memo is a local of torch's own __deepcopy__, which calls `.data` here.
        if frame.f_code is torch.nn.Parameter.__deepcopy__.__code__:
            self._copies.append((frame.f_locals["memo"], id(parameter)))

    def _adopt_copies(self) -> None:
        """Take over the deep copies of parameters that are finished."""
        waiting = []
        for memo, number in self._copies:
            # Under the original's id, once the copy is complete.
            copy = memo.get(number)
            if isinstance(copy, torch.nn.Parameter):
                self._records.adopt(copy, "a copied parameter")
            else:
                waiting.append((memo, number))
        self._copies = waiting


def _tensors(value: object) -> Iterator[torch.Tensor]:
    """Yield the tensors among the arguments of a call."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _tensors(item)
    elif isinstance(value, list | tuple | set | frozenset):
        for item in value:
            yield from _tensors(item)
