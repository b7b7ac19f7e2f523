"""The fault laboratory: real training runs; `read_runs` reads its archives and needs no torch."""

from pathlib import Path

from rmetric.readers.archive import read_runs

DATA = Path(__file__).parent / "data"
__all__ = ["DATA", "read_runs"]
