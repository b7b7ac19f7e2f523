"""The two diagrams: the system (figure 1), and mechanism and outcome of each fault (figure 2)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from rmetric.evaluation import Study
from rmetric.metric_settings import settings_of
from rmetric.records import Run, Truth
from rmetric.reporting.style import (
    BLACK,
    BLUE,
    GREEN,
    GREY,
    MEANING,
    ORANGE,
    PURPLE,
    SKY,
    VERMILION,
)
from rmetric.simulation.outcome import DEGRADED_NATS, DIVERGED_RATIO
from studies.paper.figures.diagram import Diagram, Edge, Node


class Outcome(NamedTuple):
    """An end, as figures show it; `meaning`: when a run ends so, in a few short lines."""

    title: str
    meaning: str = ""
    colour: str = PURPLE
    marker: str = "D"


OUTCOMES = {
    "healthy": Outcome("healthy", "nothing was injected", GREEN),
    "absorbed": Outcome("absorbed", "the training recovers", GREEN),
    "not_applicable": Outcome("not applicable", "nothing to act on\nin this architecture", GREY),
    "degraded": Outcome(
        "degraded", f"over {DEGRADED_NATS:.2f} nat above its\ntwin without the fault", BLUE, "o"
    ),
    "diverged": Outcome(
        "diverged", f"{100 * (DIVERGED_RATIO - 1):.0f} % above the best\nloss, to the end",
        VERMILION, "^",
    ),
    "non_finite": Outcome("non-finite", "a loss or gradient\nthat is no number", BLACK, "s"),
    "scripted_crash": Outcome(
        "scripted crash", "drawn: (k / 15)² at\nstep k of the fault", BLACK, "s"
    ),
    "lost_worker": Outcome("lost worker", "the synchronous\njob stops", ORANGE, "D"),
}  # fmt: skip


def name_of(truth: Truth) -> str:
    """The failure's kind, or the outcome of a run that did not fail."""
    return truth.failure_kind or "failed" if truth.failed else truth.outcome


def look_of(name: str) -> Outcome:
    """The look of an end in the figures; an end that is not listed gets the default look."""
    return OUTCOMES.get(name) or Outcome(name.replace("_", " "))


def in_order(names: set[str]) -> list[str]:
    """These ends as the figures list them, the unknown ones last."""
    known = list(OUTCOMES)
    return sorted(names, key=lambda name: (known.index(name) if name in known else 99, name))


# -- the two diagrams

_MODEL = "experts, router,\nattention, norm"
_DATA = "data and\nevaluation"
_RATE = "learning rate"
HARDWARE = "hardware,\nnetwork"
#: What each fault or benign change turns.
MECHANISM = {
    "EXPERT_FAILURE": _MODEL,
    "ROUTER_IMBALANCE": _MODEL,
    "GQA_MISMATCH": _MODEL,
    "RMS_NORM_ERROR": _MODEL,
    "GRADIENT_EXPLOSION": "gradient of\none worker",
    "LR_SPIKE": _RATE,
    "RATE_REWARMUP": _RATE,
    "DATA_CORRUPTION": _DATA,
    "DOMAIN_SHIFT": _DATA,
    "BAD_BATCH": _DATA,
    "NOISY_EVALUATION": _DATA,
    "BATCH_SIZE_CHANGE": _DATA,
    "NODE_FAILURE": HARDWARE,
    "NETWORK_DEGRADATION": HARDWARE,
}
OTHER = "another\nmechanism"
NOT_STATED = "not stated"
SCRIPTED, SCRIPT = "scripted_crash", "script: loss rises,\nnorms × 1 to 20,\ncrash drawn"
ALL, NO_FAULT, FAULT, BENIGN, TRAINING = "all", "no fault", "fault", "benign change", "dynamics"


def way_of(truth: Truth) -> tuple[str, ...]:
    """The boxes on the path of a run, from the first to its outcome."""
    end = name_of(truth)
    if truth.fault == "NONE":
        return ALL, NO_FAULT, TRAINING, end
    kind = BENIGN if truth.benign else FAULT
    if not truth.applicable:
        return ALL, kind, end
    if truth.failure_kind == SCRIPTED:
        return ALL, kind, SCRIPT, end
    if truth.failure_kind == NOT_STATED:
        return ALL, kind, end
    mechanism = MECHANISM.get(truth.fault, OTHER)
    if mechanism == HARDWARE:
        return ALL, kind, mechanism, end
    return ALL, kind, mechanism, TRAINING, end


def failure_process(runs: Sequence[Run]) -> Diagram:
    """The paths of the runs; each arrow has their number, and a width that grows with it."""
    ways = [way_of(run.truth) for run in runs if run.truth is not None]
    flows = Counter(arrow for way in ways for arrow in pairwise(way))
    totals = Counter(box for way in ways for box in way)
    nodes = {ALL: Node(f"{totals[ALL]} runs", BLACK)}
    for name, colour in ((NO_FAULT, GREY), (BENIGN, SKY), (FAULT, PURPLE)):
        nodes[name] = Node(name, colour)
    for name in (*dict.fromkeys(MECHANISM.values()), OTHER, SCRIPT):
        nodes[name] = Node(name, ORANGE)
    nodes[TRAINING] = Node("training\ndynamics:\nloss, gradients,\nweights", BLACK)
    for name in in_order({way[-1] for way in ways}):
        nodes[name] = _end(name, totals[name])
    if all(run.config.get("recipe") == "published" for run in runs):
        nodes[TRAINING] = Node(text="fixed curve\nwith noise", colour=BLACK)
        nodes["not_applicable"] = Node(
            text=f"no effect: {totals['not_applicable']}\nthe simulator knows\nthe name alone",
            colour=GREY,
        )
    return Diagram(
        nodes={name: node for name, node in nodes.items() if totals[name]},
        edges=[
            Edge(tail=tail, head=head, label=str(number), width=0.6 + 1.8 * number / len(ways))
            for tail in nodes
            for head in nodes
            if (number := flows[tail, head])
        ],
    )


def _end(name: str, total: int) -> Node:
    look = look_of(name)
    meaning = f"\n{look.meaning}" if look.meaning else ""
    return Node(text=f"{look.title}: {total}{meaning}", colour=look.colour)


def system_diagram(study: Study) -> Diagram:
    """Sources and uses of records, with the size of the study."""
    config = settings_of(study.reference[0]).config
    scripted = study.reference[0].config.get("recipe") == "published"
    simulator = "faults and\ncrashes scripted" if scripted else "faults turn\nmechanisms"
    past = "first value" if config.variant == "authors_simulator" else "recent mean"
    of_rate, of_variance, of_drift = config.weights
    weights = f"R =\n{of_rate:.2f} n(λ) +\n{of_variance:.2f} n(σ²) +\n{of_drift:.2f} n(ΔL)"
    variance, drift = MEANING["gradient_variance"], MEANING["loss_drift"]
    nodes = {
        "simulator": Node(f"Simulator:\n{simulator}", SKY),
        "other_logs": Node("Other logs:\nHugging Face,\nCSV, JSONL", SKY),
        "live": Node("Live training:\nthe monitor", SKY),
        "records": Node(f"Records\n({len(study.reference)} runs\nhere)", BLACK),
        "failure_rate": Node("λ: hardware\nevents per hour", MEANING["failure_rate"]),
        "gradient_variance": Node("σ²: variance of\nworkers' gradient\nnorms", variance),
        "loss_drift": Node(f"ΔL: validation\nloss above its\n{past}", drift),
        "baselines": Node("Baselines\nand anchors", GREY),
        "min_max": Node(f"n: min-max\nof the last\n{config.component_window} values", BLACK),
        "score": Node(weights, BLACK),
        "alert": Node(f"Alert:\nR > {config.threshold:g}", VERMILION),
        "evaluation": Node("Evaluation:\npublished and\ncausal protocol", GREEN),
        "replay": Node("Replay\nreport", BLUE),
        "results": Node("Tables,\nfigures", BLUE),
    }
    signals = ("failure_rate", "gradient_variance", "loss_drift")
    arrows = (
        *((source, "records") for source in ("simulator", "other_logs", "live")),
        *(("records", signal) for signal in signals),
        *((signal, "min_max") for signal in signals),
        ("min_max", "score"),
        ("score", "alert"),
        ("alert", "replay"),
        ("alert", "evaluation"),
        ("records", "baselines"),
        ("baselines", "evaluation"),
        ("evaluation", "results"),
    )
    return Diagram(nodes=nodes, edges=[Edge(tail=tail, head=head) for tail, head in arrows])
