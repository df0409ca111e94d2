"""Parameters that are used out of sight, on several ranks: named on all, and exact once they are
registered. Gloo.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from support import rank_training as programs
from support.ranks import launched

borrow_unregistered = partial(programs.borrow, registers=False)
borrow_registered = partial(programs.borrow, registers=True)


def test_a_parameter_that_nobody_saw_used_is_named_on_all_ranks() -> None:
    for told in launched(2, borrow_unregistered, {}):
        assert told.startswith("owner.weight was used where the engine could not see it")
        assert "engine.register_external(module, parameter)" in told


@pytest.mark.parametrize("ranks", [{}, {"leaf_modules": ["block"]}])
def test_what_is_registered_is_gathered_with_the_module_that_uses_it(ranks: dict[str, Any]) -> None:
    whole = launched(2, borrow_registered, {"ranks": {"stage": "gradients"}})
    cut = launched(2, borrow_registered, {"ranks": ranks})

    for one, other in zip(whole, cut, strict=True):
        assert one["losses"] == other["losses"]
        states = one["states"]
        assert [
            name for name, each in other["states"].items() if not torch.equal(each, states[name])
        ] == []
