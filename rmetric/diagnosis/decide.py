"""Entry point `diagnose`: from the logs of a job to the cause of its failure.

One pass over the logs builds a `Job` (ingest.py). Candidate causes are known faults that the
training did not survive; the earliest specific one ranks first (causes.py). Spatial, temporal and
absence outliers (patterns/, channels.py) locate the failure, and provide an inferred cause where
the library has none. `decide` combines these steps; read it next.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from rmetric._util.lazy import check_installed
from rmetric.diagnosis import rank_evidence
from rmetric.diagnosis.beside.findings import BesideFindings, find_beside
from rmetric.diagnosis.causes import (
    GENERIC,
    IN_FLIGHT,
    LOSS,
    Cause,
    collect,
    ended_alone,
    weigh,
)
from rmetric.diagnosis.channels import (
    HealthyReference,
    PatternFindings,
    Switches,
    find_patterns,
)
from rmetric.diagnosis.confidence import basis_of, calibrated
from rmetric.diagnosis.inferred_causes import (
    COLLECTIVES_DIFFER,
    FINISHED_ALONE,
    HUNG,
    NOT_ENTERED,
    NOT_FINITE,
    SILENCE,
    STANDS_ELSEWHERE,
    STARTED_OTHERWISE,
    WAITED_FOR,
    InferredCause,
)
from rmetric.diagnosis.ingest import ingest_attempts
from rmetric.diagnosis.job import Job, JobStream, Match, Occurrence
from rmetric.diagnosis.library import SignatureLibrary
from rmetric.diagnosis.library.files import traits_of
from rmetric.diagnosis.library.load import SPECIFIC
from rmetric.diagnosis.lost_connections import (
    evidence_from_lost_connections,
    evidence_from_remote_hosts,
)
from rmetric.diagnosis.ordering import Ordering, stage_at
from rmetric.diagnosis.patterns.not_finite import loss_not_finite
from rmetric.diagnosis.patterns.stages import awaited, stage_of_wait
from rmetric.diagnosis.patterns.steps import planned_steps
from rmetric.diagnosis.pool import Pool, learn, ordinary
from rmetric.diagnosis.progress import Hang, end_of, find_hang
from rmetric.diagnosis.report.evidence import MAX_EVENTS, how_often, of_causes, of_odd
from rmetric.diagnosis.report.frames import probable_stage_of, raised, stage_of
from rmetric.diagnosis.result import (
    FOLLOWS,
    LIKELY,
    Attempt,
    Candidate,
    Diagnosis,
    Evidence,
    Suspect,
    not_above,
)
from rmetric.diagnosis.signature import Signature
from rmetric.diagnosis.suspects import NAMED, RankEvidence, named, only_node, suspects
from rmetric.diagnosis.usual_causes import with_usual

MAX_CANDIDATES = 5
#: A cause of another family with at least this share of the first one's score is a rival.
RIVAL_SCORE_SHARE = 0.9
#: Factor on the confidence of a cause that has a rival.
RIVAL_CONFIDENCE_FACTOR = 0.85
#: Confidence that a job is healthy whose planned end is stated.
CONFIDENCE_PLANNED_END = 0.97
#: Confidence that a job is healthy that trained and shows no failure.
CONFIDENCE_NO_FAILURE = 0.6
#: Confidence that a job is healthy whose log stops early.
CONFIDENCE_STOPS_EARLY = 0.4
#: Share of the planned steps below which a log stops early.
MIN_PLANNED_STEP_SHARE = 0.95
#: Least score of a silent suspect that makes the job a failed one.
MIN_SILENT_SCORE = 0.6
#: Kinds of evidence of how a process ended, which tell nothing where all were ended as they hung.
OF_ENDS = ("killed", "failed first")
#: Kinds of evidence by comparison, which say less than the stack of a rank that others wait for.
COMPARED = ("behind", "missing event", "unlike")
#: Kinds of evidence that are absences.
ABSENCE_KINDS = ("silent", "ended early", "no echo")
#: Kinds of evidence of what a rank did not log, as others did.
LACKS = (*ABSENCE_KINDS, "missing event", "last words")
#: Least strength of such evidence: it is of one or two ranks, not of many.
MIN_ABSENCE_STRENGTH = 0.6
#: Roles that explain a failure. Others explain it from the following confidences on.
LEAD_ROLES = ("cause", "ending")
#: Above this confidence a symptom (a worker's reported death) precedes a silent rank.
MIN_CONFIDENCE_OVER_SILENCE = 0.6
#: An entry below this names a rank and is no sign of a failure by itself.
MIN_CONFIDENCE_OF_SYMPTOM = 0.2
#: Above this confidence a symptom (a timeout) explains a failure without a silent rank.
MIN_CONFIDENCE_WITHOUT_SILENCE = 0.4
#: Reason for a healthy verdict without a stated end.
NO_FAILURE_FOUND = (
    "training steps were logged and no failure was found; no line states the planned end"
)
#: Text logs are read here, not the numbers in them.
LOSSES_HINT = "Losses are not evaluated here; use rmetric replay."
#: Where a log stops short, as that of a process that is killed does.
JOB_ENDED_HINT = (
    "If the job has ended, check the scheduler's record and the node's kernel log (OOM kill)."
)
#: Entries of a stream that are its end.
NUM_FINAL_ENTRIES = 3

#: Stages that a job leaves with its first step.
_BEFORE_TRAINING = ("launch", "initialise", "load data", "compile")

#: Where a stack tells of a rank, and nothing tells which.
_SOME_RANK = Suspect(name="one rank", rank=None, node=None, score=1.0, why="")

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
            usual in them is no sign of a failure.
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
    check_installed("dtaidistance", "sklearn")  # before minutes of reading
    if isinstance(pool, str | Path):
        pool = Pool.load(pool)
    library = SignatureLibrary.load(signatures) if signatures else SignatureLibrary.shipped()

    def read(some: Sequence[str | Path]) -> list[Job]:
        return ingest_attempts(some, library, cores=jobs, on_progress=on_progress)

    attempts = read(_listed(paths))
    siblings = [read([path])[-1] for path in _listed(healthy)]
    number = _number_of(attempt, len(attempts))
    found = decide(attempts[number - 1], library, siblings, pool)
    if len(attempts) == 1:
        return found
    return _beside_others(found, number, attempts, library)


def _number_of(attempt: int | None, count: int) -> int:
    number = count if attempt is None else attempt + count + 1 if attempt < 0 else attempt
    if not 1 <= number <= count:
        raise ValueError(
            f"attempt is {attempt}: these logs have {count}; 1 to {count} or -{count} to -1 is "
            "accepted"
        )
    return number


def _beside_others(
    found: Diagnosis, number: int, attempts: Sequence[Job], library: SignatureLibrary
) -> Diagnosis:
    """The diagnosis of one attempt with the outcomes of all."""
    # The comparison of ranks finds no cause that a line states, and takes the longest.
    switches = Switches(spatial=False)
    each = [
        found if at == number else decide(job, library, switches=switches)
        for at, job in enumerate(attempts, 1)
    ]
    found = each[number - 1] = _still_broken(found, each[: number - 1])
    rows = tuple(
        _attempt(at, one, job) for at, (one, job) in enumerate(zip(each, attempts, strict=True), 1)
    )
    same = sum(one.cause == found.cause for one in rows) if found.cause else 0
    why = found.why + (f"; {same} of {len(rows)} attempts ended with it" if same > 1 else "")
    return replace(found, attempt=number, attempts=rows, why=why)


def _still_broken(found: Diagnosis, before: Sequence[Diagnosis]) -> Diagnosis:
    """A GPU that broke in an attempt before explains why the next one finds none."""
    broke = next((one for one in reversed(before) if "broken GPU" in traits_of(one.family)), None)
    if broke is None or "missing GPU" not in traits_of(found.family):
        return found
    return replace(
        found,
        cause=broke.cause,
        family=broke.family,
        title=broke.title,
        actor=broke.actor,
        to_do=broke.to_do,
        nodes=broke.nodes or found.nodes,
        confidence=min(found.confidence, broke.confidence),
        why=f"since an attempt before; now: {found.title}",
    )


def _attempt(number: int, found: Diagnosis, job: Job) -> Attempt:
    firsts = [one.first for one in job.streams.values() if one.first is not None]
    first = min(firsts, key=lambda one: one.order, default=None)
    return Attempt(
        number=number,
        file=first.file if first else next(iter(job.files), ""),
        line=first.line if first else 1,
        first_time=found.job["first_time"],
        last_time=found.job["last_time"],
        last_step=found.iteration,
        outcome=found.outcome,
        cause=found.cause,
        title=found.title,
        confidence=found.confidence,
    )


def _listed(paths: Paths) -> Sequence[str | Path]:
    return [paths] if isinstance(paths, str | Path) else paths


def decide(
    job: Job,
    library: SignatureLibrary,
    siblings: Sequence[Job] = (),
    pool: Pool | None = None,
    *,
    switches: Switches | None = None,
    seed: int = 0,
) -> Diagnosis:
    """The diagnosis of a job whose logs have been read; `seed` is the Isolation Forest's."""
    switches = switches or Switches()
    known = _known(job, siblings, pool) if switches.cross_job else HealthyReference()
    signatures = {one.signature: library[one.signature] for one in job.matches.values()}
    matches = job.matches.values() if switches.library else ()
    echoes = [one.events for one in matches if signatures[one.signature].role == "echo"]
    rng = np.random.default_rng(seed)
    found = find_patterns(job, known, switches, rng, frozenset().union(*echoes))
    ordering = found.ordering
    alone = ended_alone(job, signatures)
    causes = []
    if switches.library:
        causes = weigh(collect(job, signatures, ordering, alone), ordering)
    signs = [*found.signs, *rank_evidence.evidence_from_causes(job, causes, ordering)]
    beside = find_beside(job, ordering.after, rank_evidence.RankIndex(job).at)
    signs += beside.signs
    hang = find_hang(job, causes, ordering) if switches.temporal else None
    signs += hang.signs if hang else ()
    # Without a failure of the others it is only the one that logs its end.
    alone = alone if causes else frozenset()
    signs += rank_evidence.evidence_from_endings(job, alone)
    # What holds up one rank holds up its group in another operation.
    signs += [
        one
        for one in rank_evidence.evidence_from_collectives(causes)
        if not beside.awaited or one.stream in beside.awaited
    ]
    signs += rank_evidence.evidence_from_waits(job, causes)
    signs += rank_evidence.evidence_from_links(job, causes)
    if switches.unfiltered:
        # A rank without the error of all others explains the losses better than their order.
        remote = evidence_from_remote_hosts(job, causes)
        without = rank_evidence.evidence_from_echoes(job, causes)
        signs += [*remote, *without] or evidence_from_lost_connections(job, causes)
        if remote and not job.streams.keys() & {one.stream for one in remote}:
            # A node without logs was lost; what a rank of another one lacks tells nothing.
            signs = [one for one in signs if one.kind not in LACKS]
    if beside.awaited or hang:
        less = {*OF_ENDS, *(COMPARED if any(beside.awaited) else ())}
        signs = [one for one in signs if one.stream in beside.awaited or one.kind not in less]
    signs = _without_absence_beside_hardware(causes, signs)
    absent = {
        one.stream
        for one in signs
        if one.kind in ABSENCE_KINDS and one.strength >= MIN_ABSENCE_STRENGTH
    }
    return _Case(
        job=job,
        causes=causes,
        found=found,
        ranked=suspects(job, signs),
        absent=frozenset(absent),
        alone=alone,
        hang=hang,
        beside=beside,
        operations=rank_evidence.other_operations(causes),
    ).diagnosis()


def _without_absence_beside_hardware(
    causes: Sequence[Cause], signs: Sequence[RankEvidence]
) -> list[RankEvidence]:
    """The evidence but for what others lack, where hardware that failed is known by its own log.

    Or where a write failed: whoever writes nothing more is no suspect.
    """
    lead = next((one for one in causes if one.signature.role in LEAD_ROLES), None)
    if lead is not None and lead.score >= LIKELY and "write fails" in lead.signature.traits:
        met = {one.stream for one in signs if one.kind == "own cause"}
        return [one for one in signs if one.stream in met or one.kind not in {*LACKS, *COMPARED}]
    own = {one.stream for one in signs if one.kind in ("own cause", "kernel")}
    if lead is None or lead.score < LIKELY or lead.signature.of_two:
        return list(signs)
    if lead.signature.actor != "hardware" or own.isdisjoint(lead.streams):
        return list(signs)
    return [one for one in signs if one.stream in own or one.kind not in ABSENCE_KINDS]


def _known(job: Job, siblings: Sequence[Job], pool: Pool | None) -> HealthyReference:
    if pool is None and siblings:
        pool = learn("siblings", siblings)
    usual = frozenset(ordinary(job, pool)) if pool else frozenset()
    return HealthyReference(siblings=tuple(siblings), pool=pool, ordinary=usual)


@dataclass(frozen=True, kw_only=True)
class _Case:
    """All inputs of the decision about one job.

    Attributes:
        causes: that were not survived, the best first.
        found: findings of the patterns.
        ranked: streams with evidence against them, the most suspect first.
        absent: names of streams that fell silent, or lack an error that others report.
        alone: names of streams that report a planned end while the others failed.
        hang: before the job was ended from outside; None for none.
        beside: of flight recorder dumps and stacks.
        operations: rank -> the operation in which it alone waits, and that of the others.
    """

    job: Job
    causes: Sequence[Cause]
    found: PatternFindings
    ranked: tuple[Suspect, ...]
    absent: frozenset[str]
    alone: frozenset[str]
    hang: Hang | None
    beside: BesideFindings
    operations: Mapping[str, str]

    @property
    def ordering(self) -> Ordering:
        return self.found.ordering

    def diagnosis(self) -> Diagnosis:
        lead = next((one for one in self.causes if one.signature.role in LEAD_ROLES), None)
        explained = lead is not None and lead.score >= LIKELY and lead.signature.role == "cause"
        if self.beside.stuck is not None and not explained:
            return self._by_kind(NOT_ENTERED, "recorder", lead)
        hang = self.hang if lead is None or lead.score >= LIKELY else None
        apart = next((one for one in self.ranked if one.name in self.beside.collectives), None)
        ended = lead is not None and lead.signature.role == "ending"
        if apart is not None and (hang is not None or ended):
            return self._in_another_operation(apart, lead)
        if hang is not None:
            return self._hung(hang, lead)
        if lead is not None and (
            (ended and self.beside.odd)
            or ("watched" in lead.signature.traits and self._odd_stacks())
        ):
            return self._by_kind(STANDS_ELSEWHERE, "stack", lead)
        stopped = next(
            (one for one in self.causes if "stopped process" in one.signature.traits), None
        )
        if stopped is not None and (lead is stopped or ended):
            return self._explained(stopped)
        bad = loss_not_finite(self.job) if not explained else None
        if bad is not None:
            return self._not_finite(bad, lead)
        if lead is not None and lead.score >= LIKELY:
            silent = self._silent_before(lead) if lead.signature.role == "ending" else None
            return self._silence(silent, lead.signature.title) if silent else self._explained(lead)
        symptom = self._best_symptom()
        timed_out = symptom is not None and "timeout" in symptom.signature.traits
        odd = self.beside.odd or (timed_out and self.beside.awaited)
        generic = symptom is not None and symptom.signature.confidence < GENERIC
        killed = symptom is not None and self.beside.odd and self._is_put_down(symptom)
        if killed and apart is not None:  # by what had taken the stacks before
            return self._in_another_operation(apart, symptom)
        # Watchdogs that name the operations tell more than stacks of ranks that wait in them.
        odd = odd and (self._apart is None or bool(self.beside.awaited))
        if odd and (symptom is None or generic or killed or symptom.signature.role == "echo"):
            return self._by_kind(STANDS_ELSEWHERE, "stack", symptom if killed else None)
        if symptom is not None and "outlasts success" in symptom.signature.traits:
            return self._explained(symptom)
        if self.job.succeeded is not None and not self.alone:
            return self._healthy(CONFIDENCE_PLANNED_END, self.job.succeeded.text)
        if symptom is not None and symptom.signature.role == "echo" and self._apart is not None:
            return self._in_another_operation(self._apart)
        if symptom is not None and timed_out:
            kept = self._kept_waiting(symptom)
            if kept is not None:
                return kept
        if symptom is not None and symptom.signature.confidence >= MIN_CONFIDENCE_OVER_SILENCE:
            return self._explained(symptom)
        if self.ranked and self.ranked[0].name in self.alone:
            last = self.job.streams[self.ranked[0].name].last
            return self._inferred(FINISHED_ALONE, self.ranked[0], last)
        if deviation := self._deviating_start():
            first = self.job.streams[deviation.stream].first
            return self._inferred(STARTED_OTHERWISE, self.ranked[0], first, what=deviation.words)
        if silent := self._silent():
            return self._silence(silent)
        if symptom is not None and symptom.signature.confidence >= MIN_CONFIDENCE_WITHOUT_SILENCE:
            return self._explained(symptom)
        if symptom is not None:
            return self._unclear(symptom)
        return self._no_known_fault()

    def _not_finite(self, first: Occurrence, lead: Cause | None) -> Diagnosis:
        """A loss that never was finite again, whatever ended the job."""
        last = self.job.furthest.last_step if self.job.furthest else None
        since = "to the end" if first.step is None else f"from step {first.step} to {last}"
        ended = f"; ended by: {lead.signature.title}" if lead is not None else ""
        return self._result(
            outcome="failed",
            cause=NOT_FINITE.id,
            family=NOT_FINITE.family,
            title=NOT_FINITE.title.format(what=since),
            actor=NOT_FINITE.actor,
            confidence=NOT_FINITE.confidence,
            why=NOT_FINITE.why + ended,
            place=first,
            to_do=NOT_FINITE.to_do,
            events=self._events(),
            nodes=(),
            candidates=self._candidates(None, NOT_FINITE),
        )

    def _kept_waiting(self, symptom: Cause) -> Diagnosis | None:
        """The only suspect that its own last entry shows at data or a checkpoint; None without.

        Or the rank or the node whose kernel found a process that waits in a read or a write.
        """
        suspects = named(self.ranked)
        blocked = self._blocked_in()
        if blocked and suspects:
            place = self.job.streams.get(suspects[0].name)
            return self._inferred(
                WAITED_FOR,
                suspects[0],
                place.last if place is not None else symptom.first,
                what="its process waits in the kernel",
                followed_by=symptom.signature.title,
                stage=blocked,
            )
        stream = self.job.streams.get(suspects[0].name) if len(suspects) == 1 else None
        last = self._last_own(stream, symptom.first) if stream is not None else None
        if last is None or "\n" in last.text:
            return None
        furthest = self.job.furthest
        if furthest is not None and furthest.last_step_at is not None:
            at = furthest.last_step_at
            near = last.step is not None and last.step >= (furthest.last_step or 0) - IN_FLIGHT
            if not near and not self.ordering.after(last, at):
                return None  # it has logged nothing since
        stage = awaited(last.text)
        if not stage:
            return None
        return self._inferred(
            WAITED_FOR,
            suspects[0],
            last,
            what=repr(end_of(last.text)),
            followed_by=symptom.signature.title,
            stage=stage,
        )

    def _blocked_in(self) -> str:
        """The stage of a process that its node's kernel found waiting, by its stack there."""
        nodes = {
            match.stream
            for one in self.causes
            if "blocked process" in one.signature.traits
            for match in one.matches
        }
        stages = {"blocked in a write": "checkpoint", "blocked in a read": "load data"}
        found = {
            stages[trait]
            for match in self.job.matches.values()
            if match.stream in nodes
            for trait in stages.keys() & match.traits
        }
        return min(found) if len(found) == 1 else ""

    @property
    def _apart(self) -> Suspect | None:
        """The first suspect that waits in another operation than most."""
        return next((one for one in named(self.ranked) if one.name in self.operations), None)

    def _in_another_operation(self, suspect: Suspect, lead: Cause | None = None) -> Diagnosis:
        stream = self.job.streams.get(suspect.name)
        last = stream.last if stream is not None else None
        what = {**self.beside.collectives, **self.operations}[suspect.name]
        ended = lead.signature.title if lead is not None else ""
        return self._inferred(COLLECTIVES_DIFFER, suspect, last, what=what, followed_by=ended)

    def _by_kind(self, inferred: InferredCause, kind: str, lead: Cause | None) -> Diagnosis:
        """A cause inferred from evidence of one kind, of the first rank that has it."""
        reasons = {one.stream: one.words for one in self.beside.signs if one.kind == kind}
        suspect = next((one for one in self.ranked if one.name in reasons), _SOME_RANK)
        if suspect is _SOME_RANK:  # nothing tells whose stack it is
            suspect = next(iter(named(self.ranked)), suspect)
            reasons = {suspect.name: self.beside.unnamed.words}
        stream = self.job.streams.get(suspect.name)
        own = self._last_own(stream) if stream is not None and lead is not None else None
        stood = self._stood_in(suspect)
        awaits = self.beside.awaited
        stage = awaits.get(suspect.name, awaits.get("", "")) if kind == "stack" else ""
        stage = stage or stage_of_wait(stood or (own.text if own is not None else ""))
        if not stage and lead is not None and kind == "stack":
            stage = self._stage(lead.first)  # the stacks were taken while all stood there
        return self._inferred(
            inferred,
            suspect,
            stream.last if stream else None,
            what=reasons[suspect.name],
            followed_by=lead.signature.title if lead else "",
            stage=stage,
        )

    def _best_symptom(self) -> Cause | None:
        """Return the most confident match that does not follow from another."""
        own = [
            one
            for one in self.causes
            if not one.follows and one.signature.confidence >= MIN_CONFIDENCE_OF_SYMPTOM
        ]
        return max(own, key=lambda one: one.signature.confidence, default=None)

    def _silent(self) -> Suspect | None:
        """The first suspect, if it fell silent before the others or lacks what they report."""
        first = self.ranked[0] if self.ranked else None
        if first is None or first.name not in self.absent or first.score < MIN_SILENT_SCORE:
            return None
        return None if self._went_on_without(first.name) else first

    def _silent_before(self, ending: Cause) -> Suspect | None:
        """As `_silent`, if half of the others logged more until the job was ended from outside."""
        suspect = self._silent()
        stream = self.job.streams.get(suspect.name) if suspect is not None else None
        last = stream.last if stream is not None else None
        if last is None:
            return suspect
        others = [one for one in self.job.active_streams if one is not stream]
        went_on = sum(
            any(self.ordering.after(entry, last) and self.ordering.after(ending.first, entry)
                for entry in one.tail)
            for one in others
        )  # fmt: skip
        return suspect if 2 * went_on >= len(others) else None

    def _went_on_without(self, name: str) -> bool:
        """True if the training made more steps after a rank's last entry than may be in flight.

        All ranks take part in a step, so that one that was not needed had only nothing to log.
        """
        stream = self.job.streams.get(name)
        if stream is None or stream.last is None:
            return False
        last = stream.last
        later = {
            entry.step
            for one in self.job.streams.values()
            if one.steps
            for entry in one.tail
            if entry.step is not None and self.ordering.after(entry, last)
        }
        return len(later) > IN_FLIGHT

    def _needed(self) -> list[Suspect]:
        """The suspects without those that are only silent, while the training went on."""
        return [
            one
            for one in self.ranked
            if one.name not in self.absent or not self._went_on_without(one.name)
        ]

    def _explained(self, lead: Cause) -> Diagnosis:
        return self._result(
            outcome="terminated" if lead.signature.role == "ending" else "failed",
            cause=lead.signature.id,
            family=lead.signature.family,
            # The exception is more precise than a generic signature's title.
            title=(lead.signature.rank < SPECIFIC and raised(lead.first.text))
            or lead.signature.title,
            actor=lead.signature.actor or None,
            confidence=self._confidence(lead),
            why=self._why(lead),
            place=lead.first,
            to_do=lead.signature.to_do,
            events=self._events(),
            nodes=named(self._needed() if lead.signature.role == "ending" else self.ranked)
            or self._only_node(lead),
            candidates=self._candidates(lead),
        )

    def _only_node(self, lead: Cause) -> tuple[Suspect, ...]:
        """The node of a job that has one, for a fault of a node's own."""
        node = only_node(self.job)
        own = "of one node" in lead.signature.traits or lead.signature.actor == "hardware"
        if node is None or not own:
            return ()
        why = "the only node of the job"
        return (Suspect(name=f"node {node}", rank=None, node=node, score=NAMED, why=why),)

    def _confidence(self, lead: Cause) -> float:
        if lead.signature.role not in LEAD_ROLES:
            return lead.signature.confidence
        rival = any(
            one.signature.family != lead.signature.family
            and one.signature.role in LEAD_ROLES
            and one.score >= RIVAL_SCORE_SHARE * lead.score
            for one in self.causes[1:]
        )
        return round(lead.score * (RIVAL_CONFIDENCE_FACTOR if rival else 1.0), 3)

    def _why(self, lead: Cause) -> str:
        words = how_often(lead, self.job)
        if any(one.follows == lead.signature.id for one in self.causes):
            words += ", before all other faults"
        if lead.signature.role == "echo":
            words += "; reported by ranks that lost a peer; the cause itself left no line"
        return words

    def _candidates(
        self, lead: Cause | None, inferred: InferredCause | None = None
    ) -> tuple[Candidate, ...]:
        found = []
        for one in self.causes:
            signature, before = one.signature, one.follows
            explains = signature.role in LEAD_ROLES or (signature.role == "echo" and not before)
            if one is lead or not explains:
                continue
            if inferred is not None and one.score >= LIKELY:
                before = before or inferred.id
            why = f"{FOLLOWS}{before}" if before else how_often(one, self.job)
            found.append(Candidate(signature.id, signature.title, round(one.score, 3), why))
        return tuple(found[:MAX_CANDIDATES])

    def _silence(self, first: Suspect, followed_by: str = "") -> Diagnosis:
        stream = self.job.streams.get(first.name)
        return self._inferred(
            SILENCE, first, stream.last if stream else None, followed_by=followed_by
        )

    def _hung(self, hang: Hang, lead: Cause | None) -> Diagnosis:
        last = self.job.furthest
        place = last.last_step_at if last else None
        suspects = named(self.ranked)
        kept = (one for one in suspects if one.name in self.beside.awaited)
        who = next(kept, next(iter(suspects), None))
        own = self.job.streams.get(who.name) if who else None
        apart = {*(one.stream for one in hang.signs), *self._odd_stacks()}
        at = self._last_own(own) if own and own.name in apart else None
        text = self._stood_in(who) or hang.last_words or (at.text if at else "")
        return self._result(
            stage=self.beside.awaited.get(who.name if who else "")
            or (stage_of_wait(text) if text else "")
            or self._blocked_in()
            or self._stage(place),
            outcome="failed",
            cause=HUNG.id,
            family=HUNG.family,
            title=HUNG.title.format(what=hang.words),
            actor=HUNG.actor,
            confidence=hang.confidence,
            why=f"{HUNG.why}{hang.why}; ended by: {lead.signature.title}"
            if lead is not None
            else f"no step for far longer than the longest pause between steps{hang.why}",
            place=place,
            to_do=HUNG.to_do,
            events=self._events(self.found.odd),
            nodes=named(self.ranked),
            candidates=self._candidates(None, HUNG),
        )

    def _stood_in(self, who: Suspect | None) -> str:
        """Where a rank's stack differs from that of most; "" where none was taken."""
        words = (one.words for one in self.beside.signs if who and one.stream == who.name)
        return next(words, "").partition(" others in ")[0]

    def _odd_stacks(self) -> set[str]:
        """Names of the ranks whose stack is not that of most."""
        return {one.stream for one in self.beside.signs if one.kind == "stack"}

    def _last_own(self, stream: JobStream, before: Occurrence | None = None) -> Occurrence | None:
        """A rank's last entry that is of no cause: a launcher's report may name it too.

        Before another entry, where one is given.
        """
        events = {event for one in self.causes for each in one.matches for event in each.events}
        own = (one for one in reversed(stream.tail) if one.event not in events)
        return next((one for one in own if not before or self.ordering.after(before, one)), None)

    def _deviating_start(self) -> RankEvidence | None:
        """The deviating settings of the first suspect, if the job never reached a step."""
        if self.job.trained or not self.ranked:
            return None
        first = self.ranked[0].name
        signs = (one for one in self.found.signs if one.kind == "settings")
        return next((one for one in signs if one.stream == first), None)

    def _led_by(self, suspect: Suspect) -> tuple[Suspect, ...]:
        """All suspects, that rank first; a rank tells more than its node."""
        every = named(self.ranked)
        if suspect.rank is None or suspect not in every:
            return every
        return (suspect, *(one for one in every if one is not suspect))

    def _inferred(
        self, inferred: InferredCause, suspect: Suspect, place: Occurrence | None, *,
        what: str = "", followed_by: str = "", stage: str = "",
    ) -> Diagnosis:  # fmt: skip
        who = suspect.name
        if suspect.node and suspect.node not in who:
            who = f"{who} on {suspect.node}"
        return self._result(
            stage=stage or self._stage(place),
            outcome="failed",
            cause=inferred.id,
            family=inferred.family,
            title=inferred.title.format(who=who, what=what),
            actor=inferred.actor,
            confidence=round(min(inferred.confidence, suspect.score), 3),
            why=inferred.why + (f"; followed by: {followed_by}" if followed_by else ""),
            place=place,
            to_do=inferred.to_do,
            events=self._events(self.found.odd),
            nodes=self._led_by(suspect),
            candidates=self._candidates(None, inferred),
        )

    def _unclear(self, lead: Cause) -> Diagnosis:
        """A fault that does not explain the failure; the candidates and its entry are shown."""
        sure = self.found.stopped or lead.signature.confidence >= LIKELY or self._ends_badly()
        return self._result(
            outcome="failed" if sure else "unknown",
            title=f"Cause unknown. Closest match: {lead.signature.title}",
            confidence=round(lead.score, 3),
            why=self._why(lead),
            place=lead.first,
            to_do=lead.signature.to_do,
            events=self._events(self.found.odd),
            nodes=named(self.ranked),
            candidates=self._candidates(None),
            closest=lead.signature,
        )

    def _is_put_down(self, symptom: Cause) -> bool:
        """True for processes that something else ended, as a collective's watchdog does."""
        if "unexplained kill" in symptom.signature.traits:
            return True
        waited = any("timeout" in one.signature.traits for one in self.causes)
        return "abort" in symptom.signature.traits and waited and bool(self.beside.awaited)

    def _ends_badly(self) -> bool:
        """Return True if most streams end with a matched event among their last entries."""
        bad = {event for one in self.causes for match in one.matches for event in match.events}
        ends = [
            any(entry.event in bad for entry in [*stream.tail][-NUM_FINAL_ENTRIES:])
            for stream in self.job.streams.values()
        ]
        return sum(ends) > len(ends) / 2

    def _no_known_fault(self) -> Diagnosis:
        """No fault is known and none stands out."""
        if self.found.odd and self.found.stopped:
            return self._result(
                outcome="unknown",
                title="Outcome unknown: no known fault, but unusual events at the end",
                confidence=0.3,
                why="events that neither successful jobs nor the rest of this job have",
                events=of_odd(self.job, self.found.odd, self.ordering),
                nodes=named(self.ranked),
            )
        if self.found.stopped:
            return self._result(
                outcome="unknown",
                title="Outcome unknown: the log ends without a fault and without the usual end",
                confidence=0.4,
                why=self.found.stopped,
            )
        if self.job.trained:
            short = self._early_stop()
            confidence = CONFIDENCE_STOPS_EARLY if short else CONFIDENCE_NO_FAILURE
            return self._healthy(confidence, short=short)
        if any(event.count > 1 and LOSS.search(event.template) for event in self.job.events):
            return self._healthy(CONFIDENCE_STOPS_EARLY)
        return self._result(
            outcome="unknown",
            title="Outcome unknown: these logs show no training, no end and no known fault",
            confidence=0.0,
            why="no line was recognised",
            events=of_odd(self.job, self.found.odd, self.ordering),
        )

    def _early_stop(self) -> str:
        """Describe where the log stops, if that is before the planned number of steps."""
        if self.job.cut_off:
            return ", but the log is cut off before its end"
        last = self.job.furthest
        if last is None or last.last_step_at is None:
            return ""
        step = last.last_step or 0
        planned = planned_steps(last.last_step_at.text, step)
        if planned is None or step >= MIN_PLANNED_STEP_SHARE * planned:
            return ""
        return f", but the log stops at step {step:,} of {planned:,}"

    def _healthy(self, confidence: float, end: str = "", short: str = "") -> Diagnosis:
        """Describe a healthy job; `end`: the line that states it, `short`: where the log stops."""
        words, to_do = NO_FAILURE_FOUND, [LOSSES_HINT]
        if short:
            words = "no failure found; the job may still run or was killed, or the log is cut"
            to_do = [JOB_ENDED_HINT, LOSSES_HINT]
        elif end:
            words, to_do = f"planned end stated: {end}", []
        apart = {place.stream for place, _ in self.found.number_outliers}
        return self._result(
            outcome="healthy",
            title=f"No failure found{short}",
            confidence=confidence,
            why=words,
            to_do=tuple(to_do),
            place=self.job.succeeded,
            events=of_odd(self.job, self.found.number_outliers, self.ordering),
            nodes=named([one for one in self.ranked if one.name in apart]),
        )

    def _stage(self, place: Occurrence | None) -> str:
        """As `_logged_stage`; a checkpoint that fails is written or read, whatever was logged."""
        stage = self._logged_stage(place)
        traits = [one.signature.traits for one in self.causes]
        lead = traits[0] if traits else ()
        named = place is not None and awaited(place.text) == "checkpoint"
        named |= any("checkpoint" in one for one in traits)
        fails = "checkpoint" in lead or ("write fails" in lead and named)
        return "checkpoint" if fails and stage == "train" else stage

    def _logged_stage(self, place: Occurrence | None) -> str:
        """Stage from the own traceback, else the log, else other tracebacks, else the fault."""
        if self.causes and "before start" in self.causes[0].signature.traits:
            return "launch"
        matches = [match for one in self.causes for match in one.matches]
        own = [
            one.text
            for match in matches
            if place and match.stream == place.stream
            for one in (match.first, match.last)
        ]
        stage = _first_stage([place.text, *own] if place else [])
        hardware = bool(self.causes) and self.causes[0].signature.actor == "hardware"
        if stage == "load data" and hardware and self.job.trained:
            stage = ""  # a GPU's fault is raised by whatever uses it next
        if not stage and place is not None:
            stage = stage_at(self.job, place, self.ordering)
        if not hardware or not self.job.trained:
            stage = stage or _first_stage([match.first.text for match in matches])
        stage = stage or self.found.stage
        if stage in _BEFORE_TRAINING and not self.job.trained and self._in_training(matches):
            stage = "train"  # without a line of a step, which few ranks write
        if stage:
            return stage
        probable = map(probable_stage_of, [place.text, *own] if place else [])
        usual = self.causes[0].signature.usual_stage if self.causes else ""
        return next(filter(None, probable), "") or usual

    def _in_training(self, matches: Sequence[Match]) -> bool:
        """Return True if the traceback of a rank's failure passes through the training loop."""
        events = {event for match in matches for event in match.events}
        entries = (one for stream in self.job.streams.values() for one in stream.tail)
        return any(stage_of(one.text) == "train" for one in entries if one.event in events)

    def _time(self, place: Occurrence | None) -> float | None:
        """Time of an entry; of one without, that of the next in its file, or its stream's last."""
        if place is None:
            return None
        stream = self.job.streams.get(place.stream)
        if place.time is None:
            after = self.ordering.at_latest(place)
            if after is not None and after.time is not None:
                place = after
            elif stream is not None:
                place = msgspec.structs.replace(place, time=stream.last_time)
        return self.ordering.dated(place)

    def _events(self, odd: Sequence[tuple[int, str]] = ()) -> tuple[Evidence, ...]:
        """Those of the causes, errors that first occur with them, and `odd` ones; each once."""
        shown = list(of_causes(self.job, self.causes, self.ordering))
        known = {(one.file, one.line) for one in shown}
        templates = {one.template for one in shown}
        found = self.found
        for one in (
            *of_odd(self.job, [*found.number_outliers, *found.slow], self.ordering),
            *of_odd(self.job, [*found.errors, *odd][:MAX_EVENTS], self.ordering),
        ):
            if (one.file, one.line) not in known and one.template not in templates:
                shown.append(one)
                templates.add(one.template)
        return tuple(shown[:MAX_EVENTS])

    def _result(
        self, *, place: Occurrence | None = None, closest: Signature | None = None, **fields: Any
    ) -> Diagnosis:
        job = self.job
        since = self.found.first_odd if fields["outcome"] != "healthy" else None
        furthest = job.furthest
        steps = furthest is not None and not furthest.counts_samples
        outcome, cause, score = fields["outcome"], fields.get("cause"), fields["confidence"]
        basis = basis_of(job, self.causes, self.ordering, outcome, cause, score)
        fields |= {
            "score": score, "basis": basis.kind, "confidence": calibrated(basis, score)
        }  # fmt: skip
        if basis.against:
            fields["why"] += f"; not sure: {basis.against}"
        if fields.get("cause"):
            fields["candidates"] = not_above(fields["confidence"], fields["candidates"])
        fields.setdefault("stage", self._stage(place))
        if outcome != "healthy" or fields["confidence"] < LIKELY:
            named = (closest.id, closest.family) if closest else (cause, fields.get("family", ""))
            causes = (one for one in self.causes if one.signature.role == "cause")
            rivals = {one.signature.id for one in causes if not one.follows}
            fields["candidates"] = with_usual(
                fields.get("candidates", ()),
                *named,
                stage=fields["stage"],
                confidence=fields["confidence"],
                rivals=rivals,
                most=MAX_CANDIDATES,
            )
        return Diagnosis(
            iteration=furthest.last_step if furthest and steps else None,
            since=since.step if since and steps else None,
            time=self._time(place),
            notes=(*job.notes, *self.found.notes),
            job=_described(job, self.ordering),
            **fields,
        )


def _first_stage(texts: Sequence[str]) -> str:
    return next((stage for text in texts if (stage := stage_of(text))), "")


def _described(job: Job, ordering: Ordering) -> dict[str, Any]:
    first, last = ordering.span or (None, None)
    last_step_at = job.furthest.last_step_at if job.furthest else None
    return {
        "files": len(job.files),
        "lines": job.lines,
        "world_size": job.world_size,
        "ranks_heard": sum(one.rank is not None for one in job.streams.values()),
        "streams": len(job.streams),
        "events": len(job.events),
        "first_time": first,
        "last_time": last,
        "last_step_time": ordering.dated(last_step_at) if last_step_at else None,
        "stages": [
            {"stage": name, "time": ordering.dated(one), "file": one.file, "line": one.line}
            for name, one in job.stages
        ],
    }
