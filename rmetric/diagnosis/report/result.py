"""The result of a diagnosis, for people and as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from shlex import quote
from typing import Any

from rmetric.diagnosis.report.render import verdict

OUTCOMES = {
    "healthy": "no failure found",
    "failed": "the job failed",
    "terminated": "the job was ended from outside: cancelled, preempted, out of its time",
    "unknown": "the logs do not tell",
}
#: From here on a diagnosis is called sure; below `LIKELY` it is offered as a candidate only.
SURE = 0.8
LIKELY = 0.5
#: How much lower than the first suspect's score a further one's may be to stand beside it.
SCORE_GAP = 0.1
#: At most so many nodes are named (L4, section 4.3).
MAX_NODES = 8


@dataclass(frozen=True, kw_only=True)
class Suspect:
    """A rank or node that stands out: its stream's name ("rank 3"), its score, 0 to 1, and why."""

    name: str
    rank: int | None
    node: str | None
    score: float
    why: str


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """An event that indicates the failure.

    Attributes:
        role: "cause", "symptom", "echo" or "ending" by the library; "odd" by the patterns.
        signature: id in the library, "" without.
        why: the signature's title, or the finding of a pattern.
        who: streams that logged it, the first one first; at most 8.
        point: the part of `text` that the signature matched, "" without.
    """

    role: str
    signature: str
    why: str
    template: str
    text: str
    file: str
    line: int
    time: float | None
    who: tuple[str, ...]
    count: int
    point: str = ""


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """One of several attempts in the logs, from 1, and its first line; None: not stated."""

    number: int
    file: str
    line: int
    first_time: float | None
    last_time: float | None
    last_step: int | None
    outcome: str
    cause: str | None
    title: str
    confidence: float


@dataclass(frozen=True)
class Candidate:
    """A cause that may be it."""

    cause: str
    title: str
    confidence: float
    why: str


@dataclass(frozen=True, kw_only=True)
class Restart:
    """What to do next with the job: ``stop``, ``restart``, or ``restart_without`` some nodes."""

    action: str
    why: str
    confidence: float
    nodes: tuple[str, ...] = ()

    def as_json(self) -> dict[str, Any]:
        """With how Slurm and Kubernetes leave the nodes out, and ``text``, all in one line."""
        what, slurm, taint = "no" if self.action == "stop" else "yes", "", ""
        if names := [quote(node) for node in self.nodes]:
            slurm = f"--exclude={','.join(names)}"
            taint = f"kubectl taint nodes {' '.join(names)} rmetric=suspect:NoSchedule"
            what = f"yes, without {', '.join(self.nodes)} ({slurm}; {taint})"
        return asdict(self) | {"text": f"{what}: {self.why}", "slurm": slurm, "kubernetes": taint}

    @property
    def text(self) -> str:
        """One line."""
        return str(self.as_json()["text"])


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """Why a job failed, or that it did not; times are in seconds.

    Attributes:
        outcome: of `OUTCOMES`.
        cause: a signature's id; None where it is not known.
        family: the cause's class, "out of memory" for example.
        title: the cause in words; where there is none, the known facts.
        actor: who should act: hardware, user, framework or platform.
        confidence: in the cause, 0 to 1; in the outcome where there is no cause.
        score: confidence of the evidence by itself, which limits `confidence`.
        basis: kind of the answer, of the shares in model.json.
        because: what carried this answer over the next, in words.
        stage, iteration: the job's stage at the failure; the last step in the logs.
        since: the first iteration that differed from those before; None where none did.
        time: of the first entry of the cause.
        events: those that indicate the failure, the cause first.
        nodes: suspect ranks or nodes, at most `MAX_NODES`; often none.
        candidates: other causes, the most likely first.
        notes: about the input.
        attempt, attempts: the one that is diagnosed, from 1; all, empty where there is one.
        job: files, lines, world_size, ranks_heard, first and last time.
    """

    outcome: str
    cause: str | None = None
    family: str = ""
    title: str = ""
    actor: str | None = None
    confidence: float = 0.0
    score: float = 0.0
    basis: str = ""
    why: str = ""
    because: tuple[str, ...] = ()
    stage: str = ""
    iteration: int | None = None
    since: int | None = None
    time: float | None = None
    to_do: tuple[str, ...] = ()
    events: tuple[Evidence, ...] = ()
    nodes: tuple[Suspect, ...] = ()
    candidates: tuple[Candidate, ...] = ()
    notes: tuple[str, ...] = ()
    attempt: int = 1
    attempts: tuple[Attempt, ...] = ()
    job: dict[str, Any] = field(default_factory=dict)

    @property
    def summary(self) -> str:
        """At most 15 lines for a person, as `rmetric diagnose` prints them."""
        return verdict(self)

    @property
    def certainty(self) -> str:
        """The confidence in a word: sure, likely or guess."""
        value = self.confidence
        return "sure" if value >= SURE else "likely" if value >= LIKELY else "guess"

    def as_json(self) -> dict[str, Any]:
        """Plain values only, for `json.dumps`; with ``restart``, which is None without advice."""
        advice = self.restart
        return asdict(self) | {"restart": advice and advice.as_json()}

    @property
    def leading(self) -> tuple[Suspect, ...]:
        """The first suspect, and those whose score is near its own."""
        return tuple(s for s in self.nodes if s.score > self.nodes[0].score - SCORE_GAP)

    @property
    def restart(self) -> Restart | None:
        """Advice on the next start, as sure as the cause; None where no cause is known."""
        if self.cause is None:
            return None
        from rmetric.diagnosis.library.load import families  # needs the packages of diagnose

        nodes = tuple[str, ...]()
        if why := families().get(self.family or "", {}).get("stop"):
            action = "stop"
        elif self.outcome == "terminated":
            action, why = "restart", "the platform ended the job, not an error"
        elif self.actor == "hardware":
            nodes = tuple(dict.fromkeys(s.node for s in self.leading if s.node))
            action, why = "restart", "the hardware failed, and the logs name no node"
            if nodes:
                action, why = "restart_without", "the hardware of the node may fail again"
        elif _failed_alike(self.attempts[-2:]):
            action, why = "stop", "the last two attempts failed alike, at the same step"
        elif self.actor == "user":
            action, why = "stop", "an error of the job or of its settings comes again"
        else:
            action, why = "restart", "the error need not come again"
        return Restart(action=action, why=why, confidence=self.confidence, nodes=nodes)


def _failed_alike(last: Sequence[Attempt]) -> bool:
    """True of two with one cause at one step; another rank may have made a step more."""
    if len(last) < 2 or last[0].cause is None or last[0].cause != last[1].cause:
        return False
    step, other = (attempt.last_step for attempt in last)
    return step == other or (step is not None and other is not None and abs(step - other) == 1)
