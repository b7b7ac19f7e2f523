"""The version, read by the package's face and by the build, which does not import it."""

__version__ = "0.1.0"
