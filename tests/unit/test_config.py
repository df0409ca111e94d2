from __future__ import annotations

import copy
import dataclasses
import json
import math
import pickle
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from deepnvme.machine.backends import CHAIN
from infinity_engine.config import (
    AcceleratorChoice,
    Backend,
    Checksum,
    EngineConfig,
    Overlap,
    Precision,
    RanksConfig,
    Recording,
    Replanning,
    ShardingStage,
    StorageConfig,
    TelemetryConfig,
    Tiling,
)
from infinity_engine.errors import ConfigError
from infinity_engine.plan import (
    Auto,
    Budget,
    DeviceOnly,
    HostOnly,
    Interleaved,
    NvmeStreamed,
    StaticSplit,
)
from infinity_engine.units import TB, GiB
from settings_table import settings_table

PATIENT = settings(deadline=None)

WHOLE = st.integers(1, 2**62)
PARTS = st.floats(0, 1)
INTERLEAVED = st.builds(Interleaved, share=st.none() | PARTS, resident=PARTS) | st.builds(
    Interleaved, stride=WHOLE, resident=PARTS
)
STRATEGIES = st.one_of(
    st.sampled_from([Auto(), DeviceOnly(), HostOnly()]),
    st.builds(StaticSplit, ratio=PARTS),
    INTERLEAVED,
    st.builds(NvmeStreamed, update=st.just(HostOnly()) | INTERLEAVED),
)
SIZES = st.one_of(st.none(), st.integers(0, 2**62), st.integers(1, 100).map("{}%".format))
BUDGETS = st.builds(
    Budget,
    device=SIZES,
    host=SIZES,
    nvme=st.dictionaries(st.sampled_from(["/mnt/a", "/mnt/b", "swap"]), SIZES),
)
CONFIGS = st.builds(
    EngineConfig,
    budget=st.none() | BUDGETS,
    strategy=STRATEGIES,
    precision=st.sampled_from(Precision),
    accelerator=st.sampled_from(AcceleratorChoice),
    overlap=st.sampled_from(Overlap),
    replanning=st.sampled_from(Replanning),
    tiling=st.sampled_from(Tiling),
    accumulation_steps=WHOLE,
    max_grad_norm=st.none() | st.floats(0, exclude_min=True, allow_infinity=False),
    subgroup_numel=st.integers(4096, 2**62),
    storage=st.builds(
        StorageConfig,
        backend=st.sampled_from(Backend),
        checksum=st.sampled_from(Checksum),
        endurance=st.none() | WHOLE | st.dictionaries(st.sampled_from(["/mnt/a", "/mnt/b"]), WHOLE),
    ),
    ranks=st.builds(
        RanksConfig,
        stage=st.sampled_from(ShardingStage),
        leaf_modules=st.lists(st.sampled_from(["experts", "Block"])),
        bucket_bytes=st.integers(4096, 2**62),
        timeout_s=st.floats(0, exclude_min=True, allow_infinity=False),
    ),
    telemetry=st.builds(
        TelemetryConfig, recording=st.sampled_from(Recording), keep_steps=WHOLE, keep_spans=WHOLE
    ),
)


def sections(mapping: Mapping[str, Any], path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Yield the path of every mapping with fixed keys in a whole configuration."""
    yield path
    for key, value in mapping.items():
        if isinstance(value, dict) and key != "nvme":
            yield from sections(value, (*path, key))


def nested(path: tuple[str, ...], value: object) -> dict[str, object]:
    """Return a mapping that holds `value` at `path` and nothing else."""
    for key in reversed(path):
        value = {key: value}
    assert isinstance(value, dict)
    return value


WHOLE_CONFIG = EngineConfig(budget=Budget()).to_mapping()
SECTIONS = sorted(sections(WHOLE_CONFIG))


def test_the_sections_that_are_fuzzed_are_all_there_are() -> None:
    assert SECTIONS == [(), ("activations",), ("budget",), ("ranks",), ("storage",), ("telemetry",)]


# --- values ---


def test_a_configuration_that_says_nothing_has_the_defaults() -> None:
    assert EngineConfig.from_mapping({}) == EngineConfig()


def test_the_defaults_promise_nothing_that_was_not_asked_for() -> None:
    config = EngineConfig()

    assert (config.budget, config.strategy, config.precision) == (None, Auto(), Precision.MODEL)
    assert (config.accelerator, config.accumulation_steps, config.max_grad_norm) == (
        AcceleratorChoice.AUTO,
        1,
        None,
    )
    assert config.storage == StorageConfig(backend=Backend.AUTO, checksum=Checksum.CRC32C)


def test_the_default_subgroup_fits_small_devices_three_times() -> None:
    parameter_and_moments_nbytes = 12 * EngineConfig().subgroup_numel

    assert 3 * parameter_and_moments_nbytes < GiB


def test_a_mapping_may_say_enums_by_value_and_sizes_as_text() -> None:
    config = EngineConfig.from_mapping(
        {
            "budget": {"device": "20GiB", "host": "80%", "nvme": {"/mnt/a": "400 GiB"}},
            "strategy": {"name": "static_split", "ratio": 0.3},
            "precision": "bf16",
            "accelerator": "cpu",
            "max_grad_norm": 1,
            "storage": {"backend": "uring", "checksum": "off"},
            "telemetry": {"recording": "off"},
        }
    )

    assert config == EngineConfig(
        budget=Budget(device=20 * GiB, host="80%", nvme={"/mnt/a": 400 * GiB}),
        strategy=StaticSplit(ratio=0.3),
        precision=Precision.BF16,
        accelerator=AcceleratorChoice.CPU,
        max_grad_norm=1.0,
        storage=StorageConfig(backend=Backend.URING, checksum=Checksum.OFF),
        telemetry=TelemetryConfig(recording=Recording.OFF),
    )


@pytest.mark.parametrize(
    ("given", "read"),
    [
        ("600TB", 600 * TB),
        (5, 5),
        ({"/mnt/a/": "1.5 TB", "/mnt/b": 7}, {"/mnt/a": 3 * TB // 2, "/mnt/b": 7}),
    ],
)
def test_what_drives_are_rated_for_is_stated_of_all_or_of_each(given: object, read: object) -> None:
    assert EngineConfig.from_mapping({"storage": {"endurance": given}}).storage.endurance == read


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (0, r"^storage\.endurance: expected more than 0 bytes, got 0"),
        (
            True,
            r"^storage\.endurance: expected bytes, as a number or text such as '600TB', or a mapping",
        ),
        ({"/mnt/a": "600 TBW"}, r"^storage\.endurance\['/mnt/a'\]: expected one of the units"),
        ({"/mnt/a": 1, "/mnt/a/": 2}, r"^storage\.endurance: expected each directory once"),
    ],
)
def test_what_drives_are_rated_for_is_a_size(given: object, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        EngineConfig.from_mapping({"storage": {"endurance": given}})


def test_a_mapping_may_hold_values_that_are_made_already() -> None:
    made = EngineConfig(
        budget=Budget(host=1),
        strategy=Interleaved(stride=2),
        precision=Precision.FP16,
        storage=StorageConfig(backend=Backend.AIO),
    )
    given = {name: getattr(made, name) for name in ("budget", "strategy", "precision", "storage")}

    assert EngineConfig.from_mapping(given) == made


def test_the_backends_are_those_that_deepnvme_chooses_from() -> None:
    assert [backend.value for backend in Backend] == ["auto", *CHAIN]


def test_a_whole_number_is_kept_as_the_float_that_a_norm_is() -> None:
    assert isinstance(EngineConfig(max_grad_norm=1).max_grad_norm, float)


def test_a_configuration_is_a_value() -> None:
    one, other = (EngineConfig(budget=Budget(nvme={"/mnt/a": 1})) for _ in range(2))

    assert one == other
    assert hash(one) == hash(other)
    assert pickle.loads(pickle.dumps(one)) == copy.deepcopy(one) == one


def test_a_configuration_cannot_be_changed() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        EngineConfig().strategy = HostOnly()  # type: ignore[misc]


def test_a_configuration_is_made_by_name_only() -> None:
    with pytest.raises(TypeError):
        EngineConfig(None)  # type: ignore[call-arg]


def test_a_changed_copy_is_checked_too() -> None:
    with pytest.raises(ConfigError, match=r"^EngineConfig\.accumulation_steps: "):
        dataclasses.replace(EngineConfig(), accumulation_steps=0)


@PATIENT
@given(CONFIGS)
def test_a_configuration_survives_the_way_through_json(config: EngineConfig) -> None:
    assert EngineConfig.from_mapping(json.loads(json.dumps(config.to_mapping()))) == config


# --- refusals ---


@PATIENT
@given(st.sampled_from(SECTIONS), st.text())
def test_an_unknown_key_is_refused_by_its_dotted_path_at_any_level(
    section: tuple[str, ...], key: str
) -> None:
    known = WHOLE_CONFIG
    for part in section:
        known = known[part]  # type: ignore[assignment]
    assume(key not in known)

    with pytest.raises(ConfigError) as caught:
        EngineConfig.from_mapping(nested(section, {key: 1}))

    assert caught.value.field == ".".join((*section, key))
    assert all(name in caught.value.expected for name in known)


@PATIENT
@given(st.data())
def test_a_key_with_one_letter_too_many_is_told_the_right_one(data: st.DataObject) -> None:
    section = data.draw(st.sampled_from(SECTIONS))
    known = WHOLE_CONFIG
    for part in section:
        known = known[part]  # type: ignore[assignment]
    right = data.draw(st.sampled_from(sorted(known)))
    place = data.draw(st.integers(0, len(right)))
    wrong = f"{right[:place]}z{right[place:]}"

    with pytest.raises(ConfigError, match=rf"\(nearest: {right}\)"):
        EngineConfig.from_mapping(nested(section, {wrong: 1}))


def test_an_unknown_keyword_is_told_the_right_one() -> None:
    with pytest.raises(
        ConfigError, match=r"^bugdet: expected one of budget, .*\(nearest: budget\), got 'bugdet'"
    ):
        EngineConfig.from_mapping({"bugdet": "12 GiB"})


def test_a_wrong_value_of_a_keyword_is_refused_by_its_dotted_path() -> None:
    with pytest.raises(ConfigError, match=r"^telemetry\.keep_steps: "):
        EngineConfig.from_mapping({"telemetry": {"keep_steps": 0}})


def test_a_removed_setting_is_refused_with_what_to_do() -> None:
    with pytest.raises(
        ConfigError,
        match=r"^ranks\.partitioning: .*setting was removed.*: delete it, got 'broadcast'$",
    ):
        EngineConfig.from_mapping({"ranks": {"partitioning": "broadcast"}})


def test_an_unknown_key_is_refused_beside_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"^telemetry\.keep_step: .*nearest: keep_steps"):
        EngineConfig.from_mapping({**WHOLE_CONFIG, "telemetry": {"keep_steps": 1, "keep_step": 1}})


def test_a_key_that_is_no_text_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"^5: expected one of budget, "):
        EngineConfig.from_mapping({5: 1})  # type: ignore[dict-item]


@pytest.mark.parametrize("path", [*SECTIONS[1:], ("budget", "nvme")], ids=".".join)
@pytest.mark.parametrize("value", [5, "x", [1], True])
def test_a_section_that_is_no_mapping_is_refused(path: tuple[str, ...], value: object) -> None:
    with pytest.raises(ConfigError) as caught:
        EngineConfig.from_mapping(nested(path, value))

    # Text in place of the section of activations is its setting `at`.
    if (path, value) == (("activations",), "x"):
        assert caught.value.field == "activations.at"
        return
    assert caught.value.field == ".".join(path)
    assert caught.value.expected.startswith("a mapping")


@pytest.mark.parametrize("value", [None, 5, "x", []])
def test_a_configuration_that_is_no_mapping_is_refused(value: object) -> None:
    with pytest.raises(
        ConfigError, match=r"^settings: expected a mapping with keys out of budget, strategy"
    ):
        EngineConfig.from_mapping(value)  # type: ignore[arg-type]


COUNTS = {
    "accumulation_steps": "a whole number, 1 or more",
    "telemetry.keep_steps": "a whole number, 1 to 9223372036854775807",
    "telemetry.keep_spans": "a whole number, 1 to 9223372036854775807",
}


@pytest.mark.parametrize("name", COUNTS)
@pytest.mark.parametrize("value", [True, False, 0, -1, 1.0, "1", None, math.nan])
def test_a_count_is_a_whole_number_from_1_and_no_bool(name: str, value: object) -> None:
    with pytest.raises(ConfigError) as caught:
        EngineConfig.from_mapping(nested(tuple(name.split(".")), value))

    assert (caught.value.field, caught.value.expected) == (name, COUNTS[name])
    assert caught.value.value is value


@pytest.mark.parametrize("name", ["telemetry.keep_steps", "telemetry.keep_spans"])
def test_more_than_a_record_can_hold_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="1 to 9223372036854775807"):
        EngineConfig.from_mapping(nested(tuple(name.split(".")), 10**30))


def test_the_smallest_subgroup_is_one_block_of_the_gradient_norm() -> None:
    from infinity_engine.optim import NORM_BLOCK

    kinds = {row.name: row.kind for row in settings_table()}

    assert kinds["subgroup_numel"] == f"a whole number, {NORM_BLOCK} or more"
    assert EngineConfig(subgroup_numel=NORM_BLOCK).subgroup_numel == NORM_BLOCK
    with pytest.raises(
        ConfigError, match=f"subgroup_numel: expected a whole number, {NORM_BLOCK} or more"
    ):
        EngineConfig(subgroup_numel=NORM_BLOCK - 1)


@pytest.mark.parametrize("given", ["experts", 5, None, [5], {"experts": 1}])
def test_what_is_no_sequence_of_names_names_no_modules(given: object) -> None:
    with pytest.raises(
        ConfigError, match=r"^ranks\.leaf_modules: expected a sequence of names, got "
    ):
        EngineConfig.from_mapping({"ranks": {"leaf_modules": given}})


@pytest.mark.parametrize("value", [True, 0, -1.0, math.nan, math.inf, 10**400, "1", [1]])
def test_a_norm_is_a_positive_finite_number(value: object) -> None:
    with pytest.raises(ConfigError, match=r"^max_grad_norm: expected a positive number, got "):
        EngineConfig.from_mapping({"max_grad_norm": value})


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("interleav", r"strategy: expected one of auto, .*\(nearest: interleaved\)"),
        ("static_split", r"strategy: expected a mapping that gives its ratio too"),
        (None, r"strategy: expected a name such as 'auto'"),
        (
            {"name": "static_split", "ratio": 2},
            r"strategy\.ratio: expected a number from 0 to 1, got 2",
        ),
        (
            {"name": "nvme_streamed", "update": {"name": "interleaved", "stride": 0}},
            r"strategy\.update\.stride: ",
        ),
    ],
)
def test_a_wrong_strategy_is_refused_by_its_dotted_path(value: object, message: str) -> None:
    with pytest.raises(ConfigError, match=f"^{message}"):
        EngineConfig.from_mapping({"strategy": value})


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        (
            "precision",
            "bf61",
            r"one of model, fp32, bf16, fp16, bf16_autocast, fp16_autocast \(nearest: bf16\), got 'bf61'",
        ),
        ("precision", "BF16", r"one of model, fp32, bf16, fp16, bf16_autocast, fp16_autocast"),
        ("precision", None, r"one of model, fp32, bf16, fp16, bf16_autocast, fp16_autocast"),
        (
            "precision",
            AcceleratorChoice.CPU,
            r"one of model, fp32, bf16, fp16, bf16_autocast, fp16_autocast",
        ),
        ("accelerator", "cud", r"one of auto, cuda, cpu, emulated \(nearest: cuda\)"),
        (
            "storage.backend",
            "io_uring",
            r"one of auto, liburing, uring, aio, threads \(nearest: uring\)",
        ),
        ("storage.backend", "memory", r"one of auto, liburing, uring, aio, threads"),
        ("storage.backend", None, r"one of auto, liburing, uring, aio, threads"),
        ("storage.checksum", "crc", r"one of crc32c, off \(nearest: crc32c\)"),
        ("storage.checksum", False, r"one of crc32c, off"),
        ("storage.checksum", None, r"one of crc32c, off"),
        ("update_threads", 1025, r"a whole number, 1 to 1024"),
        ("telemetry.recording", ["off"], r"one of timeline, off"),
    ],
)
def test_a_choice_that_is_none_is_refused_with_the_choices(
    name: str, value: object, message: str
) -> None:
    with pytest.raises(ConfigError, match=f"^{name}: expected {message}"):
        EngineConfig.from_mapping(nested(tuple(name.split(".")), value))


@pytest.mark.parametrize("size", ["12G", "120%", -1, True, 0.5])
def test_a_wrong_size_is_refused_by_its_dotted_path(size: object) -> None:
    with pytest.raises(ConfigError, match=r"^budget\.host: "):
        EngineConfig.from_mapping({"budget": {"host": size}})


@pytest.mark.parametrize(
    ("make", "place"),
    [
        (lambda: EngineConfig(accumulation_steps=True), "EngineConfig.accumulation_steps"),
        (lambda: EngineConfig(strategy=""), "EngineConfig.strategy"),  # type: ignore[arg-type]
        (lambda: EngineConfig(storage=None), "EngineConfig.storage"),  # type: ignore[arg-type]
        (lambda: StorageConfig(backend=""), "StorageConfig.backend"),  # type: ignore[arg-type]
        (lambda: TelemetryConfig(keep_steps=0), "TelemetryConfig.keep_steps"),
    ],
)
def test_the_constructor_checks_as_mappings_are_checked(make: Any, place: str) -> None:
    with pytest.raises(ConfigError) as caught:
        make()

    assert caught.value.field == place


@pytest.mark.parametrize("given", ["auto", "off", "figures.json", Path("/mnt/figures.json")])
def test_a_calibration_is_a_word_or_a_path(given: object) -> None:
    assert EngineConfig.from_mapping({"calibration": given}).calibration == str(given)


@pytest.mark.parametrize("given", [None, "", 5, True, ["off"]])
def test_what_is_no_path_is_no_calibration(given: object) -> None:
    with pytest.raises(
        ConfigError,
        match=r"^calibration: expected auto, off, or the path of a file that `infinity ca",
    ):
        EngineConfig.from_mapping({"calibration": given})


# --- the table ---


def test_the_table_has_one_row_for_each_setting_under_its_dotted_name() -> None:
    config = EngineConfig().to_mapping()
    leaves = [
        f"{name}.{inner}" if inner else name
        for name, value in config.items()
        for inner in (value if isinstance(value, dict) else [""])
    ]

    assert [row.name for row in settings_table()] == leaves


def test_the_table_says_what_each_setting_can_be_and_means() -> None:
    assert all(row.kind and row.meaning and row.default for row in settings_table())


def test_the_table_shows_the_defaults_as_they_are_written() -> None:
    defaults = {row.name: row.default for row in settings_table()}

    assert defaults["precision"] == "model"
    assert defaults["accumulation_steps"] == "1"
    assert defaults["max_grad_norm"] == "None"
    assert defaults["storage.backend"] == "auto"
    assert defaults["strategy"] == "auto"


def test_the_table_says_kinds_in_the_words_of_the_errors() -> None:
    kinds = {row.name: row.kind for row in settings_table()}

    assert kinds["precision"] == "one of model, fp32, bf16, fp16, bf16_autocast, fp16_autocast"
    assert kinds["accumulation_steps"] == "a whole number, 1 or more"
    assert kinds["max_grad_norm"] == "a positive number, or None"
