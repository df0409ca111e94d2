"""`BuiltModel`: a model with its values on the drives, until an engine takes them over.

`init_context` returns it. Its modules refuse to run; `built_model_of` finds it again by the hook
that refuses. Reads values and changes none. With several ranks, each has its shards; calls that
show whole values are collective.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NoReturn

import torch

from infinity_engine.building.built_parameters import BuiltParameters
from infinity_engine.errors import CapacityError
from infinity_engine.memory import Ledger
from infinity_engine.parameters.hooks import Hooks
from infinity_engine.partition import ShardSpec
from infinity_engine.plan import Tier
from infinity_engine.ranks.ranks import Ranks
from infinity_engine.storage import SwapFile

__all__ = ["BuiltModel", "built_model_of"]


class BuiltModel:
    """The parameters of one model and where their values are.

    `engine.initialize` takes the values over and closes it.

    A parameter stays in host memory where another tensor still shows its memory when the context
    ends (then the values seen through that tensor count), or where it has a single element. The
    files are also removed when neither the model nor this object is referenced any more.
    """

    def __init__(
        self, records: BuiltParameters, swap: SwapFile, ledger: Ledger, ranks: Ranks | None = None
    ) -> None:
        self.swap = swap
        self.ledger = ledger
        # The ranks that built it together; None where this process built it alone.
        self.ranks = ranks
        self._records = records
        self._hooks = Hooks()
        self._closed = False

    def __contains__(self, parameter: object) -> bool:
        """Tell whether it has this parameter's values: built in the context, and not released."""
        return parameter in self._records

    def nbytes_of(self, parameter: torch.Tensor) -> int:
        """Return the bytes of a parameter's values.

        Raises:
            ConfigError: this does not have the parameter's values.
        """
        # Raises where this does not have the parameter.
        self._records.is_absent(parameter)
        return parameter.numel() * parameter.element_size()

    def is_absent(self, parameter: torch.Tensor) -> bool:
        """Tell whether a parameter's values are on the drives alone. It shows NaN then.

        Raises:
            ConfigError: this does not have the parameter's values.
        """
        return self._records.is_absent(parameter)

    def piece(self, parameter: torch.Tensor, first_element: int, numel: int) -> torch.Tensor:
        """Return `numel` elements of a parameter from `first_element` on, flat, in new host memory.

        A piece that begins with a page of the file, as every multiple of 4096 elements does, is
        read without a detour.

        Raises:
            ConfigError: this does not have the parameter's values.
            RuntimeError: the parameter was written to while they were on the drives.
            TransferError: they could not be read.
        """
        # On the CPU, whatever the caller's default device is.
        values = torch.empty(numel, dtype=parameter.dtype, device="cpu")
        self._check_within(parameter, parameter.numel(), first_element, values)
        self._records.read_whole(parameter, first_element, values)
        return values

    def read_into(self, parameter: torch.Tensor, first_element: int, values: torch.Tensor) -> None:
        """Fill `values`, flat and of the parameter's dtype, as `piece` would return it.

        With several ranks, this rank reads its own shard; element 0 is the shard's first.
        """
        own_numel = self._records.own_numel(parameter)
        self._check_within(parameter, own_numel, first_element, values)
        self._records.read_into(parameter, first_element, values)

    def spec_of(self, parameter: torch.Tensor) -> ShardSpec | None:
        """Return how a parameter is cut over the ranks that have built it; None: one process has.

        Raises:
            ConfigError: this does not have the parameter's values.
        """
        return self._records.spec_of(parameter)

    def digest_of(self, parameter: torch.Tensor) -> str:
        """Return text that differs where ranks' values differ, as far as this rank saw them."""
        return self._records.digest_of(parameter)

    def detach_ranks(self) -> Ranks | None:
        """Return the ranks that built it, which it does not close from now on."""
        ranks, self.ranks = self.ranks, None
        return ranks

    def release(self, parameter: torch.Tensor) -> None:
        """Forget a parameter: the engine has its values now. What the parameter shows stays.

        Raises:
            ConfigError: this does not have the parameter's values.
        """
        self._records.forget(parameter)

    def materialize(self, parameter: torch.Tensor) -> None:
        """Give a parameter ordinary memory with its values, which no budget counts, and release it.

        Raises:
            CapacityError: the budget's host has no room for it.
            RuntimeError: it was written to while its values were on the drives.
            TransferError: the drive failed.
        """
        self._check_room([parameter])
        self._bring(parameter)

    def whole(self) -> None:
        """Give all parameters ordinary memory again, as if there had been no context; and close.

        Raises:
            CapacityError: they do not fit into the budget's host. Nothing has changed.
            RuntimeError: one was written to while its values were on the drives.
            TransferError: one could not be read; it can be tried again.
        """
        parameters = list(self._records.parameters())
        # For all of them before the first moves: half of a model in memory is of no use.
        self._check_room(parameters)
        for parameter in parameters:
            self._bring(parameter)
        self.close()

    def close(self, error: BaseException | None = None) -> None:
        """Remove the files. Again: do nothing. A model that has all of its values runs again.

        With several ranks, the others are sent `error`, where that is the reason.
        """
        # First: ranks that wait in a collective learn the reason.
        if self.ranks is not None:
            self.ranks.close(error)
        with self._hooks.signals:
            if self._closed:
                return
            self._closed = True
            # Else the modules stay guarded: they would compute with NaN.
            if not any(
                self._records.is_absent(parameter) for parameter in self._records.parameters()
            ):
                self._hooks.remove()
            self._records.close()
            self.swap.close()

    @property
    def closed(self) -> bool:
        """Whether its files are gone."""
        return self._closed

    @property
    def count(self) -> int:
        """How many parameters it has."""
        return self._records.count

    def make_room(self, nbytes: int) -> None:
        """Evict parameters until the context's cache has room for `nbytes` beside them.

        Raises:
            CapacityError: not even the whole host budget has.
        """
        self._records.make_room(nbytes)

    def guard(self, modules: Iterable[torch.nn.Module]) -> None:
        """Make these modules refuse to run, and refuse state_dict() and load_state_dict()."""
        guard = _Unready(self)
        for module in modules:
            self._hooks.before_call(module, guard)
            self._hooks.on_state_dict(module, guard.refuse)
            self._hooks.on_load_state_dict(module, guard.refuse)

    def _bring(self, parameter: torch.Tensor) -> None:
        # An interrupt acts between two parameters, where the call can be repeated.
        with self._hooks.signals:
            self._records.bring(parameter)

    def _check_within(
        self, parameter: torch.Tensor, numel: int, first_element: int, values: torch.Tensor
    ) -> None:
        last = first_element + values.numel()
        if (
            first_element < 0
            or last > numel
            or values.dtype != parameter.dtype
            or values.dim() != 1
        ):
            raise ValueError(
                f"cannot read elements {first_element} to {last} into a tensor of shape "
                f"{tuple(values.shape)} and {values.dtype}: expected a flat one of "
                f"{parameter.dtype}, within the {numel} elements of the parameter"
            )

    def _check_room(self, parameters: Iterable[torch.Tensor]) -> None:
        nbytes, free = self._records.room_for(parameters)
        if nbytes > free:
            raise CapacityError(
                tier=Tier.HOST.name,
                asked=nbytes,
                free=free,
                limit=next(usage.limit for usage in self.ledger.usage() if usage.tier is Tier.HOST),
                change="raise the budget's host, or leave the values on the drives and call "
                "engine.initialize",
            )


def built_model_of(model: torch.nn.Module) -> BuiltModel | None:
    """Return the BuiltModel that has the values of a model's parameters; None: they are ordinary.

    Raises:
        RuntimeError: parts of the model were built in several contexts.
    """
    found = {
        # Each module of a context has a hook of its own, and all hooks one BuiltModel.
        id(hook.built): hook.built
        for module in model.modules()
        # Found by the hook alone: nothing is stored on modules or parameters.
        for hook in module._forward_pre_hooks.values()
        if isinstance(hook, _Unready)
    }
    if len(found) > 1:
        raise RuntimeError(
            f"Parts of this model were built in {len(found)} init_contexts. An engine takes over "
            "one: build the whole model in one `with init_context(...)`"
        )
    return next(iter(found.values()), None)


class _Unready:
    """A pre-forward hook that does not let its module run."""

    def __init__(self, built: BuiltModel) -> None:
        self.built = built

    def __call__(self, _module: torch.nn.Module, _args: Any) -> None:
        self.refuse()

    def refuse(self) -> None:
        if self.built.closed:
            raise RuntimeError(
                "This model has no values: the body of its init_context failed, or its "
                "BuiltModel was closed before engine.initialize. Build the model again"
            )
        raise RuntimeError(
            "This model was built in an init_context, and its values are on the drives. Call "
            "engine.initialize with it first, or `built.whole()` where it fits into host memory"
        )

    def __reduce_ex__(self, _protocol: object) -> NoReturn:
        raise TypeError(
            "This model cannot be copied or pickled: it was built in an init_context, and its "
            "values are on the drives. Call engine.initialize with it first, or `built.whole()` "
            "where it fits into host memory"
        )

    def __deepcopy__(self, _memo: object) -> NoReturn:
        self.__reduce_ex__(None)
