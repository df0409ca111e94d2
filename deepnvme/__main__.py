"""`python -m deepnvme`: the command line."""

import sys

from deepnvme.cli.start import command

__all__ = ()

if __name__ == "__main__":
    sys.exit(command())
