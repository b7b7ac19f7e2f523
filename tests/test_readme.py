"""What the README states is what the committed results say, and what it names exists."""

from __future__ import annotations

import csv
import json
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
    "loss z-score": "Loss z-score",
    "Isolation Forest, which sees the future": "Isolation Forest (peeks)",
    "always alarm": "Always alarm",
}
STUDIES = ("results/emergent/tables", "results/stress/tables")


def table_3(folder: str) -> dict[tuple[str, str], dict[str, str]]:
    with open(ROOT / folder / "table3_detectors.csv", encoding="utf-8", newline="") as file:
        return {(row["Protocol"], row["Detector"]): row for row in csv.DictReader(file)}


def printed(table: dict, protocol: str, detector: str, column: str) -> str:
    row = table.get((protocol, detector))
    if row is None:
        return "–"
    return row[column] if column == "FP" else f"{float(row[column]):.2f}"


@pytest.mark.parametrize("start", ROWS)
def test_the_numbers_in_the_readme_are_those_of_table_3(start):
    [line] = [line for line in README.splitlines() if line.startswith(f"| {start}")]
    cells = [cell.strip() for cell in line.strip("|").split("|")[1:]]
    expected = [
        printed(table_3(folder), protocol, ROWS[start], column)
        for folder in STUDIES
        for protocol, column in (("published", "F1"), ("causal", "F1"), ("published", "FP"))
    ]
    assert cells == expected


def test_the_counts_in_the_readme_are_those_of_table_3():
    paper, stress = (table_3(folder) for folder in STUDIES)
    failed = "{Failed} of {n} runs fail".format(**paper["published", "R-Metric"])
    assert failed in README
    assert "{Failed} of {n} fail".format(**stress["published", "R-Metric"]) in README
    ceiling = paper["causal", "Ceiling, after the onset step"]
    seen = "{TP} of the {Failed} failing runs have a record after the onset".format(**ceiling)
    assert seen in " ".join(README.split())


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
        if "rmetric.commands" in source:  # the script is a subcommand, and its options are there
            for module in (ROOT / "rmetric" / "commands").glob("*.py"):
                source += module.read_text(encoding="utf-8")
        for option in re.findall(r"(--[a-z-]+)", options):
            assert option in source, f"{script} {option}"


def test_the_real_runs_in_the_readme_are_those_of_the_laboratory():
    with open(ROOT / "results/lab/detectors.csv", encoding="utf-8", newline="") as file:
        rows = {row["Detector"]: row for row in csv.DictReader(file)}
    with open(ROOT / "results/lab/outcomes.csv", encoding="utf-8", newline="") as file:
        [faults] = [row for row in csv.DictReader(file) if row["Fault"] == "all faults"]
    failed = sum(int(faults[kind]) for kind in ("Not finite", "Diverged", "Degraded"))
    text = " ".join(README.split())
    assert f"{failed} of {faults['Runs']} injected faults" in text
    ours, always = rows["R-Metric"], rows["Always alarm"]
    published, causal = "F1, published rule", "F1, causal rule"
    assert float(ours["Controls alarmed"]) == 1.0
    assert f"{float(ours[published]):.2f} by the published rule" in text
    assert f"{float(ours[causal]):.2f} by the causal one" in text
    assert f"{float(ours[published]):.2f}" == f"{float(always[published]):.2f}"


#: Row of the README's table of alarms -> the detector's name in the benchmark.
BELIEVED = {
    "calibrated detector": "Calibrated detector",
    "R-Metric's equation, calibrated likewise": "R-Metric, calibrated",
    "EWMA of the log loss": "EWMA of log loss",
    "Bayesian change point": "Bayesian change point",
    "R-Metric, as published": "R-Metric",
}


def benchmark(name: str) -> dict[str, dict[str, str]]:
    path = ROOT / "results/detection" / f"{name}.csv"
    with open(path, encoding="utf-8", newline="") as file:
        return {row["Detector"]: row for row in csv.DictReader(file)}


@pytest.mark.parametrize("start", BELIEVED)
def test_the_alarms_in_the_readme_are_those_of_the_benchmark(start):
    line = [line for line in README.splitlines() if line.startswith(f"| {start} |")][-1]
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
    instant = json.loads((ROOT / "results/detection/lab_test.json").read_bytes())["rows"][
        "calibrated"
    ]["instant"]
    text = " ".join(README.split())
    assert f"Of the {row['Failing runs']} failures {instant} come within one step" in text
    assert f"the F1 is {float(row['F1 where there is a warning']):.2f}" in text
    assert 30 < float(row["Absorbed faults alarmed (%)"]) < 36  # "a third"


def test_what_the_readme_says_of_the_public_logs_is_so():
    results = json.loads((ROOT / "results/detection/real.json").read_bytes())
    counts = next(note for note in results["notes"] if "failing or spiking" in note)
    everyone, troubled, confident, _, healthy = re.findall(r"\d+", counts)[:5]
    caught = float(benchmark("real")["Calibrated detector"]["Caught, all (%)"])
    text = " ".join(README.split())
    assert f"{confident} troubled and {healthy} healthy runs" in text
    assert f"Of all {troubled} troubled ones it catches {caught:.0f} %" in text
    assert int(everyone) > int(troubled)


TODAY = "asynchronous, today's predictor"


def guard_rows(name: str) -> list[dict[str, str]]:
    with open(ROOT / "results/guard" / name, encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


@pytest.mark.parametrize(
    ("start", "predictor", "announced"),
    [
        ("the score at its threshold", "Score as described, 0.95", "GPU failures announced (%)"),
        ("at 0.10, as", "Score as the code behaves, 0.10", "GPU failures announced (%)"),
        ("random alarms", "Score as the code behaves, 0.10", "by chance at its rate (%)"),
        ("ours: the score", "Score at 0.95 with rules", "GPU failures announced (%)"),
    ],
)
def test_who_is_warned_is_as_in_the_results(start, predictor, announced):
    [line] = [line for line in README.splitlines() if line.startswith(f"| {start}")]
    [row] = [row for row in guard_rows("risk/risk_24h.csv") if row["Predictor"] == predictor]
    false = float(row["a 1000 GPU-days"])
    expected = [f"{float(row[announced]):.1f}", f"{false:.1f}" if false < 100 else f"{false:.0f}"]
    assert [cell.strip() for cell in line.strip("|").split("|")[1:]] == expected


def test_what_a_guard_is_worth_is_as_in_the_results():
    rows = guard_rows("cost/where_it_goes.csv")
    ettr = {row["What is done"]: float(row["ETTR"]) for row in rows}
    base = ettr["asynchronous saves"]
    [bare] = [
        row
        for row in guard_rows("cost/shrinking.csv")
        if row["GPUs"].replace(",", "") == "16384" and row["Spares"] == "none"
    ]
    [ours] = [
        row
        for row in guard_rows("risk/risk_24h.csv")
        if row["Predictor"] == "Score at 0.95 with rules"
    ]
    words = " ".join(README.split())
    for said in (
        f"asynchronous saves {base - ettr['synchronous saves, restart 600 s, waits']:+.1f}",
        f"one minute instead of ten {ettr['asynchronous, restart 60 s'] - base:+.1f}",
        f"fewer nodes {ettr['asynchronous, shrinks'] - base:+.1f} with spares",
        f"and {float(bare['shrinks']) - float(bare['waits']):+.1f} without",
        f"{ettr['asynchronous, recall 0.9, no false alarms'] - base:+.1f}, today's",
        f"today's published one {ettr[TODAY] - base:+.1f}",
        f"{float(ours['only detected as they happen (%)']):.1f} % of the failures",
    ):
        assert said in words


def test_what_failures_cost_is_as_in_the_results():
    from benchmarks import recovery

    page = (ROOT / "docs/supervisor.md").read_text(encoding="utf-8")
    assert recovery.table(recovery.results()["measured"]["cases"]) in page


def test_the_diagnosis_in_the_readme_is_what_is_printed(monkeypatch, capsys):
    from rmetric.__main__ import main

    monkeypatch.chdir(ROOT)
    given = ["diagnose", "logs_failed/silent_rank", "--healthy", "logs_failed/healthy"]
    assert main(given) == 3
    shown = README.partition("<!-- begin diagnosis -->")[2].partition("<!-- end -->")[0]
    assert shown.strip().strip("`").strip() == capsys.readouterr().out.strip()


def test_the_readme_counts_the_known_faults():
    from rmetric.diagnosis.library import Library

    said = int(re.search(r"knows over (\d+) faults", README)[1])
    faults = [one for one in Library.shipped() if one.role not in ("harmless", "success")]
    assert said < len(faults) <= said + 50
