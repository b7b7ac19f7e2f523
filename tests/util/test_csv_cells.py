"""Text of foreign logs in a CSV is not a formula; numbers stay numbers."""

import csv
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rmetric._util.printed import csv_cell
from rmetric.cli.main import main
from studies.common.renderers import to_csv
from studies.common.table import Table


@pytest.mark.parametrize(
    "text", ["=cmd|'/C calc'!A0", "+1+cmd", "-2+3", "@SUM(A1)", "\t=1+1", "\r=1", "\uff1d1+1"]
)
def test_what_begins_like_a_formula_is_text(text):
    assert csv_cell(text) == f"'{text}"


@given(st.floats() | st.integers() | st.none() | st.booleans())
def test_numbers_stay_numbers(number):
    assert csv_cell(number) is number
    assert csv_cell(repr(number)) == repr(number)
    assert csv_cell(f"{number}") == f"{number}"


def test_the_index_of_foreign_logs_holds_no_formula(tmp_path):
    run_id = '=HYPERLINK("http://x","y")'
    lines = [{"run_id": run_id, "step": n, "training_loss": 2.0 - n / 50} for n in range(40)]
    log = tmp_path / "=cmd|calc.jsonl"
    log.write_text("".join(json.dumps(line) + "\n" for line in lines))
    (tmp_path / "@bad.jsonl").write_text('{"step": 1}\n')
    main(["replay", str(log), str(tmp_path / "@bad.jsonl"), "--out", str(tmp_path / "out"),
          "--plots", "none"])  # fmt: skip
    with open(tmp_path / "out" / "index.csv", newline="") as file:
        cells = [cell for row in csv.reader(file) for cell in row]
    assert any("HYPERLINK" in cell or "cmd|calc" in cell for cell in cells)
    for cell in cells:
        if cell.startswith(("=", "+", "-", "@", "\t", "\r")):
            float(cell)


def test_a_table_of_results_holds_no_formula():
    table = Table("t", "T", "name | gain", [("=1+1", -0.5), ("fine", 2.0)])
    assert to_csv(table).splitlines() == ["name,gain", "'=1+1,-0.5", "fine,2"]
