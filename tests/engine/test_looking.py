"""What an engine shows and lets change between backward and step: gradients, wherever they are
kept, and masters.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import infinity_engine
from infinity_engine import Outcome
from infinity_engine.errors import ConfigError
from infinity_engine.plan import Interleaved
from support.engine_bits import Bits, bits_of, differing
from support.nvme_training import STREAMED, Case, emulated, made, opened

pytestmark = pytest.mark.usefixtures("deterministic")

MEMORY = Case(model="gpt")
HALF = Interleaved(share=0.5, resident=0.25)
WHERE: dict[str, tuple[Case, bool]] = {  # and whether on a device with memory of its own
    "one memory": (MEMORY, False),
    "the host and the device": (
        replace(MEMORY, strategy=HALF, parameters="host", device=2 << 20),
        True,
    ),
    "drives": (replace(STREAMED, clip=None, precision="fp32", host=34_000_000), False),
}


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("where", WHERE)
def test_a_gradient_is_shown_as_plain_pytorch_has_it(
    where: str, accumulation: int, tmp_path: Path
) -> None:
    case, device = WHERE[where]
    case = replace(case, accumulation=accumulation)
    plain, _ = made("gpt")
    for seed in range(accumulation):
        (plain(plain.batch(seed)) / accumulation).backward()
    with ExitStack() as around:
        on = around.enter_context(emulated(0)) if device else None
        engine, task = around.enter_context(
            opened(case, on, tmp_path if where == "drives" else None)
        )
        for parameter in task.parameters():
            assert "gradient" not in engine.state_of(parameter)
        for seed in range(accumulation):
            engine.backward(engine(task.batch(seed)))
        for (name, parameter), expected in zip(
            task.named_parameters(), plain.parameters(), strict=True
        ):
            found = engine.state_of(parameter).get("gradient")
            if expected.grad is None:
                assert found is None, name
            else:
                torch.testing.assert_close(found, expected.grad, rtol=1e-5, atol=1e-7, msg=name)
        engine.step()
        assert engine.steps == 1
        assert "gradient" not in engine.state_of(parameter)


def test_a_gradient_is_shown_without_the_loss_scale() -> None:
    with opened(replace(MEMORY, precision="fp16"), None, None) as (engine, task):
        weight = max(task.parameters(), key=torch.Tensor.numel)
        for _ in range(8):  # the first scales are too large for fp16
            engine.backward(engine(task.batch(0)))
            found = torch.as_tensor(engine.state_of(weight)["gradient"])
            norm = engine.clip_grad_norm_(1e9)
            if engine.step().outcome is Outcome.UPDATED:
                break

        assert 0 < found.norm() < norm < 100


def test_a_norm_to_clip_to_goes_with_the_gradients_that_are_dropped() -> None:
    def bits(*, clip: bool) -> Bits:
        with opened(MEMORY, None, None) as (engine, task):
            engine.backward(engine(task.batch(0)))
            if clip:
                engine.clip_grad_norm_(1e-6)
            engine.zero_grad()
            engine.backward(engine(task.batch(1)))
            engine.step()
            return bits_of(engine)

    assert differing(bits(clip=True), bits(clip=False)) == []


def test_a_norm_to_clip_to_goes_with_the_gradients_of_a_step_that_is_skipped() -> None:
    def bits(*, clip: bool) -> Bits:
        with opened(replace(MEMORY, precision="fp16"), None, None) as (engine, task):
            skipped = 0
            while engine.steps < 1:
                engine.backward(engine(task.batch(0)))
                if clip and not skipped:
                    engine.clip_grad_norm_(1e-6)
                skipped += engine.step().outcome is Outcome.SKIPPED
            assert skipped
            return bits_of(engine)

    assert differing(bits(clip=True), bits(clip=False)) == []


class LargestInFP32(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch is
    """Notes the elements of the largest fp32 tensor that is made in the body."""

    numel = 0

    def __torch_dispatch__(
        self, func: Any, _types: object, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        made = isinstance(result, torch.Tensor) and not func.is_view and not func._schema.is_mutable
        if made and result.dtype == torch.float32:
            self.numel = max(self.numel, result.numel())
        return result


def test_the_master_of_a_changed_parameter_is_written_without_a_copy_of_the_whole() -> None:
    model = torch.nn.Linear(256, 256, bias=False)
    weight = model.get_parameter("weight")
    with infinity_engine.initialize(
        model,
        torch.optim.AdamW(model.parameters()),
        precision="bf16",
        budget={"host": "64MiB"},
        strategy="host_only",
        subgroup_numel=4096,
    ) as engine:
        made = LargestInFP32()  # type: ignore[no-untyped-call]
        with made, engine.gathered(weight, modify=True), torch.no_grad():
            weight.fill_(3.0)

        assert made.numel <= 4096
        assert torch.equal(
            torch.as_tensor(engine.state_of(weight)["master"]), torch.full((256, 256), 3.0)
        )


@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_what_a_body_does_not_change_keeps_its_master_as_exact_as_it_was(
    where: str, precision: str, tmp_path: Path
) -> None:
    case, device = WHERE[where]
    with (
        ExitStack() as around,
        opened(
            replace(case, precision=precision),
            around.enter_context(emulated(0)) if device else None,
            tmp_path if where == "drives" else None,
        ) as (engine, task),
    ):
        for seed in range(3):
            engine.backward(engine(task.batch(seed)))
            engine.step()
        masters = {
            name: torch.as_tensor(engine.state_of(each)["master"])
            for name, each in task.named_parameters()
        }
        changed = "head.weight" if "head.weight" in masters else max(masters)

        with engine.gathered(task.parameters(), modify=True), torch.no_grad():
            task.get_parameter(changed).view(-1)[::3] = 0.1

        rounded = torch.tensor(0.1, dtype=task.get_parameter(changed).dtype).item()
        masters[changed].view(-1)[::3] = rounded
        for name, each in task.named_parameters():
            assert torch.equal(torch.as_tensor(engine.state_of(each)["master"]), masters[name]), (
                name
            )


@pytest.mark.parametrize(
    "wrong", ["0.weight", torch.nn.Parameter(torch.ones(2)), None, torch.ones(3)], ids=str
)
def test_the_states_of_what_is_not_trained_are_refused(wrong: object) -> None:
    with (
        opened(MEMORY, None, None) as (engine, _),
        pytest.raises(ConfigError, match=r"^parameter: expected a parameter"),
    ):
        engine.state_of(wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("wrong", ["0.weight", ["0.weight"], [None]], ids=str)
def test_names_are_not_gathered(wrong: object) -> None:
    with (
        opened(MEMORY, None, None) as (engine, _),
        pytest.raises(ConfigError, match=r"^parameters: expected a parameter, or several"),
        engine.gathered(wrong),  # type: ignore[arg-type]
    ):
        pass
