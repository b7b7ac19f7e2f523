"""Policies in the laboratory: shared steps are those that would be trained, time goes on."""

import json
from dataclasses import replace

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import torch

from rmetric.rescue.policy import Decision
from studies.fault_lab.rescue import campaign
from studies.fault_lab.rescue.__main__ import RESULTS
from studies.fault_lab.rescue.policies import NOTHING, POLICIES, RESCUE, Rescue
from studies.fault_lab.rescue.runner import (
    GO_ON,
    Treated,
    Treatment,
    train_control,
    train_untreated,
)
from studies.fault_lab.rescue.tables import aims, by_fault, harm, outcome, policies
from studies.fault_lab.spec import LabSpec

CONTROL = LabSpec(run_id="seed007", seed=7, architecture="llama", total_steps=70)
ONSET = 45


def branch(fault, severity, **more):
    run_id = f"seed007_{fault}"
    return replace(CONTROL, run_id=run_id, fault=fault, severity=severity, onset_step=ONSET, **more)


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
    spec = branch("SIGN_FLIP", 10.0, duration_steps=4)
    return spec, train_untreated(control, spec)


@pytest.mark.parametrize("at", [(), (48,), (50,), (46, 42), (48, 69)])
def test_shared_steps_are_those_that_would_be_trained(control, flipped, at):
    spec, untreated = flipped
    shared, trained = Scripted(at), Scripted(at, live=True)
    outcome = treat(control, spec, untreated, shared)
    assert outcome == treat(control, spec, untreated, trained)
    assert shared.seen == trained.seen
    assert (outcome == untreated.outcome) == (not at)
    assert untreated.outcome.above > 0


def test_a_return_after_the_fault_ends_as_the_twin_bit_for_bit(control, flipped):
    spec, untreated = flipped
    ended = treat(control, spec, untreated, Scripted((50,)))
    assert ended.above == 0.0
    assert (ended.end, ended.step) == ("finished", 70)
    # 10 steps again, and the one that was thrown away when the alarm was known.
    assert ended.extra == 11


def test_time_goes_on_when_steps_are_repeated(control):
    spec = branch("GRADIENT_SCALE_ALL", 1000.0, duration_steps=5)
    untreated = train_untreated(control, spec)
    scripted = Scripted((46,))
    treat(control, spec, untreated, scripted)
    usual = {record.step: record.gradient_norm for record in control.lineage.records}
    large = [
        record.step for record in scripted.seen if record.gradient_norm > 100 * usual[record.step]
    ]
    # Executed 45 and 46, then 47 is thrown away; 48 and 49 are steps 41 and 42.
    assert large == [45, 46, 41, 42]


def test_data_that_are_left_out_are_not_used_again(control, flipped):
    spec, untreated = flipped
    scripted = Scripted((50, 50), skip=[None, (46, 55)])
    ended = treat(control, spec, untreated, scripted)
    assert ended.above != 0.0
    once, again = scripted.seen[50:60], scripted.seen[60:]
    assert [r.step for r in (*once, *again)] == [*range(41, 51), *range(41, 71)]
    known = control.lineage.records[40:50]
    assert once == known
    assert again[:5] == known[:5]
    assert again[5].training_loss != known[5].training_loss


def test_a_held_run_has_the_weights_of_the_snapshot(control, flipped):
    spec, untreated = flipped
    ended = treat(control, spec, untreated, Scripted((48,), action="hold"))
    assert (ended.end, ended.step, ended.above) == ("held", 40, 0.0)


def test_a_fault_to_the_end_lasts_however_often_steps_are_repeated(control):
    spec = branch("LR_RUNAWAY", 1.05)
    untreated = train_untreated(control, spec)
    scripted = Scripted((60,))
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


def test_rescue_ignores_a_control(control):
    assert campaign.first_action(control, Rescue()) is None


def test_the_sealed_seeds_are_those_of_the_seal():
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
    assert [outcome(one) for one in rows[1:6:2]] == ["averted", "held", "lost"]
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
