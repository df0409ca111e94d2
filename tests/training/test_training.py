"""A training from a directory and files to weights: the losses of plain PyTorch, on any tier, with
the same bits where it was killed and resumed.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch

from deepnvme import safetensors_header
from infinity_engine.errors import CapacityError, ConfigError
from infinity_engine.plan import Budget
from support.families import peft, transformers
from support.nvme_training import emulated
from support.tiny_directory import LINES, TEXT, json_lines, tiny_directory
from support.training_runs import MEMORY, Heard, digest, on_drives, settings_of, train_it
from support.warm_programs import WITH_SUPPORT, run_warm

transformers()
pytest.importorskip("tokenizers", reason="it makes the model's tokenizer")

from infinity_engine.checkpoint import CheckpointDirectory, CheckpointReader, Kind  # noqa: E402
from infinity_engine.training.records import RecordedRun  # noqa: E402
from infinity_engine.training.samples import Samples, micro_batches  # noqa: E402
from infinity_engine.training.settings import Decay  # noqa: E402

pytestmark = pytest.mark.usefixtures("deterministic")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_directory(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "text.txt"
    path.write_text(TEXT)
    return path


@pytest.fixture(scope="module")
def lines(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return json_lines(tmp_path_factory.mktemp("data") / "lines.jsonl", LINES)


@pytest.fixture(scope="module")
def whole(model: Path, text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the run of a training that nothing disturbs."""
    run = tmp_path_factory.mktemp("whole") / "run"
    train_it(settings_of(model, run, text))
    return run


def loaded(folder: Path) -> Any:
    return transformers().AutoModelForCausalLM.from_pretrained(folder, dtype="auto")


def test_losses_and_weights_are_those_of_a_plain_loop(
    model: Path, lines: Path, tmp_path: Path
) -> None:
    settings = settings_of(
        model, tmp_path / "run", lines, steps=4, warmup=0, decay=Decay.CONSTANT, checkpointing=False
    )
    heard = train_it(settings, {**MEMORY, "max_grad_norm": None})

    plain = loaded(model)
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2, weight_decay=0.0)
    batches = micro_batches(Samples(tmp_path / "run/data", 256), batch=2, seed=0, first=0)
    losses = []
    for _ in range(4):
        together = list(islice(batches, 2))
        # One batch of all: the mean over all tokens of the step.
        logits = [
            plain(torch.tensor(batch.tokens), torch.tensor(batch.mask)).logits[:, :-1].flatten(0, 1)
            for batch in together
        ]
        labels = [torch.tensor(batch.labels)[:, 1:].flatten() for batch in together]
        loss = torch.nn.functional.cross_entropy(torch.cat(logits), torch.cat(labels))
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())

    # In fp32, up to the order of sums.
    assert [step.loss for step in heard.steps] == pytest.approx(losses, rel=1e-5)
    trained = loaded(tmp_path / "run/weights").state_dict()
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(trained[name], value, rtol=1e-3, atol=2e-5)


def test_weights_are_the_same_bits_on_drives(
    model: Path, text: Path, whole: Path, tmp_path: Path
) -> None:
    heard = train_it(settings_of(model, tmp_path / "run", text), on_drives(tmp_path / "drive"))

    assert digest(tmp_path / "run/weights") == digest(whole / "weights")
    assert any(lane.value == "nvme write" for lane in heard.steps[-1].report.links)
    run = RecordedRun.read(tmp_path / "run")
    assert run.written[str(tmp_path / "drive")] > 0
    assert run.steps[-1].figure("drives", str(tmp_path / "drive"), "rated_bytes") == 10**12


def test_what_a_run_leaves_is_recorded_and_loads(whole: Path, model: Path) -> None:
    run = RecordedRun.read(whole)

    assert [step.number for step in run.steps] == [1, 2, 3, 4, 5, 6]
    assert run.ended is not None
    assert run.ended.fields["how"] == "finished"
    assert run.damage == []
    assert run.timeline["step"] == 6
    assert run.steps[-1].figure("loss") < (run.steps[0].figure("loss") or 0)  # type: ignore[operator]
    assert "6 of 6 steps" in (whole / "report.html").read_text()
    again, tokenizer = loaded(whole / "weights"), transformers().AutoTokenizer
    assert again.dtype is torch.float32
    assert again.config.to_dict().keys() == loaded(model).config.to_dict().keys()
    assert tokenizer.from_pretrained(whole / "weights")("ab")["input_ids"]
    assert not [path for path in whole.iterdir() if path.name.startswith(".")]


def test_a_16_bit_model_is_exported_as_it_computes(text: Path, tmp_path: Path) -> None:
    model = tiny_directory(tmp_path / "model", dtype=torch.bfloat16)
    train_it(settings_of(model, tmp_path / "run", text, steps=1, export_dtype=None))
    train_it(settings_of(model, tmp_path / "fp32", text, steps=1))

    assert loaded(tmp_path / "run/weights").dtype is torch.bfloat16
    assert loaded(tmp_path / "fp32/weights").dtype is torch.float32


def test_sigterm_saves_and_a_resumed_run_ends_with_the_same_bits(
    model: Path, text: Path, whole: Path, tmp_path: Path
) -> None:
    settings = settings_of(model, tmp_path / "run", text, save_every=1000)
    heard = Heard(signal_at=3, number=signal.SIGTERM)

    # Before the first save nothing watches for the signal.
    with pytest.raises(SystemExit) as ended:
        train_it(settings, listener=heard)

    assert ended.value.code == 75
    assert "It was told to stop, and saved first" in (tmp_path / "run/report.html").read_text()
    again = train_it(settings_of(model, tmp_path / "run", text, resume=True))
    assert "Goes on after step 3" in again.notes
    assert [step.number for step in again.steps] == [4, 5, 6]
    assert digest(tmp_path / "run/weights") == digest(whole / "weights")


KILLED = """
import sys
from pathlib import Path

from support.determinism import deterministic_compute
from support.kills import Kill
from support.training_runs import Heard, on_drives, settings_of, train_it

model, run, text, drive, place, nth = sys.argv[1:]
if place != "step":
    Kill(place, int(nth)).arm()
heard = Heard(signal_at=int(nth) if place == "step" else None)
with deterministic_compute():
    settings = settings_of(Path(model), Path(run), Path(text), resume=True, save_every=2)
    train_it(settings, on_drives(Path(drive)), listener=heard)
"""


def killed(*arguments: object, folder: Path) -> subprocess.CompletedProcess[str]:
    return run_warm(KILLED, *arguments, folder=folder, environment=WITH_SUPPORT)


def test_a_run_killed_in_the_middle_ends_with_the_same_bits(
    model: Path, text: Path, whole: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"

    ended = killed(model, run, text, tmp_path / "drive", "step", 5, folder=tmp_path)

    assert ended.returncode == -signal.SIGKILL, ended.stderr
    assert RecordedRun.read(run).ended is None
    assert not (run / "weights").exists()
    again = train_it(settings_of(model, run, text, resume=True), on_drives(tmp_path / "drive"))
    # From whichever checkpoint was whole.
    assert again.steps[0].number in {3, 5}
    assert digest(run / "weights") == digest(whole / "weights")
    assert [step.number for step in RecordedRun.read(run).steps] == [1, 2, 3, 4, 5, 6]


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_run_killed_again_and_again_at_any_place_ends_with_the_same_bits(
    model: Path, text: Path, whole: Path, tmp_path: Path
) -> None:
    from support.kills import any_kill

    chosen, kills = random.Random(0), 0
    for number in range(12):
        run = tmp_path / f"run-{number}"
        for _ in range(3):
            kill = any_kill(chosen)
            ended = killed(
                model, run, text, tmp_path / "drive", kill.place, kill.nth, folder=tmp_path
            )
            assert ended.returncode in {0, -signal.SIGKILL}, ended.stderr
            kills += ended.returncode != 0
        train_it(settings_of(model, run, text, resume=True))
        assert digest(run / "weights") == digest(whole / "weights"), number
    assert kills > 6


def test_a_loss_that_is_not_finite_ends_the_run_and_keeps_its_checkpoints(
    model: Path, text: Path, tmp_path: Path
) -> None:
    settings = settings_of(
        model, tmp_path / "run", text, lr=1e30, warmup=0, save_every=1, keep=1, optimizer="sgd"
    )

    with (
        pytest.warns(RuntimeWarning, match="The loss is|The norm of the gradients"),
        pytest.raises(FloatingPointError, match="The loss of step 2 is nan"),
    ):
        train_it(settings, {**MEMORY, "max_grad_norm": None})

    run = RecordedRun.read(tmp_path / "run")
    assert [step.number for step in run.steps] == [1, 2]
    assert run.ended is not None
    assert run.ended.fields["how"] == "failed"
    assert (tmp_path / "run/checkpoints/latest").read_text().strip() == "step-00000001"
    assert not (tmp_path / "run/weights").exists()


def test_a_run_that_has_ended_is_left_as_it_is(whole: Path, model: Path, text: Path) -> None:
    before = (whole / "records.jsonl").read_bytes()

    again = train_it(settings_of(model, whole, text, resume=True, export_dtype=None))

    assert again.steps == []
    assert again.notes == ["This run has ended before: its weights are there"]
    other = train_it(settings_of(model, whole, text, resume=True, export_dtype="bfloat16"))
    assert "`infinity checkpoint export` writes others" in other.notes[0]
    assert (whole / "records.jsonl").read_bytes() == before


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"seed": 1}, "seed"),
        ({"batch": 1}, "batch"),
        ({"lr": 1e-3}, "lr"),
        ({"sequence": 16}, "sequence"),
        ({"steps": 7}, "steps"),
    ],
)
def test_a_run_is_not_resumed_with_what_would_train_something_else(
    whole: Path, model: Path, text: Path, change: dict[str, Any], field: str
) -> None:
    with pytest.raises(ConfigError, match="expected what the run began with") as error:
        train_it(settings_of(model, whole, text, resume=True, **change))

    assert error.value.field == field


def test_a_run_is_not_resumed_with_other_data(whole: Path, model: Path, lines: Path) -> None:
    with pytest.raises(ConfigError, match="data: expected what the run began with"):
        train_it(settings_of(model, whole, lines, resume=True))


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.*:FutureWarning")
def test_adapters_are_trained_alone_and_exported_for_peft(
    model: Path, lines: Path, tmp_path: Path
) -> None:
    peft()
    memory, drives = (
        settings_of(model, tmp_path / name, lines, lora=4, steps=3) for name in ("m", "d")
    )

    heard = train_it(memory)
    train_it(drives, on_drives(tmp_path / "drive"))

    assert digest(tmp_path / "m/weights") == digest(tmp_path / "d/weights")
    base = loaded(model)
    adapted = peft().PeftModel.from_pretrained(base, tmp_path / "m/weights")
    assert not torch.equal(
        adapted(torch.arange(8)[None]).logits, loaded(model)(torch.arange(8)[None]).logits
    )
    assert heard.steps[0].report.updates
    for name in ("m", "d"):
        stated = json.loads((tmp_path / name / "weights/adapter_config.json").read_text())
        assert stated["base_model_name_or_path"] == str(model)
    assert sorted(path.name for path in (tmp_path / "m/weights").glob("*.safetensors")) == [
        "adapter_model.safetensors"
    ]


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.*:FutureWarning")
@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.*:FutureWarning")
@pytest.mark.parametrize(
    ("asked", "written"), [("float32", "F32"), ("bfloat16", "BF16"), (None, "BF16")]
)
def test_adapters_are_exported_in_the_dtype_that_is_asked_for(
    asked: str | None, written: str, model: Path, lines: Path, tmp_path: Path
) -> None:
    peft()
    settings = settings_of(model, tmp_path / "run", lines, lora=4, steps=2, export_dtype=asked)

    train_it(settings, {**MEMORY, "precision": "bf16_autocast"})

    header = safetensors_header(tmp_path / "run/weights/adapter_model.safetensors")
    assert {entry.dtype for entry in header.tensors.values()} == {written}


def test_adapters_are_resumed_from_checkpoints_without_their_base(
    model: Path, lines: Path, tmp_path: Path
) -> None:
    peft()
    more: dict[str, Any] = {"lora": 4, "steps": 3}
    part = {**more, "frozen": "leave_out"}
    train_it(settings_of(model, tmp_path / "whole", lines, **more))

    stopped = settings_of(model, tmp_path / "part", lines, **part)
    heard = Heard(signal_at=2, number=signal.SIGTERM)
    with pytest.raises(SystemExit):
        train_it(stopped, on_drives(tmp_path / "drive"), listener=heard)
    with CheckpointReader(CheckpointDirectory(tmp_path / "part/checkpoints").resolve()) as reader:
        kinds = {tensor.kind for tensor in reader.manifest.tensors if tensor.streams}
    again = train_it(settings_of(model, tmp_path / "part", lines, resume=True, **part))

    assert kinds <= {Kind.TRAINED, Kind.TRANSIENT}
    assert [step.number for step in again.steps] == [3]
    assert digest(tmp_path / "part/weights") == digest(tmp_path / "whole/weights")


def test_a_device_of_its_own_is_drawn_by_its_lanes(model: Path, text: Path, tmp_path: Path) -> None:
    engine = {**MEMORY, "budget": {"host": "64MiB", "device": "16MiB"}, "parameters": "host"}
    del engine["accelerator"]

    train_it(settings_of(model, tmp_path / "run", text, steps=2), engine, device=emulated(0))

    timeline = json.loads((tmp_path / "run/timeline.json").read_text())
    assert {track for track, *_ in timeline["spans"]} >= {"", "h2d", "d2h"}
    page = (tmp_path / "run/report.html").read_text()
    assert "to the device" in page
    assert "emulated" in page


@pytest.mark.parametrize("kind", ["adam", "lion", "adagrad", "sgd"])
def test_the_other_optimizers_train_with_chunked_losses(
    model: Path, text: Path, tmp_path: Path, kind: str
) -> None:
    settings = settings_of(
        model, tmp_path / "run", text, steps=2, optimizer=kind, lr=1e-3, weight_decay=0.1,
        chunk_loss=True, save_every="1h",
    )  # fmt: skip

    assert len(train_it(settings).steps) == 2


def test_a_directory_without_tokenizer_is_refused(model: Path, text: Path, tmp_path: Path) -> None:
    bare = tmp_path / "bare"
    bare.mkdir()
    for name in ("config.json", "model.safetensors"):
        (bare / name).write_bytes((model / name).read_bytes())

    with pytest.raises(ConfigError, match="without a tokenizer") as error:
        train_it(settings_of(bare, tmp_path / "run", text))

    assert error.value.field == "model"
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("file", "content", "said"),
    [
        ("tokenizer.json", "{", "a tokenizer that Transformers reads"),
        ("config.json", "{}", "a causal language model that Transformers reads"),
        ("model.safetensors", None, "a causal language model that Transformers reads"),
    ],
)
def test_a_broken_directory_is_refused(
    text: Path, tmp_path: Path, file: str, content: str | None, said: str
) -> None:
    model = tiny_directory(tmp_path / "model")
    if content is None:
        (model / file).unlink()
    else:
        (model / file).write_text(content)

    with pytest.raises(ConfigError, match=said):
        train_it(settings_of(model, tmp_path / "run", text))


def test_a_model_without_all_its_weights_is_refused(text: Path, tmp_path: Path) -> None:
    model = tiny_directory(tmp_path / "model")
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 3}))

    with pytest.raises(ConfigError, match=r"9 are missing \(model\.layers\.2"):
        train_it(settings_of(model, tmp_path / "run", text))


def test_tokens_that_the_model_does_not_know_are_refused(text: Path, tmp_path: Path) -> None:
    model = tiny_directory(tmp_path / "model", vocab_size=100, eos_token_id=1)

    with pytest.raises(ConfigError, match="tokens below 100, which the model has"):
        train_it(settings_of(model, tmp_path / "run", text))


def test_a_sequence_longer_than_the_model_knows_is_refused(
    model: Path, text: Path, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match="at most 128 tokens"):
        train_it(settings_of(model, tmp_path / "run", text, sequence=129))


def test_a_run_that_has_failed_says_so_and_can_be_begun_again(
    model: Path, text: Path, tmp_path: Path
) -> None:
    with pytest.raises(CapacityError):
        train_it(
            settings_of(model, tmp_path / "run", text), {**MEMORY, "budget": {"host": "64KiB"}}
        )

    page = (tmp_path / "run/report.html").read_text()
    assert "It has failed" in page
    assert "HOST cannot hold" in page
    assert len(train_it(settings_of(model, tmp_path / "run", text)).steps) == 6


def test_when_to_save_is_checked_before_anything_is_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="every: expected"):
        train_it(settings_of(tmp_path, tmp_path / "run", tmp_path / "none", save_every="soon"))


def test_a_run_goes_on_from_the_export_where_that_was_interrupted(
    model: Path, text: Path, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = settings_of(model, tmp_path / "run", text)
    target = "infinity_engine.training.training.save_weights"

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(target, full)
        with pytest.raises(OSError, match="No space left"):
            train_it(settings)

    again = train_it(settings_of(model, tmp_path / "run", text, resume=True))
    assert again.steps == []
    assert digest(tmp_path / "run/weights") == digest(whole / "weights")


def test_a_budget_may_be_an_object(model: Path, text: Path, whole: Path, tmp_path: Path) -> None:
    budget = Budget(host="64MiB", nvme={str(tmp_path): "64MiB"})
    train_it(settings_of(model, tmp_path / "run", text), {**MEMORY, "budget": budget})

    assert digest(tmp_path / "run/weights") == digest(whole / "weights")


def test_micro_batches_that_differ_from_the_engines_are_refused(text: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"accumulation_steps: expected 2, or nothing"):
        train_it(settings_of(tmp_path, tmp_path / "run", text), {"accumulation_steps": 3})


def test_a_name_that_is_no_text_is_on_the_page_all_the_same(
    model: Path, text: Path, tmp_path: Path
) -> None:
    odd = tmp_path / os.fsdecode(b"caf\xe9.txt")
    odd.write_text(text.read_text())
    train_it(settings_of(model, tmp_path / "run", odd))

    assert "caf\\udce9.txt" in (tmp_path / "run/report.html").read_text()
