"""The verdict on the course of one loss: not finite, lost for good, recovered, ending above."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from rmetric._util.printed import counted, short_number
from rmetric.evaluation import loss_course as rules
from rmetric.evaluation import verdict_words as words
from rmetric.evaluation.loss_course import Course, Floats, Loss, Rise, level_of, ratio
from rmetric.evaluation.verdict_words import RunVerdict, levels

#: A step to a new level after which the loss falls again is a change of data below the first
#: ratio to the level before; a slow rise for good is a divergence from the second one.
FAR_RATIO, SLOW_RATIO = 3.0, 1.5
#: A rise for good is a divergence that loses this share of what the loss had fallen, beside twice
#: the level before; or, if it is not a step to a new level, the second one.
LOST, PARTLY_LOST = 0.5, 0.25
#: Share of the log, and steps, after which a rise that is not over counts as one for good. Steps
#: to a new level that came back are not spikes if each lasted that share and is less than
#: `SLOW_RATIO` times the level before.
LATE_SHARE, LATE_STEPS = 0.05, 2000
#: A peak so many times the end of a loss that diverged is stated too.
PEAK_RATIO = 1.5
#: Share of the log in rises that came back, from which the run was unstable.
UNSTABLE_SHARE = 0.25
#: A loss still rises where it ends at this share of its whole rise.
RISING_SHARE = 0.8
#: A loss ends above its lowest level where the difference is more than each of: a share of that
#: level, the same share of what the loss had fallen, and so many times the noise of a level (of
#: few values 1 + `FEW_LEVELS` / values times as many). A level is that of two of these parts.
PARTS, FEWEST_PARTS = 8, 5
ABOVE_SHARE, ABOVE_NOISE, FEW_LEVELS = 0.02, 4.0, 4
_ERROR = 1.4826 * 1.25  # of a median deviation, and of a median's own error
#: Share of the losses from the first that is not finite on, from which others between them do not
#: count as a recovery.
SCATTERED_SHARE = 0.2
#: Records after the onset within which an alarm is not called late.
_PROMPT = 2


def event(
    loss: Loss, name: str, at: int, alarms: Sequence[int] | None = None, **facts: Any
) -> RunVerdict:
    """The verdict `name` on an event from record `at` on; `alarms` is None where none watches."""
    step, alarm, record, late = loss.step(at), None, None, False
    if alarms is not None:
        alarm = alarm_of(loss, at, alarms)
        if loss.unit == "step":
            record = int(np.argmax(loss.steps >= step))
            between = loss.steps > step
            late = alarm is not None and int(np.sum(between & (loss.steps <= alarm))) > _PROMPT
    known = {
        "loss": loss.name, "word": loss.word, "step": step, "onset_step": step,
        "onset_record": record, "alarm_step": alarm, "alarm_is_late": late, "num_events": 1,
    }  # fmt: skip
    return RunVerdict.of(name, **known | facts)


def alarm_of(loss: Loss, first: int, alarms: Sequence[int]) -> int | None:
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
    before = level_of(values[max(0, first - rules.WIDTH) : first])
    begun, came = _blow_up(loss, main, first, before, what)
    how = "again and again since step {:,}" if scattered else "from step {:,} to the end"
    earlier = Course(loss.part(first)).rises if first >= rules.FEWEST_RECORDS else []
    return event(
        loss, "not finite", first, alarms, how=how.format(loss.step(first)),
        before=before, came=came, count=str(count), all=len(values),
        begun=loss.step(first) if begun is None else begun,
        values="losses" if loss is main else "evaluations",
        spikes=words.spikes_before(loss, [rise for rise in earlier if rise.end is not None]),
        after_alarm=words.after_alarm(loss, alarm_of(loss, first, alarms)),
    )  # fmt: skip


def _bad_end(loss: Loss, main: Loss) -> tuple[int, str]:
    """First of the trailing values that are not losses, and what they are; empty without any."""
    bad = ~np.isfinite(loss.values)
    if not bad[-1]:
        first = _zeros_at_end(loss.values)
        return first, "exactly 0, as some trainers write nan" if first else ""
    first = len(bad) - int(np.argmin(bad[::-1])) if not bad.all() else 0
    if loss is not main and len(bad) - first < 2 and np.isfinite(main.values[-1]):
        return first, ""  # one evaluation went wrong, and the training loss is finite
    return first, "nan" if np.isnan(loss.values[-1]) else "infinite"


def _zeros_at_end(values: Floats) -> int:
    """The first of three or more last values that are exactly 0 all at once; 0 for none."""
    zero = values == 0
    first = len(values) - int(np.argmin(zero[::-1])) if not zero.all() else 0
    before = values[max(0, first - rules.WIDTH) : first]
    at_once = zero[-1] and not zero[:first].any() and 0 < first <= len(values) - 3
    if not at_once or not np.isfinite(before).all():
        return 0
    # Some trainers write 0 once the loss is nan; a loss that was learned gets there slowly.
    highest = np.nanmax(np.abs(values[: rules.WIDTH]))
    return 0 if np.median(before) < rules.SHARE_OF_FALL * highest else first


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
    return None, f"{word} {what}" if before is None else f"{word} {short_number(before)} -> {what}"


def _blown_up(values: Floats) -> int | None:
    """First record of the final rise before the loss became non-finite; None without one."""
    if len(values) < 2 or not np.isfinite(values).all() or values.min() <= 0:
        return None
    low = np.flatnonzero(values <= FAR_RATIO * np.minimum.accumulate(values))
    return int(low[-1]) + 1 if low[-1] + 1 < len(values) else None


def ends_above(loss: Loss, alarms: Sequence[int] | None = None) -> RunVerdict | None:
    """The verdict on a loss without a rise that ends above its lowest level; None if not.

    The losses from the last announced change on count.
    """
    changed = int(np.flatnonzero(loss.planned)[-1]) if loss.planned.any() else 0
    good = np.flatnonzero(np.isfinite(loss.values[changed:])) + changed
    values = loss.values[good]
    fewest = 1 if loss.name == "validation_loss" else 2
    if len(values) < fewest * FEWEST_PARTS:
        return None
    parts = np.array_split(values, min(PARTS, len(values) // fewest))
    medians = np.array([np.median(part) for part in parts])
    pairs = (medians[1:] + medians[:-1]) / 2
    lowest = int(np.argmin(pairs[:-1]))
    first, low, end = float(pairs[0]), float(pairs[lowest]), float(pairs[-1])
    bends = np.sort(np.diff(medians, 2) ** 2)[:-1]  # the largest may be where the rise begins
    away = np.abs(values - np.repeat(medians, [len(part) for part in parts]))
    noise = max(
        float(np.mean(bends) / 6) ** 0.5, _ERROR * float(np.median(away)) / len(parts[0]) ** 0.5
    )
    least = max(
        ABOVE_SHARE * max(abs(low), first - low),
        ABOVE_NOISE * (1 + FEW_LEVELS / len(values)) * noise,
    )
    # The noise of few losses that fall fast is not known.
    last = values[-max(rules.WIDTH, len(values) // 4) :]
    doubled = last.min() > max(rules.RATIO * low, low + rules.SHARE_OF_FALL * (first - low)) > 0
    if not (end - low > least or doubled):
        return None
    since = int(good[sum(len(part) for part in parts[: lowest + 2])])
    name, before = ("worse", first) if end - first > least else ("ends above", low)
    return event(loss, name, since, alarms, before=before, after=end)


def judge_loss(loss: Loss, alarms: Sequence[int], *, is_loss: bool = False) -> RunVerdict:
    """The verdict on one loss that is finite at its end, with `FEWEST_RECORDS` finite values.

    `is_loss` is True if it is known that the values are a loss, which may only rise.
    """
    below = float(np.mean(loss.finite <= 0))
    if below > LATE_SHARE and not _falls(loss.finite):
        return RunVerdict.of("policy loss", loss=loss.name, share=round(100 * below))
    course = Course(loss)
    divergence = None if course.rises else course.early_divergence
    rises = course.rises if divergence is None else [divergence]
    if not rises:
        return _unconfirmed(course, alarms) or ends_above(loss, alarms) or _healthy(course)
    last, earlier, now = rises[-1], rises[:-1], level_of(loss.values[-rules.WIDTH :])
    if last.end is None:
        found = _lasting(course, last, earlier, alarms, is_loss=is_loss)
        wholly_back = found.kind == "diverged" and last.base <= rises[0].base
        if wholly_back or course.share(earlier) < UNSTABLE_SHARE:
            return found
    elif now is None or now <= rules.RATIO * max(0.0, rises[0].base):
        return _unconfirmed(course, alarms) or _recovered(course, alarms)
    # A dip of a noisy loss, or a pause between long rises, is not a recovery.
    return _lasting(course, replace(rises[0], end=None), [], alarms, is_loss=is_loss)


def _lasting(
    course: Course, rise: Rise, earlier: Sequence[Rise], alarms: Sequence[int], *, is_loss: bool
) -> RunVerdict:
    loss, first, lasted = course.loss, rise.first, course.lasted(rise)
    later, end = course.level[first:], level_of(loss.values[first:][-rules.WIDTH :])
    peak = float(np.max(later[np.isfinite(later)], initial=rise.base))
    at_last, height = peak if end is None else end, peak - rise.base
    name = _kind_of_lasting(course, rise, peak, at_last, fell=bool(earlier), is_loss=is_loss)
    finite, top, came = loss.values[first:][np.isfinite(loss.values[first:])], "", "never came back"
    if end is not None and ratio(peak, end) >= PEAK_RATIO:
        top = f", peak {short_number(float(np.max(finite, initial=peak)))}"
    if np.any(later[1:] <= rise.base):
        came = "fell back and rose again"
    elif at_last - rise.base < height / 2:
        came = "not back by the end"
    return event(
        loss, name, first, alarms,
        before=loss.before(first, rise.base), after=end, num_events=len(earlier) + 1,
        came=came, top=top, end=float(finite[-1]) if len(finite) else None,
        lasted=counted(int(lasted), loss.unit),
        spikes=words.spikes_before(loss, earlier),
        after_alarm=words.after_alarm(loss, alarm_of(loss, first, alarms)),
    )  # fmt: skip


def _kind_of_lasting(
    course: Course, rise: Rise, peak: float, at_last: float, *, fell: bool, is_loss: bool
) -> str:
    """The verdict's name; `fell` is True if the loss is known to have fallen before."""
    loss, height, times = course.loss, peak - rise.base, ratio(peak, rise.base)
    is_late = course.lasted(rise) < min(LATE_SHARE * loss.length, LATE_STEPS)
    if is_late or len(loss.values) - rise.first < rules.WIDTH:
        return "recent rise"
    is_abrupt, is_step = course.is_abrupt(rise), course.is_step(rise, at_last)
    if loss.name == "validation_loss" and not is_abrupt:
        return "slow evaluation"
    fell = fell or rise.fall > max(2 * course.spread, rules.SHARE_OF_FALL * height)
    from_start = rise.first <= max(rules.WIDTH, rules.ABRUPT_SHARE * len(loss.values)) and not fell
    gradual = not is_abrupt and at_last - rise.base >= RISING_SHARE * height
    if from_start and gradual and not is_loss:
        return "no loss"
    lost = height / rise.fall if rise.fall > rules.SPREADS * course.spread else np.inf
    falls_again = is_step and times < FAR_RATIO and peak - at_last >= rules.SHARE_OF_LEVEL * height
    if times >= rules.RATIO and lost >= LOST and not falls_again:
        return "diverged"
    lasts = not is_step and (times >= SLOW_RATIO or lost >= PARTLY_LOST)
    return "diverged" if lasts else "level"


def _recovered(course: Course, alarms: Sequence[int]) -> RunVerdict:
    loss, rises, first = course.loss, course.rises, course.rises[0]
    rise = highest = max(rises, key=lambda rise: rise.height)
    ends = [rise.end or 0 for rise in rises]
    over, calm, lasted = highest.end or 0, "", int(course.lasted(highest))
    name = "spike" if len(rises) == 1 else "spikes"
    if all(_is_level(course, rise) for rise in rises):
        name = "level, back"
    elif course.share(rises) >= UNSTABLE_SHARE:
        name = "unstable"
        # It is not calm while single records still stand out.
        over = min(max([*ends, *(course.singles + 1).tolist()]), len(loss.values) - 1)
        is_calm = loss.places[-1] - loss.places[over] >= LATE_SHARE * loss.length
        rise, calm = first, ", calm since" if is_calm else ""
    return event(
        loss, name, rise.first, alarms,
        end_step=loss.step(over),
        before=loss.before(rise.first, rise.base),
        after=highest.peak if np.isfinite(highest.peak) else None,
        num_events=len(rises),
        event_steps=tuple(loss.step(rise.first) for rise in rises),
        event_end_steps=tuple(map(loss.step, ends)),
        top=f"{'peak' if highest.finite else 'then'} {words.height_of(highest)}",
        lasted=counted(lasted if name == "level, back" else max(1, lasted), loss.unit),
        higher=words.single_records(course, highest.peak if highest.finite else np.inf),
        highest="" if len(rises) == 1 else f", the highest of {len(rises)} times",
        calm=calm, end=float(loss.finite[-1]),
    )  # fmt: skip


def _is_level(course: Course, rise: Rise) -> bool:
    """True for a low step to a level at which the loss stayed for a while."""
    inside = course.loss.values[rise.first : rise.end]
    return (
        rise.finite
        and course.lasted(rise) >= LATE_SHARE * course.loss.length
        and ratio(rise.peak, rise.base) < SLOW_RATIO
        and course.is_step(rise, level_of(inside[-rules.WIDTH :]) or rise.base)
    )


def _unconfirmed(course: Course, alarms: Sequence[int]) -> RunVerdict | None:
    """The verdict on a last record that stands out, as none follows to judge it by; None if not."""
    loss, at = course.loss, len(course.loss.values) - 1
    last, before = float(loss.values[at]), loss.before(at)
    if before is None:
        return None
    # A loss that was positive in all records should not fall so far below 0.
    below = -last >= rules.RATIO * before and bool((loss.values[:at] > 0).all())
    if not below and (at not in course.singles or ratio(last, before) < rules.RATIO):
        return None
    return event(
        loss, "last record", at, alarms, before=before, after=last,
        num_events=len(course.rises) + 1, spikes=words.spikes_before(loss, course.rises),
    )  # fmt: skip


def _healthy(course: Course) -> RunVerdict:
    loss, level = course.loss, course.level
    lowest, first = float(np.min(level[np.isfinite(level)])), float(loss.finite[0])
    start = level_of(loss.values[: rules.WIDTH]) or 0.0
    falls = float(level[0]) - lowest > max(2 * course.spread, 0.01 * abs(start))
    # One record does not move the level, but a loss may fall within it, to a level far below.
    least = max(rules.SPREADS * course.spread, rules.SHARE_OF_LEVEL * abs(first))
    falls = falls or first - lowest > least
    more = "" if falls else ", it does not fall"
    more += words.early_rise(loss) + words.single_records(course, -np.inf)
    # The first and last loss of a healthy run are not levels: only the text has them.
    return RunVerdict.of(
        "healthy", loss=loss.name, word=loss.word, more=more, first=first,
        last=float(loss.finite[-1]),
        todo="nothing" if falls else "see whether it should have fallen",
    )  # fmt: skip


def _falls(values: Floats) -> bool:
    """True if the median of some tenth is below that of the first by a quarter of the range."""
    tenths = [float(np.median(part)) for part in np.array_split(values, 10)]
    return tenths[0] - min(tenths) > 0.25 * float(values.max() / 4 - values.min() / 4) * 4
