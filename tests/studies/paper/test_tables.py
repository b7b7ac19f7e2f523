"""The tables: their forms, and the script that writes them."""

import csv
import io
import json
import re
from functools import cache, partial
from math import isnan, nan
from pathlib import Path
from random import Random

import matplotlib
import pytest
import sklearn.ensemble
from matplotlib.font_manager import FontProperties
from matplotlib.textpath import TextPath

import generate_paper_tables
from rmetric.evaluation import Estimate, read_study
from rmetric.logs import run_lines
from rmetric.reporting.style import COLUMN_WIDTH, LEAST_POINTS, TEXT_WIDTH
from rmetric.simulation.published import published_specs, simulate_published
from studies.common.renderers import _TEX, escape_tex, to_csv, to_markdown, to_tex
from studies.common.table import Table, show
from studies.paper import claims, published_tables, tables
from studies.paper.analysis import Analysis
from studies.paper.anatomy import ROWS
from studies.paper.published_study import CONFIG
from studies.paper.published_tables import PublishedAnalysis
from studies.paper.slim_tables import SLIM
from tests.evaluation.synthetic_study import make_runs, write_study
from tests.studies.paper.small_study import Result, run_script

ROOT = Path(__file__).resolve().parents[3]
TABLES = (
    *("table1_approaches", "table2_scenarios", "table3_detectors", "table4_faults"),
    *("table5_claims", "table6_transfer"),
)


run = partial(run_script, generate_paper_tables.main)


@pytest.fixture(scope="module", autouse=True)
def one_process():
    """Starting another takes longer than the few forests of these studies do."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(generate_paper_tables, "NUM_PROCESSES", 1)
        yield


@pytest.fixture(scope="module")
def logs(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("study")
    write_study(folder)
    return folder


@pytest.fixture(scope="module")
def analysis(logs) -> Analysis:
    return Analysis.of(read_study(logs))


@pytest.fixture(scope="module")
def whole(logs, tmp_path_factory) -> Result:
    """Of a study of all four modes."""
    return run(logs, tmp_path_factory.mktemp("tables"))


@pytest.fixture(scope="module")
def published(tmp_path_factory) -> PublishedAnalysis:
    """Of the published study, with few seeds and few trees."""
    folder = tmp_path_factory.mktemp("published")
    specs = published_specs()
    for spec, run in zip(specs, simulate_published(specs, Random(1), seed=1), strict=True):
        path = folder / f"logs_{spec.mode}" / f"{run.id}.jsonl"
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"".join(run_lines(run, CONFIG, spec.mode)))
    with pytest.MonkeyPatch.context() as patch:
        few_trees = partial(sklearn.ensemble.IsolationForest, n_estimators=5)
        patch.setattr(sklearn.ensemble, "IsolationForest", few_trees)
        return PublishedAnalysis.of(read_study(folder), spread_seeds=30, anatomy_seeds=2)


@pytest.fixture(scope="module")
def sample(tmp_path_factory) -> Result:
    """Of a few runs of one mode, as the repository holds."""
    return run(few_logs(tmp_path_factory.mktemp("sample")), tmp_path_factory.mktemp("tables"))


def few_logs(folder: Path) -> Path:
    write_study(folder, make_runs()[2:4], modes=("FULL_METRIC",))
    return folder


EXAMPLE = Table(
    "example",
    "50 % of λ & σ²",
    "Group_1 | F1 | n | Note",
    [
        ("a", Estimate(0.5, 0.25, 1.0), 3, "x | y"),
        ("a", Estimate(nan, nan, nan), 4, None),
        ("b", Estimate(-0.001, -0.2, 0.1), 5, "[z]"),
    ],
    notes=["100 % sure"],
    number=9,
    grouped=True,
)


@pytest.mark.parametrize(
    ("cell", "shown"),
    [
        (nan, "–"),
        (Estimate(nan, nan, nan), "–"),
        (None, ""),
        (-0.0001, "0.00"),
        (Estimate(0.5, 0.25, 1.0), "0.50 [0.25, 1.00]"),
    ],
)
def test_a_number_that_is_undefined_is_a_dash_and_never_nought(cell, shown):
    assert show(cell) == shown


def test_each_form_holds_what_it_can_and_escapes_what_it_would_take_for_its_own():
    # CSV has the bounds in columns of their own.
    header, *rows = csv.reader(io.StringIO(to_csv(EXAMPLE)))
    assert header == ["Group_1", "F1", "F1 low", "F1 high", "n", "Note"]
    assert rows[0] == ["a", "0.5", "0.25", "1", "3", "x | y"]
    assert rows[1] == ["a", "nan", "nan", "nan", "4", ""]
    lines = to_markdown(EXAMPLE).splitlines()
    assert lines[0] == "### Table 9. 50 % of λ & σ²"
    assert lines[3] == "| --- | ---: | ---: | --- |"
    assert lines[4] == r"| a | 0.50 [0.25, 1.00] | 3 | x \| y |"
    assert "- 100 % sure" in lines
    assert escape_tex("a_b & 5 % {x} ^~\\ #$") == (
        r"a\_b \& 5 \% \{x\} \textasciicircum{}\textasciitilde{}\textbackslash{} \#\$"
    )
    tex = to_tex(EXAMPLE)
    assert tex.isascii()
    assert r"\caption{50 \% of $\lambda$ \& $\sigma$$^2$}" in tex
    assert tex.count(r"\midrule") == 2


def test_table_3_has_every_detector_under_every_protocol_and_nobody_beats_the_ceiling(analysis):
    rows = tables.detectors(analysis).rows
    assert len(rows) == 3 * len(analysis.traces) + 2 * len(tables.CEILINGS)
    by_name = {row[:2]: row for row in rows}
    assert by_name["causal", "Always alarm"][4:6] == (0, 15)
    assert by_name["causal", "Never alarm"][4:6] == (0, 0)
    assert by_name["published", "Always alarm"][8].point == 1
    for protocol in ("causal", "causal, any alert"):
        ceiling, later = (by_name[protocol, title] for title in tables.CEILINGS)
        assert ceiling[5] == 0
        assert later[4] <= ceiling[4]
        assert all(row[4] <= ceiling[4] for row in rows if row[0] == protocol)
    by_fault = [row for row in tables.faults(analysis).rows if row[0] == "causal"]
    assert sum(row[7] for row in by_fault) == later[4]
    for i in range(2, 7):
        assert sum(row[i] for row in by_fault) == by_name["causal", "R-Metric"][i]


@pytest.mark.parametrize(
    ("measured", "expected"),
    [
        (Estimate(255.0, 240.0, 280.0), "agrees"),
        (Estimate(216.0, 10.0, 510.0), "undecided"),
        (Estimate(200.0, 100.0, 250.0), "differs"),
        (Estimate(nan, nan, nan), "undefined"),
    ],
)
def test_only_a_narrow_interval_can_agree_with_the_paper(measured, expected):
    assert claims.verdict(255, measured) == expected


def test_the_numbers_of_the_paper_stand_in_columns_that_say_so(analysis):
    for table in tables.tables_of(analysis):
        papers = [i for i, column in enumerate(table.columns) if column.label.startswith("Paper")]
        ours = [
            cell for row in table.rows for i, cell in enumerate(row)
            if i not in papers and isinstance(cell, float | Estimate)
        ]  # fmt: skip
        values = [cell.point if isinstance(cell, Estimate) else cell for cell in ours]
        assert claims.PAPER_F1 not in values
        assert claims.PAPER_LEAD_STEPS not in values


def test_the_published_study_shows_the_published_number_beside_the_papers(published):
    assert published_tables.is_published(published.metric.study)
    table = published_tables.published_detectors(published)
    names = [column.label for column in table.columns]
    row = dict(zip(names, table.rows[0], strict=True))
    assert (row["Method"], row["TP"], row["FP"], row["FN"]) == (
        "R-Metric (0.10 / 0.45 / 0.70)", 72, 1, 0
    )  # fmt: skip
    assert (round(row["F1"], 3), row["Paper: F1"]) == (0.993, 0.973)
    groups = list(dict.fromkeys(row[0] for row in table.rows))
    assert groups[:2] == ["rows of the published table", "as the authors' simulator computes it"]
    assert [(*row[1:5], row[10]) for row in table.rows if row[0] == groups[1]] == [
        ("R-Metric (0 / 0.50 / 0.78)", 72, 2, 0, pytest.approx(0.959, abs=5e-4))
    ]
    assert 0.95 < row["F1 over seeds"].low <= row["F1 over seeds"].point <= 1
    assert row["Causal F1"] < row["F1"]
    by_name = {row[1]: row for row in table.rows}
    assert len(by_name) == len(ROWS)
    assert by_name["Calibrated detector"][2] == 0
    assert by_name["Always alarm"][2:5] == (72, 108, 0)
    assert by_name["σ² only, re-drawn"][2:5] != by_name["σ² only, on the same runs"][2:5]
    rows = {row[0]: row for row in published_tables.faults(published).rows}
    assert rows["Overall"][1:3] == (144, 72)
    assert "NONE" not in rows
    assert isnan(rows["ROUTER_IMBALANCE"][4])
    assert rows["LR_SPIKE"][5] == 1
    rows = {str(row[0]): row for row in published_tables.claims_table(published).rows}
    assert rows["F1 of the simulation study, published rule"][4] == "agrees"
    assert rows["Mean lead time"][4] == "differs"
    assert rows["Failing runs of the study"][4] == "agrees"


def test_a_study_of_the_published_recipe_has_seven_tables(published, monkeypatch):
    monkeypatch.setattr(PublishedAnalysis, "of", lambda study, num_processes: published)
    found, contradicted = tables.build_tables(published.metric.study)
    assert [table.number for table in found] == [1, 2, 3, 4, 5, 6, 7]
    assert all(to_tex(table).isascii() and to_csv(table) for table in found)
    assert contradicted == []


def test_the_script_writes_each_table_in_each_form_and_prints_three(whole):
    assert whole.code == 0
    expected = {f"{name}.{suffix}" for name in TABLES for suffix in ("csv", "md", "tex")}
    expected |= {f"{name}_slim.tex" for name in TABLES}
    assert {path.name for path in whole.folder.iterdir()} == expected | {"provenance.json"}
    assert all(f"Table {number}. " in whole.out for number in (3, 4, 5))
    assert "only 15 runs" in whole.err


def test_a_sample_is_enough_what_is_missing_is_reported_and_a_rerun_writes_the_same_bytes(sample):
    before = sample.bytes_of()
    command = json.loads(before["provenance.json"])["command"].split()
    assert run(Path(command[3]), sample.folder).code == 0
    assert sample.bytes_of() == before
    assert sample.code == 0
    assert "logs_LAMBDA_ONLY: its rows are left out" in sample.err
    table = (sample.folder / "table3_detectors.md").read_text()
    assert "R-Metric, λ only" not in table
    assert "No logs of LAMBDA_ONLY, SIGMA_ONLY, DELTA_L_ONLY" in table
    assert "n = 2 is small" in table


def test_a_cut_log_is_named_and_the_exit_code_says_so(tmp_path):
    cut = next((few_logs(tmp_path) / "logs_FULL_METRIC").iterdir())
    cut.write_bytes(cut.read_bytes()[:-40])
    result = run(tmp_path, tmp_path / "out")
    assert result.code == 1
    assert cut.name in result.err
    assert "n = 1 is small" in (tmp_path / "out" / "table3_detectors.md").read_text()


def test_a_log_that_contradicts_its_records_is_named_and_the_exit_code_says_so(tmp_path):
    path = next((few_logs(tmp_path) / "logs_FULL_METRIC").iterdir())
    path.write_text(path.read_text().replace('"r_metric":0.', '"r_metric":0.0'))
    result = run(tmp_path, tmp_path / "out")
    assert result.code == 1
    assert f"contradicts its records, from which R was recomputed: {path}" in result.err


def test_an_empty_folder_is_one_clear_error(tmp_path):
    result = run(tmp_path, tmp_path / "out")
    assert result.code == 2
    assert result.err.startswith("error: ")
    assert result.err.count("\n") == 1
    assert result.out == ""
    assert not (tmp_path / "out").exists()


def test_an_out_folder_that_cannot_be_made_is_one_clear_error(logs, tmp_path):
    blocked = tmp_path / "file"
    blocked.write_text("")
    result = run(logs, blocked / "tables")
    assert result.code == 1
    assert result.err == f"error: cannot write to {blocked / 'tables'}: Not a directory\n"


# Slim tables: 7-point type that fits one column of a two-column page, or both

#: Its letters are as wide as those of Times.
TIMES = FontProperties(fname=Path(matplotlib.get_data_path()) / "fonts" / "ttf" / "STIXGeneral.ttf")
POINTS_PER_INCH, POINTS_PER_CM = 72.27, 28.45
PLAIN = {tex: character for character, tex in _TEX.items()}


@cache
def width(text: str, size: float) -> float:
    """Of a line in Times, points."""
    if not text.strip():
        return 0.0
    # Spaces at the ends have no outline.
    return float(TextPath((0, 0), text, size=size, prop=TIMES).get_extents().width) + 0.5


def plain(cell: str) -> str:
    for tex in sorted(PLAIN, key=len, reverse=True):
        cell = cell.replace(tex, PLAIN[tex])
    return cell.strip("{} ")


class Typeset:
    """A slim table as LaTeX sets it, without LaTeX."""

    def __init__(self, source: str) -> None:
        size, _ = re.search(r"\\fontsize\{([\d.]+)\}\{([\d.]+)\}", source).groups()
        self.size = float(size)
        self.between = 2 * float(re.search(r"\\tabcolsep\}\{([\d.]+)pt", source)[1])
        kinds = re.search(r"\\begin\{tabular\}\{@\{\}(.*)@\{\}\}", source)[1]
        self.wraps = [
            float(wrap) * POINTS_PER_CM if wrap else None
            for _, wrap in re.findall(r"([lr]|p\{([\d.]+)cm\})", kinds.replace(
                r">{\raggedright\arraybackslash}", ""))
        ]  # fmt: skip
        body = source.partition(r"\toprule")[2].partition(r"\bottomrule")[0]
        lines = [line.removesuffix(r" \\") for line in body.splitlines() if line.endswith(r"\\")]
        self.rows = [[plain(cell) for cell in line.split(" & ")]
                     for line in lines if not line.startswith(r"\multicolumn")]  # fmt: skip

    @property
    def width(self) -> float:
        """In points; of a column the longest word counts where cells are wrapped."""
        widest = []
        for column, wrap in zip(zip(*self.rows, strict=True), self.wraps, strict=True):
            texts = [t for cell in column for t in (cell.split() if wrap else [cell])]
            needed = max(width(text, self.size) for text in texts)
            assert wrap is None or needed <= wrap
            widest.append(wrap or needed)
        return sum(widest) + self.between * (len(self.wraps) - 1)


@pytest.mark.parametrize("study", ["tables", "emergent/tables", "stress/tables"])
@pytest.mark.parametrize("name", SLIM)
def test_a_slim_table_fits_and_its_numbers_are_those_of_the_full_one(name, study):
    folder = ROOT / "results" / study
    full, source = ((folder / f"{name}{end}.tex").read_text() for end in ("", "_slim"))
    typeset = Typeset(source)
    page = POINTS_PER_INCH * (TEXT_WIDTH if r"\begin{table*}" in source else COLUMN_WIDTH)
    assert typeset.size >= LEAST_POINTS
    assert not re.search("resizebox|scalebox|scriptsize|tiny", source)
    assert len(typeset.rows) > 1
    assert typeset.width <= page, f"{typeset.width:.0f} of {page:.0f} points"
    for row in typeset.rows[1:]:
        for cell in row:
            assert escape_tex(cell) in full
