"""A verdict on one whole log, and its words: numbers, what to do, where the live alarm lies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from rmetric._util.printed import counted
from rmetric.detectors.policy_collapse import RULES
from rmetric.evaluation.loss_course import SHARE_OF_LEVEL, WIDTH, Course, Loss, Rise

Kind = Literal[
    "diverged", "not_finite", "unstable", "failed", "stuck", "reward_collapsed", "kl_ran_away",
    "entropy_collapsed", "no_advantage", "length_ran_away", "learns_nothing", "spike", "level_rose",
    "overfitting", "cannot_tell", "healthy",
]  # fmt: skip
Severity = Literal["bad", "warning", "good", "unknown"]

#: Severity of each class, the worst first.
SEVERITY: dict[Kind, Severity] = {
    "diverged": "bad",
    "not_finite": "bad",
    "unstable": "bad",
    "failed": "bad",
    "stuck": "bad",
    "reward_collapsed": "bad",
    "kl_ran_away": "bad",
    "entropy_collapsed": "bad",
    "no_advantage": "warning",
    "length_ran_away": "warning",
    "learns_nothing": "warning",
    "spike": "warning",
    "level_rose": "warning",
    "overfitting": "warning",
    "cannot_tell": "unknown",
    "healthy": "good",
}
#: What to do after a verdict, in a few words; "{step}" is that of its event.
ADVICE: dict[Kind, str] = {
    "diverged": "stop, go back to a checkpoint before step {step}",
    "not_finite": "stop, go back to a checkpoint before step {step}",
    "unstable": "lower the learning rate, or clip the gradients, in the next run",
    "failed": "look for the error in the log",
    "stuck": "look at the loss, the frozen weights and the schedule; nothing is learnt since",
    "spike": "watch whether it comes again",
    "level_rose": "check whether data or learning rate changed there",
    "overfitting": "use the checkpoint of step {step}",
    "cannot_tell": "",
    "healthy": "nothing",
    **{kind: rule.advice for kind, rule in RULES.items()},
}
#: The same where the class alone does not say it.
AGAIN = "look at the data, learning rate and gradient norms of these steps"
WORSE = "check learning rate and data; the first weights were better"
UNCONFIRMED = "log more steps; no later record says whether it is a spike or a failure"
SILENT = "check whether it is nan, which some loggers write as null or as a blank"
UNREAD = "look at the end of the log"
EVALUATE = "check the last evaluation before its checkpoint is used"
POLICY_LOSS = (
    ": {share} % of the values are 0 or below and they do not fall, as in reinforcement learning "
    "(PPO, GRPO), where the loss does not show whether a run goes well; look at its reward and its "
    "KL divergence"
)
#: Records that the calibrated detector needs before it can judge a level, about.
NEEDS_RECORDS = 10


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


def number(value: float | None) -> str:
    """Three digits; without an exponent from a thousand to a million."""
    if value is None:
        return "nan"
    if 999.5 <= abs(value) < 1e6:
        return f"{float(f'{value:.3g}'):,.0f}"
    return f"{value:.3g}"


def levels(word: str, before: float | None, after: float | None) -> str:
    return f"{word} {number(before)} -> {number(after)}"


def height_of(rise: Rise) -> str:
    return number(rise.peak) if rise.finite else "nan or infinite"


def spikes_before(loss: Loss, rises: Sequence[Rise]) -> str:
    """The rises before a failure that had come back; empty for none."""
    if not rises:
        return ""
    highest = max(rises, key=lambda rise: rise.height)
    at = f"{height_of(highest)} at step {loss.step(highest.first):,}"
    if len(rises) == 1:
        return f"; before it a spike to {at}, recovered"
    return f"; before it {len(rises)} spikes, recovered, the highest {at}"


def single_records(course: Course, height: float) -> str:
    """The single records above `height`; empty for none."""
    values, singles = course.loss.values, course.singles
    higher = singles[values[singles] > height]
    if not len(higher):
        return ""
    most = int(higher[np.argmax(values[higher])])
    at = f"{number(float(values[most]))} at step {course.loss.step(most):,}"
    if len(higher) == 1:
        return f"; one record stands out, {at}"
    return f"; {len(higher):,} single records stand out, the highest {at}"


def early_rise(loss: Loss) -> str:
    """A rise of the first records, which have no past and so do not count; empty for none."""
    values = np.where(np.isfinite(loss.values), loss.values, -np.inf)
    first, at = float(values[0]), int(np.argmax(values[: 2 * WIDTH]))
    back = np.flatnonzero(values[at:] <= first)
    high = float(values[at])
    if first <= 0 or high <= (1 + 2 * SHARE_OF_LEVEL) * first or not len(back):
        return ""
    over = loss.step(at + int(back[0]))
    return f"; an early rise to {number(high)} at step {loss.step(at):,}, gone by step {over:,}"


def after_alarm(loss: Loss, alarm: int | None) -> str:
    """How long the training went on after the alarm of its failure; empty for not at all."""
    if alarm is None or loss.unit == "record":
        return ""
    rest = loss.step(-1) - alarm
    share = 100 * rest / loss.length if loss.length else 0.0
    if rest <= 0 or share < 0.5:
        return ""
    return f"; trained on for {counted(rest, 'step')} ({share:.0f} %) after the live alarm"


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

    >>> from rmetric.evaluation import RunVerdict
    >>> healthy = RunVerdict(kind="healthy", text="HEALTHY: no failure seen")
    >>> alarm_words(healthy, None), alarm_words(healthy, 6500)
    ('none; it saw no failure either', 'at step 6,500: a brief rise, no failure by the verdict')
    """
    if first_alarm is None:
        return f"none; {_why_silent(verdict) if judged else 'nothing is logged that it watches'}"
    more = f" (first of {num_alarms:,})" if num_alarms > 1 else ""
    at, onset, event = f"at step {first_alarm:,}{more}", verdict.onset_step, verdict.alarm_step
    if onset is None:
        what = {
            "healthy": ": a brief rise, no failure by the verdict",
            "cannot_tell": ": the verdict cannot tell what it was",
        }
        return at + what.get(verdict.kind, "")
    if len(verdict.event_steps) > 1:
        return at + _among_spikes(verdict, first_alarm)
    if event is None:
        before = counted(onset - first_alarm, "step")
        return f"{at}, {before} before the onset, and none at the onset"
    if event != first_alarm:
        at += f": an earlier, brief rise; at the event again, at step {event:,}"
    return at + _late(verdict, event - onset)


def _among_spikes(verdict: RunVerdict, alarm: int) -> str:
    """To which of several spikes the first alarm belongs."""
    events = zip(verdict.event_steps, verdict.event_end_steps, strict=True)
    for number, (first, end) in enumerate(events, start=1):
        if first <= alarm <= end:
            after = f", {counted(alarm - first, 'step')} after its onset" if alarm > first else ""
            return f", in spike {number} of {len(verdict.event_steps)}{after}"
    return ": a brief rise, none of the verdict's spikes"


def _late(verdict: RunVerdict, steps: int) -> str:
    """How the alarm of an event lies to its onset, and why where it came late."""
    if steps <= 0:
        return ", at the onset" if steps == 0 else f", {counted(-steps, 'step')} before the onset"
    late = f", {counted(steps, 'step')} after the onset"
    if not verdict.alarm_is_late:
        return late
    if _is_early(verdict):
        return f"{late}: it needs about {NEEDS_RECORDS} records before it can judge"
    return f"{late}: the rise was too small for it before"


def _is_early(verdict: RunVerdict) -> bool:
    return verdict.onset_record is not None and verdict.onset_record < NEEDS_RECORDS


def _why_silent(verdict: RunVerdict) -> str:
    words = {
        "healthy": "it saw no failure either",
        "overfitting": "it watches for a loss that breaks away, not for overfitting",
        "cannot_tell": "no rise was large enough for it",
    }
    if verdict.kind in words:
        return words[verdict.kind]
    if len(verdict.event_steps) > 1 and verdict.kind == "spike":
        return "the spikes are too small, too short or too early for it"
    if verdict.onset_record is not None and _is_early(verdict):
        return (
            f"the event is at record {verdict.onset_record + 1}, and it needs about "
            f"{NEEDS_RECORDS} before it can judge"
        )
    if verdict.kind == "spike":
        return "the spike is too small or too short for it"
    missed = "" if verdict.kind == "level_rose" else ": it missed this one"
    return f"the rise is too small or too slow for it{missed}"
