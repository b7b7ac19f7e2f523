"""Judgement of one whole log in a line: diverged, spike, healthy and so on.

The verdict looks back over the whole log. It is apart from the alarms of the detectors, which
see one record at a time: they add the step of an alarm to the words and nothing to the class.
docs/verdict.md states the rules. `loss_course` measures a loss, `loss_verdict` judges it,
`verdict_words` has the words; here the training loss, the evaluations and the log's end meet.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from rmetric._util.printed import counted
from rmetric.detectors.log_end import SilentLoss
from rmetric.detectors.no_update import NoUpdate
from rmetric.evaluation import verdict_words as words
from rmetric.evaluation.loss_course import (
    FEWEST_RECORDS,
    RATIO,
    SHARE_OF_FALL,
    SHARE_OF_LEVEL,
    WIDTH,
    Floats,
    Loss,
)
from rmetric.evaluation.loss_verdict import (
    LossJudge,
    cannot_tell,
    ends_above,
    event,
    not_finite_at_end,
)
from rmetric.evaluation.policy_verdict import judge_policy
from rmetric.evaluation.verdict_words import Kind, RunVerdict, levels, number
from rmetric.records import Record, Truth

#: Evaluations from the onset on, by which a validation loss is said not to have risen; and the
#: classes of a training loss that are set against it.
FEWEST_EVALUATIONS = 2
_LASTING: tuple[Kind, ...] = ("diverged", "unstable", "level_rose")
#: Records after the onset within which an alarm is not called late.
_PROMPT = 2


def judge_run(
    records: Sequence[Record],
    alarm_steps: Sequence[int] = (),
    *,
    truth: Truth | None = None,
    unread: str = "",
) -> RunVerdict:
    """Judge a whole log by the course of its loss; of reinforcement learning, of its reward.

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
        verdict = _of_losses(records, alarm_steps)
    if verdict.kind != "not_finite":
        verdict = judge_policy(records, alarm_steps) or verdict
    if verdict.severity != "bad":
        verdict = _with_end(verdict, records, unread, alarm_steps)
    if truth is not None and truth.failed and verdict.severity != "bad":
        verdict = _as_stated(verdict, truth)
    if verdict.advice:
        return verdict
    onset = "?" if verdict.onset_step is None else f"{verdict.onset_step:,}"
    return replace(verdict, advice=words.ADVICE[verdict.kind].format(step=onset))


def _of_losses(records: Sequence[Record], alarms: Sequence[int]) -> RunVerdict:
    training = Loss.of(records, "training_loss")
    validation = Loss.of(records, "validation_loss")
    main = training if training is not None else validation
    if main is None:
        return cannot_tell(": no loss is logged" if records else ": no record")
    for loss in (main, validation):
        if loss is not None and (ended := not_finite_at_end(loss, main, alarms)):
            return _located(ended, loss)
    if len(main.finite) < FEWEST_RECORDS:
        if validation is None or len(validation.finite) < FEWEST_RECORDS:
            return cannot_tell(f": {counted(len(main.values), 'record')}", main.name)
        main = validation
    beside = validation if main is training else None
    rises_too = beside is not None and _ends_above_first(beside.finite)
    verdict = _located(LossJudge(main, alarms, is_loss=rises_too).verdict(), main)
    if beside is None:
        return verdict
    if not np.isfinite(beside.values[-1]):
        text = f"{verdict.text}, but the last validation loss is not finite"
        verdict = replace(verdict, text=text, advice=words.EVALUATE)
    rose = _evaluations_rise(main, beside) if verdict.severity != "bad" else None
    if verdict.kind == "healthy":
        return rose or verdict
    if rose is not None:
        return replace(verdict, detail=f"{verdict.detail}; and {rose.text.lower()}: {rose.detail}")
    return _beside_validation(verdict, beside)


def _with_end(
    verdict: RunVerdict, records: Sequence[Record], unread: str, alarms: Sequence[int]
) -> RunVerdict:
    """The verdict, unless the losses end before the log does, or nothing is learnt at its end."""
    silent, stuck = SilentLoss(), NoUpdate()
    for record in records:
        silent.update(record)
        stuck.update(record)
    since = stuck.since if silent.since is None else silent.since
    alarm = next((step for step in alarms if step >= since), None)
    before = "" if verdict.kind == "healthy" else f"before it: {verdict.text}"
    if silent.since is not None:
        goes_on = f"the log goes on to step {records[-1].step:,}"
        return cannot_tell(
            f" from step {since:,}: no loss is logged any more",
            verdict.loss,
            detail="; ".join(filter(None, [goes_on, before])),
            advice=words.SILENT,
            onset_step=since,
            alarm_step=alarm,
        )
    if stuck.reason:
        text = f"STUCK: {stuck.reason}"
        return RunVerdict(kind="stuck", loss=verdict.loss, text=text, detail=before,
                          onset_step=since, alarm_step=alarm)  # fmt: skip
    if unread:
        return cannot_tell(f": {unread}", verdict.loss, detail=before, advice=words.UNREAD)
    return verdict


def _as_stated(verdict: RunVerdict, truth: Truth) -> RunVerdict:
    """The verdict on a run that failed by its own log."""
    at = "" if truth.failure_step is None else f" at step {truth.failure_step:,}"
    kind = f" ({truth.failure_kind.replace('_', ' ')})" if truth.failure_kind else ""
    text, detail = f"FAILED{at}, as its log states{kind}", "its loss does not show it"
    if verdict.kind != "healthy" and verdict.onset_step is not None:
        rise = levels("loss", verdict.before, verdict.after)
        detail = f"{rise} at step {verdict.onset_step:,}"
    found = replace(verdict, kind="failed", text=text, detail=detail, advice="")
    return replace(found, onset_step=truth.failure_step, onset_record=None)


def _located(verdict: RunVerdict, loss: Loss) -> RunVerdict:
    """The verdict with the place of its onset, and whether its alarm came late."""
    if verdict.onset_step is None or loss.unit == "record":
        return verdict
    late = False
    if verdict.alarm_step is not None:
        between = (loss.steps > verdict.onset_step) & (loss.steps <= verdict.alarm_step)
        late = int(between.sum()) > _PROMPT
    record = int(np.argmax(loss.steps >= verdict.onset_step))
    return replace(verdict, onset_record=record, alarm_is_late=late)


def _ends_above_first(values: Floats) -> bool:
    """True for evaluations of which the last two are above the first."""
    if len(values) < 3:
        return False
    return float(values[-2:].min() - values[0]) > SHARE_OF_LEVEL * abs(float(values[0]))


def _evaluations_rise(training: Loss, validation: Loss) -> RunVerdict | None:
    """The verdict on an evaluation loss that ends above where it was; None if it does not.

    It is overfitting where the training loss falls.
    """
    good = np.flatnonzero(np.isfinite(validation.values))
    values = validation.values[good]
    if len(values) < 2 or np.any(np.diff(validation.steps[good]) <= 0):
        return None
    lowest = int(np.argmin(values))
    step, low, end = validation.step(good[lowest]), float(values[lowest]), float(values[-1])
    found = event(
        validation, "level_rose", good[lowest], f"LEVEL ROSE since step {step:,}",
        levels("validation loss", low, end), before=low, after=end,
    )  # fmt: skip
    if end >= RATIO * float(values[-3:-1].max()) > 0:
        text = f"CANNOT TELL: the last evaluation is {number(end)}"
        return replace(found, kind="cannot_tell", onset_step=validation.step(good[-1]), text=text)
    changes, rise = np.diff(values[: lowest + 1]), float(np.min(values[-2:])) - low
    ups = changes[changes > 0]  # a fall without noise has none
    far = (
        rise > max(SHARE_OF_LEVEL * abs(low), SHARE_OF_FALL * (float(values[0]) - low))
        and lowest < len(values) - 2
        and (not len(ups) or rise > 3 * float(np.median(ups)))
    )
    above = ends_above(validation)
    if not far and above is None:
        return None
    then = training.values[training.steps <= step][-WIDTH:]
    if not len(then) or not np.median(training.values[-WIDTH:]) < np.median(then):
        return above or found
    detail = f"{found.detail} while the training loss falls"
    return replace(
        found, kind="overfitting", text=f"OVERFITTING since step {step:,}", detail=detail
    )


def _beside_validation(verdict: RunVerdict, validation: Loss) -> RunVerdict:
    """The verdict on a training loss, which says so where the validation loss did not rise."""
    onset = verdict.onset_step
    if verdict.kind not in _LASTING or onset is None or validation.unit == "record":
        return verdict
    before = validation.values[validation.steps < onset]
    after = validation.values[validation.steps >= onset]
    middle = onset + (validation.step(-1) - onset) / 2
    known = len(before) and len(after) >= FEWEST_EVALUATIONS and validation.steps[-1] >= middle
    if not known or not np.isfinite(validation.values).all():
        return verdict
    # The lowest, as the last evaluation before the onset may show it already.
    first, last = float(before.min()), float(after[-1])
    if float(after.max()) - first > SHARE_OF_LEVEL / 2 * abs(first):
        return verdict
    text = f"{verdict.text}, in the training loss only"
    detail = f"{verdict.detail}; {levels('validation loss', first, last)}"
    return replace(verdict, training_only=True, text=text, detail=detail)
