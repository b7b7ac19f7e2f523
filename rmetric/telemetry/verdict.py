"""What is thought of one GPU, and why."""

from __future__ import annotations

from dataclasses import dataclass, field

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
        factors: normalised factor of the score by name, 0 to 1; None for one unknown.
        reasons: in words and numbers, the gravest first; empty for a healthy one.
    """

    gpu: int
    node: str = ""
    time: float
    level: str = "healthy"
    action: str = "none"
    risk: float | None = None
    factors: dict[str, float | None] = field(default_factory=dict)
    reasons: tuple[str, ...] = ()

    @property
    def key(self) -> str:
        return f"{self.node}:{self.gpu}" if self.node else str(self.gpu)
