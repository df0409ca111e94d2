"""Linear layers whose frozen weights stay in 8 or 4 bits, and are expanded while they compute.

An engine moves such weights as it moves any other frozen parameter: compact.
"""

from infinity_engine.compact.linear import CompactLinear
from infinity_engine.compact.replacing import compact_linears, expand_linears
from infinity_engine.compact.weights import CompactKind

__all__ = ["CompactKind", "CompactLinear", "compact_linears", "expand_linears"]
