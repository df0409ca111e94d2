"""Runs the `infinity` command as `python -m infinity_engine.cli`."""

import sys

from infinity_engine.cli.main import main

__all__: list[str] = []

if __name__ == "__main__":
    sys.exit(main())
