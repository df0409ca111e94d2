"""What several ranks cannot train in this version is refused by name, with what would do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from infinity_engine.config import EngineConfig
from infinity_engine.engine.init_context import init_context
from infinity_engine.errors import ConfigError
from infinity_engine.parameters.modules import leaves_of
from infinity_engine.plan import Budget
from infinity_engine.ranks.sharding import check_cut
from support.small_models import MODELS


class Placed(nn.Parameter):
    """Looks like a parameter that tensor parallelism has placed."""

    placements = ("Shard(0)",)


def test_a_parameter_that_tensor_parallelism_has_cut_is_refused() -> None:
    model = nn.Linear(4, 4)
    model.weight = Placed(torch.zeros(4, 4))

    with pytest.raises(
        ConfigError,
        match=r"^parameter weight: expected an ordinary tensor, as a DTensor is a shard",
    ):
        check_cut(model, EngineConfig(), built_alone=False)


def test_a_model_that_torch_cuts_or_averages_itself_is_refused() -> None:
    class DistributedDataParallel(nn.Sequential):
        __module__ = "torch.nn.parallel.distributed"

    told = r"^module 1: expected the model without this wrapper: .*, got 'DistributedDataParallel'$"
    with pytest.raises(ConfigError, match=told):
        check_cut(
            nn.Sequential(nn.Linear(2, 2), DistributedDataParallel(nn.Linear(2, 2))),
            EngineConfig(),
            built_alone=False,
        )


def test_a_model_that_one_rank_has_built_alone_is_refused(tmp_path: Path) -> None:
    with init_context(budget=Budget(host="64MiB", nvme={str(tmp_path): "1MiB"})) as built:
        model = nn.Linear(40, 40)

    with pytest.raises(
        ConfigError, match=r"^model: expected one in memory, or one that all ranks have built"
    ):
        check_cut(model, EngineConfig(), built_alone=built.ranks is None)
    built.close()


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        (
            {"storage": {"early_updates": True}},
            r"^storage\.early_updates: expected False on several ranks",
        ),
        (
            {"parameters": "nvme", "ranks": {"stage": "gradients"}},
            r'^parameters: expected "auto" or "device" with ranks\.stage="gradients", which has them whole',
        ),
        (
            {"ranks": {"stage": "optimizer", "leaf_modules": ["Attention"]}},
            r'^ranks\.leaf_modules: expected none with ranks\.stage="optimizer"',
        ),
    ],
)
def test_settings_that_do_not_go_with_several_ranks_are_refused(
    settings: dict[str, Any], told: str
) -> None:
    with pytest.raises(ConfigError, match=told):
        check_cut(nn.Linear(1, 1), EngineConfig.from_mapping(settings), built_alone=False)


def test_leaf_modules_are_named_or_of_a_named_class_and_none_is_within_another() -> None:
    model = MODELS["gpt"]()

    assert leaves_of(model, ["Attention"]) == {f"blocks.{number}.attention" for number in range(3)}
    assert leaves_of(model, ["blocks.1", "Attention"]) == {
        "blocks.0.attention",
        "blocks.1",
        "blocks.2.attention",
    }
    assert leaves_of(model, [""]) == {""}
    with pytest.raises(ConfigError, match=r"^ranks\.leaf_modules: expected the name of a module"):
        leaves_of(model, ["Attentoin"])
