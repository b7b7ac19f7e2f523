"""Laws of the rescue policy, on streams of events."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rmetric.detectors.calibrated import CalibratedDetector
from rmetric.records import Record
from rmetric.rescue.judgement import evidence_of
from rmetric.rescue.policy import KINDS, REMEDIES, Evidence, RescueConfig, RescuePolicy


class Simulated:
    """A run that obeys the policy; checks what holds at every step.

    Args:
        policy: the policy.
        bad: executed step -> kind of evidence, delay to it in steps, seen before the update.
        back: executed step -> whether the loss is back.
    """

    def __init__(self, policy, bad, steps=400, back=lambda executed: None):
        self.policy, self.bad, self.steps, self.back = policy, bad, steps, back
        self.step = self.executed = 0
        self.snapshots = {0} if policy.snapshot_due(0) else set()
        self.decisions = []
        self.trained_on_non_finite = False
        for dropped in policy.snapshot_taken(0):
            self.snapshots.discard(dropped)

    def run(self, most=20_000):
        while self.step < self.steps and self.executed < most:
            self.executed += 1
            kind, delay, early = self.bad.get(self.executed, (None, 0, False))
            at_hand = self.step + 1
            evidence = None
            if kind is not None:
                since = max(1, at_hand - delay)
                worker = 3 if kind == "worker" else None
                evidence = Evidence(step=at_hand, since=since, kind=kind, words=kind, worker=worker)
            decision = self.policy.before_update(at_hand, evidence if early else None)
            if decision.action == "go_on" and early and kind == "not_finite":
                self.trained_on_non_finite = True
            if decision.action in ("go_on", "leave_out"):
                self.step = at_hand
                left_out = decision.action == "leave_out"
                if left_out:
                    self.decisions.append(decision)
                seen = None if early or left_out else evidence
                back = self.back(self.executed)
                decision = self.policy.after_step(self.step, seen, loss_recovered=back)
                if self.step == self.steps and decision.action == "go_on":
                    decision = self.policy.at_end(self.step, loss_recovered=back)
            if decision.action in ("go_back", "hold"):
                assert decision.to in self.snapshots
                assert evidence is None or decision.to < evidence.since
                assert decision.skip is None or decision.skip[1] <= at_hand + 4096
                self.decisions.append(decision)
                self.snapshots = {s for s in self.snapshots if s <= decision.to}
                self.step = decision.to
                if decision.action == "hold":
                    return self
            elif self.policy.snapshot_due(self.step):
                self.snapshots.add(self.step)
                for dropped in self.policy.snapshot_taken(self.step):
                    self.snapshots.remove(dropped)
        return self

    @property
    def tries(self):
        return [d for d in self.decisions if d.action == "go_back"]


streams = st.dictionaries(
    st.integers(1, 600),
    st.tuples(st.sampled_from(KINDS), st.integers(0, 60), st.booleans()),
    max_size=150,
)
configs = st.builds(
    RescueConfig,
    every=st.integers(1, 25),
    probation=st.integers(0, 40),
    far=st.integers(40, 100),
    left_out=st.integers(1, 5),
    budget=st.integers(1, 200),
    share=st.floats(0, 0.5),
    quiet=st.integers(1, 40),
    observe=st.integers(1, 40),
    remedies=st.sets(st.sampled_from(REMEDIES)),
)


@given(streams, configs)
def test_the_run_ends_within_its_budget_a_held_one_stays_so_and_its_state_decides_alike(
    bad, config
):
    """That it goes back before the evidence to a kept snapshot is asserted at every decision."""
    run = Simulated(RescuePolicy(config), bad).run()
    assert run.executed < 20_000
    repeated = run.policy.state.repeated
    assert repeated <= config.budget + config.share * run.steps
    again, held = RescuePolicy(config), run.policy.state.held
    again.load_state_dict(run.policy.state_dict())
    step = run.step + 1
    evidence = Evidence(step=step, since=run.step)
    assert again.after_step(step, evidence) == run.policy.after_step(step, evidence)
    if held:
        assert run.policy.after_step(step, Evidence(step=step, since=step)).action == "hold"


@given(streams, configs)
def test_a_gradient_that_is_not_finite_is_never_used(bad, config):
    allowed = replace(config, remedies={*config.remedies, "leave_out"})
    assert not Simulated(RescuePolicy(allowed), bad).run().trained_on_non_finite


@given(configs)
def test_a_run_without_evidence_is_only_asked_for_snapshots(config):
    run = Simulated(RescuePolicy(config), {}).run()
    assert run.decisions == []
    assert run.executed == run.steps
    assert len(run.snapshots) <= config.probation // config.every + 5


@given(streams, configs, st.integers(60, 400))
def test_a_run_whose_loss_never_comes_back_is_held_unless_it_cannot_be(bad, config, steps):
    """A detector that is used to the fault by now is no reason to go on."""
    config = replace(config, remedies={*config.remedies, "hold", "retry"})
    run = Simulated(RescuePolicy(config), bad, steps, back=lambda executed: False).run()
    incident = run.policy.state.incident
    if run.tries and incident and min(run.policy.state.snapshots) < incident.onset:
        assert run.decisions[-1].action == "hold"
        assert run.policy.state.held


@given(streams, configs)
def test_a_loss_that_is_back_is_no_reason_to_go_back(bad, config):
    run = Simulated(RescuePolicy(config), bad, back=lambda executed: True).run()
    same = Simulated(RescuePolicy(config), bad).run()
    assert [d for d in run.decisions if "the loss is not back" in d.reason] == []
    assert len(run.tries) <= len(same.tries) + len(bad)


@pytest.mark.parametrize("kind", ["no_update", "not_finite"])
def test_a_loss_that_is_back_does_not_excuse_what_it_cannot_show(kind):
    bad = dict.fromkeys(range(203, 2000), (kind, 0, False))
    run = Simulated(RescuePolicy(), bad, back=lambda executed: True).run()
    assert run.decisions[-1].action == "hold"


def test_data_are_left_out_by_stretches_that_double_to_a_bound():
    bad = dict.fromkeys(range(8, 2000, 8), ("data", 2, False))
    run = Simulated(RescuePolicy(RescueConfig(every=100, probation=0, far=100)), bad).run()
    ends = [d.skip[1] - d.skip[0] for d in run.tries if d.skip]
    assert ends[:2] == [8, 14]
    assert ends == sorted(ends)
    assert len(ends) > 12
    assert ends[-1] == 4098


def test_snapshots_further_apart_leave_room_for_some_tries():
    policy = RescuePolicy()
    policy.state.every = 190
    assert (policy.every, policy.probation) == (190, 190)
    run = Simulated(policy, {700: ("unknown", 0, False)}, steps=900).run()
    assert [d.to for d in run.tries] == [380]
    assert run.decisions[-1].action == "go_back"


def test_a_worker_is_left_out_and_comes_back():
    policy = RescuePolicy()
    run = Simulated(policy, {203: ("worker", 2, False)})
    run.run(most=203)
    assert run.tries[-1].workers == (3,) == policy.workers_out
    run.run()
    assert policy.workers_out == ()


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"remedies": "retry"}, "remedies is 'retry': it must be a collection of names"),
        ({"every": True}, "every is True: it must be a whole number from 1"),
        ({"every": 0}, "every is 0"),
        ({"probation": 90}, "probation is 90 and far is 80"),
        ({"probation": 2.5}, "probation is 2.5: it must be a whole number from 0"),
        ({"far": "80"}, "far is '80': it must be a whole number from 0"),
        ({"most_out": -1}, "most_out is -1: it must be a whole number from 0"),
        ({"share": float("nan")}, "share is nan"),
        ({"remedies": {"pray"}}, "pray"),
    ],
)
def test_a_setting_that_cannot_be_is_named(wrong, named):
    with pytest.raises(ValueError, match=named):
        RescueConfig(**wrong)


@pytest.mark.parametrize(("rise", "since"), [(1.25, {None}), (1.4, {None, 6})])
def test_before_there_is_a_baseline_a_rise_that_healthy_runs_do_not_have_is_evidence(rise, since):
    detector, found = CalibratedDetector(), []
    for step in range(1, 9):
        loss = (2.0 + 0.01 * (step % 3)) * (rise if step > 5 else 1.0)
        detector.update(Record(step=step, training_loss=loss))
        found.append(evidence_of(detector, step))
    assert {each and each.since for each in found} == since


@pytest.mark.parametrize(
    ("usual", "factors", "odd"),
    [
        ((1.0, 1.01, 1.02, 1.03), {2: 0.0}, 2),
        ((1.0, 1.01, 1.02, 1.03), {0: 0.0, 1: 0.0, 3: 0.0}, None),
        *(((1.0, 1.2), {w: f}, w) for w in (0, 1) for f in (0.0, 0.01, 100.0)),
    ],
)
def test_the_worker_that_left_the_others_and_its_own_past_is_the_odd_one(usual, factors, odd):
    """Not the only one that is alive."""
    detector = CalibratedDetector()
    for step in range(1, 90):
        norms = [usual[0] + 0.01 * (step % 3), *usual[1:]]
        for worker, factor in factors.items() if step > 60 else ():
            norms[worker] *= factor
        record = Record(step=step, training_loss=2.0, gradient_norm=1.0)
        record.worker_gradient_norms = tuple(norms)
        record.worker_gradient_cosines = (0.9,) * len(norms)
        detector.update(record)
    assert detector.odd_worker == odd


def test_two_workers_that_oppose_each_other_accuse_nobody():
    detector = CalibratedDetector()
    for step in range(1, 90):
        record = Record(step=step, training_loss=2.0, gradient_norm=0.6 if step > 60 else 1.0)
        record.worker_gradient_norms = (1.0, 1.0)
        record.worker_gradient_cosines = (0.6, -0.6) if step > 60 else (0.9, 0.9)
        detector.update(record)
    assert detector.alarm
    assert detector.odd_worker is None
    assert "both workers" in detector.reason
