"""`ShownParameters`: which parameters show their values to modules; the others read as NaN.

Knows nothing of where values come from. Called by whatever brings parameters to modules.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from infinity_engine.parameters.parameters import ModelParameter, absent

__all__ = ["ShownParameters"]


class ShownParameters:
    """The parameters of `parameters`, by number; none shows its values at first."""

    def __init__(self, parameters: Mapping[int, ModelParameter], where: torch.device) -> None:
        self._parameters = parameters
        self._addresses: dict[int, int] = {}
        self._numbers: dict[int, int] = {}  # by address
        self._absent = {
            number: absent(parameter.dtype, parameter.parameter.shape, where)
            for number, parameter in parameters.items()
            # Shown from the start: whatever reads a parameter too early reads NaN.
        }
        for number, parameter in parameters.items():
            parameter.show(self._absent[number])
            parameter.note_values()

    def __contains__(self, number: int) -> bool:
        return number in self._addresses

    def number_at(self, address: int) -> int | None:
        """Return the parameter with shown values that begin at this address, if there is one."""
        return self._numbers.get(address)

    def values(self, number: int) -> torch.Tensor:
        """Return the values of a parameter that is shown. Views of them keep their memory."""
        return self._parameters[number].parameter.data

    def check_untouched(self, number: int) -> None:
        """Raise RuntimeError if code outside of the engine has changed a parameter's data."""
        self._parameters[number].check_untouched()

    def show(self, number: int, values: torch.Tensor) -> None:
        """Let modules see these values, of the parameter's shape and dtype."""
        parameter = self._parameters[number]
        parameter.show(values)
        # Autograd saves views, so what is saved is recognised by where its storage begins.
        self._addresses[number] = address = parameter.parameter.data_ptr()
        self._numbers[address] = number

    def hide(self, number: int) -> None:
        """Let a parameter read as NaN from here on; nothing if it does already.

        Raises:
            RuntimeError: code outside of the engine has changed its data.
        """
        if number in self._addresses:
            self._parameters[number].check_untouched()
            self._parameters[number].show(self._absent[number])
            del self._numbers[self._addresses.pop(number)]

    def end(self, number: int, values: torch.Tensor | None) -> None:
        """Give a parameter these values as ordinary memory of its own; None: it reads as NaN.

        Unlike `hide`, this keeps no record of what was shown: nothing is fetched any more.
        """
        # 0 is no address of memory, so nothing is found for one that was never shown.
        self._numbers.pop(self._addresses.pop(number, 0), None)
        self._parameters[number].show(self._absent[number] if values is None else values)

    def is_as_shown(self, number: int) -> bool:
        """Tell whether a parameter still has the data that was shown last."""
        # Other data means that the caller has set its own.
        return self._addresses.get(number) == self._parameters[number].parameter.data_ptr()
