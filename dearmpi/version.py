"""The version of this package, for whatever writes a file that another one may read."""

__version__ = "0.1.0"
