"""Tables in long form whose evaluations stand after all training records."""

from __future__ import annotations

from rmetric.readers import read_log


def written(tmp_path, rows):
    path = tmp_path / "run.csv"
    lines = ["step,train_loss,eval_loss", *(",".join(map(str, row)) for row in rows)]
    path.write_text("\n".join(lines) + "\n")
    return read_log(path)


TRAINING = [(10 * i, 5 - 0.01 * i, "") for i in range(1, 101)]


def test_a_second_counter_from_the_start_is_the_same_run(tmp_path):
    log = written(tmp_path, [*TRAINING, *((s, "", 4.5) for s in (0, 250, 500, 755, 1000))])
    run = log.run
    steps = [record.step for record in run.records]
    assert run.id == "run"
    assert steps == sorted(steps)
    assert len(run.records) == 102
    assert [r.step for r in run.records if r.validation_loss is not None] == [
        0,
        250,
        500,
        755,
        1000,
    ]
    assert run.records[25].training_loss is not None
    assert any("each was put at its step" in note for note in run.notes)
    assert not any("start again" in note for note in run.notes)


def test_a_second_counter_from_the_middle_is_no_resumed_run(tmp_path):
    run = written(tmp_path, [*TRAINING, *((s, "", 4.5) for s in (400, 800, 1010))]).run
    assert [record.step for record in run.records][-2:] == [1000, 1010]
    assert not any("falls back" in note for note in run.notes)


def test_evaluations_may_go_on_where_the_training_is_no_longer_logged(tmp_path):
    log = written(tmp_path, [*TRAINING, *((s, "", 4.5) for s in (1, 1720, 72504))])
    assert [record.step for record in log.run.records][-2:] == [1720, 72504]
    assert not any("start again" in note for note in log.run.notes)


def test_two_runs_and_a_resumed_one_stay_what_they_are(tmp_path):
    assert len(written(tmp_path, [*TRAINING, *TRAINING]).runs) == 2
    resumed = written(tmp_path, [*TRAINING, *TRAINING[50:]]).run
    assert any("falls back" in note for note in resumed.notes)
    mixed = [(s, t, 4.0 if s == 500 else "") for s, t, _ in TRAINING]
    assert len(written(tmp_path, [*mixed, *((s, "", 4.5) for s in (0, 250, 500))]).runs) == 2
