"""The ids by which scripts know findings.

Frozen: a new finding adds its id here, and an id is never used again.
"""

from __future__ import annotations

import ast
import inspect
import re
from types import ModuleType

import pytest

from deepnvme.machine import diagnosis
from infinity_engine.machine import diagnose

STORAGE = {
    "direct-io-refused",
    "directory-in-memory",
    "directory-is-a-file",
    "directory-missing",
    "directory-not-writable",
    "directory-read-only",
    "directory-unusable",
    "drive-full",
    "drive-rotating",
    "drive-virtual-rotating",
    "huge-pages-off",
    "io-uring-unavailable",
    "io-uring-without-deferral",
    "memlock-limit-low",
    "mounted-with-discard",
    "python-liburing-unusable",
    "quota-used-up",
}
ENGINE = {
    "cpu-quota",
    "cupy-missing",
    "gpu-lanes-missing",
    "gpu-missing",
    "gpus-hidden",
    "half-precision-slow",
    "memory-limit",
    "native-modules-not-loaded",
    "platform-unsupported",
    "simd-level-impossible",
    "simd-lowered",
    "simd-missing",
    "torch-cuda-too-new",
    "torch-missing",
    "torch-too-old",
    "torch-without-cuda",
}
SUBJECTS = {"python-liburing"}  # written like an id, and none


@pytest.mark.parametrize(("module", "ids"), [(diagnosis, STORAGE), (diagnose, ENGINE)])
def test_the_ids_of_findings_are_the_frozen_ones(module: ModuleType, ids: set[str]) -> None:
    constants = {
        node.value
        for node in ast.walk(ast.parse(inspect.getsource(module)))
        if isinstance(node, ast.Constant)
    }

    assert {
        text for text in constants if re.fullmatch(r"[a-z]+(-[a-z]+)+", str(text))
    } - SUBJECTS == ids


def test_no_id_means_two_things() -> None:
    assert set() == STORAGE & ENGINE
