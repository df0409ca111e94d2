"""The experiments of the two papers that the engine is made after, computed from the rates that
they print.

No part of the package that users install: `scripts/papers/reproduce` runs it from a checkout.
"""

__all__: list[str] = []
