"""Read log files, in parallel where they are large, and merge them into a `Job`."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rmetric.diagnosis.aligning import aligned
from rmetric.diagnosis.clock import two_jobs
from rmetric.diagnosis.facts.job import Job
from rmetric.diagnosis.facts.starts import starts_of
from rmetric.diagnosis.input_files import find, read_auxiliary
from rmetric.diagnosis.library import SignatureLibrary
from rmetric.diagnosis.merging import merged
from rmetric.diagnosis.one_pass import FilePass, Part
from rmetric.diagnosis.reading.source import LogSource
from rmetric.diagnosis.report.render import clock
from rmetric.diagnosis.templates.events import OTHERS
from rmetric.diagnosis.templates.facts import LineAnalyser

#: Below so many bytes, processes cost more than they save.
WORTH_PROCESSES = 32 << 20
#: New objects after which Python seeks garbage while logs are read.
NEW_OBJECTS = 1_000_000


def ingest(paths: Sequence[str | Path], library: SignatureLibrary, **options: Any) -> Job:
    """The last attempt of a job; arguments as those of `ingest_attempts`."""
    return ingest_attempts(paths, library, **options)[-1]


def ingest_attempts(
    paths: Sequence[str | Path],
    library: SignatureLibrary,
    *,
    cores: int = 1,
    on_progress: Callable[[int], None] | None = None,
) -> list[Job]:
    """Read the logs of one job, each attempt by itself, the first one first.

    The same files give the same job, with any number of cores. Memory grows with the number of
    files, streams, templates and attempts, not with that of lines.

    Args:
        paths: files and folders.
        library: signatures of known faults.
        cores: processes that read files; one where there is little to read.
        on_progress: called with the number of bytes read since the last call.

    Raises:
        LogError: a path that cannot be read, or nothing to read.
    """
    found = find(paths)
    with _few_collections():
        files = list(_files(found.sources, library, cores, on_progress))
        jobs = [_job(parts, found.notes) for parts in (aligned(files) if files else [[]])]
    if found.beside:
        # A dump is written over by the next attempt's.
        last = jobs[-1]
        last.beside = read_auxiliary(found.beside)
        last.notes += last.beside.notes
        last.files |= dict.fromkeys((one.name for one in found.beside), 0)
    return jobs


@contextmanager
def _few_collections() -> Iterator[None]:
    """Let Python seek garbage in cycles more rarely: a pass makes many objects, and few cycles."""
    thresholds = gc.get_threshold()
    gc.set_threshold(thresholds[0] and max(thresholds[0], NEW_OBJECTS), *thresholds[1:])
    try:
        yield
    finally:
        if not gc.get_freeze_count():  # what was made is old now, and not searched at once
            gc.freeze()
            gc.unfreeze()
        gc.set_threshold(*thresholds)


def _files(
    sources: Sequence[LogSource],
    library: SignatureLibrary,
    cores: int,
    on_progress: Callable[[int], None] | None,
) -> Iterator[list[Part]]:
    """The attempts of each file, in the order of the files."""
    if cores == 1 or len(sources) == 1 or sum(one.size for one in sources) < WORTH_PROCESSES:
        analyser = LineAnalyser(library)
        for source in sources:
            yield _attempts_of(source, analyser, on_progress)
        return
    from joblib import Parallel

    from rmetric._util.workers import delayed

    # The largest first, so that no process is left with it at the end.
    order = sorted(range(len(sources)), key=lambda at: -sources[at].size)
    shares = _shares([sources[at] for at in order], 4 * cores)
    read = Parallel(n_jobs=min(cores, len(shares)), return_as="generator_unordered")(
        delayed(_read)(share, library) for share in shares
    )
    by_name: dict[str, list[Part]] = {}
    for files in read:
        by_name |= {parts[0].source.name: parts for parts in files}
        if on_progress is not None:
            on_progress(sum(parts[0].source.size for parts in files))
    for source in sources:
        yield by_name[source.name]


def _attempts_of(
    source: LogSource, analyser: LineAnalyser, on_progress: Callable[[int], None] | None
) -> list[Part]:
    """Parts of a file's attempts; a second pass where the first expected them elsewhere."""
    first = FilePass(source, analyser)
    found = first.read_attempts(on_progress)
    # A launcher's line that it starts its ranks again may be the last.
    starts = [start for start in starts_of(first.marks) if start <= first.number]
    if starts == [part.first_line for part in found[1:]]:
        return found
    return FilePass(source, analyser, first.prefixes).read_attempts(starts=starts)


def _shares(sources: Sequence[LogSource], number: int) -> list[list[LogSource]]:
    """About equal shares, so that a process uses its caches for several files."""
    shares: list[list[LogSource]] = [[] for _ in range(min(number, len(sources)))]
    sizes = [0] * len(shares)
    for source in sources:
        least = sizes.index(min(sizes))
        shares[least].append(source)
        sizes[least] += source.size + 1
    return shares


def _read(sources: Sequence[LogSource], library: SignatureLibrary) -> list[list[Part]]:
    return list(_files(sources, library, 1, None))


def _job(parts: Sequence[Part], notes: Sequence[str]) -> Job:
    """The job of its parts, with all notes; lost ends come first, signs of several jobs last."""
    job = merged(parts)
    found, of_files, numbers = list[str](), list[str](), dict[str, str]()
    for part in parts:
        name = part.source.name
        if part.source.cut_off:
            found.append(f"{name} does not reach its end: {part.source.cut_off}")
        of_files += part.source.notes
        if part.source.lines == 0:
            of_files.append(f"{name}: empty")
        if part.unmatched:
            of_files.append(
                f"{name}: {part.unmatched:,} entries came after too many different ones and are "
                f"counted as one event, {OTHERS}"
            )
        for number, line in part.job_ids.items():
            numbers.setdefault(number, f"{number} in {name}, line {line:,}")
    found += [*notes, *of_files, *job.notes]
    if len(numbers) > 1:
        few = "; ".join(list(numbers.values())[:4]) + ("; ..." if len(numbers) > 4 else "")
        found.append(
            f"there may be {len(numbers)} jobs in these logs, by the scheduler's numbers: {few}"
        )
    if (both := two_jobs(job)) is not None:
        end, begin = map(clock, (job.spans[both[0]][1], job.spans[both[1]][0]))
        found.append(
            f"there may be two jobs in these logs, or one stood still: {both[0]} ends at "
            f"{end} and {both[1]} begins at {begin}, with nothing between"
        )
    job.notes = list(dict.fromkeys(found))
    return job
