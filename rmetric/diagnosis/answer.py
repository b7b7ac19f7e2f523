"""Say the likeliest hypothesis: the diagnosis in words, with its place, suspects and confidence."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec

from rmetric._util.lazy import read_yaml
from rmetric._util.printed import counted
from rmetric.diagnosis.clock import Ordering
from rmetric.diagnosis.evidence import Row, Scene
from rmetric.diagnosis.evidence.peers import Unusual
from rmetric.diagnosis.facts.job import Job, Occurrence
from rmetric.diagnosis.faults import LOSS, Fault
from rmetric.diagnosis.library.load import PATTERN_SECONDS, SPECIFIC, compiled
from rmetric.diagnosis.library.stages import FRAME, NOT_OWN
from rmetric.diagnosis.model import (
    HEALTHY,
    Hypothesis,
    Model,
    early_stop,
    hypotheses,
    named,
    probabilities,
    reasons,
    score,
    suspects,
)
from rmetric.diagnosis.report.render import FOLLOWS
from rmetric.diagnosis.report.result import LIKELY, Candidate, Diagnosis, Evidence, Suspect
from rmetric.diagnosis.signature import HUNG, NOT_FINITE, Signature, inferred_causes
from rmetric.diagnosis.stage import stage_of_failure

#: Largest number of events that are shown, of their streams, and of candidates.
MAX_EVENTS = 20
MAX_WHO = 8
MAX_CANDIDATES = 5
#: Signatures of less confidence are shown only if there is nothing else, as is any error line.
LEAST = 0.3
#: The order in which roles are shown.
_ORDER = ("cause", "ending", "symptom", "echo", "odd")
_RAISED = re.compile(
    r"^(?:[ \t]*|[^\n]{0,80}[ :\]])(?P<name>(?:[A-Za-z_]\w*\.)*(?:_?[A-Z]\w*|error|timeout))"
    r"(?:: ?(?P<message>[^\n]*))?$",
    re.MULTILINE,
)
_ERROR = re.compile(r"(?:Error|Exception|Failure|Interrupt|Exit|Warning|Timeout|error|timeout)$")
#: A symptom or an echo of a signature of less confidence names no cause.
NAMES_A_CAUSE = 0.4
#: Least confidence of an answer.
MIN_CONFIDENCE = 0.05
#: An ending follows the last step within so many seconds, or times the longest pause of steps.
MAX_SECONDS_WITHOUT_STEP = 120.0
MAX_PAUSES_WITHOUT_STEP = 5.0
#: Seconds by which the clocks of a scheduler and of a program may differ.
MAX_CLOCK_SECONDS = 300.0
_ANSWERS = read_yaml(Path(__file__).with_name("library") / "answers.yaml")
#: Feature -> the reason that it gives for an answer.
BECAUSE: dict[str, str] = _ANSWERS["because"]


@dataclass(frozen=True, kw_only=True)
class Weighed:
    """A job, its evidence, and what the model makes of it."""

    scene: Scene
    rows: Sequence[Row]
    model: Model = field(default_factory=Model.shipped)

    @cached_property
    def ranked(self) -> tuple[Suspect, ...]:
        """All suspects, the most suspect first."""
        return suspects(self.scene, self.rows, self.model.suspects)

    @cached_property
    def hypotheses(self) -> Sequence[tuple[Hypothesis, float]]:
        """The likeliest first, each with its probability."""
        guesses = hypotheses(self.scene, self.rows, self.ranked)
        shares = probabilities([score(guess.features, self.model.causes) for guess in guesses])
        return sorted(zip(guesses, shares, strict=True), key=lambda pair: -round(pair[1], 6))

    @property
    def job(self) -> Job:
        return self.scene.job

    @cached_property
    def faults(self) -> list[Fault]:
        """Known faults, the likeliest first."""
        return [hypothesis.fault for hypothesis, _ in self.hypotheses if hypothesis.fault]

    @cached_property
    def unusual(self) -> Unusual:
        return Unusual(self.scene)

    # -- the answer

    def diagnosis(self) -> Diagnosis:
        first = self.hypotheses[0][0]
        if first.id == HEALTHY:
            return self._no_failure()
        if first.fault is None:
            return self._inferred(first)
        if first.fault.role in ("echo", "symptom") and first.fault.confidence < NAMES_A_CAUSE:
            return self._unclear(first.fault)
        return self._explained(first.fault)

    def _explained(self, lead: Fault) -> Diagnosis:
        signature = lead.signature
        why = occurrence_text(lead, self.job)
        if any(fault.follows == signature.id for fault in self.faults):
            why += ", before all other faults"
        if lead.role == "echo":
            why += "; reported by ranks that lost a peer; the cause itself left no line"
        kind = lead.role
        if kind == "ending" and (against := self._stood_still(lead)):
            kind, why = "ending without progress", f"{why}; not sure: {against}"
        return self._result(
            kind,
            strength=0.0 if lead.follows else lead.confidence,
            outcome="terminated" if lead.role == "ending" else "failed",
            # The exception is more precise than a generic signature's title.
            title=(signature.rank < SPECIFIC and raised(lead.first.text)) or signature.title,
            why=why,
            events=self._events(),
        )

    def stage_of(self, guess: Hypothesis) -> str:
        """The stage of the job at the failure, if a hypothesis is right."""
        stages = list[str]()
        if guess.rows:
            odd = self.scene.odd_stacks
            stages += [odd[who.name].awaits for who in named(self.ranked) if who.name in odd]
            stages += [row.stage for row in guess.rows]
        faults = [guess.fault, *self.faults] if guess.fault is not None else self.faults
        place = self._place_of(guess)
        return next(filter(None, stages), "") or stage_of_failure(self.scene, faults, place)

    def _place_of(self, guess: Hypothesis) -> Occurrence | None:
        """The entry that shows best what a hypothesis states."""
        if guess.id == HEALTHY:
            return self.job.succeeded
        if guess.fault is not None:
            return guess.fault.first
        row = guess.rows[0]
        stream = self.job.streams.get(row.target)
        return row.entry or (stream.last if stream is not None else None)

    def _inferred(self, first: Hypothesis) -> Diagnosis:
        cause, row = inferred_causes()[first.id], first.rows[0]
        suspect = next((suspect for suspect in self.ranked if suspect.name == row.target), None)
        who, nodes = "one rank", named(self.ranked)
        if suspect is not None:
            on_node = suspect.node and suspect.node not in suspect.name
            who = f"{suspect.name} on {suspect.node}" if on_node else suspect.name
            if suspect.rank is not None or suspect not in nodes:  # a rank is more than its node
                nodes = (suspect, *(node for node in nodes if node is not suspect))
        more = [other.words for other in first.rows[1:] if not other.target]
        if self.faults:
            end = min(self.faults, key=lambda fault: (fault.role != "ending", bool(fault.follows)))
            by = "ended by" if first.id in (HUNG, NOT_FINITE) else "followed by"
            more.append(f"{by}: {end.signature.title}")
        return self._result(
            "hang" if first.id == HUNG else "inferred",
            strength=suspect.score if suspect is not None else 1.0,
            outcome="failed",
            title=cause.title.format(who=who, what=row.words),
            why="; ".join([cause.why, *more]),
            events=self._events(self.unusual.events),
            nodes=nodes,
        )

    def _unclear(self, lead: Fault) -> Diagnosis:
        """A fault that does not explain the failure; the candidates and its entry are shown."""
        return self._result(
            "no cause",
            strength=lead.confidence,
            outcome="failed" if self.scene.known.lacks_its_end(self.job) else "unknown",
            title=f"Cause unknown. Closest match: {lead.signature.title}",
            why=occurrence_text(lead, self.job),
            to_do=lead.signature.to_do,
            events=self._events(self.unusual.events),
        )

    def _no_failure(self) -> Diagnosis:
        """No fault stands out: the job went well, or its logs do not state how."""
        job, odd, short = self.job, self.unusual, ""
        apart = {place.stream for place, _ in odd.numbers}
        nodes = named([suspect for suspect in self.ranked if suspect.name in apart])
        if job.succeeded is not None and not self.scene.alone:
            case = "planned end"
        elif self.scene.known.lacks_its_end(job):
            case = "unusual end" if odd.events else "no usual end"
            nodes = named(self.ranked)
        elif job.trained:
            case = "stops short" if (short := early_stop(self.scene)) else "steps"
        elif any(event.count > 1 and LOSS.search(event.template) for event in job.events):
            case = "losses without steps"
        else:
            case, nodes = "nothing known", ()
        words = _ANSWERS["no fault"][case]
        outliers = odd.events if words["outcome"] == "unknown" else odd.numbers
        return self._result(
            words["basis"],
            outcome=words["outcome"],
            title=words["title"].format(short=short),
            why=words["why"].format(end=job.succeeded and job.succeeded.text),
            to_do=tuple(words["to_do"]),
            events=self._outlier_events(outliers),
            nodes=nodes,
        )

    # -- its parts

    def _events(self, odd: Sequence[tuple[int, str]] = ()) -> tuple[Evidence, ...]:
        """Those of the faults, errors that first occur with them, and `odd` ones; each once."""
        shown: dict[int, Evidence] = {}
        # Generic ones only where there is no other.
        top = [fault for fault in self.faults if fault.signature.rank and fault.confidence >= LEAST]
        for cause in sorted(top or self.faults, key=lambda fault: _ORDER.index(fault.role)):
            for number in sorted(cause.events - shown.keys()):
                matches = [match for match in cause.matches if number in match.events]
                firsts = (match.first for match in matches if match.first.event == number)
                first = next(firsts, self.job.events[number].first)
                who = [match.stream for match in matches]
                shown[number] = self._evidence(first, who, cause.signature.title, cause.signature)
        found, templates = self.unusual, {event.template for event in shown.values()}
        more: list[tuple[int | Occurrence, str]] = [*found.numbers, *found.slow]
        more += [*found.errors, *odd][:MAX_EVENTS]
        others = [event for event in self._outlier_events(more) if event.template not in templates]
        return tuple([*shown.values(), *others][:MAX_EVENTS])

    def _outlier_events(self, odd: Iterable[tuple[int | Occurrence, str]]) -> tuple[Evidence, ...]:
        """Events by number, or single entries, that a pattern found, with its reason; each once."""
        shown: dict[int, Evidence] = {}
        for ref, why in odd:
            event = self.job.events[ref if isinstance(ref, int) else ref.event]
            if event.number not in shown:
                often = sorted(event.counts, key=lambda name: (-event.counts[name], name))
                first, who = (event.first, often) if isinstance(ref, int) else (ref, [ref.stream])
                shown[event.number] = self._evidence(first, who, why)
        return tuple(shown.values())[:MAX_EVENTS]

    def _evidence(
        self, first: Occurrence, who: Sequence[str], why: str, signature: Signature | None = None
    ) -> Evidence:
        event, point = self.job.events[first.event], ""
        with suppress(TimeoutError):
            matched = (
                compiled(pattern).search(first.text, timeout=PATTERN_SECONDS)
                for pattern in (signature.patterns if signature else ())
            )
            point = next((match[0] for match in matched if match), "")
        return Evidence(
            role=signature.role if signature else "odd",
            signature=signature.id if signature else "",
            why=why,
            template=event.template,
            text=first.text,
            file=first.file,
            line=first.line,
            time=self.scene.ordering.dated(first),
            who=tuple(who[:MAX_WHO]),
            count=sum(event.counts.get(name, 0) for name in who),
            point=point,
        )

    def _candidates(self, confidence: float, kind: str) -> tuple[Candidate, ...]:
        """The next hypotheses, which share what the confidence leaves."""
        named_first = kind not in ("no cause", "unknown")
        others = [pair for pair in self.hypotheses if pair[0].id != HEALTHY][named_first:]
        left = sum(share for _, share in self.hypotheses[named_first:]) or 1.0
        found = []
        for guess, share in others[:MAX_CANDIDATES]:
            part = (1.0 - confidence) * share / left
            title = guess.cause.title
            if guess.fault is not None:
                follows = guess.fault.follows
                if guess.fault.role == "ending" and self.hypotheses[0][0].rows:
                    follows = follows or self.hypotheses[0][0].id
                why = f"{FOLLOWS}{follows}" if follows else occurrence_text(guess.fault, self.job)
            else:
                row = guess.rows[0]
                title, why = title.format(who=row.target or "one rank", what=row.words), row.words
            found.append(Candidate(guess.id, title, round(min(part, confidence), 3), why))
        return tuple(found)

    def _stood_still(self, ending: Fault) -> str:
        """Describe an ending before which the training may have stood still."""
        job, ordering = self.job, self.scene.ordering
        if not job.trained:
            return "no training step was logged before the end"
        stacks = (dump for stream in job.streams.values() for dump in stream.stacks)
        before = any(ordering.after(ending.first, dump) for dump in stacks)
        if before or (job.auxiliary is not None and job.auxiliary.stacks):
            return "stacks of its processes were taken, as of one that stands still"
        streams, end = job.streams.values(), ordering.dated(ending.first)
        times = [ordering.dated(stream.last_step_at) for stream in streams if stream.last_step_at]
        last = max((time for time in times if time is not None), default=None)
        # An end before the last step is by another clock, whose zone is not known.
        if end is None or last is None or end < last - MAX_CLOCK_SECONDS:
            return "the time from the last step to the end is not known"
        longest = max(stream.longest_pause for stream in streams)
        if end - last > max(MAX_SECONDS_WITHOUT_STEP, MAX_PAUSES_WITHOUT_STEP * longest):
            return "the last step was logged long before the end"
        return ""

    def _time(self, place: Occurrence | None) -> float | None:
        """Time of an entry; of one without, that of the next in its file, or its stream's last."""
        ordering = self.scene.ordering
        if place is not None and place.time is None:
            last = self.job.streams[place.stream].last_time
            place = ordering.at_latest(place) or msgspec.structs.replace(place, time=last)
        return None if place is None else ordering.dated(place)

    def _result(
        self, kind: str, *, outcome: str, strength: float = 1.0, **fields: Any
    ) -> Diagnosis:
        (first, share), *others = self.hypotheses
        job, furthest = self.job, self.job.furthest
        if first.id != HEALTHY and kind != "no cause":
            cause = first.cause
            fields |= {"cause": cause.id, "family": cause.family, "to_do": cause.to_do}
            fields["actor"] = cause.actor or None
        # Numbers of samples are no steps.
        steps = furthest is not None and not furthest.counts_samples
        since = self.unusual.first_odd if outcome != "healthy" else None
        # What the model gives it, at most what such answers were worth at first looks.
        confidence = min(share, self.model.limit(kind, strength))
        confidence = 0.0 if kind == "unknown" else round(max(confidence, MIN_CONFIDENCE), 3)
        shows_others = outcome != "healthy" or confidence < LIKELY
        second = others[0][0].features if others else first.features
        carried = reasons(first.features, second, self.model.causes)
        return Diagnosis(
            outcome=outcome,
            confidence=confidence,
            score=round(strength, 3),
            basis=kind,
            because=tuple(BECAUSE[name] for name in carried if name in BECAUSE),
            candidates=self._candidates(confidence, kind) if shows_others else (),
            stage=self.stage_of(first),
            iteration=furthest.last_step if furthest and steps else None,
            since=since.step if since and steps else None,
            time=self._time(self._place_of(first)),
            notes=(*job.notes, *self.scene.notes, *self.unusual.notes),
            job=_described(job, self.scene.ordering),
            **({"nodes": named(self.ranked)} | fields),
        )


def _described(job: Job, ordering: Ordering) -> dict[str, Any]:
    first, last = ordering.span or (None, None)
    last_step_at = job.furthest.last_step_at if job.furthest else None
    return {
        "files": len(job.files),
        "lines": job.lines,
        "world_size": job.world_size,
        "ranks_heard": sum(stream.rank is not None for stream in job.streams.values()),
        "streams": len(job.streams),
        "events": len(job.events),
        "first_time": first,
        "last_time": last,
        "last_step_time": ordering.dated(last_step_at) if last_step_at else None,
        "stages": [
            {"stage": name, "time": ordering.dated(entry), "file": entry.file, "line": entry.line}
            for name, entry in job.stages
        ],
    }


def occurrence_text(cause: Fault, job: Job) -> str:
    """Number of entries of a cause, and of the ranks, nodes and other files that logged it."""
    times = "logged once" if cause.count == 1 else f"logged {cause.count:,} times"
    if len(cause.streams) == 1:
        return times
    # A rank within a node is a rank, though its number is not known.
    kinds = Counter(
        "rank" if log.rank is not None or " local " in log.name else "node" if log.node else "file"
        for log in map(job.streams.__getitem__, cause.streams)
    )
    by = [counted(kinds[kind], kind) for kind in ("rank", "node", "file") if kinds[kind]]
    return f"{times} by {' and '.join(by)}"


def raised(text: str) -> str:
    """The exception that ends an entry and the frame of the user's own code that led to it.

    The own frame is the innermost that lies in no library; "" where there is no exception.
    """
    frames = list(FRAME.finditer(text))
    behind = _RAISED.finditer(text, frames[-1].end() if frames else 0)
    found = next((match for match in behind if frames or _ERROR.search(match["name"])), None)
    if found is None:
        return ""
    name = found["name"].rpartition(".")[2]
    name = found["name"] if name in ("error", "timeout") else name
    own = [frame for frame in frames if not NOT_OWN.search(frame["path"])][-1:]
    parts = [(frame["name"], re.split(r"[\\/]", frame["path"])[-1], frame["line"]) for frame in own]
    place = "".join(f" in {function} ({file}:{line})" for function, file, line in parts)
    message = (found["message"] or "").strip()
    return f"{name}{place}: {message}" if message else f"{name}{place}"
