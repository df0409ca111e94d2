"""A local directory of Transformers as a model to train: tokenizer, model, adapters, saving.

Loads nothing from a network and runs no code of the directory. Called by `training`.
"""

from __future__ import annotations

import json
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer

from deepnvme import safetensors_header
from infinity_engine.engine.engine import Engine
from infinity_engine.engine.init_context import load_pretrained
from infinity_engine.errors import ConfigError
from infinity_engine.plan import Budget
from infinity_engine.progress import Progress

__all__ = [
    "DirectoryTokenizer",
    "load_language_model",
    "load_tokenizer",
    "most_positions",
    "quiet",
    "save_weights",
    "state_dtype",
    "tokenizer_files",
    "vocabulary_of",
]

_TOKENIZERS = ("tokenizer*", "*.model", "vocab.*", "merges.txt", "special_tokens_map.json")
_DTYPES = MappingProxyType({"F32": "float32", "BF16": "bfloat16", "F16": "float16"})


def quiet() -> None:
    """Let Transformers print errors alone, and no bars."""
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()


# --- the tokenizer --------------------------------------------------------------------------------


class DirectoryTokenizer:
    """The tokenizer of a model's directory."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        alone = tokenizer("", verbose=False)["input_ids"]
        # Only where the tokenizer puts it there by itself.
        begin = tokenizer.bos_token_id
        self.begin: int | None = begin if alone[:1] == [begin] else None
        """The token before a document, where the tokenizer has one."""
        self.end: int | None = tokenizer.eos_token_id
        """The token after a document, where the tokenizer has one."""
        known = (tokenizer.pad_token_id, self.end, 0)
        self.pad: int = next(token for token in known if token is not None)
        """A token that stands where there is none."""

    def tokens_of(self, texts: Sequence[str]) -> Sequence[Sequence[int]]:
        """Return the tokens of each text, without those that begin or end a document."""
        if not texts:
            return []
        found: Sequence[Sequence[int]] = self._tokenizer(
            list(texts), add_special_tokens=False, return_attention_mask=False, verbose=False
        )["input_ids"]
        return found

    def save(self, folder: Path) -> None:
        """Write it beside a model's weights."""
        self._tokenizer.save_pretrained(folder)


def tokenizer_files(directory: Path) -> list[Path]:
    """Return the files that decide what tokens a text has.

    Raises:
        ConfigError: there are none.
    """
    found = {path for pattern in _TOKENIZERS for path in directory.glob(pattern) if path.is_file()}
    if not found:
        expected = (
            "a directory with the tokenizer's files, such as tokenizer.json: save them there with "
            "tokenizer.save_pretrained(directory)"
        )
        raise ConfigError(
            field="model", value=f"{directory}, without a tokenizer", expected=expected
        )
    return sorted(found)


def load_tokenizer(directory: Path) -> DirectoryTokenizer:
    """Return the tokenizer of a local directory.

    Raises:
        ConfigError: it has none, or one that cannot be read.
    """
    tokenizer_files(directory)
    try:
        return DirectoryTokenizer(AutoTokenizer.from_pretrained(directory, local_files_only=True))
    # Transformers and its libraries raise many kinds, for files in many formats.
    except Exception as error:
        expected = f"a directory with a tokenizer that Transformers reads ({_short(error)})"
        raise ConfigError(field="model", value=str(directory), expected=expected) from error


# --- the model ------------------------------------------------------------------------------------


def load_language_model(
    directory: Path,
    *,
    budget: Budget,
    lora: int | None,
    checkpointing: bool,
    progress: Callable[[Progress], object] | None,
) -> Any:
    """Return the model of a local directory, in its own dtype, with adapters of rank `lora`.

    With drives in the budget, its parameters go there as they are loaded, and host memory does not
    grow with the model.

    Raises:
        ConfigError: it is no causal language model, weights are missing, or peft cannot adapt it.
        CapacityError: the budget has no room for it.
    """
    if budget.nvme:
        model = load_pretrained(
            directory, budget, model_class=AutoModelForCausalLM, progress=progress
        )
    else:
        model = _load(directory)
    if lora is not None:
        model = _with_adapters(model, lora)
    if checkpointing and getattr(model, "supports_gradient_checkpointing", False):
        _recompute(model)
    model.train()
    return model


def _recompute(model: Any) -> None:
    """Let blocks compute their activations again in the backward."""
    how = {"use_reentrant": False}
    # Transformers 5.23 has given the method another name, and warns of the old one.
    if hasattr(model, "activation_checkpointing_enable"):
        model.activation_checkpointing_enable(how)
    else:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=how)


def _load(directory: Path) -> Any:
    # Transformers would take what is no directory for a name in its hub.
    if not (directory / "config.json").is_file():
        expected = "a directory of Transformers, with a config.json"
        raise ConfigError(field="model", value=str(directory), expected=expected)
    try:
        model, info = AutoModelForCausalLM.from_pretrained(
            directory, dtype="auto", local_files_only=True, output_loading_info=True
        )
    except (OSError, ValueError, KeyError) as error:
        expected = f"a causal language model that Transformers reads ({_short(error)})"
        raise ConfigError(field="model", value=str(directory), expected=expected) from error
    # Transformers would go on with random values in their place.
    absent = sorted(
        str(name) for kind in ("missing_keys", "mismatched_keys") for name in info[kind]
    )
    if absent:
        shown = ", ".join(absent[:5]) + (f" and {len(absent) - 5} more" if len(absent) > 5 else "")
        expected = f"weights for all of the model: {len(absent)} are missing ({shown})"
        raise ConfigError(field="model", value=str(directory), expected=expected)
    return model


def _with_adapters(model: Any, rank: int) -> Any:
    if find_spec("peft") is None:
        expected = "no adapters, as peft is not installed: pip install peft"
        raise ConfigError(field="lora", value=rank, expected=expected)
    import peft

    # Adapters are multiplied by alpha / rank: twice the rank is what most people choose.
    config = peft.LoraConfig(
        r=rank, lora_alpha=2 * rank, target_modules="all-linear", task_type="CAUSAL_LM"
    )
    try:
        with warnings.catch_warnings():
            # peft asks Transformers by a name that this will give up.
            warnings.filterwarnings("ignore", "`is_gradient_checkpointing`", FutureWarning)
            return peft.get_peft_model(model, config)
    except ValueError as error:
        expected = f"no adapters for this model ({_short(error)})"
        raise ConfigError(field="lora", value=rank, expected=expected) from error


def vocabulary_of(model: Any) -> int:
    """Return how many tokens a model knows."""
    return int(model.get_input_embeddings().weight.shape[0])


def most_positions(model: Any) -> int | None:
    """Return how long a sequence may be; None: as long as memory allows."""
    found = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    return found if isinstance(found, int) and found > 0 else None


def _short(error: Exception) -> str:
    """Return the first line of an error: Transformers appends advice about its hub."""
    text = str(error).strip()
    return text.splitlines()[0][:200] if text else type(error).__name__


# --- saving ---------------------------------------------------------------------------------------


def save_weights(
    engine: Engine,
    tokenizer: DirectoryTokenizer,
    folder: Path,
    *,
    base: Path,
    dtype: str | None,
) -> None:
    """Write what `from_pretrained` reads: weights, configuration and tokenizer.

    Of adapters, these alone: their base is the model in the directory `base`.
    """
    model: Any = engine.module
    tokenizer.save(folder)
    if hasattr(model, "peft_config"):
        # peft picks the adapters out of a state dict, which is small.
        adapters = _adapters(engine, dtype)
        model.save_pretrained(folder, state_dict=adapters, save_embedding_layers=False)
        # The model does not know its directory where the engine has read its files.
        stated = {"base_model_name_or_path": str(base.absolute())}
        _change_json(folder / "adapter_config.json", stated)
        return
    files = engine.export(folder, dtype=dtype)
    model.config.save_pretrained(folder)
    state_dtype(folder, files)
    generation: Any = getattr(model, "generation_config", None)
    if generation is not None:
        generation.save_pretrained(folder)


def _adapters(engine: Engine, dtype: str | None) -> dict[str, torch.Tensor]:
    """Return what is trained, in a dtype by its name: fp32 of the masters; None: as it is."""
    found = engine.trainable_state_dict()
    if dtype is None:
        return found
    wanted: torch.dtype = getattr(torch, dtype)
    for name, parameter in engine.module.named_parameters(remove_duplicate=False):
        if name in found and found[name].dtype != wanted:
            found[name] = torch.as_tensor(engine.state_of(parameter)["master"]).to(wanted)
    return found


def state_dtype(folder: Path, files: Sequence[Path]) -> None:
    """Let a saved configuration state the dtype of the weights in `files`.

    Loading with dtype="auto" reads it: of a model that computes in another dtype than it had.
    """
    written = _dtype_in(files)
    _change_json(folder / "config.json", {} if written is None else {"dtype": written})


def _dtype_in(files: Sequence[Path]) -> str | None:
    """Return the dtype that most elements in the files have."""
    counts: Counter[str] = Counter()
    for path in files:
        if path.suffix == ".safetensors":
            for entry in safetensors_header(path).tensors.values():
                counts[entry.dtype] += int(torch.Size(entry.shape).numel())
    return _DTYPES.get(counts.most_common(1)[0][0]) if counts else None


def _change_json(path: Path, values: Mapping[str, object]) -> None:
    given = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps({**given, **values}, indent=2, sort_keys=True) + "\n")
