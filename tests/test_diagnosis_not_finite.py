"""A training loss that is not finite to the last step is a failure, whatever ended the job."""

from __future__ import annotations

from pathlib import Path

import pytest

from rmetric.diagnosis import Diagnosis, diagnose
from rmetric.diagnosis.patterns.not_finite import is_not_finite

CANCEL = "slurmstepd: error: *** JOB 77 ON node01 CANCELLED AT 2024-05-01T10:01:45 ***"
FORMS = [
    "step: {step}  loss: {loss:>8}  grad_norm: 1.25",
    "{{'loss': {loss}, 'learning_rate': 1e-05, 'step': {step}}}",
    " iteration {step:8d}/ 9000 | lm loss: {loss} | loss scale: 1.0 |",
    "train: step={step} train_loss={loss}",
]


def judged(folder: Path, losses: list[str], form: str = FORMS[0], end: str = CANCEL) -> Diagnosis:
    lines = [
        f"2024-05-01 10:{at // 60:02d}:{at % 60:02d} " + form.format(step=10 * at, loss=loss)
        for at, loss in enumerate(losses, 1)
    ]
    (folder / "train.log").write_text("\n".join([*lines, end]) + "\n")
    return diagnose(folder)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("bad", ["nan", "NaN", "inf"])
def test_a_loss_that_never_was_finite_again(tmp_path: Path, form: str, bad: str) -> None:
    found = judged(tmp_path, [f"{2 + at / 100}" for at in range(60)] + [bad] * 40, form)
    assert (found.outcome, found.cause) == ("failed", "loss_not_finite")
    assert "from step 610 to 1000" in found.title
    assert "cancelled" in found.why


@pytest.mark.parametrize(
    "losses",
    [
        ["2.5"] * 60 + ["nan"] + ["2.5"] * 39,  # a step that was left out
        ["2.5"] * 98 + ["nan"] * 2,
        ["nan"] * 100,  # of a rank that states none
        ["2.5"] * 100,
    ],
)
def test_what_is_no_failure_of_the_loss(tmp_path: Path, losses: list[str]) -> None:
    found = judged(tmp_path, losses)
    assert (found.outcome, found.cause) == ("terminated", "slurm_cancelled")


def test_an_error_explains_the_end_better(tmp_path: Path) -> None:
    error = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."
    found = judged(tmp_path, ["2.5"] * 60 + ["nan"] * 40, end=error)
    assert found.cause == "cuda_out_of_memory"


@pytest.mark.parametrize(
    ("text", "bad"),
    [
        ("step 3 loss nan", True),
        ("Epoch 1 | loss=inf | lr=1", True),
        ("'loss': NaN", True),
        ("lm loss: 2.5E+00 | loss scale: inf", False),
        ("validation loss: nan", None),
        ("eval_loss=nan", None),
        ("test/loss nan", None),
        ("the loss is low", None),
        ("lossless nan", None),
    ],
)
def test_which_loss_a_line_states(text: str, bad: bool | None) -> None:
    assert is_not_finite(text) is bad
