"""Settings of the monitor."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field, fields
from math import inf
from pathlib import Path

from rmetric._util.errors import as_number, require
from rmetric.detectors.calibrated import read_thresholds
from rmetric.detectors.registry import DETECTORS
from rmetric.metric import RMetricConfig
from rmetric.monitor.stalls import SLOW_RANK, SOURCES, STALL

RULES = ("non_finite", "gradient_explosion")
#: Alerts on step times; a slow drift is often planned, so it is not a default.
STEP_TIME_ALERTS = (STALL, SLOW_RANK)
#: A learning rate that leaves its plan; steps that change nothing; memory that runs out.
UPDATE_ALERTS = LEARNING_RATE, NO_UPDATE, POLICY, MEMORY = (
    "learning_rate", "no_update", "policy", "memory",
)  # fmt: skip
DEFAULT_ALERTS = (*RULES, "calibrated", *UPDATE_ALERTS, *STEP_TIME_ALERTS)
#: All sources of alerts beside the detectors.
ALERTS = (*RULES, *UPDATE_ALERTS, "r_metric", *SOURCES)

#: Settings that lie between two bounds.
_BETWEEN = {
    "explosion_factor": (1, inf),
    "stall_seconds": (0, inf),
    "slow_rank_factor": (1, inf),
    "slow_drift": (0, 1),
    "join_seconds": (0, inf),
}


@dataclass(frozen=True, kw_only=True)
class MonitorConfig:
    """Settings of a `Monitor`: cadence of each measurement, and sources of alerts.

    A cadence (``..._every``) is in steps: 1 is every step, 0 never.

    Attributes:
        metric: settings of the R-Metric; the paper's case study by default.
        detectors: names of the registry that run beside it; their alarms stand in the log. By
            default the calibrated detector.
        alert_on: sources that are warned of and reach the actions: the rules ``non_finite`` and
            ``gradient_explosion``, ``learning_rate`` (it leaves its plan), ``no_update`` (steps
            change nothing), ``policy`` (`PolicyCollapse`, where rewards are logged), ``memory``
            (`MemorySlope`: it rises steadily), ``stall``, ``slow_rank``, ``slow_drift``,
            ``r_metric``, and any of `detectors`. The default leaves out ``slow_drift`` and
            ``r_metric``, which as published alarms in healthy runs too.
        thresholds: file for the calibrated detector, as ``rmetric calibrate`` makes it; None for
            the shipped ones.
        explosion_factor: a gradient norm above this multiple of its running median is an explosion;
            above 1.
        explosion_window: norms that the median is taken over; half as many must be past before the
            rule is applied.
        overflows: with a gradient scaler, which looks for its scale by overflowing, this many
            non-finite gradients in a row are an alert.
        update_every: update norm and parameter norm, from a sample of weights.
        sampled_weights: size of that sample; exact in models that are smaller.
        workers_every: each worker's own gradient: norms, cosines and non-finite tensors, where
            there are workers or micro-batches.
        layers_every: gradient norm of each layer.
        forward_every: activation headroom, attention logits, router load.
        probe_every: loss on the fixed batch, where one is given.
        memory_every: host and device memory in use.
        step_times: measure the time of each step and its parts; False for none.
        stall_seconds: a step that takes this much longer than usual, and a multiple of the usual
            time, is a stall; above 0.
        slow_rank_factor: a rank whose own time is persistently above this multiple of the other
            ranks' median is slow; above 1.
        slow_drift: share of the best sustained throughput whose loss is a slow drift; between 0
            and 1.
        exchange: with several ranks, their monitors exchange messages; False where the processes
            train by themselves.
        join_seconds: how long the other ranks' monitors are waited for, in the background; above 0.
        patience: seconds that a check may wait for a message of the other ranks which is late; at
            least 0.
    """

    metric: RMetricConfig = field(default_factory=RMetricConfig.case_study)
    detectors: tuple[str, ...] = ("calibrated",)
    alert_on: tuple[str, ...] = DEFAULT_ALERTS
    thresholds: Path | str | None = None
    explosion_factor: float = 20.0
    explosion_window: int = 100
    overflows: int = 10
    update_every: int = 1
    sampled_weights: int = 16384
    workers_every: int = 10
    layers_every: int = 10
    forward_every: int = 50
    probe_every: int = 50
    memory_every: int = 50
    step_times: bool = True
    stall_seconds: float = 5.0
    slow_rank_factor: float = 1.5
    slow_drift: float = 0.2
    exchange: bool = True
    join_seconds: float = 30.0
    patience: float = 0.5

    def __post_init__(self) -> None:
        self._check_numbers()
        for name, value in (("detectors", self.detectors), ("alert_on", self.alert_on)):
            if isinstance(value, str) or not isinstance(value, Collection):
                raise TypeError(f"{name} is {value!r}: a tuple of names is accepted")
        # A peer's state is its own and does not travel in a checkpoint.
        online = [n for n, e in DETECTORS.items() if not e.sees_future and e.kind != "peer"]
        for name in self.detectors:
            if name not in online:
                raise ValueError(f"unknown detector {name!r}: known are {', '.join(online)}")
        if self.thresholds is not None:
            read_thresholds(Path(self.thresholds))
        if self.alert_on is DEFAULT_ALERTS and "calibrated" not in self.detectors:
            object.__setattr__(self, "alert_on", (*RULES, *UPDATE_ALERTS, *STEP_TIME_ALERTS))
        sources = (*ALERTS, *self.detectors)
        for source in self.alert_on:
            if source not in sources:
                raise ValueError(
                    f"alert_on names {source!r}: it must be of {', '.join(sources)} "
                    "(a detector must also be in detectors)"
                )

    def _check_numbers(self) -> None:
        if not isinstance(self.metric, RMetricConfig):
            raise TypeError(f"metric is {self.metric!r}: an RMetricConfig is accepted")
        for name, (low, high) in _BETWEEN.items():
            value = getattr(self, name)
            accepted = f"between {low} and {high}" if high < inf else f"finite and above {low}"
            require(name, value, low < as_number(value) < high, accepted)
        patient = 0 <= as_number(self.patience) < inf
        require("patience", self.patience, patient, "finite and at least 0")
        for setting in fields(self):
            least = 0 if setting.name.endswith("_every") else 1
            value = getattr(self, setting.name)
            whole = setting.type != "int" or (type(value) is int and value >= least)
            require(setting.name, value, whole, f"an int of at least {least}")
            switch = setting.type != "bool" or type(value) in (bool, int)
            require(setting.name, value, switch, "True or False")
