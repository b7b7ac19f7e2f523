"""Oddities of logs: each costs itself at most, in replay, in watch and in calibrate."""

from __future__ import annotations

import json
from math import inf, nan

import pytest

from rmetric import RMetricConfig
from rmetric._util.strict_json import parse_line
from rmetric.cli.main import main
from rmetric.logs import start_line
from rmetric.readers import open_log, read_log
from tests.test_readers_formats import only, read, write

#: As Python, C and C++ print them.
PRINTED = {
    "nan": nan, "-nan": nan, "NaN": nan, "NAN": nan, "nan(ind)": nan, "-nan(ind)": nan,
    "-nan(snan)": nan, "nan(0x8000000000000)": nan, "1.#QNAN": nan, "-1.#IND": nan,
    "1.#SNAN0": nan, "inf": inf, "+inf": inf, "-inf": -inf, "Infinity": inf, "-Infinity": -inf,
    "INF": inf, "1.#INF": inf, "-1.#INF00e+000": -inf, "1.#J": inf,
}  # fmt: skip
START = start_line({}, "run", RMetricConfig(), "FULL_METRIC").decode()
#: A line of each format with a step and a loss, and what stands before the lines.
FORMS = {
    "flat": ("", '{{"step": {0}, "loss": {1}}}\n'),
    "nested": ("", '{{"step": {0}, "train": {{"loss": {1}}}, "by_layer": [1.5, {1}]}}\n'),
    "own": (START, '{{"event": "METRICS", "step": {0}, "training_loss": {1}}}\n'),
    "mlperf": ("", ':::MLLOG {{"key": "train_loss", "value": {1}, "metadata": {{"step": {0}}}}}\n'),
    "fairseq": ("", 'train_inner | {{"epoch": 1, "loss": {1}, "num_updates": "{0}"}}\n'),
    "csv": ("step,loss,note\n", '{0},{1},"a, b"\n'),
    "nanogpt": ("", "iter {0}: loss {1}, time 20ms\n"),
    "text": ("", "step={0} loss={1}\n"),
}


def log_of(form: str, losses: list[object], first: int = 1) -> str:
    head, line = FORMS[form]
    return head + "".join(line.format(step, loss) for step, loss in enumerate(losses, first))


def losses_of(records) -> list[str]:
    return [repr(record.training_loss) for record in records]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("printed", PRINTED)
def test_nan_and_infinities_are_numbers_however_they_are_printed(tmp_path, form, printed):
    for losses in ([3.0, 2.5, 2.25, printed, 2.0], [3.0, 2.5, 2.25, printed]):
        path = write(tmp_path, "log", log_of(form, losses))
        numbers = [repr(PRINTED.get(loss, loss)) for loss in losses]
        assert losses_of(only(read_log(path).runs).records) == numbers
        assert losses_of(record for _, record in open_log(path)) == numbers


@pytest.mark.parametrize("printed", PRINTED)
def test_documents_with_nan_as_it_is_printed_are_read(tmp_path, printed):
    for text in (
        '{"log_history": [{"step": 1, "loss": 3.0}, {"step": 2, "loss": %s}]}',
        '{"train_loss": [3.0, %s]}',
        "[3.0, %s]",
        'seed,train_loss\n1,"[3.0, %s]"\n',
        "[[0, 3.0], [1, %s]]",
    ):
        run = only(read(tmp_path, text % printed))
        assert losses_of(run.records) == ["3.0", repr(PRINTED[printed])]


def test_words_in_strings_and_what_is_no_number_stay_what_they_are():
    assert parse_line(b'{"a": "nan, inf", "b\\"": [nan]}')['b"'] != [None]
    assert parse_line(b'{"a": "nan, \\"inf", "b": inf}') == {"a": 'nan, "inf', "b": inf}
    for line in (b'{"a": nano}', b'{"a": nan', b'{"a": nan.5}', b'{"a": 1.#}', b'{"a": "nan}'):
        with pytest.raises(ValueError, match="not JSON"):
            parse_line(line)
