"""P1 where features meet: settings drawn by chance, others after each resume, and what programs do
between steps, give the losses and the weights of a run in memory.
"""

from __future__ import annotations

import io
import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import infinity_engine
from infinity_engine.accel import Accelerator, Emulation, emulated_accelerator
from infinity_engine.engine.engine import Engine
from infinity_engine.errors import CapacityError, ConfigError
from support.nvme_training import RATES

transformers = pytest.importorskip("transformers")
pytestmark = [
    pytest.mark.usefixtures("deterministic"),
    # peft still uses the old names.
    pytest.mark.filterwarnings(
        "ignore:`(is_)?gradient_checkpointing.*` is deprecated:FutureWarning"
    ),
    pytest.mark.filterwarnings(
        "ignore:fan_in_fan_out is set to False but the target module is `Conv1D`:UserWarning"
    ),
]

SEGMENTS = (1, 2, 1)  # steps between two resumes
STRATEGIES: tuple[object, ...] = (
    "auto",
    "host_only",
    "device_only",
    {"name": "static_split", "ratio": 0.4},
    {"name": "interleaved", "share": 0.5},
    "nvme_streamed",
    {"name": "nvme_streamed", "update": {"name": "interleaved", "share": 0.5}},
)
Batch = Mapping[str, torch.Tensor]


class Run:
    """What stays the same over all ways to train it, drawn by chance."""

    def __init__(self, chance: random.Random) -> None:
        self.family = chance.choice(["llama", "gpt2", "opt", "t5", "qwen2_moe"])
        self.dtype = chance.choice([torch.float32, torch.bfloat16])
        self.has_adapters = chance.random() < 0.3
        self.accumulation = chance.choice([1, 1, 2, 3])
        self.clip = chance.choice([None, 0.05])
        self.precision = chance.choice(["model", "model", "bf16", "fp16"])
        self.rule = chance.choice(["adamw", "adamw", "sgd", "adagrad"])

    def begun(self) -> tuple[nn.Module, torch.optim.Optimizer]:
        """Return a model and its optimizer, always the same, and random numbers for dropout."""
        torch.manual_seed(1)
        model = _model(self.family).to(self.dtype)
        if self.has_adapters:
            peft = pytest.importorskip("peft")
            config = peft.LoraConfig(r=4, lora_dropout=0.1, target_modules="all-linear")
            model = peft.get_peft_model(model, config)
        model.train()
        ours = [parameter for parameter in model.parameters() if parameter.requires_grad]
        optimizer: torch.optim.Optimizer
        if self.rule == "sgd":
            optimizer = torch.optim.SGD(ours, lr=0.05, momentum=0.9)
        elif self.rule == "adagrad":
            optimizer = torch.optim.Adagrad(ours, lr=0.02)
        else:
            optimizer = torch.optim.AdamW(ours[::2], lr=3e-3, weight_decay=0.1)
            optimizer.add_param_group({"params": ours[1::2], "lr": 1e-3})
        torch.manual_seed(7)
        return model, optimizer

    def settings(self) -> dict[str, Any]:
        """Return those that change bits."""
        return {
            "precision": self.precision,
            "accumulation_steps": self.accumulation,
            "max_grad_norm": self.clip,
            "rates": RATES,
            "accelerator": "cpu",
        }

    @contextmanager
    def opened(self, chance: random.Random, drive: Path) -> Iterator[tuple[Engine, nn.Module]]:
        """Open an engine with settings drawn by chance; draw again what is refused."""
        with ExitStack() as opened:
            for _ in range(40):
                model, optimizer = self.begun()
                device = opened.enter_context(_emulated(chance)) if chance.random() < 0.5 else None
                settings = self.settings() | _drawn(chance, drive)
                try:
                    engine = infinity_engine.initialize(model, optimizer, device=device, **settings)
                except (ConfigError, CapacityError):
                    continue
                yield opened.enter_context(engine), model
                return
            raise AssertionError("all settings were refused")


def _model(family: str) -> nn.Module:
    sizes: dict[str, Any] = {"vocab_size": 131, "num_attention_heads": 4}
    heads = {"hidden_size": 48, "num_hidden_layers": 2, **sizes}
    made: nn.Module
    if family == "t5":
        config = transformers.T5Config(
            vocab_size=131,
            d_model=48,
            d_kv=12,
            d_ff=80,
            num_layers=2,
            num_heads=4,
            decoder_start_token_id=0,
        )
        made = transformers.T5ForConditionalGeneration(config)
        return made
    if family == "llama":
        config = transformers.LlamaConfig(
            intermediate_size=112, num_key_value_heads=2, attention_dropout=0.1, **heads
        )
    elif family == "gpt2":
        config = transformers.GPT2Config(vocab_size=131, n_embd=48, n_layer=2, n_head=4)
    elif family == "opt":
        config = transformers.OPTConfig(ffn_dim=80, word_embed_proj_dim=48, **heads)
    else:
        config = transformers.Qwen2MoeConfig(
            intermediate_size=80,
            num_key_value_heads=2,
            num_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=32,
            shared_expert_intermediate_size=40,
            **heads,
        )
    made = transformers.AutoModelForCausalLM.from_config(config)
    return made


def _emulated(chance: random.Random) -> Accelerator:
    late = random.Random(chance.random())
    return emulated_accelerator(
        Emulation(
            rates=RATES,
            capacity_bytes=256 << 20,
            seed=chance.randrange(99),
            delay_ns=lambda _: int(10 ** late.uniform(0, 6)) if late.random() < 0.3 else 0,
        )
    )


def _drawn(chance: random.Random, drive: Path) -> dict[str, Any]:
    """Return settings that change no bits."""
    activations: dict[str, object] = {"at": chance.choice(["device", "device", "nvme", "auto"])}
    if activations["at"] == "nvme":
        activations |= {
            "resident_bytes": chance.choice([0, 1 << 16, 1 << 20]),
            "host_bytes": "16MiB",
            "small_bytes": chance.choice([0, 1024]),
        }
    if activations["at"] != "auto" and chance.random() < 0.4:
        activations["recompute"] = "blocks"
    return {
        "budget": {
            "host": "512MiB",
            "device": chance.choice(["64MiB", "160MiB"]),
            "nvme": {str(drive): "512MiB"},
        },
        "parameters": chance.choice(["auto", "device", "host", "nvme"]),
        "strategy": chance.choice(STRATEGIES),
        "overlap": chance.choice(["auto", "off"]),
        "activations": activations,
        "storage": {
            "small_bytes": chance.choice([0, 256, 65536]),
            "checksum": chance.choice(["off", "crc32c"]),
            "early_updates": chance.random() < 0.2,
        },
        "subgroup_numel": chance.choice([4096, 8192, 30000]),
        "tiling": chance.choice(["off", "off", "auto"]),
        "update_threads": chance.choice([1, 2]),
    }


def _batch(seed: int, device: torch.device) -> Batch:
    drawn = torch.Generator().manual_seed(seed)
    ids = torch.randint(1, 131, (2, 17 + seed % 5), generator=drawn).to(device)
    return {"input_ids": ids, "labels": ids.clone()}


# --- what programs do between steps ---------------------------------------------------------------


def _evaluate(engine: Engine, _: nn.Module, batch: Batch) -> None:
    engine.eval()
    with torch.no_grad():
        engine(**batch)
    engine.train()


def _drop_a_graph(engine: Engine, _: nn.Module, batch: Batch) -> None:
    engine(**batch)


def _fail_in_a_forward(engine: Engine, model: nn.Module, batch: Batch) -> None:
    def fail(*_: object) -> None:
        raise ZeroDivisionError

    last = [module for module in model.modules() if isinstance(module, nn.Linear)][-1]
    hook = last.register_forward_pre_hook(fail)
    with pytest.raises(ZeroDivisionError):
        engine(**batch)
    hook.remove()


def _take_a_backward_back(engine: Engine, _: nn.Module, batch: Batch) -> None:
    engine.backward(engine(**batch).loss)
    engine.zero_grad()


def _fail_in_a_backward(engine: Engine, _: nn.Module, batch: Batch) -> None:
    def fail(_: torch.Tensor) -> None:
        raise ZeroDivisionError

    out = engine(**batch)
    out.logits.register_hook(fail)
    with pytest.raises(ZeroDivisionError):
        engine.backward(out.loss)
    engine.zero_grad()


def _read_states(engine: Engine, _: nn.Module, __: Batch) -> None:
    torch.save(engine.state_dict(), io.BytesIO())
    engine.optimizer_state_dict()


def _generate(engine: Engine, _: nn.Module, batch: Batch) -> None:
    engine.eval()
    engine.generate(input_ids=batch["input_ids"][:, :5], max_new_tokens=3, pad_token_id=0)
    engine.train()


HABITS: tuple[Callable[[Engine, nn.Module, Batch], None], ...] = (
    _evaluate,
    _drop_a_graph,
    _fail_in_a_forward,
    _take_a_backward_back,
    _fail_in_a_backward,
    _read_states,
    _generate,
)


def _have_habits(chance: random.Random, engine: Engine, model: nn.Module) -> None:
    """Do what a program might between two steps, and leave random numbers as they were."""
    drawn = torch.get_rng_state()
    for habit in chance.choices(HABITS, k=chance.choice([0, 1, 2])):
        habit(engine, model, _batch(1000 + chance.randrange(50), engine.device))
    torch.set_rng_state(drawn)


def _train(run: Run, engine: Engine, steps: range, between: Callable[[], None]) -> list[float]:
    losses = []
    for step in steps:
        between()
        for number in range(run.accumulation):
            loss = engine(**_batch(step * run.accumulation + number, engine.device)).loss
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
    return losses


# --- the same bits --------------------------------------------------------------------------------


def _check_bits(seed: int, folder: Path) -> None:
    chance = random.Random(seed)
    run = Run(chance)
    model, optimizer = run.begun()
    budget = {"host": "512MiB", "device": "256MiB"}
    with infinity_engine.initialize(model, optimizer, budget=budget, **run.settings()) as engine:
        expected = _train(run, engine, range(sum(SEGMENTS)), lambda: None)
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}

    drive, saved, losses, first = folder / "drive", folder / "run", [], 0
    drive.mkdir()
    for steps in SEGMENTS:
        with run.opened(chance, drive) as (engine, model):
            if first:
                engine.load(saved)
            losses += _train(
                run,
                engine,
                range(first, first + steps),
                lambda engine=engine, model=model: _have_habits(chance, engine, model),  # type: ignore[misc]
            )
            first += steps
            if first < sum(SEGMENTS):
                engine.save(saved, wait=chance.random() < 0.5)

    assert losses == expected
    found = model.state_dict()
    assert found.keys() == weights.keys()
    assert [name for name in weights if not torch.equal(found[name], weights[name])] == []
    assert list(drive.iterdir()) == []


@pytest.mark.parametrize("seed", [3, 8])
def test_what_is_set_and_done_by_chance_changes_no_bit(seed: int, tmp_path: Path) -> None:
    _check_bits(seed, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1000, 1150))
def test_many_runs_by_chance_have_the_bits_of_those_in_memory(seed: int, tmp_path: Path) -> None:
    _check_bits(seed, tmp_path)
