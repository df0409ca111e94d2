"""TRL's trainers as they are, with the mixin before their class: the losses of the plain ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import infinity_engine
from support.engine_bits import bits_of, differing
from support.families import peft, transformers
from support.nvme_programs import output_of, run_program
from support.trainers import arguments_of, language_model

transformers()
trl: Any = pytest.importorskip("trl", reason="it is TRL's trainers that run", exc_type=ImportError)
datasets = pytest.importorskip("datasets", reason="TRL reads these")
tokenizers = pytest.importorskip("tokenizers")

from infinity_engine.integrations.transformers import InfinityMixin  # noqa: E402

pytestmark = [
    pytest.mark.usefixtures("deterministic"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]

WORDS = [f"w{number}" for number in range(60)]


class Sft(InfinityMixin, trl.SFTTrainer):  # type: ignore[misc]
    """SFTTrainer in an engine."""


class Dpo(InfinityMixin, trl.DPOTrainer):  # type: ignore[misc]
    """DPOTrainer in an engine."""


def tokenizer() -> Any:
    """Return a tokenizer of 64 words."""
    vocabulary = {word: number for number, word in enumerate(["<pad>", "<eos>", "<unk>", *WORDS])}
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<unk>"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    return transformers().PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )


def sentence(seed: int, length: int) -> str:
    generator = torch.Generator().manual_seed(seed)
    return " ".join(WORDS[i] for i in torch.randint(60, (length,), generator=generator).tolist())


def texts() -> Any:
    return datasets.Dataset.from_dict({"text": [sentence(row, 6 + row) for row in range(10)]})


def pairs() -> Any:
    return datasets.Dataset.from_dict(
        {
            "prompt": [sentence(row, 4) for row in range(10)],
            "chosen": [" " + sentence(row + 100, 5) for row in range(10)],
            "rejected": [" " + sentence(row + 200, 6) for row in range(10)],
        }
    )


def on_drives(folder: Path) -> dict[str, Any]:
    folder.mkdir(parents=True, exist_ok=True)
    return {
        "accelerator": "cpu",
        "calibration": "off",
        "budget": {"host": "64MiB", "nvme": {str(folder): "256MiB"}},
        "strategy": "nvme_streamed",
        "parameters": "nvme",
    }


def lora() -> Any:
    return peft().LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")


def options(kind: Any, folder: Path, **more: Any) -> Any:
    given = arguments_of(folder).to_dict()
    chosen = (
        "num_train_epochs",
        "per_device_train_batch_size",
        "gradient_accumulation_steps",
        "learning_rate",
        "max_grad_norm",
        "logging_steps",
        "save_strategy",
        "report_to",
        "disable_tqdm",
        "use_cpu",
        "seed",
    )
    return kind(
        output_dir=str(folder),
        **{name: given[name] for name in chosen},
        bf16=False,
        **more,
    )


def losses(trainer: Any) -> list[float]:
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def trained(kind: Any, folder: Path, *, adapted: bool, **more: Any) -> Any:
    """Return a trainer that has trained."""
    dpo = issubclass(kind, trl.DPOTrainer)
    # From a folder, which DPO loads the reference from.
    language_model(pad_token_id=0).save_pretrained(folder / "base")
    torch.manual_seed(0)
    trainer = kind(
        model=transformers().LlamaForCausalLM.from_pretrained(folder / "base"),
        args=options(trl.DPOConfig if dpo else trl.SFTConfig, folder),
        train_dataset=pairs() if dpo else texts(),
        processing_class=tokenizer(),
        peft_config=lora() if adapted else None,
        **more,
    )
    trainer.train()
    return trainer


@pytest.mark.parametrize("adapted", [False, True], ids=["full", "lora"])
@pytest.mark.parametrize(
    ("mine", "plain"), [(Sft, trl.SFTTrainer), (Dpo, trl.DPOTrainer)], ids=["sft", "dpo"]
)
def test_losses_are_those_of_the_plain_trainer(
    mine: Any, plain: Any, adapted: bool, tmp_path: Path
) -> None:
    expected = losses(trained(plain, tmp_path / "plain", adapted=adapted))
    trainer = trained(
        mine, tmp_path / "mine", adapted=adapted, engine=on_drives(tmp_path / "drive")
    )

    assert len(expected) > 4
    assert losses(trainer) == pytest.approx(expected, rel=1e-4)
    trainer.end()


@pytest.mark.parametrize("compact", [None, "nf4"])
def test_adapters_are_trained_on_a_base_that_was_loaded_onto_drives(
    compact: str | None, tmp_path: Path
) -> None:
    settings = on_drives(tmp_path / "drive")
    language_model(pad_token_id=0).to(torch.bfloat16).save_pretrained(tmp_path / "base")

    def trained(name: str, base: Any, kind: Any, **more: Any) -> Any:
        torch.manual_seed(0)
        trainer = kind(
            model=base,
            args=options(trl.SFTConfig, tmp_path / name),
            train_dataset=texts(),
            processing_class=tokenizer(),
            peft_config=lora(),
            **more,
        )
        trainer.train()
        return trainer

    loading: dict[str, Any] = {} if compact is None else {"compact": compact}
    base = infinity_engine.load_pretrained(tmp_path / "base", settings["budget"], **loading)
    mine = trained("mine", base, Sft, engine=settings)
    whole = transformers().LlamaForCausalLM.from_pretrained(tmp_path / "base")
    plain = trained("plain", whole, Sft, engine={**settings, "parameters": "host"})

    # Rounding a weight to four bits changes it by some percent.
    near = 1e-6 if compact is None else 1e-2
    assert losses(mine) == pytest.approx(losses(plain), rel=near)
    for trainer in (mine, plain):
        trainer.end()


def adapting(kind: Any, folder: Path, **more: Any) -> Any:
    """Return an SFT trainer of adapters with dropout, in an engine, that saves every two steps."""
    torch.manual_seed(0)
    trainer = kind(
        model=language_model(dropout=0.1, pad_token_id=0),
        args=options(trl.SFTConfig, folder / "run"),
        train_dataset=texts(),
        processing_class=tokenizer(),
        peft_config=lora(),
        engine=on_drives(folder / "drive"),
        **more,
    )
    trainer.args.save_strategy = transformers().trainer_utils.SaveStrategy.STEPS
    trainer.args.save_steps = 2
    return trainer


def test_adapters_are_resumed_with_the_same_bits(tmp_path: Path) -> None:
    whole = adapting(Sft, tmp_path / "whole")
    whole.train()
    expected = bits_of(whole.engine)
    whole.end()

    resumed = adapting(Sft, tmp_path / "again")
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole/run/checkpoint-4"))
    assert differing(bits_of(resumed.engine), expected) == []
    resumed.end()


PROGRAM = """
import hashlib, os, signal, sys
from pathlib import Path

sys.path[:0] = [sys.argv[1], sys.argv[1] + "/integrations"]
import torch
from test_trl import Sft, adapting, bits_of, losses

folder, place, step = Path(sys.argv[2]), sys.argv[3], int(sys.argv[4])
torch.set_num_threads(1)

def die(trainer):
    if trainer.state.global_step == step:
        os.kill(os.getpid(), signal.SIGKILL)

class Killed(Sft):
    def training_step(self, *args, **kwargs):
        if place == "training":
            die(self)
        return super().training_step(*args, **kwargs)

    def _save_rng_state(self, output_dir):
        if place == "saving":
            die(self)
        super()._save_rng_state(output_dir)

trainer = adapting(Killed, folder)
trainer.train(resume_from_checkpoint=place == "resumed")
digest = hashlib.sha256()
for name, value in sorted(bits_of(trainer.engine).items()):
    digest.update(name.encode() + value.contiguous().view(-1).numpy().tobytes())
print(trainer.state.global_step, losses(trainer)[-1], digest.hexdigest())
trainer.end()
"""


def ran(folder: Path, place: str, step: int) -> Any:
    folder.mkdir(exist_ok=True)
    tests = Path(__file__).resolve().parents[1]
    return run_program(PROGRAM, tests, folder, place, step, folder=folder, timeout_s=600)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return what a run says at its end that was not killed."""
    return output_of(ran(tmp_path_factory.mktemp("whole"), "nowhere", -1)).splitlines()[-1]


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("place", "step"), [("training", 5), ("saving", 4)])
def test_killed_training_of_adapters_goes_on_with_the_same_bits(
    place: str, step: int, whole: str, tmp_path: Path
) -> None:
    assert ran(tmp_path / "killed", place, step).returncode == -9
    found = output_of(ran(tmp_path / "killed", "resumed", -1)).splitlines()[-1]

    assert found == whole
