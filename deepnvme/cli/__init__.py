"""The `deepnvme` command: one module per subcommand, put together in `main`.

Builds on the library, decides nothing.
"""

__all__: list[str] = []
