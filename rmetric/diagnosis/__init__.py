"""Diagnose why a training job failed from its text logs, after L4 (arXiv 2503.20263).

One pass over the logs builds a `Job`: its streams, its events and the known faults found in it.
Three patterns and an unfiltered channel find outliers, the signature library names known faults,
and `diagnose` selects the earliest cause.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rmetric._util.lazy import lazy

if TYPE_CHECKING:
    from rmetric.diagnosis.decide import diagnose
    from rmetric.diagnosis.library import SignatureLibrary
    from rmetric.diagnosis.pool import Pool
    from rmetric.diagnosis.report.result import Diagnosis, Evidence, Suspect
else:
    __getattr__, __dir__ = lazy(
        __name__,
        {
            "rmetric.diagnosis.decide": "diagnose",
            "rmetric.diagnosis.library": "SignatureLibrary",
            "rmetric.diagnosis.pool": "Pool",
            "rmetric.diagnosis.report.result": "Diagnosis Evidence Suspect",
        },
    )

__all__ = ["Diagnosis", "Evidence", "Pool", "SignatureLibrary", "Suspect", "diagnose"]
