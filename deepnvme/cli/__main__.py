"""Runs the `deepnvme` command as `python -m deepnvme.cli`."""

import sys

from deepnvme.cli.start import command

__all__: list[str] = []

if __name__ == "__main__":
    sys.exit(command())
