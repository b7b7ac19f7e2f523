"""Advice on the next start of a job: stop, restart, or restart without some nodes.

It follows from the diagnosis alone, so its confidence is that of the cause.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from shlex import quote
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rmetric.diagnosis.result import Diagnosis


@dataclass(frozen=True, kw_only=True)
class Restart:
    """What to do next with the job.

    Attributes:
        action: ``stop``, ``restart`` or ``restart_without``.
        nodes: to leave out; empty but for ``restart_without``.
        why: the reason, in a few words.
        confidence: 0 to 1.
    """

    action: str
    why: str
    confidence: float
    nodes: tuple[str, ...] = ()

    def as_json(self) -> dict[str, Any]:
        """All of it, with how Slurm and Kubernetes leave the nodes out, and that in one line."""
        names = [quote(node) for node in self.nodes]
        slurm = f"--exclude={','.join(names)}" if names else ""
        taint = f"kubectl taint nodes {' '.join(names)} rmetric=suspect:NoSchedule" if names else ""
        what = {"stop": "no", "restart": "yes"}.get(self.action)
        what = what or f"yes, without {', '.join(self.nodes)} ({slurm}; {taint})"
        text = f"{what}: {self.why}"
        return asdict(self) | {"text": text, "slurm": slurm, "kubernetes": taint}

    @property
    def text(self) -> str:
        """One line."""
        return str(self.as_json()["text"])


def restart_advice(diagnosis: Diagnosis) -> Restart | None:
    """The advice; None for a healthy job and where no cause is known."""
    if diagnosis.cause is None:
        return None

    def advice(action: str, why: str, nodes: tuple[str, ...] = ()) -> Restart:
        return Restart(action=action, why=why, confidence=diagnosis.confidence, nodes=nodes)

    if diagnosis.family == "cancelled":
        return advice("stop", "a person ended the job")
    if diagnosis.outcome == "terminated":
        return advice("restart", "the platform ended the job, not an error")
    if diagnosis.actor == "hardware":
        if nodes := tuple(dict.fromkeys(s.node for s in diagnosis.leading if s.node)):
            return advice("restart_without", "the hardware of the node may fail again", nodes)
        return advice("restart", "the hardware failed, and the logs name no node")
    if _came_again(diagnosis):
        return advice("stop", "the last two attempts failed alike, at the same step")
    if diagnosis.actor == "user" and not diagnosis.iteration:
        return advice("stop", "an error of the job before its first step comes again")
    return advice("restart", "the error need not come again")


def _came_again(diagnosis: Diagnosis) -> bool:
    """The last attempt and the one before it ended with one cause at one step."""
    last = diagnosis.attempts[-2:]
    return (
        len(last) == 2
        and last[0].cause is not None
        and len({(attempt.cause, attempt.last_step) for attempt in last}) == 1
    )
