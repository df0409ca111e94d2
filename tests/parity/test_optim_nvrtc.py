"""The GPU's kernels compile by NVRTC from the CPU's text, for the architectures we mean, into exact
instructions.
"""

from __future__ import annotations

import platform
import re
from typing import Any

import pytest

from infinity_engine import _native
from infinity_engine.errors import MissingDependencyError
from infinity_engine.optim.nvrtc import FLAGS, KERNELS, Compiled, compile_kernels, cupy_nvrtc
from support.nvrtc import WheelNvrtc

pytestmark = pytest.mark.skipif(
    platform.machine() != "x86_64", reason="NVRTC's wheel is installed on x86-64 alone"
)


@pytest.fixture(scope="module")
def nvrtc() -> WheelNvrtc:
    return WheelNvrtc()


@pytest.fixture(scope="module", params=["sm_80", "sm_90"])
def compiled(request: pytest.FixtureRequest, nvrtc: WheelNvrtc) -> Compiled:
    return compile_kernels(nvrtc, request.param)


def test_all_kernels_are_there(compiled: Compiled) -> None:
    assert set(re.findall(r"\.entry (\w+)\(", compiled.ptx)) == set(KERNELS)
    assert compiled.cubin[:4] == b"\x7fELF"


def test_every_floating_point_instruction_is_rounded_to_nearest_even(compiled: Compiled) -> None:
    computing = set(
        re.findall(
            r"\b(?:add|sub|mul|div|sqrt|fma|mad|rcp|rsqrt)\.[\w.]*f(?:32|64)\b", compiled.ptx
        )
    )

    assert computing >= {
        "add.rn.f32",
        "mul.rn.f32",
        "div.rn.f32",
        "sqrt.rn.f32",
        "fma.rn.f32",
        "add.rn.f64",
    }
    assert {instruction for instruction in computing if ".rn." not in instruction} == set()


def test_what_flushes_subnormals_is_refused(nvrtc: WheelNvrtc) -> None:
    class Cupys(WheelNvrtc):
        """As cupy's own compilation: with -ftz=true behind our flags."""

        def compileProgram(self, program: Any, options: Any) -> None:  # noqa: N802
            wanted = [option for option in options if "ftz" not in option]
            super().compileProgram(program, (*wanted, "--ftz=true"))

    with pytest.raises(RuntimeError, match=r"\.ftz"):
        compile_kernels(Cupys(), "sm_80")


def test_what_does_not_compile_is_refused_with_the_compilers_words(
    nvrtc: WheelNvrtc, monkeypatch: Any
) -> None:
    monkeypatch.setattr(_native, "sources", lambda: {"kernels.cu": "#error no such kernel"})

    with pytest.raises(RuntimeError, match="no such kernel"):
        compile_kernels(nvrtc, "sm_80")


def test_the_text_is_that_of_the_headers_and_stands_alone() -> None:
    sources = _native.sources()

    included = {
        name for text in sources.values() for name in re.findall(r'#include\s*[<"]([^>"]+)', text)
    }
    assert included | {"kernels.cu"} == set(sources)


def test_the_flags_are_those_of_the_decision() -> None:
    assert {"--ftz=false", "--prec-div=true", "--prec-sqrt=true", "--fmad=false"} <= set(FLAGS)


def test_without_cupy_what_to_install_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "cupy", None)

    with pytest.raises(MissingDependencyError, match=r"infinity-engine\[cuda\]"):
        cupy_nvrtc()
