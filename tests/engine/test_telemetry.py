"""What a step did can be read afterwards. On a virtual clock all of it is exact: links carry a
byte, devices update a parameter in each nanosecond, and the host's own work takes no time.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import pytest
import torch

import infinity_engine
from infinity_engine.accel import CpuAccelerator, Emulation, StreamKind, VirtualAccelerator
from infinity_engine.engine.engine import Engine
from infinity_engine.lanes.meter import Cargo, Wait
from infinity_engine.outcome import Outcome
from infinity_engine.plan import Rates, Tier
from infinity_engine.plan.ops import CopyOp, Lane, UpdateOnHost
from infinity_engine.reporting.report import LinkUse, Over, UpdateUse, report_of
from infinity_engine.telemetry import StepRecord, trace_events
from paced_device import PacedAccelerator

RATES = Rates(
    h2d_bytes_per_s=1e9,
    d2h_bytes_per_s=1e9,
    host_update_params_per_s=1e9,
    device_update_params_per_s=1e9,
)
WIDTH = 64
WEIGHT = WIDTH * WIDTH  # parameters of one layer, and of one subgroup
LAYERS = 3
PARAMS = LAYERS * WEIGHT
NBYTES = 4 * PARAMS
TABLE = """\
step 1               updated in 0.209 ms on emulated, on its virtual clock
micro-batches        2
time                 forward 0.025 ms, backward 0.008 ms, update 0.176 ms
wait for parameters  0.025 ms
wait for gradients   0.016 ms
wait for ops         0.168 ms
h2d                  parameters 24 KiB, states 96 KiB; 1 GB/s while busy
d2h                  parameters 16 KiB, gradients 16 KiB, states 96 KiB; 1 GB/s while busy
updates on host      4096 parameters
updates on device    8192 parameters in 0.008 ms
busy in the update   device 5%, h2d 59%, d2h 68% of 0.168 ms
parameters fetched   3 in time, 0 late
peak of DEVICE       144 KiB of 1 MiB
peak of HOST         192 KiB of 1 MiB
"""

EmulatedDevice = VirtualAccelerator | PacedAccelerator


def layers() -> torch.nn.Sequential:
    torch.manual_seed(0)
    return torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))


@contextmanager
def engine(
    strategy: object = "host_only",
    *,
    kind: type[EmulatedDevice] = VirtualAccelerator,
    timeline_kept: int = 10_000,
    fault: Callable[[StreamKind], Exception | None] | None = None,
    **settings: Any,
) -> Iterator[Engine]:
    emulation = Emulation(
        rates=RATES, capacity_bytes=1 << 20, timeline_kept=timeline_kept, fault=fault
    )
    model = layers()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    memory = {"budget": {"host": "1MiB", "device": "1MiB"}, "subgroup_numel": WEIGHT}
    # so that a step's figures are of its own update
    given = {**memory, "rates": RATES, "overlap": "off", **settings}
    with (
        kind(emulation) as device,
        infinity_engine.initialize(
            model, optimizer, device=device, strategy=strategy, **given
        ) as made,
    ):
        yield made


def train(made: Engine, *, scale: float = 1.0) -> None:
    """Take one step, of as many micro-batches as it takes."""
    dtype = next(made.model.parameters()).dtype
    outcome = Outcome.ACCUMULATED
    while outcome is Outcome.ACCUMULATED:
        made.backward((made(torch.ones(2, WIDTH, dtype=dtype)) * scale).float().sum())
        outcome = made.step().outcome


STRATEGIES: tuple[object, ...] = (
    "host_only",
    "device_only",
    {"name": "static_split", "ratio": 0.4},
    {"name": "interleaved", "share": 0.7},
)


def nbytes_by_plan(made: Engine, lane: Lane, kind: str) -> int:
    ops = [
        op
        for op in made.plan.ops
        if isinstance(op, CopyOp) and op.lane is lane and op.name.endswith(kind)
    ]
    return sum(op.nbytes for op in ops)


# --- links ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [VirtualAccelerator, PacedAccelerator])
@pytest.mark.parametrize("strategy", STRATEGIES, ids=str)
def test_the_update_moves_the_bytes_of_the_plan(
    strategy: object, kind: type[EmulatedDevice]
) -> None:
    with engine(strategy, kind=kind) as made:
        for _ in range(2):
            train(made)

            links = made.report().links
            for lane in (Lane.H2D, Lane.D2H):
                moved = links[lane].nbytes if lane in links else {}
                assert moved.get(Cargo.STATES, 0) == nbytes_by_plan(made, lane, "States")
                assert moved.get(Cargo.PARAMETERS, 0) == nbytes_by_plan(made, lane, "Parameters")


def test_gradients_go_down_once_for_each_micro_batch() -> None:
    with engine(accumulation_steps=3) as made:
        train(made)

        assert made.report().links[Lane.D2H].nbytes == {Cargo.GRADIENTS: 3 * NBYTES}


def test_gradients_that_stay_on_the_device_are_not_counted() -> None:
    with engine("device_only") as made:
        train(made)

        assert made.report().links == {}


def test_what_is_fetched_is_counted_as_parameters() -> None:
    with engine(parameters="host") as made:
        train(made)
        before = made.fetching().fetched_bytes
        train(made)

        fetched = made.fetching().fetched_bytes - before
        assert made.report().links[Lane.H2D].nbytes == {Cargo.PARAMETERS: fetched}
        assert fetched >= NBYTES


def test_what_a_user_changes_of_a_parameter_goes_home_over_the_link() -> None:
    with engine(parameters="host") as made:
        made(torch.ones(2, WIDTH))
        with made.gathered(made.model[0].weight, modify=True):  # type: ignore[index]
            made.model[0].weight.data.zero_()  # type: ignore[index]

        (step,) = made.timeline().steps
        assert step.counters["d2h bytes of parameters"] == 4 * WEIGHT


def test_a_link_has_the_rate_at_which_it_was_busy() -> None:
    with engine({"name": "interleaved", "share": 0.7}) as made:
        train(made)

        rates = {lane: (use.bytes_per_s, use.over) for lane, use in made.report().links.items()}
        assert rates == {Lane.H2D: (1e9, Over.BUSY), Lane.D2H: (1e9, Over.BUSY)}


def test_a_device_that_remembers_little_still_has_all_bytes_and_the_right_rate() -> None:
    with engine(timeline_kept=1) as made:
        for _ in range(3):
            train(made)

            upward = made.report().links[Lane.H2D]
            assert upward.nbytes == {Cargo.PARAMETERS: NBYTES}
            assert upward.over is Over.BUSY
            assert upward.bytes_per_s == pytest.approx(1e9)


# --- waiting --------------------------------------------------------------------------------------


def seconds(nbytes: int) -> float:
    """Return what so many bytes take."""
    return nbytes / 1e9


def test_the_host_waits_for_gradients_and_for_what_goes_up_after_the_update() -> None:
    with engine() as made:
        train(made)

        report = made.report()
        waited = {wait: time for wait, time in report.waits.items() if time}
        assert waited == {Wait.GRADIENTS: seconds(NBYTES), Wait.OPS: seconds(NBYTES)}
        assert report.seconds == pytest.approx(2 * seconds(NBYTES))


@pytest.mark.parametrize("parameters", ["host", "device"])
@pytest.mark.parametrize("strategy", STRATEGIES, ids=str)
def test_all_of_the_time_in_which_the_host_has_nothing_to_do_has_a_cause(
    strategy: object, parameters: str
) -> None:
    with engine(strategy, parameters=parameters, accumulation_steps=2, max_grad_norm=1.0) as made:
        for _ in range(2):
            train(made)

            report = made.report()
            assert report.seconds > 0
            assert sum(report.waits.values()) == pytest.approx(report.seconds)


def test_the_host_waits_for_a_parameter_that_nobody_fetched_ahead() -> None:
    with engine(parameters="host") as made:
        train(made)

        report = made.report()
        assert (report.parameters_late, report.parameters_in_time) == (LAYERS, 0)
        assert report.waits[Wait.PARAMETERS] == report.phases["forward"] == seconds(NBYTES)


def test_a_parameter_that_is_under_way_when_it_is_needed_is_in_time() -> None:
    with engine(parameters="host") as made:
        train(made)
        train(made)

        report = made.report()
        assert (report.parameters_late, report.parameters_in_time) == (0, LAYERS)


def test_the_host_waits_for_the_first_gradient_when_the_second_comes() -> None:
    with engine(accumulation_steps=2) as made:
        made.backward(made(torch.ones(2, WIDTH)).sum())
        made.step()
        made.backward(made(torch.ones(2, WIDTH)).sum())

        (step,) = made.timeline().steps
        assert step.counters["wait for gradients ns"] >= NBYTES


# --- updates --------------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", STRATEGIES, ids=str)
def test_every_parameter_is_updated_where_the_plan_says(strategy: object) -> None:
    with engine(strategy) as made:
        train(made)

        on_host = sum(op.params for op in made.plan.ops if isinstance(op, UpdateOnHost))
        on_device = PARAMS - on_host
        assert made.report().updates == {
            Lane.HOST: UpdateUse(params=on_host, seconds=0.0),
            Lane.DEVICE: UpdateUse(params=on_device, seconds=on_device / 1e9),
        }


def test_a_step_that_was_interrupted_counts_each_update_once() -> None:
    outcomes = iter([None, OSError("the link failed")])

    def fault(kind: StreamKind) -> Exception | None:
        return next(outcomes, None) if kind is StreamKind.H2D else None

    with engine(fault=fault) as made:
        with pytest.raises(RuntimeError, match="the link failed"):
            train(made)
        made.step()

        assert made.report().updates[Lane.HOST].params == PARAMS


# --- the rest of a report -------------------------------------------------------------------------


def test_a_report_says_how_many_micro_batches_there_were_and_the_norm_where_it_was_computed() -> (
    None
):
    with engine(accumulation_steps=2, max_grad_norm=1e9) as made:
        train(made)
        clipped = made.report()
    with engine() as made:
        train(made)
        plain = made.report()

    assert (clipped.micro_batches, plain.micro_batches) == (2, 1)
    assert clipped.gradient_norm is not None
    assert clipped.gradient_norm > 0
    assert plain.gradient_norm is None


def test_a_step_that_was_skipped_says_so_and_has_updated_nothing() -> None:
    with engine(precision="fp16") as made:
        train(made, scale=1e4)

        report = made.report()
        assert report.outcome is Outcome.SKIPPED
        assert report.loss_scale == 2.0**15
        assert [use.params for use in report.updates.values()] == [0, 0]
        assert report.links[Lane.D2H].nbytes == {Cargo.GRADIENTS: NBYTES // 2}


def test_a_report_has_the_peak_of_each_tier_against_its_budget() -> None:
    with engine({"name": "interleaved", "share": 0.7}) as made:
        train(made)

        usage = {each.tier.name: (each.peak_held, each.limit) for each in made.usage()}
        assert {peak.name: (peak.nbytes, peak.limit) for peak in made.report().peaks} == usage
        assert usage.keys() == {"DEVICE", "HOST"}


def test_the_report_is_that_of_the_newest_step_that_has_ended() -> None:
    with engine() as made:
        for _ in range(2):
            train(made)
        made(torch.ones(2, WIDTH))

        assert made.report().index == 1


def test_there_is_no_report_before_the_first_step_has_ended() -> None:
    with engine() as made:
        made(torch.ones(2, WIDTH))

        with pytest.raises(RuntimeError, match="no step to report on"):
            made.report()


def test_nothing_is_recorded_where_telemetry_is_off() -> None:
    with engine(telemetry={"recording": "off"}, parameters="host") as made:
        train(made)

        assert made.steps == 1
        assert made.timeline().steps == ()
        with pytest.raises(RuntimeError, match=r"telemetry\.recording"):
            made.report()


def test_one_memory_has_no_links_and_updates_that_take_the_hosts_time() -> None:
    model = layers()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for strategy, lane in (("host_only", Lane.HOST), ("device_only", Lane.DEVICE)):
        with infinity_engine.initialize(
            model, optimizer, accelerator="cpu", strategy=strategy, budget={"host": "1MiB"}
        ) as made:
            train(made)
            report = made.report()

        assert report.links == {}
        assert report.updates[lane].params == PARAMS
        assert report.updates[lane].seconds
        assert report.device == "cpu"
        assert [peak.name for peak in report.peaks] == [Tier.HOST.name]


def test_a_rate_is_over_the_step_and_updates_have_no_time_where_the_device_does_not_know() -> None:
    step = StepRecord(
        index=0,
        start_ns=0,
        end_ns=2 * 10**9,
        spans=(),
        counters={
            "h2d bytes of parameters": 600,
            "h2d bytes of states": 400,
            "UpdateOnDevice params": 7,
        },
        peaks={},
        notes={"device": "cuda", "outcome": "updated", "loss_scale": 1.0, "gradient_norm": None},
    )

    report = report_of(step, ())

    moved = {Cargo.PARAMETERS: 600, Cargo.STATES: 400}
    assert report.links == {Lane.H2D: LinkUse(nbytes=moved, bytes_per_s=500.0, over=Over.STEP)}
    assert report.updates[Lane.DEVICE] == UpdateUse(params=7, seconds=None)
    assert (
        "h2d                parameters 600 B, states 400 B; 500 B/s over the step"
        in str(report).splitlines()
    )
    assert "updates on device  7 parameters" in str(report).splitlines()


def test_a_report_says_where_phases_are_those_of_launching(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(CpuAccelerator, "works_beside_host", True)
    model = layers()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with infinity_engine.initialize(
        model, optimizer, accelerator="cpu", budget={"host": "1MiB"}
    ) as made:
        train(made)

        assert "on cpu, whose phases are those of the host" in str(made.report())


def test_as_text_a_report_is_a_small_table() -> None:
    with engine(
        {"name": "interleaved", "share": 0.7},
        parameters="host",
        precision="bf16",
        accumulation_steps=2,
    ) as made:
        for _ in range(2):
            train(made)

        assert f"{made.report()}\n" == TABLE


# --- the trace ------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [VirtualAccelerator, PacedAccelerator])
@pytest.mark.parametrize("parameters", ["host", "device"])
def test_the_trace_shows_every_op_of_the_update_in_its_lane(
    parameters: str, kind: type[EmulatedDevice]
) -> None:
    with engine({"name": "interleaved", "share": 0.7}, parameters=parameters, kind=kind) as made:
        train(made)
        trace: dict[str, Any] = json.loads(
            json.dumps(trace_events(made.timeline()), allow_nan=False)
        )
        ops = made.plan.ops

    lines = {
        it["tid"]: it["args"]["name"] for it in trace["traceEvents"] if it["name"] == "thread_name"
    }
    shown = {
        (lines[it["tid"]], it["name"], it["args"]["subgroup"])
        for it in trace["traceEvents"]
        if "subgroup" in it["args"]
    }
    assert shown == {(op.lane.value, op.name, op.subgroup) for op in ops}


def test_the_trace_shows_gradients_and_fetched_parameters_with_the_links_that_carry_them() -> None:
    with engine(parameters="host") as made:
        train(made)

        spans = made.timeline().steps[-1].spans
        shown = [(span.track, span.name, span.fields.get("nbytes")) for span in spans]
        assert shown.count(("d2h", "gradient", 4 * WEIGHT)) == LAYERS
        assert shown.count(("h2d", "parameter", 4 * WEIGHT)) >= LAYERS
        assert {span.fields["parameter"] for span in spans if span.name == "parameter"} == {
            f"{layer}.weight" for layer in range(LAYERS)
        }


def test_copies_of_a_link_follow_one_another_within_the_step() -> None:
    with engine({"name": "interleaved", "share": 0.7}) as made:
        train(made)

        step = made.timeline().steps[-1]
        for lane in ("h2d", "d2h"):
            times = sorted(
                (span.start_ns, span.end_ns) for span in step.spans if span.track == lane
            )
            assert all(end <= start for (_, end), (start, _) in pairwise(times))
            assert step.start_ns <= times[0][0]
            assert step.end_ns is not None
            assert times[-1][1] <= step.end_ns
