"""Figure 1: from a training run to an alarm, and from many runs to the tables."""

from __future__ import annotations

from rmetric.evaluation import Study
from rmetric.metric_settings import settings_of
from rmetric.reporting.style import BLACK, BLUE, GREEN, GREY, MEANING, SKY, VERMILION
from studies.paper.figures.diagram import Diagram, Edge, Node


def system_diagram(study: Study) -> Diagram:
    """Sources and uses of records, with the size of the study."""
    config = settings_of(study.reference[0]).config
    scripted = study.reference[0].config.get("recipe") == "published"
    simulator = "faults and\ncrashes scripted" if scripted else "faults turn\nmechanisms"
    past = "first value" if config.variant == "authors_simulator" else "recent mean"
    of_rate, of_variance, of_drift = config.weights
    nodes = {
        "simulator": Node(text=f"Simulator:\n{simulator}", colour=SKY),
        "other_logs": Node(text="Other logs:\nHugging Face,\nCSV, JSONL", colour=SKY),
        "live": Node(text="Live training:\nthe monitor", colour=SKY),
        "records": Node(text=f"Records\n({len(study.reference)} runs\nhere)", colour=BLACK),
        "failure_rate": Node(
            text="λ: hardware\nevents per hour",
            colour=MEANING["failure_rate"],
        ),
        "gradient_variance": Node(
            text="σ²: variance of\nworkers' gradient\nnorms", colour=MEANING["gradient_variance"]
        ),
        "loss_drift": Node(
            text=f"ΔL: validation\nloss above its\n{past}", colour=MEANING["loss_drift"]
        ),
        "baselines": Node(text="Baselines\nand anchors", colour=GREY),
        "min_max": Node(
            text=f"n: min-max\nof the last\n{config.component_window} values", colour=BLACK
        ),
        "score": Node(
            text=f"R =\n{of_rate:.2f} n(λ) +\n{of_variance:.2f} n(σ²) +\n{of_drift:.2f} n(ΔL)",
            colour=BLACK,
        ),
        "alert": Node(text=f"Alert:\nR > {config.threshold:g}", colour=VERMILION),
        "evaluation": Node(text="Evaluation:\npublished and\ncausal protocol", colour=GREEN),
        "replay": Node(text="Replay\nreport", colour=BLUE),
        "results": Node(text="Tables,\nfigures", colour=BLUE),
    }
    signals = ("failure_rate", "gradient_variance", "loss_drift")
    edges = [
        Edge(tail="simulator", head="records"),
        Edge(tail="other_logs", head="records"),
        Edge(tail="live", head="records"),
        *(Edge(tail="records", head=signal) for signal in signals),
        *(Edge(tail=signal, head="min_max") for signal in signals),
        Edge(tail="min_max", head="score"),
        Edge(tail="score", head="alert"),
        Edge(tail="alert", head="replay"),
        Edge(tail="alert", head="evaluation"),
        Edge(tail="records", head="baselines"),
        Edge(tail="baselines", head="evaluation"),
        Edge(tail="evaluation", head="results"),
    ]
    return Diagram(nodes=nodes, edges=edges)
