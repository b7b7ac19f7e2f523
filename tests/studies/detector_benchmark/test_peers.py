"""Other people's packages behind our contract, where they are installed."""

from importlib.util import find_spec
from math import inf, nan

import numpy as np
import pytest

from rmetric.detectors import DETECTORS
from rmetric.monitor import MonitorConfig
from rmetric.records import Record
from studies.detector_benchmark.peers import PART, PEERS, STRIDE, TrainProof, TrainPulse, TrainScope


def needs(package: str):
    return pytest.mark.skipif(
        find_spec(package) is None, reason=f"{package} is not installed: pip install -e .[peers]"
    )


def steps(values: list[float]) -> list[Record]:
    return [Record(step=i, training_loss=x) for i, x in enumerate(values, start=1)]


def test_exactly_the_installed_ones_are_registered_and_stand_before_the_anchors():
    named = [name for name, entry in DETECTORS.items() if entry.kind == "peer"]
    assert named == [name for name in PEERS if find_spec(name)]
    kinds = [entry.kind for entry in DETECTORS.values()]
    assert kinds[-3:] == ["anchor"] * 3


def test_a_name_that_is_taken_and_the_papers_rows_are_closed():
    from rmetric.detectors.registry import register

    before = list(DETECTORS)
    with pytest.raises(ValueError, match="'always' is registered already"):
        register({"always": DETECTORS["always"]})
    with pytest.raises(ValueError, match="those rows are closed"):
        register({"another": DETECTORS["always"]})
    assert list(DETECTORS) == before


@pytest.mark.parametrize("name", [n for n, e in DETECTORS.items() if e.kind == "peer"])
def test_a_peer_prints_and_writes_nothing_and_the_live_monitor_does_not_offer_it(
    name, tmp_path, monkeypatch, capfd
):
    monkeypatch.chdir(tmp_path)
    detector = DETECTORS[name].make(np.random.default_rng(0))
    for record in steps([3.0, 2.9] * 40 + [90.0, nan, inf] * 10):
        detector.update(record)
    assert list(tmp_path.iterdir()) == []
    assert capfd.readouterr() == ("", "")
    with pytest.raises(ValueError, match="unknown detector"):
        MonitorConfig(detectors=(name,))


@needs("trainpulse")
def test_trainpulse_says_what_its_own_monitor_says():
    from trainpulse import Monitor

    ours, theirs = TrainPulse(), Monitor()
    rng = np.random.default_rng(0)
    for step in range(1, 300):
        loss = float(2 + rng.normal() / 4) if step % 70 else 40.0
        norm, rate = (nan if step == 90 else step * 0.6), (1e-3 if step < 200 else 1e-5)
        record = Record(step=step, training_loss=loss, gradient_norm=norm, learning_rate=rate)
        alerts = theirs.log("loss", step, loss)
        alerts += theirs.log("grad_norm", step, norm)
        alerts += theirs.log("lr", step, rate)
        counted = [alert for alert in alerts if alert.detector != "plateau"]
        assert ours.update(record).alarm == bool(counted)
        assert all(alert.message in ours.reason for alert in counted)
    assert {alert.detector for alert in theirs.alerts} >= {
        "loss_spike", "gradient", "learning_rate", "nan_detector",
    }  # fmt: skip


@needs("trainscope")
def test_trainscope_says_what_its_default_detector_says():
    from trainscope.core.config import TrainScopeConfig
    from trainscope.core.detectors import make_detector

    ours, theirs = TrainScope(), make_detector(TrainScopeConfig())
    draw = np.random.default_rng(0).normal(size=200)
    alarms = 0
    for record in steps([2 + float(x) / 10 + (i > 150) for i, x in enumerate(draw)]):
        found = theirs.update(record.training_loss)
        assert ours.update(record).alarm == (found is not None)
        alarms += ours.alarm
    assert alarms > 0
    assert ours.score == ours.score  # a number
    assert not ours.update(Record(step=999, training_loss=nan)).alarm


@needs("trainproof")
def test_trainproof_gives_the_verdict_on_the_rows_so_far():
    from trainproof.epoch import check_records

    ours, rows, due, failed = TrainProof(), [], STRIDE, []
    values = [3 - 0.01 * i for i in range(150)] + [6.0] * 40
    for record in steps(values):
        rows.append({"step": float(record.step), "loss": record.training_loss})
        ours.update(record)
        if len(rows) == due:
            due += max(STRIDE, len(rows) // PART)
            verdict = check_records([dict(row) for row in rows])["verdict"]
            assert ours.alarm == (verdict == "FAIL")
            if ours.alarm:
                failed.append(record.step)
    assert failed[-1] >= 160
    assert "diverging" in ours.reason
