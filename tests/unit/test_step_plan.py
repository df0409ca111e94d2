"""A StepPlan that exists is sound: what is wrong with ops is found when the plan is made, and
named.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace

import pytest

from infinity_engine.errors import ConfigError
from infinity_engine.plan import (
    ADAM_BYTES,
    BytesPerParameter,
    DownloadParameters,
    DownloadStates,
    Home,
    Lane,
    LaneClocks,
    Op,
    Rates,
    StepPlan,
    SubgroupSpec,
    Tier,
    UpdateOnDevice,
    UpdateOnHost,
    UploadParameters,
    UploadStates,
)

SUBGROUPS = tuple(
    SubgroupSpec(index=index, numel=10 * (index + 1), first_use=index) for index in range(4)
)
HOST_OPS = (
    UpdateOnHost(subgroup=0, params=10),
    UploadParameters(subgroup=0, nbytes=20, after=(0,)),
)
VISIT_OPS = (
    UploadStates(subgroup=1, staging=0, nbytes=240),
    UpdateOnDevice(subgroup=1, staging=0, params=20, after=(0,)),
    DownloadStates(subgroup=1, staging=0, nbytes=240, after=(1,)),
)


def shifted(ops: Sequence[Op], by: int) -> tuple[Op, ...]:
    return tuple(replace(op, after=tuple(number + by for number in op.after)) for op in ops)


def plan_of(
    *ops: Op, staging_bytes: tuple[int, ...] = (480,), parameters: Tier = Tier.DEVICE
) -> StepPlan:
    """Return the plan of these ops, for the subgroups that they are about."""
    indices = {op.subgroup for op in ops}
    subgroups = tuple(subgroup for subgroup in SUBGROUPS if subgroup.index in indices)
    return StepPlan(
        subgroups=subgroups, ops=ops, staging_bytes=staging_bytes, parameters=parameters
    )


def mixed() -> StepPlan:
    """Return a plan with one subgroup at home on the host, one that visits, and one resident."""
    return plan_of(*HOST_OPS, *shifted(VISIT_OPS, 2), UpdateOnDevice(subgroup=2, params=30))


# --- what can be asked of a plan ------------------------------------------------------------------


def test_sizes_below_nothing_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"StepPlan\.staging_bytes.*0 or more bytes"):
        plan_of(*HOST_OPS, staging_bytes=(480, -1))
    with pytest.raises(ConfigError, match=r"StepPlan\.buffer_bytes.*0 or more bytes"):
        replace(plan_of(*HOST_OPS, staging_bytes=()), buffer_bytes=(-1,))


def test_a_plan_knows_where_each_subgroup_is_updated() -> None:
    assert mixed().homes() == {0: Home.HOST, 1: Home.VISITING, 2: Home.RESIDENT}


def test_a_plan_counts_the_parameters_that_are_updated_somewhere() -> None:
    assert [mixed().params_at(home) for home in Home] == [10, 20, 30]


def test_a_plan_of_nothing_is_sound() -> None:
    assert StepPlan(subgroups=(), ops=()).homes() == {}


def test_a_plan_is_shown_op_by_op() -> None:
    assert mixed().describe().splitlines() == [
        "op  lane    what              subgroup  set  amount     after",
        "0   host    UpdateOnHost      0              10 params",
        "1   h2d     UploadParameters  0              20 B       0",
        "2   h2d     UploadStates      1         0    240 B",
        "3   device  UpdateOnDevice    1         0    20 params  2",
        "4   d2h     DownloadStates    1         0    240 B      3",
        "5   device  UpdateOnDevice    2              30 params",
    ]


def test_a_plan_is_shown_with_its_times() -> None:
    plan = plan_of(*HOST_OPS)
    clocks = LaneClocks(Rates(host_update_params_per_s=1e4, h2d_bytes_per_s=2e4))
    times = [clocks.run(op) for op in plan.ops]

    assert plan.describe(times).splitlines()[2].split()[-4:] == ["1.000", "ms", "2.000", "ms"]


def test_a_plan_is_written_as_json() -> None:
    plain = json.loads(json.dumps(plan_of(*HOST_OPS, staging_bytes=()).to_mapping()))

    assert plain == {
        "subgroups": [
            {
                "index": 0,
                "numel": 10,
                "first_use": 0,
                "parameter_bytes": None,
                "pieces": 1,
                "buffer_bytes": 0,
                "load_bytes": 0,
                "store_bytes": 0,
            }
        ],
        "ops": [
            {"op": "UpdateOnHost", "subgroup": 0, "after": [], "params": 10},
            {"op": "UploadParameters", "subgroup": 0, "after": [0], "nbytes": 20, "pieces": 1},
        ],
        "staging_bytes": [],
        "buffer_bytes": [],
        "parameters": "DEVICE",
    }


def test_the_bytes_of_adam_are_three_fp32_states_and_a_16_bit_parameter() -> None:
    assert BytesPerParameter(states=12, parameter=2) == ADAM_BYTES


@pytest.mark.parametrize("name", ["states", "parameter"])
def test_a_parameter_weighs_something(name: str) -> None:
    with pytest.raises(ConfigError, match=f"BytesPerParameter.{name}"):
        replace(ADAM_BYTES, **{name: 0})


def test_a_subgroup_has_parameters() -> None:
    with pytest.raises(ConfigError, match=r"SubgroupSpec\.numel"):
        SubgroupSpec(index=0, numel=0, first_use=0)
    with pytest.raises(ConfigError, match=r"SubgroupSpec\.pieces"):
        SubgroupSpec(index=0, numel=1, pieces=0, first_use=0)


# --- the order of submission ----------------------------------------------------------------------


def test_what_waits_for_no_update_on_the_host_is_submitted_before_it() -> None:
    resident = UpdateOnDevice(subgroup=2, params=30)

    assert plan_of(*HOST_OPS, resident).submission_order() == (2, 0, 1)


def test_a_lane_keeps_its_order_when_submitted() -> None:
    plan = mixed()
    order = plan.submission_order()

    for lane in Lane:
        numbers = [number for number in order if plan.ops[number].lane is lane]
        assert numbers == sorted(numbers)


def test_what_follows_the_hosts_parameters_in_their_lane_is_submitted_behind_the_update() -> None:
    assert plan_of(*HOST_OPS, *shifted(VISIT_OPS, 2)).submission_order() == (0, 1, 2, 3, 4)


def test_what_goes_before_the_hosts_parameters_in_their_lane_is_submitted_before_the_update() -> (
    None
):
    update, upload = HOST_OPS

    assert plan_of(update, *shifted(VISIT_OPS, 1), upload).submission_order() == (1, 2, 3, 0, 4)


# --- what is refused ------------------------------------------------------------------------------

OTHER_VISIT = (
    UploadStates(subgroup=2, staging=0, nbytes=360),
    UpdateOnDevice(subgroup=2, staging=0, params=30, after=(0,)),
    DownloadStates(subgroup=2, staging=0, nbytes=360, after=(1,)),
)
HOST_TWICE = (*HOST_OPS, *shifted(HOST_OPS, 2))
AFTER_LEAVING = (replace(shifted(OTHER_VISIT, 3)[0], after=(2,)), *shifted(OTHER_VISIT, 3)[1:])


@pytest.mark.parametrize(
    ("ops", "number", "said"),
    [
        (HOST_TWICE, 2, "one update of each subgroup"),
        ((*HOST_OPS, UpdateOnDevice(subgroup=0, params=10)), 2, "one update of each subgroup"),
        ((*VISIT_OPS, *shifted(VISIT_OPS, 3)), 3, "one update of each subgroup"),
        (HOST_OPS[:1], 0, "a UploadParameters of the subgroup to follow"),
        (VISIT_OPS[:2], 1, "a DownloadStates of the subgroup to follow"),
        (VISIT_OPS[:1], 0, "a UpdateOnDevice of the subgroup to follow"),
        (
            (HOST_OPS[0], replace(HOST_OPS[1], after=())),
            1,
            "to come `after` the subgroup's UpdateOnHost",
        ),
        (
            (VISIT_OPS[0], replace(VISIT_OPS[1], after=())),
            1,
            "to come `after` the subgroup's UploadStates",
        ),
        (
            (*VISIT_OPS[:2], replace(VISIT_OPS[2], after=(0,))),
            2,
            "to come `after` the subgroup's UpdateOnDevice",
        ),
        (
            (UploadParameters(subgroup=0, nbytes=20),),
            0,
            "to come `after` the subgroup's UpdateOnHost",
        ),
        ((replace(HOST_OPS[0], params=9), HOST_OPS[1]), 0, "all of the subgroup's 10 parameters"),
        ((replace(HOST_OPS[0], after=(0,)),), 0, "numbers of earlier ops"),
        ((replace(HOST_OPS[0], after=(1,)), HOST_OPS[1]), 0, "numbers of earlier ops"),
        ((replace(HOST_OPS[0], after=(-1,)),), 0, "numbers of earlier ops"),
        ((HOST_OPS[0], replace(HOST_OPS[1], after=(0, 0))), 1, "each of `after` once"),
        ((replace(VISIT_OPS[0], staging=1),), 0, "one of the plan's 1 staging sets"),
        ((replace(VISIT_OPS[0], staging=-1),), 0, "one of the plan's 1 staging sets"),
        ((replace(VISIT_OPS[0], nbytes=481),), 0, "no more than the 480 bytes of its staging set"),
        ((VISIT_OPS[0], replace(VISIT_OPS[1], staging=1)), 1, "the staging set of op 0"),
        ((*VISIT_OPS[:2], replace(VISIT_OPS[2], staging=1)), 2, "the staging set of op 1"),
        (
            (*VISIT_OPS[:2], replace(VISIT_OPS[2], nbytes=239)),
            2,
            "as many bytes down as went up, 240",
        ),
        ((*VISIT_OPS, *shifted(OTHER_VISIT, 3)), 3, "to come `after` subgroup 1 has left it"),
        ((VISIT_OPS[0], OTHER_VISIT[0]), 1, "to come `after` subgroup 1 has left it"),
        (
            (VISIT_OPS[0], replace(OTHER_VISIT[0], after=(0,))),
            1,
            "to come `after` subgroup 1 has left it",
        ),
    ],
)
def test_an_op_that_does_not_fit_is_refused_by_its_number(
    ops: tuple[Op, ...], number: int, said: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        plan_of(*ops)

    assert refused.value.field == f"StepPlan.ops[{number}]"
    assert said in str(refused.value)


def test_a_staging_set_that_was_left_can_be_used_again() -> None:
    plan = plan_of(*VISIT_OPS, *AFTER_LEAVING)

    assert plan.params_at(Home.VISITING) == 50


def test_two_subgroups_can_visit_at_once_in_two_staging_sets() -> None:
    other = tuple(replace(op, staging=1) for op in shifted(OTHER_VISIT, 3))  # type: ignore[call-arg]

    assert plan_of(*VISIT_OPS, *other, staging_bytes=(240, 360)).params_at(Home.VISITING) == 50


def test_a_subgroup_without_an_update_is_refused() -> None:
    with pytest.raises(ConfigError, match="subgroup 1 has none"):
        StepPlan(subgroups=SUBGROUPS[:2], ops=HOST_OPS)


def test_an_op_on_a_subgroup_that_the_plan_does_not_have_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"a subgroup of the plan, which has 1"):
        StepPlan(subgroups=SUBGROUPS[1:2], ops=HOST_OPS)


def test_a_subgroup_that_is_listed_twice_is_refused() -> None:
    with pytest.raises(ConfigError, match="each index once"):
        StepPlan(subgroups=(SUBGROUPS[0], SUBGROUPS[0]), ops=HOST_OPS)


def test_an_op_of_a_kind_that_plans_do_not_know_is_refused() -> None:
    class Pause(UpdateOnHost):
        pass

    with pytest.raises(ConfigError, match="one of LoadStates"):
        plan_of(Pause(subgroup=0, params=10))


# --- parameters that stay on the host -------------------------------------------------------------

HOME_VISIT = (
    *VISIT_OPS[:2],
    DownloadParameters(subgroup=1, staging=0, nbytes=40, after=(1,)),
    replace(VISIT_OPS[2], after=(2,)),
)
HOME_RESIDENT = (
    UpdateOnDevice(subgroup=0, params=10),
    DownloadParameters(subgroup=0, nbytes=20, after=(0,)),
)


@pytest.mark.parametrize("ops", [HOME_VISIT, HOME_RESIDENT, HOST_OPS[:1]])
def test_where_parameters_stay_on_the_host_what_the_device_updated_goes_home(
    ops: tuple[Op, ...],
) -> None:
    assert plan_of(*ops, parameters=Tier.HOST).parameters is Tier.HOST


@pytest.mark.parametrize(
    ("ops", "number", "said"),
    [
        (HOST_OPS, 1, "none: the plan's parameters stay on the host"),
        (HOME_RESIDENT[:1], 0, "a DownloadParameters of the subgroup to follow"),
        (HOME_VISIT[:3], 2, "a DownloadStates of the subgroup to follow"),
        (VISIT_OPS, 2, "to come `after` the subgroup's DownloadParameters"),
        ((*HOME_VISIT[:2], replace(HOME_VISIT[2], staging=None)), 2, "the staging set of op 1"),
        (
            (*HOME_VISIT[:2], replace(HOME_VISIT[2], after=(0,))),
            2,
            "to come `after` the subgroup's UpdateOnDevice",
        ),
    ],
)
def test_a_plan_that_does_not_take_them_home_is_refused(
    ops: tuple[Op, ...], number: int, said: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        plan_of(*ops, parameters=Tier.HOST)

    assert refused.value.field == f"StepPlan.ops[{number}]"
    assert said in str(refused.value)


def test_where_parameters_stay_on_the_device_nothing_takes_them_home() -> None:
    with pytest.raises(ConfigError, match="none: the plan's parameters stay on the device"):
        plan_of(*HOME_RESIDENT)


def test_where_parameters_rest_on_drives_nothing_takes_them_up() -> None:
    with pytest.raises(ConfigError, match="none: the plan's parameters stay on the drives"):
        plan_of(*HOST_OPS, parameters=Tier.NVME)
