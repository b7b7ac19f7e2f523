"""The README and the findings state what the committed results say and name what exists."""

from __future__ import annotations

import csv
import json
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
#: Row of the tables -> the detector's name in table 3 of the published study and of the others.
ROWS = {
    "R-Metric, ΔL from the first loss": (FULL, "R-Metric, ΔL from first loss"),
    "R-Metric as its paper defines it": (
        "ΔL from the moving average, as the paper words it",
        "R-Metric",
    ),
    "loss z-score": ("Loss z-score", "Loss z-score"),
    "Isolation Forest, which sees the future": ("Isolation Forest (peeks)",) * 2,
    "always alarm": ("Always alarm",) * 2,
}
STUDIES = ("results/emergent/tables", "results/stress/tables")


def rows_of(path: str) -> list[dict[str, str]]:
    with open(ROOT / path, encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def table_3(folder: str) -> dict[tuple[str, str], dict[str, str]]:
    return {
        (row["Protocol"], row["Detector"]): row for row in rows_of(f"{folder}/table3_detectors.csv")
    }


def published() -> dict[str, dict[str, str]]:
    return {row["Method"]: row for row in rows_of("results/tables/table3_detectors.csv")}


@pytest.mark.parametrize("page", [FINDINGS, PUBLISHED_PAGE], ids=["findings", "published_study"])
@pytest.mark.parametrize("start", ROWS)
def test_the_studies_side_by_side_are_those_of_their_tables_3(start, page):
    [line] = [line for line in page.splitlines() if line.startswith(f"| {start} |")]
    cells = [cell.strip() for cell in line.strip("|").split("|")[1:]]
    as_published, emergent = ROWS[start]
    row = published()[as_published]
    expected = [f"{float(row['F1']):.2f}", f"{float(row['Causal F1']):.2f}", row["FP"]]
    for folder in STUDIES:
        table = table_3(folder)
        expected += [
            f"{float(table[rule, emergent]['F1']):.2f}" for rule in ("published", "causal")
        ]
        expected.append(table["published", emergent]["FP"])
    assert cells == expected


@pytest.mark.parametrize("page", [FINDINGS, PUBLISHED_PAGE], ids=["findings", "published_study"])
def test_the_rows_of_r_side_by_side_have_the_papers_weights(page):
    configs = [DETECTORS[name].make(None).config for name in ("r_metric", "r_metric_first_loss")]
    assert {config.weights for config in (*configs, CONFIG)} == {PAPER_WEIGHTS}
    text = " ".join(page.split())
    assert "All weights of R are the paper's." in text
    assert "simulator's weights" not in text


def test_the_counts_in_the_readme_are_those_of_table_3():
    emergent, stress = (table_3(folder) for folder in STUDIES)
    full = published()[FULL]
    assert int(full["TP"]) + int(full["FN"]) == 72
    for page in (FINDINGS, PUBLISHED_PAGE):
        assert "72 of 180 runs fail" in page
        assert "emergent: {Failed} of {n} fail".format(**emergent["published", "R-Metric"]) in page
        assert "stress: {Failed} of {n} fail".format(**stress["published", "R-Metric"]) in page
    ceiling = emergent["causal", "Ceiling, after the onset step"]
    seen = (
        "{TP} of the {Failed} failing runs of the emergent study have a record after the onset"
    ).format(**ceiling)
    assert seen in " ".join(FINDINGS.split())


def test_what_is_stated_of_the_published_number_is_in_the_results():
    full, anatomy = published()[FULL], {
        row["Changed"]: row for row in rows_of("results/tables/table7_anatomy.csv")
    }  # fmt: skip
    claims = {row["Claim"]: row for row in rows_of("results/tables/table5_claims.csv")}
    one, mean, low, high = (
        float(full[name])
        for name in ("F1", "F1 over seeds", "F1 over seeds low", "F1 over seeds high")
    )
    f1 = claims["F1 of the simulation study, published rule"]
    share = re.match(r"(\d+) % of 300", f1["Why"])[1]
    lead = claims["Mean lead time"]["Measured here"]
    in_time = re.search(r"without them ([\d.]+)", claims["Mean lead time"]["Why"])[1]
    later, moving = (
        float(anatomy[name]["F1, published rule"])
        for name in ("Onset one step later (2501)", "(a) ΔL from the true moving average")
    )
    text = " ".join(FINDINGS.split())
    for stated in (
        f"F1 {one:.3f} (one seed) or {mean:.3f} (300 seeds, 95 % of them from {low:.3f} to",
        f"which {share} % of the seeds give",
        f"at 2501, F1 is {later:.2f}",
        f"paper describes F1 is {moving:.2f}",
        f"it is {lead.split()[0]} steps over seeds, and {in_time} without",
    ):
        assert stated in text, stated
    page = " ".join(PUBLISHED_PAGE.split())
    causal = float(anatomy["(a) ΔL from the true moving average"]["F1, causal rule"])
    for stated in (
        f"F1 is {mean:.3f}, with 95 % of single studies from {low:.3f} to {high:.3f}",
        f"{share} % of the studies round to it",
        f"and F1 is {later:.2f}",
        f"average F1 is {moving:.2f}, and {causal:.2f} by the causal rule",
        f"It is {lead.split()[0]} steps over seeds, not 255",
        f"Without them it is {in_time} steps",
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


#: Row of the README's table of alarms -> the detector's name in the benchmark.
BELIEVED = {
    "calibrated detector": "Calibrated detector",
    "R-Metric's equation, calibrated likewise": "R-Metric, calibrated",
    "EWMA of the log loss": "EWMA of log loss",
    "Bayesian change point": "Bayesian change point",
    "R-Metric, as published": "R-Metric",
}


def benchmark(name: str) -> dict[str, dict[str, str]]:
    path = ROOT / "studies/detector_benchmark/results" / f"{name}.csv"
    with open(path, encoding="utf-8", newline="") as file:
        return {row["Detector"]: row for row in csv.DictReader(file)}


@pytest.mark.parametrize("start", BELIEVED)
def test_the_alarms_in_the_readme_are_those_of_the_benchmark(start):
    line = [line for line in FINDINGS.splitlines() if line.startswith(f"| {start} |")][-1]
    cells = [cell.strip() for cell in line.strip("|").split("|")[1:]]
    sealed, public = (benchmark(name)[BELIEVED[start]] for name in ("lab_test", "real"))
    assert cells == [
        *(f"{float(sealed[key]):.2f}" for key in ("F1", "F1, strict")),
        *(
            f"{float(sealed[key]):.1f}"
            for key in ("Controls alarmed (%)", "Benign changes alarmed (%)")
        ),
        f"{float(public['Caught, high confidence (%)']):.0f}",
        f"{float(public['Healthy alarmed, high confidence (%)']):.0f}",
    ]


def test_what_the_readme_says_of_the_sealed_part_is_so():
    row = benchmark("lab_test")["Calibrated detector"]
    instant = json.loads((ROOT / "studies/detector_benchmark/results/lab_test.json").read_bytes())[
        "rows"
    ]["calibrated"]["instant"]
    text = " ".join(FINDINGS.split())
    assert f"Of the {row['Failing runs']} failures {instant} come within one step" in text
    assert f"the F1 is {float(row['F1 where there is a warning']):.2f}" in text
    assert 30 < float(row["Absorbed faults alarmed (%)"]) < 36  # "a third"


def test_what_the_readme_says_of_the_public_logs_is_so():
    results = json.loads((ROOT / "studies/detector_benchmark/results/real.json").read_bytes())
    counts = next(note for note in results["notes"] if "failing or spiking" in note)
    everyone, troubled, confident, _, healthy = re.findall(r"\d+", counts)[:5]
    caught = float(benchmark("real")["Calibrated detector"]["Caught, all (%)"])
    text = " ".join(FINDINGS.split())
    assert f"{confident} troubled and {healthy} healthy runs" in text
    assert f"Of all {troubled} troubled ones it catches {caught:.0f} %" in text
    assert int(everyone) > int(troubled)


TODAY = "asynchronous, today's predictor"


def guard_rows(name: str) -> list[dict[str, str]]:
    with open(ROOT / "studies/fleet/results" / name, encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def test_what_failures_cost_is_as_in_the_results():
    from benchmarks import recovery

    page = (ROOT / "docs/supervisor.md").read_text(encoding="utf-8")
    assert recovery.table(recovery.results()["measured"]["cases"]) in page


def test_the_readme_counts_the_known_faults():
    from rmetric.diagnosis.library import SignatureLibrary

    page = (ROOT / "docs/steps.md").read_text(encoding="utf-8")
    said = int(re.search(r"recognises over (\d+) faults", page)[1])
    faults = [one for one in SignatureLibrary.shipped() if one.role not in ("harmless", "success")]
    assert said < len(faults) <= said + 50
