"""Arrays under plural and nested names, JSON lists, and the logs of lines beside a Trainer's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rmetric.readers import LogError, find_logs, read_log
from rmetric.records import Run

LOSSES = [2.5, 2.25, 2.0, 1.75]
LATER = [2.625, 2.375, 2.125, 1.875]


def read(folder: Path, content: Any, name: str = "log.json") -> Run:
    path = folder / name
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return read_log(path).run


def lines(entries: list[dict[str, Any]]) -> str:
    return "".join(json.dumps(entry) + "\n" for entry in entries)


def losses(run: Run) -> list[tuple[int, float | None, float | None]]:
    return [(r.step, r.training_loss, r.validation_loss) for r in run.records]


BOTH = [(i, a, b) for i, (a, b) in enumerate(zip(LOSSES, LATER, strict=True))]


@pytest.mark.parametrize(
    "document",
    [
        {"losses": LOSSES, "val_losses": LATER},
        {"train_losses": LOSSES, "val_losses": LATER, "train_accs": [0.1, 0.2, 0.3, 0.4]},
        {"history": {"loss": LOSSES, "val_loss": LATER, "accuracy": [0.1, 0.2, 0.3, 0.4]}},
        {"train": {"loss": LOSSES, "acc": [1, 2, 3, 4]}, "val": {"loss": LATER, "acc": [0.5] * 4}},
        {"config": {"betas": [0.9, 0.95]}, "trainLosses": LOSSES, "validation_losses": LATER},
    ],
)
def test_arrays_under_plural_and_nested_names(tmp_path: Path, document: Any) -> None:
    assert losses(read(tmp_path, document)) == BOTH


def test_a_plural_step_is_read(tmp_path: Path) -> None:
    run = read(tmp_path, {"steps": [0, 10, 20, 30], "losses": LOSSES, "lrs": [0.1] * 4})
    assert [r.step for r in run.records] == [0, 10, 20, 30]
    assert run.records[0].learning_rate == 0.1


@pytest.mark.parametrize("document", [
    {"accuracy": LOSSES, "val_accuracy": LATER},
    {"losses": {"ce": LOSSES, "kl": LATER}},
    {"train": {"accuracy": LOSSES}, "val": {"accuracy": LATER}},
    {"loss_scale": LOSSES, "total_flos": LATER},
])  # fmt: skip
def test_what_is_no_loss_is_not_taken_for_one(tmp_path: Path, document: Any) -> None:
    with pytest.raises(LogError, match="no list is known to be a loss"):
        read(tmp_path, document)


def test_lists_of_objects_pairs_and_numbers(tmp_path: Path) -> None:
    wanted = [(i, loss, None) for i, loss in enumerate(LOSSES)]
    assert losses(read(tmp_path, [{"step": i, "loss": x} for i, x in enumerate(LOSSES)])) == wanted
    run = read(tmp_path, LOSSES)
    assert losses(run) == wanted
    assert "a list of bare numbers: read as training losses, counted from 0" in run.notes
    assert losses(read(tmp_path, json.dumps(LOSSES, indent=1))) == wanted
    pairs = read(tmp_path, [[10 * i, x] for i, x in enumerate(LOSSES)])
    assert losses(pairs) == [(10 * i, x, None) for i, x in enumerate(LOSSES)]


@pytest.mark.parametrize(("text", "problem"), [
    ('[1.0, "x", 2.0]', r'line 1: entry 2 of the list is "x"; accepted: a loss'),
    ("[\n1.0,\n[2.0],\n3.0\n]", r"line 3: entry 2 of the list is \[2.0\]; accepted: a loss"),
    ("[[1, 2.0], [1, 3.0]]", r"entry 2 of the list is \[1, 3.0\]; accepted: \[step, loss\]"),
    ("[[1, 2, 3], [4, 5, 6]]", r"entry 1 of the list is \[1, 2, 3\]"),
    ("[[0.5, 2.0], [1.5, 3.0]]", r"entry 1 of the list is \[0.5, 2.0\]"),
    ("[1, 2, 3]", "whole numbers alone"),
])  # fmt: skip
def test_other_lists_are_refused(tmp_path: Path, text: str, problem: str) -> None:
    with pytest.raises(LogError, match=problem):
        read(tmp_path, text)


def test_text_that_begins_with_a_bracket_stays_text(tmp_path: Path) -> None:
    text = "".join(f"[{i}, 4] step {i} loss: {x} accuracy: 0.5\n" for i, x in enumerate(LOSSES))
    assert losses(read(tmp_path, text)) == [(i, x, None) for i, x in enumerate(LOSSES)]


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


def test_llama_factory(tmp_path: Path) -> None:
    run = read(tmp_path, llama_factory(20), "trainer_log.jsonl")
    assert losses(run) == [(5, 2.95, None), (10, 2.9, None), (15, 2.85, None), (20, 2.8, 2.75)]
    assert run.records[0].learning_rate == 1e-4


@pytest.mark.parametrize(("saved", "name"), [(20, "trainer_state.json"), (10, "trainer_log.jsonl")])
def test_a_trainers_folder_is_one_run(tmp_path: Path, saved: int, name: str) -> None:
    """The state is read, or the log of lines where a run ended after the last state."""
    (tmp_path / "trainer_log.jsonl").write_text(llama_factory(20))
    history = [{"step": s, "loss": 2.0} for s in range(5, saved + 1, 5)]
    state = {"global_step": saved, "log_history": history}
    folder = tmp_path if saved == 20 else tmp_path / f"checkpoint-{saved}"
    folder.mkdir(exist_ok=True)
    (folder / "trainer_state.json").write_text(json.dumps(state))
    assert [path.name for path in find_logs([tmp_path])] == [name]


def test_ms_swift(tmp_path: Path) -> None:
    entries: list[dict[str, Any]] = [
        {"loss": x, "acc": 0.5 + i / 10, "grad_norm": 1.5, "learning_rate": 1e-4,
         "memory(GiB)": 12.5, "train_speed(iter/s)": 0.75, "epoch": i / 4,
         "global_step/max_steps": f"{5 * (i + 1)}/20", "percentage": f"{25 * (i + 1)}.00%",
         "elapsed_time": "5s", "remaining_time": "1m"}
        for i, x in enumerate(LOSSES)
    ]  # fmt: skip
    evaluation = {"eval_loss": 0.5, "eval_acc": 0.75, "global_step/max_steps": "20/20"}
    mean = {"train_runtime": 12.0, "total_flos": 1e15, "train_loss": 2.125, "epoch": 1.0,
            "global_step/max_steps": "20/20"}  # fmt: skip
    tail = {"train_dataset": "1.0±2.0, min=1", "last_model_checkpoint": "checkpoint-20",
            "best_metric": 0.5, "global_step": 20, "log_history": [{"loss": 9.0, "step": 1}],
            "memory": 12.5}  # fmt: skip
    run = read(tmp_path, lines([*entries, evaluation, mean, tail]), "logging.jsonl")
    assert losses(run) == [(5, 2.5, None), (10, 2.25, None), (15, 2.0, None), (20, 1.75, 0.5)]
    assert run.records[0].gradient_norm == 1.5


def test_an_epoch_as_step_is_told(tmp_path: Path) -> None:
    text = "".join(
        f"Epoch {i + 1}/4, Loss {x}, Accuracy 55.1%, Val Loss {y}\n"
        for i, (x, y) in enumerate(zip(LOSSES, LATER, strict=True))
    )
    run = read(tmp_path, text, "log.out")
    assert losses(run) == [(i + 1, x, y) for i, x, y in BOTH]
    assert "no step is stated: a step is an epoch" in run.notes
    text = "".join(f"epoch {e} batch {b}/2 loss={2.5 - e}\n" for e in range(2) for b in range(2))
    run = read(tmp_path, text, "log.out")
    assert [r.step for r in run.records] == [0, 1, 2, 3]
    assert not any("a step is an epoch" in note for note in run.notes)


def test_lines_with_a_loss_alone_are_counted(tmp_path: Path) -> None:
    text = "loading 4 files\n" + "".join(f"loss={x} acc=0.5\nval loss=9.0\n" for x in LOSSES)
    run = read(tmp_path, text, "log.out")
    assert losses(run) == [(i, x, 9.0) for i, x in enumerate(LOSSES)]
    assert any("no step is stated" in note for note in run.notes)
    for other in ("val loss=2.0\n", "best loss: 2.0\n", "loss_scale=2.0\n", "loss: 50%\n"):
        with pytest.raises(LogError, match="not a log that replay knows"):
            read(tmp_path, other * 5, "log.out")


@pytest.mark.parametrize(
    "line",
    [
        "accuracy: 0.5, batch_loss: 9.5, loss: {} ||: : 7it [00:10,  1.2it/s]",
        "[host] 2024-03-01 10:00:00,123 (trainer:737) INFO: 1epoch:train:1-100batch: "
        "loss_ctc=50.1, acc=0.5, loss={}, backward_time=0.3, grad_norm=1.5",
        "03/01/2024 10:00:00 - INFO - __main__ - Training loss: {}",
    ],
)
def test_a_loss_after_other_words_is_counted(tmp_path: Path, line: str) -> None:
    text = "".join(f"{line.format(x)}\n" for x in LOSSES)
    assert losses(read(tmp_path, text, "log.out")) == [(i, x, None) for i, x in enumerate(LOSSES)]


@pytest.mark.parametrize("part", ["policy loss {}", "aux loss: {}", "total steps, loss scale {}"])
def test_a_part_of_a_loss_alone_is_no_log(tmp_path: Path, part: str) -> None:
    text = "".join(f"{part.format(x)}\n" for x in LOSSES)
    with pytest.raises(LogError, match="not a log that replay knows"):
        read(tmp_path, text, "log.out")


def test_the_step_is_the_name_that_tells_the_lines_apart(tmp_path: Path) -> None:
    text = "".join(f"iter {i} step {i // 15}: loss {2 + i / 64}\n" for i in range(40))
    run = read(tmp_path, text, "log.out")
    assert [r.step for r in run.records] == list(range(40))
    assert any("the step is 'iter'" in note for note in run.notes)
    text = "".join(f"iter {15 * i} step {i}: loss {2 + i / 64}\n" for i in range(40))
    assert [r.step for r in read(tmp_path, text, "log.out").records] == list(range(40))


PRINTED = {
    "blanks": "epoch     train_loss  valid_loss  time    \n"
    + "".join(f"{i:<9} {x:.6f}    {y:.6f}    00:12     \n" for i, x, y in BOTH),
    "bars": "| Epoch | Training Loss | Validation Loss |\n| ---: | --- | --- |\n"
    + "".join(f"| {i} | {x:.6f} | {y:.6f} |\n" for i, x, y in BOTH),
    "words": "Epoch  Training Loss  Validation Loss\n"
    + "".join(f"{i}      {x:.6f}       {y:.6f}\n" for i, x, y in BOTH),
}


@pytest.mark.parametrize("kind", PRINTED)
def test_a_printed_table_is_read(tmp_path: Path, kind: str) -> None:
    assert losses(read(tmp_path, PRINTED[kind], "table.txt")) == BOTH
    garbled = PRINTED[kind] + "saved the model of the last epoch\n"
    assert losses(read(tmp_path, garbled, "table.txt")) == BOTH


@pytest.mark.parametrize(
    "text",
    [
        "the loss  falls as it should\nafter 3 epochs  more\n",
        "| step | accuracy |\n| --- | --- |\n| 1 | 0.5 |\n| 2 | 0.6 |\n",
        "loss  and  lr\n1  2  3  4\n",
    ],
)
def test_prose_and_other_tables_are_no_logs(tmp_path: Path, text: str) -> None:
    with pytest.raises(LogError, match="not a log that replay knows"):
        read(tmp_path, text, "notes.txt")
