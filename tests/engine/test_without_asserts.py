"""The engine under `python -O`: what it tells and what it trains need no asserts. One process does
all of it.
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from infinity_engine.plan import HostOnly
from support.determinism import deterministic_compute
from support.nvme_programs import output_of, run_program
from support.nvme_training import STREAMED, digest_of, trained
from support.warm_programs import WITH_SUPPORT
from support.wrong_uses import told

# Only the engine and what tests share run without asserts: to compile all of torch so takes longer
# than all the rest.
WITH_LIBRARIES_AS_COMPILED = """
import _frozen_importlib_external as imports

compiled_file = imports.cache_from_source

def as_compiled(path, *given, **options):
    if "site-packages" in path:
        options["optimization"] = ""
    return compiled_file(path, *given, **options)

imports.cache_from_source = as_compiled
"""
PROGRAM = """
import io, json, sys
from contextlib import redirect_stderr
from pathlib import Path

import torch
import infinity_engine
from infinity_engine.accel import Emulation, emulated_accelerator
from infinity_engine.plan import Rates
from support.determinism import deterministic_compute
from support.nvme_training import STREAMED, digest_of, trained
from support.wrong_uses import told

rates = Rates(h2d_bytes_per_s=1e9, d2h_bytes_per_s=1e9, host_update_params_per_s=1e8,
    device_update_params_per_s=1e9)
torch.set_num_threads(1)

def states(**settings):
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(4)))
    optimizer = torch.optim.AdamW(model.parameters())
    with infinity_engine.initialize(model, optimizer, update_threads=1, **settings) as engine:
        for _ in range(3):
            engine.backward(engine(torch.ones(2, 8)).pow(2).mean())
            engine.step()
        return engine.state_dict()

with redirect_stderr(io.StringIO()) as said:
    with emulated_accelerator(Emulation(rates=rates, capacity_bytes=1 << 20)) as device:
        budget = {"host": "16MiB", "device": 5 * 1024}
        fetched = states(device=device, parameters="host", strategy="host_only", budget=budget)
    plain = states(accelerator="cpu", budget={"host": "16MiB"})
print(json.dumps({
    "asserts": __debug__,
    "said": said.getvalue(),
    "unlike": [name for name in plain if not torch.equal(plain[name], fetched[name])],
}))
with deterministic_compute():
    print(json.dumps(told()))
    print(digest_of(trained(STREAMED, None, Path(sys.argv[1])).bits))
"""


@pytest.fixture(scope="module")
def printed(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("without-asserts")
    # -B: what is compiled without asserts is not written where it has them
    run = run_program(
        WITH_LIBRARIES_AS_COMPILED + PROGRAM,
        folder,
        folder=folder,
        python=["-O", "-B"],
        environment=WITH_SUPPORT,
        timeout_s=240,
    )
    return output_of(run).splitlines()


def test_fetched_parameters_are_trained_to_the_same_bits(printed: list[str]) -> None:
    fetched: dict[str, Any] = json.loads(printed[0])

    assert not fetched["asserts"]
    assert fetched["unlike"] == []
    assert fetched["said"] == ""


def test_wrong_uses_are_told_the_same(printed: list[str]) -> None:
    without = json.loads(printed[1])

    with deterministic_compute():
        assert without == told()
    assert "nothing" not in without.values()


def test_training_from_drives_comes_to_the_same_bits(printed: list[str]) -> None:
    in_memory = replace(STREAMED, host="256MiB", parameters="auto", strategy=HostOnly())

    with deterministic_compute():
        assert printed[2] == digest_of(trained(in_memory, None, None).bits)
