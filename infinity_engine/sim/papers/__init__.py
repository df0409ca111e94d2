"""The experiments of the two papers that the engine is made after, computed from the rates that they print."""

__all__: list[str] = []
