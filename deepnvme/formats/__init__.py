"""Files whose format other libraries read and write as well."""

__all__ = ()
