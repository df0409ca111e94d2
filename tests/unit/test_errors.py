from __future__ import annotations

import copy
import dataclasses
import errno
import pickle
import traceback

import pytest

from infinity_engine import errors
from infinity_engine.errors import (
    CapacityError,
    CheckpointError,
    ChecksumError,
    CollectiveError,
    ConfigError,
    DamagedCheckpoint,
    DamageError,
    IllegalTransition,
    IncompleteCheckpoint,
    InfinityError,
    ManifestMismatch,
    MissingDependencyError,
    TraceMismatch,
    TransferError,
    UnsupportedCheckpoint,
)

EXAMPLES = (
    ConfigError(field="storage.backend", value=5, expected="a name"),
    MissingDependencyError(
        needed_by="infinity_engine.initialize", package="PyTorch >= 2.6", extra="torch"
    ),
    CapacityError(
        tier="HOST",
        asked=3 * 2**30,
        free=2**30,
        limit=4 * 2**30,
        change="raise host",
        holders=(("a", 7),),
    ),
    IllegalTransition(shard="shard 17", source="NVME", target="HOST", allowed=("LOADING",)),
    TraceMismatch(expected="layers.3", seen="layers.4"),
    TransferError(errno=errno.EIO, path="/mnt/a/swap", offset=4096, asked=8192, done=512),
    CollectiveError(group="layers.3", rank=2, op="all_gather"),
    CheckpointError(path="/ckpt"),
    ManifestMismatch(path="/ckpt", entry="wte.weight shape", expected=(4, 8), found=(4, 9)),
    IncompleteCheckpoint(path="/ckpt", missing=("rank0.bin", "rank1.bin")),
    ChecksumError(path="/ckpt", entry="wte.weight", offset=4096, expected=0xBEEF, found=0xDEAD),
    UnsupportedCheckpoint(path="/ckpt", entry="its files", flaw="split", change="Merge them."),
    DamagedCheckpoint(path="/ckpt", entry="manifest", flaw="it was cut"),
    UnsupportedCheckpoint(
        path="/ckpt", entry="zero_pp_rank_0", flaw="it was split", change="merge it"
    ),
    DamageError(
        errno=errno.EBADMSG,
        path="/mnt/a/swap",
        offset=4096,
        asked=8192,
        done=8192,
        expected=1,
        found=2,
    ),
)


def kind(error: object) -> str:
    return type(error).__name__


def known(error: InfinityError) -> dict[str, object]:
    return {field.name: getattr(error, field.name) for field in dataclasses.fields(error)}


def test_every_exception_of_the_module_has_an_example_here() -> None:
    assert {kind(example) for example in EXAMPLES} == set(errors.__all__) - {"InfinityError"}


def test_the_tree_in_the_docstring_is_the_tree_in_the_code() -> None:
    drawn = [line for line in (errors.__doc__ or "").splitlines() if line.startswith("    ")]
    names = [line.split()[0].split("(")[0] for line in drawn]
    depth = {
        name: (len(line) - len(line.lstrip()) - 4) // 2
        for name, line in zip(names, drawn, strict=True)
    }

    assert set(names) == set(errors.__all__)
    for name in names:
        ours = [base for base in getattr(errors, name).__mro__ if issubclass(base, InfinityError)]
        assert depth[name] == len(ours) - 1, name


@pytest.mark.parametrize("error", EXAMPLES, ids=kind)
def test_an_exception_survives_pickling(error: InfinityError) -> None:
    again = pickle.loads(pickle.dumps(error))

    assert type(again) is type(error)
    assert known(again) == known(error)
    assert str(again) == str(error)
    assert again.args == error.args


@pytest.mark.parametrize("error", EXAMPLES, ids=kind)
def test_an_exception_can_be_copied(error: InfinityError) -> None:
    assert known(copy.deepcopy(error)) == known(error)


def test_what_was_added_to_an_exception_survives_pickling() -> None:
    error = ConfigError(field="a", value=1, expected="2")
    error.__dict__["__notes__"] = ["while reading settings.json"]

    assert pickle.loads(pickle.dumps(error)).__notes__ == ["while reading settings.json"]


@pytest.mark.parametrize("error", EXAMPLES, ids=kind)
def test_an_exception_can_be_raised_caught_and_printed(error: InfinityError) -> None:
    with pytest.raises(InfinityError) as caught:
        raise error

    assert str(error) in "".join(traceback.format_exception(caught.value))


@pytest.mark.parametrize("error", EXAMPLES, ids=kind)
def test_an_exception_is_equal_to_itself_only(error: InfinityError) -> None:
    assert error == error
    assert error != copy.copy(error)
    assert len({error, error}) == 1


@pytest.mark.parametrize("error", EXAMPLES, ids=kind)
def test_the_representation_shows_every_field(error: InfinityError) -> None:
    assert all(f"{name}=" in repr(error) for name in known(error))


@pytest.mark.parametrize(
    ("error", "builtin"),
    [(EXAMPLES[0], ValueError), (EXAMPLES[1], ImportError), (EXAMPLES[5], OSError)],
    ids=kind,
)
def test_an_exception_is_also_the_builtin_one_that_callers_expect(
    error: InfinityError, builtin: type[Exception]
) -> None:
    assert isinstance(error, builtin)


def test_config_error_says_the_field_the_value_and_what_would_be_right() -> None:
    assert str(EXAMPLES[0]) == "storage.backend: expected a name, got 5"


def test_config_error_cuts_a_long_value() -> None:
    error = ConfigError(field="budget", value="x" * 10_000, expected="a Budget")

    assert len(str(error)) < 300
    assert str(error).endswith("...")


def test_config_error_bears_a_value_that_cannot_be_shown() -> None:
    class Broken:
        def __repr__(self) -> str:
            raise RuntimeError("no text")

    assert str(ConfigError(field="a", value=Broken(), expected="b")) == (
        "a: expected b, got a Broken that cannot be shown"
    )


def test_an_unknown_name_is_told_the_nearest_known_one() -> None:
    error = ConfigError.unknown_name(
        field="storage.checksm", name="checksm", known=("backend", "checksum")
    )

    assert (
        str(error)
        == "storage.checksm: expected one of backend, checksum (nearest: checksum), got 'checksm'"
    )


def test_an_unknown_name_that_resembles_none_is_told_all_of_them() -> None:
    error = ConfigError.unknown_name(
        field="strategy", name="qqq", known=("host_only", "interleaved")
    )

    assert error.expected == "one of host_only, interleaved"


def test_an_unknown_name_where_none_is_known_is_told_so() -> None:
    assert (
        ConfigError.unknown_name(field="nvme", name="/mnt/a", known=()).expected == "one of (none)"
    )


def test_a_missing_dependency_names_what_to_install() -> None:
    assert str(EXAMPLES[1]) == (
        "infinity_engine.initialize needs PyTorch >= 2.6, which is not installed. "
        "Install your own build of it, or: pip install 'infinity-engine[torch]'"
    )


def test_a_dependency_that_is_too_old_says_which_was_found() -> None:
    error = MissingDependencyError(
        needed_by="f", package="PyTorch >= 2.6", found="2.1.0", extra="torch"
    )

    assert str(error).startswith("f needs PyTorch >= 2.6, and 2.1.0 is installed. Install")


def test_a_missing_dependency_carries_its_message_as_import_errors_do() -> None:
    error = MissingDependencyError(needed_by="f", package="PyTorch", extra="torch")

    assert error.msg == str(error)


def test_capacity_error_says_what_is_short_who_holds_it_and_what_to_change() -> None:
    assert str(EXAMPLES[2]) == (
        "HOST cannot hold 3221225472 B (3.00 GiB): 1073741824 B (1.00 GiB) free of 4294967296 B "
        "(4.00 GiB), "
        "2147483648 B (2.00 GiB) short; a holds 7 B. To make it fit: raise host"
    )


def test_capacity_error_tells_a_shortage_that_rounding_would_hide() -> None:
    error = CapacityError(
        tier="HOST", asked=2**34 + 1, free=2**34, limit=2**34, change="raise host"
    )

    assert "17179869185 B (16.00 GiB): 17179869184 B (16.00 GiB) free" in str(error)
    assert ", 1 B short" in str(error)


@pytest.mark.parametrize(
    ("nbytes", "shown"),
    [
        (1023, "1023 B"),
        (2**20 - 1, "1048575 B (1.00 MiB)"),
        (2**20 - 2**10, "1047552 B (1023.00 KiB)"),
        (2**30 - 1, "1073741823 B (1.00 GiB)"),
        (2**40 - 1, "1099511627775 B (1.00 TiB)"),
        (2**50, "1125899906842624 B (1024.00 TiB)"),
    ],
)
def test_a_size_in_an_error_is_exact_with_a_rounded_one_in_the_unit_that_it_fills(
    nbytes: int, shown: str
) -> None:
    error = CapacityError(tier="HOST", asked=nbytes, free=0, limit=0, change="x")

    assert str(error).startswith(f"HOST cannot hold {shown}: ")


def test_capacity_error_lists_the_largest_holders_first_and_adds_up_the_rest() -> None:
    holders = tuple((f"h{nbytes}", nbytes) for nbytes in (1, 2, 3, 40, 50, 60, 70))
    error = CapacityError(tier="DEVICE", asked=9, free=8, limit=9, change="x", holders=holders)

    assert [nbytes for _, nbytes in error.holders] == [70, 60, 50, 40, 3, 2, 1]
    assert "; h70 holds 70 B; h60 holds 60 B; h50 holds 50 B; h40 holds 40 B; h3 holds 3 B;" in str(
        error
    )
    assert "; 2 others hold 3 B. " in str(error)


def test_capacity_error_names_the_directory_where_there_is_one() -> None:
    error = CapacityError(tier="NVME", directory="/mnt/a", asked=9, free=8, limit=8, change="x")

    assert str(error).startswith("NVME (/mnt/a) cannot hold 9 B")


def test_an_illegal_transition_says_what_is_allowed() -> None:
    assert str(EXAMPLES[3]) == "shard 17: HOST is not reachable from NVME; allowed: LOADING"


def test_an_illegal_transition_from_a_dead_end_allows_nothing() -> None:
    assert str(IllegalTransition(shard="s", source="A", target="B", allowed=())).endswith(
        "allowed: nothing"
    )


def test_a_trace_mismatch_names_both_modules() -> None:
    assert "expects module layers.3 to run next, but layers.4 ran" in str(EXAMPLES[4])


def test_a_transfer_error_has_what_an_os_error_has() -> None:
    error = EXAMPLES[5]

    assert isinstance(error, TransferError)
    assert (error.errno, error.strerror, error.filename) == (
        errno.EIO,
        "Input/output error",
        "/mnt/a/swap",
    )


def test_a_transfer_error_keeps_what_an_os_error_has_through_pickling() -> None:
    again = pickle.loads(pickle.dumps(EXAMPLES[5]))

    assert (again.errno, again.strerror, again.filename) == (
        errno.EIO,
        "Input/output error",
        "/mnt/a/swap",
    )


def test_a_transfer_error_says_where_and_how_much() -> None:
    assert str(EXAMPLES[5]) == (
        "/mnt/a/swap: Input/output error (errno 5) at offset 4096: asked for 8192 B (8.00 KiB), "
        "512 B done"
    )


def test_a_transfer_error_keeps_its_cause() -> None:
    cause = OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(TransferError) as caught:
        raise TransferError(errno=errno.ENOSPC, path="/mnt/a", offset=0, asked=1, done=0) from cause

    assert caught.value.__cause__ is cause


def test_a_collective_error_names_op_rank_and_group() -> None:
    assert str(EXAMPLES[6]).startswith("all_gather failed on rank 2 of group layers.3. ")


def test_a_collective_error_says_what_is_known_of_the_others() -> None:
    error = CollectiveError(
        group="ranks", rank=2, op="gather of layer c", reason="rank 1 has left with ValueError: no"
    )

    assert str(error).startswith(
        "gather of layer c failed on rank 2 of group ranks: rank 1 has left with ValueError: no. "
    )


@pytest.mark.parametrize(
    "error", [error for error in EXAMPLES if isinstance(error, CheckpointError)], ids=kind
)
def test_whatever_is_wrong_with_a_checkpoint_is_a_checkpoint_error_that_names_it(
    error: InfinityError,
) -> None:
    assert isinstance(error, CheckpointError)
    assert str(error).startswith("checkpoint /ckpt")


def test_a_manifest_mismatch_says_both_sides() -> None:
    assert "wte.weight shape should be (4, 8), its manifest says (4, 9)" in str(EXAMPLES[8])


def test_an_incomplete_checkpoint_names_a_few_files_and_counts_the_rest() -> None:
    error = IncompleteCheckpoint(
        path="/ckpt", missing=tuple(f"rank{rank}.bin" for rank in range(9))
    )

    assert "rank0.bin, rank1.bin, rank2.bin, rank3.bin, rank4.bin and 4 others not found" in str(
        error
    )


def test_an_incomplete_checkpoint_names_all_files_where_they_are_few() -> None:
    assert "incomplete: rank0.bin, rank1.bin not found" in str(EXAMPLES[9])


def test_a_checksum_error_names_the_bad_place_and_both_sums() -> None:
    assert "wte.weight is damaged at or after offset 4096" in str(EXAMPLES[10])
    assert "0x0000dead, but the bytes that were written had 0x0000beef" in str(EXAMPLES[10])


def test_a_damage_error_is_a_transfer_error_that_names_the_place_both_sums_and_where_it_goes_on() -> (
    None
):
    error = DamageError(
        errno=errno.EBADMSG,
        path="/a/data",
        offset=4096,
        asked=8192,
        done=8192,
        what="wte.weight",
        expected=0xBEEF,
        found=0xDEAD,
        others=(("/b/data", 12288),),
    )

    assert isinstance(error, TransferError)
    assert error.filename == "/a/data"
    assert str(error).startswith(
        "wte.weight: /a/data: 8192 B (8.00 KiB) at offset 4096, continued in /b/data at offset "
        "12288 are damaged: "
        "their crc32c is 0x0000dead, but the bytes that were written had 0x0000beef. Try again"
    )


def test_truncated_file_is_told_as_one_that_ends() -> None:
    error = TransferError(errno=errno.ENODATA, path="/mnt/a/x", offset=4096, asked=8192, done=512)

    assert "the file ends before that" in str(error)
    assert "No data available" not in f"{error} {error.strerror}"


def test_sizes_beyond_floats_have_a_message() -> None:
    error = CapacityError(tier="HOST", asked=10**400, free=1, limit=1, change="less")

    assert f"{10**400} B" in str(error)
