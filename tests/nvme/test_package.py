"""What `import deepnvme` gives before anything is done: its version, and a clear refusal off Linux."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import deepnvme
from deepnvme.cli import start

ROOT = Path(__file__).resolve().parents[2]
ON_A_MAC = "import sys\nsys.platform = 'darwin'\nimport deepnvme\n"


def python(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments], cwd=ROOT, capture_output=True, text=True, check=False
    )


@pytest.mark.parametrize("module", ["deepnvme", "deepnvme.cli"])
def test_the_package_runs_as_a_module(module: str) -> None:
    done = python("-m", module, "--version")

    assert (done.stdout, done.stderr) == (f"deepnvme {deepnvme.__version__}\n", "")


def test_making_a_queue_reads_no_metadata_of_installed_packages() -> None:
    done = python(
        "-c",
        "import sys\nfrom deepnvme import IOQueue\nIOQueue('threads').close()\nIOQueue().close()\n"
        "print('importlib.metadata' in sys.modules)",
    )

    assert done.stdout == "False\n"


def test_off_linux_a_name_says_that_it_needs_linux() -> None:
    done = python("-c", ON_A_MAC + "deepnvme.IOQueue()")

    assert "ImportError: deepnvme.IOQueue needs Linux" in done.stderr
    assert "darwin" in done.stderr


def test_off_linux_the_version_and_the_diagnosis_still_work() -> None:
    done = python("-c", ON_A_MAC + "import deepnvme.machine.diagnosis\nprint(deepnvme.__version__)")

    assert (done.stdout, done.stderr) == (f"{deepnvme.__version__}\n", "")


def test_off_linux_the_command_line_is_one_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")

    assert start.main(["doctor"]) == 1
    assert capsys.readouterr().err == "deepnvme: needs Linux; this is darwin\n"


def test_without_rich_the_command_line_names_the_extra(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "deepnvme.cli.main", None)
    with pytest.raises(ModuleNotFoundError):  # of what is no library of its own: our mistake
        start.main(["doctor"])

    class WithoutRich:
        def find_spec(self, name: str, *_: object) -> None:
            if name == "deepnvme.cli.main":
                raise ModuleNotFoundError("No module named 'rich'", name="rich")

    monkeypatch.delitem(sys.modules, "deepnvme.cli.main")
    monkeypatch.setattr(sys, "meta_path", [WithoutRich(), *sys.meta_path])
    assert start.main(["doctor"]) == 1
    assert "pip install 'deepnvme[cli]'" in capsys.readouterr().err
