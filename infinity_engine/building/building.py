"""`building`: what an init_context does while its body runs: it sees all that modules get, and
torch's calls.

Brings what a call needs and lets the rest go to the drives. Decides nothing about what stays:
`Originals` does.

[Note: how calls are seen] torch's own TorchFunctionMode tells of every call of torch in this
thread, property getters included, before it runs: so a parameter is there when somebody reads or
writes it, however he came by it. What a C library or another thread does with a parameter is not
seen.
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
from infinity_engine.building.cut_originals import CutOriginals
from infinity_engine.building.originals import Originals, first_sizes
from infinity_engine.memory import Ledger
from infinity_engine.parameters.hooks import Hooks
from infinity_engine.plan import ResolvedBudget
from infinity_engine.progress import Teller
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
# Calls that give an address away, which nobody sees the end of, and that the tensor itself keeps
# alive.
_GIVE_AN_ADDRESS = frozenset({_T.data_ptr, _T.numpy, _T.__array__, _T.__dlpack__})
# Calls that run Python again, which is not seen: a checkpointed part of a forward.
_CALL_BACK = frozenset({_T.backward, torch.autograd.backward, torch.autograd.grad})
_GET_DATA, _SET_DATA = _T.data.__get__, _T.data.__set__  # type: ignore[attr-defined]


@contextmanager
def building(
    budget: ResolvedBudget, cache: int | None, teller: Teller, ranks: Ranks | None
) -> Iterator[BuiltModel]:
    """Let what modules get as parameters in the body live on the drives.

    See `init_context` for what is raised.

    Of several `ranks`, all of which come to this, `budget` is this one's.
    """
    if _open() is not None:
        raise RuntimeError(
            "an init_context is open in this thread already: build the whole model in one `with "
            "init_context(...)`"
        )
    with ExitStack() as failed:
        with teller.part("building on the drives", None) as written:
            built, originals = opened(budget, cache, failed, written, ranks)
            mode = _Building(originals)
            # what was built by then, and has no values
            failed.callback(lambda: built.guard(mode.modules()))
            hooks = Hooks()
            hooks.on_registration(mode.gets_parameter, mode.gets_submodule)
            try:
                with mode:
                    yield built
            finally:
                hooks.remove()
            mode.finish()
            originals.agree()
            built.guard(
                each
                for each in mode.modules()
                if any(parameter in built for parameter in each.parameters())
            )
        failed.pop_all()


def opened(
    budget: ResolvedBudget,
    cache: int | None,
    failed: ExitStack,
    written: Callable[[int], None],
    ranks: Ranks | None,
) -> tuple[BuiltModel, Originals]:
    """Return an empty one, with files in each directory of the budget; `failed` gives all of it
    back.

    `written` is told of the bytes of each parameter that leaves host memory.
    """
    ledger = Ledger(budget)
    swap = SwapFile(first_sizes(budget.nvme), ledger, holder="values of a model")
    failed.callback(swap.close)
    originals = (
        Originals(swap, ledger, budget.nvme, cache, written)
        if ranks is None
        else CutOriginals(swap, ledger, budget.nvme, cache, written, ranks=ranks)
    )
    built = BuiltModel(originals, swap, ledger, ranks)

    def close(_kind: object, error: BaseException | None, _trace: object) -> None:
        built.close(error)

    failed.push(close)
    return built, originals


def _open() -> _Building | None:
    """Return the context that is open in this thread."""
    if has_torch_function((None,)):
        found: _Building | None = handle_torch_function(_open, (None,))
        return found
    return None


class _Building(TorchFunctionMode):
    """Sees torch's calls, and what modules get."""

    def __init__(self, originals: Originals) -> None:
        super().__init__()
        self._originals = originals
        self._thread = threading.get_ident()
        self._modules: dict[int, weakref.ref[torch.nn.Module]] = {}
        self._copies: list[tuple[dict[int, object], int]] = []
        self._strangers: dict[int, weakref.ref[torch.Tensor]] = {}
        self._own_calls = False

    # --- modules ----------------------------------------------------------------------------------

    def gets_parameter(self, module: torch.nn.Module, name: str, parameter: object) -> None:
        """Take over a parameter that a module is about to have."""
        if threading.get_ident() == self._thread and isinstance(parameter, torch.nn.Parameter):
            with self._calling():
                self._adopt_copies()
                self._know(module)
                self._originals.adopt(parameter, f"{type(module).__name__}.{name}")

    def gets_submodule(self, module: torch.nn.Module, _name: str, submodule: object) -> None:
        """Take over all parameters of a module that another one is about to have."""
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
            {id(inner): inner for module in self._alive() for inner in module.modules()}.values()
        )

    def finish(self) -> None:
        """Let all values leave, now that nobody builds any more.

        A parameter that is in no module that was built here gets its values back.
        """
        self._adopt_copies()
        self._copies.clear()
        modules = self.modules()
        for module in modules:
            self._adopt_own_of(module)
        of_modules = {
            id(parameter) for module in modules for parameter in module.parameters(recurse=False)
        }
        self._originals.keep_no_others()
        strays = [each for each in self._originals.parameters() if id(each) not in of_modules]
        for parameter in strays:
            with self._originals.using([parameter]):
                pass
            self._originals.forget(parameter)
        self._originals.leave_all()
        self._originals.settle()

    def _know(self, module: torch.nn.Module) -> None:
        self._modules[id(module)] = weakref.ref(module)

    def _alive(self) -> list[torch.nn.Module]:
        return [module for each in self._modules.values() if (module := each()) is not None]

    def _adopt_own_of(self, module: torch.nn.Module) -> None:
        for name, parameter in module.named_parameters(recurse=False):
            self._originals.adopt(parameter, f"{type(module).__name__}.{name}")
        for buffer in module.buffers(recurse=False):
            self._originals.revive(buffer)

    @contextmanager
    def _calling(self) -> Iterator[None]:
        """Let torch's calls within the body be ours."""
        before, self._own_calls = self._own_calls, True
        try:
            yield
        finally:
            self._own_calls = before

    # --- calls ------------------------------------------------------------------------------------

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """[Note: how calls are seen]."""
        given = kwargs or {}
        if func is _open:
            return self
        if self._own_calls or func in _NEED_NO_VALUES:
            return func(*args, **given)
        self._adopt_copies()
        used: dict[int, torch.Tensor] = {}
        for tensor in _tensors((args, given)):
            if isinstance(tensor, torch.nn.Parameter):
                self._look_at(tensor)
            if tensor in self._originals:
                used[id(tensor)] = tensor
            else:
                self._originals.revive(tensor)
        if func in _CALL_BACK:
            used = {id(each): each for each in self._originals.parameters()}
        if not used:
            return func(*args, **given)
        # needs no value before
        target = args[0] if func == _SET_DATA and args[1] is not args[0] else None
        with self._originals.using(used.values(), used.get(id(target))):
            result = func(*args, **given)
        if func in _GIVE_AN_ADDRESS:
            for parameter in used.values():
                self._originals.pin(parameter)
        elif func == _GET_DATA:
            self._note_copy(args[0], sys._getframe(1))
        return result

    def _look_at(self, parameter: torch.nn.Parameter) -> None:
        """Where this is a parameter that nobody told of, take over what modules have got without
        being registered.
        """
        stranger = self._strangers.get(id(parameter))
        if parameter in self._originals or (stranger is not None and stranger() is parameter):
            return
        for module in self._alive():
            self._adopt_own_of(module)
        if parameter not in self._originals:
            self._strangers[id(parameter)] = weakref.ref(parameter)

    def _note_copy(self, parameter: torch.Tensor, frame: Any) -> None:
        """Where this is the beginning of a deep copy of a parameter, remember where the copy will
        be noted.

        A module that is copied registers nothing, and whole lists of copies are made before
        somebody registers them.
        """
        if frame.f_code is torch.nn.Parameter.__deepcopy__.__code__:
            self._copies.append((frame.f_locals["memo"], id(parameter)))

    def _adopt_copies(self) -> None:
        """Take over the deep copies of parameters that are finished."""
        waiting = []
        for memo, number in self._copies:
            copy = memo.get(number)
            if isinstance(copy, torch.nn.Parameter):
                self._originals.adopt(copy, "a copied parameter")
            else:
                waiting.append((memo, number))
        self._copies = waiting


def _tensors(value: object) -> Iterator[torch.Tensor]:
    """Yield the tensors in what a call was given."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for each in value.values():
            yield from _tensors(each)
    elif isinstance(value, list | tuple | set | frozenset):
        for each in value:
            yield from _tensors(each)
