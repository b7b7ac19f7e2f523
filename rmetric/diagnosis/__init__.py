"""Diagnose why a training job failed from its text logs, after L4 (arXiv 2503.20263).

One pass over the logs builds a `Job`: its streams, its events and the known faults found in it.
Three patterns and an unfiltered channel find outliers, the signature library names known faults,
and `diagnose` selects the earliest cause.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rmetric._util.lazy import lazy

if TYPE_CHECKING:
    from rmetric.diagnosis.library import SignatureLibrary
    from rmetric.diagnosis.pool import Pool
    from rmetric.diagnosis.result import Diagnosis, Evidence, Suspect
else:
    __getattr__, __dir__ = lazy(
        __name__,
        {
            "rmetric.diagnosis.library": "SignatureLibrary",
            "rmetric.diagnosis.pool": "Pool",
            "rmetric.diagnosis.result": "Diagnosis Evidence Suspect",
        },
    )

__all__ = ["Diagnosis", "Evidence", "Pool", "SignatureLibrary", "Suspect", "diagnose"]


def diagnose(
    paths: str | Path | Sequence[str | Path],
    *,
    healthy: str | Path | Sequence[str | Path] = (),
    pool: Pool | str | Path | None = None,
    signatures: Sequence[str | Path] = (),
    jobs: int = 1,
) -> Diagnosis:
    """Diagnose why a job failed, or that it did not, from the text logs of its ranks.

    Args:
        paths: a file or folder of one job's logs, or several of them; .gz and .zst are unpacked.
        healthy: logs of similar jobs that succeeded; each file or folder is one job. What is
            usual in them is no sign of a failure.
        pool: the same, learnt before by `rmetric logs learn`; a `Pool` or its file.
        signatures: YAML files of further signatures, beside those of the library.
        jobs: processes that read files.

    Returns:
        The diagnosis: `outcome`, `cause`, `confidence`, `nodes`, `events`, and `summary`, the
        text of at most 15 lines that `rmetric diagnose` prints.

    Raises:
        OSError: a path cannot be read.
        ValueError: a signature file or a pool is not valid.
    """
    from rmetric.diagnosis import decide
    from rmetric.diagnosis.pool import Pool

    return decide.diagnose(
        _listed(paths),
        _listed(healthy),
        Pool.load(Path(pool)) if isinstance(pool, str | Path) else pool,
        signatures,
        cores=jobs,
    )


def _listed(paths: str | Path | Sequence[str | Path]) -> Sequence[str | Path]:
    return [paths] if isinstance(paths, str | Path) else paths
