"""Judgement of one whole log in a line: diverged, spike, healthy and so on.

The verdict looks back over the whole log. It is apart from the alarms of the detectors, which
see one record at a time: they add the step of an alarm to the words and nothing to the class.
docs/verdict.md states the rules. None of them has a unit: the class is the same for a loss that
is multiplied by a constant, and for every tenth record where a tenth still shows the event.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rmetric._util.printed import counted
from rmetric.detectors.log_end import SilentLoss
from rmetric.records import Record, Truth

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]
Kind = Literal[
    "diverged", "not_finite", "unstable", "failed", "spike", "level_rose", "overfitting",
    "cannot_tell", "healthy",
]  # fmt: skip
Severity = Literal["bad", "warning", "good", "unknown"]

#: Severity of each class, the worst first.
SEVERITY: dict[Kind, Severity] = {
    "diverged": "bad",
    "not_finite": "bad",
    "unstable": "bad",
    "failed": "bad",
    "spike": "warning",
    "level_rose": "warning",
    "overfitting": "warning",
    "cannot_tell": "unknown",
    "healthy": "good",
}

#: What to do after a verdict, in a few words; "{step}" is that of its event.
_ADVICE: dict[Kind, str] = {
    "diverged": "stop, go back to a checkpoint before step {step}",
    "not_finite": "stop, go back to a checkpoint before step {step}",
    "unstable": "lower the learning rate, or clip the gradients, in the next run",
    "failed": "look for the error in the log",
    "spike": "watch whether it comes again",
    "level_rose": "check whether data or learning rate changed there",
    "overfitting": "use the checkpoint of step {step}",
    "cannot_tell": "",
    "healthy": "nothing",
}
_ADVICE_WORSE = "check learning rate and data; the first weights were better"
_AGAIN = "look at the data, learning rate and gradient norms of these steps"
#: Records that the calibrated detector needs before it can judge a level, about.
NEEDS_RECORDS = 10

#: Losses below which nothing is judged but a value that is not finite.
FEWEST_RECORDS = 10
#: A rise counts from the largest of these: a share of the level before it, a share of what the
#: loss had fallen since the start, and spreads of its noise. Half of that is "back".
SHARE_OF_LEVEL, SHARE_OF_FALL, SPREADS = 0.2, 0.1, 8.0
#: Of few records the noise is less certain: the spreads are multiplied by 1 + this / records.
FEW_RECORDS = 20
#: One record alone counts if the log skips steps, from so many spreads, and this much beyond the
#: largest of the records that do not count.
LONE_SPREADS, LONE_GAP, MOST_LONE = 10.0, 2.0, 3
#: A rise for good is a divergence from this ratio to the level before, where it also lost this
#: share of the fall; below, a step to a new level may be a change of data.
RATIO, LOST = 2.0, 0.5
#: So is a step after which the loss falls again, below this ratio.
FAR_RATIO = 3.0
#: A slow rise for good is a divergence from either of these.
SLOW_RATIO, SLOW_LOST = 1.5, 0.25
#: Share of the log, and steps, after which a rise that is not over counts as one for good. Steps
#: to a new level that came back are no spikes where each lasted that share and is less than
#: `SLOW_RATIO` times the level before.
LATE_SHARE, LATE_STEPS = 0.05, 2000
#: A peak so many times the end of a loss that diverged is stated too.
PEAK_RATIO = 1.5
#: Share of the log in rises that came back, from which the run was unstable.
UNSTABLE_SHARE = 0.25
#: A loss still rises where it ends at this share of its whole rise.
RISING_SHARE = 0.8
#: A rise is gradual where it takes a larger share of the log.
ABRUPT_SHARE = 0.1
#: Share of the losses from the first that is not finite on, from which others between them do not
#: count as a recovery.
SCATTERED_SHARE = 0.2
#: A loss of which no rise was found ends above its lowest level where the difference is more than
#: each of: a share of that level, the same share of what the loss had fallen, and so many times
#: the noise of a level (of few values 1 + `FEW_LEVELS` / values times as many). A level is the
#: median of one of these parts of the log, and the last two count together.
PARTS, FEWEST_PARTS = 8, 5
ABOVE_SHARE, ABOVE_NOISE, FEW_LEVELS = 0.02, 4.0, 4
#: Share of the log within which a step to a new level is complete.
STEP_SHARE = 0.02
#: Noise is that of the records near the lowest level so far, where they are this share and
#: number.
CALM_SHARE, CALM_RECORDS = 0.25, 15
#: Evaluations from the onset on, by which a validation loss is said not to have risen; and the
#: classes of a training loss that are set against it.
FEWEST_EVALUATIONS = 2
_LASTING: tuple[Kind, ...] = ("diverged", "unstable", "level_rose")
_SPREAD = 1.4826 * 1.2  # of a median deviation from a median of five that contains the value
_WIDTH = 5
_MOST_PLANNED = 10
#: Records after the onset within which an alarm is not called late.
_PROMPT = 2


@dataclass(frozen=True, kw_only=True)
class RunVerdict:
    """Judgement of one whole log.

    Attributes:
        kind: class of the course; `severity` follows from it.
        text: the verdict as one short line.
        detail: the numbers, as a second short line; empty where there is none.
        loss: the judged series, ``training_loss`` or ``validation_loss``; None for none.
        onset_step: first step of the event; None where there is none.
        end_step: first step at which it was over; None where it lasts or there is none.
        before, after: level of the loss before the event, and at its height or, where it never
            came back, at the end; None where there is none or it is not finite.
        alarm_step: first alarm of the event; None without one.
        num_events: rises of the loss that were found.
        advice: what to do, in a few words; empty where nothing follows from the verdict.
        event_steps: first step of each of them, where all came back.
        event_end_steps: first step at which each of those was over.
        onset_record: place of the onset among the losses, from 0; None without one.
        alarm_is_late: True if more than two records lie between the onset and its alarm.
        training_only: True if the training loss rose and the validation loss, which is logged
            too, did not.
    """

    kind: Kind
    text: str
    detail: str = ""
    advice: str = ""
    loss: str | None = None
    onset_step: int | None = None
    end_step: int | None = None
    before: float | None = None
    after: float | None = None
    alarm_step: int | None = None
    num_events: int = 0
    event_steps: tuple[int, ...] = ()
    event_end_steps: tuple[int, ...] = ()
    onset_record: int | None = None
    alarm_is_late: bool = False
    training_only: bool = False

    @property
    def severity(self) -> Severity:
        return SEVERITY[self.kind]

    @property
    def numbers_and_advice(self) -> str:
        """The lines below `text` as one: numbers and advice."""
        advice = f"To do: {self.advice}." if self.advice else ""
        return " ".join(filter(None, [f"{self.detail}." if self.detail else "", advice]))


def counted_runs(kind: Kind, number: int) -> str:
    """A number of runs with a verdict.

    >>> counted_runs("spike", 2), counted_runs("not_finite", 1)
    ('2 with spikes', '1 not finite')
    """
    words = {"spike": "with spikes", "level_rose": "with a raised level"}
    return f"{number:,} {words.get(kind, kind.replace('_', ' '))}"


def alarm_words(
    verdict: RunVerdict, first_alarm: int | None, num_alarms: int = 0, *, judged: bool = True
) -> str:
    """Whether and where the live detector alarmed, and why it did, came late, or did not.

    >>> healthy = RunVerdict(kind="healthy", text="HEALTHY: no failure seen")
    >>> alarm_words(healthy, None), alarm_words(healthy, 6500)
    ('none; it saw no failure either', 'at step 6,500: a brief rise, no failure by the verdict')
    """
    if not judged and first_alarm is None:
        return "none; nothing is logged that it watches"
    if first_alarm is None:
        return f"none; {_why_silent(verdict)}"
    more = f" (first of {num_alarms:,})" if num_alarms > 1 else ""
    at, onset = f"at step {first_alarm:,}{more}", verdict.onset_step
    if onset is None:
        what = {
            "healthy": ": a brief rise, no failure by the verdict",
            "cannot_tell": ": the verdict cannot tell what it was",
        }.get(verdict.kind, "")
        return at + what
    if len(verdict.event_steps) > 1:
        return at + _among_spikes(verdict, first_alarm)
    event = verdict.alarm_step
    if event is None:
        before = counted(onset - first_alarm, "step")
        return f"{at}, {before} before the onset, and none at the onset"
    if event != first_alarm:
        return (
            f"{at}: an earlier, brief rise; at the event again, at step {event:,}{_late(verdict)}"
        )
    return at + _late(verdict)


def _among_spikes(verdict: RunVerdict, alarm: int) -> str:
    """To which of several spikes the first alarm belongs."""
    count = len(verdict.event_steps)
    events = zip(verdict.event_steps, verdict.event_end_steps, strict=True)
    for number, (first, end) in enumerate(events, start=1):
        if first <= alarm <= end:
            after = f", {counted(alarm - first, 'step')} after its onset" if alarm > first else ""
            return f", in spike {number} of {count}{after}"
    return ": a brief rise, none of the verdict's spikes"


def _late(verdict: RunVerdict) -> str:
    """How the alarm of an event lies to its onset, and why where it came late."""
    if verdict.alarm_step is None or verdict.onset_step is None:
        return ""
    steps = verdict.alarm_step - verdict.onset_step
    if steps <= 0:
        return ", at the onset" if steps == 0 else f", {counted(-steps, 'step')} before the onset"
    late = f", {counted(steps, 'step')} after the onset"
    if not verdict.alarm_is_late:
        return late
    if verdict.onset_record is not None and verdict.onset_record < NEEDS_RECORDS:
        return f"{late}: it needs about {NEEDS_RECORDS} records before it can judge"
    return f"{late}: the rise was too small for it before"


def _why_silent(verdict: RunVerdict) -> str:
    if verdict.kind == "healthy":
        return "it saw no failure either"
    if verdict.kind == "overfitting":
        return "it watches for a loss that breaks away, not for overfitting"
    if verdict.kind == "cannot_tell":
        return "no rise was large enough for it"
    if len(verdict.event_steps) > 1 and verdict.kind == "spike":
        return "the spikes are too small, too short or too early for it"
    if verdict.onset_record is not None and verdict.onset_record < NEEDS_RECORDS:
        return (
            f"the event is at record {verdict.onset_record + 1}, and it needs about "
            f"{NEEDS_RECORDS} before it can judge"
        )
    if verdict.kind == "spike":
        return "the spike is too small or too short for it"
    missed = "" if verdict.kind == "level_rose" else ": it missed this one"
    return f"the rise is too small or too slow for it{missed}"


@dataclass(frozen=True)
class _Series:
    """One loss of a run: steps and places (steps, or records where the steps fall back)."""

    name: str
    steps: NDArray[np.int64]
    places: Floats
    values: Floats
    planned: Bools
    unit: str

    @property
    def length(self) -> float:
        return float(self.places[-1] - self.places[0])

    @property
    def spacing(self) -> float:
        return float(np.median(np.diff(self.places))) if len(self.places) > 1 else 1.0


@dataclass(frozen=True)
class _Rise:
    """Records `first` to before `end` are above the level `base`; no `end` where it lasts."""

    first: int
    end: int | None
    base: float
    fall: float
    peak: float
    finite: bool = True


def judge_run(
    records: Sequence[Record],
    alarm_steps: Sequence[int] = (),
    *,
    truth: Truth | None = None,
    unread: str = "",
) -> RunVerdict:
    """Judge a whole log by the course of its loss.

    Args:
        records: of one run, in the order of the log.
        alarm_steps: first step of each alarm of a detector, rising. They change the words only.
        truth: outcome as the log states it; None where it states none. A run that failed by
            its own log is never called healthy.
        unread: what stands behind the last record in the log and could not be read, in words
            (`Run.unread`). Such a log is never called healthy either.

    Returns:
        The class with its evidence, and the line that states both.
    """
    with np.errstate(all="ignore"):  # losses may be infinite, or as large as a float can be
        verdict = _judge(records, alarm_steps)
    if verdict.severity != "bad":
        verdict = _with_its_end(verdict, records, unread, alarm_steps)
    if truth is not None and truth.failed and verdict.severity != "bad":
        at = "" if truth.failure_step is None else f" at step {truth.failure_step:,}"
        kind = f" ({truth.failure_kind.replace('_', ' ')})" if truth.failure_kind else ""
        loss = "its loss does not show it"
        if verdict.kind != "healthy" and verdict.onset_step is not None:
            loss = f"loss {_number(verdict.before)} -> {_number(verdict.after)}"
            loss += f" at step {verdict.onset_step:,}"
        verdict = replace(
            verdict,
            kind="failed",
            onset_step=truth.failure_step,
            onset_record=None,
            text=f"FAILED{at}, as its log states{kind}",
            detail=loss,
            advice="",
        )
    if verdict.advice:
        return verdict
    onset = "?" if verdict.onset_step is None else f"{verdict.onset_step:,}"
    return replace(verdict, advice=_ADVICE[verdict.kind].format(step=onset))


def _with_its_end(
    verdict: RunVerdict, records: Sequence[Record], unread: str, alarm_steps: Sequence[int]
) -> RunVerdict:
    """The verdict, which cannot be told where the losses end before the log does."""
    silent = SilentLoss()
    for record in records:
        silent.update(record)
    since = silent.since
    if since is None and not unread:
        return verdict
    text, advice = f"CANNOT TELL: {unread}", "look at the end of the log"
    details = [] if verdict.kind == "healthy" else [f"before it: {verdict.text}"]
    if since is not None:
        text = f"CANNOT TELL from step {since:,}: no loss is logged any more"
        advice = "check whether it is nan, which some loggers write as null or as a blank"
        details.insert(0, f"the log goes on to step {records[-1].step:,}")
    return RunVerdict(
        kind="cannot_tell",
        text=text,
        detail="; ".join(details),
        advice=advice,
        loss=verdict.loss,
        onset_step=since,
        alarm_step=next((step for step in alarm_steps if since and step >= since), None),
    )


def _judge(records: Sequence[Record], alarm_steps: Sequence[int]) -> RunVerdict:
    training, validation = _series(records, "training_loss"), _series(records, "validation_loss")
    main = training if training is not None else validation
    if main is None:
        if not records:
            return RunVerdict(kind="cannot_tell", text="CANNOT TELL: no record")
        return RunVerdict(kind="cannot_tell", text="CANNOT TELL: no loss is logged")
    for series in (main, validation):
        if series is not None and (ended := _not_finite_at_the_end(series, main, alarm_steps)):
            return _located(ended, series)
    finite = np.isfinite(main.values)
    if finite.sum() < FEWEST_RECORDS:
        if validation is not None and np.isfinite(validation.values).sum() >= FEWEST_RECORDS:
            main = validation
        else:
            return RunVerdict(
                kind="cannot_tell",
                loss=main.name,
                text=f"CANNOT TELL: {counted(len(main.values), 'record')}",
            )
    rises_too = validation is not None and main is training and _rises_by_its_end(validation)
    verdict = _located(_judged(main, alarm_steps, is_loss=rises_too), main)
    if training is None or validation is None or main is not training:
        return verdict
    if not np.isfinite(validation.values[-1]):
        verdict = replace(
            verdict,
            text=f"{verdict.text}, but the last validation loss is not finite",
            advice="check the last evaluation before its checkpoint is used",
        )
    rose = _evaluations_rise(training, validation) if verdict.severity != "bad" else None
    if verdict.kind == "healthy":
        return rose or verdict
    if rose is not None:
        return replace(verdict, detail=f"{verdict.detail}; and {rose.text.lower()}: {rose.detail}")
    return _beside_validation(verdict, validation)


def _rises_by_its_end(validation: _Series) -> bool:
    """True for evaluations of which the last two are above the first."""
    values = validation.values[np.isfinite(validation.values)]
    if len(values) < 3:
        return False
    return float(values[-2:].min() - values[0]) > SHARE_OF_LEVEL * abs(float(values[0]))


def _located(verdict: RunVerdict, series: _Series) -> RunVerdict:
    """The verdict with the place of its onset, and whether its alarm came late."""
    if verdict.onset_step is None:
        return verdict
    steps = series.steps
    record = int(np.argmax(steps >= verdict.onset_step)) if series.unit == "step" else None
    late = False
    if record is not None and verdict.alarm_step is not None:
        between = (steps > verdict.onset_step) & (steps <= verdict.alarm_step)
        late = int(between.sum()) > _PROMPT
    return replace(verdict, onset_record=record, alarm_is_late=late)


def _beside_validation(verdict: RunVerdict, validation: _Series) -> RunVerdict:
    """The verdict on a training loss, which says so where the validation loss did not rise."""
    onset = verdict.onset_step
    if verdict.kind not in _LASTING or onset is None or validation.unit == "record":
        return verdict
    before = validation.values[validation.steps < onset]
    after = validation.values[validation.steps >= onset]
    middle = onset + (int(validation.steps[-1]) - onset) / 2
    known = len(before) and len(after) >= FEWEST_EVALUATIONS and validation.steps[-1] >= middle
    if not known or not np.isfinite(before).all() or not np.isfinite(after).all():
        return verdict
    # The lowest, as the last evaluation before the onset may show it already.
    first, last = float(before.min()), float(after[-1])
    if float(after.max()) - first > SHARE_OF_LEVEL / 2 * abs(first):
        return verdict
    return replace(
        verdict,
        training_only=True,
        text=f"{verdict.text}, in the training loss only",
        detail=f"{verdict.detail}; validation loss {_number(first)} -> {_number(last)}",
    )


def _series(records: Sequence[Record], name: str) -> _Series | None:
    """The logged values of one loss, without steps that the optimiser skipped; None for none."""
    planned, chosen, due = [], [], False
    for position, record in enumerate(records):
        due = due or bool(record.planned_events)
        if getattr(record, name) is None or (record.skipped and name == "training_loss"):
            continue
        chosen.append(position)
        planned.append(due)
        due = False
    if not chosen:
        return None
    steps = np.array([records[position].step for position in chosen], dtype=np.int64)
    values = np.array([getattr(records[position], name) for position in chosen], dtype=float)
    falls_back = bool(np.any(np.diff(steps) < 0))
    places = np.array(chosen, dtype=float) if falls_back else steps.astype(float)
    marks = np.array(planned)
    if marks.sum() > _MOST_PLANNED:
        marks[:] = False
    return _Series(name, steps, places, values, marks, "record" if falls_back else "step")


def _not_finite_at_the_end(
    series: _Series, main: _Series, alarm_steps: Sequence[int]
) -> RunVerdict | None:
    """The verdict on a loss whose last values are nan or infinite, or exactly 0 all at once."""
    values = series.values
    bad = ~np.isfinite(values)
    word = "loss" if series is main else "validation loss"
    what = "nan" if np.isnan(values[-1]) else "infinite"
    if not bad[-1]:
        zero = values == 0
        first = len(values) - int(np.argmin(zero[::-1])) if not zero.all() else 0
        before = values[max(0, first - _WIDTH) : first]
        if not (
            zero[-1]
            and not zero[:first].any()
            and 0 < first <= len(values) - 3
            and np.isfinite(before).all()
        ):
            return None
        # Some trainers write 0 once the loss is nan; a loss that was learned gets there slowly.
        if np.median(before) < SHARE_OF_FALL * np.nanmax(np.abs(values[:_WIDTH])):
            return None
        what = "exactly 0, as some trainers write nan"
    else:
        good = np.flatnonzero(~bad)
        first = int(good[-1]) + 1 if len(good) else 0
        if series is not main and len(values) - first < 2 and np.isfinite(main.values[-1]):
            return None  # one evaluation went wrong, and the training loss is finite
    again = int(np.argmax(bad)) if bad.any() else first
    scattered = again < first and float(bad[again:].mean()) >= SCATTERED_SHARE
    if scattered:
        first = again
    before_level = _level(values[max(0, first - _WIDTH) : first])
    step = int(series.steps[first])
    number, of_all = len(values) - first, len(values)
    if scattered:
        number = int(bad.sum())
    blown = _blown_up(values[:first])
    lost = None if series is main else _blown_up(main.values)
    if lost is not None and (blown is None or main.steps[lost] < series.steps[blown]):
        begun, low = int(main.steps[lost]), _number(float(main.values[:lost].min()))
        came = (
            f"training loss {low} -> {_number(float(main.values[-1]))} from step {begun:,}, last "
            f"logged at step {int(main.steps[-1]):,}; validation loss {what}"
        )
        advice = _ADVICE["not_finite"].format(step=f"{begun:,}")
    elif blown is not None:
        begun, low = int(series.steps[blown]), _number(float(values[:blown].min()))
        high = _number(_level(values[blown:first]))
        came = f"{word} {low} -> {high} at step {begun:,}, then {what}"
        advice = _ADVICE["not_finite"].format(step=f"{begun:,}")
    else:
        came = f"{word} {what}"
        if before_level is not None:
            came = f"{word} {_number(before_level)} -> {what}"
        advice = ""
    alarm = _alarm_of(series, first, alarm_steps)
    return RunVerdict(
        kind="not_finite",
        loss=series.name,
        onset_step=step,
        before=before_level,
        alarm_step=alarm,
        num_events=1,
        text=f"NOT FINITE again and again since step {step:,}"
        if scattered
        else f"NOT FINITE from step {step:,} to the end",
        advice=advice,
        detail=f"{came}, {number} of {of_all:,} {'losses' if series is main else 'evaluations'}"
        f"{_spikes_before(series, first)}{_after_alarm(series, alarm)}",
    )


def _blown_up(values: Floats) -> int | None:
    """Where a loss left its lowest level for good, before it was not finite; None if not."""
    if len(values) < 2 or not np.isfinite(values).all() or values.min() <= 0:
        return None
    low = np.flatnonzero(values <= FAR_RATIO * np.minimum.accumulate(values))
    return int(low[-1]) + 1 if low[-1] + 1 < len(values) else None


def _spikes_before(series: _Series, first: int) -> str:
    """In words, the rises before a record that had come back."""
    if first < FEWEST_RECORDS:
        return ""
    part = replace(
        series,
        steps=series.steps[:first],
        places=series.places[:first],
        values=series.values[:first],
        planned=series.planned[:first],
    )
    return _named_spikes(part, [rise for rise in _rises(part).rises if rise.end is not None])


def _named_spikes(series: _Series, rises: Sequence[_Rise]) -> str:
    if not rises:
        return ""
    highest = max(rises, key=lambda rise: (not rise.finite, rise.peak - rise.base))
    height = _number(highest.peak) if highest.finite else "nan or infinite"
    at = f"step {int(series.steps[highest.first]):,}"
    if len(rises) == 1:
        return f"; before it a spike to {height} at {at}, recovered"
    return f"; before it {len(rises)} spikes, recovered, the highest {height} at {at}"


def _judged(series: _Series, alarm_steps: Sequence[int], *, is_loss: bool = False) -> RunVerdict:
    rises, level, spread, singles = _rises(series)
    finite = series.values[np.isfinite(series.values)]
    fall = float(level[0] - np.min(level[np.isfinite(level)]))
    if float(np.mean(finite <= 0)) > LATE_SHARE and not _falls(finite):
        share = f"{round(100 * float(np.mean(finite <= 0)))} %"
        return RunVerdict(
            kind="cannot_tell",
            loss=series.name,
            text=f"CANNOT TELL: {share} of the values are 0 or below and they do not fall, as in "
            "reinforcement learning (PPO, GRPO), where the loss does not show whether a run goes "
            "well; look at its reward and its KL divergence",
        )
    if not rises:
        burst = _burst(series)
        if burst is None:
            return (
                _unconfirmed(series, rises, singles, alarm_steps)
                or _ends_above(series, alarm_steps)
                or _healthy(series, fall, spread, singles)
            )
        rises = [burst]
    last = rises[-1]
    now = _level(series.values[-_WIDTH:])
    if last.end is not None and now is not None and now > RATIO * max(0.0, rises[0].base):
        rises = [replace(rises[0], end=None)]  # a dip of a noisy loss is no return
        last = rises[0]
    if last.end is None:
        earlier = rises[:-1]
        if _steps_inside(series, earlier) >= UNSTABLE_SHARE * series.length:
            found = _for_good(series, last, level, spread, earlier, alarm_steps, is_loss=is_loss)
            if found.kind == "diverged" and last.base <= earlier[0].base:
                return found  # it was wholly back in between
            last = replace(earlier[0], end=None)  # it broke there and was back for a while only
            earlier = []
        return _for_good(series, last, level, spread, earlier, alarm_steps, is_loss=is_loss)
    return _unconfirmed(series, rises, singles, alarm_steps) or _came_back(
        series, rises, level, spread, singles, alarm_steps
    )


def _falls(values: Floats) -> bool:
    """True if the median of some tenth is below that of the first by a quarter of the range."""
    tenths = [float(np.median(part)) for part in np.array_split(values, 10)]
    return tenths[0] - min(tenths) > 0.25 * float(values.max() / 4 - values.min() / 4) * 4


class _Rises(NamedTuple):
    """The rises of a loss above its lowest level so far, its level, and the spread of its noise.

    `singles` are the records outside them that stand out by more than any noise, one at a time.
    """

    rises: list[_Rise]
    level: Floats
    spread: float
    singles: NDArray[np.int64]


def _rises(series: _Series) -> _Rises:
    """The rises of the loss."""
    values = np.where(np.isfinite(series.values), series.values, np.inf)
    # Two records in a row make a level where the log skips steps, else three.
    level = _running_median(values, _WIDTH if series.spacing <= 1 else 3)
    base = np.empty_like(level)
    fall = np.empty_like(level)
    starts = [0, *(np.flatnonzero(series.planned[1:]) + 1).tolist(), len(values)]
    for low, high in pairwise(starts):
        part = level[low:high]
        base[low:high] = np.minimum.accumulate(part)
        finite_part = part[np.isfinite(part)]
        fall[low:high] = (finite_part[0] if len(finite_part) else 0.0) - base[low:high]
    away = values - _running_median(values, _WIDTH)
    floor = np.maximum(SHARE_OF_LEVEL * np.abs(base), SHARE_OF_FALL * fall)
    calm = (level - base <= floor) & np.isfinite(away)
    # Of a run that is wild for most of the log, its calm records state the noise.
    known = (
        away[calm]
        if calm.sum() >= max(CALM_RECORDS, CALM_SHARE * len(calm))
        else away[np.isfinite(away)]
    )
    spread = _SPREAD * float(np.median(np.abs(known))) if len(known) else 0.0
    floor = np.where(
        np.isfinite(floor),
        np.maximum(floor, SPREADS * (1 + FEW_RECORDS / len(values)) * spread),
        np.inf,
    )
    above = (level - base > floor) | ~np.isfinite(series.values)
    raised = above | (level - base > floor / 2)
    lone = _lone_peaks(series, values, away, base, floor, spread)
    above |= lone
    raised |= lone
    # Where the steps skip, the record after a lone one may be half-way back.
    edges = np.flatnonzero(np.diff(np.concatenate([[False], raised, [False]]).astype(np.int8)))
    rises = []
    for first, end in zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True):
        inside = np.flatnonzero(above[first:end])
        if not len(inside):
            continue
        start, stop = first, end
        if end == len(values) and not above[max(first, end - _WIDTH) : end].any():
            stop = first + int(inside[-1]) + 1
        part = values[start:stop]
        finite = part[np.isfinite(part)]
        peak = float(np.max(finite)) if len(finite) else np.inf
        at_end = stop == len(values) and bool(above[max(start, stop - 2) : stop].any())
        early = stop <= 3 * _WIDTH or (
            series.places[stop - 1] - series.places[start] < ABRUPT_SHARE * series.length
        )
        back = bool(np.any(values[stop:] <= values[: max(1, start)].max()))
        if not at_end and start < _WIDTH and early and back and len(finite) == len(part):
            continue  # it has no past to be above
        onset = _onset(values, start, float(base[start]), float(floor[start]))
        rises.append(
            _Rise(
                first=onset,
                end=None if at_end else min(stop, len(values) - 1),
                base=float(base[start]),
                fall=float(fall[start]),
                peak=peak,
                finite=len(finite) == len(part),
            )
        )
    out = (away > LONE_SPREADS * spread) & (values - base > floor) & np.isfinite(values)
    out[:_WIDTH] = False  # the first have no past
    for rise in rises:
        # The record where one is over may stand out again.
        out[rise.first : len(values) if rise.end is None else rise.end] = False
    return _Rises(rises, level, spread, np.flatnonzero(out))


def _onset(values: Floats, first: int, base: float, floor: float) -> int:
    """The first record of the rise: a running median moves it to neighbours."""
    line = base + floor / 2
    at = first
    while at < len(values) - 1 and values[at] <= line and at < first + _WIDTH:
        at += 1
    while at > 0 and values[at - 1] > line and at > first - _WIDTH:
        at -= 1
    return at


def _burst(series: _Series) -> _Rise | None:
    """A run that burst at once and stays far above its first losses, however noisy; None if not.

    No noise can be estimated where there is no calm part. Each loss of the second half is then
    above four of the first five.
    """
    values = series.values
    if len(values) < 4 * _WIDTH:
        return None
    before, late = values[:_WIDTH], values[len(values) // 2 :]
    base, end = float(np.median(before)), float(np.median(late))
    if base <= 0 or late.min() <= np.sort(before)[-2] or end < RATIO * base:
        return None
    if float(values.max()) < RATIO * float(np.median(values[-_WIDTH:])):
        return None  # it grows and stays, as an accuracy does
    first = int(np.argmax(values > np.sort(before)[-2]))
    return _Rise(first, None, float(before.min()), 0.0, float(values.max()))


def _lone_peaks(
    series: _Series, values: Floats, away: Floats, base: Floats, floor: Floats, spread: float
) -> Bools:
    """Records that stand out alone, in a log that skips steps and has few such."""
    lone = np.zeros(len(values), dtype=bool)
    if series.spacing <= 1 or len(values) <= FEWEST_RECORDS:
        return lone
    away = np.where(np.isfinite(away), away, 0.0)
    far = (away > LONE_SPREADS * spread) & (values - base > floor) & np.isfinite(values)
    far[:_WIDTH] = False  # the first have no past
    candidates = np.flatnonzero(far)
    candidates = candidates[np.argsort(-away[candidates])]
    others = away.copy()
    others[:_WIDTH] = 0.0
    ranked = np.sort(others)[::-1]
    found = 0
    for number in range(1, min(len(candidates), MOST_LONE) + 1):
        if number == len(ranked) or ranked[number - 1] >= LONE_GAP * ranked[number]:
            found = number
    lone[candidates[:found]] = True
    return lone


def _for_good(
    series: _Series,
    rise: _Rise,
    level: Floats,
    spread: float,
    earlier: Sequence[_Rise],
    alarm_steps: Sequence[int],
    *,
    is_loss: bool,
) -> RunVerdict:
    """The verdict on a rise that is not over at the end of the log."""
    number = len(earlier) + 1
    step, rest = int(series.steps[rise.first]), series.places[-1] - series.places[rise.first]
    end_level = _level(series.values[rise.first :][-_WIDTH:])
    alarm = _alarm_of(series, rise.first, alarm_steps)
    before = _before(series, rise.first, rise.base)
    found = RunVerdict(
        kind="diverged",
        text="",
        loss=series.name,
        onset_step=step,
        before=before,
        after=end_level,
        alarm_step=alarm,
        num_events=number,
    )
    word = _word(series)
    levels = f"{word} {_number(before)} -> {_number(end_level)}"
    if (
        rest < min(LATE_SHARE * series.length, LATE_STEPS)
        or len(series.values) - rise.first < _WIDTH
    ):
        return replace(
            found,
            kind="cannot_tell",
            text=f"CANNOT TELL: the log ends {counted(int(rest), series.unit)} after a rise at "
            f"step {step:,}",
            detail=f"{levels}; log more steps",
        )
    peak = float(np.max(level[rise.first :][np.isfinite(level[rise.first :])], initial=rise.base))
    at_last = end_level if end_level is not None else peak
    ratio = _ratio(peak, rise.base)
    lost = (peak - rise.base) / rise.fall if rise.fall > SPREADS * spread else np.inf
    stepped = _is_step(series, rise, level, at_last, spread)
    abrupt = _is_abrupt(series, rise, level)
    if series.name == "validation_loss" and not abrupt:
        return replace(
            found,
            kind="cannot_tell",
            text=f"CANNOT TELL: overfitting or a failure since step {step:,}",
            detail=f"{levels}; no training loss is logged",
        )
    still_rises = at_last - rise.base >= RISING_SHARE * (peak - rise.base)
    fell = rise.fall > max(2 * spread, SHARE_OF_FALL * (peak - rise.base))
    all_along = rise.first <= max(_WIDTH, ABRUPT_SHARE * len(level)) and not is_loss
    if number == 1 and not fell and still_rises and all_along and not abrupt:
        return replace(
            found,
            kind="cannot_tell",
            text="CANNOT TELL: the values rise all along, they may be no loss",
            detail=f"{_number(before)} -> {_number(end_level)}",
        )
    learns = stepped and ratio < FAR_RATIO and peak - at_last >= SHARE_OF_LEVEL * (peak - rise.base)
    failed = (ratio >= RATIO and lost >= LOST and not learns) or (
        not stepped and (ratio >= SLOW_RATIO or lost >= SLOW_LOST)
    )
    if failed:
        logged = series.values[rise.first :]
        height = float(np.max(logged[np.isfinite(logged)], initial=peak))
        end = _last(logged)
        levels = f"{word} {_number(before)}"
        if end_level is not None and _ratio(peak, end_level) >= PEAK_RATIO:
            levels += f", peak {_number(height)}"
        levels += f", end {_number(end)}"
        later = level[rise.first + 1 :]
        back = bool(np.any(later[np.isfinite(later)] <= rise.base))
        came = "fell back and rose again" if back else "never came back"
        if not back and at_last - rise.base < (peak - rise.base) / 2:
            came = "not back by the end"
        detail = levels + _named_spikes(series, earlier) + _after_alarm(series, alarm)
        return replace(found, text=f"DIVERGED at step {step:,}: {came}", detail=detail)
    return replace(
        found,
        kind="level_rose",
        text=f"LEVEL ROSE at step {step:,}, and stays",
        detail=f"{levels}{_named_spikes(series, earlier)}",
    )


def _came_back(
    series: _Series,
    rises: Sequence[_Rise],
    level: Floats,
    spread: float,
    singles: NDArray[np.int64],
    alarm_steps: Sequence[int],
) -> RunVerdict:
    """The verdict on rises that were all over before the end."""
    highest = max(rises, key=lambda rise: (not rise.finite, rise.peak - rise.base))
    first = rises[0]
    end = highest.end if highest.end is not None else len(series.values) - 1
    step, end_step = int(series.steps[highest.first]), int(series.steps[end])
    lasted = series.places[end] - series.places[highest.first]
    alarm = _alarm_of(series, highest.first, alarm_steps)
    before = _before(series, highest.first, highest.base)
    peak = highest.peak if np.isfinite(highest.peak) else None
    found = RunVerdict(
        kind="spike",
        text="",
        loss=series.name,
        onset_step=step,
        end_step=end_step,
        before=before,
        after=peak,
        alarm_step=alarm,
        num_events=len(rises),
        event_steps=tuple(int(series.steps[rise.first]) for rise in rises),
        event_end_steps=tuple(int(series.steps[_end(series, rise)]) for rise in rises),
    )
    height = _number(peak) if highest.finite else "nan or infinite"
    word = _word(series)
    height = f"peak {height}" if highest.finite else f"then {height}"
    levels = f"{word} {_number(before)}, {height}"
    inside = sum(float(series.places[rise.end or 0] - series.places[rise.first]) for rise in rises)
    if all(
        rise.finite
        and series.places[rise.end or 0] - series.places[rise.first] >= LATE_SHARE * series.length
        and _ratio(rise.peak, rise.base) < SLOW_RATIO
        and _is_step(series, rise, level, _last_level(series, rise), spread)
        for rise in rises
    ):
        times = "" if len(rises) == 1 else f", the highest of {len(rises)} times"
        return replace(
            found,
            kind="level_rose",
            text=f"LEVEL ROSE at step {step:,}, back after {counted(int(lasted), series.unit)}",
            detail=f"{levels}{times}",
        )
    if inside >= UNSTABLE_SHARE * series.length:
        last = max(rise.end or 0 for rise in rises)
        # Single records that still stand out are no calm.
        last = min(max([last, *(singles + 1).tolist()]), len(series.values) - 1)
        calm = series.places[-1] - series.places[last] >= LATE_SHARE * series.length
        return replace(
            found,
            kind="unstable",
            onset_step=int(series.steps[first.first]),
            end_step=int(series.steps[last]),
            alarm_step=_alarm_of(series, first.first, alarm_steps),
            before=_before(series, first.first, first.base),
            text=f"UNSTABLE from step {series.steps[first.first]:,} to {series.steps[last]:,}"
            + (", calm since" if calm else ""),
            detail=f"{word} {_number(_before(series, first.first, first.base))}, {height}, "
            f"end {_number(_last(series.values))}",
        )
    duration = f"recovered in {counted(max(1, int(lasted)), series.unit)}"
    higher = _single_records(series, singles, highest.peak if highest.finite else np.inf)
    if len(rises) == 1:
        return replace(found, text=f"SPIKE at {step:,}, {duration}", detail=levels + higher)
    return replace(
        found,
        text=f"{len(rises)} SPIKES, all recovered",
        detail=f"the highest begins at {step:,}: {levels}, {duration}{higher}",
        advice=_AGAIN,
    )


def _single_records(series: _Series, singles: NDArray[np.int64], height: float) -> str:
    """In words, the single records above `height`; empty for none."""
    higher = singles[series.values[singles] > height]
    if not len(higher):
        return ""
    most = int(higher[np.argmax(series.values[higher])])
    at = f"{_number(float(series.values[most]))} at step {int(series.steps[most]):,}"
    if len(higher) == 1:
        return f"; one record stands out, {at}"
    return f"; {len(higher):,} single records stand out, the highest {at}"


def _word(series: _Series) -> str:
    return "loss" if series.name == "training_loss" else "validation loss"


def _end(series: _Series, rise: _Rise) -> int:
    return len(series.values) - 1 if rise.end is None else rise.end


def _last(values: Floats) -> float | None:
    """The last value that is finite, where the curve in a chart ends."""
    finite = values[np.isfinite(values)]
    return float(finite[-1]) if len(finite) else None


def _steps_inside(series: _Series, rises: Sequence[_Rise]) -> float:
    places = series.places
    return sum(float(places[rise.end or 0] - places[rise.first]) for rise in rises)


def _healthy(series: _Series, fall: float, spread: float, singles: NDArray[np.int64]) -> RunVerdict:
    word = _word(series)
    finite = series.values[np.isfinite(series.values)]
    detail = f"{word} {_number(float(finite[0]))} -> {_number(float(finite[-1]))}"
    start = _level(series.values[:_WIDTH])
    if fall <= max(2 * spread, 0.01 * abs(start or 0.0)):
        detail += ", it does not fall"
    detail += _early_rise(series) + _single_records(series, singles, -np.inf)
    return RunVerdict(
        kind="healthy", loss=series.name, text="HEALTHY: no failure seen", detail=detail
    )


def _early_rise(series: _Series) -> str:
    """In words, a rise of the first records, which have no past and so do not count."""
    values = np.where(np.isfinite(series.values), series.values, -np.inf)
    first, at = float(values[0]), int(np.argmax(values[: 2 * _WIDTH]))
    back = np.flatnonzero(values[at:] <= first)
    high = float(values[at])
    if first <= 0 or high <= (1 + 2 * SHARE_OF_LEVEL) * first or not len(back):
        return ""
    over = int(series.steps[at + int(back[0])])
    return (
        f"; an early rise to {_number(high)} at step {int(series.steps[at]):,}, gone by "
        f"step {over:,}"
    )


class _Ending(NamedTuple):
    """The end of a loss that lies above its lowest level, which is over before record `since`."""

    first: float
    low: float
    end: float
    since: int
    worse: bool


def _ending(series: _Series) -> _Ending | None:
    """Where a loss ends above its lowest level by more than its noise; None if it does not.

    The losses from the last announced change on count.
    """
    changed = int(np.flatnonzero(series.planned)[-1]) if series.planned.any() else 0
    good = np.flatnonzero(np.isfinite(series.values[changed:])) + changed
    values = series.values[good]
    fewest = 1 if series.name == "validation_loss" else 2
    if len(values) < fewest * FEWEST_PARTS:
        return None
    parts = np.array_split(values, min(PARTS, len(values) // fewest))
    levels = np.array([np.median(part) for part in parts])
    pairs = (levels[1:] + levels[:-1]) / 2
    lowest = int(np.argmin(pairs[:-1]))
    first, low, end = float(pairs[0]), float(pairs[lowest]), float(pairs[-1])
    bends = np.sort(np.diff(levels, 2) ** 2)[:-1]  # the largest may be where the rise begins
    away = np.abs(values - np.repeat(levels, [len(part) for part in parts]))
    noise = max(
        float(np.mean(bends) / 6) ** 0.5,
        1.25 * 1.4826 * float(np.median(away)) / len(parts[0]) ** 0.5,
    )
    least = max(
        ABOVE_SHARE * max(abs(low), first - low),
        ABOVE_NOISE * (1 + FEW_LEVELS / len(values)) * noise,
    )
    # The noise of few losses that fall fast is not known.
    last = values[-max(_WIDTH, len(values) // 4) :]
    doubled = last.min() > max(RATIO * low, low + SHARE_OF_FALL * (first - low)) > 0
    if not (end - low > least or doubled):
        return None
    since = int(good[sum(len(part) for part in parts[: lowest + 2])])
    return _Ending(first, low, end, since, end - first > least)


def _ends_above(series: _Series, alarm_steps: Sequence[int] = ()) -> RunVerdict | None:
    """The verdict on a loss without a rise that ends above its lowest level; None if not."""
    ending = _ending(series)
    if ending is None:
        return None
    step, word = int(series.steps[ending.since]), _word(series)
    before = ending.first if ending.worse else ending.low
    return RunVerdict(
        kind="level_rose",
        loss=series.name,
        onset_step=step,
        before=before,
        after=ending.end,
        alarm_step=_alarm_of(series, ending.since, alarm_steps),
        num_events=1,
        text="WORSE THAN AT THE START" if ending.worse else f"LEVEL ROSE since step {step:,}",
        detail=f"{word} {_number(before)} -> {_number(ending.end)}",
        advice="check learning rate and data; the first weights were better"
        if ending.worse
        else "",
    )


def _unconfirmed(
    series: _Series,
    rises: Sequence[_Rise],
    singles: NDArray[np.int64],
    alarm_steps: Sequence[int],
) -> RunVerdict | None:
    """The verdict on a last record that stands out, as none follows to tell; None if not."""
    at = len(series.values) - 1
    last, before = float(series.values[at]), _before(series, at)
    if at not in singles or before is None or _ratio(last, before) < RATIO:
        return None
    return RunVerdict(
        kind="cannot_tell",
        loss=series.name,
        onset_step=int(series.steps[at]),
        before=before,
        after=last,
        alarm_step=_alarm_of(series, at, alarm_steps),
        num_events=len(rises) + 1,
        text=f"CANNOT TELL: the last record is {_number(last)}",
        detail=f"{_word(series)} {_number(before)} -> {_number(last)}"
        f"{_named_spikes(series, rises)}",
        advice="log more steps; no later record says whether it is a spike or a failure",
    )


def _evaluations_rise(training: _Series, validation: _Series) -> RunVerdict | None:
    """The verdict on an evaluation loss that ends above where it was; None if it does not.

    It is overfitting where the training loss falls.
    """
    good = np.isfinite(validation.values)
    values, steps = validation.values[good], validation.steps[good]
    if len(values) < 2 or np.any(np.diff(steps) <= 0):
        return None
    lowest = int(np.argmin(values))
    low, last = float(values[lowest]), float(np.min(values[-2:]))
    step, end = int(steps[lowest]), float(values[-1])
    found = RunVerdict(
        kind="level_rose",
        loss=validation.name,
        onset_step=step,
        before=low,
        after=end,
        num_events=1,
        text=f"LEVEL ROSE since step {step:,}",
        detail=f"validation loss {_number(low)} -> {_number(end)}",
    )
    if end >= RATIO * float(values[-3:-1].max()) > 0:
        text = f"CANNOT TELL: the last evaluation is {_number(end)}"
        return replace(found, kind="cannot_tell", onset_step=int(steps[-1]), text=text)
    changes = np.diff(values[: lowest + 1])
    ups = changes[changes > 0]  # a fall without noise has none
    rise = last - low
    far = (
        rise > max(SHARE_OF_LEVEL * abs(low), SHARE_OF_FALL * (float(values[0]) - low))
        and lowest < len(values) - 2
        and (not len(ups) or rise > 3 * float(np.median(ups)))
    )
    above = _ends_above(validation)
    if not far and above is None:
        return None
    then = training.values[training.steps <= step][-_WIDTH:]
    if not len(then) or not np.median(training.values[-_WIDTH:]) < np.median(then):
        return above or found
    text, detail = (
        f"OVERFITTING since step {step:,}",
        f"{found.detail} while the training loss falls",
    )
    return replace(found, kind="overfitting", text=text, detail=detail)


def _is_abrupt(series: _Series, rise: _Rise, level: Floats) -> bool:
    """True if most of the rise is done within a tenth of the log."""
    high = level[rise.first :]
    finite = high[np.isfinite(high)]
    if not len(finite):
        return True
    wanted = rise.base + 0.6 * (float(np.max(finite)) - rise.base)
    reached = rise.first + int(np.argmax(high >= wanted))
    window = max(ABRUPT_SHARE * series.length, 2 * series.spacing)
    return bool(series.places[reached] - series.places[rise.first] <= window)


def _is_step(series: _Series, rise: _Rise, level: Floats, at_last: float, spread: float) -> bool:
    """True for a step to a new level at which the loss stays or from which it falls."""
    end = len(level) if rise.end is None else rise.end
    window = max(STEP_SHARE * series.length, 2 * series.spacing)
    within = (series.places >= series.places[rise.first]) & (
        series.places <= series.places[rise.first] + window
    )
    within[end:] = False
    inside = level[rise.first : end]
    if not len(inside) or not np.isfinite(inside).all():
        return False
    reached, height = float(np.max(level[within])), float(np.max(inside)) - rise.base
    return (
        reached - rise.base >= 0.8 * height - SPREADS / 2 * spread
        and at_last <= reached + SPREADS / 2 * spread
    )


def _last_level(series: _Series, rise: _Rise) -> float:
    inside = series.values[rise.first : rise.end]
    return _level(inside[-_WIDTH:]) or rise.base


def _alarm_of(series: _Series, first: int, alarm_steps: Sequence[int]) -> int | None:
    """The first alarm that belongs to an event: a little before its first record, or later."""
    if series.unit == "record":
        return next((step for step in alarm_steps if step >= series.steps[first]), None)
    slack = LATE_SHARE * series.length
    return next((step for step in alarm_steps if step >= series.steps[first] - slack), None)


def _after_alarm(series: _Series, alarm: int | None) -> str:
    """How long the training went on after the alarm of its failure; empty for not at all."""
    if alarm is None or series.unit == "record":
        return ""
    rest = int(series.steps[-1]) - alarm
    share = 100 * rest / series.length if series.length else 0.0
    if rest <= 0 or share < 0.5:
        return ""
    return f"; trained on for {counted(rest, 'step')} ({share:.0f} %) after the live alarm"


def _before(series: _Series, first: int, base: float = np.inf) -> float | None:
    """The level before a record: of the last records before it, or else `base`."""
    level = _level(series.values[max(0, first - _WIDTH) : first])
    return base if level is None and np.isfinite(base) else level


def _level(values: Floats) -> float | None:
    finite = values[np.isfinite(values)]
    level = float(np.median(finite)) if len(finite) else np.inf
    return level if np.isfinite(level) else None


def _ratio(high: float, base: float) -> float:
    return high / base if base > 0 else np.inf


def _running_median(values: Floats, width: int) -> Floats:
    """The median of `width` neighbours, of fewer at the ends."""
    reach = width // 2
    if len(values) < width:
        return np.full_like(values, np.median(values))
    padded = np.concatenate([np.full(reach, np.nan), values, np.full(reach, np.nan)])
    windows = np.lib.stride_tricks.sliding_window_view(padded, width)
    found: Floats = np.median(windows, axis=1)
    for i in range(reach):
        found[i] = np.median(values[: i + reach + 1])
        found[-1 - i] = np.median(values[-(i + reach + 1) :])
    return found


def _number(value: float | None) -> str:
    """Three digits; without an exponent from a thousand to a million."""
    if value is None:
        return "nan"
    if 999.5 <= abs(value) < 1e6:
        return f"{float(f'{value:.3g}'):,.0f}"
    return f"{value:.3g}"
