"""Updates that are made in the backward: the same bits, whatever is in time, and nothing counts
before its step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import cache, partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

import infinity_engine
from deepnvme import FaultPlan, IOQueue
from deepnvme.queue.faults import Requests
from infinity_engine.engine.engine import Engine
from infinity_engine.errors import CapacityError, ConfigError
from infinity_engine.lanes.meter import Cargo
from infinity_engine.plan import NvmeStreamed
from infinity_engine.plan.ops import Lane
from support.engine_bits import Bits, bits_of
from support.interrupts import interrupted_at, walks
from support.nvme_training import Case, Trained, made, opened, train, trained
from support.small_models import MODELS, Task
from support.unnamed_files import unnamed_files

LATE = Case(strategy=NvmeStreamed(), parameters="nvme", precision="bf16")
EARLY = replace(LATE, early=True, host=17_400_000)
INITIALIZING = {Requests.READS: 0, Requests.WRITES: 50}  # requests that it takes at most
pytestmark = pytest.mark.usefixtures("deterministic")


@cache
def in_memory(case: Case) -> Trained:
    return trained(
        replace(case, early=False, host="256MiB", parameters="auto", strategy=Case().strategy),
        None,
        None,
    )


def assert_same(one: Bits, other: Bits) -> None:
    assert one.keys() == other.keys()
    different = [name for name in one if not torch.equal(one[name], other[name])]
    assert not different


class Cut(Task):
    """Layers whose weights lie in several subgroups each."""

    def __init__(self) -> None:
        super().__init__()
        widths = [128, 100, 160, 128, 8]
        self.layers = torch.nn.ModuleList(
            torch.nn.Linear(one, other) for one, other in pairwise(widths)
        )

    def batch(self, seed: int) -> torch.Tensor:
        return torch.randn(4, 128, generator=torch.Generator().manual_seed(seed))

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        x = batch.to(next(self.layers.parameters()).dtype)
        for layer in self.layers:
            x = torch.nn.functional.gelu(layer(x))
        return x.float().pow(2).mean()


class Roomy(Task):
    """Two layers, and so many small parameters without gradients that there is room for sums."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(48, 48) for _ in range(2))
        self.unused = torch.nn.ParameterList(torch.zeros(8) for _ in range(60))

    def batch(self, seed: int) -> torch.Tensor:
        return torch.randn(4, 48, generator=torch.Generator().manual_seed(seed))

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        x = batch.to(next(self.layers.parameters()).dtype)
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x.float().pow(2).mean()


FILES = ("update/early.py", "update/swapping.py")


@contextmanager
def early(case: Case, drive: Path, **more: Any) -> Iterator[tuple[Engine, Task]]:
    """Open an engine, after a step, in which the order of modules was recorded."""
    with opened(case, None, drive, **more) as (engine, task):
        train(engine, task, replace(case, steps=1))
        yield engine, task


def gradient_bytes(engine: Engine) -> int:
    links = engine.report().links
    return sum(
        links[lane].nbytes.get(Cargo.GRADIENTS, 0) for lane in (Lane.NVME_READ, Lane.NVME_WRITE)
    )


@pytest.mark.parametrize(
    ("precision", "accumulation", "model"),
    [
        pytest.param(
            precision,
            accumulation,
            model,
            # Without accumulation, the update does the same with autocast as without it; with it,
            # it does the same for every model.
            marks=pytest.mark.slow
            if precision == "bf16_autocast"
            and (accumulation == 1 or model not in ("gpt", "mixture of experts"))
            else [],
        )
        for precision in ("bf16", "bf16_autocast")
        for accumulation in (1, 3)
        for model in sorted(MODELS)
    ],
)
def test_updates_in_the_backward_give_the_same_bits(
    model: str, precision: str, accumulation: int, tmp_path: Path
) -> None:
    case = replace(EARLY, model=model, accumulation=accumulation, precision=precision, steps=4)
    found = trained(case, None, tmp_path)
    assert found.losses == in_memory(replace(case, host=0)).losses
    assert_same(found.bits, in_memory(replace(case, host=0)).bits)


@pytest.mark.parametrize("accumulation", [1, 3])
def test_with_checksums_updates_in_the_backward_give_the_same_bits(
    accumulation: int, tmp_path: Path
) -> None:
    case = replace(EARLY, accumulation=accumulation, checksum="crc32c", steps=4)
    assert_same(trained(case, None, tmp_path).bits, in_memory(replace(case, host=0)).bits)


def test_gradients_that_find_their_subgroup_in_a_buffer_do_not_go_to_the_drives(
    tmp_path: Path,
) -> None:
    with opened(EARLY, None, tmp_path) as (engine, task):
        train(engine, task, EARLY)
        with_setting = gradient_bytes(engine)
    with opened(replace(EARLY, early=False, host=17_050_000), None, tmp_path) as (engine, task):
        train(engine, task, EARLY)
        assert with_setting < gradient_bytes(engine) / 2


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_a_drive_that_is_late_by_chance_changes_no_bits(seed: int, tmp_path: Path) -> None:
    plan = FaultPlan(seed=seed).delay(probability=0.5, delay_us=3000)
    case = replace(EARLY, accumulation=2, steps=4, host=17_500_000)
    with IOQueue(faults=plan) as queue, opened(case, None, tmp_path, queue=queue) as (engine, task):
        losses = train(engine, task, case)
        assert_same(bits_of(engine), in_memory(replace(case, host=0)).bits)
    assert losses == in_memory(replace(case, host=0)).losses


@pytest.mark.parametrize("accumulation", [1, 3])
# with the second, states of some subgroups stay there
@pytest.mark.parametrize("host", [17_400_000, 17_600_000])
def test_of_a_parameter_that_lies_in_several_subgroups_some_may_be_early_and_others_not(
    host: int, accumulation: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("support.nvme_training.MODELS", {"cut": Cut})
    case = replace(EARLY, model="cut", accumulation=accumulation, steps=4, host=host)
    delays = FaultPlan(seed=1).delay(probability=0.3, delay_us=3000)
    with (
        IOQueue(faults=delays) as queue,
        opened(case, None, tmp_path, queue=queue) as (engine, task),
    ):
        train(engine, task, case)
        bits = bits_of(engine)
    assert_same(bits, in_memory(replace(case, host=0)).bits)


def test_before_its_step_an_update_is_not_to_be_seen_and_afterwards_it_is_the_same(
    tmp_path: Path,
) -> None:
    case = replace(EARLY, steps=2)
    with early(case, tmp_path) as (engine, task):
        before = bits_of(engine)
        engine.backward(engine(task.batch(1)))
        assert_same(bits_of(engine), before)
        with torch.no_grad():
            loss = engine(task.batch(1)).item()
        assert loss == in_memory(replace(case, host=0)).losses[1]
        engine.step()
        assert_same(bits_of(engine), in_memory(replace(case, host=0)).bits)


def test_zero_grad_takes_updates_back(tmp_path: Path) -> None:
    case = replace(EARLY, steps=2)
    with early(case, tmp_path) as (engine, task):
        before = bits_of(engine)
        engine.backward(engine(task.batch(7)))
        engine.zero_grad()
        assert_same(bits_of(engine), before)
        train(engine, task, replace(case, steps=1), first=1)
        assert_same(bits_of(engine), in_memory(replace(case, host=0)).bits)


def test_a_backward_that_fails_half_way_leaves_the_old_version(tmp_path: Path) -> None:
    case = replace(EARLY, steps=2)

    class StopError(Exception):
        pass

    def stop(_gradient: torch.Tensor) -> None:
        raise StopError

    with early(case, tmp_path) as (engine, task):
        before = bits_of(engine)
        first = next(module for module in task.modules() if isinstance(module, torch.nn.Embedding))
        handle = first.register_forward_hook(
            lambda _m, _i, output: output.register_hook(stop) and None
        )
        with pytest.raises(StopError):
            engine.backward(engine(task.batch(7)))
        handle.remove()
        engine.zero_grad()
        assert_same(bits_of(engine), before)
        train(engine, task, replace(case, steps=1), first=1)
        assert_same(bits_of(engine), in_memory(replace(case, host=0)).bits)


@pytest.mark.parametrize("first", walks(1, 50, 98))
def test_a_backward_that_is_interrupted_anywhere_can_be_taken_back(
    first: int, tmp_path: Path
) -> None:
    case = replace(EARLY, steps=2)
    for line in range(first, 5000, 150):
        with early(case, tmp_path) as (engine, task):
            with interrupted_at(line, FILES) as told:
                engine.backward(engine(task.batch(7)))
            engine.zero_grad()
            train(engine, task, replace(case, steps=1), first=1)
            assert_same(bits_of(engine), in_memory(replace(case, host=0)).bits)
        if not told[0]:
            return


@pytest.mark.parametrize(("precision", "early"), [("bf16", False), ("bf16", True), ("fp32", False)])
def test_new_values_come_to_modules_from_the_buffers_in_which_they_were_made(
    precision: str, early: bool, tmp_path: Path
) -> None:
    case = replace(LATE, precision=precision, early=early, host=18_400_000)
    with opened(case, None, tmp_path) as (engine, task):
        train(engine, task, case)
        read = engine.report().links[Lane.NVME_READ].nbytes.get(Cargo.PARAMETERS, 0)
        width = 4 if precision == "fp32" else 2
        on_drives = sum(
            width * each.numel()
            for each in task.parameters()
            if width * each.numel() >= case.small_bytes
        )
        states_and_values = on_drives if precision == "fp32" else 0  # values are masters there
        # else it were all of them at least, in the forward
        assert read - states_and_values < on_drives / 2
        assert_same(bits_of(engine), in_memory(replace(case, host=0)).bits)


@pytest.mark.parametrize("host", [17_400_000, 17_800_000])
def test_a_forward_that_is_interrupted_while_values_come_can_be_run_again(
    host: int, tmp_path: Path
) -> None:
    case = replace(EARLY, steps=2, host=host)
    for line in range(3, 5000, 41):
        with early(case, tmp_path) as (engine, task):
            with interrupted_at(line, ("parameters/fetching.py",), "receive") as told:
                engine(task.batch(7))
            train(engine, task, replace(case, steps=1), first=1)
            assert_same(bits_of(engine), in_memory(replace(case, host=0)).bits)
        if not told[0]:
            return


@pytest.mark.parametrize("name", ["note_arrivals", "end_step"])
def test_an_update_that_is_interrupted_at_its_end_writes_nothing_from_buffers_that_others_have_had_since(
    name: str, tmp_path: Path
) -> None:
    case = replace(LATE, steps=2, host=17_050_000)
    for line in range(1, 500, 7):
        with opened(case, None, tmp_path) as (engine, task):
            train(engine, task, case)
            with interrupted_at(line, ("update/swapping.py",), name) as told:
                engine.zero_grad()
            engine.zero_grad()
            assert_same(bits_of(engine), in_memory(replace(case, host=0)).bits)
        if not told[0]:
            return


@pytest.mark.parametrize(
    "files", [("update/early.py", "update/swapping.py"), ("engine/engine.py",)]
)
@pytest.mark.parametrize("first", walks(*range(1, 23, 4)))
def test_a_step_that_is_interrupted_anywhere_goes_on_where_it_stopped(
    first: int, files: tuple[str, ...], tmp_path: Path
) -> None:
    case = replace(EARLY, steps=2)
    for line in range(first, 5000, 23):
        with early(case, tmp_path) as (engine, task):
            engine.backward(engine(task.batch(1)))
            with interrupted_at(line, files) as told:
                engine.step()
            if told[0] and engine.steps == 1:
                engine.step()
            assert_same(bits_of(engine), in_memory(replace(case, host=0)).bits)
        if not told[0]:
            return


@pytest.mark.parametrize("line", range(10, 200, 37))
def test_closing_after_a_step_that_was_interrupted_gives_all_back(
    line: int, tmp_path: Path
) -> None:
    with early(EARLY, tmp_path) as (engine, task):
        engine.backward(engine(task.batch(1)))
        with interrupted_at(line, FILES):
            engine.step()
        engine.close()
    assert unnamed_files(tmp_path) == []


@pytest.mark.parametrize("more", [{0: 1}, {0: 3}, {1: 1}])
def test_more_gradients_than_there_are_micro_batches_are_added_up_all_the_same(
    more: dict[int, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("support.nvme_training.MODELS", {"roomy": Roomy})
    case = replace(EARLY, model="roomy", accumulation=3, steps=1, host=17_900_000)

    def bits(case: Case, drive: Path | None) -> Bits:
        with opened(case, None, drive) as (engine, task):
            train(engine, task, case)
            for micro_batch in range(3):
                extra = more.get(micro_batch, 0)
                losses = [
                    engine(task.batch(10 * micro_batch + number)) for number in range(1 + extra)
                ]
                for number, loss in enumerate(losses):
                    engine.backward(loss, retain_graph=number < extra)
                engine.step()
            return bits_of(engine)

    memory = replace(case, early=False, host="256MiB", parameters="auto", strategy=Case().strategy)
    assert_same(bits(case, tmp_path), bits(memory, None))


def test_more_micro_batches_than_planned_are_refused_before_anything_is_lost(
    tmp_path: Path,
) -> None:
    case = replace(EARLY, steps=2)
    with early(case, tmp_path) as (engine, task):
        engine.backward(engine(task.batch(1)))
        with pytest.raises(
            RuntimeError, match=r"early_updates has updated already.*Nothing was lost"
        ):
            engine.backward(engine(task.batch(2)))
        engine.step()

        assert_same(bits_of(engine), in_memory(replace(case, host=0)).bits)


def test_a_save_without_the_gradients_of_early_updates_is_refused(tmp_path: Path) -> None:
    case = replace(EARLY, steps=2)
    with early(case, tmp_path) as (engine, task):
        engine.backward(engine(task.batch(1)))
        with pytest.raises(RuntimeError, match=r"before save\(\)"):
            engine.save(tmp_path / "saved", pending="leave_out")
        with pytest.raises(RuntimeError, match=r"before export\(\)"):
            engine.export(tmp_path / "weights")
        engine.step()

        assert_same(bits_of(engine), in_memory(replace(case, host=0)).bits)


def test_changing_parameters_of_which_new_values_may_be_made_is_refused(tmp_path: Path) -> None:
    case = replace(EARLY, steps=2)
    with early(case, tmp_path) as (engine, task):
        engine.backward(engine(task.batch(1)))
        for parameter in task.parameters():
            with (
                pytest.raises(RuntimeError, match=r"between backward\(\) and step\(\)"),
                engine.gathered(parameter, modify=True),
            ):
                pass
        engine.step()
        assert_same(bits_of(engine), in_memory(replace(case, host=0)).bits)


def test_a_backward_within_a_body_that_changes_parameters_updates_nothing_early(
    tmp_path: Path,
) -> None:
    case = replace(EARLY, steps=1)

    def bits(case: Case, drive: Path | None) -> Bits:
        with opened(case, None, drive) as (engine, task):
            train(engine, task, case)
            last = [each for each in task.parameters() if each.numel() > 1000][-1]
            loss = engine(task.batch(1))
            with engine.gathered(last, modify=True):
                engine.backward(loss)
                last.data.mul_(0.5)
            engine.step()
            return bits_of(engine)

    memory = replace(case, early=False, host="256MiB", parameters="auto", strategy=Case().strategy)
    assert_same(bits(case, tmp_path), bits(memory, None))


def test_closing_between_backward_and_step_leaves_the_old_version(tmp_path: Path) -> None:
    with early(EARLY, tmp_path) as (engine, task):
        before = engine.state_dict()
        engine.backward(engine(task.batch(7)))
    assert_same({name: value.detach() for name, value in task.state_dict().items()}, before)


def test_hyperparameters_that_change_after_the_backward_are_refused(tmp_path: Path) -> None:
    case = replace(EARLY, steps=2)
    with early(case, tmp_path) as (engine, task):
        group = engine.optimizer.param_groups[0]
        lr = group["lr"]
        engine.backward(engine(task.batch(1)))
        group["lr"] = lr / 2
        with pytest.raises(RuntimeError, match=r"changed between backward\(\) and step\(\)"):
            engine.step()
        group["lr"] = lr
        engine.step()
        assert_same(bits_of(engine), in_memory(replace(case, host=0)).bits)


def test_hyperparameters_can_change_after_a_backward_that_was_refused(tmp_path: Path) -> None:
    case = replace(EARLY, steps=2)
    with early(case, tmp_path) as (engine, task):
        group = engine.optimizer.param_groups[0]
        lr, group["lr"] = group["lr"], 7.0
        with pytest.raises(ConfigError, match="loss"):
            engine.backward(torch.zeros(2, requires_grad=True))
        group["lr"] = lr
        train(engine, task, replace(case, steps=1), first=1)
        assert_same(bits_of(engine), in_memory(replace(case, host=0)).bits)


def test_a_second_backward_before_a_step_is_refused_and_can_be_taken_back(tmp_path: Path) -> None:
    case = replace(EARLY, steps=2)
    with early(case, tmp_path) as (engine, task):
        before = bits_of(engine)
        engine.backward(engine(task.batch(1)), retain_graph=True)
        # is updated early
        largest = [each for each in task.parameters() if each.numel() > 1000][-3]
        with (
            engine.gathered([largest]),
            pytest.raises(RuntimeError, match=r"each micro-batch has one backward\(\)"),
        ):
            engine.backward(largest.float().sum())
        engine.zero_grad()
        assert_same(bits_of(engine), before)
        train(engine, task, replace(case, steps=1), first=1)
        assert_same(bits_of(engine), in_memory(replace(case, host=0)).bits)


@pytest.mark.parametrize("requests", [Requests.READS, Requests.WRITES])
@pytest.mark.parametrize("every", [31, pytest.param(61, marks=pytest.mark.slow), 97])
def test_where_each_nth_io_fails_nothing_is_lost_or_half_done(
    requests: Requests, every: int, tmp_path: Path
) -> None:
    case = replace(EARLY, steps=6)
    plan = FaultPlan(seed=every)
    for nth in range(INITIALIZING[requests] + 1, 2000, every):
        plan.fail(nth=nth, requests=requests)
    told = 0
    with (
        IOQueue(faults=plan) as queue,
        suppress(OSError),  # closing reads as well
        opened(case, None, tmp_path, queue=queue) as (engine, task),
    ):
        for seed in range(case.steps):
            for _ in range(100):
                try:
                    if engine.steps == seed:
                        engine.zero_grad()
                        engine.backward(engine(task.batch(seed)))
                        engine.step()
                    break
                except (OSError, RuntimeError):
                    told += 1
                    finish(engine)
        bits = patiently(engine.state_dict)
        for name, parameter in task.named_parameters():
            state = patiently(partial(engine.state_of, parameter))
            bits.update({f"{name}: {key}": torch.as_tensor(value) for key, value in state.items()})
        failed = sum(drive.failed for drive in queue.stats().drives.values())
    assert failed
    # step() itself writes again what the backward could not
    assert told or requests is Requests.WRITES
    assert_same(bits, in_memory(replace(case, host=0)).bits)


def patiently(action: Callable[[], Any]) -> Any:
    """Do it until it succeeds."""
    last: Exception | None = None
    for _ in range(100):
        try:
            return action()
        except (OSError, RuntimeError) as error:
            last = error
    raise AssertionError("it never succeeds") from last


def finish(engine: Engine) -> None:
    """Go on with a step that was interrupted, until it is made."""
    for _ in range(100):
        try:
            engine.zero_grad()
        except RuntimeError as error:
            if "Call step() again" not in str(error):
                continue
            try:
                engine.step()
            except (OSError, RuntimeError):
                continue
            return
        except OSError:
            continue
        else:
            return


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"precision": "fp32"}, 'precision "fp32"'),
        ({"precision": "fp16"}, 'precision "fp16"'),
        ({"clip": 1.0}, "max_grad_norm"),
    ],
)
def test_where_updates_in_the_backward_would_not_be_exact_they_are_refused(
    settings: dict[str, Any], words: str, tmp_path: Path
) -> None:
    with (
        pytest.raises(ConfigError, match=words),
        opened(replace(EARLY, **settings), None, tmp_path),
    ):
        pass


def test_clipping_by_hand_is_refused(tmp_path: Path) -> None:
    with early(EARLY, tmp_path) as (engine, task):
        engine.backward(engine(task.batch(1)))
        with pytest.raises(ConfigError, match="clipped"):
            engine.clip_grad_norm_(1.0)


def test_what_fits_in_memory_is_updated_in_its_step(tmp_path: Path) -> None:
    case = replace(EARLY, strategy=Case().strategy, parameters="auto", host="256MiB", steps=2)
    found = trained(case, None, None)
    assert_same(found.bits, in_memory(replace(case, host=0)).bits)


def test_new_places_count_against_the_budget_of_the_drives(tmp_path: Path) -> None:
    task, optimizer = made("gpt")
    limit = 400_000
    with pytest.raises(CapacityError, match="NVME"):
        infinity_engine.initialize(
            task,
            optimizer,
            strategy=NvmeStreamed(),
            parameters="nvme",
            precision="bf16",
            subgroup_numel=4096,
            storage={"small_bytes": 256, "early_updates": True},
            budget={"host": 17_400_000, "nvme": {str(tmp_path): limit}},
        )


@pytest.mark.parametrize("parameters", ["auto", "device", "nvme"])
def test_early_updates_train_where_the_host_has_room_for_all(
    parameters: str, tmp_path: Path
) -> None:
    case = replace(EARLY, parameters=parameters, host="256MiB", steps=2)
    with opened(case, None, tmp_path) as (engine, task):
        train(engine, task, case)
        found = bits_of(engine)
    assert_same(found, in_memory(replace(case, host=0)).bits)
