"""`train`: the loop of `infinity train`, from a directory and files to weights and a report.

Owns the order of things in a run and what is recorded of it; prints nothing. A run that is killed
at any instant goes on from its last checkpoint with the same bits: the order of the data follows
from the seed, and checkpoints have the number of micro-batches that were used.
"""

from __future__ import annotations

import math
import resource
import shutil
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import IO, Any

import torch

from infinity_engine.accel import Accelerator
from infinity_engine.config import EngineConfig
from infinity_engine.engine.api import initialize
from infinity_engine.engine.checkpoints.autosave import Due
from infinity_engine.engine.engine import Engine
from infinity_engine.engine.optimizers import OPTIMIZERS_BY_NAME
from infinity_engine.errors import ConfigError
from infinity_engine.integrations.language_models import (
    DirectoryTokenizer,
    load_language_model,
    load_tokenizer,
    most_positions,
    save_weights,
    tokenizer_files,
    vocabulary_of,
)
from infinity_engine.losses import chunk_loss
from infinity_engine.outcome import Outcome
from infinity_engine.plan import Budget
from infinity_engine.reporting.report import held_in
from infinity_engine.training.listening import TrainedStep, TrainingListener
from infinity_engine.training.rate import rate_factor
from infinity_engine.training.records import (
    BEGAN,
    ENDED,
    SAVING,
    STEP,
    RecordedRun,
    RunDirectory,
    line_of,
)
from infinity_engine.training.report_page import report_page
from infinity_engine.training.samples import (
    DataPosition,
    MicroBatch,
    Samples,
    fingerprint,
    micro_batches,
    prepare,
)
from infinity_engine.training.settings import SGD_MOMENTUM, TrainingSettings, check_engine

__all__ = ["train"]

_TIMELINE_EVERY = 50  # steps: then the newest one is written for the report


def train(
    settings: TrainingSettings,
    engine: Mapping[str, Any],
    *,
    listener: TrainingListener | None = None,
    prediction: Mapping[str, object] | None = None,
    device: Accelerator | None = None,
) -> Path:
    """Train, and return the directory of the weights; all of the run is in `settings.run`.

    `engine` are settings of `infinity_engine.initialize`; `device` is that of it. `prediction` is
    what the planner has said, for the report.

    Raises:
        ConfigError: something that was given cannot be right.
        CapacityError: a budget has no room for what it has to hold.
        SystemExit: SIGTERM came: the run was saved and can be resumed (code 75).
        FloatingPointError: the loss is not finite, and the weights are not, either.
        KeyboardInterrupt: Ctrl-C; the run can be resumed from its last checkpoint.
    """
    return _Run(settings, engine, listener or TrainingListener(), prediction, device).run()


class _Run:
    """One start of a run."""

    def __init__(
        self,
        settings: TrainingSettings,
        engine: Mapping[str, Any],
        listener: TrainingListener,
        prediction: Mapping[str, object] | None,
        device: Accelerator | None,
    ) -> None:
        self._settings = settings
        self._engine_settings = dict(engine)
        self._listener = listener
        self._prediction = prediction
        self._device = device
        self._directory = RunDirectory(settings.run)
        self._position = DataPosition()

    def run(self) -> Path:
        settings, directory = self._settings, self._directory
        Due(settings.save_every, 0)  # refuses what is neither steps nor a time
        config = check_engine(self._engine_settings, settings.accumulation_steps)
        tokenizer = load_tokenizer(settings.model)
        known_as = fingerprint(
            [*settings.data, *tokenizer_files(settings.model)],
            settings.sequence,
            settings.framing.value,
        )
        earlier = directory.begin(resume=settings.resume)
        if earlier is not None:
            _check_same(earlier, self._deciding(known_as))
        with directory.opened() as records:
            if directory.weights.exists():
                said = "This run has ended before: its weights are there"
                if settings.export_dtype is not None:
                    said += ", as they were written; `infinity checkpoint export` writes others"
                self._listener.on_note(said)
                return directory.weights
            samples = self._prepared(tokenizer, known_as)
            steps = _steps(settings, len(samples))
            directory.describe(self._described(samples, steps))
            try:
                self._train(tokenizer, samples, steps, records, config)
            except BaseException as error:
                _record(records, ENDED, how=_how(error), error=_said(error))
                raise
            else:
                _record(records, ENDED, how="finished")
            finally:
                # Whatever has ended the run: the report is what remains to look at.
                self._write_report()
        return directory.weights

    def _deciding(self, known_as: str) -> dict[str, object]:
        """Return all that decides the bits of the weights."""
        of_engine = {
            name: self._engine_settings.get(name, default)
            for name, default in (("precision", "model"), ("max_grad_norm", None))
        }
        return {**self._settings.deciding(), **of_engine, "data": known_as}

    def _prepared(self, tokenizer: DirectoryTokenizer, known_as: str) -> Samples:
        samples = prepare(
            self._directory.data,
            self._settings.data,
            tokenizer,
            sequence=self._settings.sequence,
            framing=self._settings.framing,
            known_as=known_as,
        )
        self._listener.on_note(f"Data: {samples.summary}")
        return samples

    def _described(self, samples: Samples, steps: int) -> dict[str, object]:
        settings = self._settings
        return {
            "model": str(settings.model),
            "files": [str(path) for path in settings.data],
            "deciding": self._deciding(samples.summary.fingerprint),
            "data": str(samples.summary),
            "steps": steps,
            "engine": {name: str(value) for name, value in self._engine_settings.items()},
            "prediction": self._prediction,
            "torch": torch.__version__,
        }

    def _train(
        self,
        tokenizer: DirectoryTokenizer,
        samples: Samples,
        steps: int,
        records: IO[str],
        config: EngineConfig,
    ) -> None:
        settings = self._settings
        # Before the model: adapters begin with random values.
        torch.manual_seed(settings.seed)
        model = load_language_model(
            settings.model,
            budget=config.budget or Budget(),
            lora=settings.lora,
            checkpointing=settings.checkpointing,
            progress=self._listener.on_progress,
        )
        _check_model(model, samples, settings)
        with ExitStack() as around:
            if settings.chunk_loss:
                around.enter_context(chunk_loss(model))
            engine = around.enter_context(self._initialized(model, config))
            scheduler = torch.optim.lr_scheduler.LambdaLR(
                engine.optimizer,
                lambda step: rate_factor(
                    step,
                    steps=steps,
                    warmup=settings.warmup_steps(steps),
                    decay=settings.decay,
                ),
            )
            engine.follow_schedule(scheduler)
            # The scheduler is in checkpoints already: the engine steps it.
            extra = {"data": self._position}
            if engine.resume(self._directory.checkpoints, extra=extra):
                made = self._position.used // settings.accumulation_steps
                self._listener.on_note(f"Goes on after step {made:,}")
            self._loop(engine, samples, records, steps=steps, extra=extra)
            if engine.last_save().step != engine.steps:
                engine.save(
                    self._directory.checkpoints,
                    extra=extra,
                    keep=settings.keep,
                    frozen=settings.frozen,
                )
            self._export(engine, tokenizer)
            # Values need not be read back: nothing is trained any more.
            engine.close(restore=False)

    def _initialized(self, model: Any, config: EngineConfig) -> Engine:
        return initialize(
            model,
            _optimizer(self._settings, model),
            config,
            device=self._device,
            progress=self._listener.on_progress,
        )

    # --- the loop ---------------------------------------------------------------------------------

    def _loop(
        self,
        engine: Engine,
        samples: Samples,
        records: IO[str],
        *,
        steps: int,
        extra: Mapping[str, Any],
    ) -> None:
        settings, position = self._settings, self._position
        together = settings.accumulation_steps
        _record(records, BEGAN, step=position.used // together)
        batches = micro_batches(
            samples, batch=settings.batch, seed=settings.seed, first=position.used
        )
        before = time.monotonic()
        while position.used < steps * together:
            number = position.used // together + 1
            of_step = [next(batches) for _ in range(together)]
            lr = float(engine.optimizer.param_groups[0]["lr"])
            loss = _step(engine, of_step)
            position.advance(together)
            now = time.monotonic()
            made = TrainedStep(
                number=number,
                steps=steps,
                loss=loss,
                lr=lr,
                tokens=sum(int(batch.mask.sum()) for batch in of_step),
                seconds=now - before,
                report=engine.report(),
            )
            before = now
            # Before the save, which may end the process.
            _record_step(records, made, engine)
            self._listener.on_step(made)
            # Before the save: with `keep`, it would take the place of a checkpoint with numbers.
            if not math.isfinite(loss) and made.report.outcome is Outcome.UPDATED:
                raise FloatingPointError(
                    f"The loss of step {number} is {loss}, and by now most weights are NaN. The "
                    "run ends here, and its checkpoints are of earlier steps. Begin another run, "
                    "with a lower learning rate or with gradients clipped"
                )
            # The first step is slower than the others: it has no trace of one before.
            if number % _TIMELINE_EVERY == 2 or number in {1, steps}:
                self._directory.replace_json(self._directory.timeline, _timeline(engine))
            tag = engine.autosave(
                self._directory.checkpoints,
                every=settings.save_every,
                keep=settings.keep,
                extra=extra,
                frozen=settings.frozen,
            )
            if tag is not None:
                _record(records, SAVING, step=number, tag=tag)

    # --- the end ----------------------------------------------------------------------------------

    def _export(self, engine: Engine, tokenizer: DirectoryTokenizer) -> None:
        # In a folder of another name, so that `weights` is there whole or not at all.
        making = self._directory.weights.with_name(".weights")
        shutil.rmtree(making, ignore_errors=True)
        making.mkdir()
        save_weights(
            engine,
            tokenizer,
            making,
            base=self._settings.model,
            dtype=self._settings.export_dtype,
        )
        making.rename(self._directory.weights)

    def _write_report(self) -> None:
        # This process still holds the run, and has no more to do.
        page = report_page(replace(RecordedRun.read(self._directory.path), goes_on=False))
        try:
            self._directory.replace(self._directory.report, page)
        except OSError as error:
            # It must not take the place of the error that has ended the run.
            self._listener.on_note(f"The report could not be written ({error.strerror})")


def _step(engine: Engine, batches: Sequence[MicroBatch]) -> float:
    """Make a step; return its loss: the mean over all its tokens, in whatever micro-batch."""
    trained = sum(batch.trained for batch in batches)
    loss = 0.0
    for batch in batches:
        found = engine(
            **{
                name: torch.from_numpy(values).to(engine.device)
                for name, values in (
                    ("input_ids", batch.tokens),
                    ("attention_mask", batch.mask),
                    ("labels", batch.labels),
                )
            },
            use_cache=False,
        ).loss
        # The model averages over the micro-batch, and these have different numbers of tokens.
        part = found * (batch.trained / trained)
        engine.backward(part, scale=False)
        loss += part.item()
    engine.step(update=True)
    return loss


def _optimizer(settings: TrainingSettings, model: torch.nn.Module) -> torch.optim.Optimizer:
    """Return the optimizer; vectors, such as norms and biases, do not decay."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups: list[dict[str, Any]] = [
        {"params": [parameter for parameter in trained if parameter.ndim > 1]},
        {
            "params": [parameter for parameter in trained if parameter.ndim <= 1],
            "weight_decay": 0.0,
        },
    ]
    options = {"momentum": SGD_MOMENTUM} if settings.optimizer == "sgd" else {}
    return OPTIMIZERS_BY_NAME[settings.optimizer](
        [group for group in groups if group["params"]],
        lr=settings.lr,
        weight_decay=settings.weight_decay,
        **options,
    )


def _steps(settings: TrainingSettings, sequences: int) -> int:
    """Return how many steps the run has: the last one begins another round where it has room."""
    if settings.steps is not None:
        return settings.steps
    of_step = settings.batch * settings.accumulation_steps
    return max(1, math.ceil(settings.epochs * sequences / of_step))


def _check_model(model: Any, samples: Samples, settings: TrainingSettings) -> None:
    """Refuse tokens and lengths that the model does not know: it would fail in the midst."""
    largest, known = samples.summary.largest_token, vocabulary_of(model)
    if largest >= known:
        expected = f"tokens below {known:,}, which the model has: it needs its own tokenizer"
        raise ConfigError(field="data", value=f"token {largest}", expected=expected)
    most = most_positions(model)
    if most is not None and settings.sequence > most:
        expected = f"at most {most:,} tokens, which the model has positions for"
        raise ConfigError(field="sequence", value=settings.sequence, expected=expected)


def _check_same(earlier: Mapping[str, object], deciding: Mapping[str, object]) -> None:
    """Refuse to resume with what would train something else."""
    before = earlier.get("deciding")
    if not isinstance(before, dict):
        return
    for name, value in deciding.items():
        if before.get(name, value) != value:
            said = "other files or another tokenizer" if name == "data" else value
            expected = "what the run began with" + (
                "" if name == "data" else f", {before.get(name)!r}"
            )
            raise ConfigError(field=name, value=said, expected=f"{expected}, or another run")


# --- records --------------------------------------------------------------------------------------


def _record(records: IO[str], event: str, **fields: object) -> None:
    """Write a record; it survives the process, if not a power loss."""
    records.write(line_of(event, **fields))
    records.flush()


def _record_step(records: IO[str], made: TrainedStep, engine: Engine) -> None:
    held = {usage.directory or usage.tier.name: usage.held for usage in engine.usage()}
    _record(
        records,
        STEP,
        **made.report.to_mapping(),
        held=held,
        step=made.number,
        loss=made.loss,
        lr=made.lr,
        tokens=made.tokens,
        # Of the whole turn, where the engine's own seconds begin with the forward.
        turn_s=made.seconds,
        process_peak_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    )


def _timeline(engine: Engine) -> dict[str, object]:
    """Return the newest step that has ended: what was at work when, on each track."""
    ended = [step for step in engine.timeline().steps if step.end_ns is not None]
    if not ended:
        return {}
    step = ended[-1]
    return {
        "step": step.index + 1,
        "device": str(step.notes.get("device")),
        "ns": (step.end_ns or 0) - step.start_ns,
        "spans": [
            [span.track if span.thread is None else "", span.name, start, end]
            for span in step.spans
            for start, end in [(span.start_ns - step.start_ns, span.end_ns - step.start_ns)]
        ],
        "activations": [
            [part.block, part.held, part.nbytes, part.start_ns, part.end_ns]
            for part in held_in(step).parts
        ],
    }


def _how(error: BaseException) -> str:
    if isinstance(error, SystemExit):
        return "stopped"
    return "interrupted" if isinstance(error, KeyboardInterrupt) else "failed"


def _said(error: BaseException) -> str:
    return "" if isinstance(error, SystemExit | KeyboardInterrupt) else str(error)[:2000]
