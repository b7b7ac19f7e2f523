"""The one command, run for real on a few runs, and what it leaves."""

import json
import re
import textwrap
from pathlib import Path

import pytest

from rmetric.detectors import registry
from rmetric.records import Record
from rmetric.reporting import style
from studies.common.csv_rows import read_dicts
from studies.common.renderers import to_markdown
from studies.detector_benchmark import __main__ as command
from studies.detector_benchmark.benchmark import read_results
from studies.detector_benchmark.data_sets import lab
from studies.detector_benchmark.measure import CEILINGS
from studies.detector_benchmark.tables import FAULT_GROUPS, tables
from studies.detector_benchmark.views import table as view_table
from tests.evaluation.synthetic_study import write_study
from tests.studies.detector_benchmark.runs import write_lab

ROOT = Path(__file__).parents[3]


def run(out: Path, *arguments: str) -> int:
    return command.main([*arguments, "--jobs", "1", "--out", str(out)])


def rows_of(path: Path) -> dict[str, dict[str, str]]:
    return {row["Detector"]: row for row in read_dicts(path)}


@pytest.fixture(scope="module", autouse=True)
def one_commit_and_quick_figures():
    """Somebody may commit while the tests run; and nobody looks at these figures."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(command, "commit", lambda: "c0ffee")
        patch.setattr(command, "uncommitted_changes", lambda: False)
        patch.setitem(style._PARAMETERS, "savefig.dpi", 50)
        yield


@pytest.fixture(scope="module")
def laboratory(tmp_path_factory) -> Path:
    return write_lab(tmp_path_factory.mktemp("lab"), "calibration", "development", "test")


@pytest.fixture(scope="module")
def options(laboratory) -> tuple[str, ...]:
    """The few runs of one part."""
    return "--data", "lab", "--lab", str(laboratory), "--lab-part", "development", "--detectors"


@pytest.fixture(scope="module")
def results(tmp_path_factory, options) -> Path:
    """What the command leaves of two detectors on these runs."""
    out = tmp_path_factory.mktemp("results")
    assert run(out, *options, "loss_ewma", "always") == 0
    return out


def test_it_leaves_tables_figures_provenance_and_the_numbers_of_the_runs(results, laboratory):
    names = {path.name for path in results.iterdir()}
    figures = {f"{name}.{kind}" for name in ("figure1_precision_recall", "figure2_delay")
               for kind in ("pdf", "png")}  # fmt: skip
    assert names == {"lab.csv", "lab.json", "lab.md", "provenance.json"} | figures
    assert all((results / name).stat().st_size > 1000 for name in names)
    text = (results / "lab.md").read_text()
    assert text.count("### Table") == 6
    for group in FAULT_GROUPS:
        assert all(note in text for note in group.notes)
    assert "4 groups are drawn: seeds" in text
    assert "| LR_SPIKE | fault | 4 | 4 |" in text
    about = json.loads((results / "provenance.json").read_text())
    ours = about["data"]["lab"]
    assert list(ours["inputs"]["archives"]) == ["development.tar.xz"]
    assert ours["inputs"]["parts"] == ["development"]
    assert ours["seeds"] == {"detectors": 0, "bootstrap": 0}
    assert "always" in ours["detectors"]
    assert str(laboratory) not in json.dumps(about)
    assert {"rmetric", "python", "numpy"} <= set(about["versions"])
    rows = rows_of(results / "lab.csv")
    ewma, always = rows["EWMA of log loss"], rows["Always alarm"]
    # Four seeds, in each a failure with a rising loss that the EWMA sees.
    assert ewma["Failing runs"] == always["Failing runs"] == "4"
    assert (ewma["Hits"], ewma["F1"], ewma["False alarms"]) == ("4", "1", "0")
    assert (always["Hits"], always["F1"]) == ("0", "0")
    assert float(always["F1, published rule"]) == pytest.approx(2 * 4 / (2 * 4 + 12), rel=1e-4)
    assert always["Controls alarmed (%)"] == "100"
    assert float(always["F1 minus EWMA's"]) == -1
    assert ewma["F1 minus EWMA's"] == ""
    assert rows["Ceiling (knows the truth)"]["Utility"] == "1"


def test_a_detector_is_added_to_those_that_are_there_and_gives_the_same_bytes(
    results, options, tmp_path
):
    assert run(tmp_path, *options, "always") == 0
    assert run(tmp_path, *options, "loss_ewma") == 0
    rows = json.loads((tmp_path / "lab.json").read_text())["rows"]
    assert list(rows) == ["loss_ewma", "always", *CEILINGS]
    for path in results.iterdir():
        assert (tmp_path / path.name).read_bytes() == path.read_bytes(), path.name


def test_the_recipe_of_the_page_is_a_detector():
    page = (ROOT / "docs" / "benchmark.md").read_text(encoding="utf-8")
    recipe = page.split("## Add a detector")[1]
    [code, line] = re.findall(r"```python\n(.*?)```", recipe, re.DOTALL)
    names: dict = {}
    exec(textwrap.dedent(code), names)
    detector = names["LossAbove"]()
    assert not detector.update(Record(step=1, training_loss=3.0)).alarm
    assert detector.update(Record(step=2, training_loss=5.0)).alarm
    assert detector.reason.startswith("training loss 5 is above 4: roll back")
    entries = eval(f"{{{line}}}", {**vars(registry), **names})
    assert entries["loss_above"].make(None).reason == ""


def test_rows_of_other_runs_or_costs_do_not_stand_side_by_side(results, options, capsys):
    before = (results / "lab.json").read_bytes()
    for other in (("--lab-part", "calibration"), ("--cost-false-alarm", "1")):
        assert run(results, *options, "never", *other) == 2
        assert "was made of other runs or costs" in capsys.readouterr().err
    assert (results / "lab.json").read_bytes() == before


@pytest.fixture
def frozen(tmp_path) -> Path:
    path = tmp_path / "frozen.json"
    path.write_text('{"threshold": 3}\n')
    return path


@pytest.mark.parametrize(
    ("data", "part", "known"), [("lab", "test", "lab_test"), ("lab2_test", "sealed2", "lab2_test")]
)
def test_a_sealed_part_is_refused_without_frozen_thresholds(
    tmp_path, capsys, frozen, data, part, known
):
    folder, out = write_lab(tmp_path / "lab", part), tmp_path / "out"
    options = ("--data", data, "--lab", str(folder), "--detectors", "never")
    options += ("--lab-part", part) if data == "lab" else ()
    assert run(out, *options) == 2
    assert f"the {part} part is sealed" in capsys.readouterr().err
    assert run(out, *options, "--open-sealed") == 2
    assert "--thresholds" in capsys.readouterr().err
    assert not out.exists()
    assert run(out, *options, "--open-sealed", "--thresholds", str(frozen)) == 0
    assert "opened" in json.loads((out / f"{known}.json").read_text())["made"]


def test_parts_of_two_sets_are_no_data_set(laboratory, tmp_path):
    with pytest.raises(ValueError, match="parts of different sets: development, training2"):
        lab(["development", "training2"], laboratory)
    folder = write_lab(tmp_path / "lab", "training2")
    options = ("--lab", str(folder), "--detectors", "never")
    assert run(tmp_path, "--data", "lab2", *options) == 0
    assert (tmp_path / "lab2.json").exists()


def test_the_sealed_part_is_opened_once_and_the_opening_recorded(
    laboratory, tmp_path, capsys, frozen
):
    out = tmp_path / "out"
    options = ("--data", "lab", "--lab", str(laboratory), "--lab-part", "test", "--open-sealed",
               "--thresholds", str(frozen), "--date", "2030-01-02",
               "--detectors", "never")  # fmt: skip
    assert run(out, *options) == 0
    assert not (out / "lab.json").exists()
    opened = json.loads((out / "lab_test.json").read_text())["made"]["opened"]
    assert opened["date"] == "2030-01-02"
    assert opened["thresholds"] == "frozen.json"
    assert len(opened["thresholds_sha256"]) == 64
    # Again: what comes out must be what came out, and the first date stays.
    content = (out / "lab_test.json").read_bytes()
    assert run(out, *options, "--date", "2031-01-02") == 0
    assert (out / "lab_test.json").read_bytes() == content
    capsys.readouterr()
    assert run(out, *options[:-1], "always") == 2
    assert "was opened on 2030-01-02, and always" in capsys.readouterr().err
    (out / "lab_test.json").write_bytes(content.replace(b'"hits": 0', b'"hits": 1', 1))
    assert run(out, *options) == 2
    assert "never has come out otherwise now" in capsys.readouterr().err
    (out / "lab_test.md").unlink()
    assert run(out, "--report") == 0
    assert (out / "lab_test.md").exists()


def test_the_stress_study_is_read_from_its_folder(tmp_path):
    write_study(tmp_path / "study", modes=("FULL_METRIC",))
    out = tmp_path / "out"
    options = ("--data", "stress", "--stress", str(tmp_path / "study"))
    assert run(out, *options, "--detectors", "never", "r_metric") == 0
    rows = rows_of(out / "stress.csv")
    assert rows["Never alarm"]["F1"] == "0"
    assert rows["Never alarm"]["Utility"] == "0"


def test_missing_public_logs_are_reported_and_the_rest_is_made(laboratory, tmp_path, capsys):
    options = ("--data", "lab", "real", "--lab", str(laboratory), "--real-logs",
               str(tmp_path / "nowhere"))  # fmt: skip
    assert run(tmp_path / "out", *options, "--detectors", "never") == 1
    printed = capsys.readouterr()
    assert "the public logs are left out" in printed.err
    assert (tmp_path / "out" / "lab.csv").exists()
    assert not (tmp_path / "out" / "real.csv").exists()


def test_the_page_of_the_repository_holds_what_the_results_say():
    """Whoever measures anew makes the page anew."""
    folder = ROOT / "studies" / "detector_benchmark" / "results"
    page = ROOT / "docs" / "benchmark.md"
    if not (folder / "lab.json").exists():
        pytest.skip("the benchmark has not been run here")
    text = page.read_text()
    for path in set(folder.glob("*.json")) - {folder / "provenance.json"}:
        results = read_results(path)
        for table in [view_table(results)] if path.stem.startswith("views") else tables(results):
            if f"<!-- begin table {table.name.replace('_', ' ')} -->" in text:
                lines = to_markdown(table).split("\n")
                rows = [line for line in lines[4:8] if line[:1] == "|"]
                assert all(line in text for line in (lines[2], *rows)), table.name
