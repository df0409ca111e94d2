"""The `infinity` command: one module per subcommand, put together in `main`.

Builds on everything, decides nothing.
"""

__all__: list[str] = []
