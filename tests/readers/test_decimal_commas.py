"""Numbers with a decimal comma are read as such or refused, never cut off at the comma."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rmetric import read_log
from rmetric._util.errors import LogError

ROWS = [(i, 3 * math.exp(-i / 20) + 0.4, 1 + 0.3 * math.cos(i), 3e-4) for i in range(1, 60)]


def comma(number):
    return f"{number:.6g}".replace(".", ",")


def write(path, header, rows, between=";", number=comma):
    lines = [between.join([str(step), *map(number, values)]) for step, *values in rows]
    path.write_text("\n".join([between.join(header.split()), *lines]) + "\n")
    return path


@pytest.mark.parametrize("between", [";", "\t"])
def test_a_table_with_decimal_commas_is_the_one_with_points(tmp_path, between):
    header = "step loss grad_norm learning_rate"
    with_commas = read_log(write(tmp_path / "a.csv", header, ROWS, between)).run
    plain = write(tmp_path / "b.csv", header, ROWS, between, lambda n: f"{n:.6g}")
    with_points = read_log(plain).run
    assert with_commas.records == with_points.records
    assert any("decimal commas" in note for note in with_commas.notes)
    assert not any("decimal commas" in note for note in with_points.notes)


@given(
    st.lists(st.floats(1e-6, 1e6) | st.integers(0, 10**6), min_size=2, max_size=8).filter(
        lambda some: any("." in f"{n:.9g}" for n in some)
    )
)
def test_any_numbers_come_back(tmp_path_factory, numbers):
    path = tmp_path_factory.mktemp("t") / "a.csv"
    rows = list(enumerate(numbers))
    write(path, "step loss", rows, number=lambda n: f"{n:.9g}".replace(".", ","))
    found = [record.training_loss for record in read_log(path).run.records]
    assert found == [float(f"{n:.9g}") for n in numbers]


def test_points_part_thousands_where_decimals_have_a_comma(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text("step;loss\n1;3,25\n2;1.234,5\n3;3,0\n")
    assert read_log(path).run.records[1].training_loss == 1234.5


@pytest.mark.parametrize(
    ("content", "line", "found"),
    [
        ("step;loss\n1;3,25\n2;3,125\n3;1.000\n", 4, "'1.000 (beside decimal commas)'"),
        ("step;loss\n1;3.25\n2;1,234\n3;3.0\n", 3, "'1,234'"),
        ("step;loss\n1;3,25\n2;1,234.5\n3;3,0\n", 3, "'1,234.5'"),
        ('step,loss\n1,"3,25"\n2,"1,234"\n', 2, "'3,25'"),
        ('{"step": 1, "loss": "3,25"}\n{"step": 2, "loss": "3,125"}\n', 1, "'3,25'"),
        ("step 1 loss: 3,251148\nstep 2 loss: 3,1\n", 1, "'3,251148'"),
        ("step 1 loss: 3,251\nstep 2 loss: 3,125\n", 1, "'3,251'"),
        ("step 1 loss: 2.5 lr 3,0e-04\nstep 2 loss: 2.4 lr 3,0e-04\n", 1, "'3,0e-04'"),
        ("{'loss': '3,25', 'step': 1}\n{'loss': '3,1', 'step': 2}\n", 1, "'3,25'"),
    ],
)
def test_what_may_be_read_in_two_ways_is_refused_with_its_line(tmp_path, content, line, found):
    path = tmp_path / "a.log"
    path.write_text(content)
    with pytest.raises(LogError) as error:
        read_log(path)
    assert error.value.line == line
    assert f"is {found}: a number" in error.value.problem


def test_columns_that_are_not_used_may_hold_anything(tmp_path):
    path = tmp_path / "a.csv"
    rows = [(n, 2.5 - n / 100, "3.11", "gpu 0,1", "a,b") for n in range(30)]
    write(path, "step loss version devices words", rows,
          number=lambda n: comma(n) if isinstance(n, float) else n)  # fmt: skip
    assert read_log(path).run.records[2].training_loss == 2.48


@pytest.mark.parametrize(
    "line",
    [
        "step {0},loss 2.5", "step {0} loss 2.5,3.5", "step 1,00{0} loss 2.5 loss_scale 65,536",
        "step {0} | loss 2,grad_norm 1.5", "step {0} loss 2 | gpus 0,1,2", "{0}/100,loss=2.5,lr=1",
    ],
)  # fmt: skip
def test_other_commas_stay_what_they_are(tmp_path, line):
    path = tmp_path / "a.log"
    path.write_text("".join(line.format(step) + "\n" for step in range(1, 9)))
    assert next(record.training_loss for record in read_log(path).run.records) in (2.5, 2.0)
