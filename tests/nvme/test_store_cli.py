"""`deepnvme ls`, `verify` and `cp`: what they print, how they end, and that nothing half is left
behind.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from deepnvme import (
    Access,
    Durability,
    FaultPlan,
    IOQueue,
    Requests,
    Returns,
    TensorStore,
    load,
    read_safetensors,
    save,
    write_safetensors,
)
from deepnvme.cli import cp
from deepnvme.cli.main import main
from support.nvme_disks import DiskUnavailableError, tmpfs
from support.nvme_io import PAGE

MIB = 1 << 20
TENSORS: dict[str, Any] = {
    "embed.weight": np.arange(MIB // 2, dtype=np.float32).reshape(-1, 256),
    "norm.bias": np.arange(7, dtype=np.float64),
    "scale": np.array(2, np.int8),
    "empty": np.empty((0, 3), np.float32),
}


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Any:
    """Return a function that runs a command and returns its exit status, output and errors."""

    def call(*arguments: object) -> tuple[int, str, str]:
        status = main(list(map(str, arguments)))
        shown = capsys.readouterr()
        return status, shown.out, shown.err

    return call


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "model.safetensors"
    write_safetensors(path, TENSORS, {"format": "pt"})
    return path


@pytest.fixture
def store(tmp_path: Path) -> Path:
    directory = tmp_path / "store"
    with TensorStore.create([directory], 8 * MIB) as store:
        store.put_many(TENSORS)
        store.commit()
    return directory


def contents(directory: Path) -> dict[str, Any]:
    with TensorStore.open([directory], returns=Returns.NUMPY) as store:
        return store.get_many(store)


def assert_same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert set(found) == set(expected)
    for name, array in expected.items():
        assert (found[name].dtype, found[name].shape) == (array.dtype, array.shape), name
        assert (found[name] == array).all(), name


def damage(directory: Path) -> None:
    """Change one byte of the last tensor."""
    data = directory / "data"
    with TensorStore.open([directory]) as store:
        extent = store.record("embed.weight").extents[0]
    with data.open("r+b") as opened:
        opened.seek(extent.offset + 5000)
        opened.write(b"\xff")


# --- ls -------------------------------------------------------------------------------------------


def test_ls_lists_a_store(run: Any, store: Path) -> None:
    status, output, _ = run("ls", store)

    assert status == 0
    *rows, last = output.splitlines()
    assert [row.split() for row in rows] == [
        ["embed.weight", "F32", "2048", "x", "256", "2", "MiB"],
        ["empty", "F32", "0", "x", "3", "0", "B"],
        ["norm.bias", "F64", "7", "56", "B"],
        ["scale", "I8", "scalar", "1", "B"],
    ]
    assert last == "4 tensors, 2 MiB; generation 2; state dicts: none; 5.99 MiB free"


def test_ls_lists_a_file(run: Any, file: Path) -> None:
    status, output, _ = run("ls", file)

    assert status == 0
    assert output.splitlines()[-1] == "4 tensors, 2 MiB; metadata: format = pt"


def test_ls_as_json_is_one_object(run: Any, store: Path, file: Path) -> None:
    of_store, of_file = (json.loads(run("ls", "--json", place)[1]) for place in (store, file))

    assert (of_store["schema"], of_store["kind"], of_store["generation"], of_store["states"]) == (
        1,
        "store",
        2,
        [],
    )
    assert (of_file["kind"], of_file["metadata"]) == ("safetensors", {"format": "pt"})
    assert of_store["tensors"] == of_file["tensors"]
    assert of_store["tensors"][2] == {
        "name": "norm.bias",
        "dtype": "F64",
        "shape": [7],
        "nbytes": 56,
    }
    assert of_store["nbytes"] == sum(array.nbytes for array in TENSORS.values())


def test_ls_lists_nothing_where_there_is_nothing(run: Any, tmp_path: Path) -> None:
    write_safetensors(tmp_path / "x.safetensors", {})

    assert run("ls", tmp_path / "x.safetensors")[:2] == (0, "0 tensors, 0 B; metadata: none\n")


def test_a_name_cannot_steer_the_terminal(run: Any, tmp_path: Path) -> None:
    write_safetensors(tmp_path / "x.safetensors", {"\x1b[2Jü": b""}, {"a\n": "\x1b"})

    assert run("ls", tmp_path / "x.safetensors")[1].splitlines() == [
        "\\x1b[2J\\xfc  U8  0  0 B",
        "1 tensor, 0 B; metadata: a\\n = \\x1b",
    ]


@pytest.mark.parametrize("command", ["ls", "cp"])
def test_what_is_not_there_is_one_line(run: Any, tmp_path: Path, command: str) -> None:
    more = [tmp_path / "target"] if command == "cp" else []
    for name in ("missing", "missing.safetensors", "a,b"):
        status, _, errors = run(command, tmp_path / name, *more)

        assert status == 1
        assert errors.startswith("deepnvme: ")
        assert len(errors.splitlines()) == 1
    assert list(tmp_path.iterdir()) == []


def test_a_damaged_file_is_one_line(run: Any, file: Path) -> None:
    with file.open("ab") as added:
        added.write(b"x")

    status, _, errors = run("ls", file)

    assert status == 1
    assert "it was cut off or added to" in errors
    assert str(file) in errors


@pytest.mark.parametrize(
    ("argument", "told"),
    [
        ("gone.safetensors", "No such file or directory; check the name, and whether the drive"),
        ("folder.safetensors", "directory"),
        ("/dev/null", "it is not a directory: name the directory of a volume or a store"),
        ("empty", "it holds no volume: name the directory of a volume or a store"),
        ("x" * 300, "File name too long; choose a shorter name"),
    ],
)
@pytest.mark.parametrize(("command", "ends"), [("ls", 1), ("verify", 2), ("cp", 1)])
def test_what_is_no_place_of_tensors_is_one_line_that_says_what_to_do(
    run: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    argument: str,
    told: str,
    command: str,
    ends: int,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder.safetensors").mkdir()
    (tmp_path / "empty").mkdir()

    status, output, errors = run(command, argument, *(["copy"] if command == "cp" else []))

    assert (status, output) == (ends, "")
    assert told in errors
    assert len(errors.splitlines()) == 1
    assert not (tmp_path / "copy").exists()


def test_a_file_with_a_name_that_is_no_text_is_not_called_damaged(tmp_path: Path) -> None:
    odd = tmp_path / os.fsdecode(b"caf\xe9.safetensors")
    odd.touch()

    done = subprocess.run(
        [sys.executable, "-m", "deepnvme", "verify", odd],
        capture_output=True,
        text=True,
        check=False,
    )

    assert (done.returncode, done.stdout) == (2, "")
    assert "not verified: a path must be text in UTF-8" in done.stderr


WITHOUT_RIGHTS = """
import os, sys
from deepnvme.cli import main

os.chdir(sys.argv[1])
os.setgroups([])
os.setresgid(65534, 65534, 65534)
os.setresuid(65534, 65534, 65534)
sys.exit(main.main(sys.argv[2:]))
"""


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give up its rights")
@pytest.mark.parametrize(
    "arguments",
    [
        ["ls", "store"],
        ["ls", "store/data"],
        ["ls", "store/data,store"],
        ["verify", "model.safetensors"],
        ["cp", "store", "copy"],
        ["cp", "readable.safetensors", "copy.safetensors"],
    ],
)
def test_what_a_user_may_not_do_is_one_line_that_says_what_to_do(
    file: Path, store: Path, arguments: list[str]
) -> None:
    # Not within `tmp_path`, where no other user may look at all.
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        shutil.copytree(store, Path(folder, "store"))
        Path(folder, "store").chmod(0o700)
        for name, rights in (("model.safetensors", 0o600), ("readable.safetensors", 0o644)):
            shutil.copy(file, Path(folder, name))
            Path(folder, name).chmod(rights)
        done = subprocess.run(
            [sys.executable, "-c", WITHOUT_RIGHTS, folder, *arguments],
            capture_output=True,
            text=True,
            check=False,
            timeout=120,
        )

    assert (done.returncode, done.stdout) == (2 if arguments[0] == "verify" else 1, "")
    assert "Permission denied; run this as a user with that right" in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert ".tmp" not in done.stderr


def test_a_store_in_use_says_by_whom(run: Any, store: Path) -> None:
    with TensorStore.open([store]):
        status, _, errors = run("ls", store)

    assert status == 1
    assert "this process has this volume open for writing" in errors


def test_an_empty_name_of_a_directory_is_wrong_usage(run: Any) -> None:
    with pytest.raises(SystemExit) as caught:
        run("ls", "a,,b")

    assert caught.value.code == 2


@pytest.mark.parametrize(
    ("named", "told"),
    [
        ("store,store", "store is named twice: name each directory of the store once"),
        ("s,s", "s is named twice"),
        ("store,./store/", "store and ./store/ are one directory"),
        ("store,link", "store and link are one directory"),
    ],
)
@pytest.mark.parametrize("command", ["ls", "verify", "cp"])
def test_a_directory_that_is_named_twice_is_wrong_usage(
    store: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    named: str,
    told: str,
    command: str,
) -> None:
    monkeypatch.chdir(store.parent)
    Path("link").symlink_to("store")
    Path("s").symlink_to("store")
    more = ["copy.safetensors"] if command == "cp" else []
    with pytest.raises(SystemExit) as caught:
        main([command, named, *more])

    assert caught.value.code == 2
    assert told in capsys.readouterr().err


def test_directories_whose_names_together_are_longer_than_a_name_are_a_store(
    run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    members = [f"a-member-of-a-store-with-a-long-name-{number:03}" for number in range(8)]
    with TensorStore.create(members, 8 * MIB) as store:
        store.put_many(TENSORS)
        store.commit()

    status, output, errors = run("ls", ",".join(members))

    assert (status, errors) == (0, "")
    assert "embed.weight" in output


def test_a_directory_with_a_comma_in_its_name_is_one_directory(run: Any, store: Path) -> None:
    renamed = store.rename(store.with_name("a,b"))

    assert run("ls", renamed)[0] == 0


# --- progress -------------------------------------------------------------------------------------


@pytest.mark.parametrize("terminal", [False, True])
def test_verify_and_cp_show_how_far_they_are_where_somebody_sees_it(
    run: Any,
    store: Path,
    file: Path,
    tmp_path: Path,
    terminal: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("FORCE_COLOR", "TTY_COMPATIBLE"):
        monkeypatch.delenv(name, raising=False)
    if terminal:
        monkeypatch.setenv("FORCE_COLOR", "1")

    for arguments in (
        ("verify", store, file),
        ("cp", file, tmp_path / "copy"),
        ("cp", store, tmp_path / "c.safetensors"),
    ):
        status, output, errors = run(*arguments)
        assert status == 0
        assert ("MiB" in errors) == terminal, errors
        assert terminal or errors == ""
        assert "\x1b" not in output


# --- verify ---------------------------------------------------------------------------------------


def test_verify_of_what_is_sound_ends_with_0(run: Any, store: Path, file: Path) -> None:
    status, output, _ = run("verify", store, file)

    assert status == 0
    assert output.splitlines() == [
        f"{store}: generation 2, 4 tensors, 2 MiB: all sound",
        f"{file}: 4 tensors, 2 MiB: header sound, all could be read; the format has no checksums "
        "to compare with",
    ]


def test_verify_names_the_tensor_and_the_bytes_that_are_damaged(run: Any, store: Path) -> None:
    damage(store)

    status, output, _ = run("verify", store)

    assert status == 1
    assert (
        f"{store}: damaged: embed.weight, bytes 0 to {MIB}: these are not the bytes that were put"
        in output
    )
    assert output.endswith("4 tensors, 2 MiB: damaged: 1\n")


def test_verify_of_a_damaged_manifest_or_header_ends_with_1(
    run: Any, store: Path, file: Path
) -> None:
    manifest = store / "manifest.0"
    manifest.write_bytes(manifest.read_bytes()[:-1])
    with file.open("ab") as added:
        added.write(b"x")

    for place in (store, file):
        status, output, _ = run("verify", place)
        assert status == 1
        assert output.startswith(f"{place}: damaged: ")


def test_verify_of_what_is_not_there_ends_with_2_after_the_others(
    run: Any, store: Path, tmp_path: Path
) -> None:
    status, output, errors = run("verify", tmp_path / "missing", tmp_path / "x.safetensors", store)

    assert status == 2
    assert len(errors.splitlines()) == 2
    assert "4 tensors, 2 MiB: all sound" in output


def test_verify_says_which_were_only_read(run: Any, tmp_path: Path) -> None:
    from deepnvme import Checksum

    save({"w": np.zeros(3), "step": 1}, tmp_path / "s", checksum=Checksum.NONE)

    assert run("verify", tmp_path / "s")[1].endswith(
        "1 tensor, 24 B: all sound; without checksums, so only read: 1\n"
    )


# --- cp -------------------------------------------------------------------------------------------


def test_cp_of_a_file_to_a_store_and_back(run: Any, file: Path, tmp_path: Path) -> None:
    assert run("cp", file, tmp_path / "s")[0] == 0
    status, output, _ = run("cp", tmp_path / "s", tmp_path / "again.safetensors")

    assert status == 0
    assert output.startswith(f"{tmp_path / 'again.safetensors'}: 4 tensors, 2 MiB in ")
    assert_same(contents(tmp_path / "s"), TENSORS)
    assert (tmp_path / "again.safetensors").read_bytes() == file.read_bytes()


def test_cp_between_stores_keeps_state_dicts_and_may_change_the_drives(
    run: Any, tmp_path: Path
) -> None:
    state: dict[str, Any] = {"model": {"w": np.arange(MIB), "b": np.zeros(3)}, "step": 7}
    save(state, tmp_path / "one")

    assert run("cp", tmp_path / "one", f"{tmp_path}/a,{tmp_path}/b")[0] == 0
    assert run("cp", f"{tmp_path}/b,{tmp_path}/a", tmp_path / "back")[0] == 0

    found = load(tmp_path / "back")
    assert (found["model"]["w"] == state["model"]["w"]).all()
    assert found["step"] == 7
    assert (tmp_path / "b/data").stat().st_size > PAGE


def test_cp_in_many_groups(run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cp, "_GROUP_BYTES", 100_000)
    tensors = {
        f"{number}.weight": np.full(10_000 + number, number, np.float32) for number in range(40)
    }
    write_safetensors(tmp_path / "x.safetensors", tensors)

    run("cp", tmp_path / "x.safetensors", f"{tmp_path}/a,{tmp_path}/b")
    run("cp", f"{tmp_path}/a,{tmp_path}/b", tmp_path / "y.safetensors")

    assert_same(read_safetensors(tmp_path / "y.safetensors", returns=Returns.NUMPY), tensors)


def test_cp_keeps_a_bounded_part_in_memory(tmp_path: Path) -> None:
    tensors = {str(number): np.ones(8 * MIB, np.uint8) for number in range(32)}
    write_safetensors(tmp_path / "x.safetensors", tensors, durability=Durability.NONE)
    program = (
        "import re\nfrom deepnvme.cli import cp\nfrom deepnvme.cli.main import main\n"
        "cp._GROUP_BYTES = 1 << 20\n"
        "peak = lambda: int(re.search(r'VmHWM:\\s*(\\d+)', open('/proc/self/status').read())[1]) "
        ">> 10\n"
        "import numpy\nbefore = peak()\n"
        f"assert main(['cp', {str(tmp_path / 'x.safetensors')!r}, {str(tmp_path / 's')!r}]) == 0\n"
        f"assert main(['cp', {str(tmp_path / 's')!r}, {str(tmp_path / 'y.safetensors')!r}]) == 0\n"
        "print(peak() - before)\n"
    )

    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=120
    )

    # of 256 MiB; the staging memory of a store and of a file is 64
    assert int(done.stdout.split()[-1]) < 128


def test_a_saved_state_dict_becomes_a_file_with_its_own_names(run: Any, tmp_path: Path) -> None:
    save(TENSORS, tmp_path / "s")

    status, _, errors = run("cp", tmp_path / "s", tmp_path / "x.safetensors")

    assert (status, errors) == (0, "")
    assert_same(read_safetensors(tmp_path / "x.safetensors", returns=Returns.NUMPY), TENSORS)


@pytest.mark.filterwarnings("default")
def test_what_a_file_has_no_place_for_is_told(run: Any, tmp_path: Path) -> None:
    save({"model": TENSORS, "step": 7}, tmp_path / "s")

    status, _, errors = run("cp", tmp_path / "s", tmp_path / "x.safetensors")

    assert status == 0
    assert "deepnvme: warning: of the state dict 'state' only the tensors are copied" in errors
    assert "model.embed.weight" in read_safetensors(
        tmp_path / "x.safetensors", returns=Returns.NUMPY
    )


def test_several_state_dicts_keep_their_names_in_front(run: Any, tmp_path: Path) -> None:
    save({"w": np.zeros(3)}, tmp_path / "s", name="a", capacity=MIB)
    save({"w": np.ones(3)}, tmp_path / "s", name="b")

    run("cp", tmp_path / "s", tmp_path / "x.safetensors")

    assert set(read_safetensors(tmp_path / "x.safetensors")) == {"a/w", "b/w"}


def test_a_dtype_that_numpy_lacks_needs_no_torch(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed")
    write_safetensors(
        tmp_path / "x.safetensors",
        {"w": torch.arange(9.0).bfloat16(), "v": torch.zeros(MIB).bfloat16()},
    )
    program = (
        "import sys\nfrom deepnvme.cli.main import main\n"
        f"assert main(['cp', {str(tmp_path / 'x.safetensors')!r}, {str(tmp_path / 's')!r}]) == 0\n"
        f"assert main(['cp', {str(tmp_path / 's')!r}, {str(tmp_path / 'y.safetensors')!r}]) == 0\n"
        "assert 'torch' not in sys.modules\n"
    )

    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)

    assert torch.equal(
        read_safetensors(tmp_path / "y.safetensors")["w"], torch.arange(9.0).bfloat16()
    )


@pytest.mark.parametrize("target", ["store", "model.safetensors"])
def test_cp_replaces_nothing_unless_told_to(
    run: Any, store: Path, file: Path, tmp_path: Path, target: str
) -> None:
    write_safetensors(tmp_path / "new.safetensors", {"new": np.ones(3)})

    refused, _, errors = run("cp", tmp_path / "new.safetensors", tmp_path / target)
    before = sorted(tmp_path.iterdir())
    status, _, _ = run("cp", tmp_path / "new.safetensors", tmp_path / target, "--force")

    assert (refused, status) == (1, 0)
    assert "--force" in errors
    found = contents(store) if target == "store" else read_safetensors(file, returns=Returns.NUMPY)
    assert_same(found, {"new": np.ones(3)})
    assert sorted(tmp_path.iterdir()) == before


def test_a_store_on_several_drives_is_replaced_as_one(run: Any, file: Path, tmp_path: Path) -> None:
    save({"old": np.zeros(3)}, [tmp_path / "a", tmp_path / "b"])

    assert run("cp", file, f"{tmp_path}/a", "--force")[0] == 1
    assert run("cp", file, f"{tmp_path}/b,{tmp_path}/a", "--force")[0] == 0

    with TensorStore.open([tmp_path / "a", tmp_path / "b"], returns=Returns.NUMPY) as store:
        assert_same(store.get_many(store), TENSORS)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b", "model.safetensors"]


def test_force_removes_nothing_that_is_not_of_a_store(
    run: Any, file: Path, store: Path, tmp_path: Path
) -> None:
    (tmp_path / "papers").mkdir()
    (tmp_path / "papers/thesis.tex").write_text("x")
    (store / "notes").write_text("x")

    for target in (tmp_path / "papers", store):
        status, _, errors = run("cp", file, target, "--force")
        assert status == 1
        assert len(errors.splitlines()) == 1

    assert (tmp_path / "papers/thesis.tex").exists()
    assert (store / "notes").exists()
    assert_same(contents(store), TENSORS)


def test_a_store_in_use_is_not_replaced(run: Any, file: Path, store: Path) -> None:
    with TensorStore.open([store]):
        status, _, errors = run("cp", file, store, "--force")

    assert status == 1
    assert "has this volume open" in errors


def test_a_store_is_not_copied_onto_itself(run: Any, store: Path) -> None:
    status, output, errors = run("cp", store, f"{store.parent}/./{store.name}", "--force")

    assert (status, output) == (1, "")
    assert errors == (
        f"deepnvme: {store}: this is the store that is copied: name another directory for the copy\n"
    )
    assert set(contents(store)) == set(TENSORS)


@pytest.mark.parametrize(
    ("target", "told"),
    [
        ("gone/copy.safetensors", "its directory does not exist: make that first"),
        ("folder.safetensors", "it is a directory: name a file to write"),
    ],
)
def test_a_file_that_cannot_be_made_is_named_as_it_was_given(
    run: Any, store: Path, tmp_path: Path, target: str, told: str
) -> None:
    (tmp_path / "folder.safetensors").mkdir()

    status, output, errors = run("cp", store, tmp_path / target, "--force")

    assert (status, output) == (1, "")
    assert errors.startswith(f"deepnvme: {tmp_path / target}: {told}")
    assert list((tmp_path / "folder.safetensors").iterdir()) == []


@pytest.mark.parametrize("target", ["copy", "copy.safetensors"])
def test_a_copy_that_there_is_no_room_for_says_how_much_there_is(
    run: Any, store: Path, tmp_path: Path, target: str
) -> None:
    with ExitStack() as stack:
        try:
            small = stack.enter_context(tmpfs(tmp_path, 1 << 20))
        except DiskUnavailableError as refusal:
            pytest.skip(str(refusal))
        status, output, errors = run("cp", store, small / target)
        left = list(small.iterdir())

    assert (status, output, left) == (1, "", [])
    assert errors.startswith(f"deepnvme: {small / target}: ")
    assert "B cannot be reserved here, 1048576 B are free" in errors
    assert len(errors.splitlines()) == 1


# --- its output -----------------------------------------------------------------------------------


def printing_late() -> dict[str, str]:
    """Return an environment in which Python keeps what is printed for one write."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}


@pytest.mark.parametrize(
    ("arguments", "ends"),
    [
        (["ls", "store"], 1),
        (["ls", "store", "--json"], 1),
        (["verify", "store"], 2),
        (["cp", "store", "copy"], 1),
        (["doctor", "."], 1),
        (["--help"], 1),
        (["--version"], 1),
        (["verify", "--help"], 1),
    ],
)
def test_an_output_that_cannot_be_written_is_one_line(
    store: Path, arguments: list[str], ends: int
) -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "deepnvme.cli", *arguments],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
            timeout=120,
            cwd=store.parent,
            env=printing_late(),
        )

    assert done.returncode == ends
    assert done.stderr == (
        "deepnvme: standard output: No space left on device; free some space, or name a place on "
        "another drive\n"
    )


@pytest.mark.parametrize("closed", [1, 2])
@pytest.mark.parametrize(("place", "ends"), [("store", 0), ("gone", 2)])
def test_a_stream_that_is_closed_changes_no_exit_status(
    store: Path, closed: int, place: str, ends: int
) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "deepnvme.cli", "verify", store.with_name(place)],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
        preexec_fn=lambda: os.close(closed),
    )

    assert done.returncode == ends
    shown = {1: "all sound" in done.stdout, 2: "not verified" in done.stderr}
    stream = 1 if ends == 0 else 2
    assert shown == {1: stream == 1 != closed, 2: stream == 2 != closed}


@pytest.mark.parametrize("arguments", [["ls", "store"], ["verify", "store"], ["--help"]])
def test_a_reader_that_has_seen_enough_ends_it_with_141(store: Path, arguments: list[str]) -> None:
    reader, writer = os.pipe()
    os.close(reader)

    done = subprocess.run(
        [sys.executable, "-m", "deepnvme.cli", *arguments],
        stdout=writer,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
        timeout=120,
        cwd=store.parent,
        env=printing_late(),
    )

    os.close(writer)
    assert (done.returncode, done.stderr) == (141, "")


PRINTS_AND_FAILS = """
import errno, os, sys
from deepnvme.cli import ls, main

def run(_):
    print("printed")
    raise OSError(errno.ENOENT, os.strerror(errno.ENOENT), "there")

ls.run = run
sys.exit(main.main(["ls", sys.argv[1]]))
"""


def test_what_was_printed_before_an_error_is_shown(store: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PRINTS_AND_FAILS, store],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
        env=printing_late(),
    )

    assert (done.returncode, done.stdout) == (1, "printed\n")
    assert done.stderr.startswith("deepnvme: there: No such file")


PRINTS_AND_IS_ENDED = """
import signal, sys
from deepnvme.cli import ls, main
from deepnvme.cli.scratch import signals_are_exceptions

def run(_):
    with signals_are_exceptions():
        print("printed")
        signal.raise_signal(signal.SIGTERM)

ls.run = run
sys.exit(main.main(["ls", sys.argv[1]]))
"""


def test_the_status_of_a_signal_stays_where_the_output_cannot_be_written(store: Path) -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-c", PRINTS_AND_IS_ENDED, store],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
            timeout=120,
            env=printing_late(),
        )

    assert (done.returncode, done.stderr) == (128 + signal.SIGTERM, "")


def test_an_empty_directory_is_used_as_it_is(run: Any, file: Path, tmp_path: Path) -> None:
    (tmp_path / "s").mkdir()

    assert run("cp", file, tmp_path / "s")[0] == 0

    assert_same(contents(tmp_path / "s"), TENSORS)


@pytest.mark.parametrize("target", ["copy", "store", "copy.safetensors"])
def test_a_damaged_source_is_not_copied_and_leaves_nothing_half(
    run: Any, store: Path, tmp_path: Path, target: str
) -> None:
    source = tmp_path / "source"
    run("cp", store, source)
    damage(source)
    before = sorted(tmp_path.iterdir())

    status, _, errors = run("cp", source, tmp_path / target, "--force")

    assert status == 1
    assert "tensor 'embed.weight'" in errors
    assert sorted(tmp_path.iterdir()) == before
    assert_same(contents(store), TENSORS)


@pytest.mark.parametrize("target", ["copy", "store", "copy.safetensors"])
def test_a_drive_that_fails_leaves_nothing_half(
    run: Any, file: Path, store: Path, tmp_path: Path, target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(*_: object, **__: object) -> IOQueue:
        plan = FaultPlan(seed=1)
        plan.fail(nth=1, errno=errno.EIO, requests=Requests.SYNCS)
        return IOQueue("threads", faults=plan)

    before = sorted(tmp_path.iterdir())
    monkeypatch.setattr("deepnvme.volume.volume.IOQueue", failing)
    monkeypatch.setattr("deepnvme.formats.safetensors.IOQueue", failing)
    status, _, errors = run("cp", file, tmp_path / target, "--force")
    monkeypatch.undo()

    assert status == 1
    assert len(errors.splitlines()) == 1
    assert sorted(tmp_path.iterdir()) == before
    assert_same(contents(store), TENSORS)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_leaves_nothing_half(tmp_path: Path, number: signal.Signals) -> None:
    write_safetensors(tmp_path / "x.safetensors", {str(index): np.zeros(MIB) for index in range(4)})
    program = (
        "import sys, time\nfrom deepnvme.cli import cp\nfrom deepnvme.cli.main import main\n"
        "def wait(*_):\n    print('begun', flush=True)\n    time.sleep(60)\n"
        "cp._copy = wait\n"
        f"sys.exit(main(['cp', {str(tmp_path / 'x.safetensors')!r}, {str(tmp_path / 's')!r}]))"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "begun\n"
        assert (tmp_path / "s/data").exists()
        process.send_signal(number)

        assert process.wait(30) == (130 if number is signal.SIGINT else 128 + number)

    assert [path.name for path in tmp_path.iterdir()] == ["x.safetensors"]


def test_stores_are_looked_at_and_copied_beside_readers(
    run: Any, store: Path, tmp_path: Path
) -> None:
    with TensorStore.open([store], access=Access.READ):
        statuses = [
            run("ls", store)[0],
            run("verify", store)[0],
            run("cp", store, tmp_path / "copy")[0],
        ]

    assert statuses == [0, 0, 0]
    assert_same(contents(tmp_path / "copy"), TENSORS)


def test_the_commit_before_is_listed_verified_and_copied(
    run: Any, store: Path, tmp_path: Path
) -> None:
    with TensorStore.open([store]) as changed:
        before = changed.generation
        for name in list(changed):
            changed.delete(name)
        changed.put("new", np.ones(3))
        changed.commit()

    _, listed, _ = run("ls", store, "--generation", before)
    verified, told, _ = run("verify", store, "--generation", before)
    run("cp", store, tmp_path / "copy", "--generation", before)

    assert "embed.weight" in listed
    assert f"generation {before};" in listed
    assert (verified, f"generation {before}, 4 tensors" in told) == (0, True)
    assert_same(contents(tmp_path / "copy"), TENSORS)
    assert "new" in run("ls", store)[1]


def test_a_generation_that_there_is_not_is_one_line(run: Any, store: Path, file: Path) -> None:
    for place, message in ((store, "there is no generation 99 here"), (file, "has no generations")):
        status, _, errors = run("ls", place, "--generation", 99)

        assert (status, len(errors.splitlines())) == (1, 1)
        assert message in errors


def test_a_file_that_was_copied_to_a_store_is_loaded(run: Any, file: Path, tmp_path: Path) -> None:
    run("cp", file, tmp_path / "s")

    assert_same({name: np.asarray(each) for name, each in load(tmp_path / "s").items()}, TENSORS)


def test_a_copy_that_cannot_take_its_place_leaves_nothing(
    run: Any, file: Path, store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = sorted(tmp_path.iterdir())

    def refused(*_: object) -> None:
        raise OSError(errno.EBUSY, "refused")

    with monkeypatch.context() as patch:
        patch.setattr(cp, "_replace", refused)
        assert run("cp", file, store, "--force")[0] == 1

    assert sorted(tmp_path.iterdir()) == before
    assert_same(contents(store), TENSORS)


def test_what_a_killed_copy_left_is_in_nobodys_way(
    run: Any, file: Path, store: Path, tmp_path: Path
) -> None:
    before = sorted(tmp_path.iterdir())
    save({"half": np.ones(3)}, tmp_path / ".store.deepnvme-new")
    save({"replaced": np.ones(3)}, tmp_path / ".store.deepnvme-old")

    assert run("cp", file, store, "--force")[0] == 0

    assert sorted(tmp_path.iterdir()) == before
    assert_same(contents(store), TENSORS)
