"""Several ranks that train one model: who owns what, gathering wholes, reducing gradients."""

__all__ = ()
