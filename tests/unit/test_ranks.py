"""What a rank has of its machine, and how it meets the others or does not.

What the others say is given.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="ranks train with torch")

import torch.distributed as dist

from infinity_engine.config import RanksConfig, ShardingStage
from infinity_engine.errors import ConfigError
from infinity_engine.partition import Collectives
from infinity_engine.plan import ResolvedBudget
from infinity_engine.ranks.ranks import Ranks

GIB = 1 << 30


class Told:
    """The first of two ranks; the other says what `of_other` makes of what the first has, and
    agrees to all else.
    """

    rank, size = 0, 2

    def __init__(self, of_other: Callable[[Any], Any] = lambda said: said) -> None:
        self._of_other = of_other
        self.closed: BaseException | None = None

    def share(self, _what: str, payload: bytes) -> tuple[bytes, ...]:
        said = json.loads(payload)
        return payload, json.dumps(self._of_other(said)).encode() if isinstance(
            said, dict
        ) else payload

    def beside(self) -> Told:
        raise ConnectionError("the second sequence of collectives could not be made")

    def close(self, error: BaseException | None = None) -> None:
        self.closed = error


class Paired(Told):
    """One that has a second sequence."""

    def beside(self) -> Told:
        return self


def ranks_of(told: Told) -> Ranks:
    # as much of Collectives as is needed here
    return Ranks(told, RanksConfig())  # type: ignore[arg-type]


def test_ranks_that_name_one_directory_have_equal_parts_of_it(tmp_path: Path) -> None:
    budget = ResolvedBudget(device=GIB, host=4 * GIB, nvme={str(tmp_path): 1 << 20})

    mine = ranks_of(Paired()).share_budget(budget, device_is_shared=False)

    assert (mine.device, mine.host, mine.nvme) == (GIB, 2 * GIB, {str(tmp_path): 1 << 19})


def test_directories_of_one_file_system_have_no_more_together_than_is_free_there(
    tmp_path: Path,
) -> None:
    (tmp_path / "mine").mkdir()
    place = str((tmp_path / "mine").resolve())
    free = 0

    def with_its_own(said: dict[str, Any]) -> dict[str, Any]:
        nonlocal free
        system, free, limit = said["drives"][place]
        return {**said, "drives": {str(tmp_path / "other"): [system, free, limit]}}

    budget = ResolvedBudget(device=GIB, host=GIB, nvme={place: 1 << 62})

    mine = ranks_of(Paired(with_its_own)).share_budget(budget, device_is_shared=False)

    assert mine.nvme[place] == free // 2


def test_directories_that_have_room_beside_each_other_are_had_whole(tmp_path: Path) -> None:
    place = str(tmp_path.resolve())

    def with_its_own(said: dict[str, Any]) -> dict[str, Any]:
        return {**said, "drives": {"/other": said["drives"][place]}}

    budget = ResolvedBudget(device=GIB, host=GIB, nvme={place: 1 << 20})

    assert (
        ranks_of(Paired(with_its_own)).share_budget(budget, device_is_shared=False).nvme[place]
        == 1 << 20
    )


@pytest.mark.parametrize(("system", "users"), [(None, 2), ("another", 1)])
def test_ranks_with_own_directories_on_one_file_system_use_it_together(
    tmp_path: Path, system: str | None, users: int
) -> None:
    own = [str((tmp_path / name).resolve()) for name in ("0", "1")]
    for place in own:
        Path(place).mkdir()

    def with_its_own(said: dict[str, Any]) -> dict[str, Any]:
        same, free, limit = said["drives"][own[0]]
        return {**said, "drives": {str(tmp_path / "2"): [system or same, free, limit]}}

    ranks = ranks_of(Paired(with_its_own))
    budget = ResolvedBudget(device=GIB, host=GIB, nvme=dict.fromkeys(own, 1 << 20))
    ranks.share_budget(budget, device_is_shared=False)

    assert ranks.users == dict.fromkeys(own, users)


def test_ranks_on_other_cores_have_all_of_their_own() -> None:
    budget = ResolvedBudget(device=GIB, host=GIB, nvme={})
    alone, crowded = ranks_of(Paired(lambda said: {**said, "cores": []})), ranks_of(Paired())
    before = alone.cores

    for each in (alone, crowded):
        each.share_budget(budget, device_is_shared=False)

    assert set(alone.cores.cores) == set(before.cores)
    assert not alone.cores.is_shared
    assert crowded.cores.is_shared == (len(before.cores) == 1)
    assert crowded.cores.threads == max(1, (len(before.cores) + 1) // 2)


def test_a_rank_that_cannot_go_on_after_it_met_the_others_leaves_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    told = Told()
    monkeypatch.setattr(Collectives, "join", lambda timeout_s: told)

    with pytest.raises(ConnectionError):
        Ranks.join(RanksConfig())

    assert isinstance(told.closed, ConnectionError)


def test_a_process_that_is_to_train_alone_meets_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "RANK": "1",
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "1",
    }.items():
        monkeypatch.setenv(name, value)

    assert Ranks.join(RanksConfig(stage=ShardingStage.ALONE)) is None
    assert not dist.is_initialized()


@pytest.mark.parametrize("timeout_s", [0, -1.0, math.inf, math.nan, 1e300])
def test_a_timeout_that_torch_cannot_wait_for_is_refused(timeout_s: float) -> None:
    with pytest.raises(
        ConfigError, match=r"^timeout_s: expected more than 0 seconds, and at most 1e\+08"
    ):
        Collectives.join(timeout_s=timeout_s)
