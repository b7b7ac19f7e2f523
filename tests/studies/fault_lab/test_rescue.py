"""Rescue in the laboratory: policies on its runs, the demonstration, and fine-tunings."""

import hashlib
import json
import re
from dataclasses import asdict, replace
from functools import partial
from math import nan
from pathlib import Path

import pytest
import torch

from rmetric.rescue.policy import Decision
from studies.fault_lab.rescue import campaign, demo, fine_tuning
from studies.fault_lab.rescue import fine_tuning_run as one_run
from studies.fault_lab.rescue.__main__ import RESULTS
from studies.fault_lab.rescue.fine_tuning_run import SEVERITIES, Run, draw, train
from studies.fault_lab.rescue.policies import NOTHING, POLICIES, RESCUE, Rescue
from studies.fault_lab.rescue.runner import (
    GO_ON,
    Treated,
    Treatment,
    train_control,
    train_untreated,
)
from studies.fault_lab.rescue.tables import aims, by_fault, harm, judged, policies
from studies.fault_lab.spec import LabSpec
from tests.studies.fault_lab import training

# -- policies: shared steps are those that would be trained, time goes on

CONTROL = LabSpec(run_id="seed007", seed=7, architecture="llama", total_steps=70)
ONSET = 45
branch = partial(training.branch, CONTROL, onset=ONSET)


class Scripted(Treatment):
    """Goes back to step 40 after the steps `at`, in turn, and leaves out the data of `skip`.

    With `live` every step is trained, also those that are known already.
    """

    def __init__(self, at=(), live=False, skip=(), action="go_back"):
        self.at, self.live, self.skip, self.action = list(at), live, list(skip), action
        self.seen = []

    @property
    def changes_steps(self):
        return self.live and len(self.seen) >= ONSET

    def snapshot_due(self, step):
        return step == 40

    def after(self, record):
        self.seen.append(record)
        if self.at and record.step == self.at[0]:
            self.at.pop(0)
            skip = self.skip.pop(0) if self.skip else None
            return Decision(action=self.action, to=40, skip=skip, reason="scripted")
        return GO_ON


def treat(*arguments):
    return Treated(*arguments).run()


@pytest.fixture(scope="module")
def control():
    torch.set_num_threads(1)
    return train_control(CONTROL, {ONSET, 56})


@pytest.fixture(scope="module")
def flipped(control):
    """A run that can be treated."""
    spec = branch("SIGN_FLIP", 10.0, duration_steps=4)
    return control, spec, train_untreated(control, spec)


@pytest.mark.parametrize("at", [(), (48,), (50,), (46, 42), (48, 69)])
def test_shared_steps_are_those_that_would_be_trained(flipped, at):
    shared, trained, untreated = Scripted(at), Scripted(at, live=True), flipped[2]
    outcome = treat(*flipped, shared)
    assert outcome == treat(*flipped, trained)
    assert shared.seen == trained.seen
    assert (outcome == untreated.outcome) == (not at)
    assert untreated.outcome.above > 0


def test_a_return_after_the_fault_ends_as_the_twin_bit_for_bit_and_a_hold_as_the_snapshot(flipped):
    ended = treat(*flipped, Scripted((50,)))
    assert (ended.end, ended.step, ended.above) == ("finished", 70, 0.0)
    # 10 steps again, and the one that was thrown away when the alarm was known.
    assert ended.extra == 11
    ended = treat(*flipped, Scripted((48,), action="hold"))
    assert (ended.end, ended.step, ended.above) == ("held", 40, 0.0)


def test_time_goes_on_when_steps_are_repeated(control):
    spec, scripted = branch("GRADIENT_SCALE_ALL", 1000.0, duration_steps=5), Scripted((46,))
    treat(control, spec, train_untreated(control, spec), scripted)
    usual = {record.step: record.gradient_norm for record in control.lineage.records}
    large = [
        record.step for record in scripted.seen if record.gradient_norm > 100 * usual[record.step]
    ]
    # Executed 45 and 46, then 47 is thrown away; 48 and 49 are steps 41 and 42.
    assert large == [45, 46, 41, 42]


def test_data_that_are_left_out_are_not_used_again(control, flipped):
    scripted = Scripted((50, 50), skip=[None, (46, 55)])
    assert treat(*flipped, scripted).above != 0.0
    once, again = scripted.seen[50:60], scripted.seen[60:]
    assert [r.step for r in (*once, *again)] == [*range(41, 51), *range(41, 71)]
    known = control.lineage.records[40:50]
    assert once == known
    assert again[:5] == known[:5]
    assert again[5].training_loss != known[5].training_loss


def test_a_fault_to_the_end_lasts_however_often_steps_are_repeated(control):
    spec, scripted = branch("LR_RUNAWAY", 1.05), Scripted((60,))
    untreated = train_untreated(control, spec)
    repeated = treat(control, spec, untreated, scripted)
    assert (repeated.extra, repeated.step) == (21, 70)
    # The rate grows with each computed step, 21 of them more.
    ratio = scripted.seen[-1].update_norm / untreated.lineage.records[-1].update_norm
    assert ratio > 1.05**10


@pytest.mark.parametrize("name", [name for name, policy in POLICIES.items() if policy.make])
def test_every_policy_runs_on_a_fault_that_ends_with_nan(control, name):
    spec = branch("INFINITE_GRADIENT", 1.0)
    untreated = train_untreated(control, spec)
    assert untreated.outcome.end == "not_finite"
    ended = treat(control, spec, untreated, POLICIES[name].make())
    assert ended.end in ("finished", "not_finite")
    if name in (RESCUE, "leave_out_non_finite", "leave_out_outliers"):
        assert ended.end == "finished"


def test_rescue_ignores_a_control_and_the_sealed_seeds_are_those_of_the_seal(control):
    assert campaign.first_action(control, Rescue()) is None
    seal = json.loads((RESULTS / "rescue_seal.json").read_bytes())
    groups = campaign.sealed()
    assert campaign.digest_of(groups) == seal["specs_sha256"]
    assert len(groups) == 100
    seeds = {group[0].seed for group in groups}
    assert not seeds & {group[0].seed for group in campaign.development()}


def row(run, policy, above, end="finished", **more):
    entry = dict(
        run=run, seed=1, fault="SIGN_FLIP", severity=3.0, onset=150, duration=100, benign=False,
        failed=True, policy=policy, end=end, step=400, above=above, executed=260, extra=10,
        actions=1, first=None, last=None,
    )  # fmt: skip
    return entry | more


def test_tables_count_what_the_rows_say():
    rows = [
        row("a", NOTHING, 0.3),
        row("a", RESCUE, 0.05),
        row("b", NOTHING, None, end="not_finite"),
        row("b", RESCUE, 0.01, end="held"),
        row("c", NOTHING, 0.3),
        row("c", RESCUE, 0.051),
        row("d", NOTHING, 0.01, failed=False, actions=0, extra=0),
        row("d", RESCUE, 0.04, failed=False, extra=13),
        {"run": "e", "seed": 2, "policy": NOTHING, "control": {RESCUE: None, "palm": 200}},
    ]
    assert [*judged(rows).outcome[1:6:2]] == ["averted", "held", "lost"]
    table = policies(rows, [NOTHING, RESCUE], name="x", title="x")
    assert table.rows[1][1:5] == (3, 1, 1, 1)
    assert table.rows[-1][1:5] == (3, 3, 0, 0)  # the fault passes
    assert table.rows[0][7].point == pytest.approx(1 / 3)
    of_rescue = harm(rows, [NOTHING, RESCUE]).rows[1]
    assert of_rescue[1:5] == ("0 of 1", 1, 1, 0)
    assert of_rescue[5] == pytest.approx(0.03)
    assert of_rescue[7] == pytest.approx(100 * 13 / 260)
    reached = {aim: good for aim, _, good in aims(rows).rows}
    assert reached["averted, of the failing runs: at least 85 %"] == "missed"
    assert reached["none of them worse by more than 0.05 nat"] == "reached"
    assert by_fault(rows, [NOTHING, RESCUE]).rows == [("SIGN_FLIP", 3, "0 / 0 / 3", "1 / 1 / 1")]


# -- the demonstration, run for real on a short training, and what is committed of it

BEGIN, DURATION = 71, 6


@pytest.fixture(scope="module")
def results():
    of = training.control("llama", seed=3, steps=100)
    spec = training.branch(of, "LR_SPIKE", 25.0, BEGIN, duration_steps=DURATION)
    panel = demo.Panel("rate", "Rate fault", spec.run_id, "leave_out_outliers", "skip")
    return demo.train([(panel, of, spec)], num_processes=1)


def test_the_files_are_there_and_what_is_printed_is_what_they_hold(results, tmp_path, capsys):
    demo.show(results, tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "rescue.json", "rescue.pdf", "rescue.png",
    ]  # fmt: skip
    [panel] = json.loads((tmp_path / "rescue.json").read_bytes())["panels"]
    printed = capsys.readouterr().out.splitlines()
    assert f"loss of the twin {panel['twin']['final_loss']:.3f} nats" in printed[0]
    assert f"steps {BEGIN} to {BEGIN + DURATION - 1};" in printed[0]
    for line, (label, run) in zip(printed[1:4], panel["runs"].items(), strict=True):
        found = re.search(rf"{label} +(\S+) nats, +(\d+) extra steps", line)
        assert found is not None, line
        assert float(found[1]) == pytest.approx(run["above"], abs=6e-4)
        assert int(found[2]) == run["extra"]
    assert printed[4].strip() == panel["runs"]["rescue"]["actions"][0][3]
    assert printed[4].strip().startswith("went back from ")


def test_a_run_without_an_end_is_lost(results):
    [panel] = results["panels"]
    stopped = panel["runs"]["rescue"] | {"end": "not_finite", "step": 90}
    assert demo.outcome_words(stopped) == "lost: stopped at step 90"
    assert "not finite" in demo.outcome_words(stopped | {"above": None})
    drawn = demo.demo_figure([panel | {"runs": panel["runs"] | {"rescue": stopped}}])
    assert "lost" in [text.get_text() for text in drawn.axes[0].texts]


def test_numbers_that_are_not_there_are_an_error_that_names_them(tmp_path, capsys):
    assert demo.main(["--redraw", "--out", str(tmp_path)]) == 2
    assert "rescue.json" in capsys.readouterr().err


def test_the_committed_picture_is_drawn_from_the_committed_numbers():
    folder = Path(__file__).resolve().parents[3] / "docs" / "figures"
    committed = json.loads((folder / "rescue.json").read_bytes())
    assert [panel["run"] for panel in committed["panels"]] == [panel.run for panel in demo.PANELS]
    assert demo.text_of(committed) == (folder / "rescue.json").read_text(encoding="utf-8")
    assert (folder / "rescue.png").exists()


# -- fine-tunings under faults: how they are drawn, trained and judged


def test_the_sealed_runs_are_those_of_the_seal():
    seal = json.loads((fine_tuning.RESULTS / "fine_tuning_seal.json").read_bytes())
    # Ten digits: the last ones of a rate depend on the processor.
    drawn = [draw(seed) for seed in fine_tuning.SEALED_SEEDS]
    runs = json.dumps([asdict(run) | {"rate": f"{run.rate:.10g}"} for run in drawn]).encode()
    assert hashlib.sha256(runs).hexdigest() == seal["runs_sha256_of_ten_digits"]


def tuned(rescue, *, nothing=3.0, twin=2.0, held=False, step=60):
    of_twin = {"loss": twin, "losses": {"40": 2.2}, "digest": "a"}
    return {
        "twin": of_twin, "idle": {"digest": "a"}, "nothing": {"loss": nothing},
        "rescue": {"loss": rescue, "held": held, "step": step},
    }  # fmt: skip


@pytest.mark.parametrize(
    ("row", "end", "harm"),
    [
        (tuned(2.04), "averted", 0.0),
        (tuned(2.06), "lost", 0.0),
        (tuned(3.5), "lost", 0.5),
        (tuned(2.24, held=True, step=40), "held", 0.0),
        (tuned(2.24), "lost", 0.0),
        (tuned(9.0, held=True, step=0), "held", 0.0),
        (tuned(2.0, nothing=1.9), "averted", 0.0),
        (tuned(nan, nothing=nan), "lost", 0.0),
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


@pytest.mark.parametrize("fault", SEVERITIES)
def test_every_fault_changes_the_run_and_nothing_before_its_onset(fault, monkeypatch):
    monkeypatch.setattr(one_run, "PRETRAINING", 3)
    one_run.base.cache_clear()
    run = replace(SMALL, fault=fault, severity=SEVERITIES[fault][-1])
    twin = train(run, disturbed=False, rescued=False)
    assert train(replace(run, onset=21), disturbed=True, rescued=False).digest == twin.digest
    assert train(run, disturbed=True, rescued=False).digest != twin.digest
    idle = train(run, disturbed=False, rescued=True)
    assert (idle.digest, idle.decisions, idle.held) == (twin.digest, {}, False)
    one_run.base.cache_clear()
