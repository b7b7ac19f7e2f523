"""State machine of the supervisor: laws that hold for every sequence of events."""

from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rmetric.guard.layout import Layout
from rmetric.guard.supervisor import Settings
from rmetric.guard.supervisor.allocation import ShrinkData, allot
from rmetric.guard.supervisor.core import (
    Core,
    DropGpus,
    EndProcesses,
    Finish,
    JournalState,
    RequestCheckpoint,
    SetTimer,
    StartLaunch,
    WriteJournal,
)  # fmt: skip
from rmetric.guard.supervisor.launch_failure import LaunchFailure

POOL = {"": (0, 1, 2, 3)}


def core(pool=POOL, state=None, again=False, **settings):
    layout = Layout(data=sum(map(len, pool.values())), accumulation=3)
    plan = ShrinkData(layout, layout.global_batch)
    rng = SimpleNamespace(random=lambda: 0.0)
    return Core(Settings(**settings), pool, plan, rng=rng, state=state, again=again)


def started(pool=POOL, **settings):
    machine = core(pool, **settings)
    machine.supervisor_started()
    (_note, launch) = machine.processes_ended(0.0)
    assert isinstance(launch, StartLaunch)
    return machine


def failed(words="boom 7", **more):
    return LaunchFailure(kind="exception", words=words, **more)


def kinds(actions):
    return [type(action) for action in actions]


def verdict(machine, gpu, level="fatal", action="drain"):
    return machine.gpu_verdict(5.0, gpu=("", gpu), level=level, action=action, words="Xid 79")


def fails(machine, time, words="boom 7", **failure):
    """A launch that fails, and what follows when its processes are ended."""
    machine.launch_exited(time, failure=failed(words, **failure))
    return machine.processes_ended(time)


def test_a_failure_ends_all_processes_and_then_waits_before_it_starts_again():
    machine = started(backoff_seconds=4.0)
    assert kinds(machine.launch_exited(2.0, failure=failed())) == [WriteJournal, EndProcesses]
    note, wake = machine.processes_ended(3.0)
    assert (note.seconds, wake.time) == (4.0, 7.0)
    assert machine.timer_fired(6.9) == []
    (launch,) = machine.timer_fired(7.0)
    assert launch.number == 2


STEPS = [("step_reached", n, 0) if n % 3 == 2 else None for n in range(20)]


@pytest.mark.parametrize(
    ("before", "waits"),
    [
        (STEPS, [1.0, 2.0, *[0.0, 2.0, 4.0] * 6]),
        ([("step_reached", 40, 0)] * 4, [0.0, 2.0, 4.0, 8.0]),  # the same again is not progress
        ([None] * 10, [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 300.0]),
    ],
    ids=["steps", "same", "cap"],
)
def test_waits_double_up_to_a_cap_and_are_counted_anew_after_progress(before, waits):
    machine = started(backoff_seconds=1.0)
    found = []
    for n, event in enumerate(before):
        if event:
            getattr(machine, event[0])(*event[1:])
        found.append(fails(machine, float(n))[0].seconds)
        machine.timer_fired(n + 1e3)
    assert found[: len(waits)] == waits


def test_a_fatal_gpu_is_saved_dropped_and_replaced_by_a_smaller_layout():
    machine = started()
    note, drop, ask, _wake = verdict(machine, 1)
    assert drop == DropGpus((("", 1),), "Xid 79")
    assert note.failure.gpu == ("", 1)
    assert (ask.fatal, ask.stop) == (True, True)
    assert kinds(machine.checkpoint_durable(6.0)) == [SetTimer]
    assert kinds(machine.timer_fired(11.0)) == [EndProcesses]
    assert machine.processes_ended(11.0)[0].seconds == 0.0
    _plan, launch = machine.timer_fired(11.0)
    assert launch.allocation.gpus == {"": (0, 2, 3)}
    assert launch.allocation.layout == Layout(data=3, accumulation=4)


def test_it_does_not_wait_for_a_checkpoint_forever():
    machine = started(save_seconds=30.0)
    verdict(machine, 1)
    assert machine.timer_fired(34.9) == []
    assert kinds(machine.timer_fired(35.0)) == [EndProcesses]


def test_a_fatal_verdict_on_an_unused_gpu_drops_it_and_leaves_the_launch_running():
    machine = core(pool={"": (0, 1, 2, 3)})
    machine.plan = ShrinkData(Layout(data=2), batch=2)  # 4 copies do not divide a batch of 2
    machine.supervisor_started()
    *_, launch = machine.processes_ended(0.0)
    assert launch.allocation.gpus == {"": (0, 1)}
    assert verdict(machine, 3) == [DropGpus((("", 3),), "Xid 79")]
    assert machine.phase == "running"
    assert machine.pool == {"": (0, 1, 2)}
    assert verdict(machine, 3) == []  # it is dropped once


def test_a_risk_asks_for_a_checkpoint_and_goes_on():
    machine = started()
    assert verdict(machine, 1, "risk", "watch") == [RequestCheckpoint("risk", "Xid 79")]
    assert machine.checkpoint_requested(source="alarm", words="a spike") == [
        RequestCheckpoint("alarm", "a spike")
    ]
    assert machine.phase == "running"


def test_an_application_error_restarts_with_the_same_gpus():
    machine = started()
    actions = verdict(machine, 1, "fatal", "restart_application")
    assert kinds(actions) == [WriteJournal, RequestCheckpoint, SetTimer]
    machine.launch_exited(6.0)
    machine.processes_ended(6.0)
    (launch,) = machine.timer_fired(1e9)
    assert launch.allocation.gpus == POOL


def test_the_same_failure_at_once_twice_is_enough():
    machine = started()
    lasting = {"code": 1, "rank": 0, "lasting": True}
    fails(machine, 1.0, "no file data-1.bin", **lasting)
    machine.timer_fired(1e3)
    (finish,) = fails(machine, 1001.0, "no file data-2.bin", **lasting)
    assert finish == Finish("gave up", "repeated immediate failure: no file data-2.bin", 1)


def test_what_can_pass_by_itself_is_tried_up_to_the_limit():
    machine = started(max_restarts=2)
    for n in range(3):
        actions = fails(machine, float(n), "OSError: [Errno 28] No space left on device", code=1)
        machine.timer_fired(n + 1e3)
    words = "disk full: 2 restarts in a row failed, the last: OSError: [Errno 28] No space"
    assert actions == [Finish("gave up", f"{words} left on device", 1)]


@pytest.mark.parametrize(("ends", "outcome", "code"), [("unsaved", "not saved", 5),
                                                       ("held", "held", 6)])  # fmt: skip
def test_a_training_whose_last_steps_are_not_saved_or_that_is_held_is_not_restarted(
    ends, outcome, code
):
    machine = started()
    assert kinds(machine.launch_exited(9.0, **{ends: "why"})) == [EndProcesses]
    assert machine.processes_ended(9.0) == [Finish(outcome, "why", code)]
    again = core(state=JournalState(launches=1, outcome=outcome))
    assert kinds(again.supervisor_started()) == [EndProcesses]


@pytest.mark.parametrize(
    ("second", "step"),
    [({"words": "something else"}, 0), ({"rank": 1}, 0), ({"code": -9}, 0), ({"lasting": False}, 0),
     ({}, 1)],
)  # fmt: skip
def test_another_failure_one_that_may_pass_or_one_after_a_step_is_tried_again(second, step):
    machine = started()
    lasting = {"code": 1, "rank": 0, "lasting": True}
    fails(machine, 1.0, **lasting)
    machine.timer_fired(1e3)
    machine.step_reached(step=step, resumed=0)
    assert isinstance(fails(machine, 1001.0, **lasting | second)[-1], SetTimer)


def test_the_gpu_of_a_rank_that_fails_thrice_in_a_row_is_dropped():
    machine = started(suspect_after=3)
    dropped = []
    for n, gpu in enumerate([2, 1, 2, 2, 2]):
        machine.step_reached(step=n + 1, resumed=0)
        dropped += [a for a in fails(machine, float(n), gpu=("", gpu)) if isinstance(a, DropGpus)]
        machine.timer_fired(float(n) + 1e6)
    assert [drop.gpus for drop in dropped] == [(("", 2),)]


TWO_NODES = {"a": (0, 1), "b": (0, 1)}


@pytest.mark.parametrize(
    ("pool", "failure"),
    [
        (POOL, {"code": -9, "rank": 1, "gpu": ("", 1)}),  # killed from outside
        ({"": (0,)}, {"gpu": ("", 0)}),  # the last GPU
        (TWO_NODES, {"rank": 0, "node": "a"}),  # nothing speaks against the rank's GPU
    ],
)
def test_no_gpu_or_node_is_dropped_without_evidence_or_rest(pool, failure):
    assert kinds(fails(started(pool, suspect_after=1), 1.0, **failure)) == [WriteJournal, SetTimer]


def test_a_node_that_cannot_be_reached_is_dropped():
    machine = started(TWO_NODES)
    machine.launch_exited(1.0, failure=failed(node="b"))
    drop, *_ = machine.processes_ended(1.0, unreachable=("b",))
    assert drop.gpus == (("b", 0), ("b", 1))
    assert machine.timer_fired(1e9)[-1].allocation.gpus == {"a": (0, 1)}


def test_without_gpus_left_it_gives_up_with_the_reason():
    machine = started({"": (0,)})
    verdict(machine, 0)
    machine.launch_exited(6.0)
    machine.processes_ended(6.0)
    (finish,) = machine.timer_fired(6.0)
    assert finish.outcome == "gave up"
    assert "0 GPUs are left" in finish.words


def test_a_signal_saves_ends_and_sets_the_exit_code():
    machine = started(stop_seconds=20.0)
    ask, wake = machine.signal_received(1.0, signal=15)
    assert (ask.source, ask.stop, wake.time) == ("signal", True, 21.0)
    assert kinds(machine.signal_received(2.0, signal=15)) == [EndProcesses]
    assert machine.processes_ended(3.0) == [Finish("stopped", "SIGTERM", 143)]


FAILED_FIRST = "a request asked for a stop, but it failed before its checkpoint was made"


@pytest.mark.parametrize("saved", [False, True])
@pytest.mark.parametrize("hangs", [False, True])
def test_a_failure_while_a_user_waits_for_it_to_stop_ends_it(hangs, saved):
    machine = started()
    assert machine.stop_requested() == []
    if saved:
        machine.checkpoint_durable(2.0)
    actions = (machine.launch_hung if hangs else machine.launch_exited)(2.0, failure=failed())
    assert kinds(actions) == [WriteJournal, EndProcesses]
    words = "a request asked for a stop" if saved else FAILED_FIRST
    assert machine.processes_ended(3.0) == [Finish("stopped", words, 4)]


@pytest.mark.parametrize("ended", [False, True])
def test_a_user_may_ask_it_to_stop_while_it_is_ended_or_waits(ended):
    machine = started(backoff_seconds=60.0)
    machine.launch_exited(1.0, failure=failed())
    if ended:
        machine.processes_ended(2.0)
    actions = machine.stop_requested() or machine.processes_ended(4.0)
    assert actions == [Finish("stopped", FAILED_FIRST, 4)]


def test_a_bad_gpu_does_not_outweigh_a_user_who_wants_it_to_stop():
    machine = started()
    machine.stop_requested()
    assert kinds(verdict(machine, 1)) == [WriteJournal, DropGpus, RequestCheckpoint, SetTimer]
    machine.checkpoint_durable(6.0)
    machine.launch_exited(6.0)
    assert machine.processes_ended(7.0) == [Finish("stopped", "a request asked for a stop", 4)]


def test_processes_that_stay_end_the_supervisor_rather_than_meet_a_second_launch():
    machine = started()
    machine.launch_exited(1.0, failure=failed())
    (finish,) = machine.processes_ended(2.0, left=1)
    assert finish.outcome == "gave up"


def test_finished_is_terminal():
    state = JournalState(launches=3, outcome="finished")
    assert core(state=state).supervisor_started()[0].outcome == "finished"
    assert kinds(core(state=state, again=True).supervisor_started()) == [EndProcesses]


@pytest.mark.parametrize(
    ("name", "value"), [("save_seconds", float("nan")), ("hang_seconds", None)]
)
def test_settings_are_checked(name, value):
    with pytest.raises(ValueError, match=name):
        Settings(**{name: value})


TIMES = st.floats(0.0, 500.0)
GPUS = st.tuples(st.sampled_from(["a", "b"]), st.integers(0, 3))
FAILURES = st.builds(
    LaunchFailure,
    kind=st.sampled_from(["exit", "signal", "hang"]),
    words=st.sampled_from(["x", "y"]),
    code=st.sampled_from([None, 1, -9]),
    lasting=st.booleans(),
    gpu=st.none() | GPUS,
    node=st.sampled_from(["", "a", "b"]),
)
NO_TIME = st.none()
#: Name of the event, its time where it has one, and its other arguments.
EVENTS = st.one_of(
    st.tuples(st.just(name), time, st.fixed_dictionaries(more)) for name, time, more in (
        ("processes_ended", TIMES, {"left": st.sampled_from([0, 0, 0, 1]),
                                    "unreachable": st.sampled_from([(), (), (), ("a",), ("b",)])}),
        ("launch_exited", TIMES, {"failure": st.none() | FAILURES, "stopped": st.booleans()}),
        ("launch_hung", TIMES, {"failure": FAILURES}),
        ("gpu_verdict", TIMES, {
            "gpu": GPUS, "level": st.sampled_from(["healthy", "risk", "fatal"]),
            "action": st.sampled_from(["none", "drain", "restart_application"]),
            "words": st.just("w")}),
        ("step_reached", NO_TIME, {"step": st.integers(0, 50), "resumed": st.integers(0, 50)}),
        ("checkpoint_durable", TIMES, {}),
        ("stop_requested", NO_TIME, {}),
        ("timer_fired", TIMES, {}),
        ("checkpoint_requested", NO_TIME, {"source": st.just("alarm"), "words": st.just("w")}),
        ("signal_received", TIMES, {"signal": st.just(15)}),
    )
)  # fmt: skip


@given(steps=st.lists(EVENTS, max_size=80), most=st.integers(0, 4))
def test_laws(steps, most):
    """One launch at a time, bounded restarts, what is dropped stays so, over is over."""
    machine = core(pool={"a": (0, 1, 2, 3), "b": (0, 1, 2, 3)}, max_restarts=most)
    alive, ending, over, wanted = False, False, False, False
    dropped, launches, in_a_row, best, best_before = set(), 0, 0, 0, 0
    time = 0.0
    for event, later, more in [("supervisor_started", None, {}), *steps]:
        time += later or 0.0
        if event == "processes_ended" and not ending:
            continue  # it is only sent where it was asked for
        if event == "processes_ended":
            ending = alive = False
        if event == "step_reached" and machine.phase in ("running", "saving"):
            best = max(best, more["step"])
            in_a_row = 0 if best > best_before else in_a_row
        wanted = wanted or event == "stop_requested"
        for action in getattr(machine, event)(*([] if later is None else [time]), **more):
            assert not over, "nothing is done when it is over"
            if isinstance(action, EndProcesses):
                ending = True
            elif isinstance(action, DropGpus):
                assert not dropped & set(action.gpus)
                dropped |= set(action.gpus)
            elif isinstance(action, StartLaunch):
                assert not alive, "two launches at a time"
                assert not wanted, "a user has asked it to stop"
                assert not ending
                alive, launches = True, launches + 1
                assert action.number == launches
                in_a_row, best_before = in_a_row + (launches > 1), best
                used = {(n, g) for n, gpus in action.allocation.gpus.items() for g in gpus}
                assert not used & dropped
                assert len({len(gpus) for gpus in action.allocation.gpus.values()}) == 1
                assert len(used) == action.allocation.layout.num_gpus
                assert action.allocation.layout.global_batch == 24
                assert in_a_row <= most
            elif isinstance(action, RequestCheckpoint):
                assert alive
                assert not ending
            elif isinstance(action, Finish):
                assert not alive, "nobody is left behind"
                over = True
    assert (machine.phase == "over") == over


@given(
    st.dictionaries(st.sampled_from("abcd"), st.sets(st.integers(0, 7), min_size=1), min_size=1),
    st.integers(1, 4), st.integers(1, 3), st.integers(1, 6),
)  # fmt: skip
def test_an_allocation_is_even_and_keeps_tensor_groups_on_a_node(pool, tensor, pipeline, data):
    pool = {node: tuple(sorted(gpus)) for node, gpus in pool.items()}
    layout = Layout(tensor=tensor, pipeline=pipeline, data=data)
    gpus = allot(layout, pool)
    if gpus is None:
        most = [each * sum(len(some) >= each for some in pool.values()) for each in range(9)]
        fits = [layout.num_gpus % each == 0 and most[each] >= layout.num_gpus
                for each in range(tensor, 9, tensor)]  # fmt: skip
        assert not any(fits)
        return
    (each,) = {len(some) for some in gpus.values()}
    assert each * len(gpus) == layout.num_gpus
    assert each % tensor == 0
    assert all(set(some) <= set(pool[node]) for node, some in gpus.items())
