"""What a rescue decides from records, step rules and the evidence of all ranks. No torch here."""

from __future__ import annotations

import copy
import logging
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from rmetric.detectors.calibrated import CalibratedDetector
from rmetric.detectors.no_update import NoUpdate
from rmetric.records import Record
from rmetric.rescue.evidence import LossLevel, evidence_of
from rmetric.rescue.policy import Decision, Evidence, RescueConfig, RescuePolicy

logger = logging.getLogger("rmetric")

#: A detector that has seen fewer records knows nothing; it is shown what a return takes from it.
_COLD = 40


class Judgement:
    """Collects the evidence of this rank, asks the policy, and keeps what it decided.

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
        self._first_records: deque[Record] = deque(maxlen=_COLD)
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
        if record.step <= _COLD:
            self._first_records.append(record)
        self._take(record, detector, workers, alone=alone)

    def take_last_record(self, record: Record, detector: CalibratedDetector) -> None:
        """Take the record of the last step of a single process, before its detector does."""
        detector = copy.deepcopy(detector)
        detector.update(record)
        self._judged = record.step
        self._take(record, detector, (), alone=True)

    def _take(self, record: Record, detector: Any, workers: Sequence[int], *, alone: bool) -> None:
        self.own = evidence = self._evidence(record, detector, workers)
        self.unsent = evidence or self.unsent  # a snapshot may complete a second record
        if alone and self.due is None:
            self.after_step(record.step, evidence, back=self.level.is_back)

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

    def after_step(self, step: int, evidence: Evidence | None, *, back: bool | None = None) -> None:
        self._note(self.policy.after_step(step, evidence, back=back), step)

    def at_end(self, step: int, *, back: bool | None) -> None:
        self._note(self.policy.at_end(step, back=back), step)

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
        """Go on from the snapshot of a step, with its losses and its detector.

        A detector that is back at its first records is shown what it knew before the incident.
        """
        state = self.policy.state
        # A hold may be at an earlier one than the newest.
        state.snapshots = [kept for kept in state.snapshots if kept <= step]
        self._judged = 0
        self.level.go_back(losses)
        known, self._first_records = self._first_records, deque(maxlen=_COLD)
        for record in known:
            if record.step <= step:
                self._first_records.append(record)
            elif detector is not None and state.incident and record.step < state.incident.onset:
                detector.update(record)
                self._first_records.append(record)
