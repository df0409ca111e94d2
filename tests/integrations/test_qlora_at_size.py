"""QLoRA on a streamed base keeps to its host budget, and has the losses of the plain model.

The plain model is in memory in full, with the same rounded weights and the same adapters. Both run
in processes of their own, which say how long they took and what they held.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from deepnvme import write_safetensors
from support.families import peft, transformers
from support.nvme_programs import output_of
from support.warm_programs import run_warm

peft()

TRAINS = """
import json
import sys
import time
from pathlib import Path

import peft
import torch
import transformers

import infinity_engine
from infinity_engine.compact import CompactKind, CompactLinear

way, small, large, drive, host, length = sys.argv[1:]
transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()


def bytes_of(kind):
    line = next(l for l in open("/proc/self/status") if l.startswith(kind))
    return int(line.split()[1]) << 10


def adapted(base):
    config = peft.LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM")
    model = peft.get_peft_model(base, config).train()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    generator = torch.Generator().manual_seed(1)
    for parameter in trained:
        # peft itself rounds adapters of a base in bf16, and others not.
        values = torch.randn(parameter.shape, generator=generator).mul(0.02).bfloat16()
        parameter.data.copy_(values)
    return model, torch.optim.AdamW(trained, lr=1e-3)


def batch(step, config):
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(config.vocab_size, (1, int(length)), generator=generator)
    return {"input_ids": tokens, "labels": tokens}


def streamed(folder):
    budget = {"host": int(host), "nvme": {drive: "2GiB"}}
    base = infinity_engine.load_pretrained(folder, budget, compact="nf4")
    model, optimizer = adapted(base)
    engine = infinity_engine.initialize(
        model,
        optimizer,
        budget=budget,
        strategy="nvme_streamed",
        parameters="nvme",
        accelerator="cpu",
        calibration="off",
    )
    losses = []
    for step in range(2):
        loss = engine(**batch(step, base.config)).loss
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    held = bytes_of("VmHWM")
    engine.close(restore=False)
    return losses, held


def plain(folder):
    base = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    for name, layer in base.named_modules():
        if type(layer) is torch.nn.Linear and name != "lm_head":
            rounded = CompactLinear.of(layer, CompactKind.NF4).expanded(layer.weight.dtype)
            layer.weight.data.copy_(rounded)
    model, optimizer = adapted(base)
    losses = []
    for step in range(2):
        loss = model(**batch(step, base.config)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, bytes_of("VmHWM")


train = {"streamed": streamed, "plain": plain}[way]
# What is imported and started by the first run is no part of the second one's peak.
train(small)
before = bytes_of("VmRSS")
Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
start = time.monotonic()
losses, held = train(large)
seconds = time.monotonic() - start
print(json.dumps({"losses": losses, "held": held - before, "seconds": seconds}))
"""


@dataclass(frozen=True, kw_only=True)
class Size:
    """A Llama, and the memory that its training may take."""

    hidden: int
    inner: int
    layers: int
    vocabulary: int
    host: int
    activations: int
    """What a forward and a backward hold of their own, which no host budget counts."""

    def config(self) -> Any:
        return transformers().LlamaConfig(
            vocab_size=self.vocabulary,
            hidden_size=self.hidden,
            intermediate_size=self.inner,
            num_hidden_layers=self.layers,
            num_attention_heads=self.hidden // 64,
            eos_token_id=None,
            dtype="bfloat16",
            architectures=["LlamaForCausalLM"],
        )


TINY = Size(hidden=64, inner=128, layers=2, vocabulary=64, host=64 << 20, activations=0)
SIZES = {
    "small": Size(
        hidden=256, inner=704, layers=4, vocabulary=1024, host=64 << 20, activations=64 << 20
    ),
    "a billion": Size(
        hidden=2048, inner=5632, layers=22, vocabulary=32000, host=512 << 20, activations=256 << 20
    ),
}


@pytest.mark.parametrize(
    "size",
    [
        pytest.param("small", id="small"),
        pytest.param("a billion", marks=[pytest.mark.slow, pytest.mark.timeout(3600)], id="1B"),
    ],
)
def test_losses_are_those_of_the_plain_model_within_the_host_budget(
    size: str, tmp_path: Path, record_property: Any
) -> None:
    sizes = SIZES[size]
    small, large = saved(TINY, tmp_path / "small"), saved(sizes, tmp_path / "large")
    found = {}
    for way in ("streamed", "plain"):
        drive = tmp_path / f"{way}-drive"
        drive.mkdir()
        output = output_of(
            run_warm(
                TRAINS,
                *(way, small, large, drive, sizes.host, 32),
                folder=tmp_path,
                imported=("peft", "transformers.models.llama.modeling_llama"),
                timeout_s=1800,
            )
        )
        found[way] = json.loads(output.splitlines()[-1])
        record_property(way, found[way])
        print(way, found[way])

    # Products in bf16 have the same bits; torch and the engine round AdamW's steps otherwise.
    assert found["streamed"]["losses"] == pytest.approx(found["plain"]["losses"], rel=1e-4)
    assert found["streamed"]["held"] <= sizes.host + sizes.activations


def saved(size: Size, folder: Path) -> Path:
    """Save a Llama with random weights, one tensor at a time."""
    config = size.config()
    config.save_pretrained(folder)
    with torch.device("meta"):
        model = transformers().LlamaForCausalLM(config)
    generator = torch.Generator().manual_seed(0)
    index = {}
    for number, (name, parameter) in enumerate(model.named_parameters()):
        values = torch.ones(parameter.shape, dtype=torch.bfloat16)
        if values.dim() == 2:
            values.normal_(std=0.02, generator=generator)
        file = f"model-{number}.safetensors"
        write_safetensors(folder / file, {name: values}, metadata={"format": "pt"})
        index[name] = file
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": index})
    )
    return folder
