"""Fine-tunings under faults: how they are drawn, trained and judged."""

import hashlib
import json
from dataclasses import asdict, replace
from math import nan

import pytest

from studies.fault_lab.rescue import fine_tuning
from studies.fault_lab.rescue import fine_tuning_run as one_run
from studies.fault_lab.rescue.fine_tuning_run import FAULTS, Run, draw, train


def test_the_sealed_runs_are_those_of_the_seal():
    seal = json.loads((fine_tuning.RESULTS / "fine_tuning_seal.json").read_bytes())
    # Ten digits: the last ones of a rate depend on the processor.
    drawn = [draw(seed) for seed in fine_tuning.SEALED_SEEDS]
    runs = json.dumps([asdict(run) | {"rate": f"{run.rate:.10g}"} for run in drawn]).encode()
    assert hashlib.sha256(runs).hexdigest() == seal["runs_sha256_of_ten_digits"]


def found(rescue, *, nothing=3.0, twin=2.0, held=False, step=60):
    of_twin = {"loss": twin, "losses": {"40": 2.2}, "digest": "a"}
    return {
        "twin": of_twin, "idle": {"digest": "a"}, "nothing": {"loss": nothing},
        "rescue": {"loss": rescue, "held": held, "step": step},
    }  # fmt: skip


@pytest.mark.parametrize(
    ("row", "end", "harm"),
    [
        (found(2.04), "averted", 0.0),
        (found(2.06), "lost", 0.0),
        (found(3.5), "lost", 0.5),
        (found(2.24, held=True, step=40), "held", 0.0),
        (found(2.24), "lost", 0.0),
        (found(9.0, held=True, step=0), "held", 0.0),
        (found(2.0, nothing=1.9), "averted", 0.0),
        (found(nan, nothing=nan), "lost", 0.0),
    ],
)
def test_a_run_is_judged_beside_its_twin_and_the_run_without_rescue(row, end, harm):
    assert fine_tuning.ending(row) == end
    assert fine_tuning.harm(row) == pytest.approx(harm)
    assert fine_tuning.failed(row) == (row["nothing"]["loss"] != 1.9)


SMALL = Run(
    seed=3, steps=20, rate=1e-3, warm_up=3, shape="cosine", scheduler=True, fault="rate",
    severity=50.0, onset=8, duration=0,
)  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize("fault", FAULTS)
def test_every_fault_changes_the_run_and_nothing_before_its_onset(fault, monkeypatch):
    monkeypatch.setattr(one_run, "PRETRAINING", 3)
    one_run.base.cache_clear()
    run = replace(SMALL, fault=fault, severity=FAULTS[fault][-1])
    twin = train(run, disturbed=False, rescued=False)
    assert train(replace(run, onset=21), disturbed=True, rescued=False).digest == twin.digest
    assert train(run, disturbed=True, rescued=False).digest != twin.digest
    idle = train(run, disturbed=False, rescued=True)
    assert (idle.digest, idle.decisions, idle.held) == (twin.digest, {}, False)
    one_run.base.cache_clear()
