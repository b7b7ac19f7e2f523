"""Where the analysis scripts put their results, and what they warn of."""

from __future__ import annotations

from pathlib import Path

from rmetric.evaluation import Study
from rmetric.records import Run
from rmetric.reporting.script import folder_for, say_what_was_read
from rmetric.reporting.tables import FEW_RUNS


def study(*recipes: str) -> Study:
    runs = [Run(id=str(i), records=[], config={"recipe": r}) for i, r in enumerate(recipes)]
    return Study(folder=Path(), runs={"FULL_METRIC": runs})


def test_a_look_at_the_sample_does_not_replace_the_results_of_the_study():
    assert folder_for(study(*["paper"] * 15), "tables") == Path("results/sample/tables")
    assert folder_for(study(*["paper"] * FEW_RUNS), "tables") == Path("results/tables")


def test_runs_of_two_studies_in_one_folder_are_named(capsys):
    say_what_was_read(study("paper", "paper"))
    assert capsys.readouterr().err == ""
    say_what_was_read(study("paper", "stress"))
    assert "several studies are pooled: recipes paper, stress" in capsys.readouterr().err
