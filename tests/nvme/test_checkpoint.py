"""`save` and `load`: a state dict comes back as it was, in a store just large enough, and a failure
costs nothing.
"""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from deepnvme import (
    Access,
    ChecksumError,
    FaultPlan,
    IOQueue,
    Member,
    NVMeError,
    Requests,
    StoreError,
    TensorStore,
    VolumeError,
    load,
    save,
)
from deepnvme.checkpoint import capacity_for
from deepnvme.queue.pipeline import Pipeline
from support.nvme_io import PAGE

MIB = 1 << 20


def state(seed: int = 0) -> dict[str, Any]:
    """Return what a training run keeps: nested, with large and small arrays and plain values."""
    random = np.random.default_rng(seed)
    return {
        "model": {f"layer.{number}.weight": random.random((300, 301)) for number in range(3)},
        "optimizer": {"state": {0: {"step": 7 + seed, "m": random.random(40)}}, "lr": (1e-3, None)},
        "rng": b"\0\1",
        "nothing": np.empty((0, 2), np.float32),
    }


def assert_same(found: Any, expected: Any) -> None:
    assert type(found) is type(expected)
    if isinstance(expected, dict):
        assert list(found) == list(expected)
        for key in expected:
            assert_same(found[key], expected[key])
    elif isinstance(expected, np.ndarray):
        assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
        assert (found == expected).all()
    else:
        assert found == expected


def test_a_state_comes_back_as_it_was(tmp_path: Path) -> None:
    assert save(state(), tmp_path / "s") >= 1

    assert_same(load(tmp_path / "s"), state())


def test_one_directory_or_several_each_as_it_is(tmp_path: Path) -> None:
    directories = [Member(tmp_path / "a", rate=1.0), Member(tmp_path / "b", rate=3.0)]

    save(state(), directories)

    assert_same(load([str(tmp_path / "b"), tmp_path / "a"]), state())
    with pytest.raises(VolumeError, match="is missing"):
        load(tmp_path / "a")


def test_torch_tensors_come_back_as_such(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed")
    weight = torch.randn(50, 40).bfloat16()

    save({"weight": weight, "tied": weight}, tmp_path / "s")
    found = load(tmp_path / "s")

    assert torch.equal(found["weight"], weight)
    assert found["tied"] is found["weight"]


def test_a_new_store_is_just_large_enough(tmp_path: Path) -> None:
    save({"w": np.zeros(MIB + 1, np.uint8), "b": np.zeros(3)}, tmp_path / "s")

    with TensorStore.open([tmp_path / "s"]) as store:
        assert store.volume.capacities == (MIB + 2 * PAGE,)
        assert store.volume.free_bytes == 0


def test_a_state_without_tensors_is_saved(tmp_path: Path) -> None:
    save({"epoch": 3}, tmp_path / "s")

    assert load(tmp_path / "s") == {"epoch": 3}


@given(
    st.lists(st.integers(0, 300_000), max_size=24),
    st.lists(st.floats(0.1, 10), min_size=1, max_size=4),
)
@example(sizes=[200_000] * 4, rates=[1.0, 1.0, 1.0])
def test_whatever_is_to_be_saved_fits(
    tmp_path_factory: pytest.TempPathFactory, sizes: list[int], rates: list[float]
) -> None:
    folder = tmp_path_factory.mktemp("fits")
    members = [Member(folder / str(number), rate=rate) for number, rate in enumerate(rates)]
    tensors = {str(number): np.zeros(nbytes, np.uint8) for number, nbytes in enumerate(sizes)}

    with IOQueue("threads") as queue:
        store = TensorStore.create(members, capacity_for(sizes), queue=queue)
        store.put_many(tensors)
        store.discard()


def test_saving_again_replaces_the_state_where_there_is_room(tmp_path: Path) -> None:
    save(state(0), tmp_path / "s", capacity=8 * MIB)

    generations = [save(state(seed), tmp_path / "s") for seed in range(1, 6)]

    assert_same(load(tmp_path / "s"), state(5))
    assert generations == sorted(set(generations))


@pytest.mark.parametrize("capacity", [None, 1, 20 * MIB])
def test_saving_again_and_again_needs_no_thought_of_room(
    tmp_path: Path, capacity: int | None
) -> None:
    for seed in range(5):
        save(state(seed), tmp_path / "s", capacity=capacity)

        assert_same(load(tmp_path / "s"), state(seed))
    with TensorStore.open([tmp_path / "s"]) as store:
        assert sum(store.volume.capacities) >= (capacity or 0)
        settled = store.volume.capacities
    save(state(5), tmp_path / "s", capacity=capacity)
    with TensorStore.open([tmp_path / "s"]) as store:
        assert store.volume.capacities == settled, "three of them have room for any number"


def test_a_state_may_grow(tmp_path: Path) -> None:
    for count in range(1, 6):
        grown = {"w": np.full(count * MIB, count, np.uint8)}
        members = [
            Member(tmp_path / "a", rate=1.0, capacity=MIB),
            Member(tmp_path / "b", rate=3.0, capacity=MIB),
        ]
        save(grown, members)

        assert_same(load([tmp_path / "b", tmp_path / "a"]), grown)


def test_a_state_that_the_drive_has_no_room_for_leaves_what_was_saved(tmp_path: Path) -> None:
    save(state(0), tmp_path / "s")

    with pytest.raises(VolumeError, match="cannot be reserved") as caught:
        save(state(1), tmp_path / "s", capacity=1 << 60)

    assert caught.value.errno in (errno.ENOSPC, errno.EFBIG)
    assert_same(load(tmp_path / "s"), state(0))


def test_a_state_is_saved_however_its_tensors_lie(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    model = torch.nn.Linear(30, 20).to(memory_format=torch.contiguous_format)
    model.weight.data = model.weight.data.T.contiguous().T
    large = torch.arange(600_000.0).reshape(600, 1000).T

    save({"model": model.state_dict(), "large": large}, tmp_path / "s")

    found = load(tmp_path / "s")
    assert torch.equal(found["model"]["weight"], model.weight)
    assert torch.equal(found["large"], large)


def test_the_state_before_can_be_loaded(tmp_path: Path) -> None:
    generations = [save(state(seed), tmp_path / "s") for seed in range(3)]

    assert_same(load(tmp_path / "s", generation=generations[1]), state(1))
    with pytest.raises(StoreError, match=rf"no generation {generations[0]} here"):
        load(tmp_path / "s", generation=generations[0])


def test_a_state_can_be_loaded_while_others_load(tmp_path: Path) -> None:
    save(state(), tmp_path / "s")

    with TensorStore.open([tmp_path / "s"], access=Access.READ):
        assert_same(load(tmp_path / "s"), state())


def test_a_store_of_tensors_without_a_state_is_loaded_by_their_names(tmp_path: Path) -> None:
    with TensorStore.create([tmp_path / "s"], 4 * MIB) as store:
        store.put_many({"a": np.ones(3), "b/c": np.zeros(MIB, np.uint8)})
        store.commit()

    found = load(tmp_path / "s")

    assert_same(
        {name: np.asarray(each) for name, each in found.items()},
        {"a": np.ones(3), "b/c": np.zeros(MIB, "u1")},
    )
    with pytest.raises(KeyError, match="no state dict 'other'"):
        load(tmp_path / "s", name="other")


def test_somebody_elses_file_is_not_taken_for_a_damaged_store(tmp_path: Path) -> None:
    (tmp_path / "data").write_text("x,y")

    for call in (lambda: save(state(), tmp_path), lambda: load(tmp_path)):
        with pytest.raises(VolumeError, match="name another directory"):
            call()

    assert (tmp_path / "data").read_text() == "x,y"


def test_states_of_other_names_stay(tmp_path: Path) -> None:
    save({"step": 1}, tmp_path / "s", name="first", capacity=MIB)
    save({"step": 2}, tmp_path / "s", name="second")

    assert load(tmp_path / "s", name="first") == {"step": 1}
    with pytest.raises(KeyError, match="no state dict 'state'; there are: 'first', 'second'"):
        load(tmp_path / "s")


def test_a_directory_that_holds_something_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("x")

    with pytest.raises(VolumeError, match="holds something"):
        save(state(), tmp_path)

    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def test_what_cannot_be_kept_is_refused_before_anything_is_made(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="which a state dict cannot keep"):
        save({"model": object()}, tmp_path / "s")

    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("requests", [Requests.WRITES, Requests.SYNCS])
def test_a_drive_that_fails_leaves_nothing_half(tmp_path: Path, requests: Requests) -> None:
    (tmp_path / "there").mkdir()
    for number in range(1, 6):
        plan = FaultPlan(seed=1)
        plan.fail(nth=number, errno=errno.EIO, requests=requests)
        try:
            with IOQueue("threads", faults=plan) as queue:
                save(state(), tmp_path / "s", queue=queue)
        except NVMeError:
            assert [path.name for path in tmp_path.iterdir()] == ["there"]
        else:
            assert number > 1
            assert_same(load(tmp_path / "s"), state())
            return


def test_a_failure_in_an_existing_directory_leaves_it_empty(tmp_path: Path) -> None:
    plan = FaultPlan(seed=1)
    plan.fail(every=1, errno=errno.EIO, requests=Requests.WRITES)

    with IOQueue("threads", faults=plan) as queue, pytest.raises(NVMeError):
        save(state(), tmp_path, queue=queue)

    assert list(tmp_path.iterdir()) == []


def test_a_bad_byte_is_found(tmp_path: Path) -> None:
    save({"w": np.zeros(MIB, np.uint8)}, tmp_path / "s")
    with (tmp_path / "s/data").open("r+b") as data:
        data.seek(PAGE + 12345)
        data.write(b"\1")

    with pytest.raises(ChecksumError, match="'state/w'"):
        load(tmp_path / "s")


@pytest.mark.parametrize("at", [0, 8 * MIB - 1, 9 * MIB, 17 * MIB + 4])
@pytest.mark.parametrize(
    "ours", [False, True], ids=["into new memory", "into memory that is there"]
)
def test_a_bad_byte_of_a_tensor_of_several_pieces_is_named(
    tmp_path: Path, at: int, ours: bool
) -> None:
    whole = np.arange(17 * MIB + 5, dtype=np.uint32).astype(np.uint8)
    out = np.empty_like(whole) if ours else None
    with TensorStore.create([tmp_path / "s"], 18 * MIB) as store:
        store.put("w", whole)
        store.commit()
        assert np.array_equal(store.get("w", out), whole)
        with (tmp_path / "s/data").open("r+b") as data:
            data.seek(PAGE + at)
            data.write(bytes([whole[at] ^ 1]))

        with pytest.raises(ChecksumError, match=f"'w'.* {at // MIB * MIB}"):
            store.get("w", out)


def test_large_tensors_are_got_while_others_have_all_staging_memory(tmp_path: Path) -> None:
    whole = np.arange(17 * MIB + 5, dtype=np.uint32).astype(np.uint8)
    with TensorStore.create([tmp_path / "s"], 20 * MIB) as store, Pipeline() as others:
        store.put("w", whole)
        store.commit()
        staged = store._tensors.io._staged_large
        taken = []
        while (run := staged.take_unless_others_have_it(others)) is not None:
            taken.append(run)

        assert len(taken) == 4
        assert np.array_equal(store.get("w"), whole)
        store.put("small", whole[:PAGE])
        assert np.array_equal(store.get("small"), whole[:PAGE])
        store.commit()


def test_load_says_where_there_is_nothing(tmp_path: Path) -> None:
    with pytest.raises(VolumeError, match="holds no volume"):
        load(tmp_path)


def test_a_tree_is_put_over_tensors_that_are_there(tmp_path: Path) -> None:
    save(state(), tmp_path / "s")
    with (
        TensorStore.open([tmp_path / "s"]) as source,
        TensorStore.create([tmp_path / "t"], 8 * MIB) as target,
    ):
        target.put_many(source.get_many(source))
        target.put_tree("state", source.trees["state"])
        target.commit()

    assert_same(load(tmp_path / "t"), state())


def test_a_tree_whose_tensors_are_missing_is_refused(tmp_path: Path) -> None:
    save(state(), tmp_path / "s")
    with (
        TensorStore.open([tmp_path / "s"]) as source,
        TensorStore.create([tmp_path / "t"], MIB) as target,
    ):
        with pytest.raises(KeyError, match="no tensor 'state/"):
            target.put_tree("state", source.trees["state"])
        assert target.states == ()
