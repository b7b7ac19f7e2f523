"""Where the authors' own and other real logs lie, for tests that skip without them."""

from __future__ import annotations

import os
import tarfile
from functools import lru_cache
from pathlib import Path

import pytest

DATA = Path(os.environ.get("RMETRIC_DATA", Path(__file__).parents[2] / "shared" / "data"))
AUTHORS, LOGS = DATA / "authors_logs", DATA / "training_logs"

needs_authors_logs = pytest.mark.skipif(
    not AUTHORS.is_dir(),
    reason="the authors' logs are absent: put them in ../shared/data or name them by RMETRIC_DATA",
)
needs_training_logs = pytest.mark.skipif(
    not (LOGS / "labels.csv").is_file(),
    reason="real logs are absent: put them in ../shared/data or name them with RMETRIC_DATA",
)


@lru_cache(maxsize=1)
def seed_1() -> dict[str, bytes]:
    """The 720 logs of their simulator with seed 1, by `logs_<MODE>/<name>`."""
    with tarfile.open(AUTHORS / "seed1.tar.xz") as archive:
        return {
            "/".join(Path(member.name).parts[-2:]): archive.extractfile(member).read()
            for member in archive
            if member.isfile()
        }
