"""Every reader of replay on small made-up logs, whole and damaged."""

from __future__ import annotations

import csv
import gzip
import io
import json
from collections.abc import Iterable
from math import inf, isnan, nan
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rmetric import HardwareEvent, Record, RMetricConfig, Run, Truth
from rmetric.logs import LogError, run_lines
from rmetric.readers import READERS, UnknownFormat, find_logs, read_log, read_runs
from rmetric.readers.text_readers import LAST_READERS, TEXT_FORMATS

HISTORY = [
    {"epoch": 0.1, "step": 10, "loss": 3.0, "grad_norm": 1.5, "learning_rate": 1e-4},
    {"epoch": 0.2, "step": 20, "loss": 2.5, "grad_norm": nan, "learning_rate": 2e-4},
    {"epoch": 0.2, "step": 20, "eval_loss": 2.6, "eval_runtime": 3.5},
    {"epoch": 0.3, "step": 30, "loss": nan, "grad_norm": 2.0, "learning_rate": 2e-4},
    {"epoch": 0.3, "step": 30, "train_loss": 2.7, "train_runtime": 60.0, "total_flos": 1e9},
]
ALGOPERF = """global_step,grad_norm,loss,train/loss,validation/ctc_loss,validation/wer,score,\
accumulated_submission_time
0,46.9,32.5,,,,,
1,,,31.6,30.4,0.9,59.9,59.9
1,52.2,32.4,,,,,
100,,,,,,,
200,,,,,0.9,99.0,99.0
201,,,,,,101.0,
"""


def write(folder: Path, name: str, text: str | bytes) -> Path:
    path = folder / name
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


def read(folder: Path, text: str | bytes, name: str = "log", **mapping: str) -> list[Run]:
    return read_runs(write(folder, name, text), mapping=mapping)


def only(runs: list[Run]) -> Run:
    assert len(runs) == 1
    return runs[0]


def rows(run: Run) -> list[tuple]:
    """Step, both losses and the norm, with nan as text, which equals itself."""

    def shown(value: float | None) -> float | str | None:
        return "nan" if value is not None and isnan(value) else value

    return [
        (r.step, *map(shown, (r.training_loss, r.validation_loss, r.gradient_norm)))
        for r in run.records
    ]


def noted(run: Run, words: str) -> bool:
    return any(words in note for note in run.notes)


def own_log(id: str = "run") -> bytes:
    records = [
        Record(
            step=step,
            time=5.0 * step,
            training_loss=4.0 - 0.1 * step,
            validation_loss=4.0 - 0.1 * step if step % 5 == 0 else None,
            worker_gradient_norms=(1.0, 1.0 + 0.1 * step),
            events=(HardwareEvent(5.0 * step, "ecc_corrected", 0),) if step == 7 else (),
        )
        for step in range(1, 21)
    ]
    truth = Truth(fault="LR_SPIKE", onset_step=12, outcome="failed", failure_kind="diverged")
    truth.failure_step = 19
    run = Run(id=id, records=records, truth=truth)
    return b"".join(run_lines(run, RMetricConfig()))


def test_a_format_is_recognised_by_content_whatever_the_name(tmp_path):
    contents = {
        "experiment log (JSONL)": own_log().decode(),
        "Hugging Face trainer_state.json": json.dumps({"epoch": 1, "log_history": HISTORY}),
        "AlgoPerf measurements.csv": ALGOPERF,
        "CSV with one run a row and lists in its cells": 'seed,train_loss\n1,"[3, 2]"\n',
        "JSON (a list of objects, or arrays)": '{"train_loss": [3.0, 2.5]}',
        "JSONL (one object a line)": '{"step": 1, "loss": 3.0}\n',
        "W&B chart export (CSV)": "Step,a - loss,a - loss__MIN,a - loss__MAX\n1,3,3,3\n",
        "CSV with a header line": "step,loss\n1,3.0\n",
        "long form, a value a row (MLflow, Comet)": "key,value,step\nloss,3,1\n",
    }
    of_text = {text.name for text in TEXT_FORMATS} | {reader.name for reader in LAST_READERS}
    assert set(contents) == {reader.name for reader in READERS} - of_text
    for name, text in contents.items():
        assert read_log(write(tmp_path, "misleading.png", text)).format == name


def test_an_unknown_format_names_the_known_ones_the_line_and_the_remedy(tmp_path):
    with pytest.raises(UnknownFormat) as caught:
        read(tmp_path, "\nit 0 | xloss 3.1 | 20ms\nit 1 | xloss 3.0 | 20ms\n")
    message = str(caught.value)
    assert "line 2, is 'it 0 | xloss 3.1" in message
    assert "--map loss=xloss" in message
    with pytest.raises(UnknownFormat, match="--map loss=NAME says which to read, of 'score'"):
        read(tmp_path, "it 0 | score 3.1 | 20ms\nit 1 | score 3.0 | 20ms\n")
    with pytest.raises(UnknownFormat, match="say which to read"):
        read(tmp_path, "what it does\nscore 3.0\n")
    for reader in READERS:
        assert reader.name in message


def curve(*points: tuple) -> list[tuple]:
    """Rows of (step, training loss, validation loss, norm); what is left out was not logged."""
    return [(*point, *[None] * (4 - len(point))) for point in points]


def lines(entries: Iterable[dict[str, Any]]) -> str:
    return "".join(json.dumps(entry) + "\n" for entry in entries)


def llama_factory(last: int) -> str:
    entries: list[dict[str, Any]] = [
        {"current_steps": s, "total_steps": last, "loss": 3.0 - s / 100, "lr": 1e-4,
         "epoch": s / 10, "percentage": 100.0 * s / last, "elapsed_time": "0:00:05",
         "remaining_time": "0:01:00", "throughput": 250.5, "total_tokens": 100 * s}
        for s in range(5, last + 1, 5)
    ]  # fmt: skip
    evaluation = {"current_steps": last, "total_steps": last, "eval_loss": 2.75, "epoch": 1.0}
    end = {"current_steps": last, "total_steps": last, "epoch": 1.0, "percentage": 100.0}
    return lines([*entries, evaluation, end])


TWO = curve((1, 3.0), (2, 2.5))
LOSSES, LATER = [2.5, 2.25, 2.0, 1.75], [2.625, 2.375, 2.125, 1.875]
ALONE = curve(*enumerate(LOSSES))
BOTH = curve(*zip(range(4), LOSSES, LATER, strict=True))
#: A log of one run -> its rows, and words of a note on it.
READ: dict[str, tuple[str, list[tuple], str]] = {
    "an evaluation is merged into its step, nan is bare": (
        json.dumps({"log_history": HISTORY}, indent=2),
        curve((10, 3.0, None, 1.5), (20, 2.5, 2.6, "nan"), (30, "nan", None, 2.0)), "",
    ),
    "AlgoPerf's blank is nan, and its closing line is no evaluation": (
        ALGOPERF,
        curve((0, 32.5, None, 46.9), (1, 32.4, 30.4, 52.2), (100, "nan", None, "nan"),
              (200, None, "nan")),
        "3 blank losses and norms were read as nan",
    ),
    "nan, infinite, blank and not logged in a table": (
        "step,loss,val_loss,grad_norm\n1,nan,,inf\n2,,2.5,-Infinity\n3,None,null,0.5\n",
        curve((1, "nan", None, inf), (2, None, 2.5, -inf), (3, None, None, 0.5)), "",
    ),
    "nan, infinite and not logged in lines": (
        '{"step":1,"loss":NaN}\n{"step":2,"loss":"Infinity"}\n{"step":3,"val_loss":1}',
        curve((1, "nan"), (2, inf), (3, None, 1.0)), "",
    ),
    "a row without a measurement": (
        "step,loss,lr\n1,3.0,1e-3\n2,,1e-3\n3,2.0,1e-3\n", curve((1, 3.0), (3, 2.0)),
        "1 of 3 rows hold a step and no loss",
    ),
    "one that is of an evaluation": (
        "step,loss,accuracy\n1,3.0,\n2,,0.5\n3,2.0,\n", curve((1, 3.0), (3, 2.0)),
        "not: rows hold a step and no loss",
    ),
    "a bar that is drawn again at the next step, before that has a loss": (
        "".join(f"{i // 2}/4 loss={LOSSES[(i - 1) // 2]}\n" for i in range(1, 8)), ALONE,
        "3 records were left out that repeat",
    ),
    "semicolons": ("step;train/loss\n1;3.0\n2;2.5\n", TWO, ""),
    "tabs": ("step\ttrain/loss\n1\t3.0\n2\t2.5\n", TWO, ""),
    "a first column without a name": (",step,loss\n0,5,3.0\n", curve((5, 3.0)), ""),
    "nested objects and other spellings": (
        '{"globalStep": 5, "train": {"loss": 2.0, "gradNorm": 1.0}, "eval": {"loss": 2.5}}\n',
        curve((5, 2.0, 2.5, 1.0)), "",
    ),
    "of two columns that fit equally none": (
        "step,policy_loss,value_loss,eval_loss\n1,3.0,0.1,2.0\n", curve((1, None, 2.0)),
        "'policy_loss', 'value_loss' could each be loss",
    ),
    "a second column that could be the loss": (
        "step,train/loss,loss\n1,9.0,3.0\n", curve((1, 3.0)), "'train/loss' could be loss too",
    ),
    "a column named twice": ("step,loss,loss\n1,3.0,9.0\n", curve((1, 3.0)), "named twice"),
    "a last row that is cut": ("step,loss\n1,3.0\n2,2.5\n3", TWO, "is cut off and was left out"),
    "a last object that is cut": (
        '{"step":1,"loss":3.0}\n{"step":2,"loss":2.5}\n{"st', TWO, "is cut off and was left out",
    ),
    "an evaluation's own step": (
        "_step,train/step,train/loss,val/step,val/loss,run_id\n"
        "0,160,7.6,,,a\n1,,,,,a\n2,320,7.2,,,a\n3,,,320,7.3,a\n",
        curve((160, 7.6), (320, 7.2, 7.3)), "",
    ),
    "a step that comes twice": (
        "step,loss\n1,3.0\n1,2.0\n", curve((1, 3.0), (1, 2.0)),
        "1 records have the step of the record before",
    ),
    "the counter of a logger": (
        "_step,loss\n0,7.6\n", curve((0, 7.6)), "'_step' counts calls of the logger",
    ),
    "no step": ("loss,lr\n3.0,1\n2.5,1\n", curve((0, 3.0), (1, 2.5)), "rows are counted from 0"),
    "a run that was resumed": (
        "step,loss\n0,3\n10,3\n20,3\n30,3\n20,3\n30,3\n40,3\n",
        curve(*((step, 3.0) for step in (0, 10, 20, 30, 20, 30, 40))),
        "the step falls back 1 times",
    ),
    "a list with holes is no clock": (
        'seed,train_loss,val_loss,tokens_train\n1,"[4, 3]","[3.5]","[10, null]"\n',
        curve((0, 4.0), (1, 3.0, 3.5)), "spread evenly",
    ),
    "lists of other length and no clock": (
        'seed,train_loss,grad_norm\n1,"[4, 3, 2, 1]","[9, 8]"\n',
        curve((0, 4.0), (1, 3.0, None, 9.0), (2, 2.0), (3, 1.0, None, 8.0)), "spread evenly",
    ),
    "a chart of W&B over another axis": (
        "train/global_step,a - loss,a - loss__MIN,a - loss__MAX\n1,3,3,3\n2,2.5,2,2\n", TWO, "",
    ),
    "sparse rows of Lightning": (
        "epoch,step,train_loss_step,val_loss,lr-Adam,train_loss_step\n"
        "0,49,3.5,,,\n0,99,nan,,,\n0,99,,3.2,,\n1,149,,,0.001,\n",
        curve((49, 3.5), (99, "nan", 3.2)), "named twice",
    ),
    "a list of bare numbers": (
        json.dumps(LOSSES), ALONE, "a list of bare numbers: read as training losses, counted from 0"
    ),
    "a list of pairs": (
        json.dumps([[10 * i, x] for i, x in enumerate(LOSSES)]),
        curve(*((10 * i, x) for i, x in enumerate(LOSSES))), "",
    ),
    "text that begins with a bracket": (
        "".join(f"[{i}, 4] step {i} loss: {x} accuracy: 0.5\n" for i, x in enumerate(LOSSES)),
        ALONE, "",
    ),
    "micro-batches beside their steps": (
        "".join(f"iter {i} step {i // 8}: loss {3 - i / 64}\n" for i in range(32)),
        curve(*((i, 3 - i / 64) for i in range(32))),
        "the step is 'iter', which differs on most lines with a loss",
    ),
    "two counters of steps, one a little finer": (
        "iter 2 step 1: loss 2.5\niter 4 step 2: loss 2.25\niter 5 step 2: loss 2.0\n",
        curve((1, 2.5), (2, 2.25), (2, 2.0)), "not: the step is 'iter'",
    ),
    "an epoch as step": (
        "".join(f"Epoch {i}/4, Loss {x}, Accuracy 55.1%, Val Loss {y}\n"
                for i, x, y, _ in BOTH),
        BOTH, "no step is stated: a step is an epoch",
    ),
    "batches of epochs": (
        "".join(f"epoch {e} batch {b}/2 loss={2.5 - e}\n" for e in range(2) for b in range(2)),
        curve((0, 2.5), (1, 2.5), (2, 1.5), (3, 1.5)), "not: a step is an epoch",
    ),
    "a mean of the epoch": (
        "epoch 0 batch 0/2 loss=2.5\nepoch 0 batch 1/2 loss=2.25\nepoch 0 loss=9\n",
        curve((0, 2.5), (1, 2.25)), "left out: 1 line with an epoch, a loss and no step",
    ),
    "a batch on few lines": (
        "".join(f"Epoch 1 {'' if i % 4 else f'Batch {i} '}Loss {3 - i / 8}\n" for i in range(8)),
        curve(*((i, 3 - i / 8) for i in range(8))), "no step is stated, or on few lines",
    ),
    "lines with a loss alone": (
        "loading 4 files\n" + "".join(f"loss={x} acc=0.5\nval loss=9.0\n" for x in LOSSES),
        curve(*((i, x, 9.0) for i, x in enumerate(LOSSES))), "no step is stated",
    ),
    **{
        f"a loss after other words: {line[:9]}": (
            "".join(f"{line.format(x)}\n" for x in LOSSES), ALONE, "",
        )
        for line in (
            "accuracy: 0.5, batch_loss: 9.5, loss: {} ||: : 7it [00:10,  1.2it/s]",
            "[host] 2024-03-01 10:00:00,123 (trainer:737) INFO: 1epoch:train:1-100batch: "
            "loss_ctc=50.1, acc=0.5, loss={}, backward_time=0.3",
            "03/01/2024 10:00:00 - INFO - __main__ - Training loss: {}",
        )
    },
    **{
        f"JSON: {json.dumps(document)[:40]}": (
            json.dumps(document, indent=indent or None), BOTH, "",
        )
        for indent, document in enumerate((
            {"losses": LOSSES, "val_losses": LATER},
            {"train_losses": LOSSES, "val_losses": LATER, "train_accs": [0.1, 0.2, 0.3, 0.4]},
            {"history": {"loss": LOSSES, "val_loss": LATER, "accuracy": [0.1, 0.2, 0.3, 0.4]}},
            {"train": {"loss": LOSSES, "acc": [1] * 4}, "val": {"loss": LATER, "acc": [0.5] * 4}},
            {"config": {"betas": [0.9, 0.95]}, "trainLosses": LOSSES, "validation_losses": LATER},
            {"loss": dict(enumerate(LOSSES)), "val_loss": dict(enumerate(LATER))},
            [{"step": i, "loss": x, "val_loss": y} for i, x, y, _ in BOTH],
            {"config": {"lr": 1}, "logs": [{"loss": x, "val_loss": y} for _, x, y, _ in BOTH]},
        ))
    },
    **{
        f"a printed table with {kind}, {more or 'whole'}": (table + more, BOTH, "")
        for more in ("", "saved the model of the last epoch\n")
        for kind, table in (
            ("blanks", "epoch     train_loss  valid_loss  time    \n"
             + "".join(f"{i:<9} {x:.6f}    {y:.6f}    00:12     \n" for i, x, y, _ in BOTH)),
            ("bars", "| Epoch | Training Loss | Validation Loss |\n| ---: | --- | --- |\n"
             + "".join(f"| {i} | {x:.6f} | {y:.6f} |\n" for i, x, y, _ in BOTH)),
            ("words", "Epoch  Training Loss  Validation Loss\n"
             + "".join(f"{i}      {x:.6f}       {y:.6f}\n" for i, x, y, _ in BOTH)),
        )
    },
    "LLaMA-Factory's lines": (
        llama_factory(20), curve((5, 2.95), (10, 2.9), (15, 2.85), (20, 2.8, 2.75)), "",
    ),
    "the lines of ms-swift, with its closing mean and state": (
        lines([
            *({"loss": x, "acc": 0.5 + i / 10, "grad_norm": 1.5, "learning_rate": 1e-4,
               "memory(GiB)": 12.5, "train_speed(iter/s)": 0.75, "epoch": i / 4,
               "global_step/max_steps": f"{5 * (i + 1)}/20", "percentage": f"{25 * (i + 1)}.00%",
               "elapsed_time": "5s", "remaining_time": "1m"} for i, x in enumerate(LOSSES)),
            {"eval_loss": 0.5, "eval_acc": 0.75, "global_step/max_steps": "20/20"},
            {"train_runtime": 12.0, "total_flos": 1e15, "train_loss": 2.125, "epoch": 1.0,
             "global_step/max_steps": "20/20"},
            {"train_dataset": "1.0±2.0, min=1", "last_model_checkpoint": "checkpoint-20",
             "best_metric": 0.5, "global_step": 20, "log_history": [{"loss": 9.0, "step": 1}],
             "memory": 12.5},
        ]),
        curve((5, 2.5, None, 1.5), (10, 2.25, None, 1.5), (15, 2.0, None, 1.5),
              (20, 1.75, 0.5, 1.5)), "",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", READ)
def test_a_small_log_is_read_and_what_was_done_is_noted(tmp_path, name):
    text, expected, note = READ[name]
    run = only(read(tmp_path, text))
    assert rows(run) == expected
    assert not note or noted(run, note.removeprefix("not: ")) == (not note.startswith("not: "))


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("step,loss\n1,3.0\n2,three\n", "line 3: 'loss' is 'three'"),
        ("step,loss\n1,3.0\nx,2.0\n", "line 3: 'step' is 'x'"),
        ("step,loss\nnan,3.0\n", "whole step"),
        ("step,loss,lr\n1,3.0\n2,2.0\n", "line 2: 2 cells, the header has 3"),
        ("step,loss\n1,3.0,7\n", "line 2: 3 cells, the header has 2"),
        ("step,loss\n1,\n2,\n", "no row holds a measurement"),
        ("step,ppl\n1,20\n", "the columns are 'step', 'ppl'; --map loss=COLUMN says which"),
        ('{"step": 1, "loss": true}\n', "line 1: 'loss' is True"),
        ('{"step": 1, "loss": [1, 2]}\n', "line 1: 'loss' is"),
        ('{"loss": 2.0}\n{"loss": "oops"}\n{"loss": 1.8}\n', "line 2: 'loss' is 'oops'"),
        ('seed,train_loss\n1,"[4, 3"\n', "line 2: 'train_loss' is not a list"),
        ('{"log_history": []}', "'log_history' is empty"),
        ('{"log_history": [1, 2]}', "list of objects"),
        ('{"log_history": [{"step": 1, "loss": 2.0}', "no whole JSON"),
        ('{"log_history": [{"step": 1, "epoch": 0.1}]}', "no column is known to be a loss"),
        (json.dumps({"log_history": HISTORY[-1:]}), "empty: nothing was logged"),
        (own_log().partition(b"\n")[0] + b"\n", "no METRICS line"),
        ("Step,a - loss,a - loss__MIN,a - loss__MAX\n10,3,3,3\n20,high,2,2\n",
         "line 3: 'loss' is 'high'"),
        ('{"train_loss": [3.0, 2.5', "no whole JSON"),
        ('{\n"lr": 0.1\n}', "neither a list of objects nor arrays"),
        *((json.dumps(document), "no column is known to be a loss") for document in (
            {"name": "x", "size": [1, 2]}, {"accuracy": LOSSES, "val_accuracy": LATER},
            {"losses": {"ce": LOSSES, "kl": LATER}}, {"loss_scale": LOSSES, "total_flos": LATER},
            {"train": {"accuracy": LOSSES}, "val": {"accuracy": LATER}},
        )),
        ('[1.0, "x", 2.0]', 'line 1: entry 2 of the list is "x"; accepted: a loss'),
        ("[\n1.0,\n[2.0],\n3.0\n]", "line 3: entry 2 of the list is [2.0]; accepted: a loss"),
        ("[[1, 2.0], [1, 3.0]]", "entry 2 of the list is [1, 3.0]; accepted: [step, loss]"),
        ("[[0.5, 2.0], [1.5, 3.0]]", "entry 1 of the list is [0.5, 2.0]"),
        ("[1, 2, 3]", "whole numbers alone"),
        *((text, "not a log that replay knows") for text in (
            "val loss=2.0\n" * 5, "best loss: 2.0\n" * 5, "loss_scale=2.0\n" * 5,
            "loss: 50%\n" * 5, "policy loss 2.5\npolicy loss 2.0\n",
            "aux loss: 2.5\naux loss: 2.0\n",
            "total steps, loss scale 2.5\ntotal steps, loss scale 2.0\n",
            "the loss  falls as it should\nafter 3 epochs  more\n",
            "| step | accuracy |\n| --- | --- |\n| 1 | 0.5 |\n| 2 | 0.6 |\n",
            "loss  and  lr\n1  2  3  4\n",
        )),
        (b"", "the file is empty"),
        (b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR\0\0\1\0\0\0\1\0\x08", "a binary file"),
        ("step,loss\n1,2\n".encode("utf-16-le"), "a binary file"),
        (gzip.compress(b"step,loss\n1,2\n", mtime=0)[:10], "cut off"),
        (b"step,loss\n1,\xff\xfe\n", "line 2"),
        (b"step,loss\n1,3.0\n2,2\xb70\n", "line 3: 'loss' is '2"),
    ],
)  # fmt: skip
def test_a_damaged_log_is_one_error_naming_the_file_and_the_line(tmp_path, text, problem):
    with pytest.raises(LogError) as caught:
        read(tmp_path, text, "bad.csv")
    assert problem in str(caught.value)
    assert str(tmp_path / "bad.csv") in str(caught.value)


def test_a_changed_r_in_an_own_log_is_noted_with_its_step(tmp_path):
    lines = own_log().splitlines()
    entry = json.loads(lines[15])
    entry["r_metric"] += 0.25
    lines[15] = json.dumps(entry).encode()
    run = only(read(tmp_path, b"\n".join(lines) + b"\n"))
    assert noted(run, f"differs from the logged r_metric at 1 of 20 records, first at step "
                f"{entry['step']}")  # fmt: skip


def test_a_checkpoint_is_named_by_its_folders(tmp_path):
    folder = tmp_path / "my-model" / "checkpoint-500"
    folder.mkdir(parents=True)
    run = only(read(folder, json.dumps({"log_history": HISTORY}), "trainer_state.json"))
    assert run.id == "my-model__checkpoint-500__trainer_state"


def test_what_was_guessed_is_noted_and_a_map_needs_no_guess(tmp_path):
    text = "iter,lm loss,aux_loss,ppl\n1,3.0,0.1,20\n"
    guessed = only(read(tmp_path, text))
    assert noted(guessed, "'lm loss' as loss")
    mapped = only(read(tmp_path, text, step="iter", loss="aux_loss"))
    assert rows(mapped) == [(1, 0.1, None, None)]
    assert not noted(mapped, "guessed")


def test_rows_of_one_step_are_one_record_though_both_know_the_time(tmp_path):
    entries = {"wallclock": 1.5, "loss": 2}, {"wallclock": 2, "val_loss": 3}
    (record,) = only(read(tmp_path, lines({"step": 5} | entry for entry in entries))).records
    assert record == Record(step=5, time=2.0, training_loss=2.0, validation_loss=3.0)


def test_lists_in_cells_are_placed_by_what_they_count(tmp_path):
    text = (
        "seed,train_loss,val_loss,tokens_train,tokens_val\n"
        '7,"[4.0, 3.5, nan, 3.0]","[3.6, 3.1]","[10, 20, 30, 40]","[25, 45]"\n'
        '8,"[4.1, 3.6]","[3.7]","[10, 20]","[20]"\n'
    )
    first, second = read(tmp_path, text, "runs.csv")
    assert rows(first) == curve((0, 4.0), (1, 3.5, 3.6), (2, "nan"), (3, 3.0, 3.1))
    assert rows(second) == curve((0, 4.1), (1, 3.6, 3.7))
    assert (first.id, second.id) == ("runs__row0", "runs__row1")
    assert noted(first, "placed along 'train_loss' by 'tokens_val'")


def test_a_document_may_hold_several_runs_and_each_chooses_its_columns(tmp_path):
    document = {
        "a": {"loss": [3, nan], "lr": [0.1, 0.2]},
        "b": {"train_loss": [4.0, 3.5], "learning_rate": [0.3]},
    }
    first, second = read(tmp_path, json.dumps(document), "runs.json")
    assert (first.id, rows(first)) == ("runs__a", curve((0, 3.0), (1, "nan")))
    assert (second.id, rows(second)) == ("runs__b", curve((0, 4.0), (1, 3.5)))
    rates = [[record.learning_rate for record in run.records] for run in (first, second)]
    assert rates == [[0.1, 0.2], [None, 0.3]]
    assert [noted(run, "spread evenly") for run in (first, second)] == [False, True]
    with pytest.raises(LogError, match="--map loss=train_loss: no such column"):
        read(tmp_path, json.dumps(document), "runs.json", loss="train_loss")


values = st.one_of(st.none(), st.floats(allow_nan=True, allow_infinity=True, width=64))
tables = st.lists(
    st.tuples(values, values, values).filter(lambda row: any(v is not None for v in row)),
    min_size=1,
    max_size=20,
).filter(lambda table: any(row[0] is not None or row[1] is not None for row in table))
FIELDS = ("loss", "eval_loss", "grad_norm")


@settings(deadline=None)
@given(tables)
def test_the_same_run_reads_the_same_from_every_format(tmp_path_factory, table):
    folder = tmp_path_factory.mktemp("formats")
    entries = [
        {"step": step} | {n: v for n, v in zip(FIELDS, row, strict=True) if v is not None}
        for step, row in enumerate(table, start=1)
    ]
    sheet = io.StringIO()
    writer = csv.DictWriter(sheet, ("step", *FIELDS))
    writer.writeheader()
    writer.writerows(entries)
    expected = [
        (step, *("nan" if v is not None and isnan(v) else v for v in (row[0], row[1], row[2])))
        for step, row in enumerate(table, start=1)
    ]
    state = json.dumps({"log_history": entries})
    for text in (sheet.getvalue(), "\n".join(map(json.dumps, entries)), state):
        mapping = {n: n for n in FIELDS if any(n in entry for entry in entries)}
        assert rows(only(read(folder, text, **mapping))) == expected


@pytest.mark.parametrize(("saved", "name"), [(20, "trainer_state.json"), (10, "trainer_log.jsonl")])
def test_a_trainers_folder_is_one_run(tmp_path, saved, name):
    """The state is read, or the log of lines where a run ended after the last state."""
    write(tmp_path, "trainer_log.jsonl", llama_factory(20))
    history = [{"step": s, "loss": 2.0} for s in range(5, saved + 1, 5)]
    folder = tmp_path if saved == 20 else tmp_path / f"checkpoint-{saved}"
    folder.mkdir(exist_ok=True)
    state = json.dumps({"global_step": saved, "log_history": history})
    write(folder, "trainer_state.json", state)
    assert [path.name for path in find_logs([tmp_path])] == [name]


def test_folders_are_searched_and_hidden_and_unfinished_files_are_not(tmp_path):
    for name in ("b.csv", "deep/a.jsonl", ".hidden/x.csv", ".x.csv", "y.jsonl.part"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        write(tmp_path, name, "step,loss\n1,2\n")
    assert find_logs([tmp_path]) == [tmp_path / "b.csv", tmp_path / "deep/a.jsonl"]


def test_globs_are_expanded_and_no_file_comes_twice(tmp_path):
    a, b = (write(tmp_path, name, "x") for name in ("a.csv", "b.csv"))
    write(tmp_path, "c.txt", "x")
    assert find_logs([a, f"{tmp_path}/*.csv"]) == [a, b]
    assert find_logs([f"{tmp_path}/**/*.csv"]) == [a, b]


@pytest.mark.parametrize("name", ["absent", "empty", "*.nothing"])
def test_a_path_that_stands_for_nothing_is_an_error(tmp_path, name):
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="no "):
        find_logs([tmp_path / name])


ULTRALYTICS = "epoch,time,train/box_loss,train/cls_loss,metrics/mAP50(B),val/box_loss,lr/pg0\n"


def test_several_losses_without_a_whole_are_read_by_their_names(tmp_path):
    path = tmp_path / "results.csv"
    path.write_text(ULTRALYTICS + "1,9.6,1.3,3.4,0.2,0.9,1e-4\n2,17.5,0.6,3.0,0.5,,1e-4\n")
    (run,) = read_log(path).runs
    first, second = run.records
    assert first.loss_parts == {"box_loss": 1.3, "cls_loss": 3.4, "validation box_loss": 0.9}
    assert (second.step, second.loss_parts) == (2, {"box_loss": 0.6, "cls_loss": 3.0})
    assert first.training_loss is None
    assert any("each part is judged" in note for note in run.notes)
    path.write_text(ULTRALYTICS.replace("time", "loss") + "1,9.6,1.3,3.4,0.2,0.9,1e-4\n")
    (record,) = read_log(path).runs[0].records
    assert (record.training_loss, record.loss_parts) == (9.6, None)


def test_a_batch_that_begins_again_with_each_epoch_is_no_step(tmp_path):
    path = tmp_path / "log.csv"
    rows = (f"{epoch},{batch},0.7,1.3\n" for epoch in range(3) for batch in range(4))
    path.write_text("Epoch,Batch,Gen Loss,Disc Loss\n" + "".join(rows))
    (run,) = read_log(path).runs
    assert [record.step for record in run.records] == list(range(12))
    assert run.records[0].loss_parts == {"gen_loss": 0.7, "disc_loss": 1.3}


def test_losses_of_lines_may_come_later_and_a_whole_ends_the_parts(tmp_path):
    path = tmp_path / "log.jsonl"
    lines = ['{"step": 1, "train/box_loss": 1.0, "train/cls_loss": 2.0}'] * 3
    lines += ['{"step": 2, "val/box_loss": 3.0}']
    path.write_text("\n".join(lines) + "\n")
    assert read_log(path).runs[0].records[-1].loss_parts == {"validation box_loss": 3.0}
