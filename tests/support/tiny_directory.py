"""A directory of Transformers with a tiny Llama and its tokenizer, and files to train it on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from support.families import transformers

__all__ = ["LINES", "TEXT", "json_lines", "tiny_directory"]

TEXT = "".join(f"the {animal} sat on the mat and saw a {animal}\n" for animal in "abcdefgh" * 4)
LINES = [{"prompt": f"count {number}:", "completion": f" {number + 1}"} for number in range(12)]


def tiny_directory(folder: Path, *, dtype: Any = torch.float32, **options: Any) -> Path:
    """Return the directory of a Llama of two layers, always with the same values."""
    tokenizers = pytest.importorskip("tokenizers", reason="it makes the model's tokenizer")
    torch.manual_seed(0)
    config = transformers().LlamaConfig(
        **{
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "vocab_size": 259,
            "max_position_embeddings": 128,
            "bos_token_id": None,
            "eos_token_id": 256,
            **options,
        }
    )
    model = transformers().LlamaForCausalLM(config).to(dtype)
    model.save_pretrained(folder)
    # One token for each byte, and one for the end of a document: nothing is learned.
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {**{letter: number for number, letter in enumerate(alphabet)}, "<end>": 256}
    made = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, []))
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    fast = transformers().PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<end>")
    fast.save_pretrained(folder)
    return folder


def json_lines(path: Path, rows: list[Any]) -> Path:
    """Write JSON lines; return the file."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path
