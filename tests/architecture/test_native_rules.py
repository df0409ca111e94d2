"""The rules of the native sources: what each folder may include, and that nothing prints or ends
the process.

Each rule runs on the project, where it must find nothing, and on planted violations, which it must
find.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SUFFIXES = {".c", ".cc", ".cpp", ".cu", ".cuh", ".h", ".hpp", ".inl"}
COMMENTS_AND_STRINGS = re.compile(
    r'//[^\n]*|/\*.*?\*/|(?<!include )(?<!include)"(?:\\.|[^"\\\n])*"', re.DOTALL
)

# What must not appear, the folders of native/ it is looked for in, and why.
RULES = (
    (
        r'#\s*include\s*[<"](pybind11/|Python\.h)',
        ("nvme", "optim", "tests"),
        "only bindings/ knows Python",
    ),
    (
        r'#\s*include\s*[<"](torch/|ATen/|c10/|cuda/|cuda\w*\.h|cupti|nvml\.h|nccl|liburing(\.h|/)|libaio\.h)',
        ("nvme", "optim", "bindings", "tests"),
        "built without torch, CUDA, liburing or libaio",
    ),
    (
        r"(?<![\w.>])(?:std::)?(?:v?f?printf|f?puts|perror)\s*\(|\bstd::(?:cout|cerr|clog|print(?:ln)?)\b",
        ("nvme", "optim"),
        "the core never prints",
    ),
    (
        r"(?<![\w.>])(?:std::|::)?(?:abort|_?_?exit|_Exit|quick_exit|terminate|assert)\s*\(",
        ("nvme", "optim"),
        "the core never ends the process",
    ),
)


def violations(root: Path) -> Iterator[str]:
    """Yield every line of `root`/native that breaks a rule; comments and strings do not count."""
    for path in sorted(path for path in (root / "native").rglob("*") if path.suffix in SUFFIXES):
        code = COMMENTS_AND_STRINGS.sub(lambda found: "\n" * found[0].count("\n"), path.read_text())
        for number, line in enumerate(code.splitlines(), start=1):
            for pattern, folders, why in RULES:
                if path.relative_to(root).parts[1] in folders and re.search(pattern, line):
                    yield f"{path.relative_to(root)}:{number}: {why}: {line.strip()}"


def test_the_native_sources_keep_the_rules() -> None:
    assert (ROOT / "native" / "CMakeLists.txt").exists()
    assert list(violations(ROOT)) == []


@pytest.mark.parametrize(
    ("folder", "line"),
    [
        ("nvme/include", "#include <pybind11/pybind11.h>"),
        ("optim", "#  include <Python.h>"),
        ("bindings", '#include "torch/extension.h"'),
        ("bindings", "#include <cuda_runtime.h>"),
        ("nvme/src", "#include <liburing.h>"),
        ("tests", "#include <libaio.h>"),
        ("nvme/src", 'std::printf("%d", depth);'),
        ("nvme/src", 'fprintf(stderr, "/* here");'),
        ("optim", "std::cerr << depth;"),
        ("optim", "if (x) abort();"),
        ("optim", "std::terminate ();"),
        ("nvme/src", "::_exit(1);"),
        ("nvme/src", "assert(depth > 0);"),
        ("nvme/src", "/* a comment */ exit(1);  // done"),
    ],
)
def test_a_planted_violation_is_found(folder: str, line: str, tmp_path: Path) -> None:
    plant(tmp_path, folder, f"/* two\n lines */\n{line}\n")

    [found] = violations(tmp_path)

    assert found.startswith(f"native/{folder}/planted.cpp:3: ")


@pytest.mark.parametrize(
    ("folder", "line"),
    [
        ("bindings", "#include <pybind11/pybind11.h>"),
        ("bindings", '#include "deepnvme/cuda_driver.hpp"'),
        ("nvme/src", "#include <linux/io_uring.h>  // not liburing.h"),
        ("nvme/src", "std::snprintf(text, sizeof text, format, depth);"),
        ("nvme/src", "static_assert(sizeof(int) == 4);"),
        ("nvme/src", "queue.exit(); queue->abort();  // abort()"),
        ("nvme/src", 'throw Error("abort() and printf() were called");'),
        ("tests", 'std::printf("%d failed", failed);'),
    ],
)
def test_what_the_rules_allow_is_left_alone(folder: str, line: str, tmp_path: Path) -> None:
    plant(tmp_path, folder, line)

    assert list(violations(tmp_path)) == []


def plant(root: Path, folder: str, source: str) -> None:
    """Write one native source file under `root`."""
    path = root / "native" / folder / "planted.cpp"
    path.parent.mkdir(parents=True)
    path.write_text(source)
