"""A verdict on one whole log, and its words: numbers, what to do, where the live alarm lies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from rmetric._util.printed import counted, short_number
from rmetric.detectors.no_learning import ADVICE as UNLEARNT
from rmetric.evaluation.loss_course import SHARE_OF_LEVEL, WIDTH, Course, Loss, Rise
from rmetric.records import AuditFinding

Kind = Literal[
    "diverged", "not_finite", "unstable", "failed", "stuck", "reward_collapsed", "kl_ran_away",
    "entropy_collapsed", "no_advantage", "length_ran_away", "learns_nothing", "spike", "level_rose",
    "overfitting", "audit_errors", "cannot_tell", "healthy",
]  # fmt: skip
Severity = Literal["bad", "warning", "good", "unknown"]

#: Severity of each class, the worst first.
SEVERITY: dict[Kind, Severity] = {
    "diverged": "bad", "not_finite": "bad", "unstable": "bad", "failed": "bad", "stuck": "bad",
    "reward_collapsed": "bad", "kl_ran_away": "bad", "entropy_collapsed": "bad",
    "no_advantage": "warning", "length_ran_away": "warning",
    "learns_nothing": "warning", "spike": "warning", "level_rose": "warning",
    "overfitting": "warning", "audit_errors": "warning", "cannot_tell": "unknown",
    "healthy": "good",
}  # fmt: skip
#: Records that the calibrated detector needs before it can judge a level, about.
NEEDS_RECORDS = 10

_BACK = "stop, go back to a checkpoint before step "
_CHECK = "check whether data or learning rate changed there"
_FROM_TO, _TOP = "{word} {before} -> {after}", "{word} {before}, {top}"
#: The words of every verdict, by the name that the judging knows: its class, the line, the numbers
#: and what to do. In braces are facts, see `RunVerdict.of`.
WORDS: dict[str, tuple[Kind, str, str, str]] = {
    "diverged": ("diverged", "DIVERGED at step {step}: {came}",
        "{word} {before}{top}, end {end}{spikes}{after_alarm}", _BACK + "{step}"),
    "not finite": ("not_finite", "NOT FINITE {how}",
        "{came}, {count} of {all} {values}{spikes}{after_alarm}", _BACK + "{begun}"),
    "unstable": ("unstable", "UNSTABLE from step {step} to {end_step}{calm}", _TOP + ", end {end}",
        "lower the learning rate, or clip the gradients, in the next run"),
    "failed": ("failed", "FAILED{at}, as its log states{failure}", "{seen}",
        "look for the error in the log"),
    "stuck": ("stuck", "STUCK: {why}", "{earlier}",
        "look at the loss, the frozen weights and the schedule; nothing is learnt since"),
    "unlearnt": ("learns_nothing", "{what}", "{why}", UNLEARNT),
    "spike": ("spike", "SPIKE at {step}, recovered in {lasted}", _TOP + "{higher}",
        "watch whether it comes again"),
    "spikes": ("spike", "{num_events} SPIKES, all recovered",
        f"the highest begins at {{step}}: {_TOP}, recovered in {{lasted}}{{higher}}",
        "look at the data, learning rate and gradient norms of these steps"),
    "level": ("level_rose", "LEVEL ROSE at step {step}, and stays", _FROM_TO + "{spikes}", _CHECK),
    "level, back": ("level_rose", "LEVEL ROSE at step {step}, back after {lasted}",
        _TOP + "{highest}", _CHECK),
    "ends above": ("level_rose", "LEVEL ROSE since step {step}", _FROM_TO, _CHECK),
    "worse": ("level_rose", "WORSE THAN AT THE START", _FROM_TO,
        "check learning rate and data; the first weights were better"),
    "overfitting": ("overfitting", "OVERFITTING since step {step}",
        _FROM_TO + " while the training loss falls", "use the checkpoint of step {step}"),
    "recent rise": ("cannot_tell", "CANNOT TELL: the log ends {lasted} after a rise at step {step}",
        _FROM_TO + "; log more steps", ""),
    "slow evaluation": ("cannot_tell", "CANNOT TELL: overfitting or a failure since step {step}",
        _FROM_TO + "; no training loss is logged", ""),
    "no loss": ("cannot_tell", "CANNOT TELL: the values rise all along, they may not be a loss",
        "{before} -> {after}", ""),
    "last record": ("cannot_tell", "CANNOT TELL: the last record is {after}", _FROM_TO + "{spikes}",
        "log more steps; no later record says whether it is a spike or a failure"),
    "last evaluation": ("cannot_tell", "CANNOT TELL: the last evaluation is {after}", _FROM_TO, ""),
    "policy loss": ("cannot_tell", "CANNOT TELL: {share} % of the values are 0 or below and they "
        "do not fall, as in reinforcement learning (PPO, GRPO), where the loss does not show "
        "whether a run goes well; look at its reward and its KL divergence", "", ""),
    "adversaries": ("cannot_tell", "CANNOT TELL: losses of a generator against its discriminator "
        "do not show whether a run goes well; look at what it generates", "", ""),
    "few": ("cannot_tell", "CANNOT TELL: {what}", "", ""),
    "silent": ("cannot_tell", "CANNOT TELL from step {step}: no loss is logged any more",
        "{earlier}", "check whether it is nan, which some loggers write as null or as a blank"),
    "unread": ("cannot_tell", "CANNOT TELL: {unread}", "{earlier}", "look at the end of the log"),
    "healthy": ("healthy", "HEALTHY: no failure seen", "{word} {first} -> {last}{more}", "{todo}"),
    "reward": ("healthy", "HEALTHY: no collapse of the reward seen", "{course}", "nothing"),
}  # fmt: skip
_TOO_SLOW = "the rise is too small or too slow for it"
#: Errors of audits that are described; the others are counted.
_MOST_ERRORS = 2
#: The advice beside a last evaluation that is not finite.
EVALUATE = "check the last evaluation before its checkpoint is used"


@dataclass(frozen=True, kw_only=True)
class RunVerdict:
    """Judgement of one whole log.

    Attributes:
        kind: class of the course; `severity` follows from it.
        text, detail: the verdict as one short line, and the numbers as a second one or empty.
        loss: the judged series, ``training_loss``, ``validation_loss`` or, of reinforcement
            learning, ``reward``; None without one.
        onset_step, end_step: first step of the event, and the step at which it was over; None
            without an event, or while it lasts.
        before, after: level of the loss before the event, and at its height or, where it never
            came back, at the end; None if there is none or it is not finite.
        alarm_step: first alarm of the event; None without one.
        num_events: rises of the loss that were found.
        advice: what to do, in a few words; empty where nothing follows from the verdict.
        event_steps, event_end_steps: first step of each of them, and at which it was over, where
            all came back.
        onset_record: place of the onset among the losses, from 0; None without one.
        alarm_is_late: True if more than two records lie between the onset and its alarm.
        training_only: True if the training loss rose and the validation loss, which is logged
            too, did not.
        part: name in `Record.loss_parts` of what is judged; empty for the loss of the whole.
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
    part: str = ""

    @property
    def severity(self) -> Severity:
        return SEVERITY[self.kind]

    @classmethod
    def of(cls, name: str, **facts: Any) -> RunVerdict:
        """The verdict of that name in `WORDS`; facts that are attributes are kept besides.

        Losses among the facts are floats, steps and counts whole numbers.
        """
        shown = {fact: _shown(value) for fact, value in facts.items()}
        kind, *lines = WORDS[name]
        text, detail, advice = (line.format_map(shown) for line in lines)
        kept = {fact: facts[fact] for fact in facts.keys() & cls.__annotations__.keys()}
        return cls(kind=kind, text=text, detail=detail, advice=advice, **kept)

    @property
    def numbers_and_advice(self) -> str:
        """The lines below `text` as one."""
        advice = f"To do: {self.advice}." if self.advice else ""
        return " ".join(filter(None, [f"{self.detail}." if self.detail else "", advice]))


def with_errors(verdict: RunVerdict, findings: Sequence[AuditFinding]) -> RunVerdict:
    """The verdict with the errors of audits, which the loss may not show: they are to be mended.

    One that is not bad in itself is of the class `audit_errors` with them.
    """
    errors = [found for found in findings if found.severity == "error"]
    if not errors:
        return verdict
    notes = [f"step {found.step:,}: {found.words}" for found in errors[:_MOST_ERRORS]]
    notes += [f"{more} more"] if (more := len(errors) - _MOST_ERRORS) > 0 else []
    bad, count = verdict.severity in ("bad", "warning"), counted(len(errors), "error")
    text = f"{verdict.text}{';' if bad else ', but'} the audits found {count}"
    kind = verdict.kind if bad else "audit_errors"
    advised = with_advice(verdict, f"mend what the audits found: {'; '.join(notes)}")
    return replace(advised, kind=kind, text=text)


def with_advice(verdict: RunVerdict, advice: str) -> RunVerdict:
    """The verdict with something more to do."""
    advised = verdict.advice not in ("", "nothing")
    return replace(verdict, advice=f"{verdict.advice}; {advice}" if advised else advice)


def _shown(fact: Any) -> str:
    if isinstance(fact, float | None):
        return short_number(fact)
    return f"{fact:,}" if isinstance(fact, int) else str(fact)


def levels(word: str, before: float | None, after: float | None) -> str:
    return f"{word} {short_number(before)} -> {short_number(after)}"


def height_of(rise: Rise) -> str:
    return short_number(rise.peak) if rise.finite else "nan or infinite"


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
    at = f"{short_number(float(values[most]))} at step {course.loss.step(most):,}"
    if len(higher) == 1:
        return f"; one record stands out, {at}"
    return f"; {len(higher):,} single records stand out, the highest {at}"


def early_rise(loss: Loss) -> str:
    """A rise in the first records, which has no baseline and so does not count; else empty."""
    values = np.where(np.isfinite(loss.values), loss.values, -np.inf)
    first, at = float(values[0]), int(np.argmax(values[: 2 * WIDTH]))
    back = np.flatnonzero(values[at:] <= first)
    high = float(values[at])
    if first <= 0 or high <= (1 + 2 * SHARE_OF_LEVEL) * first or not len(back):
        return ""
    over = loss.step(at + int(back[0]))
    return (
        f"; an early rise to {short_number(high)} at step {loss.step(at):,}, gone by step {over:,}"
    )


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
    words = {
        "spike": "with spikes",
        "level_rose": "with a raised level",
        "learns_nothing": "that learn nothing",
        "kl_ran_away": "whose KL ran away",
        "audit_errors": "with errors by their audits",
    }
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
    at, onset, alarm = f"at step {first_alarm:,}{more}", verdict.onset_step, verdict.alarm_step
    if onset is None:
        what = {
            "healthy": ": a brief rise, no failure by the verdict",
            "cannot_tell": ": the verdict cannot tell what it was",
            "audit_errors": ": a brief rise, or of what the audits found",
        }
        return at + what.get(verdict.kind, "")
    if len(verdict.event_steps) > 1:
        return at + _among_spikes(verdict, first_alarm)
    if alarm is None:
        before = counted(onset - first_alarm, "step")
        return f"{at}, {before} before the onset, and none at the onset"
    if alarm != first_alarm:
        at += f": an earlier, brief rise; at the event again, at step {alarm:,}"
    if alarm <= onset:
        before = f"{counted(onset - alarm, 'step')} before" if alarm < onset else "at"
        return f"{at}, {before} the onset"
    why, record = "", verdict.onset_record
    if verdict.alarm_is_late:
        why = ": the rise was too small for it before"
        if record is not None and record < NEEDS_RECORDS:
            why = f": it needs about {NEEDS_RECORDS} records before it can judge"
    return f"{at}, {counted(alarm - onset, 'step')} after the onset{why}"


def _among_spikes(verdict: RunVerdict, alarm: int) -> str:
    """To which of several spikes the first alarm belongs."""
    events = zip(verdict.event_steps, verdict.event_end_steps, strict=True)
    for number, (first, end) in enumerate(events, start=1):
        if first <= alarm <= end:
            after = f", {counted(alarm - first, 'step')} after its onset" if alarm > first else ""
            return f", in spike {number} of {len(verdict.event_steps)}{after}"
    return ": a brief rise, none of the verdict's spikes"


def _why_silent(verdict: RunVerdict) -> str:
    kind, record = verdict.kind, verdict.onset_record
    if kind == "spike" and len(verdict.event_steps) > 1:
        return "the spikes are too small, too short or too early for it"
    if record is not None and record < NEEDS_RECORDS and kind != "cannot_tell":
        at = f"the event is at record {record + 1}"
        return f"{at}, and it needs about {NEEDS_RECORDS} before it can judge"
    words: dict[Kind, str] = {
        "healthy": "it saw no failure either",
        "overfitting": "it watches for a loss that breaks away, not for overfitting",
        "learns_nothing": "it watches for a loss that breaks away, not for one that stays",
        "cannot_tell": "no rise was large enough for it",
        "audit_errors": "it watches what is logged, and the audits the training itself",
        "spike": "the spike is too small or too short for it",
        "level_rose": _TOO_SLOW,
    }
    return words.get(kind, f"{_TOO_SLOW}: it missed this one")
