"""What importing gives and costs: the packages' public names, and that the parts which need no
torch import none.
"""

from __future__ import annotations

import importlib
import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
WITHOUT_TORCH = (
    "deepnvme",
    "deepnvme.cli.main",
    "deepnvme.compat",
    "deepnvme.store.store",
    "infinity_engine",
    "infinity_engine.calibration",
    "infinity_engine.config",
    "infinity_engine.engine",
    "infinity_engine.integrations",
    "infinity_engine.memory",
    "infinity_engine.migration",
    "infinity_engine.optim",
    "infinity_engine.optim.policies",
    "infinity_engine.plan",
    "infinity_engine.advice.advising",
    "infinity_engine.sim",
    "infinity_engine.placement.placing",
    "infinity_engine.sim.planner",
    "infinity_engine.sim.presets",
    "infinity_engine.sim.remedies",
    "infinity_engine.sim.report",
    "infinity_engine.sim.simulate",
    "infinity_engine.storage",
    "infinity_engine.machine",
    "infinity_engine.machine.survey",
    "infinity_engine.cli.main",
    "infinity_engine.cli.migrate",
    "infinity_engine.cli.plan",
    "infinity_engine.cli.plan_page",
    "infinity_engine.cli.runs.report",
    "infinity_engine.cli.runs.train",
    "infinity_engine.training",
    "infinity_engine.training.report_page",
    "infinity_engine.training.samples",
)
# Plans and settings are made where nothing is compiled.
WITHOUT_NATIVE = ("infinity_engine.config", "infinity_engine.plan", "infinity_engine.telemetry")
# Importing NumPy would take a tenth of the time of an answer.
WITHOUT_NUMPY = ("infinity_engine.advice.advising", "infinity_engine.sim.remedies")
REFUSE = """
import sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[{part}] == "{refused}":
            raise ImportError("{refused} is refused here")
sys.meta_path.insert(0, Refuse())
"""
REFUSE_TORCH = REFUSE.format(part=0, refused="torch")
REFUSE_NUMPY = REFUSE.format(part=0, refused="numpy")
REFUSE_NATIVE = REFUSE.format(part=-1, refused="_native")
# Frozen: a name is added here when, and only when, it is meant to be supported.
PUBLIC = {
    "infinity_engine": {
        "Budget",
        "CapacityError",
        "CheckpointError",
        "CollectiveError",
        "ConfigError",
        "InfinityError",
        "MissingDependencyError",
        "Outcome",
        "StepResult",
        "Tier",
        "TransferError",
        "init_context",
        "initialize",
        "load_into",
        "load_pretrained",
    },
    "deepnvme": {
        "Access",
        "BackendFallbackWarning",
        "BackendUnavailableError",
        "BatchError",
        "Checksum",
        "ChecksumError",
        "ClosedError",
        "Cuda",
        "Damage",
        "Direct",
        "Durability",
        "DeadlineError",
        "FaultPlan",
        "File",
        "FileObject",
        "ForkedError",
        "IOFuture",
        "IOQueue",
        "Member",
        "NVMeError",
        "PoisonedError",
        "PageStock",
        "Pool",
        "PoolExhaustedError",
        "Priority",
        "Probe",
        "QueueFull",
        "Requests",
        "Returns",
        "SafetensorsError",
        "ShortReadError",
        "StoreError",
        "StoreFuture",
        "StoredTensor",
        "Sync",
        "TensorStore",
        "UncommittedWarning",
        "UserMemory",
        "Volume",
        "VolumeError",
        "VolumeFullError",
        "VolumeLockedError",
        "WhenFull",
        "load",
        "map_safetensors",
        "open",
        "probe",
        "read_safetensors",
        "safetensors_header",
        "save",
        "write_safetensors",
    },
}


@pytest.mark.parametrize("package", PUBLIC)
def test_a_package_exports_exactly_the_frozen_names(package: str) -> None:
    assert set(importlib.import_module(package).__all__) == PUBLIC[package]


@pytest.mark.parametrize("package", PUBLIC)
def test_nothing_else_leaks_from_a_package(package: str) -> None:
    root = importlib.import_module(package)
    own = {module.name for module in pkgutil.iter_modules(root.__path__)}

    assert {name for name in dir(root) if not name.startswith("_")} - own - PUBLIC[package] == set()
    assert all(hasattr(root, name) for name in PUBLIC[package])


@pytest.mark.parametrize("module", WITHOUT_TORCH)
def test_a_module_imports_where_torch_cannot(module: str) -> None:
    run = python(f"{REFUSE_TORCH}\nimport {module}")

    assert run.returncode == 0, run.stderr


def test_importing_a_module_does_not_load_torch() -> None:
    # One after another in one interpreter: each importing alone is the test above.
    run = python(
        f"import sys\nfrom importlib import import_module\nfor module in {WITHOUT_TORCH}:\n"
        "    import_module(module)\n    assert 'torch' not in sys.modules, module\n"
    )

    assert run.returncode == 0, run.stderr


@pytest.mark.parametrize("module", WITHOUT_NATIVE)
def test_a_module_imports_where_no_native_module_can(module: str) -> None:
    run = python(f"{REFUSE_NATIVE}\nimport {module}")

    assert run.returncode == 0, run.stderr


@pytest.mark.parametrize("module", WITHOUT_NUMPY)
def test_planning_imports_no_numpy(module: str) -> None:
    run = python(f"{REFUSE_NUMPY}\nimport {module}")

    assert run.returncode == 0, run.stderr


def test_the_refusal_of_native_modules_works() -> None:
    run = python(f"{REFUSE_NATIVE}\nimport deepnvme.queue.queue")

    assert "_native is refused here" in run.stderr


def test_the_refusal_of_torch_works() -> None:
    run = python(f"{REFUSE_TORCH}\nimport torch")

    assert "torch is refused here" in run.stderr


def python(source: str) -> subprocess.CompletedProcess[str]:
    """Run `source` in a fresh interpreter that finds what this one finds."""
    return subprocess.run(
        [sys.executable, "-c", source], cwd=ROOT, capture_output=True, text=True, check=False
    )
