"""Wrong uses of an engine, what is said of them, and what it trains all the same: to compare how
Python was started.
"""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import nn

import infinity_engine
from infinity_engine.accel import Emulation, emulated_accelerator
from infinity_engine.engine.engine import Engine
from infinity_engine.plan import Rates
from support.engine_bits import bits_of
from support.nvme_training import digest_of

__all__ = ["told"]

RATES = Rates(
    h2d_bytes_per_s=1e9,
    d2h_bytes_per_s=1e9,
    host_update_params_per_s=1e8,
    device_update_params_per_s=1e9,
)
_Use = Callable[[Engine], object]


def _model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(20, 300), nn.ReLU(), nn.Linear(300, 2))


@contextmanager
def _opened(**settings: object) -> Iterator[Engine]:
    """Open an engine whose parameters are fetched."""
    budget = {"host": "64MiB", "device": "8MiB"}
    given = {
        "parameters": "host",
        "strategy": "host_only",
        "precision": "bf16",
        "budget": budget,
        **settings,
    }
    net = _model()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    with (
        emulated_accelerator(Emulation(rates=RATES, capacity_bytes=16 << 20)) as device,
        infinity_engine.initialize(net, optimizer, device=device, **given) as made,  # type: ignore[arg-type]
    ):
        yield made


def _loss(engine: Engine, seed: int = 0) -> torch.Tensor:
    batch = torch.randn(4, 20, generator=torch.Generator().manual_seed(seed)).bfloat16()
    loss: torch.Tensor = engine(batch).float().pow(2).mean()
    return loss


def _backward_twice(engine: Engine) -> None:
    loss = _loss(engine)
    engine.backward(loss)
    engine.backward(loss)


def _change(engine: Engine) -> None:
    weight = engine.model[0].weight  # type: ignore[index]
    with torch.no_grad(), engine.gathered(weight):
        weight.fill_(0.5)


def _clip_as_torch(engine: Engine) -> None:
    engine.backward(_loss(engine))
    torch.nn.utils.clip_grad_norm_(engine.model.parameters(), 1.0)


def _steps_of_the_optimizer(engine: Engine) -> None:
    engine.backward(_loss(engine))
    engine.optimizer.step()


def _not_a_number(engine: Engine) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        engine.backward(_loss(engine) * torch.nan)


def _uses_after_the_end(engine: Engine) -> None:
    engine.close()
    engine.step()


_USES: dict[str, _Use] = {
    "backward twice": _backward_twice,
    "step without backward": lambda engine: engine.step(),
    "a change outside": _change,
    "torch's clipping": _clip_as_torch,
    "the optimizer's own step": _steps_of_the_optimizer,
    "a loss that is not a number": _not_a_number,
    "a forward that fails": lambda engine: engine(torch.zeros(4, 21).bfloat16()),
    "a copy": copy.deepcopy,
    "a copy of the model": lambda engine: copy.deepcopy(engine.model),
    "pickling": pickle.dumps,
    "the model's state dict": lambda engine: engine.model.state_dict(),
    "a parameter of another model": lambda engine: engine.state_of(nn.Parameter(torch.zeros(3))),
    "use after the end": _uses_after_the_end,
}


def _with(**settings: object) -> None:
    with _opened(**settings):
        pass


def _other_parameters() -> None:
    infinity_engine.initialize(
        _model(), torch.optim.AdamW(_model().parameters()), accelerator="cpu"
    )


_BEGINNINGS: dict[str, Callable[[], None]] = {
    "an unknown setting": partial(_with, strateg="host_only"),
    "an unknown setting of a section": partial(_with, telemetry={"recoding": "off"}),
    "an unknown option of a strategy": partial(
        _with, strategy={"name": "interleaved", "shar": 0.5}
    ),
    "a budget that is too small": partial(_with, budget={"host": "8KiB", "device": "8MiB"}),
    "an optimizer of other parameters": _other_parameters,
}


def _said(use: Callable[[], object]) -> str:
    try:
        use()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def told() -> dict[str, str]:
    """Return what each wrong use is told, and the bits of an engine that has trained."""
    found = {name: _said(use) for name, use in _BEGINNINGS.items()}
    for name, use in _USES.items():
        with _opened() as engine:
            found[name] = _said(partial(use, engine))
    with _opened() as engine:
        for step in range(3):
            engine.backward(_loss(engine, step))
            engine.step()
        found["bits"] = digest_of(bits_of(engine))
    return found
