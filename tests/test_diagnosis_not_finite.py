"""A training loss that is not finite to the last step is a failure, whatever ended the job."""

from __future__ import annotations

import pytest

from rmetric.diagnosis.patterns.not_finite import is_not_finite


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
