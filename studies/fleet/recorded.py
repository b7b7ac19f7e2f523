"""Risk evaluation on recorded telemetry with known failures.

The readings are JSONL as `rmetric.telemetry.lines` describes it, the failures one JSON object
a line: {"node": "", "gpu": 0, "time": 1760000000.0}, time in seconds since the epoch.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from rmetric._util.strict_json import field, mapping, number, parse_line, text, whole_number
from rmetric.evaluation.intervals import wilson
from rmetric.logs import LogError
from rmetric.telemetry.judge import Judge, rule_of
from rmetric.telemetry.lines import TelemetryEvent, read_recording
from rmetric.telemetry.reading import LAST_TIME, Counters, Reading
from rmetric.telemetry.risk import RiskScore
from studies.common.table import Cell, Table, percent
from studies.fleet.gpu_usage import HOUR, Floats
from studies.fleet.predictors import AS_CODED, PREDICTORS, as_coded
from studies.fleet.risk_evaluation import HORIZONS, FailureWindows, JudgedAlarms
from studies.fleet.risk_tables import median, poisson

#: A GPU by its node's name and its index.
Key = tuple[str, int]
COUNTERS = ("ecc_corrected_errors", "ecc_uncorrected_errors")


def evaluate_recorded(readings: Path, failures: Path) -> Table:
    """A table of all predictors on what was recorded."""
    events, failed = read_events(readings), read_failures(failures)
    for node, gpu in failed.keys() - events.keys():
        where = f" on node {node}" if node else ""
        raise ValueError(f"{failures}: GPU {gpu}{where} failed, but {readings} has nothing of it")
    judged: dict[tuple[str, str], list[JudgedAlarms]] = {}
    for key, of_gpu in events.items():
        times, found = stepwise_signals(of_gpu)
        for label, horizon in HORIZONS.items():
            truth = FailureWindows(times, failed.get(key, ()), horizon)
            for rule in PREDICTORS:
                judged.setdefault((label, rule.title), []).append(truth.judge(rule.alarms(found)))
    return Table(
        "risk_recorded",
        f"{readings.name}: {len(events)} GPUs, {sum(map(len, failed.values()))} failures",
        "Horizon | Predictor | Failures announced (%):1 | "
        "only detected as they happen (%):1 | Precision (%):1 | Median lead (h):2 | "
        "False alarms a GPU-day:3 | GPU-days:2 | Time with an alarm (%):2",
        [(*which, *_row(of_all)) for which, of_all in judged.items()],
        notes=[
            "Brackets are 95 % intervals: Wilson's for shares, of order statistics for medians, "
            "Poisson's for rates. GPU-days are those away from failures."
        ],
        grouped=True,
    )


def _row(judged: Sequence[JudgedAlarms]) -> tuple[Cell, ...]:
    leads = [lead for gpu in judged for lead in gpu.leads]
    found = [lead / HOUR for lead in leads if lead == lead]
    at_failure = sum(late for gpu in judged for late in gpu.at_failure)
    num_false, days = sum(gpu.num_false for gpu in judged), sum(gpu.days for gpu in judged)
    fired = sum(gpu.firing * gpu.days for gpu in judged if gpu.days)
    return (
        percent(wilson(len(found), len(leads))),
        percent(wilson(at_failure, len(leads))),
        percent(wilson(len(found), len(found) + num_false)),
        median(found),
        poisson(num_false, days) if days else None,
        days,
        100 * fired / days if days else None,
    )


def read_events(path: Path) -> dict[Key, list[TelemetryEvent]]:
    """Events of each GPU, in the order of the file, which must be that of the times."""
    found: dict[Key, list[TelemetryEvent]] = {}
    for line_number, node, event in read_recording(path):
        of_gpu = found.setdefault((node, event.gpu), [])
        if of_gpu and event.time < of_gpu[-1].time:
            problem = f"time {event.time} comes after {of_gpu[-1].time}; times must not fall"
            raise LogError(path, line_number, problem)
        of_gpu.append(event)
    few = [key for key, of_gpu in found.items() if len(of_gpu) < 2]
    if few or not found:
        what = f"only one line of GPU {few[0][1]}" if few else "no readings"
        raise ValueError(f"{path}: found {what}; at least two of READING or SIGN are needed a GPU")
    return found


def read_failures(path: Path) -> dict[Key, list[float]]:
    """Times of the failures of each GPU. Raises ValueError with file and line for another form."""
    found: dict[Key, list[float]] = {}
    for line_number, line in enumerate(path.read_bytes().splitlines(), start=1):
        if not line.strip():
            continue
        try:
            entry = mapping(parse_line(line))
            node = field(entry, "node", text) or ""
            gpu, time = field(entry, "gpu", whole_number), field(entry, "time", number)
            if gpu is None or time is None:
                raise ValueError(f"a failure has gpu and time; found {gpu!r} and {time!r}")
            if not 0 <= time <= LAST_TIME:
                raise ValueError(f"'time': found {time}; seconds since the epoch are accepted")
        except ValueError as error:
            raise ValueError(f"{path}, line {line_number}: {error}") from None
        found.setdefault((node, gpu), []).append(time)
    return {key: sorted(times) for key, times in found.items()}


def stepwise_signals(events: Iterable[TelemetryEvent]) -> tuple[Floats, dict[str, Floats]]:
    """Times and signals (`predictors.signals`) of one GPU as the guard sees them, shape (T,)."""
    watcher = _Watcher()
    rows = [(event.time, watcher.process(event)) for event in events]
    times = np.array([time for time, _ in rows])
    names = rows[0][1]
    return times, {name: np.array([row[name] for _, row in rows]) for name in names}


class _Watcher:
    """Online signals of one GPU."""

    def __init__(self) -> None:
        self._judge = Judge(0)
        self._scores = {"risk": RiskScore(), "coded": RiskScore(AS_CODED)}
        self._counters = Counters()
        self._corrected: deque[tuple[float, int]] = deque()
        self._hour: float | None = None

    def process(self, event: TelemetryEvent) -> dict[str, float]:
        found = dict.fromkeys(("risk", "coded", "temperature"), np.nan)
        found |= {"anything": 0.0, "uncorrected": 0.0, "xid": 0.0, "hour": self._new_hour(event)}
        if isinstance(event, Reading):
            found |= self._read(event)
            verdict = self._judge.take(event)
        elif event.kind == "driver_loaded":
            self._judge.renewed()
            self._scores["risk"] = RiskScore()
            verdict = self._judge.verdict(event.time)
        else:
            found["xid"] = float("xid" in event.kind)
            verdict = self._judge.happened(event.kind, event.time)
        while self._corrected and self._corrected[0][0] <= event.time - HOUR:
            self._corrected.popleft()
        found["corrected"] = float(sum(new for _, new in self._corrected))
        rules = [rule_of(kind) for kind in verdict.rules]
        found["rules"] = float(any(rule and rule.level != "healthy" for rule in rules))
        return found

    def _read(self, reading: Reading) -> dict[str, float]:
        risk = self._scores["risk"].update(reading).value
        coded = self._scores["coded"].update(as_coded(reading)).value
        celsius, limit = reading.temperature_celsius, reading.slowdown_temperature_celsius
        corrected, uncorrected = (self._counters.rise(reading, name) for name in COUNTERS)
        if corrected:
            self._corrected.append((reading.time, corrected))
        return {
            "risk": np.nan if risk is None else risk,
            "coded": np.nan if coded is None else coded,
            "temperature": np.nan if celsius is None or limit is None else celsius - limit,
            "uncorrected": float(uncorrected),
        }

    def _new_hour(self, event: TelemetryEvent) -> float:
        if self._hour is not None and event.time < self._hour + HOUR:
            return 0.0
        self._hour = event.time
        return 1.0
