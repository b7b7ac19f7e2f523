"""Effect of thresholds on failing runs that are shipped, and the runs that raised them."""

from __future__ import annotations

import lzma
from collections.abc import Collection, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from rmetric._util.strict_json import decode_number, encode, encode_line, parse_line
from rmetric.detectors.calibrated.calibration import (
    FLOORS,
    MARGIN,
    SIGNALS,
    Shown,
    by_budget,
    rounded,
)
from rmetric.detectors.calibrated.detector import CalibratedDetector
from rmetric.detectors.calibrated.thresholds import Thresholds, default_thresholds
from rmetric.records import Record

PATH = Path(__file__).with_name("failing_runs.json.xz")
#: Fields that are not evidence by themselves.
CIRCUMSTANCES = frozenset({"learning_rate"})
#: Share of the detected failing runs that a calibration may lose.
MOST_LOST = 0.1


class FailingRun(NamedTuple):
    """A run that failed: its fault, the first step under it, and the records around it."""

    id: str
    fault: str
    onset_step: int
    records: tuple[Record, ...]


@lru_cache(maxsize=1)
def failing_runs() -> tuple[FailingRun, ...]:
    """The shipped runs, from the open parts of the fault laboratory."""
    return tuple(map(_from_line, lzma.decompress(PATH.read_bytes()).splitlines()))


def detected(
    thresholds: Thresholds, signals: Collection[str], runs: Sequence[FailingRun] | None = None
) -> frozenset[str]:
    """Ids of the runs, by default the shipped ones, in which the detector alarms from the onset on.

    It may read the `signals`, fields of `Record`; the others count as not logged.
    """
    runs = failing_runs() if runs is None else runs
    names = [name for name in SIGNALS if name in signals]

    def is_detected(run: FailingRun) -> bool:
        detector = CalibratedDetector(thresholds)
        return any(
            detector.update(
                Record(record.step, **{name: getattr(record, name) for name in names})
            ).alarm
            and record.step >= run.onset_step
            for record in run.records
        )

    return frozenset(run.id for run in runs if is_detected(run))


def failing_runs_to_bytes(runs: Sequence[FailingRun]) -> bytes:
    """The shipped file's content: one run a line, a column a signal, compressed."""
    return lzma.compress(b"".join(map(_to_line, runs)), preset=9 | lzma.PRESET_EXTREME)


def _to_line(run: FailingRun) -> bytes:
    columns: dict[str, Any] = {"step": [record.step for record in run.records]}
    for name in SIGNALS:
        values = [encode(getattr(record, name)) for record in run.records]
        if any(value is not None for value in values):
            columns[name] = values
    return encode_line(
        {"id": run.id, "fault": run.fault, "onset_step": run.onset_step, "columns": columns}
    )


def _from_line(line: bytes) -> FailingRun:
    stored = parse_line(line)
    columns = {name: map(_value, values) for name, values in stored["columns"].items()}
    records = tuple(
        Record(**dict(zip(columns, values, strict=True)))
        for values in zip(*columns.values(), strict=True)
    )
    return FailingRun(stored["id"], stored["fault"], stored["onset_step"], records)


def _value(stored: Any) -> Any:
    if isinstance(stored, list):
        return tuple(decode_number(x) for x in stored)
    return decode_number(stored) if isinstance(stored, str) else stored


class Recall(NamedTuple):
    """Ids of the shipped failing runs that are detected.

    Attributes:
        signals: fields of `Record` that the detector may read, in the order of `SIGNALS`.
        before: with the shipped thresholds.
        after: with others.
    """

    signals: tuple[str, ...]
    before: frozenset[str]
    after: frozenset[str]

    @property
    def lost(self) -> frozenset[str]:
        return self.before - self.after

    @property
    def loses_recall(self) -> bool:
        """True if more than a tenth of the detected runs is lost."""
        return len(self.lost) > MOST_LOST * len(self.before)

    @property
    def lost_by_fault(self) -> dict[str, int]:
        """Number of lost runs by fault."""
        faults = sorted(run.fault for run in failing_runs() if run.id in self.lost)
        return {fault: faults.count(fault) for fault in dict.fromkeys(faults)}

    def to_json(self) -> dict[str, Any]:
        """Its form in the threshold file."""
        return {
            "signals": list(self.signals),
            "runs": len(failing_runs()),
            "detected_before": len(self.before),
            "detected_after": len(self.after),
            "no_longer_detected": sorted(self.lost),
        }


def recall(thresholds: Thresholds, logged: Collection[str]) -> Recall:
    """Failing runs that `thresholds` detect beside the shipped ones.

    The detector reads only what the calibration runs log, fields of `Record`: a run that the
    probe loss shows says nothing about thresholds that will judge a training loss.
    """
    signals = tuple(name for name in SIGNALS if name in logged)
    shipped = default_thresholds()
    before = detected(shipped, signals)
    same = (thresholds.alone, thresholds.together) == (shipped.alone, shipped.together)
    after = before if same else detected(thresholds, signals)
    return Recall(tuple(s for s in signals if s not in CIRCUMSTANCES), before, after)


def logged_by(runs: Sequence[Shown]) -> frozenset[str]:
    """Fields of `Record` that one of the runs logs."""
    return frozenset().union(*(run.signals for run in runs))


def raised_by(runs: Sequence[Shown], budget: float) -> dict[str, dict[str, Any]]:
    """Each threshold that was raised: by which run, to what, and what it is without that run.

    Returns:
        Statistic -> "run", "least", "raised_to" and "without_it". Under "pairs" they are factors.
    """
    _, kept = by_budget(runs, budget)
    found: dict[str, dict[str, Any]] = {}
    limits: list[tuple[str, float]] = [*FLOORS.alone.items(), ("pairs", 1.0)]
    for name, least in limits:
        values = [(run.pair if name == "pairs" else run.most.get(name, 0.0), run) for run in kept]
        values.sort(key=lambda pair: (-pair[0], pair[1].run_id))
        strengths = [
            least if name == "pairs" and most <= 1 else max(least, rounded(MARGIN * most))
            for most, _ in values
        ]
        if strengths[0] > least:
            found[name] = {
                "run": values[0][1].run_id,
                "least": least,
                "raised_to": strengths[0],
                "without_it": strengths[1] if len(strengths) > 1 else least,
            }
    return found
