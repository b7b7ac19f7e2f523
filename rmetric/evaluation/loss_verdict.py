"""The verdict on the course of one loss: not finite, lost for good, recovered, ending above."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from rmetric._util.printed import counted
from rmetric.evaluation import verdict_words as words
from rmetric.evaluation.loss_course import (
    ABRUPT_SHARE,
    FEWEST_RECORDS,
    RATIO,
    SHARE_OF_FALL,
    SHARE_OF_LEVEL,
    SPREADS,
    WIDTH,
    Course,
    Floats,
    Loss,
    Rise,
    level_of,
    ratio,
)
from rmetric.evaluation.verdict_words import Kind, RunVerdict, levels, number, spikes_before

#: A rise for good is a divergence from `RATIO` to the level before, where it also lost this share
#: of the fall; below, a step to a new level may be a change of data. So is a step after which the
#: loss falls again, below the second ratio.
LOST, FAR_RATIO = 0.5, 3.0
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
#: Share of the losses from the first that is not finite on, from which others between them do not
#: count as a recovery.
SCATTERED_SHARE = 0.2


def cannot_tell(text: str, loss: str | None = None, **more: Any) -> RunVerdict:
    return RunVerdict(kind="cannot_tell", loss=loss, text=f"CANNOT TELL{text}", **more)


def event(
    loss: Loss, kind: Kind, at: int, text: str, detail: str, alarms: Sequence[int] = (), **more: Any
) -> RunVerdict:
    """A verdict on an event that begins with record `at`."""
    found = {"num_events": 1, "alarm_step": _alarm_of(loss, at, alarms)} | more
    return RunVerdict(
        kind=kind, loss=loss.name, onset_step=loss.step(at), text=text, detail=detail, **found
    )


def _alarm_of(loss: Loss, first: int, alarms: Sequence[int]) -> int | None:
    """The first alarm that belongs to an event: a little before its first record, or later."""
    slack = 0.0 if loss.unit == "record" else LATE_SHARE * loss.length
    return next((step for step in alarms if step >= loss.steps[first] - slack), None)


def not_finite_at_end(loss: Loss, main: Loss, alarms: Sequence[int]) -> RunVerdict | None:
    """The verdict on a loss whose last values are nan or infinite, or exactly 0 all at once."""
    values, bad = loss.values, ~np.isfinite(loss.values)
    first, what = _bad_end(loss, main)
    if not what:
        return None
    again = int(np.argmax(bad)) if bad.any() else first
    scattered = again < first and float(bad[again:].mean()) >= SCATTERED_SHARE
    count = int(bad.sum()) if scattered else len(values) - first
    first = again if scattered else first
    before, alarm = level_of(values[max(0, first - WIDTH) : first]), _alarm_of(loss, first, alarms)
    begun, came = _blow_up(loss, main, first, before, what)
    earlier = Course(loss.part(first)).rises if first >= FEWEST_RECORDS else []
    spikes = spikes_before(loss, [rise for rise in earlier if rise.end is not None])
    how = "again and again since step {:,}" if scattered else "from step {:,} to the end"
    advice = "" if begun is None else words.ADVICE["not_finite"].format(step=f"{begun:,}")
    counts = f"{count} of {len(values):,} {'losses' if loss is main else 'evaluations'}"
    detail = f"{came}, {counts}{spikes}{words.after_alarm(loss, alarm)}"
    text = f"NOT FINITE {how.format(loss.step(first))}"
    return event(loss, "not_finite", first, text, detail, alarms, before=before, advice=advice)


def _bad_end(loss: Loss, main: Loss) -> tuple[int, str]:
    """The first of the last values that are no losses, and what they are; empty for none."""
    bad = ~np.isfinite(loss.values)
    if not bad[-1]:
        first = _zeros_at_end(loss.values)
        return first, "exactly 0, as some trainers write nan" if first else ""
    first = len(bad) - int(np.argmin(bad[::-1])) if not bad.all() else 0
    if loss is not main and len(bad) - first < 2 and np.isfinite(main.values[-1]):
        return first, ""  # one evaluation went wrong, and the training loss is finite
    return first, "nan" if np.isnan(loss.values[-1]) else "infinite"


def _blow_up(
    loss: Loss, main: Loss, first: int, before: float | None, what: str
) -> tuple[int | None, str]:
    """The step at which a loss left its level before record `first`, None for none, and words."""
    word = "loss" if loss is main else "validation loss"
    blown = _blown_up(loss.values[:first])
    lost = None if loss is main else _blown_up(main.values)
    begun = None if blown is None else loss.step(blown)
    if lost is not None and (begun is None or main.step(lost) < begun):
        begun, low = main.step(lost), float(main.values[:lost].min())
        rise = levels("training loss", low, float(main.values[-1]))
        logged = f"last logged at step {main.step(-1):,}; validation loss {what}"
        return begun, f"{rise} from step {begun:,}, {logged}"
    if blown is not None:
        low, high = float(loss.values[:blown].min()), level_of(loss.values[blown:first])
        return begun, f"{levels(word, low, high)} at step {begun:,}, then {what}"
    return None, f"{word} {what}" if before is None else f"{word} {number(before)} -> {what}"


def _zeros_at_end(values: Floats) -> int:
    """The first of three or more last values that are exactly 0 all at once; 0 for none."""
    zero = values == 0
    first = len(values) - int(np.argmin(zero[::-1])) if not zero.all() else 0
    before = values[max(0, first - WIDTH) : first]
    at_once = zero[-1] and not zero[:first].any() and 0 < first <= len(values) - 3
    if not at_once or not np.isfinite(before).all():
        return 0
    # Some trainers write 0 once the loss is nan; a loss that was learned gets there slowly.
    return 0 if np.median(before) < SHARE_OF_FALL * np.nanmax(np.abs(values[:WIDTH])) else first


def _blown_up(values: Floats) -> int | None:
    """Where a loss left its lowest level for good, before it was not finite; None if not."""
    if len(values) < 2 or not np.isfinite(values).all() or values.min() <= 0:
        return None
    low = np.flatnonzero(values <= FAR_RATIO * np.minimum.accumulate(values))
    return int(low[-1]) + 1 if low[-1] + 1 < len(values) else None


def ends_above(loss: Loss, alarms: Sequence[int] = ()) -> RunVerdict | None:
    """The verdict on a loss without a rise that ends above its lowest level; None if not."""
    ending = loss.ending()
    if ending is None:
        return None
    before, text = ending.low, f"LEVEL ROSE since step {loss.step(ending.since):,}"
    if ending.worse:
        before, text = ending.first, "WORSE THAN AT THE START"
    return event(
        loss, "level_rose", ending.since, text, levels(loss.word, before, ending.end), alarms,
        before=before, after=ending.end, advice=words.WORSE if ending.worse else "",
    )  # fmt: skip


class LossJudge:
    """Judges one loss that is finite at its end.

    Args:
        loss: at least `FEWEST_RECORDS` of its values are finite.
        alarms: first step of each alarm of a detector, rising.
        is_loss: True if it is known that the values are a loss, which may only rise.
    """

    def __init__(self, loss: Loss, alarms: Sequence[int], *, is_loss: bool = False) -> None:
        self.loss, self.alarms, self.is_loss = loss, alarms, is_loss
        self.course = Course(loss)

    def verdict(self) -> RunVerdict:
        loss, course = self.loss, self.course
        below = float(np.mean(loss.finite <= 0))
        if below > LATE_SHARE and not _falls(loss.finite):
            return cannot_tell(words.POLICY_LOSS.format(share=round(100 * below)), loss.name)
        burst = None if course.rises else course.early_divergence
        rises = course.rises if burst is None else [burst]
        if not rises:
            return self.unconfirmed() or ends_above(loss, self.alarms) or self.healthy()
        last, now = rises[-1], level_of(loss.values[-WIDTH:])
        if last.end is not None and now is not None and now > RATIO * max(0.0, rises[0].base):
            # A dip of a noisy loss is no return.
            return self.persistent_rise(replace(rises[0], end=None), [])
        if last.end is not None:
            return self.unconfirmed() or self.recovered_rises()
        earlier = rises[:-1]
        found = self.persistent_rise(last, earlier)
        if sum(map(course.lasted, earlier)) >= UNSTABLE_SHARE * loss.length and not (
            found.kind == "diverged" and last.base <= rises[0].base  # wholly back in between
        ):
            # It broke there and was back for a while only.
            return self.persistent_rise(replace(rises[0], end=None), [])
        return found

    def persistent_rise(self, rise: Rise, earlier: Sequence[Rise]) -> RunVerdict:
        """The verdict on a rise that is not over at the end of the log."""
        loss, first = self.loss, rise.first
        step, before = loss.step(first), loss.before(first, rise.base)
        later, end_level = self.course.level[first:], level_of(loss.values[first:][-WIDTH:])
        peak = float(np.max(later[np.isfinite(later)], initial=rise.base))
        at_last = end_level if end_level is not None else peak
        from_to, spikes = levels(loss.word, before, end_level), spikes_before(loss, earlier)

        def found(kind: Kind, text: str, detail: str) -> RunVerdict:
            return event(
                loss, kind, first, text, detail, self.alarms,
                before=before, after=end_level, num_events=len(earlier) + 1,
            )  # fmt: skip

        why, hint = self._undecided(rise)
        if why:
            return found("cannot_tell", f"CANNOT TELL: {why}", f"{from_to}; {hint}")
        if self._rises_all_along(rise, peak, at_last, fell=bool(earlier)):
            text = "CANNOT TELL: the values rise all along, they may be no loss"
            return found("cannot_tell", text, f"{number(before)} -> {number(end_level)}")
        if not self._is_failure(rise, peak, at_last):
            text = f"LEVEL ROSE at step {step:,}, and stays"
            return found("level_rose", text, f"{from_to}{spikes}")
        logged, top = loss.values[first:][np.isfinite(loss.values[first:])], ""
        if end_level is not None and ratio(peak, end_level) >= PEAK_RATIO:
            top = f", peak {number(float(np.max(logged, initial=peak)))}"
        end, came = number(float(logged[-1]) if len(logged) else None), "never came back"
        if np.any(later[1:] <= rise.base):
            came = "fell back and rose again"
        elif at_last - rise.base < (peak - rise.base) / 2:
            came = "not back by the end"
        after = words.after_alarm(loss, _alarm_of(loss, first, self.alarms))
        detail = f"{loss.word} {number(before)}{top}, end {end}{spikes}{after}"
        return found("diverged", f"DIVERGED at step {step:,}: {came}", detail)

    def _undecided(self, rise: Rise) -> tuple[str, str]:
        """Why a rise at the end cannot be judged, and what is missing; empty where it can."""
        loss, step = self.loss, self.loss.step(rise.first)
        rest, late = self.course.lasted(rise), min(LATE_SHARE * loss.length, LATE_STEPS)
        if rest < late or len(loss.values) - rise.first < WIDTH:
            after = counted(int(rest), loss.unit)
            return f"the log ends {after} after a rise at step {step:,}", "log more steps"
        if loss.name == "validation_loss" and not self.course.is_abrupt(rise):
            return f"overfitting or a failure since step {step:,}", "no training loss is logged"
        return "", ""

    def _rises_all_along(self, rise: Rise, peak: float, at_last: float, *, fell: bool) -> bool:
        """True for values that rise slowly from the start to the end: they may be no loss."""
        course, height = self.course, peak - rise.base
        fell = fell or rise.fall > max(2 * course.spread, SHARE_OF_FALL * height)
        start = max(WIDTH, ABRUPT_SHARE * len(self.loss.values))
        from_start = rise.first <= start and not fell and not self.is_loss
        to_end = at_last - rise.base >= RISING_SHARE * height
        return from_start and to_end and not course.is_abrupt(rise)

    def _is_failure(self, rise: Rise, peak: float, at_last: float) -> bool:
        """True for a rise that is a divergence, and not a new level that a change of data has."""
        height = peak - rise.base
        lost = height / rise.fall if rise.fall > SPREADS * self.course.spread else np.inf
        far, stepped = ratio(peak, rise.base), self.course.is_step(rise, at_last)
        learns = stepped and far < FAR_RATIO and peak - at_last >= SHARE_OF_LEVEL * height
        if far >= RATIO and lost >= LOST and not learns:
            return True
        return not stepped and (far >= SLOW_RATIO or lost >= SLOW_LOST)

    def recovered_rises(self) -> RunVerdict:
        """The verdict on rises that were all over before the end."""
        loss, course, rises = self.loss, self.course, self.course.rises
        highest, first = max(rises, key=lambda rise: rise.height), rises[0]
        ends = [rise.end or 0 for rise in rises]
        step, lasted = loss.step(highest.first), int(course.lasted(highest))
        before = loss.before(highest.first, highest.base)
        top = f"{'peak' if highest.finite else 'then'} {words.height_of(highest)}"
        from_to = f"{loss.word} {number(before)}, {top}"
        found = event(
            loss, "spike", highest.first, "", "", self.alarms,
            end_step=loss.step(highest.end or 0),
            before=before,
            after=highest.peak if np.isfinite(highest.peak) else None,
            num_events=len(rises),
            event_steps=tuple(loss.step(rise.first) for rise in rises),
            event_end_steps=tuple(map(loss.step, ends)),
        )  # fmt: skip
        if all(map(self._is_new_level, rises)):
            times = "" if len(rises) == 1 else f", the highest of {len(rises)} times"
            text = f"LEVEL ROSE at step {step:,}, back after {counted(lasted, loss.unit)}"
            return replace(found, kind="level_rose", text=text, detail=f"{from_to}{times}")
        if sum(map(course.lasted, rises)) >= UNSTABLE_SHARE * loss.length:
            # Single records that still stand out are no calm.
            last = min(max([*ends, *(course.singles + 1).tolist()]), len(loss.values) - 1)
            is_calm = loss.places[-1] - loss.places[last] >= LATE_SHARE * loss.length
            since, to, calm = loss.step(first.first), loss.step(last), ", calm since" * int(is_calm)
            start, end = loss.before(first.first, first.base), float(loss.finite[-1])
            return replace(
                found,
                kind="unstable",
                onset_step=since,
                end_step=to,
                alarm_step=_alarm_of(loss, first.first, self.alarms),
                before=start,
                text=f"UNSTABLE from step {since:,} to {to:,}{calm}",
                detail=f"{loss.word} {number(start)}, {top}, end {number(end)}",
            )
        recovered = f"recovered in {counted(max(1, lasted), loss.unit)}"
        higher = words.single_records(course, highest.peak if highest.finite else np.inf)
        if len(rises) == 1:
            return replace(found, text=f"SPIKE at {step:,}, {recovered}", detail=from_to + higher)
        detail = f"the highest begins at {step:,}: {from_to}, {recovered}{higher}"
        text = f"{len(rises)} SPIKES, all recovered"
        return replace(found, text=text, detail=detail, advice=words.AGAIN)

    def _is_new_level(self, rise: Rise) -> bool:
        """True for a low step to a level at which the loss stayed for a while."""
        inside = self.loss.values[rise.first : rise.end]
        return (
            rise.finite
            and self.course.lasted(rise) >= LATE_SHARE * self.loss.length
            and ratio(rise.peak, rise.base) < SLOW_RATIO
            and self.course.is_step(rise, level_of(inside[-WIDTH:]) or rise.base)
        )

    def unconfirmed(self) -> RunVerdict | None:
        """The verdict on a last record that stands out, as none follows to tell; None if not."""
        loss, course, at = self.loss, self.course, len(self.loss.values) - 1
        last, before = float(loss.values[at]), loss.before(at)
        if before is None:
            return None
        # A loss that was positive in all records has no business so far below 0.
        below = -last >= RATIO * before and bool((loss.values[:at] > 0).all())
        if not below and (at not in course.singles or ratio(last, before) < RATIO):
            return None
        detail = f"{levels(loss.word, before, last)}{spikes_before(loss, course.rises)}"
        return event(
            loss, "cannot_tell", at, f"CANNOT TELL: the last record is {number(last)}", detail,
            self.alarms, before=before, after=last, num_events=len(course.rises) + 1,
            advice=words.UNCONFIRMED,
        )  # fmt: skip

    def healthy(self) -> RunVerdict:
        loss, course, level = self.loss, self.course, self.course.level
        detail = levels(loss.word, float(loss.finite[0]), float(loss.finite[-1]))
        fall = float(level[0] - np.min(level[np.isfinite(level)]))
        start = level_of(loss.values[:WIDTH]) or 0.0
        if fall <= max(2 * course.spread, 0.01 * abs(start)):
            detail += ", it does not fall"
        detail += words.early_rise(loss) + words.single_records(course, -np.inf)
        text = "HEALTHY: no failure seen"
        return RunVerdict(kind="healthy", loss=loss.name, text=text, detail=detail)


def _falls(values: Floats) -> bool:
    """True if the median of some tenth is below that of the first by a quarter of the range."""
    tenths = [float(np.median(part)) for part in np.array_split(values, 10)]
    return tenths[0] - min(tenths) > 0.25 * float(values.max() / 4 - values.min() / 4) * 4
