"""What the README states is what the committed results say, and what it names exists."""

from __future__ import annotations

import csv
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")

#: Row of the README's table -> the detector's name in table 3.
ROWS = {
    "R-Metric, as its paper defines it": "R-Metric",
    "R-Metric, ΔL from the first loss": "R-Metric, ΔL from first loss",
    "gradient norm above three times its median": "Gradient norm",
    "Isolation Forest, which sees the future": "Isolation Forest (peeks)",
    "always alarm": "Always alarm",
}


def table_3(protocol: str) -> dict[str, dict[str, str]]:
    with open(ROOT / "results/tables/table3_detectors.csv", encoding="utf-8", newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["Protocol"] == protocol]
    return {row["Detector"]: row for row in rows}


@pytest.mark.parametrize("start", ROWS)
def test_the_numbers_in_the_readme_are_those_of_table_3(start):
    [line] = [line for line in README.splitlines() if line.startswith(f"| {start}")]
    published, causal, alarms = (cell.strip() for cell in line.strip("|").split("|")[1:])
    row = table_3("published")[ROWS[start]]
    assert float(published) == round(float(row["F1"]), 2)
    assert float(causal) == round(float(table_3("causal")[ROWS[start]]["F1"]), 2)
    assert int(alarms) == int(row["FP"])


def test_the_counts_in_the_readme_are_those_of_table_3():
    row = table_3("published")["R-Metric"]
    total, failed = int(row["n"]), int(row["Failed"])
    assert f"| {total} runs, {failed} of them failing |" in README
    assert f"alarms in the {total - failed} runs that do not fail" in README


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
        for option in re.findall(r"(--[a-z-]+)", options):
            assert option in source, f"{script} {option}"
