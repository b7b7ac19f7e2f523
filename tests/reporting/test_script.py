"""Where the analysis scripts put their results, and what they warn of."""

from __future__ import annotations

from pathlib import Path

import pytest

from rmetric.evaluation import Study
from rmetric.records import Run
from studies.paper.script import folder_for, report_inputs
from studies.paper.tables import FEW_RUNS


def study(*recipes: str | None) -> Study:
    configs = [{} if recipe is None else {"recipe": recipe} for recipe in recipes]
    runs = [Run(id=str(i), records=[], config=config) for i, config in enumerate(configs)]
    return Study(folder=Path(), runs={"FULL_METRIC": runs})


@pytest.mark.parametrize(
    ("recipes", "folder"),
    [
        (["published"] * FEW_RUNS, "results/tables"),
        (["somebody's"] * FEW_RUNS, "results/tables"),
        (["emergent"] * FEW_RUNS, "results/emergent/tables"),
        (["stress"] * FEW_RUNS, "results/stress/tables"),
        (["emergent"] * FEW_RUNS + ["stress"], "results/tables"),
        ([None] * FEW_RUNS, "results/tables"),
        (["published"] * 15, "results/sample/tables"),
        (["stress"] * 15, "results/sample/tables"),
    ],
)
def test_no_study_and_no_look_at_a_sample_replaces_the_results_of_another(recipes, folder):
    assert folder_for(study(*recipes), "tables") == Path(folder)


def test_runs_of_two_studies_in_one_folder_are_named(capsys):
    report_inputs(study("emergent", "emergent"))
    assert capsys.readouterr().err == ""
    report_inputs(study("emergent", "stress"))
    assert "several studies are pooled: recipes emergent, stress" in capsys.readouterr().err
