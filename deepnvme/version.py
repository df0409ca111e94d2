"""The version of deepnvme. Both distributions that have the package carry this number."""

__all__ = ["__version__"]

__version__ = "0.1.0.dev0"
