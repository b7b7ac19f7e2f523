"""What the ranks agree upon, with messages that come late now and then; no process is started."""

from math import inf, nan

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from rmetric.monitor.alerts import Alert
from rmetric.monitor.config import MonitorConfig
from rmetric.monitor.rank_sync import (
    DISABLED,
    FIELDS,
    RankMessages,
    RankSync,
    complete_from_ranks,
    encode_message,
)
from rmetric.records import Record

CONFIG = MonitorConfig()


class Line:
    """Stands in for an Exchange: gathers in memory; `late` takes of it find nothing yet."""

    def __init__(self, operations, rank, ranks, late):
        self.ranks, self.rank, self.problem, self.late = list(range(ranks)), rank, "", False
        self.ended = False
        self._operations, self._late = operations, iter(late)
        self._count, self._under_way, self._wait = 0, False, 0

    @property
    def active(self):
        return not self.ended

    def post(self, values):
        if self.ended or self._under_way:
            return False
        self._operations.setdefault(self._count, {})[self.rank] = list(values)
        self._count, self._under_way = self._count + 1, True
        self._wait = next(self._late, 0)
        return True

    def take(self):
        operation = self._operations.get(self._count - 1, {})
        if not self._under_way or len(operation) < len(self.ranks):
            return None
        if self._wait:
            self._wait -= 1
            return None
        self._under_way = False
        return np.array([operation[rank] for rank in self.ranks])

    def end(self, problem):
        self.problem, self.ended = problem, True

    def close(self):
        self.ended = True


def ranks_together(late_by_rank, config=CONFIG):
    operations, made = {}, []
    for rank, late in enumerate(late_by_rank):
        made.append(RankSync(config, Line(operations, rank, len(late_by_rank), late)))
    return made


def run(ranks, checks, alarms, orders):
    """What each rank did: (check, source) acted upon, agreement, complete steps."""
    acted, agreed, complete_steps = ([[] for _ in ranks] for _ in range(3))
    for check in range(1, checks + 1):
        for rank in orders[check % len(orders)]:
            sync = ranks[rank]
            messages = sync.take()
            if messages is not None:
                sync.new_alerts(messages)
                steps = set(messages.steps.tolist())
                complete_steps[rank] += filter(messages.is_complete_for, steps)
            acted[rank] += [(check, a.source) for a in sync.due_alerts(check)]
            agreed[rank].append(sync.agreed(check))
            for source in alarms.get((rank, check), ()):
                sync.note_alert(Alert(step=check - 1, source=source, reason="", rank=rank))
            sync.post(check - 1, {"loss": 1.0})
    return acted, agreed, complete_steps


lateness = st.lists(st.lists(st.integers(0, 1), max_size=20), min_size=2, max_size=4)


@settings(deadline=None, max_examples=100)
@given(lateness, st.data())
def test_ranks_act_alike_while_no_message_is_late_by_more_than_a_step(late, data):
    number = len(late)
    places = st.tuples(st.integers(0, number - 1), st.integers(2, 60))
    alarms = data.draw(
        st.dictionaries(places, st.sampled_from([["non_finite"], ["gradient_explosion"]]))
    )
    orders = data.draw(st.lists(st.permutations(range(number)), min_size=1, max_size=7))
    acted, agreed, complete_steps = run(ranks_together(late), 80, alarms, orders)
    for rank in range(1, number):
        assert acted[rank] == acted[0]
        assert agreed[rank] == agreed[0]
    for (_, check), [source] in alarms.items():
        if all(agreed[0][check - 2 : check + 5]):
            assert any((check + wait, source) in acted[0] for wait in (2, 3, 4))
    assert agreed[0][-1]
    assert all(set(range(72, 79)) <= set(steps) for steps in complete_steps)


def test_without_lateness_an_alarm_is_acted_upon_at_the_third_check():
    acted, agreed, steps = run(ranks_together([[]] * 4), 20, {(2, 10): ["non_finite"]}, [range(4)])
    assert acted == [[(12, "non_finite")]] * 4
    assert agreed[0] == [False] * 2 + [True] * 18
    assert steps[0] == list(range(0, 19))


def test_ranks_that_are_set_differently_do_not_agree():
    sync, _ = ranks_together([[], []])
    _, other = ranks_together([[], []], MonitorConfig(alert_on=("non_finite",)))
    other.exchange._operations = sync.exchange._operations
    run([sync, other], 5, {}, [(0, 1)])
    assert "set differently" in sync.problem
    assert sync.alive is False


def test_nothing_is_done_together_once_a_rank_has_left():
    ranks = ranks_together([[]] * 3)
    run(ranks, 10, {}, [range(3)])
    for sync in ranks:
        sync.take()
    ranks[0].note_alert(Alert(step=10, source="non_finite", reason="", rank=0))
    ranks[0].post(10, {})
    ranks[1].leave(DISABLED)
    ranks[2].post(10, {})
    for sync in (ranks[0], ranks[2]):
        sync.new_alerts(sync.take())
        assert sync.due_alerts(100) == []
        assert not sync.agreed(100)
        assert "rank 1 was disabled" in sync.problem


finite_or_not = st.floats(allow_nan=False)


@given(st.dictionaries(st.sampled_from(FIELDS), finite_or_not), st.integers(0, 2**31))
def test_a_message_arrives_as_it_was_sent(values, step):
    messages = sent(values, step=step)
    assert messages.is_complete_for(step)
    assert (messages.leaving[0], messages.settings[0], messages.alarms[0]) == (1, 2**32 - 1, 5)
    for name in FIELDS:
        arrived = messages.of_all(name)
        assert (None if arrived is None else arrived[0]) == values.get(name)


def sent(*rows, step=3):
    settings = {"leaving": 1, "settings": 2**32 - 1, "alarms": 5}
    return RankMessages(np.array([encode_message(step, values, **settings) for values in rows]))


def test_what_one_rank_did_not_measure_is_left_open():
    record = Record(step=3, training_loss=1.0, update_norm=0.5)
    complete_from_ranks(record, sent({"loss": 1.0, "own_norms": 2.0}, {"loss": 3.0}), [0, 1])
    assert record.training_loss == 2.0
    assert record.worker_gradient_norms is None
    assert record.update_norm == 0.5
    complete_from_ranks(record, sent({"gradient_square": 9.0}, {"gradient_square": 16.0}), [0, 1])
    assert record.gradient_norm == 5.0
    complete_from_ranks(record, sent({"gradient_square": inf}, {"gradient_square": nan}), [0, 1])
    assert record.gradient_norm != record.gradient_norm
