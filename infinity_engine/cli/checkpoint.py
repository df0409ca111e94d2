"""`infinity checkpoint`: looks at checkpoints, checks and compares them, exports their weights.

Offline, without a GPU.

Exit status: 0 all is well, 1 there is damage or a difference, 2 wrong usage or no checkpoint.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from infinity_engine.errors import InfinityError

__all__ = ["HELP", "NAME", "add_arguments", "run"]

NAME = "checkpoint"
HELP = "Look at checkpoints, check and compare them, convert them from and to other forms."

_COMMANDS = (
    ("inspect", "Say what a checkpoint is: step, tensors, bytes, what the run was."),
    ("verify", "Read every byte and compare it with its checksum."),
    ("diff", "Say in which tensors two checkpoints differ, and by how much."),
    ("export", "Write the weights as safetensors that from_pretrained and load_into read."),
    ("import", "Write what DeepSpeed, DCP or torch.save has saved as a checkpoint."),
    ("reshard", "Write it as that of another number of ranks; its streams keep their bits."),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `infinity checkpoint`."""
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    subparsers = {}
    for name, help_ in _COMMANDS:
        subparsers[name] = subparser = commands.add_parser(name, help=help_, description=help_)
        subparser.set_defaults(command=name)
        if name == "import":
            subparser.add_argument("path", type=Path, help="the directory or file to import")
            # What is imported has no tags.
            continue
        subparser.add_argument(
            "path", type=Path, help="a directory of checkpoints, or one checkpoint in it"
        )
        subparser.add_argument(
            "--tag", help="which checkpoint of the directory (default: the latest)"
        )
    inspect, diff, export = subparsers["inspect"], subparsers["diff"], subparsers["export"]
    reshard, importing = subparsers["reshard"], subparsers["import"]
    importing.add_argument("to", type=Path, help="the directory of checkpoints that it is put into")
    importing.add_argument(
        "--from",
        dest="origin",
        choices=["deepspeed", "dcp", "torch"],
        help="what saved it (default: found out)",
    )
    importing.add_argument("--ranks", type=int, default=1, help="how many ranks (default: 1)")
    importing.add_argument("--to-tag", help="its tag there (default: step-NNNNNNNN)")
    importing.add_argument(
        "--names",
        type=Path,
        metavar="FILE",
        help="the optimizer's parameters, one name a line, where it knows them by number",
    )
    importing.add_argument(
        "--no-check", action="store_true", help="do not read its files twice to check them"
    )
    reshard.add_argument("to", type=Path, help="the directory of checkpoints that it is put into")
    reshard.add_argument("--ranks", type=int, required=True, help="how many ranks")
    reshard.add_argument("--to-tag", help="its tag there (default: the tag that it has)")
    inspect.add_argument("--tensors", action="store_true", help="list every tensor")
    inspect.add_argument(
        "--json", action="store_true", help="print one JSON object instead of tables"
    )
    diff.add_argument(
        "other", type=Path, help="the other one: a directory of checkpoints, or one checkpoint"
    )
    diff.add_argument(
        "--other-tag", help="which checkpoint of the other directory (default: the latest)"
    )
    export.add_argument("to", type=Path, help="the directory to write, without weights yet")
    export.add_argument(
        "--dtype",
        choices=["model", "fp32", "bf16", "fp16"],
        help="model (what modules compute with), fp32, bf16 or fp16 "
        "(default: model for safetensors, fp32 for dcp)",
    )
    export.add_argument(
        "--format",
        choices=["safetensors", "dcp"],
        default="safetensors",
        help="safetensors (default), or dcp: weights and moments for torch.distributed.checkpoint",
    )
    export.add_argument(
        "--trainable-only", action="store_true", help="only what was trained, such as adapters"
    )


def run(options: argparse.Namespace) -> int:
    """Do what the command says."""
    from infinity_engine.cli.checkpoint_commands import COMMANDS  # needs the native modules

    try:
        return COMMANDS[options.command](options)
    except BrokenPipeError:
        raise  # which main() knows
    except (InfinityError, OSError) as problem:
        print(f"infinity: {problem}", file=sys.stderr)
        return 2
