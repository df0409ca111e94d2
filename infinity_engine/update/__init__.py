"""The optimizer step: masters and moments where they rest, and a plan's ops carried out on them."""

__all__ = ()
