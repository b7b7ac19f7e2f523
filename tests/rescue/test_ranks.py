"""Rescue on two ranks: DistributedDataParallel and FSDP2."""

import pytest

from rmetric.rescue import Rescue, RescueConfig
from rmetric.rescue.agreement import Agreement, Ballot, DisagreementError
from rmetric.rescue.snapshot_keeper import SnapshotPace
from tests.monitor.ranks import on_ranks
from tests.rescue.test_action import lasting
from tests.rescue.trainings import NANS, SMALL, actions, bad, make_loader, same, train


def on_one_rank(rank, kind, folder):
    """Every training of one launch."""
    twin = train(kind=kind, rank=rank)
    found = {"twin": twin}
    found["quiet"] = train(Rescue(SMALL), kind=kind, rank=rank)
    found["nans"] = train(Rescue(SMALL), kind=kind, rank=rank, nans=NANS)
    # One rank alone has evidence, and the ranks' own data differ.
    own = bad(22, since=19) if rank == 1 else bad(0)
    found["alarm"] = train(Rescue(SMALL), kind=kind, rank=rank, evidence_of=own)
    failing = Rescue(SMALL)

    def at(executed, step, model, optimizer):
        if executed == 20 and rank == 1:
            failing.scheduler.load_state_dict = None

    found["fails"] = train(failing, kind=kind, rank=rank, evidence_of=bad(22, since=19), at=at)
    held = Rescue(RescueConfig(every=5, probation=5, far=20, budget=1), hold_folder=folder / kind)

    found["held"] = train(held, kind=kind, rank=rank, evidence_of=lasting)
    found["held"]["step"] = held.held and held.held["step"]
    found["held"]["clean"] = train(kind=kind, rank=rank, steps=held.held["step"] or 1)
    found["sick"] = sick_worker(kind, rank)
    found["alone"] = train(OneRank(SMALL), kind=kind, rank=rank)
    return found


class OneRank(Rescue):
    """On rank 1 alone the gradient of one step is bad, after the ranks have averaged theirs."""

    def before_update(self, broken, monitor):
        self.judged = getattr(self, "judged", 0) + 1
        if monitor.rank == 1 and self.judged == 23:
            broken = [("non_finite", "its own gradient is nan")]
        super().before_update(broken, monitor)


def sick_worker(kind, rank):
    """Rank 1 multiplies its data, and so its gradient, from executed step 18 on."""
    norms = []

    class Watched(Rescue):
        def before_update(self, broken, monitor):
            super().before_update(broken, monitor)
            norm = monitor._pending.norm  # of shards it is not known in the first steps
            norms.append([monitor.step, 1.0 if norm is None else float(norm)])

        def record(self, record, monitor):
            super().record(record, monitor)
            known = record.worker_gradient_norms
            events = [(e.kind, e.worker) for e in record.events or ()]
            records.append((record.step, known and len(known), events))

    records = []
    sick = {"on": False}

    def at(executed, step, model, optimizer):
        sick["on"] = executed >= 18

    loader = make_loader(rank)
    inner = loader.collate_fn

    def collate(rows):
        inputs, labels = inner(rows)
        return inputs, labels * (1000.0 if rank == 1 and sick["on"] else 1.0)

    loader.collate_fn = collate
    rescue, evidence = Watched(SMALL), bad(21, since=18, kind="worker", worker=1)
    outcome = train(
        rescue, kind=kind, rank=rank, loader=loader, at=at, evidence_of=evidence, steps=50
    )
    return outcome | {"norms": norms, "records": records, "out": sorted(rescue.policy.workers_out)}


@pytest.fixture(scope="module", params=["ddp", "fsdp2"])
def launched(request, tmp_path_factory):
    folder, kind = tmp_path_factory.mktemp("held"), request.param
    return on_ranks(on_one_rank, kind, folder, ranks=2, seconds=400.0), folder / kind


def test_both_ranks_leave_out_and_go_back_together_and_end_as_without_a_fault(launched):
    for found in launched[0]:
        for name in ("quiet", "nans", "alarm", "alone"):
            assert found[name]["problem"] == ""
            assert same(found[name], found["twin"]), name
        assert found["quiet"]["decisions"] == []
        assert actions(found["nans"]) == ["leave_out", "leave_out", "leave_out", "go_back"]
        assert found["nans"]["decisions"][-1]["to"] == 20
        assert actions(found["alarm"]) == ["go_back"]
        # The weights of the ranks differ from then on, so neither may go on from them.
        entry = found["alone"]["decisions"][-1]
        assert (entry["action"], entry["to"]) == ("go_back", 15)
        assert "the ranks decided differently about step 23" in entry["reason"]
    first, second = (found["alarm"]["decisions"][0] for found in launched[0])
    keys = ("step", "to", "repeated", "skipped", "workers")
    assert [first[k] for k in keys] == [second[k] for k in keys]
    assert first["to"] == 15
    assert "because alarm of rank 1; " in first["reason"]
    assert "because alarm of rank 1: it is bad; " in second["reason"]


def test_a_rank_that_cannot_go_back_switches_all_off(launched):
    for found in launched[0]:
        outcome = found["fails"]
        assert outcome["problem"]
        assert outcome["decisions"] == []
        assert outcome["taken"] == found["twin"]["taken"]
        assert outcome["rate"] == found["twin"]["rate"]
        assert same(outcome, found["twin"])


def test_both_ranks_hold_the_weights_of_one_snapshot(launched):
    outcomes, folder = launched
    for found in outcomes:
        assert actions(found["held"])[-1] == "hold"
        assert found["held"]["weights"] == found["held"]["clean"]["weights"]
    assert (folder / "verdict.json").exists()
    assert list(folder.glob("step_*"))


def test_a_worker_that_stands_out_is_left_out_of_the_mean(launched):
    """Its gradient, a thousand times the other's, is in the norm before and not after it."""
    for found in launched[0]:
        sick = found["sick"]
        assert sick["problem"] == ""
        [entry] = [e for e in sick["decisions"] if e["action"] == "go_back"]
        assert entry["workers"] == [1] == sick["out"]
        went = next(i for i in range(1, len(sick["norms"])) if (
            sick["norms"][i][0] < sick["norms"][i - 1][0]
        ))  # fmt: skip
        assert max(norm for _, norm in sick["norms"][:went]) > 100
        assert max(norm for _, norm in sick["norms"][went:]) < 50
        events = [e for _, _, found in sick["records"] for e in found]
        assert ("rescue_left_out", 1) in events
    # The record has the norms of the ranks that count.
    counted = [n for step, n, _ in launched[0][0]["sick"]["records"] if n and step == 40]
    assert counted == [1]


def test_the_mean_without_a_worker_is_that_of_the_others():
    import torch

    from rmetric.rescue.remedies import WorkersOut

    weights = [torch.zeros(3, requires_grad=True) for _ in range(3)]
    own = [torch.tensor([1.0, 2, 3]), torch.tensor([torch.nan] * 3), torch.tensor([3.0, 4, 5])]
    for rank, (weight, gradient) in enumerate(zip(weights, own, strict=True)):
        out = WorkersOut(torch.nn.Linear(1, 1), [weight], rank, 3, 1)
        out.set([1])
        for _ in range(2):  # micro-batches
            (weight * gradient / 2).sum().backward()
        out.remove()
    mean = sum(weight.grad for weight in weights) / 3
    assert torch.allclose(mean, torch.tensor([2.0, 3, 4]))
    with pytest.raises(ValueError, match="most_out is 3 with 3 ranks: it must be at most 2"):
        WorkersOut(torch.nn.Linear(1, 1), [], 0, 3, 3)


def asks(rank):
    """What the ballots of `most` give, and what becomes of two trainings with every="auto"."""
    vote, found = Agreement(None), []
    for values in [(3, 0, 20), (20, 3, 0), (0, 0, 0)]:
        found.append(vote.most(values[rank]))
    for other in (Ballot(0, leaving=1), Ballot(7)):
        try:
            if rank == 2:
                vote.send(other)
                raise DisagreementError(vote.receive())
            found.append(vote.most(90))
        except DisagreementError:
            found.append("left")
    rescues = Rescue(), Rescue()
    for rescue, distances in zip(rescues, [(10, 30, 20), (10, 30, None)], strict=True):
        # Without a number its pace raises when it is read.
        SnapshotPace.distance = property(lambda pace, own=distances[rank]: own + 0)
        found.append(train(rescue, kind="ddp", rank=rank, steps=60)["taken"][-1])
    return found, rescues[0].policy.every, [rescue.problem for rescue in rescues]


def test_the_ranks_agree_on_the_largest_distance_of_snapshots_and_none_waits_for_one_that_left():
    ranks = on_ranks(asks, ranks=3, seconds=120.0)
    for rank, (found, every, (none, problem)) in enumerate(ranks):
        assert found == [20, 20, 0, "left", "left", 60, 60]
        assert (every, none) == (30, "")
        assert ("TypeError" if rank == 2 else "another rank is switched off") in problem
