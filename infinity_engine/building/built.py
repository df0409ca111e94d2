"""`BuiltModel`: a model whose parameters' values are on the drives, until an engine takes them
over.

What `init_context` gives; its modules refuse to run, and by what refuses `originals_of` finds it
again. Reads and gives values; changes none. Of several ranks, each has its shards; what shows whole
values is for all of them together.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NoReturn

import torch

from infinity_engine.building.originals import Originals
from infinity_engine.errors import CapacityError
from infinity_engine.memory import Ledger
from infinity_engine.parameters.hooks import Hooks
from infinity_engine.partition import ShardSpec
from infinity_engine.plan import Tier
from infinity_engine.ranks.ranks import Ranks
from infinity_engine.storage import SwapFile

__all__ = ["BuiltModel", "originals_of"]


class BuiltModel:
    """The parameters of one model and where their values are.

    Closed by whoever has taken them all over.

    Values that somebody had views of when the context ended, and single numbers, stay in host
    memory, and so are those that the views show. When nobody has the model or this any more, the
    files go too.
    """

    def __init__(
        self, originals: Originals, swap: SwapFile, ledger: Ledger, ranks: Ranks | None = None
    ) -> None:
        self.swap = swap
        self.ledger = ledger
        self.ranks = ranks
        """Those who have built it together; None where this one has alone."""
        self._originals = originals
        self._hooks = Hooks()
        self._closed = False

    def __contains__(self, parameter: object) -> bool:
        """Tell whether it has the values of this parameter: it was built in the context, and not
        released.
        """
        return parameter in self._originals

    def nbytes_of(self, parameter: torch.Tensor) -> int:
        """Return the bytes of a parameter's values.

        Raises:
            ConfigError: it does not have them.
        """
        self._originals.is_absent(parameter)
        return parameter.numel() * parameter.element_size()

    def is_absent(self, parameter: torch.Tensor) -> bool:
        """Tell whether a parameter shows no values: they are on the drives alone.

        Raises:
            ConfigError: it does not have them.
        """
        return self._originals.is_absent(parameter)

    def piece(self, parameter: torch.Tensor, first_element: int, numel: int) -> torch.Tensor:
        """Return so many elements of a parameter, flat, from that one on, in new host memory.

        Where they begin with a page of the file, as every multiple of 4096 elements does, no more
        than they is read.

        Raises:
            ConfigError: it does not have the parameter's values.
            RuntimeError: the parameter was written to while they were on the drives.
            TransferError: they could not be read.
        """
        values = torch.empty(numel, dtype=parameter.dtype, device="cpu")
        self._check_within(parameter, parameter.numel(), first_element, values)
        self._originals.read_whole(parameter, first_element, values)
        return values

    def read_into(self, parameter: torch.Tensor, first_element: int, values: torch.Tensor) -> None:
        """Fill `values`, flat and of the parameter's dtype, as `piece` would return it.

        Of several ranks, this one reads what it has: the first element is that of its shard.
        """
        spec = self.spec_of(parameter)
        mine = (
            parameter.numel()
            if spec is None or self.ranks is None
            else spec.shards[self.ranks.shards.rank].numel
        )
        self._check_within(parameter, mine, first_element, values)
        self._originals.read_into(parameter, first_element, values)

    def spec_of(self, parameter: torch.Tensor) -> ShardSpec | None:
        """Return how a parameter is cut over the ranks that have built it; None where there is one.

        Raises:
            ConfigError: it does not have the parameter's values.
        """
        return self._originals.spec_of(parameter)

    def digest_of(self, parameter: torch.Tensor) -> str:
        """Return words that differ where values of several ranks do, as far as this one has seen
        the whole of them.
        """
        return self._originals.digest_of(parameter)

    def hand_over_ranks(self) -> Ranks | None:
        """Return who has built it together, whom it does not close any more."""
        ranks, self.ranks = self.ranks, None
        return ranks

    def release(self, parameter: torch.Tensor) -> None:
        """Have a parameter's values no more: somebody else has them.

        What the parameter shows stays as it is.

        Raises:
            ConfigError: it does not have them.
        """
        self._originals.forget(parameter)

    def materialize(self, parameter: torch.Tensor) -> None:
        """Give a parameter ordinary memory with its values, which no budget counts from here on;
        and release it.

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
        parameters = list(self._originals.parameters())
        self._check_room(parameters)
        for parameter in parameters:
            self._bring(parameter)
        self.close()

    def close(self, error: BaseException | None = None) -> None:
        """Remove the files. The model runs again, unless there are values nobody took over.

        Again: does nothing.

        Of several ranks, the others are told of an `error`, if it is why.
        """
        if self.ranks is not None:
            self.ranks.close(error)
        with self._hooks.signals:
            if self._closed:
                return
            self._closed = True
            if not any(self._originals.is_absent(each) for each in self._originals.parameters()):
                self._hooks.remove()
            self._originals.close()
            self.swap.close()

    @property
    def closed(self) -> bool:
        """Whether its files are gone."""
        return self._closed

    def guard(self, modules: Iterable[torch.nn.Module]) -> None:
        """Let these modules refuse to run, and to give or take values."""
        guard = _Unready(self)
        for module in modules:
            self._hooks.before_call(module, guard)
            self._hooks.on_state_dict(module, guard.refuse)
            self._hooks.on_load_state_dict(module, guard.refuse)

    def _bring(self, parameter: torch.Tensor) -> None:
        with self._hooks.signals:  # between two parameters, where all can be tried again
            self._originals.bring(parameter)

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
                f"elements {first_element} to {last} as a tensor of shape {tuple(values.shape)} "
                f"and {values.dtype}: "
                f"expected a flat one of {parameter.dtype}, within the {numel} elements of the "
                "parameter"
            )

    def _check_room(self, parameters: Iterable[torch.Tensor]) -> None:
        nbytes, free = self._originals.room_for(parameters)
        if nbytes > free:
            raise CapacityError(
                tier=Tier.HOST.name,
                asked=nbytes,
                free=free,
                limit=next(each.limit for each in self.ledger.usage() if each.tier is Tier.HOST),
                change="raise the budget's host, or leave the values on the drives and call "
                "engine.initialize",
            )


def originals_of(model: torch.nn.Module) -> BuiltModel | None:
    """Return what has the values of a model's parameters; None where these are ordinary ones.

    Raises:
        RuntimeError: parts of the model were built in several contexts.
    """
    found = {
        id(hook.built): hook.built
        for module in model.modules()
        for hook in module._forward_pre_hooks.values()
        if isinstance(hook, _Unready)
    }
    if len(found) > 1:
        raise RuntimeError(
            f"parts of this model were built in {len(found)} contexts: build all of it in one "
            "`with init_context(...)`"
        )
    return next(iter(found.values()), None)


class _Unready:
    """Stands before a module and does not let it run."""

    def __init__(self, built: BuiltModel) -> None:
        self.built = built

    def __call__(self, _module: torch.nn.Module, _args: Any) -> None:
        self.refuse()

    def refuse(self) -> None:
        if self.built.closed:
            raise RuntimeError(
                "this model was built in an init_context whose values are gone, as its body "
                "failed, or it was closed "
                "before engine.initialize took them over: build the model again"
            )
        raise RuntimeError(
            "this model was built in an init_context and its values are on the drives: call "
            "engine.initialize with it "
            "first; or `built.whole()`, where it fits into host memory"
        )

    def __reduce_ex__(self, _protocol: object) -> NoReturn:
        raise TypeError(
            "a model that was built in an init_context cannot be copied or pickled, as its values "
            "are on the drives: "
            "call engine.initialize with it first; or `built.whole()`, where it fits into host "
            "memory"
        )

    def __deepcopy__(self, _memo: object) -> NoReturn:
        self.__reduce_ex__(None)
