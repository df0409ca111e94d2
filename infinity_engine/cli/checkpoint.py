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
HELP = "Look at checkpoints, check and compare them, export their weights."

_COMMANDS = (
    ("inspect", "Say what a checkpoint is: step, tensors, bytes, what the run was."),
    ("verify", "Read every byte and compare it with its checksum."),
    ("diff", "Say in which tensors two checkpoints differ, and by how much."),
    ("export", "Write the weights as safetensors that from_pretrained and load_into read."),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `infinity checkpoint`."""
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    subparsers = {}
    for name, help_ in _COMMANDS:
        subparsers[name] = subparser = commands.add_parser(name, help=help_, description=help_)
        subparser.add_argument(
            "path", type=Path, help="a directory of checkpoints, or one checkpoint in it"
        )
        subparser.add_argument(
            "--tag", help="which checkpoint of the directory (default: the latest)"
        )
        subparser.set_defaults(command=name)
    inspect, diff, export = subparsers["inspect"], subparsers["diff"], subparsers["export"]
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
        default="model",
        help="model (what modules compute with, the default), fp32, bf16 or fp16",
    )
    export.add_argument(
        "--trainable-only", action="store_true", help="only what was trained, such as adapters"
    )


def run(options: argparse.Namespace) -> int:
    """Do what the command says."""
    from infinity_engine.cli.checkpoint_commands import COMMANDS  # needs the native modules

    try:
        return COMMANDS[options.command](options)
    except (InfinityError, OSError) as problem:
        print(f"infinity: {problem}", file=sys.stderr)
        return 2
