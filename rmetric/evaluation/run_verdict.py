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
from rmetric.detectors.input_wait import InputWait
from rmetric.detectors.log_end import SilentLoss
from rmetric.detectors.memory_slope import ADVICE as KEEPS_MEMORY
from rmetric.detectors.memory_slope import MemorySlope
from rmetric.detectors.no_learning import NoLearning
from rmetric.detectors.no_update import NoUpdate
from rmetric.detectors.policy_collapse import RULES, PolicyCollapse
from rmetric.evaluation import loss_course as rules
from rmetric.evaluation import verdict_words as words
from rmetric.evaluation.loss_course import Loss
from rmetric.evaluation.loss_verdict import ends_above, event, judge_loss, not_finite_at_end
from rmetric.evaluation.verdict_words import Kind, RunVerdict, levels
from rmetric.records import AuditFinding, Record, Truth

#: Evaluations from the onset on, by which a validation loss counts as not risen; and the
#: classes of a training loss that are set against it.
FEWEST_EVALUATIONS = 2
_VALIDATION = "validation "
#: Words of the losses of a generator and of its discriminator.
_ADVERSARIES = {"g", "d", "gen", "disc", "generator", "discriminator", "adv", "adversarial"}
_LASTING: tuple[Kind, ...] = ("diverged", "unstable", "level_rose")


def judge_run(
    records: Sequence[Record],
    alarm_steps: Sequence[int] = (),
    *,
    truth: Truth | None = None,
    unread: str = "",
    findings: Sequence[AuditFinding] = (),
) -> RunVerdict:
    """Judge a whole log by the course of its loss; of reinforcement learning, of its reward.

    Args:
        records: of one run, in the order of the log.
        alarm_steps: first step of each alarm of a detector, rising. They change the words only.
        truth: outcome as the log states it; None where it states none.
        unread: what stands behind the last record in the log and could not be read, in words
            (`Run.unread`).
        findings: of the live monitor's audits (`Run.findings`).

    A run that failed by its own log, or has something unread or an audit's error, is never called
    healthy.
    """
    with np.errstate(all="ignore"):  # losses may be infinite, or as large as a float can be
        verdict = _of_parts(records, alarm_steps) or _of_losses(records, alarm_steps)
        policy = _of_policy(records, alarm_steps) if verdict.kind != "not_finite" else None
        verdict = policy or verdict
        if verdict.severity != "bad":
            verdict = _with_end(verdict, records, unread, alarm_steps)
        if truth is not None and truth.failed and verdict.severity != "bad":
            verdict = _as_stated(verdict, truth)
        verdict = verdict if policy else _with_learning(verdict, records, alarm_steps)
    memory, wait = MemorySlope(), InputWait()
    for record in records:
        memory.update(record)
        wait.update(record)
    details = filter(None, [verdict.detail, memory.reason, wait.words])
    verdict = replace(verdict, detail="; ".join(details))
    verdict = words.with_advice(verdict, KEEPS_MEMORY) if memory.reason else verdict
    return words.with_errors(verdict, findings)


def _of_parts(records: Sequence[Record], alarms: Sequence[int]) -> RunVerdict | None:
    """The worst verdict on a part of the loss, which it names; None where no parts are logged."""
    logged = dict.fromkeys(name for record in records for name in record.loss_parts or ())
    names = [name for name in logged if not name.startswith(_VALIDATION)]
    if not names or any(record.training_loss is not None for record in records):
        return None
    found = {name: _of_part(records, name, alarms) for name in names}
    order = [*words.SEVERITY]
    first, *others = sorted(found, key=lambda name: order.index(found[name].kind))
    worst = found[first]
    if worst.kind == "healthy":
        course = "; ".join(v.detail.replace("loss", name, 1) for name, v in found.items())
        return replace(worst, detail=course, part=first)
    warned = [name for name in others if found[name].severity in ("bad", "warning")]
    also = "".join(f"; {name}: {found[name].text}" for name in warned)
    text, detail = f"{worst.text}, in {first}", f"{worst.detail}{also}".removeprefix("; ")
    return replace(worst, text=text, detail=detail, part=first)


def _of_part(records: Sequence[Record], name: str, alarms: Sequence[int]) -> RunVerdict:
    alone = [
        Record(
            record.step,
            training_loss=(record.loss_parts or {}).get(name),
            validation_loss=(record.loss_parts or {}).get(_VALIDATION + name),
            planned_events=record.planned_events,
            skipped=record.skipped,
        )
        for record in records
    ]
    verdict = _of_losses(alone, alarms)
    if verdict.kind == "not_finite" or _ADVERSARIES.isdisjoint(name.split("_")):
        return verdict
    return RunVerdict.of("adversaries", loss=verdict.loss)


def _of_losses(records: Sequence[Record], alarms: Sequence[int]) -> RunVerdict:
    training = Loss.of(records, "training_loss")
    validation = Loss.of(records, "validation_loss")
    main = training if training is not None else validation
    if main is None:
        return RunVerdict.of("few", what="no loss is logged" if records else "no record")
    for loss in (main, validation):
        if loss is not None and (ended := not_finite_at_end(loss, main, alarms)):
            return ended
    if len(main.finite) < rules.FEWEST_RECORDS:
        if validation is None or len(validation.finite) < rules.FEWEST_RECORDS:
            return RunVerdict.of("few", what=counted(len(main.values), "record"), loss=main.name)
        main = validation
    beside = validation if main is training else None
    values = np.zeros(0) if beside is None else beside.finite
    # Evaluations of which the last two are above the first.
    share = rules.SHARE_OF_LEVEL
    rises_too = len(values) > 2 and values[-2:].min() - values[0] > share * abs(values[0])
    verdict = judge_loss(main, alarms, is_loss=bool(rises_too))
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


def _of_policy(records: Sequence[Record], alarms: Sequence[int]) -> RunVerdict | None:
    """The verdict by the reward and what is logged beside it; None for a log without a reward."""
    rewards = [r.policy["reward"] for r in records if r.policy and "reward" in r.policy]
    if not rewards:
        return None
    policy = PolicyCollapse()
    for record in records:
        policy.update(record)
    course = levels("reward", rewards[0], rewards[-1])
    if policy.findings:
        worst, *others = policy.findings
        # Levels of a reward are stated once: single records differ from them.
        also = [] if RULES[worst.kind].quantity == "reward" else [course]
        return RunVerdict(
            kind=worst.kind,
            text=worst.title,
            loss="reward",
            advice=worst.advice,
            detail="; ".join([worst.levels, *also, *(other.words for other in others)]),
            onset_step=worst.since,
            before=worst.before,
            after=worst.after,
            alarm_step=next((step for step in alarms if step >= worst.since), None),
            num_events=len(policy.findings),
        )
    if not policy.is_known:
        what = f"{counted(len(rewards), 'record')} with a reward"
        return RunVerdict.of("few", what=what, loss="reward")
    return RunVerdict.of("reward", loss="reward", course=course)


def _with_end(
    verdict: RunVerdict, records: Sequence[Record], unread: str, alarms: Sequence[int]
) -> RunVerdict:
    """The verdict, unless the losses end before the log does, or nothing is learnt at its end."""
    silent, stuck = SilentLoss(), NoUpdate()
    for record in records:
        silent.update(record)
        stuck.update(record)
    earlier = "" if verdict.kind == "healthy" else f"before it: {verdict.text}"
    name, since = "unread", None
    if silent.since is not None:
        name, since = "silent", silent.since
        goes_on = f"the log goes on to step {records[-1].step:,}"
        earlier = f"{goes_on}; {earlier}" if earlier else goes_on
    elif stuck.reason:
        name, since = "stuck", stuck.since
    elif not unread:
        return verdict
    return RunVerdict.of(
        name, loss=verdict.loss, onset_step=since, step=since,
        alarm_step=next((step for step in alarms if since is not None and step >= since), None),
        why=stuck.reason, unread=unread, earlier=earlier,
    )  # fmt: skip


def _with_learning(
    verdict: RunVerdict, records: Sequence[Record], alarms: Sequence[int]
) -> RunVerdict:
    """The verdict, unless nothing is learnt since the start, or since a restart and it saw that."""
    lasts = verdict.kind in ("diverged", "level_rose") and verdict.end_step is None
    if verdict.kind != "healthy" and not lasts:
        return verdict
    learning, loss = NoLearning(), Loss.of(records, "training_loss")
    for record in records:
        learning.update(record)
    if (found := learning.judge()) is None or loss is None:
        return verdict
    first_steps = loss.steps[found.first : found.first + 3] if found.first else ()
    if lasts and verdict.onset_step not in first_steps:
        return verdict
    facts = {"what": found.text, "why": found.detail}
    if found.first:
        return event(loss, "unlearnt", found.first, alarms, **facts)
    return RunVerdict.of("unlearnt", loss=loss.name, **facts)


def _as_stated(verdict: RunVerdict, truth: Truth) -> RunVerdict:
    seen, rise = "its loss does not show it", levels("loss", verdict.before, verdict.after)
    if verdict.kind != "healthy" and verdict.onset_step is not None:
        seen = f"{rise} at step {verdict.onset_step:,}"
    at = "" if truth.failure_step is None else f" at step {truth.failure_step:,}"
    failure = f" ({truth.failure_kind.replace('_', ' ')})" if truth.failure_kind else ""
    failed = RunVerdict.of("failed", at=at, failure=failure, seen=seen)
    kept = {name: getattr(failed, name) for name in ("kind", "text", "detail", "advice")}
    return replace(verdict, onset_step=truth.failure_step, onset_record=None, **kept)


def _evaluations_rise(training: Loss, validation: Loss) -> RunVerdict | None:
    """The verdict on an evaluation loss that ends above where it was; None if it does not."""
    good = np.flatnonzero(np.isfinite(validation.values))
    values = validation.values[good]
    if len(values) < 2 or np.any(np.diff(validation.steps[good]) <= 0):
        return None
    lowest = int(np.argmin(values))
    low, end = float(values[lowest]), float(values[-1])
    if end >= rules.RATIO * float(values[-3:-1].max()) > 0:
        return event(validation, "last evaluation", good[-1], before=low, after=end)
    changes, rise = np.diff(values[: lowest + 1]), float(np.min(values[-2:])) - low
    ups = changes[changes > 0]  # a fall without noise has none
    far = (
        rise > max(rules.SHARE_OF_LEVEL * abs(low), rules.SHARE_OF_FALL * (float(values[0]) - low))
        and lowest < len(values) - 2
        and (not len(ups) or rise > 3 * float(np.median(ups)))
    )
    above = ends_above(validation)
    if not far and above is None:
        return None
    then = training.values[training.steps <= validation.step(good[lowest])][-rules.WIDTH :]
    if len(then) and np.median(training.values[-rules.WIDTH :]) < np.median(then):
        return event(validation, "overfitting", good[lowest], before=low, after=end)
    return above or event(validation, "ends above", good[lowest], before=low, after=end)


def _beside_validation(verdict: RunVerdict, validation: Loss) -> RunVerdict:
    """The verdict on a training loss, which states where the validation loss did not rise."""
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
    if float(after.max()) - first > rules.SHARE_OF_LEVEL / 2 * abs(first):
        return verdict
    text = f"{verdict.text}, in the training loss only"
    detail = f"{verdict.detail}; {levels('validation loss', first, last)}"
    return replace(verdict, training_only=True, text=text, detail=detail)
