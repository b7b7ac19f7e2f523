"""Shared helpers: not for users of the package, and independent of the metric."""

#: Read by the build as well, which does not import it.
__version__ = "0.1.0"
