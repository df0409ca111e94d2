"""A tiny language model and data for Trainers, plain and in engines, and what they log.

Rows have different numbers of tokens that count, and an epoch leaves a remainder of micro-batches.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from support.families import transformers

__all__ = [
    "ROWS",
    "arguments_of",
    "language_model",
    "losses_of",
    "rows",
    "train_both_on_a_rank",
    "train_on_a_rank",
]

ROWS, _LENGTH, _VOCABULARY = 10, 16, 64


def language_model(*, dropout: float = 0.0, seed: int = 0, **options: Any) -> Any:
    """Return a Llama of two layers, always with the same values."""
    torch.manual_seed(seed)
    return transformers().LlamaForCausalLM(
        transformers().LlamaConfig(
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=2,
            vocab_size=_VOCABULARY,
            attention_dropout=dropout,
            eos_token_id=None,
            **options,
        )
    )


def rows(number: int = ROWS) -> list[dict[str, torch.Tensor]]:
    """Return samples; the first tokens of each, more or fewer of them, are not predicted."""
    generator = torch.Generator().manual_seed(1)
    found = []
    for row in range(number):
        tokens = torch.randint(_VOCABULARY, (_LENGTH,), generator=generator)
        labels = tokens.clone()
        labels[: row % 7 + 1] = -100
        found.append({"input_ids": tokens, "labels": labels})
    return found


def arguments_of(folder: Path, **options: Any) -> Any:
    """Return TrainingArguments: two epochs of micro-batches of 2, 2 of which make a step."""
    given: dict[str, Any] = {
        "num_train_epochs": 2,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "learning_rate": 1e-2,
        "weight_decay": 0.1,
        "max_grad_norm": 0.5,
        "warmup_steps": 2,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "use_cpu": True,
        "seed": 3,
        **options,
    }
    return transformers().TrainingArguments(output_dir=str(folder), **given)


def losses_of(trainer: Any) -> list[dict[str, float]]:
    """Return what a Trainer logged of each step."""
    return [
        {name: entry[name] for name in ("loss", "grad_norm", "learning_rate")}
        for entry in trainer.state.log_history
        if "loss" in entry
    ]


def train_on_a_rank(folder: Path, resume: bool, settings: dict[str, Any] | None) -> dict[str, Any]:
    """Train on this rank, in an engine where there are settings; return what came of it."""
    arguments = arguments_of(folder, save_strategy="steps", save_steps=2, ddp_backend="gloo")
    given = {"model": language_model(), "args": arguments, "train_dataset": rows(20)}
    if settings is None:
        plain = transformers().Trainer(**given)
        plain.train()
        return {"losses": losses_of(plain)}
    from infinity_engine.integrations.transformers import InfinityTrainer

    trainer = InfinityTrainer(**given, eval_dataset=rows(4), engine=settings)
    trainer.train(resume_from_checkpoint=resume)
    assert trainer.engine is not None
    found = {
        "losses": losses_of(trainer),
        "weights": {name: value.tolist() for name, value in trainer.engine.state_dict().items()},
        "evaluated": trainer.evaluate()["eval_loss"],
    }
    trainer.save_model(str(folder / "saved"))
    trainer.end()
    return found


def train_both_on_a_rank(
    folder: Path, settings: dict[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Train on this rank in folders of `folder`, without an engine and in one.

    In one process: importing transformers takes longer than training.
    """
    plain = train_on_a_rank(folder / "plain", False, None)
    return plain, train_on_a_rank(folder / "mine", False, settings)
