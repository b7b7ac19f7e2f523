"""What is odd in a log hides no failure: losses that stay away, a last record that explodes."""

from __future__ import annotations

import gzip
import json
import tempfile
from collections.abc import Callable, Sequence
from math import isnan, nan
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rmetric import Record, Run
from rmetric.cli.main import main
from rmetric.evaluation import RunVerdict, judge_run
from rmetric.logs import run_lines
from rmetric.metric import RMetricConfig
from rmetric.readers import read_log

Losses = Sequence[float | None]


def course(count: int = 400, start: float = 6.0, seed: int = 0) -> list[float]:
    losses = 2.0 + (start - 2.0) * np.exp(-6 * np.arange(count) / count)
    return list(losses + 0.02 * np.random.default_rng(seed).standard_normal(count))


def judged(path: Path, content: str | bytes) -> RunVerdict:
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    run = read_log(path).run
    return judge_run(run.records, unread=run.unread)


# As loggers write it


def jsonl(losses: Losses) -> str:
    return "".join(json.dumps({"step": s, "loss": x}) + "\n" for s, x in enumerate(losses, 1))


def jsonl_with_norms(losses: Losses) -> str:
    rows = ({"step": s, "loss": x, "grad_norm": 1.0} for s, x in enumerate(losses, 1))
    return "".join(json.dumps(row) + "\n" for row in rows)


def csv(losses: Losses) -> str:
    cells = ("" if x is None else x for x in losses)
    return "step,loss,lr\n" + "".join(f"{s},{x},0.1\n" for s, x in enumerate(cells, 1))


def trainer_state(losses: Losses) -> str:
    rows = [{"step": s, "epoch": 1.0, "loss": x} for s, x in enumerate(losses, 1)]
    return json.dumps({"log_history": rows, "global_step": len(rows)})


def arrays(losses: Losses) -> str:
    return json.dumps({"train_loss": list(losses)})


def own(losses: Losses) -> str:
    records = [Record(step=s, training_loss=x) for s, x in enumerate(losses, 1)]
    return b"".join(run_lines(Run(id="run", records=records), RMetricConfig())).decode()


WRITERS = [jsonl, jsonl_with_norms, csv, trainer_state, arrays, own]


@pytest.mark.parametrize("write", WRITERS)
@pytest.mark.parametrize("every", [2, 5, 10])
def test_a_loss_of_every_kth_record_is_not_missing(tmp_path, write, every):
    losses = [x if s % every == 0 else None for s, x in enumerate(course(), 1)]
    found = judged(tmp_path / "run.log", write([*losses, *[None] * (every - 1)]))
    assert found.kind == "healthy"


@pytest.mark.parametrize("write", [each for each in WRITERS if each is not own])
@pytest.mark.parametrize("number", [1, 2, 3, 4])
def test_a_few_blank_losses_at_the_end_are_not_healthy(tmp_path, write, number):
    found = judged(tmp_path / "run.log", write([*course()[:-number], *[None] * number]))
    step = 401 - number - (write is arrays)
    if number == 1:
        assert found.text == f"CANNOT TELL: the last loss is blank, at step {step}"
    else:
        words = f"CANNOT TELL: the last {number} losses are blank, from step {step} on"
        assert found.text == words


WITHOUT_BY_DESIGN = {
    "the closing evaluation": '{"step": 401, "loss": null, "val_loss": 2.1}\n',
    "a record of another kind": '{"step": 401, "memory": 3.5}\n',
    "an evaluation of the last step": '{"step": 400, "loss": null}\n',
    "a key that was never there": '{"step": 401}\n',
}


@pytest.mark.parametrize("last", WITHOUT_BY_DESIGN)
@pytest.mark.parametrize("write", [jsonl, jsonl_with_norms])
def test_a_closing_record_that_has_no_loss_by_design_is_healthy(tmp_path, write, last):
    text = write(course()) + WITHOUT_BY_DESIGN[last]
    assert judged(tmp_path / "run.log", text).kind == "healthy"


@pytest.mark.parametrize("row", ["401,,2.1,0.1", "401,,,", "400,,,0.1"])
def test_a_closing_row_that_has_no_loss_by_design_is_healthy(tmp_path, row):
    rows = [f"{s},{x},,0.1\n" for s, x in enumerate(course(), 1)]
    path, text = tmp_path / "run.csv", f"step,loss,val_loss,lr\n{''.join(rows)}{row}\n"
    assert judged(path, text).kind == "healthy"
    found = judged(path, text + "402,,,0.1\n")
    assert found.text == "CANNOT TELL: the last loss is blank, at step 402"


LEFT_OUT = {
    "jsonl": ("", '{{"step": {0}, "loss": {1}}}\n', '{{"step": {0}, "loss": ****}}\n'),
    "csv": ("step,loss\n", "{0},{1}\n", "{0},1,{1}\n"),
}


@pytest.mark.parametrize("form", LEFT_OUT)
def test_a_log_whose_last_lines_could_not_be_read_is_not_healthy(tmp_path, form):
    head, good, bad = LEFT_OUT[form]
    path = tmp_path / "run.log"
    lines = [(good if s <= 250 else bad).format(s, x) for s, x in enumerate(course(), 1)]
    text = head + "".join(lines)
    found = judged(path, text)
    assert found.text.startswith("CANNOT TELL: the last 150 lines could not be read, the ")
    crash = "Traceback (most recent call last):\n" + "  loss, x = f(x)\n" * 3
    found = judged(path, text + good.format(401, 2.0) + crash)
    assert found.kind == "healthy", "what a crash prints is no line of the log"


def test_a_packed_log_that_is_cut_off_is_not_healthy(tmp_path):
    whole = gzip.compress(jsonl(course()).encode())
    found = judged(tmp_path / "run.jsonl.gz", whole[: len(whole) - len(whole) // 4])
    assert found.text.startswith("CANNOT TELL: the compressed file is damaged or cut off")


ODD: dict[str, tuple[Callable[[], str], int, str, str]] = {
    "null": (
        lambda: jsonl([*course()[:200], *[None] * 200]), 5,
        "CANNOT TELL from step 201: no loss is logged any more",
        "ALARM run: step 205: no loss is logged any more, since step 201: check the training"),
    "one null": (
        lambda: jsonl([*course()[:399], None]), 5,
        "CANNOT TELL: the last loss is blank, at step 400",
        "ALARM run: step 399: the last loss is blank, at step 400: check the log"),
    "dead": (
        lambda: "".join(
            json.dumps({"step": s, "loss": x, "grad_norm": 0.53 if s < 201 else 0.0}) + "\n"
            for s, x in enumerate(course(), 1)
        ), 3,
        "STUCK: the gradient norm is exactly 0 since step 201",
        "ALARM run: step 205: the gradient norm is exactly 0 since step 201: nothing is learnt; "),
    "explodes": (
        lambda: jsonl([*course()[:399], 1e9]), 5,
        "CANNOT TELL: the last record is 1e+09",
        "ALARM run: step 400: the last loss is 1e+09, and no later record confirms it: keep the"),
    "explodes below 0": (
        lambda: jsonl([*course()[:399], -1e9]), 5,
        "CANNOT TELL: the last record is -1e+09",
        "ALARM run: step 400: the last loss is -1e+09, and no later record confirms it: keep the"),
    "unread": (
        lambda: jsonl(course()[:200]) + '{"step": 1, "loss": ****}\n' * 9, 5,
        "CANNOT TELL: the last 9 lines could not be read, the first is line 201: ",
        "ALARM run: step 200: the last 9 lines could not be read, the first is line 201: "),
}  # fmt: skip


@pytest.mark.parametrize("odd", ODD)
def test_replay_and_watch_show_what_the_end_hides(tmp_path, capsys, odd):
    make, code, verdict, alarm = ODD[odd]
    path = tmp_path / "run.jsonl"
    path.write_text(make())
    out = ["--out", str(tmp_path / "out"), "--plots", "none"]
    assert main(["replay", str(path), *out, "--exit-on-alarm"]) == code
    output = capsys.readouterr().out
    assert verdict in output
    assert "live alarm (calibrated detector): at step " in output
    assert "before the onset" not in output
    assert main(["watch", str(path), "--stop-after", "0", "--exit-on-alarm"]) == 3
    assert alarm in capsys.readouterr().out


def test_what_was_left_out_is_on_the_console(tmp_path, capsys):
    path = tmp_path / "run.jsonl"
    path.write_text(jsonl(course()[:90]) + "loading\n" + jsonl(course())[2000:])
    main(["replay", str(path), "--out", str(tmp_path / "out"), "--plots", "none"])
    assert "2 lines could not be read and were left out, the first is line 91: " in (
        capsys.readouterr().out
    )


@st.composite
def lost(draw) -> list[float]:
    """A loss that falls, and from some record on is lost: at once, within some records, or nan."""
    count = draw(st.integers(60, 300))
    losses = np.array(course(count, draw(st.sampled_from([2.1, 6.0])), draw(st.integers(0, 9))))
    onset = draw(st.integers(count // 2, count - 12))
    up = np.clip(np.arange(1, count - onset + 1) / draw(st.integers(1, 8)), 0, 1)
    factor = draw(st.sampled_from([4.0, 20.0, 1e6, nan]))
    losses[onset:] *= nan if isnan(factor) else 1 + (factor - 1) * up
    return list(losses)


def judged_as_written(odd: str, losses: list[float], share: float, write) -> RunVerdict:
    odd_losses = ODDITIES[odd](losses, int(share * len(losses)))
    with tempfile.TemporaryDirectory() as folder:
        written = write([None if x is None or isnan(x) else float(x) for x in odd_losses])
        return judged(Path(folder) / "run.log", written)


ODDITIES: dict[str, Callable[[list[float], int], Losses]] = {
    "none": lambda losses, place: losses,
    "the losses stay away": lambda losses, place: losses[:place] + [None] * len(losses[place:]),
    "the last record explodes": lambda losses, place: [*losses[:-1], 1e9],
    "every kth record": lambda losses, place: [
        x if i % (2 + place % 4) == 0 else None for i, x in enumerate(losses)
    ],
}


@pytest.mark.parametrize("odd", ODDITIES)
@settings(deadline=None, max_examples=60)
@given(losses=lost(), share=st.floats(0.2, 0.85), write=st.sampled_from(WRITERS))
def test_a_diverged_run_is_never_healthy_whatever_is_odd_in_its_log(odd, losses, share, write):
    assert judged_as_written(odd, losses, share, write).kind != "healthy"


@pytest.mark.parametrize("odd", ["the losses stay away", "the last record explodes"])
@settings(deadline=None, max_examples=60)
@given(seed=st.integers(0, 99), share=st.floats(0.2, 0.95), write=st.sampled_from(WRITERS))
def test_a_healthy_run_whose_end_is_odd_is_not_healthy(odd, seed, share, write):
    assert judged_as_written(odd, course(seed=seed), share, write).severity == "unknown"


@settings(deadline=None, max_examples=100)
@given(losses=lost(), every=st.integers(4, 12), trained=st.booleans(), seed=st.integers(0, 9))
def test_evaluations_that_are_lost_are_never_healthy(losses, every, trained, seed):
    training = losses if trained else course(len(losses), seed=seed)
    records = [Record(step=s, training_loss=x) for s, x in enumerate(training, 1)]
    for record, loss in list(zip(records, losses, strict=True))[every - 1 :: every]:
        record.validation_loss = loss
    last = records[-1 - len(records) % every].validation_loss
    found = judge_run(records)
    assert found.kind != "healthy" or "the last validation loss is not finite" in found.text, last
