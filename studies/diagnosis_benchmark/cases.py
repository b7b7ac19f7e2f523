"""One benchmark job: its logs as the diagnosis reads them, and the ground truth."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

ROLES = ("cause", "symptom", "echo", "context")
#: What a job may have come to; a diagnosis may also say "unknown".
OUTCOMES = ("healthy", "failed", "terminated")


@dataclass(frozen=True, kw_only=True)
class Label:
    """A line that tells of the failure.

    Attributes:
        file: as in `Case.files`.
        line: from 1, of the file as the diagnosis sees it.
        role: of `ROLES`.
    """

    file: str
    line: int
    role: str

    def __post_init__(self) -> None:
        if self.role not in ROLES:
            raise ValueError(f"a label's role is {self.role!r}; {', '.join(ROLES)} are accepted")


@dataclass(frozen=True, kw_only=True)
class Case:
    """One job.

    Attributes:
        group: jobs of one group are not independent and are drawn together.
        kind: of the injected fault; "" for a healthy job and where nobody injected one.
        folder: holds the logs, in any depth.
        outcome: of `OUTCOMES`.
        published_outcome: as the publisher of the log counts it; "" where nobody did.
        stage, cause_class: as published; "" where not known.
        rank, node: the faulty one; None where not known.
        world_size: ranks of the job, None where not known.
        node_of_rank: rank -> node, as the launcher set it.
        healthy: folders of successful jobs of the same settings.
    """

    name: str
    group: str
    folder: Path
    outcome: str
    kind: str = ""
    published_outcome: str = ""
    stage: str = ""
    cause_class: str = ""
    rank: int | None = None
    node: str | None = None
    world_size: int | None = None
    node_of_rank: dict[int, str] = field(default_factory=dict)
    labels: tuple[Label, ...] = ()
    healthy: tuple[Path, ...] = ()

    def __post_init__(self) -> None:
        if self.outcome not in OUTCOMES:
            raise ValueError(f"outcome is {self.outcome!r}; {', '.join(OUTCOMES)} are accepted")

    @property
    def is_healthy(self) -> bool:
        """Nothing was wrong; a job with a slow rank may come to a good end and is not."""
        return self.outcome == "healthy" and not self.kind
