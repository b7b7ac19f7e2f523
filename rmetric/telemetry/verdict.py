"""Verdict on one GPU: level, recommended action and reasons."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from rmetric._util.strict_json import (
    decode_number,
    encode,
    items,
    mapping,
    number,
    text,
    whole_number,
)
from rmetric._util.strict_json import field as field_of

#: Recommended actions, the mildest first.
ACTIONS = ("none", "watch", "restart_application", "reset", "drain", "reboot")
#: `risk`: the score reached its threshold; save a checkpoint. `fatal`: a rule holds; the GPU
#: must not be used in its present state.
LEVELS = ("healthy", "risk", "fatal")


@dataclass(frozen=True, kw_only=True)
class GpuVerdict:
    """Verdict on one GPU at one time.

    Attributes:
        gpu: index on its node, as in nvidia-smi.
        node: name of the node; empty with a single node.
        time: seconds since the epoch.
        level: one of `LEVELS`.
        action: one of `ACTIONS`.
        risk: weighted score, 0 to 1; None if no factor is known.
        reachable: greatest score that the known factors allow, 0 to 1.
        factors: normalised factors of the score by name, 0 to 1; None if unknown.
        rules: kinds of the active signs, most severe first (see `rules.RULES`).
        reasons: human-readable reasons, most severe first; empty if there are none.
    """

    gpu: int
    node: str = ""
    time: float
    level: str = "healthy"
    action: str = "none"
    risk: float | None = None
    reachable: float | None = None
    factors: dict[str, float | None] = field(default_factory=dict)
    rules: tuple[str, ...] = ()
    reasons: tuple[str, ...] = ()

    @property
    def key(self) -> str:
        """Unique name of the GPU: `node:gpu`, or `gpu` with a single node."""
        return f"{self.node}:{self.gpu}" if self.node else str(self.gpu)

    @property
    def gist(self) -> tuple[str, str, tuple[str, ...]]:
        """Level, action and rules: two verdicts with the same gist count as unchanged."""
        return self.level, self.action, self.rules

    def as_json(self) -> dict[str, Any]:
        """JSON object; unknown values are absent, unknown factors null."""
        entry = {name: encode(value) for name, value in asdict(self).items()}
        return {name: value for name, value in entry.items() if value is not None}

    @classmethod
    def from_json(cls, entry: dict[str, Any]) -> GpuVerdict:
        """Inverse of `as_json`. Raises ValueError, naming the key, for other input."""
        level, action = field_of(entry, "level", text), field_of(entry, "action", text)
        gpu, time = field_of(entry, "gpu", whole_number), field_of(entry, "time", number)
        if gpu is None or time is None or level not in LEVELS or action not in ACTIONS:
            raise ValueError(
                f"a verdict has a gpu, a time, a level of {', '.join(LEVELS)} and an action of "
                f"{', '.join(ACTIONS)}; found {gpu!r}, {time!r}, {level!r} and {action!r}"
            )
        factors = field_of(entry, "factors", mapping) or {}
        return cls(
            gpu=gpu,
            node=field_of(entry, "node", text) or "",
            time=time,
            level=level,
            action=action,
            risk=field_of(entry, "risk", number),
            reachable=field_of(entry, "reachable", number),
            factors={name: decode_number(value) for name, value in factors.items()},
            rules=tuple(map(text, field_of(entry, "rules", items) or ())),
            reasons=tuple(map(text, field_of(entry, "reasons", items) or ())),
        )
