"""Entry point `diagnose`: from the logs of a job to the cause of its failure.

One pass over the logs builds a `Job` (ingest.py). `gathered` collects the known faults (faults.py)
and the evidence (evidence/), the fitted model ranks suspects and hypotheses (model.py), and
answer.py states the likeliest one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from rmetric._util.lazy import EXTRAS, check_installed
from rmetric.diagnosis.answer import Weighed
from rmetric.diagnosis.clock import Ordering, clock_notes, clock_offsets
from rmetric.diagnosis.evidence import Scene, Switches, evidence
from rmetric.diagnosis.facts.job import Job
from rmetric.diagnosis.faults import ended_alone, find_faults
from rmetric.diagnosis.ingest import ingest_attempts
from rmetric.diagnosis.library import SignatureLibrary
from rmetric.diagnosis.library.load import traits_of
from rmetric.diagnosis.pool import HealthyReference, Pool
from rmetric.diagnosis.report.result import Attempt, Diagnosis

Paths = str | Path | Sequence[str | Path]


def diagnose(
    paths: Paths,
    *,
    healthy: Paths = (),
    pool: Pool | str | Path | None = None,
    signatures: Sequence[str | Path] = (),
    attempt: int | None = None,
    jobs: int = 1,
    on_progress: Callable[[int], None] | None = None,
) -> Diagnosis:
    """Diagnose why a job failed, or that it did not, from the text logs of its ranks.

    Args:
        paths: a file or folder of one job's logs, or several of them; .gz, .bz2, .xz and .zst are
            unpacked.
        healthy: logs of similar jobs that succeeded; each file or folder is one job. What is
            usual in them is not a sign of a failure.
        pool: the same, learnt before by `rmetric logs learn`; a `Pool` or its file.
        signatures: YAML files of further signatures, beside those of the library.
        attempt: number of the attempt to diagnose where the logs have several, from 1, or from
            -1 backwards; None for the last.
        jobs: processes that read files.
        on_progress: called with the number of bytes read since the last call.

    Returns:
        The diagnosis: `outcome`, `cause`, `confidence`, `nodes`, `events`, and `summary`, the
        text of at most 15 lines that `rmetric diagnose` prints.

    Raises:
        OSError: a path cannot be read.
        ValueError: a signature file or a pool is not valid, or there is no such attempt.
        ModuleNotFoundError: a package of the extra ``diagnosis`` is not installed.
    """
    check_installed(*EXTRAS["diagnosis"].split())  # before minutes of reading
    if isinstance(pool, str | Path):
        pool = Pool.load(pool)
    library = SignatureLibrary.load(signatures) if signatures else SignatureLibrary.shipped()
    read = partial(ingest_attempts, library=library, cores=jobs, on_progress=on_progress)
    attempts = read(_listed(paths))
    siblings = [read([path])[-1] for path in _listed(healthy)]
    count = len(attempts)
    number = count if attempt is None else attempt + count + 1 if attempt < 0 else attempt
    if not 1 <= number <= count:
        accepted = f"1 to {count} or -{count} to -1 is accepted"
        raise ValueError(f"attempt is {attempt}: these logs have {count}; {accepted}")
    found = gathered(attempts[number - 1], library, siblings, pool).diagnosis()
    return found if count == 1 else _beside_others(found, number, attempts, library)


def _beside_others(
    found: Diagnosis, number: int, attempts: Sequence[Job], library: SignatureLibrary
) -> Diagnosis:
    """The diagnosis of one attempt with the outcomes of all."""
    # The comparison of ranks finds no cause that a line states, and takes the longest.
    switches = Switches(spatial=False)
    diagnoses = [
        found if at == number else gathered(job, library, switches=switches).diagnosis()
        for at, job in enumerate(attempts, 1)
    ]
    found = diagnoses[number - 1] = _still_broken(found, diagnoses[: number - 1])
    rows = tuple(map(_attempt, range(1, len(diagnoses) + 1), diagnoses, attempts))
    same = sum(row.cause == found.cause for row in rows) if found.cause else 0
    why = found.why + (f"; {same} of {len(rows)} attempts ended with it" if same > 1 else "")
    return replace(found, attempt=number, attempts=rows, why=why)


def _still_broken(found: Diagnosis, before: Sequence[Diagnosis]) -> Diagnosis:
    """A GPU that broke in an attempt before explains why the next one finds none."""
    broke = next((run for run in reversed(before) if "broken GPU" in traits_of(run.family)), None)
    if broke is None or "missing GPU" not in traits_of(found.family):
        return found
    return replace(
        found,
        **{name: getattr(broke, name) for name in ("cause", "family", "title", "actor", "to_do")},
        nodes=broke.nodes or found.nodes,
        confidence=min(found.confidence, broke.confidence),
        why=f"since an attempt before; now: {found.title}",
    )


def _attempt(number: int, found: Diagnosis, job: Job) -> Attempt:
    firsts = [stream.first for stream in job.streams.values() if stream.first is not None]
    first = min(firsts, key=lambda entry: entry.order, default=None)
    fields = {name: getattr(found, name) for name in ("outcome", "cause", "title", "confidence")}
    return Attempt(
        number=number,
        file=first.file if first else next(iter(job.files), ""),
        line=first.line if first else 1,
        first_time=found.job["first_time"],
        last_time=found.job["last_time"],
        last_step=found.iteration,
        **fields,
    )


def _listed(paths: Paths) -> Sequence[str | Path]:
    return [paths] if isinstance(paths, str | Path) else paths


def gathered(
    job: Job,
    library: SignatureLibrary,
    siblings: Sequence[Job] = (),
    pool: Pool | None = None,
    *,
    switches: Switches | None = None,
) -> Weighed:
    """A job whose logs have been read, with its known faults and the evidence."""
    switches, offsets = switches or Switches(), clock_offsets(job)
    ordering = Ordering(job=job, offsets=offsets)
    signatures = {match.signature: library[match.signature] for match in job.matches.values()}
    alone = ended_alone(job, signatures)
    faults = find_faults(job, signatures, ordering, alone) if switches.library else []
    siblings, pool = (siblings, pool) if switches.cross_job else ((), None)
    scene = Scene(
        job=job,
        ordering=ordering,
        faults=faults,
        alone=alone if faults else frozenset(),
        known=HealthyReference.of(job, siblings, pool),
        notes=tuple(clock_notes(offsets)),
        switches=switches,
    )
    return Weighed(scene=scene, rows=list(evidence(scene)))
