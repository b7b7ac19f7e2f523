"""What the diagnosis knows of a job that a test made, before any evidence is weighed."""

from rmetric.diagnosis.clock import Ordering
from rmetric.diagnosis.evidence import Scene
from rmetric.diagnosis.faults import ended_alone, find_faults
from rmetric.diagnosis.pool import HealthyReference


def scene_of(job, library=None, *, siblings=(), offsets=None):
    """library: id -> signature of the matches of the job."""
    ordering = Ordering(job=job, offsets=offsets or {})
    alone = ended_alone(job, library or {})
    faults = find_faults(job, library or {}, ordering, alone)
    return Scene(
        job=job,
        ordering=ordering,
        faults=faults,
        alone=alone,
        known=HealthyReference.of(job, siblings, None),
    )
