"""Adapters of detectors from other packages, each run by its own code if it is installed.

They are an extra (`peers`) and no dependency: a package is imported when its adapter is created.
Each gets the same records as the other detectors, with its own defaults. Their state is not
accessible to `rmetric._util.state`, so it cannot go into a checkpoint, and the live monitor does
not offer them. Each raises ImportError where its package is not installed.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from math import isfinite, nan

import numpy as np

from rmetric.detectors.contract import Detector, FollowedLoss
from rmetric.detectors.registry import Entry
from rmetric.records import Record

LEVELS = {"PASS": 0.0, "WARN": 1.0, "FAIL": 2.0}
#: Losses before trainproof's own `watch` gives a first verdict.
LEAST = 10
#: A verdict reads the whole log again, so it is computed every STRIDE records, and in
#: long runs after every such part of the log: then a record costs the same at any length.
STRIDE, PART = 10, 50
SEVERITIES = {"info": 0.0, "warning": 1.0, "critical": 2.0}
#: A notice that the loss has not improved for 100 steps; nobody would call that a failure.
NOT_COUNTED = "plateau"


class TrainProof:
    """trainproof's verdict on the log so far, as in its `watch`: it alarms where that is a fail.

        score = 0 pass, 1 warn, 2 fail, of the last verdict

    It judges a log as a whole; here at every tenth record, and after 500 records whenever the log
    has grown by a fiftieth; in between the last verdict is kept. It uses training loss, validation
    loss (as ``eval_loss``; as ``loss`` where a run logs no training loss), gradient norm, learning
    rate and time. A run fails by nan or inf in loss or norm, a loss or norm that is exactly 0, a
    loss that is flat, that never got 5 % better than its first five, or that ends above 1.5 times
    its least, and by a learning rate of 0 throughout. Weaknesses: "never got better" is tested
    after only ten records; the comparison of the last loss with the lowest makes a noisy run fail;
    it keeps the whole log. Source: trainproof 0.22.0 on PyPI, "A deterministic linter for ML
    training runs".
    """

    __slots__ = ("_check", "_due", "_losses", "_on_training_loss", "_rows", "reason", "score")

    def __init__(self) -> None:
        from trainproof.epoch import check_records

        self._check = check_records
        self._rows: list[dict[str, float]] = []
        self._losses, self._due = 0, STRIDE
        self._on_training_loss = False
        self.score = nan
        self.reason = ""

    @property
    def alarm(self) -> bool:
        return self.score >= LEVELS["FAIL"]

    def update(self, record: Record) -> TrainProof:
        """Take the next record; a record without any of these values changes nothing."""
        row = self._row(record)
        if not row:
            return self
        self._losses += "loss" in row
        self._rows.append({"step": float(record.step), **row})
        number = len(self._rows)
        if number >= self._due and self._losses >= LEAST:
            self._due = number + max(STRIDE, number // PART)
            self._ask()
        return self

    def _row(self, record: Record) -> dict[str, float]:
        loss, validation = record.training_loss, record.validation_loss
        self._on_training_loss |= loss is not None
        if not self._on_training_loss:
            loss, validation = validation, None
        shown = {
            "loss": loss,
            "eval_loss": validation,
            "grad_norm": record.gradient_norm,
            "lr": record.learning_rate,
        }
        row = {name: float(value) for name, value in shown.items() if value is not None}
        if row and record.time is not None:
            row["time"] = float(record.time)
        return row

    def _ask(self) -> None:
        try:
            report = self._check(self._rows)
        except ArithmeticError:  # its own: squares of huge losses overflow; no verdict
            return
        self.score = LEVELS.get(report["verdict"], nan)
        fails = [found for found in report["findings"] if found["level"] == "FAIL"]
        message = "; ".join(f"{found['message']} ({found['evidence']})" for found in fails)
        self.reason = f"trainproof: {message}" if self.alarm else ""


class TrainPulse:
    """The alerts of trainpulse's `Monitor` at each record, with its defaults; any is an alarm.

        score = the most severe alert of this record: 0 none, 1 warning, 2 critical

    It uses the followed loss (as ``loss``), the gradient norm and the learning rate, and gets no
    step times. Its rules: nan or inf anywhere, a loss of five times the mean of the last 50, a norm
    above 100 or below 1e-7, a learning rate that changes tenfold at once. Its plateau notices are
    not counted. Weaknesses: fixed ratios and absolute norms for every run; one nan disables the
    mean of the loss for 50 steps; it keeps every value. Source: trainpulse 0.4.0 on PyPI,
    "Lightweight training health monitor".
    """

    __slots__ = ("_followed", "_monitor", "reason", "score")

    def __init__(self) -> None:
        from trainpulse import Monitor

        self.score = nan
        self.reason = ""
        self._monitor = Monitor()
        self._followed = FollowedLoss()

    @property
    def alarm(self) -> bool:
        return self.score >= 1

    def update(self, record: Record) -> TrainPulse:
        """Take the next record; one without any of the three changes nothing."""
        shown = {
            "loss": self._followed.of(record),
            "grad_norm": record.gradient_norm,
            "lr": record.learning_rate,
        }
        given = {name: float(value) for name, value in shown.items() if value is not None}
        if not given:
            return self
        alerts = [
            alert
            for name, value in given.items()
            for alert in self._monitor.log(name, record.step, value)
            if alert.detector != NOT_COUNTED
        ]
        self.score = max((SEVERITIES[alert.severity.value] for alert in alerts), default=0.0)
        message = "; ".join(alert.message for alert in alerts)
        self.reason = f"trainpulse: {message}" if self.alarm else ""
        return self


class TrainScope:
    """The default detector of trainscope's recorder, on the followed loss.

        score = |its score|, 0 without one;    alarm if there is one

    A two-sided CUSUM of the loss about the median of the last 200, in robust standard deviations,
    with slack 1 and limit 6, from the 31st loss on. A loss that is not finite is not passed on, as
    in its recorder, which in a live training also hooks layers and optimiser: these values cause no
    alert. Weakness: it is two-sided, so any steady decrease of the loss alarms. Source: trainscope
    1.8.1 on PyPI, "Post-mortem debugger for LLM training loss spikes".
    """

    __slots__ = ("_detector", "_followed", "score")

    def __init__(self) -> None:
        from trainscope.core.config import TrainScopeConfig
        from trainscope.core.detectors import make_detector

        self.score = nan
        self._detector = make_detector(TrainScopeConfig())
        self._followed = FollowedLoss()

    @property
    def alarm(self) -> bool:
        return self.score > 0

    @property
    def reason(self) -> str:
        if not self.alarm:
            return ""
        return (
            f"trainscope: {self._followed.name} {self._followed.loss:.4g}, score {self.score:.3g}"
        )

    def update(self, record: Record) -> TrainScope:
        """Take the next record; one without a loss changes nothing."""
        loss = self._followed.of(record)
        if loss is None:
            return self
        found = None
        if isfinite(loss):
            with np.errstate(all="ignore"):  # huge losses; what it makes of them is its own
                found = self._detector.update(float(loss))
        waits = self._detector.warmup and found is None
        self.score = nan if waits else abs(float(found or 0.0))
        return self


#: By the package that each needs.
PEERS: dict[str, Callable[[], Detector]] = {
    "trainpulse": TrainPulse,
    "trainscope": TrainScope,
    "trainproof": TrainProof,
}


def installed() -> dict[str, Entry]:
    """The installed packages; they are not imported."""
    return {
        package: Entry(title=f"{package} (peer)", kind="peer", make=_maker(adapter))
        for package, adapter in PEERS.items()
        if find_spec(package) is not None
    }


def _maker(adapter: Callable[[], Detector]) -> Callable[[np.random.Generator], Detector]:
    return lambda generator: adapter()
