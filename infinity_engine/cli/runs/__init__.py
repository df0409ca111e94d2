"""The subcommands of runs: `infinity train` and `infinity report`."""

__all__: list[str] = []
