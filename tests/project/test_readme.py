"""The documents state what the results say and name what exists; `test_claims` has the numbers."""

from __future__ import annotations

import csv
import re
from pathlib import Path

import pytest

from rmetric.detectors import DETECTORS
from rmetric.metric import PAPER_WEIGHTS
from studies.paper.published_study import CONFIG

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")

FINDINGS = (ROOT / "docs/findings.md").read_text(encoding="utf-8")
PUBLISHED_PAGE = (ROOT / "docs/published_study.md").read_text(encoding="utf-8")

#: The paper's metric, and the authors', in table 3 of the published study.
FULL, AUTHORS = "R-Metric (0.10 / 0.45 / 0.70)", "R-Metric (0 / 0.50 / 0.78)"


def rows_of(path: str) -> list[dict[str, str]]:
    with open(ROOT / path, encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def published() -> dict[str, dict[str, str]]:
    return {row["Method"]: row for row in rows_of("results/tables/table3_detectors.csv")}


@pytest.mark.parametrize("page", [FINDINGS, PUBLISHED_PAGE], ids=["findings", "published_study"])
def test_the_rows_of_r_side_by_side_have_the_papers_weights(page):
    configs = [DETECTORS[name].make(None).config for name in ("r_metric", "r_metric_first_loss")]
    assert {config.weights for config in (*configs, CONFIG)} == {PAPER_WEIGHTS}
    text = " ".join(page.split())
    assert "All weights of R are the paper's." in text
    assert "simulator's weights" not in text


def test_what_the_page_of_the_published_study_states_is_in_the_results():
    anatomy = {row["Changed"]: row for row in rows_of("results/tables/table7_anatomy.csv")}
    claims = {row["Claim"]: row for row in rows_of("results/tables/table5_claims.csv")}
    mean, low, high = (
        float(published()[FULL][f"F1 over seeds{which}"]) for which in ("", " low", " high")
    )
    share = re.match(
        r"(\d+) % of 300", claims["F1 of the simulation study, published rule"]["Why"]
    )[1]
    lead = claims["Mean lead time"]
    later, moving = (
        anatomy[name]
        for name in ("Onset one step later (2501)", "(a) ΔL from the true moving average")
    )
    page = " ".join(PUBLISHED_PAGE.split())
    for stated in (
        f"F1 is {mean:.3f}, with 95 % of single studies from {low:.3f} to {high:.3f}",
        f"{share} % of the studies round to it",
        f"and F1 is {float(later['F1, published rule']):.2f}",
        f"average F1 is {float(moving['F1, published rule']):.2f}, and "
        f"{float(moving['F1, causal rule']):.2f} by the causal rule",
        f"It is {lead['Measured here'].split()[0]} steps over seeds, not 255",
        f"Without them it is {re.search(r'without them ([0-9.]+)', lead['Why'])[1]} steps",
        f"code give {float(published()[AUTHORS]['F1 over seeds']):.3f}.",
        "has 72 hits and {FP} false alarms, F1 {F1:.3f}".format(
            **published()[AUTHORS] | {"F1": float(published()[AUTHORS]["F1"])}
        ),
    ):
        assert stated in page, stated


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md", *(
    str(path.relative_to(ROOT)) for path in sorted((ROOT / "docs").glob("*.md"))
)])  # fmt: skip
def test_every_link_leads_somewhere(page):
    text = (ROOT / page).read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)#\s]+)", text):
        if not target.startswith("http"):
            assert ((ROOT / page).parent / target).exists(), f"{page}: {target}"


def test_every_script_and_option_that_the_readme_names_exists():
    for script, options in re.findall(r"python3? (\w+\.py)([^`\n]*)", README):
        source = (ROOT / script).read_text(encoding="utf-8")
        if "rmetric.cli" in source:  # the script is a subcommand, and its options are there
            for module in (ROOT / "rmetric" / "cli").glob("*.py"):
                source += module.read_text(encoding="utf-8")
        for option in re.findall(r"(--[a-z-]+)", options):
            assert option in source, f"{script} {option}"


def test_what_failures_cost_is_as_in_the_results():
    from benchmarks import recovery

    page = (ROOT / "docs/supervisor_measured.md").read_text(encoding="utf-8")
    assert recovery.table(recovery.results()["measured"]["cases"]) in page


def test_the_readme_counts_the_known_faults():
    from rmetric.diagnosis.library import SignatureLibrary

    page = (ROOT / "docs/steps.md").read_text(encoding="utf-8")
    stated = int(re.search(r"recognises over (\d+) faults", page)[1])
    faults = [sig for sig in SignatureLibrary.shipped() if sig.role not in ("harmless", "success")]
    assert stated < len(faults) <= stated + 50
