"""DeepSpeed's JSON files migrate as the page says: ten files as projects use them, key by key."""

from __future__ import annotations

import json
import math
import warnings
from pathlib import Path
from typing import Any

import pytest

from infinity_engine.cli.main import main
from infinity_engine.config import EngineConfig
from infinity_engine.errors import ConfigError
from infinity_engine.migration import Fate, Migration, Warmup, migrate_deepspeed, read_json
from infinity_engine.migration.deepspeed import _HANDLERS
from infinity_engine.migration.schedules import Rise, WarmupDecay

FILES = Path(__file__).parent / "files"
PAGE = Path(__file__).resolve().parents[2] / "docs/migrate-from-deepspeed.md"

# The settings and the optimizer of each file, and the keys that have no equivalent.
EXPECTED: dict[str, tuple[dict[str, Any], dict[str, Any] | None, set[str]]] = {
    "zero2-plain": (
        {
            "accumulation_steps": 4,
            "max_grad_norm": 1.0,
            "precision": "fp16",
            "ranks": {"stage": "gradients"},
        },
        {"name": "adamw", "weight_decay": 0.0, "lr": 2e-4, "betas": [0.9, 0.95], "eps": 1e-8},
        set(),
    ),
    "zero2-offload-trainer": (
        {"ranks": {"stage": "gradients"}, "strategy": "host_only"},
        None,
        set(),
    ),
    "zero3-offload-all-to-host": (
        {
            "accumulation_steps": 32,
            "precision": "bf16",
            "ranks": {"stage": "parameters"},
            "strategy": "host_only",
            "parameters": "host",
            "max_grad_norm": 1.0,
        },
        {"name": "adamw", "lr": 2e-5, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.01},
        set(),
    ),
    "zero3-nvme": (
        {
            "accumulation_steps": 8,
            "precision": "bf16",
            "ranks": {"stage": "parameters"},
            "strategy": "nvme_streamed",
            "budget": {"nvme": {"/local_nvme": "90%"}},
            "parameters": "nvme",
        },
        {"name": "adamw", "lr": 1e-5, "weight_decay": 0.1},
        set(),
    ),
    "twin-flow": (
        {
            "accumulation_steps": 8,
            "precision": "bf16",
            "ranks": {"stage": "parameters"},
            "strategy": {"name": "static_split", "ratio": 0.75},
        },
        {"name": "adamw", "lr": 3e-4, "weight_decay": 0.0},
        set(),
    ),
    "chat-finetune": (
        {
            "accumulation_steps": 2,
            "ranks": {"stage": "gradients"},
            "precision": "fp16",
            "max_grad_norm": 1.0,
        },
        None,
        {
            "hybrid_engine.enabled",
            "hybrid_engine.max_out_tokens",
            "hybrid_engine.inference_tp_size",
        },
    ),
    "cosine-with-activations": (
        {"accumulation_steps": 2, "precision": "bf16", "ranks": {"stage": "optimizer"}},
        {"name": "lion", "lr": 1e-4, "betas": [0.9, 0.99], "weight_decay": 0.1},
        set(),
    ),
    "zero-plus-plus": (
        {"accumulation_steps": 1, "precision": "fp16", "ranks": {"stage": "parameters"}},
        None,
        {
            "fp16.loss_scale",
            "zero_optimization.zero_quantized_weights",
            "zero_optimization.zero_quantized_gradients",
            "zero_optimization.zero_hpz_partition_size",
            "optimizer.type",
            "optimizer.params.freeze_step",
        },
    ),
    "legacy-offload": (
        {
            "accumulation_steps": 2,
            "precision": "fp16",
            "ranks": {"stage": "gradients"},
            "strategy": "host_only",
            "max_grad_norm": 0.5,
        },
        {"name": "adam", "lr": 5e-5, "weight_decay": 0.01},
        {
            "scheduler.type",
            "scheduler.params.cycle_min_lr",
            "scheduler.params.cycle_max_lr",
            "scheduler.params.cycle_first_step_size",
        },
    ),
    "experts-mics": (
        {
            "accumulation_steps": 16,
            "precision": "bf16_autocast",
            "ranks": {
                "stage": "parameters",
                "shard_ranks": 8,
                "leaf_modules": ["MixtralSparseMoeBlock"],
            },
            "strategy": "nvme_streamed",
            "budget": {"nvme": {"/mnt/a/swap": "90%"}},
        },
        None,
        {"curriculum_learning.enabled", "curriculum_learning.curriculum_type"},
    ),
}


def migrated(name: str, **options: Any) -> Migration:
    return migrate_deepspeed(read_json(FILES / f"{name}.json"), **options)


def leaves(section: Any, within: str = "") -> set[str]:
    if not isinstance(section, dict):
        return {within[:-1]}
    return {leaf for name, value in section.items() for leaf in leaves(value, f"{within}{name}.")}


def test_every_file_is_expected() -> None:
    assert {path.stem for path in FILES.glob("*.json")} == set(EXPECTED)
    assert len(EXPECTED) == 10


@pytest.mark.parametrize("name", EXPECTED)
def test_a_file_migrates_to_its_settings(name: str) -> None:
    settings, optimizer, missing = EXPECTED[name]
    found = migrated(name)

    assert found.settings == settings
    assert found.optimizer == optimizer
    assert {key.key for key in found.missing} == missing
    EngineConfig.from_mapping(found.settings)


@pytest.mark.parametrize("name", EXPECTED)
def test_every_key_of_a_file_is_answered_once(name: str) -> None:
    keys = [key.key for key in migrated(name).keys]

    assert sorted(keys) == sorted(leaves(json.loads((FILES / f"{name}.json").read_text())))


def test_more_ranks_divide_the_batch() -> None:
    assert migrated("zero3-offload-all-to-host", ranks=8).settings["accumulation_steps"] == 4
    with pytest.raises(ConfigError, match="a multiple of 2 samples on each of 7 ranks"):
        migrated("zero3-offload-all-to-host", ranks=7)


def test_values_of_auto_are_left_to_the_caller() -> None:
    found = migrated("zero2-offload-trainer")

    assert {key.key for key in found.keys if key.fate is Fate.CALLER} >= {
        "bf16.enabled",
        "optimizer.params.lr",
        "gradient_clipping",
    }
    assert found.schedule is None


def test_a_section_that_is_off_asks_for_nothing() -> None:
    found = migrate_deepspeed({"elasticity": {"enabled": False, "max_train_batch_size": 9}})

    assert {key.fate for key in found.keys} == {Fate.NOT_NEEDED}


def test_an_unknown_key_has_no_equivalent() -> None:
    found = migrate_deepspeed({"zero_optimization": {"stage": 1, "stage1_new_thing": 4}, "new": 1})

    assert {key.key for key in found.missing} == {"zero_optimization.stage1_new_thing", "new"}


@pytest.mark.parametrize(
    ("config", "field"),
    [
        ({"zero_optimization": {"stage": 4}}, "zero_optimization.stage"),
        ({"gradient_accumulation_steps": 1.5}, "gradient_accumulation_steps"),
        ({"gradient_clipping": "much"}, "gradient_clipping"),
        ({"optimizer": "AdamW"}, "optimizer"),
        ({"zero_optimization": {"offload_param": "cpu"}}, "offload_param"),
        ({"zero_optimization": {"offload_param": {"device": "tape"}}}, "offload_param.device"),
        ({"zero_optimization": {"offload_optimizer": {"device": 1}}}, "offload_optimizer.device"),
        (
            {"scheduler": {"type": "WarmupDecayLR", "params": {"warmup_num_steps": 10}}},
            "total_num_steps",
        ),
    ],
)
def test_a_value_that_cannot_be_right_is_named(config: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigError, match=field):
        migrate_deepspeed(config)


# --- rates ----------------------------------------------------------------------------------------


def test_a_logarithmic_warm_up_ends_at_the_highest_rate() -> None:
    warmup = Warmup(decay=WarmupDecay.CONSTANT, least=1e-5, most=1e-3, warmup_steps=100)

    assert warmup.rate(0, 1.0) == warmup.rate(1, 1.0) == 1e-5
    assert warmup.rate(51, 1.0) == pytest.approx(
        1e-5 + (1e-3 - 1e-5) * math.log(51) / math.log(100)
    )
    assert warmup.rate(101, 1.0) == warmup.rate(9999, 1.0) == 1e-3


def test_a_linear_decay_ends_at_zero() -> None:
    schedule = migrated("zero3-offload-all-to-host").schedule
    assert schedule is not None
    assert schedule.rise is Rise.LINEAR

    rates = [schedule.rate(update, 0.5) for update in (0, 51, 101, 551, 1001, 2000)]
    assert rates == pytest.approx([0.0, 1e-5, 2e-5, 1e-5, 0.0, 0.0])


def test_a_cosine_is_of_the_optimizers_own_rate() -> None:
    schedule = migrated("cosine-with-activations").schedule
    assert schedule is not None

    assert schedule.rate(0, 1e-4) == 0.0
    assert schedule.rate(1, 1e-4) == pytest.approx(1e-5)
    assert schedule.rate(2600, 1e-4) == pytest.approx(1e-4 * (0.05 + 0.95 / 2))
    assert schedule.rate(5000, 1e-4) == schedule.rate(9000, 1e-4) == pytest.approx(5e-6)


# --- the command ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", EXPECTED)
def test_the_command_prints_each_key_and_the_call(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "300")
    status = main(("migrate", str(FILES / f"{name}.json")))
    printed = capsys.readouterr().out

    assert status == bool(EXPECTED[name][2])
    for key in leaves(json.loads((FILES / f"{name}.json").read_text())):
        assert f"\n{key} " in printed
    assert "engine.initialize(" in printed


def test_the_command_prints_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(("migrate", str(FILES / "zero3-nvme.json"), "--json")) == 0
    found = json.loads(capsys.readouterr().out)

    assert found["settings"] == EXPECTED["zero3-nvme"][0]
    assert found["optimizer"] == EXPECTED["zero3-nvme"][1]


@pytest.mark.parametrize("content", ["{", "[1]", None], ids=["no JSON", "no object", "no file"])
def test_the_command_says_what_is_wrong_with_a_file(
    content: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "ds.json"
    if content is not None:
        file.write_text(content)

    assert main(("migrate", str(file))) == 2
    assert "a file with a JSON object" in capsys.readouterr().err


def test_the_command_refuses_no_ranks(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(("migrate", str(FILES / "zero3-offload-all-to-host.json"), "--ranks", "0")) == 2
    assert "ranks: expected how many processes train" in capsys.readouterr().err


# --- initialize -----------------------------------------------------------------------------------


def initialized(config: Any, **settings: Any) -> Any:
    torch = pytest.importorskip("torch")
    import infinity_engine

    torch.manual_seed(0)
    model = torch.nn.Linear(8, 8)
    return infinity_engine.initialize(
        model, config=config, accelerator="cpu", calibration="off", **settings
    )


def small(name: str) -> dict[str, Any]:
    """Return a file's content with a warm-up of four updates."""
    config = json.loads((FILES / f"{name}.json").read_text())
    config["scheduler"]["params"]["warmup_num_steps"] = 4
    return dict(config)


def test_initialize_takes_a_file_with_optimizer_and_scheduler(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    file = tmp_path / "ds_config.json"
    file.write_text(json.dumps(small("zero3-offload-all-to-host")))

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        engine = initialized(file, accumulation_steps=1)
    with engine:
        rates = []
        for _ in range(6):
            rates.append(engine.optimizer.param_groups[0]["lr"])
            batch = torch.ones(1, 8, dtype=torch.bfloat16)
            engine.backward(engine(batch).float().pow(2).sum())
            engine.step()
        group = engine.optimizer.param_groups[0]

    assert rates == pytest.approx([0.0, 0.0, 5e-6, 1e-5, 1.5e-5, 2e-5])
    assert (group["weight_decay"], tuple(group["betas"])) == (0.01, (0.9, 0.999))
    assert {parameter.dtype for parameter in engine.model.parameters()} == {torch.bfloat16}


def test_a_schedule_goes_on_from_a_checkpoint(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    rates = []
    for _ in range(2):
        with initialized(small("zero3-offload-all-to-host"), accumulation_steps=1) as engine:
            engine.resume(tmp_path)
            for _ in range(3):
                rates.append(engine.optimizer.param_groups[0]["lr"])
                batch = torch.ones(1, 8, dtype=torch.bfloat16)
                engine.backward(engine(batch).float().pow(2).sum())
                engine.step()
            engine.save(tmp_path)

    assert rates == pytest.approx([0.0, 0.0, 5e-6, 1e-5, 1.5e-5, 2e-5])


def test_each_key_without_an_equivalent_is_warned_of() -> None:
    config = {**small("cosine-with-activations"), "sparse_gradients": True}
    with pytest.warns(UserWarning, match="sparse_gradients=True has no equivalent") as caught:
        initialized(config).close()

    assert len(caught) == 1
    assert caught[0].filename == __file__


def test_a_file_that_leaves_the_optimizer_to_its_caller_needs_one() -> None:
    with pytest.raises(ConfigError, match="optimizer: expected a torch optimizer"):
        initialized(json.loads((FILES / "zero2-offload-trainer.json").read_text()))


def test_a_file_of_the_engines_own_settings_is_read_as_such(tmp_path: Path) -> None:
    file = tmp_path / "settings.json"
    file.write_text(json.dumps({"accumulation_stepz": 2}))

    with pytest.raises(ConfigError, match="nearest: accumulation_steps"):
        initialized(str(file))


def test_keywords_replace_what_a_file_says(tmp_path: Path) -> None:
    config = {"optimizer": {"type": "SGD", "params": {"lr": 0.1}}, "gradient_clipping": 1.0}
    with initialized(config, max_grad_norm=None, strategy="host_only") as engine:
        assert engine.optimizer.param_groups[0]["lr"] == 0.1


def test_initialize_warns_of_values_that_are_left_to_it() -> None:
    file = {
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "bf16": {"enabled": "auto"},
        "train_batch_size": "auto",
    }
    said = '"auto" for gradient_accumulation_steps, gradient_clipping, bf16.enabled'
    with pytest.warns(UserWarning, match=said):
        initialized(file, optimizer="adamw").close()

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        initialized(
            file, optimizer="adamw", accumulation_steps=2, max_grad_norm=1.0, precision="bf16"
        ).close()


# --- the page -------------------------------------------------------------------------------------


def test_every_key_that_decides_a_setting_is_on_the_page() -> None:
    page = PAGE.read_text()
    # Options are named by what has them.
    decides = [
        key for key in _HANDLERS if not key.startswith(("optimizer.params.", "scheduler.params."))
    ]

    assert [key for key in decides if f"`{key}`" not in page] == []


@pytest.mark.parametrize(
    ("option", "value", "fate"),
    [
        ("adam_w_mode", True, Fate.SETTING),
        ("adam_w_mode", False, Fate.SETTING),
        ("torch_adam", True, Fate.NOT_NEEDED),
        ("fp32_optimizer_states", True, Fate.NOT_NEEDED),
        ("fp32_optimizer_states", False, Fate.MISSING),
        ("bias_correction", True, Fate.NOT_NEEDED),
        ("bias_correction", False, Fate.MISSING),
    ],
)
def test_an_option_of_the_optimizer_is_said_to_have_the_effect_that_it_has(
    option: str, value: bool, fate: Fate
) -> None:
    config = {"optimizer": {"type": "Adam", "params": {"lr": 1e-3, option: value}}}

    key = next(key for key in migrate_deepspeed(config).keys if key.key.endswith(option))

    assert key.fate is fate
    if option == "adam_w_mode":
        assert f'"name": "{"adamw" if value else "adam"}"' in key.here


def test_an_option_of_adam_is_no_setting_of_another_optimizer() -> None:
    config = {"optimizer": {"type": "Lion", "params": {"lr": 1e-3, "adam_w_mode": True}}}

    assert [key.key for key in migrate_deepspeed(config).missing] == [
        "optimizer.params.adam_w_mode"
    ]
