"""Where the analysis scripts put their results, and what they warn of."""

from __future__ import annotations

from pathlib import Path

import pytest

from rmetric.evaluation import Study
from rmetric.records import Run
from studies.paper.script import folder_for, say_what_was_read
from studies.paper.tables import FEW_RUNS


def study(*recipes: str) -> Study:
    runs = [Run(id=str(i), records=[], config={"recipe": r}) for i, r in enumerate(recipes)]
    return Study(folder=Path(), runs={"FULL_METRIC": runs})


def test_a_look_at_the_sample_does_not_replace_the_results_of_the_study():
    for recipe in ("published", "emergent", "stress"):
        assert folder_for(study(*[recipe] * 15), "tables") == Path("results/sample/tables")


@pytest.mark.parametrize(
    ("recipe", "folder"),
    [
        ("published", "results/tables"),
        ("somebody's", "results/tables"),
        ("emergent", "results/emergent/tables"),
        ("stress", "results/stress/tables"),
    ],
)
def test_no_study_replaces_the_results_of_another(recipe, folder):
    assert folder_for(study(*[recipe] * FEW_RUNS), "tables") == Path(folder)


def test_runs_of_several_recipes_or_of_none_are_of_no_own_study():
    pooled = ["emergent"] * FEW_RUNS + ["stress"]
    assert folder_for(study(*pooled), "figures") == Path("results/figures")
    runs = [Run(id=str(i), records=[]) for i in range(FEW_RUNS)]
    unnamed = Study(folder=Path(), runs={"FULL_METRIC": runs})
    assert folder_for(unnamed, "figures") == Path("results/figures")


def test_runs_of_two_studies_in_one_folder_are_named(capsys):
    say_what_was_read(study("emergent", "emergent"))
    assert capsys.readouterr().err == ""
    say_what_was_read(study("emergent", "stress"))
    assert "several studies are pooled: recipes emergent, stress" in capsys.readouterr().err
