"""From records, step rules and the evidence of all ranks to decisions. No torch here."""

from __future__ import annotations

import copy
import logging
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from math import isfinite
from statistics import fmean
from typing import Any

from rmetric.detectors.calibrated import CalibratedDetector
from rmetric.detectors.no_update import NoUpdate
from rmetric.records import Record
from rmetric.rescue.policy import Decision, Evidence, RescueConfig, RescuePolicy

logger = logging.getLogger("rmetric")

_OF_WORKERS = ("worker_norm", "opposed_worker")
_OF_TRAINING_LOSS = frozenset({"loss_jump", "loss_drift", "loss_climb"})
#: Before there is a baseline, by the runs of others: in their first 14 records none of 239 healthy
#: runs of the laboratory has three losses in a row above all before, and 2 of 101 public ones have
#: by this share.
_EARLY_RISE, _IN_A_ROW = 0.3, 3
#: Below this probe_rise, in units of 2 %, the probe loss does not speak against the weights.
_PROBE_RISE = 3.25
#: One loss is noise, so a level is a mean; of fewer losses the noise cannot be estimated.
_LEVEL_WINDOW, _MIN_LEVEL_LOSSES = 10, 3
#: Losses kept: an alarm is raised up to so many steps after its onset.
_LOSSES_KEPT = 60
#: A rise that noise explains does not count, nor does one of 1 %: some losses have no noise.
_MAX_STANDARD_ERRORS, _MAX_RELATIVE_RISE = 4.0, 0.01
#: A detector needs so many records to judge; after a rollback it gets those that it lost again.
_WARM_UP_RECORDS = 40


def evidence_of(detector: CalibratedDetector, step: int) -> Evidence | None:
    """Evidence of an alarmed detector, updated with the record of `step`; None without an alarm."""
    since = detector.since
    if since is None and detector.early_rise > _EARLY_RISE:
        words = f"{_IN_A_ROW} losses in a row are {detector.early_rise:.0%} above all before them"
        return Evidence(step=step, since=max(1, step - _IN_A_ROW + 1), words=words)
    if since is None:
        return None
    kind, worker = kind_of(detector)
    return Evidence(
        step=step, since=min(since, step), kind=kind, words=detector.measured, worker=worker
    )


def kind_of(detector: CalibratedDetector) -> tuple[str, int | None]:
    """Kind of the evidence for the present alarm, the most specific first, and the worker."""
    unusual = detector.unusual
    if "not_finite" in unusual:
        return "not_finite", None
    if not unusual.isdisjoint(_OF_WORKERS):
        return "worker", detector.odd_worker
    if not unusual.isdisjoint(("update_size", "rate_beyond")):
        return "settings", None
    if unusual <= _OF_TRAINING_LOSS and detector.statistics.get("probe_rise", 0.0) < _PROBE_RISE:
        return "data", None
    return "unknown", None


class LossLevel:
    """Whether the loss is back at the level that it had before an incident.

    The level is the mean of ten losses. It is back where it is at most four standard errors of the
    difference of two such means, or 1 %, above the one before. The deviation of one loss is that
    of the steps from loss to loss, over √2.

    >>> level = LossLevel()
    >>> for step, loss in enumerate([2.0, 2.1, 2.0, 2.1, 4.0, 4.1, 4.0], start=1):
    ...     level.update(step, loss)
    >>> level.mark(onset=5)
    >>> level.has_recovered
    False
    """

    def __init__(self) -> None:
        self._losses: deque[tuple[int, float]] = deque(maxlen=_LOSSES_KEPT)
        self._limit: float | None = None

    def update(self, step: int, loss: float | None) -> None:
        if loss is not None and isfinite(loss):
            self._losses.append((step, loss))

    def mark(self, onset: int) -> None:
        """An incident begins; the level before it is that of the steps before `onset`."""
        before = [loss for step, loss in self._losses if step < onset][-_LEVEL_WINDOW:]
        if self._limit is not None or len(before) < _MIN_LEVEL_LOSSES:
            return
        variance = fmean((b - a) ** 2 for a, b in pairwise(before)) / 2
        level, error = fmean(before), (2 * variance / len(before)) ** 0.5
        self._limit = level + max(_MAX_STANDARD_ERRORS * error, _MAX_RELATIVE_RISE * abs(level))

    def forget(self) -> None:
        self._limit = None

    @property
    def has_recovered(self) -> bool | None:
        """Whether the level is at most that of before; None where too few losses are known."""
        if self._limit is None or len(self._losses) < _MIN_LEVEL_LOSSES:
            return None
        return fmean(loss for _, loss in list(self._losses)[-_LEVEL_WINDOW:]) <= self._limit

    def state(self) -> list[tuple[int, float]]:
        return list(self._losses)

    def go_back(self, state: list[tuple[int, float]]) -> None:
        """Return to the losses of a snapshot; the level before the incident stays known."""
        self._losses = deque(state, maxlen=_LOSSES_KEPT)


class Judgement:
    """Collects the evidence of this rank, passes it to the policy, and keeps what that decided.

    It calls neither the monitor nor the training: `Rescue` carries out what is `due`.
    """

    def __init__(self, config: RescueConfig, no_update: NoUpdate) -> None:
        self._no_update = no_update
        self.policy, self.level = RescuePolicy(config), LossLevel()
        #: A decision to go back or to hold, and the step after which it was made.
        self.due: tuple[Decision, int] | None = None
        self.own: Evidence | None = None  # of this rank's detector at its last record
        self.unsent: Evidence | None = None  # that the other ranks have not received
        self._judged = 0  # last step of the training, once its record is judged
        self._first_records: deque[Record] = deque(maxlen=_WARM_UP_RECORDS)
        self._gave_up = False  # in this incident, and it is reported

    def restart(self, policy: RescuePolicy) -> None:
        self.policy = policy
        self.forget_evidence()

    def forget_evidence(self) -> None:
        self.due = self.own = self.unsent = None

    # -- evidence

    def take_record(
        self, record: Record, detector: Any, workers: Sequence[int], *, alone: bool
    ) -> None:
        """Take a complete record; a single process decides now, several ranks by their ballots.

        `workers` are the ranks that the record's workers are; empty for those of a single process
        (`alone`), which are its micro-batches.
        """
        if record.step == self._judged:
            return
        if record.step <= _WARM_UP_RECORDS:
            self._first_records.append(record)
        self.own = evidence = self._evidence(record, detector, workers)
        self.unsent = evidence or self.unsent  # a snapshot may complete a second record
        if alone and self.due is None:
            self.after_step(record.step, evidence, loss_recovered=self.level.has_recovered)

    def take_last_record(self, record: Record, detector: CalibratedDetector) -> None:
        """Take the record of the last step of a single process, before its detector does."""
        detector = copy.deepcopy(detector)
        detector.update(record)
        self.take_record(record, detector, (), alone=True)
        self._judged = record.step

    def _evidence(self, record: Record, detector: Any, workers: Sequence[int]) -> Evidence | None:
        if record.skipped:
            return None
        self.level.update(record.step, record.training_loss)
        idle = self._no_update
        if idle.reason and idle.since <= record.step:
            return Evidence(step=record.step, since=idle.since, kind="no_update", words=idle.reason)
        if not isinstance(detector, CalibratedDetector):
            return None
        evidence = evidence_of(detector, record.step)
        if evidence is not None and evidence.worker is not None:
            known = evidence.worker < len(workers)
            evidence = replace(evidence, worker=workers[evidence.worker] if known else None)
        return evidence

    # -- decisions

    def before_update(self, step: int, broken: Sequence[tuple[str, str]]) -> Decision:
        """Decide about the step at hand, by (rule, reason) of each step rule that it breaks."""
        evidence = None
        if broken:
            rule, reason = broken[0]
            kind = "not_finite" if rule == "non_finite" else "explosion"
            evidence = Evidence(step=step, since=step, kind=kind, words=reason)
        return self._note(self.policy.before_update(step, evidence), step)

    def after_step(
        self, step: int, evidence: Evidence | None, *, loss_recovered: bool | None = None
    ) -> None:
        self._note(self.policy.after_step(step, evidence, loss_recovered=loss_recovered), step)

    def at_end(self, step: int, *, loss_recovered: bool | None) -> None:
        self._note(self.policy.at_end(step, loss_recovered=loss_recovered), step)

    def _note(self, decision: Decision, step: int) -> Decision:
        """Keep what is to be done between two steps."""
        incident = self.policy.state.incident
        if incident is None:
            self.level.forget()
            self._gave_up = False
        else:
            self.level.mark(incident.onset)
        if decision.action == "go_on" and decision.reason and not self._gave_up:
            self._gave_up = True
            logger.warning("rmetric: rescue %s", decision.reason)
        if decision.action in ("go_back", "hold"):
            self.due = decision, step
        return decision

    # -- after a return

    def went_back(self, step: int, losses: list[tuple[int, float]], detector: Any) -> None:
        """Go on from a snapshot; a detector back at its first records is shown what it knew."""
        state = self.policy.state
        # A hold may be at an earlier one than the newest.
        state.snapshots = [kept for kept in state.snapshots if kept <= step]
        self._judged = 0
        self.level.go_back(losses)
        known, self._first_records = self._first_records, deque(maxlen=_WARM_UP_RECORDS)
        for record in known:
            if record.step <= step:
                self._first_records.append(record)
            elif detector is not None and state.incident and record.step < state.incident.onset:
                detector.update(record)
                self._first_records.append(record)
