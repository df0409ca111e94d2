"""Files in formats that other libraries read and write as well."""

__all__ = ()
