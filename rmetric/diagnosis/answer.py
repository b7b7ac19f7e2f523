"""Say the likeliest hypothesis: the diagnosis in words, with its place, suspects and confidence."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import msgspec

from rmetric.diagnosis.clock import Ordering
from rmetric.diagnosis.evidence import Scene
from rmetric.diagnosis.evidence.peers import Unusual, unusual
from rmetric.diagnosis.facts.job import Job, Occurrence
from rmetric.diagnosis.faults import LOSS, Fault
from rmetric.diagnosis.hypotheses import HEALTHY, Hypothesis, early_stop, named
from rmetric.diagnosis.library.load import SPECIFIC
from rmetric.diagnosis.model import Model, reasons
from rmetric.diagnosis.report.evidence import MAX_EVENTS, how_often, of_causes, of_odd, raised
from rmetric.diagnosis.result import FOLLOWS, LIKELY, Candidate, Diagnosis, Evidence, Suspect
from rmetric.diagnosis.signature import HUNG, NOT_FINITE, inferred_causes
from rmetric.diagnosis.stage import stage_of_failure

MAX_CANDIDATES = 5
#: A symptom or an echo of a signature of less confidence names no cause.
NAMES_A_CAUSE = 0.4
#: Least confidence of an answer.
MIN_CONFIDENCE = 0.05
#: An ending follows the last step within so many seconds, or times the longest pause of steps.
MAX_SECONDS_WITHOUT_STEP = 120.0
MAX_PAUSES_WITHOUT_STEP = 5.0
#: Seconds by which the clocks of a scheduler and of a program may differ.
MAX_CLOCK_SECONDS = 300.0
NO_FAILURE_FOUND = (
    "training steps were logged and no failure was found; no line states the planned end"
)
#: Text logs are read here, not the numbers in them.
LOSSES_HINT = "Losses are not evaluated here; use rmetric replay."
#: Where a log stops short, as that of a process that is killed does.
JOB_ENDED_HINT = (
    "If the job has ended, check the scheduler's record and the node's kernel log (OOM kill)."
)
#: Feature -> what it says of an answer that it carries.
BECAUSE = {
    "confidence": "the line states it plainly",
    "consequence": "it follows from no other fault",
    "planned end": "the planned end is stated",
    "faults": "few faults were found",
}


@dataclass(frozen=True, kw_only=True)
class Weighed:
    """A job, its evidence, and what the model makes of it.

    Attributes:
        ranked: suspects, the most suspect first.
        hypotheses: the likeliest first, each with its probability.
    """

    scene: Scene
    model: Model
    ranked: tuple[Suspect, ...]
    hypotheses: Sequence[tuple[Hypothesis, float]]

    @property
    def job(self) -> Job:
        return self.scene.job

    @cached_property
    def faults(self) -> list[Fault]:
        """Known faults, the likeliest first."""
        return [one.fault for one, _ in self.hypotheses if one.fault]

    @cached_property
    def unusual(self) -> Unusual:
        return unusual(self.scene)

    # -- the answer

    def diagnosis(self) -> Diagnosis:
        first = self.hypotheses[0][0]
        if first.group == HEALTHY:
            return self._no_failure()
        if first.fault is None:
            return self._inferred(first)
        if first.group in ("echo", "symptom") and first.fault.confidence < NAMES_A_CAUSE:
            return self._unclear(first.fault)
        return self._explained(first.fault)

    def _explained(self, lead: Fault) -> Diagnosis:
        signature = lead.signature
        why = how_often(lead, self.job)
        if any(one.follows == signature.id for one in self.faults):
            why += ", before all other faults"
        if lead.role == "echo":
            why += "; reported by ranks that lost a peer; the cause itself left no line"
        strength = lead.confidence if not lead.follows else 0.0
        kind, against = lead.role, ""
        if lead.role == "ending" and (against := self._stood_still(lead)):
            kind = "ending without progress"
        return self._result(
            kind=kind,
            strength=strength,
            against=against,
            outcome="terminated" if lead.role == "ending" else "failed",
            cause=signature.id,
            family=signature.family,
            # The exception is more precise than a generic signature's title.
            title=(signature.rank < SPECIFIC and raised(lead.first.text)) or signature.title,
            actor=signature.actor or None,
            why=why,
            place=lead.first,
            to_do=signature.to_do,
            events=self._events(),
            stage=self.stage_of(self.hypotheses[0][0]),
        )

    def stage_of(self, one: Hypothesis) -> str:
        """The stage of the job at the failure, if a hypothesis is right."""
        if one.fault is not None:
            return stage_of_failure(self.scene, [one.fault, *self.faults], one.fault.first)
        odd = self.scene.odd_stacks
        told = [odd[each.name].awaits for each in named(self.ranked) if each.name in odd]
        told += [each.stage for each in one.rows]
        return next(filter(None, told), "") or stage_of_failure(
            self.scene, self.faults, self.place_of(one)
        )

    def place_of(self, one: Hypothesis) -> Occurrence | None:
        """The entry that shows an inferred cause best."""
        stream = self.job.streams.get(one.rows[0].target)
        return one.rows[0].entry or (stream.last if stream is not None else None)

    def _inferred(self, first: Hypothesis) -> Diagnosis:
        cause, row = inferred_causes()[first.id], first.rows[0]
        suspect = next((one for one in self.ranked if one.name == row.target), None)
        who = "one rank" if suspect is None else suspect.name
        if suspect is not None and suspect.node and suspect.node not in who:
            who = f"{who} on {suspect.node}"
        more = [one.words for one in first.rows[1:] if not one.target]
        by_role = sorted(self.faults, key=lambda one: (one.role != "ending", bool(one.follows)))
        ended = next(iter(by_role), None)
        if ended is not None:
            by = "ended by" if first.id in (HUNG, NOT_FINITE) else "followed by"
            more.append(f"{by}: {ended.signature.title}")
        return self._result(
            kind="hang" if first.id == HUNG else "inferred",
            strength=suspect.score if suspect is not None else 1.0,
            outcome="failed",
            cause=cause.id,
            family=cause.family,
            title=cause.title.format(who=who, what=row.words),
            actor=cause.actor,
            why="; ".join([cause.why, *more]),
            place=self.place_of(first),
            to_do=cause.to_do,
            events=self._events(self.unusual.events),
            nodes=self._led_by(suspect),
            stage=self.stage_of(first),
        )

    def _led_by(self, suspect: Suspect | None) -> tuple[Suspect, ...]:
        """All suspects, that rank first; a rank tells more than its node."""
        every = named(self.ranked)
        if suspect is None or (suspect.rank is None and suspect in every):
            return every
        return (suspect, *(one for one in every if one is not suspect))

    def _unclear(self, lead: Fault) -> Diagnosis:
        """A fault that does not explain the failure; the candidates and its entry are shown."""
        return self._result(
            kind="no cause",
            strength=lead.confidence,
            outcome="failed" if self.scene.known.lacks_its_end(self.job) else "unknown",
            title=f"Cause unknown. Closest match: {lead.signature.title}",
            why=how_often(lead, self.job),
            place=lead.first,
            to_do=lead.signature.to_do,
            events=self._events(self.unusual.events),
        )

    def _no_failure(self) -> Diagnosis:
        """No fault stands out: the job went well, or its logs do not tell."""
        job = self.job
        if job.succeeded is not None and not self.scene.alone:
            why = f"planned end stated: {job.succeeded.text}"
            return self._healthy("planned end", why, ())
        if self.scene.known.lacks_its_end(job):
            why = "successful jobs of these settings state their end; this one does not"
            odd = self.unusual.events
            end = "no known fault, but unusual events at the end" if odd else (
                "the log ends without a fault and without the usual end"
            )  # fmt: skip
            return self._unknown(end, why, nodes=named(self.ranked))
        if job.trained:
            short = early_stop(self.scene)
            if not short:
                return self._healthy("no failure", NO_FAILURE_FOUND, (LOSSES_HINT,))
            why = "no failure found; the job may still run or was killed, or the log is cut"
            return self._healthy("log stops", why, (JOB_ENDED_HINT, LOSSES_HINT), short)
        if any(event.count > 1 and LOSS.search(event.template) for event in job.events):
            return self._healthy("log stops", NO_FAILURE_FOUND, (LOSSES_HINT,))
        return self._unknown(
            "these logs show no training, no end and no known fault", "no line was recognised"
        )

    def _unknown(self, title: str, why: str, *, nodes: tuple[Suspect, ...] = ()) -> Diagnosis:
        return self._result(
            kind="unknown",
            outcome="unknown",
            title=f"Outcome unknown: {title}",
            why=why,
            events=of_odd(self.job, self.unusual.events, self.scene.ordering),
            nodes=nodes,
        )

    def _healthy(self, kind: str, why: str, to_do: tuple[str, ...], short: str = "") -> Diagnosis:
        numbers = self.unusual.numbers
        apart = {place.stream for place, _ in numbers}
        return self._result(
            kind=kind,
            outcome="healthy",
            title=f"No failure found{short}",
            why=why,
            to_do=to_do,
            place=self.job.succeeded,
            events=of_odd(self.job, numbers, self.scene.ordering),
            nodes=named([one for one in self.ranked if one.name in apart]),
        )

    # -- its parts

    def _events(self, odd: Sequence[tuple[int, str]] = ()) -> tuple[Evidence, ...]:
        """Those of the faults, errors that first occur with them, and `odd` ones; each once."""
        job, ordering, found = self.job, self.scene.ordering, self.unusual
        shown = list(of_causes(job, self.faults, ordering))
        known = {(one.file, one.line) for one in shown}
        templates = {one.template for one in shown}
        for some in ([*found.numbers, *found.slow], [*found.errors, *odd][:MAX_EVENTS]):
            for one in of_odd(job, some, ordering):
                if (one.file, one.line) not in known and one.template not in templates:
                    shown.append(one)
                    templates.add(one.template)
        return tuple(shown[:MAX_EVENTS])

    def _confidence(self, kind: str, strength: float) -> float:
        """What the model gives it, at most what such answers were worth at first looks."""
        if kind == "unknown":
            return 0.0
        value = min(self.hypotheses[0][1], self.model.limit(kind, strength))
        return round(max(value, MIN_CONFIDENCE), 3)

    def _candidates(self, confidence: float, kind: str) -> tuple[Candidate, ...]:
        """The next hypotheses, which share what the confidence leaves."""
        named_first = kind not in ("no cause", "unknown")
        others = [pair for pair in self.hypotheses if pair[0].group != HEALTHY][named_first:]
        left = sum(share for _, share in self.hypotheses[named_first:]) or 1.0
        found = []
        for one, share in others[:MAX_CANDIDATES]:
            part = (1.0 - confidence) * share / left
            if one.fault is not None:
                title, follows = one.fault.signature.title, one.fault.follows
                if one.group == "ending" and self.hypotheses[0][0].group == "inferred":
                    follows = follows or self.hypotheses[0][0].id
                why = f"{FOLLOWS}{follows}" if follows else how_often(one.fault, self.job)
            else:
                row, title = one.rows[0], inferred_causes()[one.id].title
                title, why = title.format(who=row.target or "one rank", what=row.words), row.words
            found.append(Candidate(one.id, title, round(min(part, confidence), 3), why))
        return tuple(found)

    def _stood_still(self, ending: Fault) -> str:
        """Describe an ending before which the training may have stood still."""
        job, ordering = self.job, self.scene.ordering
        if not job.trained:
            return "no training step was logged before the end"
        stacks = (dump for one in job.streams.values() for dump in one.stacks)
        before = any(ordering.after(ending.first, dump) for dump in stacks)
        if before or (job.beside is not None and job.beside.stacks):
            return "stacks of its processes were taken, as of one that stands still"
        streams, end = job.streams.values(), ordering.dated(ending.first)
        times = [ordering.dated(one.last_step_at) for one in streams if one.last_step_at]
        last = max((one for one in times if one is not None), default=None)
        # An end before the last step is by another clock, whose zone is not known.
        if end is None or last is None or end < last - MAX_CLOCK_SECONDS:
            return "the time from the last step to the end is not known"
        longest = max(one.longest_pause for one in streams)
        if end - last > max(MAX_SECONDS_WITHOUT_STEP, MAX_PAUSES_WITHOUT_STEP * longest):
            return "the last step was logged long before the end"
        return ""

    def _time(self, place: Occurrence | None) -> float | None:
        """Time of an entry; of one without, that of the next in its file, or its stream's last."""
        if place is None:
            return None
        if place.time is None:
            last = self.job.streams[place.stream].last_time
            after = self.scene.ordering.at_latest(place)
            place = after or msgspec.structs.replace(place, time=last)
        return self.scene.ordering.dated(place)

    def _result(
        self,
        *,
        kind: str,
        strength: float = 1.0,
        against: str = "",
        place: Occurrence | None = None,
        why: str,
        **fields: Any,
    ) -> Diagnosis:
        job, outcome = self.job, fields["outcome"]
        fields = {"nodes": named(self.ranked)} | fields
        if "stage" not in fields:
            fields["stage"] = stage_of_failure(self.scene, self.faults, place)
        furthest = job.furthest
        steps = furthest is not None and not furthest.counts_samples
        since = self.unusual.first_odd if outcome != "healthy" else None
        confidence = self._confidence(kind, strength)
        shows_others = outcome != "healthy" or confidence < LIKELY
        candidates = self._candidates(confidence, kind) if shows_others else ()
        (first, _), *others = self.hypotheses
        second = others[0][0].features if others else first.features
        carried = reasons(first.features, second, self.model.causes)
        return Diagnosis(
            confidence=confidence,
            score=round(strength, 3),
            basis=kind,
            because=tuple(BECAUSE[name] for name in carried if name in BECAUSE),
            why=why + (f"; not sure: {against}" if against else ""),
            candidates=candidates,
            iteration=furthest.last_step if furthest and steps else None,
            since=since.step if since and steps else None,
            time=self._time(place),
            notes=(*job.notes, *self.scene.notes, *self.unusual.notes),
            job=_described(job, self.scene.ordering),
            **fields,
        )


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
