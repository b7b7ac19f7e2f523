"""Training is recognised in the formats that replay reads; what it outlived is no cause."""

from __future__ import annotations

import pytest

from rmetric.diagnosis.patterns.steps import match_step


@pytest.mark.parametrize(
    "line",
    [
        "loss 2.1, samples: 4000",
        "consumed_samples=4000 loss=2.1",
        "validation loss at iteration 100: 2.1",
        "best loss 2.1 of 300 runs",
        "{'loss': 2.1, 'epoch': 3}",
        "train_steps_per_second: 12, train_loss: 2.1",
        "loss_scale 65536, warmup_steps=100, eval_steps=500, loss=2.1",
    ],
)
def test_other_numbers_beside_a_loss_are_no_steps(line: str) -> None:
    assert match_step(line) is None


def test_a_step_with_separators_is_read_as_a_whole() -> None:
    step = match_step("Step 1,200: loss 2.1")
    assert step is not None
    assert step.step == 1200
