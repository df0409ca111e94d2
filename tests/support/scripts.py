"""The programs of scripts/, which have no .py ending, as modules."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import sys
from typing import Any

import pytest

import env

__all__ = ["load_script"]


def load_script(path: str) -> Any:
    """Return a new module made of that file of scripts/, such as "bench/startup"; leave no bytecode
    beside it.
    """
    name = f"scripts.{path.replace('/', '.')}"
    loader = importlib.machinery.SourceFileLoader(name, str(env.ROOT / "scripts" / path))
    spec = importlib.util.spec_from_loader(name, loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(sys, "dont_write_bytecode", True)
        patched.setitem(sys.modules, name, module)  # where its dataclasses look for names
        loader.exec_module(module)
    return module
