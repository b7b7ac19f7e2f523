"""An alarm names the measured value, the usual one, its onset, and one action."""

import json
import re
from math import nan
from pathlib import Path

import pytest

from rmetric.detectors import DETECTORS, make_detector
from rmetric.detectors.calibrated.thresholds import sources
from rmetric.records import Record
from rmetric.replay.watch import Watch

GOLDEN = json.loads(Path(__file__).with_name("calibrated_reasons.json").read_text())
ACTION = (
    r"(roll back to|leave the step out|keep the checkpoints|check the|set the learning rate back|"
    r"lower the|find the GPU|compare the|stop where)"
)
JARGON = ("what counts beside", "limit of healthy runs", "contributed by")
ONLINE = [
    name
    for name, entry in DETECTORS.items()
    if not entry.sees_future and entry.kind not in ("anchor", "peer") and "lambda" not in name
]


def diverging():
    """Losses, norms and workers that go up together after 80 quiet records."""
    for step in range(1, 121):
        up = 0.0 if step <= 80 else 0.2 * (step - 80)
        loss = 2.0 + 0.01 * (step % 3) + 100 * up
        yield Record(
            step=step, training_loss=loss, validation_loss=loss,
            gradient_norm=(1.0 + 0.02 * (step % 5)) * (1 + 60 * up),
            worker_gradient_norms=(1.0, 1.1 + 0.01 * (step % 4), 1.0, 1.0 + 9 * up),
        )  # fmt: skip


def reason_of(name, stream):
    events = []
    watch = Watch(lambda: make_detector(name), events.append)
    for record in stream:
        watch.take("run", record)
        if events:
            return events[0].words
    return ""


@pytest.mark.parametrize("name", ONLINE)
@pytest.mark.parametrize("stream", ["diverging", "nan"])
def test_every_detector_ends_its_reason_with_one_action(name, stream):
    bad = [Record(step=1, training_loss=2.0, validation_loss=2.0, gradient_norm=1.0)]
    bad += [
        Record(step=s, training_loss=nan, validation_loss=nan, gradient_norm=nan) for s in (2, 3)
    ]
    words = reason_of(name, bad if stream == "nan" else diverging())
    if stream == "nan" and not words:
        return  # it looks at something else
    assert words.startswith("step "), "the stream alarms every detector"
    assert re.search(rf": {ACTION}[^:]*$", words), words
    assert not any(phrase in words for phrase in JARGON)


@pytest.mark.parametrize("run", GOLDEN)
def test_reasons_of_the_calibrated_detector_have_value_usual_onset_and_action(run):
    reason = GOLDEN[run]
    evidence, _, action = reason.rpartition(": ")
    for part in evidence.split("; and "):
        assert re.search(
            r" is (inf|nan)|usual [\d.]+|usual above|lowest [\d.]+|median [\d.]+", part
        )
        assert re.search(r", since step \d+$", part), part
    assert re.match(ACTION, action)
    assert not any(phrase in reason for phrase in JARGON)


def test_every_statistic_has_an_action():
    for source in sources():
        for step in range(1, 21):
            source.update(Record(step=step, training_loss=2.0, gradient_norm=1.0))
        if source.LABEL == "gradients":
            source.update(
                Record(step=21, gradient_norm=1.0, worker_gradient_norms=(1.0, 2.0),
                       worker_gradient_cosines=(0.9, 0.9))
            )  # fmt: skip
        for name in source.NAMES:
            assert re.match(ACTION, source.advice(name, 21))


def test_the_monitor_names_an_explosion_and_what_to_do():
    pytest.importorskip("torch")
    from rmetric.monitor import Monitor, MonitorConfig
    from tests.monitor.training import make_model

    config = MonitorConfig(explosion_window=10, detectors=())
    with Monitor(make_model(), config=config) as monitor:
        for step in range(1, 13):
            verdict = monitor.check_before_step(2.0, gradient_norm=0.9 if step < 12 else 34.2)
        [against] = verdict.alerts
    [alert] = monitor.alerts
    assert against == alert
    assert str(alert) == (
        "step 12, rank 0: gradient_explosion: gradient norm 34.2, usual 0.9 (38 times the median "
        "of the last 10): leave the step out, or roll back to a checkpoint before step 12"
    )
