"""Predictors of GPU failures: thresholds on telemetry signals, any of which raises an alarm.

A signal is a number after each reading, higher for worse, nan if unknown. All signals are
causal.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rmetric.telemetry.judge import EXPLAINED_BY, rule_of
from rmetric.telemetry.risk import RiskConfig
from rmetric.telemetry.xid import xid_kind
from studies.fleet.gpu_usage import HOUR, Bools, Floats
from studies.fleet.telemetry_simulation import SLOWDOWN_CELSIUS, GpuHistory
from studies.fleet.vectorised_risk import AS_CODED, risk_values

#: Corrected errors within an hour that make the simple threshold fire; by hand.
CORRECTED_AN_HOUR = 10.0


@dataclass(frozen=True, kw_only=True)
class ThresholdPredictor:
    """Alarms while one of its signals is at its threshold or above.

    Attributes:
        name: in files.
        title: in tables.
        any_of: name of a signal, see `signals`, and threshold.
    """

    name: str
    title: str
    any_of: tuple[tuple[str, float], ...]

    def alarms(self, found: dict[str, Floats]) -> Bools:
        """Alarm after each reading, shape (T,)."""
        alarms = np.zeros(found["anything"].size, dtype=np.bool_)
        for signal, threshold in self.any_of:
            alarms |= found[signal] >= threshold
        return alarms


def _one(name: str, title: str, *any_of: tuple[str, float]) -> ThresholdPredictor:
    return ThresholdPredictor(name=name, title=title, any_of=any_of)


PREDICTORS = (
    _one("score_095", "Score as described, 0.95", ("risk", 0.95)),
    _one("score_010", "Score as described, 0.10", ("risk", 0.10)),
    _one("coded_095", "Score as the code behaves, 0.95", ("coded", 0.95)),
    _one("coded_010", "Score as the code behaves, 0.10", ("coded", 0.10)),
    _one("guard", "Score at 0.95 with rules", ("risk", 0.95), ("rules", 0.5)),
    _one("rules", "Rules alone", ("rules", 0.5)),
    _one("temperature", "Temperature above the slowdown limit", ("temperature", 1.0)),
    _one("uncorrected", "Any uncorrectable ECC error", ("uncorrected", 1.0)),
    _one("corrected", "10 corrected ECC errors in an hour", ("corrected", CORRECTED_AN_HOUR)),
    _one(
        "both", "Rules, or 10 corrected in an hour",
        ("rules", 0.5), ("corrected", CORRECTED_AN_HOUR),
    ),
    _one("xid", "Any Xid", ("xid", 1.0)),
    _one("always", "Always on", ("anything", 0.0)),
    _one("hourly", "Once an hour", ("hour", 1.0)),
    _one("never", "Never"),
)  # fmt: skip

#: Thresholds along which a signal's curve is drawn.
CURVES = {
    "risk": tuple(np.round(np.linspace(0.04, 0.6, 29), 3).tolist()),
    "coded": tuple(np.round(np.linspace(0.04, 0.6, 29), 3).tolist()),
    "temperature": tuple(float(above) for above in range(-20, 5)),
    "corrected": (1.0, 2.0, 3.0, 5.0, 10.0, 20.0, 30.0, 50.0, 100.0),
}
ON_CURVES = tuple(
    _one(f"{signal}@{threshold:g}", "", (signal, threshold))
    for signal, thresholds in CURVES.items()
    for threshold in thresholds
)


def signals(history: GpuHistory) -> dict[str, Floats]:
    """Every signal after each reading, shape (T,).

    ``risk`` and ``coded`` are the score, as described and as the original code behaves;
    ``rules`` is 1 while a rule says that a GPU is at risk or worse; ``temperature`` is degrees
    above the limit; ``uncorrected`` and ``xid`` are new ones, ``corrected`` those of the last
    hour.
    """
    num = history.times.size
    kinds = _kinds(history)
    alarmed = [seen for kind, seen in kinds.items() if _condemns(kind)]
    xids = [seen for kind, seen in kinds.items() if "xid" in kind]
    temperature = history.columns["temperature_celsius"] - SLOWDOWN_CELSIUS
    return {
        "anything": np.zeros(num),
        "hour": np.asarray(history.times % HOUR == 0, dtype=np.float64),
        "risk": risk_values(history, RiskConfig()),
        "coded": risk_values(history, AS_CODED, coded=True),
        "rules": _any(alarmed, num),
        "temperature": np.where(history.available, temperature, np.nan),
        "uncorrected": _rises(history, "ecc_uncorrected_errors"),
        "corrected": _in_an_hour(_rises(history, "ecc_corrected_errors"), history.times),
        "xid": _any(xids, num),
    }


def _condemns(kind: str) -> bool:
    rule = rule_of(kind)
    return rule is not None and rule.level != "healthy"


def _any(seen: list[Bools], num: int) -> Floats:
    return np.asarray(np.any([np.zeros(num, dtype=bool), *seen], axis=0), dtype=np.float64)


def _kinds(history: GpuHistory) -> dict[str, Bools]:
    """At which readings each kind of sign is new or holds, in the words of the rules."""
    kinds = {name: history.columns[name] & history.available for name in REMAPS}
    kinds["gpu_lost"] = history.lost
    for time, number in history.xids:
        at = int(np.searchsorted(history.times, time))
        kinds.setdefault(xid_kind(number), np.zeros(history.times.size, dtype=bool))[at] = True
    kinds["ecc_uncorrected"] = _rises(history, "ecc_uncorrected_errors") > 0
    for kind, other in EXPLAINED_BY.items():
        kinds[kind] &= ~kinds.get(other, np.zeros(history.times.size, dtype=bool))
    return kinds


REMAPS = ("row_remap_pending", "row_remap_failed")


def _rises(history: GpuHistory, counter: str) -> Floats:
    """Increase of a counter at each reading; a decrease is a reset."""
    available = np.flatnonzero(history.available)
    counts = history.columns[counter][available]
    rises = np.zeros(history.times.size)
    rises[available] = np.maximum(0, np.diff(counts, prepend=counts[:1]))
    return rises


def _in_an_hour(rises: Floats, times: Floats) -> NDArray[np.float64]:
    total = np.concatenate([[0.0], np.cumsum(rises)])
    return total[1:] - total[np.searchsorted(times, times - HOUR, side="right")]
