"""The threshold file: how strong each piece of evidence must be, and where that comes from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from math import inf
from pathlib import Path
from typing import Any

from rmetric._util.durable import refuse_special
from rmetric._util.strict_json import parse_line, shown
from rmetric.detectors.calibrated.gradients import Gradients
from rmetric.detectors.calibrated.hardware import HardwareEvents
from rmetric.detectors.calibrated.held_out_loss import ProbeLoss, ValidationLoss
from rmetric.detectors.calibrated.not_finite import NotFinite
from rmetric.detectors.calibrated.rate_change import RateBeyondPeak
from rmetric.detectors.calibrated.source import EvidenceSource
from rmetric.detectors.calibrated.training_loss import TrainingLoss
from rmetric.detectors.calibrated.updates import Updates

PARTS = ("alone", "together", "full_scale")
HIGHEST = 1e300
DEFAULT = Path(__file__).with_name("thresholds.json")


@dataclass(frozen=True, kw_only=True)
class Thresholds:
    """Strength of evidence that alarms, by the statistic's name, in its own unit.

    Attributes:
        alone: by itself; inf where it never does.
        together: beside evidence from another source that reaches its own; inf likewise.
        full_scale: what counts as 1 in the calibrated R-Metric.
        provenance: which runs it was calibrated on, with which budget, and what came out.
        path: of the file; None where there is none.
    """

    alone: Mapping[str, float]
    together: Mapping[str, float]
    full_scale: Mapping[str, float]
    provenance: Mapping[str, Any] = field(default_factory=dict)
    path: Path | None = field(default=None, compare=False)


def read_thresholds(path: Path) -> Thresholds:
    """The thresholds in `path`. Raises ValueError that names the file and what is wrong."""
    refuse_special(path)
    try:
        content = parse_line(path.read_bytes())
    except OSError as error:
        raise ValueError(f"{path}: cannot be read ({error.strerror})") from None
    except ValueError as error:
        raise ValueError(f"{path}: not a threshold file ({error})") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path}: not a threshold file (an object is expected)")
    parts = {}
    for part in PARTS:
        found = content.get(part)
        if not isinstance(found, dict):
            raise ValueError(f"{path}: {part!r} is missing or no object")
        _check_names(path, part, found)
        parts[part] = {name: _threshold(path, name, value) for name, value in found.items()}
    provenance = content.get("provenance") or {}
    if not isinstance(provenance, dict):
        raise ValueError(f"{path}: 'provenance' is {shown(provenance)}: an object is expected")
    return Thresholds(**parts, provenance=provenance, path=path)


@lru_cache(maxsize=1)
def default_thresholds() -> Thresholds:
    """The thresholds that come with rmetric."""
    return read_thresholds(DEFAULT)


def thresholds_to_json(thresholds: Thresholds) -> dict[str, Any]:
    """Their form in the file, where null means never."""

    def plain(part: Mapping[str, float]) -> dict[str, float | None]:
        return {name: None if value == inf else value for name, value in part.items()}

    parts: dict[str, Any] = {part: plain(getattr(thresholds, part)) for part in PARTS}
    return parts | {"provenance": dict(thresholds.provenance)}


def _check_names(path: Path, part: str, found: Mapping[str, Any]) -> None:
    """A name that is written wrongly would switch its evidence off without a word."""
    known = [name for source in sources() for name in source.NAMES]
    unknown = [name for name in found if name not in known]
    if unknown:
        raise ValueError(
            f"{path}: {part!r} has {shown(unknown[0])}, which is not a statistic; accepted are "
            f"{', '.join(known)}"
        )


def _threshold(path: Path, name: str, value: Any) -> float:
    if value is None:
        return inf
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value <= HIGHEST:
        raise ValueError(
            f"{path}: threshold of {name!r} is {shown(value)}: a number above 0, at most "
            f"{HIGHEST:g}, or null"
        )
    return float(value)


def sources() -> tuple[EvidenceSource, ...]:
    """A fresh one of each source of evidence; to add one: a file, and a line here."""
    return (
        NotFinite(),
        TrainingLoss(),
        ProbeLoss(),
        ValidationLoss(),
        Updates(),
        Gradients(),
        HardwareEvents(),
        RateBeyondPeak(),
    )
