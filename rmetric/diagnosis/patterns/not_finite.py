"""Find a training loss that is no longer finite, to the last step, in the lines of the steps."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rmetric.diagnosis.job import Job, Occurrence

#: Least number of lines with such a loss; a scaler leaves out a step or two.
MIN_LINES = 3
#: The loss of a training step, not of an evaluation, and not the loss scale.
_LOSS = re.compile(
    r"(?i)(?<![a-z])(?P<of>(?:[a-z]+[ _/-])*)loss['\"]?\s{0,3}[:=|]?\s{0,8}['\"]?"
    r"(?:(?P<bad>[-+]?(?:nan|inf(?:inity)?)\b)|[-+]?\d)"
)
_EVALUATION = re.compile(r"(?i)eval|val|test|probe")


def is_not_finite(text: str) -> bool | None:
    """True for a training loss that is not finite; None where the text states none.

    >>> is_not_finite("step: 6190  loss:     nan"), is_not_finite("step: 9  eval_loss: nan")
    (True, None)
    """
    if "loss" not in text and "Loss" not in text and "LOSS" not in text:
        return None
    for found in _LOSS.finditer(text):
        if not _EVALUATION.search(found["of"]):
            return found["bad"] is not None
    return None


def loss_not_finite(job: Job) -> Occurrence | None:
    """The first line of a loss that is not finite, if it was before and never was again.

    The last lines of every stream that states a loss must have such a one.
    """
    first = job.not_finite
    if first is None:
        return None
    judged = [
        [bad for entry in one.tail if (bad := is_not_finite(entry.text)) is not None]
        for one in job.streams.values()
        if one.steps
    ]
    lasts = [each[-MIN_LINES:] for each in judged if each]
    never_again = lasts and all(len(each) == MIN_LINES and all(each) for each in lasts)
    before = any(
        event.first.order < first.order and is_not_finite(event.first.text) is False
        for event in job.events
        if event.first.file == first.file
    )
    return first if never_again and before else None
