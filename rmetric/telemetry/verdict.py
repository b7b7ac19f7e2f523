"""What is thought of one GPU, and why."""

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

#: What a GPU asks for, the mildest first.
ACTIONS = ("none", "watch", "restart_application", "reset", "drain", "reboot")
#: `risk`: the score is at its threshold or above, a checkpoint is wanted. `fatal`: a rule
#: says that the GPU is not to be used as it is.
LEVELS = ("healthy", "risk", "fatal")


@dataclass(frozen=True, kw_only=True)
class GpuVerdict:
    """What is thought of one GPU at one time.

    Attributes:
        gpu: index on its node, as nvidia-smi counts.
        node: name of the node; empty where there is one.
        time: seconds since the epoch.
        level: one of `LEVELS`.
        action: one of `ACTIONS`.
        risk: the weighted score, 0 to 1; None while nothing of it can be known.
        reachable: the most that the known factors could give, 0 to 1.
        factors: normalised factor of the score by name, 0 to 1; None for one unknown.
        rules: kinds of the signs that hold, the gravest first (see `rules.RULES`).
        reasons: in words and numbers, the gravest first; empty where nothing is to be told.
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
        return f"{self.node}:{self.gpu}" if self.node else str(self.gpu)

    @property
    def gist(self) -> tuple[str, str, tuple[str, ...]]:
        """What makes two verdicts on a GPU the same: the score's digits do not."""
        return self.level, self.action, self.rules

    def as_json(self) -> dict[str, Any]:
        """What JSON holds; what is not known is absent, an unknown factor null."""
        entry = {name: encode(value) for name, value in asdict(self).items()}
        return {name: value for name, value in entry.items() if value is not None}

    @classmethod
    def from_json(cls, entry: dict[str, Any]) -> GpuVerdict:
        """The verdict that `as_json` gave. Raises ValueError, naming the key, for another."""
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
