"""`load_pretrained` gives what `from_pretrained` gives, within a host budget, and refuses what is
not whole.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import infinity_engine
from deepnvme import write_safetensors
from infinity_engine.building.built import built_model_of
from infinity_engine.errors import CapacityError, ConfigError
from memory_group import GroupUnavailableError, memory_limited_group
from support.engine_bits import differing
from support.families import FAMILIES, saved, transformers
from support.nvme_programs import output_of, run_program
from support.unnamed_files import unnamed_files

transformers()
pytestmark = pytest.mark.usefixtures("deterministic")

LENGTH = 32
SHORT = ("llama", "mixtral", "t5")


@pytest.fixture
def drive(tmp_path: Path) -> Path:
    path = tmp_path / "drive"
    path.mkdir()
    return path


def budget(drive: Path, *, host: str = "64MiB", nvme: str = "64MiB") -> dict[str, Any]:
    return {"host": host, "nvme": {str(drive): nvme}}


def in_shards(model: Any, folder: Path) -> Path:
    """Save a model to several files."""
    model.save_pretrained(folder, max_shard_size="20KB")
    assert len(list(folder.glob("*.safetensors"))) > 1
    return folder


def llama(**changes: Any) -> Any:
    torch.manual_seed(0)
    config = transformers().LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        **changes,
    )
    return transformers().LlamaForCausalLM(config)


def whole(model: Any) -> Any:
    """Return the model with its values in ordinary memory."""
    built = built_model_of(model)
    assert built is not None
    built.whole()
    return model


def everything_of(model: Any) -> dict[str, torch.Tensor]:
    """Return parameters and buffers, those included that are not persistent, by all their names."""
    return {
        **{
            name: tensor.detach() for name, tensor in model.named_parameters(remove_duplicate=False)
        },
        **{name: tensor.detach() for name, tensor in model.named_buffers(remove_duplicate=False)},
    }


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        pytest.param(name, dtype, marks=[] if dtype in dtypes else pytest.mark.slow)
        for dtype in (torch.bfloat16, torch.float32)
        for name in FAMILIES
        # What differs by dtype is fused experts and what T5 keeps in fp32.
        for dtypes in [(torch.bfloat16, torch.float32) if name in SHORT else (torch.bfloat16,)]
    ],
    ids=str,
)
def test_every_tensor_and_the_logits_are_those_of_from_pretrained(
    name: str, dtype: torch.dtype, tmp_path: Path, drive: Path
) -> None:
    family = FAMILIES[name]
    kind = getattr(transformers(), family.model)
    given = saved(family, tmp_path / "given", length=LENGTH)
    folder = in_shards(kind.from_pretrained(given, dtype=dtype), tmp_path / "shards")
    expected = kind.from_pretrained(folder, dtype="auto")

    found = whole(infinity_engine.load_pretrained(folder, budget(drive)))

    assert type(found) is kind
    assert not found.training
    assert differing(everything_of(expected), everything_of(found)) == []
    assert tied(found) == tied(expected)
    assert gradients(found) == gradients(expected)
    assert found.config.to_dict() == expected.config.to_dict()
    assert found.name_or_path == expected.name_or_path == str(folder)
    if expected.can_generate():
        assert found.generation_config.to_dict() == expected.generation_config.to_dict()
    batch = {
        name: value.to(dtype) if value.is_floating_point() else value
        for name, value in family.batch(0, LENGTH).items()
    }
    with torch.no_grad():
        mine, theirs = found(**batch), expected(**batch)
    assert torch.equal(mine.loss, theirs.loss)
    outputs = {key: value for key, value in theirs.items() if isinstance(value, torch.Tensor)}
    assert len(outputs) > 1
    assert all(torch.equal(mine[key], value) for key, value in outputs.items())


def tied(model: Any) -> set[frozenset[str]]:
    """Return the names that are of one parameter, for each that has several."""
    names: dict[int, set[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), set()).add(name)
    return {frozenset(those) for those in names.values() if len(those) > 1}


def gradients(model: Any) -> dict[str, bool]:
    return {name: parameter.requires_grad for name, parameter in model.named_parameters()}


def test_an_engine_trains_the_model_from_the_drives(tmp_path: Path, drive: Path) -> None:
    folder = in_shards(llama(tie_word_embeddings=True).bfloat16(), tmp_path / "given")
    plain = transformers().LlamaForCausalLM.from_pretrained(folder, dtype="auto")
    tokens = torch.arange(16).repeat(2, 1)

    model = infinity_engine.load_pretrained(folder, budget(drive))
    with infinity_engine.initialize(
        model,
        "adamw",
        budget=budget(drive),
        strategy="nvme_streamed",
        parameters="nvme",
        accelerator="cpu",
        calibration="off",
    ) as engine:
        loss = engine(input_ids=tokens, labels=tokens).loss
        engine.backward(loss)

        assert torch.equal(loss, plain(input_ids=tokens, labels=tokens).loss)
        assert engine.step().outcome is infinity_engine.Outcome.UPDATED


def test_what_a_model_keeps_in_fp32_stays_so(tmp_path: Path, drive: Path) -> None:
    # T5 keeps its feed-forward output in fp32 where the rest is fp16.
    family = FAMILIES["t5"]
    folder = saved(family, tmp_path / "given", length=LENGTH)

    model = infinity_engine.load_pretrained(folder, budget(drive), dtype=torch.float16)

    kept = {name for name, value in model.named_parameters() if value.dtype == torch.float32}
    assert kept
    assert all(".wo." in name for name in kept)
    expected = getattr(transformers(), family.model).from_pretrained(folder, dtype=torch.float16)
    assert differing(everything_of(expected), everything_of(whole(model))) == []


def test_auto_takes_the_dtype_of_the_files_where_the_configuration_names_none(
    tmp_path: Path, drive: Path
) -> None:
    folder = in_shards(llama().bfloat16(), tmp_path / "given")
    changed(folder / "config.json", lambda config: config.pop("dtype"))

    model = infinity_engine.load_pretrained(folder, budget(drive))

    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}


def test_another_class_can_be_asked_for(tmp_path: Path, drive: Path) -> None:
    folder = in_shards(llama(), tmp_path / "given")

    for asked in (transformers().AutoModel, transformers().LlamaModel):
        model = infinity_engine.load_pretrained(folder, budget(drive), model_class=asked)
        assert type(model) is transformers().LlamaModel
    expected = transformers().LlamaModel.from_pretrained(folder)
    assert differing(everything_of(expected), everything_of(whole(model))) == []


def test_the_settings_of_generation_are_the_directorys(tmp_path: Path, drive: Path) -> None:
    model = llama()
    model.generation_config.max_new_tokens = 7
    folder = in_shards(model, tmp_path / "given")

    found = infinity_engine.load_pretrained(folder, budget(drive))

    assert found.generation_config.max_new_tokens == 7


def test_transformers_reads_ahead_again_after_a_load(
    tmp_path: Path, drive: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = in_shards(llama(), tmp_path / "given")
    for before in (None, "0"):
        if before is not None:
            monkeypatch.setenv("HF_DEACTIVATE_ASYNC_LOAD", before)
        infinity_engine.load_pretrained(folder, budget(drive))
        assert os.environ.get("HF_DEACTIVATE_ASYNC_LOAD") == before


# --- what is refused ------------------------------------------------------------------------------


def changed(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def rewrite(file: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    from safetensors.torch import load_file, save_file

    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, metadata={"format": "pt"})


def refused(folder: Path, drive: Path, match: str, **settings: Any) -> None:
    with pytest.raises(ConfigError, match=match):
        infinity_engine.load_pretrained(folder, budget(drive), **settings)
    assert unnamed_files(drive) == []


def test_a_name_on_a_hub_is_not_looked_up(drive: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_network(*_: object, **__: object) -> None:
        raise AssertionError("the network was asked")

    monkeypatch.setattr("socket.getaddrinfo", no_network)
    monkeypatch.setattr("socket.socket.connect", no_network)

    refused(Path("openai/a-model"), drive, "directory on this machine.*download the model first")


def test_missing_shards_are_named(tmp_path: Path, drive: Path) -> None:
    folder = in_shards(llama(), tmp_path / "given")
    gone = sorted(folder.glob("*.safetensors"))[1]
    gone.unlink()

    refused(folder, drive, f"1 missing: {gone.name}")


def test_an_index_of_other_files_is_refused(tmp_path: Path, drive: Path) -> None:
    folder = in_shards(llama(), tmp_path / "given")
    first = sorted(folder.glob("*.safetensors"))[0].name
    index = folder / "model.safetensors.index.json"
    changed(index, lambda content: content["weight_map"].update({"model.norm.weight": first}))

    refused(folder, drive, "tensors that are not there: model.norm.weight")


@pytest.mark.parametrize(
    "content", ["{", "[]", '{"weight_map": {}}', '{"weight_map": {"a": "../b.safetensors"}}']
)
def test_an_index_without_a_map_is_refused(content: str, tmp_path: Path, drive: Path) -> None:
    folder = in_shards(llama(), tmp_path / "given")
    (folder / "model.safetensors.index.json").write_text(content)

    refused(folder, drive, "an index with a weight_map")


def test_a_file_that_was_cut_short_is_refused(tmp_path: Path, drive: Path) -> None:
    folder = in_shards(llama(), tmp_path / "given")
    file = sorted(folder.glob("*.safetensors"))[0]
    os.truncate(file, file.stat().st_size - 8)

    refused(folder, drive, f"{file.name}.*expected a safetensors file|a safetensors file")


def test_missing_tensors_are_listed(tmp_path: Path, drive: Path) -> None:
    folder = tmp_path / "given"
    llama().save_pretrained(folder)
    gone = ("model.norm.weight", "model.layers.1.mlp.up_proj.weight")
    rewrite(folder / "model.safetensors", lambda tensors: [tensors.pop(name) for name in gone])

    refused(folder, drive, "2 missing: model.layers.1.mlp.up_proj.weight, model.norm.weight")


def test_a_tensor_of_another_shape_is_named(tmp_path: Path, drive: Path) -> None:
    folder = tmp_path / "given"
    llama().save_pretrained(folder)
    rewrite(
        folder / "model.safetensors",
        lambda tensors: tensors.update({"model.norm.weight": torch.ones(31)}),
    )

    refused(folder, drive, r"model.norm.weight of shape \(31,\) instead of \(32,\)")


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"model_type": "of_next_year"}, "model_type.*of_next_year"),
        ({"architectures": ["LlamaForNothing"]}, "architectures.*LlamaForNothing"),
        ({"architectures": ["set_seed"]}, "architectures.*set_seed"),
        ({"architectures": None}, "architectures"),
        (
            {"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}},
            "none, or nf4 of bitsandbytes",
        ),
    ],
)
def test_what_transformers_does_not_have_is_refused(
    change: dict[str, Any], match: str, tmp_path: Path, drive: Path
) -> None:
    folder = in_shards(llama(), tmp_path / "given")
    changed(folder / "config.json", lambda config: config.update(change))

    refused(folder, drive, match)


def test_a_directory_without_configuration_or_weights_is_refused(
    tmp_path: Path, drive: Path
) -> None:
    folder = tmp_path / "given"
    folder.mkdir()
    refused(folder, drive, "a config.json with a model_type")

    llama().config.save_pretrained(folder)
    changed(folder / "config.json", lambda c: c.update(architectures=["LlamaForCausalLM"]))
    refused(folder, drive, "there is config.json; *|model.safetensors")


@pytest.mark.timeout(60)
def test_a_pipe_is_refused_as_a_configuration_unopened(tmp_path: Path, drive: Path) -> None:
    os.mkfifo(tmp_path / "config.json")
    refused(tmp_path, drive, "not a regular file")


def test_a_directory_of_adapters_is_refused(tmp_path: Path, drive: Path) -> None:
    folder = in_shards(llama(), tmp_path / "given")
    (folder / "adapter_config.json").write_text("{}")

    refused(folder, drive, "which has adapters")


def test_a_budget_without_room_is_refused(tmp_path: Path, drive: Path) -> None:
    folder = in_shards(llama(), tmp_path / "given")

    with pytest.raises(CapacityError, match="nvme"):
        infinity_engine.load_pretrained(folder, budget(drive, nvme="64KiB"))
    assert unnamed_files(drive) == []


# --- memory ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def zeros(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A saved Llama of 0.3 GB."""
    return saved_zeros(tmp_path_factory.mktemp("zeros"))


LOADS_WITHIN = """
import sys
from pathlib import Path

import torch
import transformers

import infinity_engine

def bytes_of(kind):
    line = next(l for l in open("/proc/self/status") if l.startswith(kind))
    return int(line.split()[1]) << 10

small, large, drive, host, nvme, compact = sys.argv[1:]
transformers.logging.disable_progress_bar()
# Whatever is imported and started at the first load is no part of the second one's peak.
form = {"compact": compact} if compact else {}
infinity_engine.load_pretrained(small, {"host": host, "nvme": {drive: "64MiB"}}, **form)
before = bytes_of("VmRSS")
Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
model = infinity_engine.load_pretrained(large, {"host": host, "nvme": {drive: nvme}}, **form)
print(sum(p.numel() * p.element_size() for p in model.parameters()), bytes_of("VmHWM") - before)
"""


@pytest.mark.parametrize(
    ("compact", "nvme"),
    # The weights in full have no room on the drives where they are made compact.
    [("", 512 << 20), ("nf4", 128 << 20)],
)
def test_a_load_keeps_to_the_host_budget_in_a_small_memory_group(
    compact: str, nvme: int, zeros: Path, tmp_path: Path, drive: Path
) -> None:
    llama().save_pretrained(tmp_path / "small")
    host = 64 << 20

    try:
        # The model and what a Python with Transformers takes do not fit into it together.
        with memory_limited_group(448 << 20) as group:
            output = output_of(
                run_program(
                    LOADS_WITHIN,
                    tmp_path / "small",
                    zeros,
                    drive,
                    host,
                    nvme,
                    compact,
                    folder=tmp_path,
                    launcher=group.launcher,
                )
            )
    except GroupUnavailableError as reason:
        pytest.skip(str(reason))

    model, peak = map(int, output.split())
    assert model > (1 if compact else 4) * host
    assert model <= nvme
    assert peak <= host


def saved_zeros(folder: Path) -> Path:
    """Save a Llama of 0.3 GB, without making it."""
    config = transformers().LlamaConfig(
        vocab_size=8192,
        hidden_size=1024,
        intermediate_size=2816,
        num_hidden_layers=12,
        num_attention_heads=8,
        tie_word_embeddings=True,
        dtype="bfloat16",
        architectures=["LlamaForCausalLM"],
    )
    config.save_pretrained(folder)
    with torch.device("meta"):
        model = transformers().LlamaForCausalLM(config).bfloat16()
    names = [name for name, _ in model.named_parameters()]
    index = {}
    for first in range(0, len(names), 32):
        file = f"model-{first}.safetensors"
        shard = names[first : first + 32]
        write_safetensors(
            folder / file,
            {
                name: torch.zeros(model.get_parameter(name).shape, dtype=torch.bfloat16)
                for name in shard
            },
        )
        index.update(dict.fromkeys(shard, file))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    return folder
