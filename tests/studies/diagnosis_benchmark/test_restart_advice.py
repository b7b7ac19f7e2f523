"""The advice beside labels: what counts as agreement, and labels that belong to jobs."""

import csv

from studies.diagnosis_benchmark.restart_advice import LABELS, row
from studies.diagnosis_benchmark.written_sets import written_sets


def label(action, also="", nodes=""):
    return {"action": action, "also": also, "nodes": nodes}


def test_agreement_with_both_choices_and_what_goes_wrong():
    labels = [
        label("stop"), label("stop", "restart"), label("restart"), label("restart"),
        label("restart_without", nodes="a b"), label("restart_without", nodes="a"),
    ]  # fmt: skip
    given = [
        ("restart", set()), ("restart", set()), ("stop", set()), ("", set()),
        ("restart_without", {"a", "b"}), ("restart_without", {"c"}),
    ]  # fmt: skip
    assert row(labels, given) == (6, 2, 3, 1, 1, 1)


def test_the_labels_are_of_written_jobs():
    with open(LABELS, encoding="utf-8", newline="") as file:
        labels = list(csv.DictReader(file))
    assert len({one["job"] for one in labels}) == len(labels) == 250
    assert {one["job"].partition("/")[0] for one in labels} <= set(written_sets())
    assert {one["action"] for one in labels} == {"stop", "restart", "restart_without"}
