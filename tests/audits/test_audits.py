"""Audits: each silent error is found and named, a sound training is called none."""

import copy
import logging
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader, Dataset, IterableDataset

from rmetric.audits import AUDITS, KINDS, Audit, Seen, Training, make_audits
from rmetric.audits.fingerprint import fingerprint, halves, joined, ordered
from rmetric.monitor import Monitor

WORDS, WIDTH, STEPS = 61, 16, 26


class Model(nn.Module):
    """A few residual layers with dropout between an embedding and a head."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.dropout = nn.Dropout(0.1)
        self.head = nn.Linear(WIDTH, WORDS)
        self.detached = False

    def forward(self, tokens):
        hidden = self.embedding(tokens)
        for layer in self.layers:
            hidden = hidden + self.dropout(torch.tanh(layer(hidden)))
        return self.head(hidden.detach() if self.detached else hidden)


def batches(number, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, WORDS, (4, 12), generator=generator) for _ in range(number)]


def new_head():
    return nn.Linear(WIDTH, WORDS, bias=False)


class Loop:
    """A plain loop, of which each bug below changes one part."""

    def __init__(self, **monitored):
        torch.manual_seed(0)
        self.model = Model()
        self.optimizer = self.make_optimizer()
        self.prepare()
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(
            self.optimizer, lambda step: min(1.0, (step + 1) / 4)
        )
        self.monitor = Monitor(self.model, self.optimizer, audits=True, **monitored)
        self.monitor.schedulers = [self.scheduler]
        self.batches, self.losses = batches(200), []

    def make_optimizer(self):
        return torch.optim.AdamW(self.model.parameters(), lr=3e-3)

    def prepare(self):
        """Between the making of the optimiser and that of the monitor."""

    def batch(self, step):
        return self.batches[step]

    def labels(self, tokens):
        return tokens

    def loss(self, tokens):
        logits = self.model(tokens[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())

    def update(self, step):
        self.optimizer.step()
        self.scheduler.step()
        self.optimizer.zero_grad()

    def evaluate(self, tokens):
        self.model.eval()
        with torch.no_grad():
            self.monitor.evaluated(self.loss(tokens))
        self.model.train()

    def run(self, steps=STEPS, begin=0):
        for step in range(begin, begin + steps):
            tokens = self.batch(step)
            self.monitor.batch_ready({"input_ids": tokens, "labels": self.labels(tokens)})
            loss = self.loss(tokens)
            loss.backward()
            self.losses.append(loss.item())
            self.monitor.check_before_step(loss)
            self.update(step)
            if step % 10 == 9:
                self.evaluate(tokens)
        self.monitor.close()
        assert self.monitor.usable, self.monitor.problem
        return {(found.kind, found.severity) for found in self.monitor.findings}


class UnwrittenStep(Loop):
    finds = "not_updated"

    def update(self, step):
        kept = [p.detach().clone() for p in self.model.layers.parameters()]
        super().update(step)
        with torch.no_grad():
            for parameter, before in zip(self.model.layers.parameters(), kept, strict=True):
                parameter.copy_(before)


class HalfPrecision(Loop):
    finds = "rounded_away"

    def make_optimizer(self):
        self.model.bfloat16()
        return torch.optim.SGD(self.model.parameters(), lr=1e-7)


class FrozenMoves(Loop):
    finds = "frozen_changes"

    def update(self, step):
        self.model.layers.requires_grad_(step < 3)
        self.optimizer.step()
        self.scheduler.step()
        for parameter in self.model.parameters():
            if parameter.requires_grad:
                parameter.grad = None


class NoRate(Loop):
    finds = "rate_zero"

    def update(self, step):
        super().update(step)
        self.optimizer.param_groups[0]["lr"] = 0.0

    def prepare(self):
        self.optimizer.param_groups[0]["lr"] = 0.0


class RunawayRate(Loop):
    finds = "rate_above_peak"

    def update(self, step):
        super().update(step)
        self.optimizer.param_groups[0]["lr"] = 3e-3 if step < 24 else 2e-2


SHORT = [
    ("stale_optimizer", "prepare", lambda loop: setattr(loop, "model", copy.deepcopy(loop.model))),
    ("not_in_optimizer", "prepare", lambda loop: setattr(loop.model, "head", new_head())),
    ("no_gradient", "prepare", lambda loop: setattr(loop.model, "detached", True)),
    ("gradients_kept", "update", lambda loop, _: (loop.optimizer.step(), loop.scheduler.step())),
    (
        "training_mode_in_evaluation",
        "evaluate",
        torch.no_grad()(lambda loop, tokens: loop.monitor.evaluated(loop.loss(tokens))),
    ),
    ("same_batch", "batch", lambda loop, step: loop.batches[0]),
    ("same_order", "batch", lambda loop, step: loop.batches[step % 10]),
    ("no_labels", "labels", lambda loop, tokens: torch.full_like(tokens, -100)),
    ("constant_loss", "loss", lambda loop, x: (y := Loop.loss(loop, x)) - y.detach() + 1.2345678),
    (
        "scheduler_too_often",
        "update",
        lambda loop, _: (Loop.update(loop, _), loop.scheduler.step()),
    ),
    ("evaluation_mode_in_training", "evaluate", lambda loop, _: loop.model.eval()),
]
BUGS = [value for value in globals().values() if isinstance(value, type) and "finds" in vars(value)]
BUGS += [type(kind, (Loop,), {"finds": kind, method: code}) for kind, method, code in SHORT]


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.__name__)
def test_an_error_is_found_and_named_within_some_steps(bug):
    found = bug().run(60 if bug is RunawayRate else STEPS)
    assert bug.finds in {kind for kind, _ in found}
    errors = {kind for kind, severity in found if severity == "error"}
    assert errors <= {bug.finds, "stale_optimizer"}, "and nothing else is called an error"


def test_a_sound_training_has_no_finding_and_equal_weights(caplog):
    caplog.set_level(logging.WARNING)
    with_audits = Loop()
    assert with_audits.run(130) == set()
    assert "audit" not in caplog.text
    plain = Loop()
    plain.monitor.close()
    plain.monitor = Monitor(plain.model, plain.optimizer)
    plain.run(130)
    for a, b in zip(with_audits.model.parameters(), plain.model.parameters(), strict=True):
        assert torch.equal(a, b)


def test_a_sparse_gradient_that_is_there_before_a_backward_pass_ends_nothing(caplog):
    model = nn.ModuleDict({"head": nn.Linear(3, 1), "table": nn.Embedding(5, 3, sparse=True)})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Monitor(model, optimizer, audits=True) as monitor:
        for _ in range(4):
            for _ in range(2):
                model["head"](model["table"](torch.tensor([1, 2]))).sum().backward()
            monitor.check_before_step(1.0)
            optimizer.step()
    assert {f.kind for f in monitor.findings} == {"gradients_kept"}
    assert "failed and does nothing any more" not in caplog.text


def test_a_hook_that_fails_ends_no_pass_and_is_logged_once(caplog, monkeypatch):
    monkeypatch.setattr(AUDITS["modes"], "_before_forward", lambda *_: 1 / 0)
    assert Loop().run() == set()
    assert caplog.text.count("an audit hook failed and does nothing any more: ZeroDivisionE") == 1


def test_compiled_code_is_neither_compiled_anew_nor_refused():
    """With many micro-batches, after a checkpoint, and of a copy."""
    graphs, copies = {}, []
    for audits in (False, True):
        torch._dynamo.reset()
        graphs[audits] = made = []
        model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.1), nn.BatchNorm1d(4))
        compiled = torch.compile(
            model, backend=lambda graph, _, made=made: made.append(1) or graph.forward,
            fullgraph=True,
        )  # fmt: skip
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        with Monitor(model, optimizer, audits=audits) as monitor:
            for step in range(4):
                if step == 2:
                    monitor.load_state_dict(monitor.state_dict())
                for _ in range(12):
                    compiled(torch.randn(5, 4)).square().mean().backward()
                    monitor.micro_batch(1.0)
                monitor.check_before_step()
                optimizer.step()
                optimizer.zero_grad()
            copies.append(copy.deepcopy(model))
        assert {f.kind for f in monitor.findings} <= {"restored"}
    assert graphs[True] == graphs[False]
    hooks = [h for m in copies[1].modules() for h in m._forward_pre_hooks.values()]
    assert hooks
    assert all(hook._call is None for hook in hooks)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_schedule_that_ends_near_0_is_sound(dtype):
    class Ends(Loop):
        def make_optimizer(self):
            self.model.to(dtype)
            return torch.optim.AdamW(self.model.parameters(), lr=3e-2)

        def update(self, step):
            super().update(step)
            if step > 30:
                self.optimizer.param_groups[0]["lr"] = 1e-10

    assert Ends().run(190) == set()


class Drawn(Dataset):
    """Samples of a generator, of which each worker has a copy in the same state unless seeded."""

    def __init__(self, seeded=False):
        self.seeded, self.generator = seeded, torch.Generator().manual_seed(1)

    def __len__(self):
        return 4 * 20

    def __getitem__(self, place):
        generator = None if self.seeded else self.generator
        return torch.randint(0, WORDS, (12,), generator=generator)


class Stream(IterableDataset):
    """Read whole by each worker."""

    def __iter__(self):
        return (row for batch in batches(10) for row in batch)


@pytest.mark.parametrize(
    ("dataset", "workers", "updates", "warned"),
    [
        (Drawn(), 2, 1, True),
        (Drawn(), 4, 1, True),
        (Stream(), 2, 1, True),
        (Stream(), 1, 1, False),
        (Drawn(seeded=True), 2, 1, False),
        (Drawn(seeded=True), 2, 2, False),
    ],
    ids=["two", "four", "not_split", "one", "seeded", "updated_twice"],
)
def test_workers_that_draw_the_same_are_reported(dataset, workers, updates, warned):
    class Loaded(Loop):
        def batch(self, step):
            return next(self.given)

    loop = Loaded()
    loader = DataLoader(dataset, batch_size=4, num_workers=workers)
    loop.given = (batch for _ in range(2) for batch in loader for _ in range(updates))
    found = loop.run(17)
    assert found == ({("batch_again", "hint")} if warned else set())
    words = f"each batch comes {workers} times in a row: workers with one seed"
    assert all(finding.words.startswith(words) for finding in loop.monitor.findings)


def followed(make=None, rates=(), known=True):
    """Step, kind and severity of the findings on a schedule, or on rates that are set by hand."""
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    training, (audit,) = Training(model, optimizer), make_audits(["schedule"])
    scheduler = make(optimizer) if make else None
    training.schedulers = [scheduler] if make and known else []
    found = []
    for step in range(1, 201):
        if not make:
            optimizer.param_groups[0]["lr"] = rates[step - 1]
        seen = Seen(step=step - 1)  # as in a loop: taken at the next check
        found += [(f.step, f.kind, f.severity) for f in audit.on_step(training, seen)]
        optimizer.step()
        if make:
            scheduler.step()
    return found


def by_share(share):
    return lambda optimizer: lr_scheduler.LambdaLR(optimizer, share)


PLANNED = {
    "warm_up": by_share(lambda step: min(1.0, (step + 1) / 90)),
    "warm_up_then_decay": by_share(lambda step: min(step, 200 - step) / 100),
    "warm_up_by_epochs": by_share(lambda step: min(1.0, (step // 30 + 1) / 5)),
    "exponential_from_the_start": by_share(lambda step: 1e-6 * 1.1**step),
    "cyclic": lambda o: lr_scheduler.CyclicLR(o, 1e-4, 1e-1, 22, cycle_momentum=False),
    "restarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 50),
    "one_cycle": lambda o: lr_scheduler.OneCycleLR(o, 1.0, total_steps=210),
}


@pytest.mark.parametrize("make", PLANNED.values(), ids=PLANNED)
def test_a_planned_schedule_does_not_rise_above_its_peak(make):
    assert "rate_above_peak" not in {kind for _, kind, _ in followed(make, known=False)}


@pytest.mark.parametrize("growth", [1.06, 1.3, 50.0])
def test_a_rate_that_grows_after_a_constant_one_is_reported(growth):
    rates = [0.1] * 100 + [0.1 * growth ** min(n, 30) for n in range(1, 101)]
    ((step, kind, severity),) = followed(rates=rates)
    assert (kind, severity) == ("rate_above_peak", "error")
    assert rates[step - 2] <= 3 * 0.1 < rates[step - 1]


@pytest.mark.parametrize(("known", "severity"), [(True, "hint"), (False, "error")])
def test_a_rise_that_a_scheduler_makes_is_a_hint(known, severity):
    rises = by_share(lambda step: 0.1 if step < 40 else 1.0)
    assert followed(rises, known=known) == [(41, "rate_above_peak", severity)]


class OnlyTheHead(Loop):
    def make_optimizer(self):
        return torch.optim.AdamW(self.model.head.parameters(), lr=3e-3)


class LoRA(Loop):
    def prepare(self):
        self.model.embedding.requires_grad_(False)


@pytest.mark.parametrize("sound", [OnlyTheHead, LoRA])
def test_what_may_be_on_purpose_is_a_hint(sound):
    loop = sound()
    assert {severity for _, severity in loop.run()} == {"hint"}
    if sound is LoRA:
        words = "1 parameter (embedding.weight) is frozen and stands in a group of the optimizer"
        assert f"{words}, which does not train it" in {
            found.words for found in loop.monitor.findings
        }


def test_a_tied_output_layer_that_is_its_own_tensor():
    class Untied(Loop):
        def prepare(self):
            self.model.head = new_head()
            self.model.head.weight = nn.Parameter(self.model.embedding.weight.detach().clone())
            self.optimizer = self.make_optimizer()

    assert ("tied_weights_apart", "error") in Untied().run(3)


@pytest.mark.parametrize("name", AUDITS)
def test_the_contract_of_each_audit(name):
    audit = make_audits([name])[0]
    assert isinstance(audit, Audit)
    assert audit.name == name
    assert "weakness" in (type(audit).__doc__ or "")


def test_an_audit_that_raises_is_switched_off_alone(caplog, monkeypatch):
    monkeypatch.setattr(AUDITS["groups"], "on_step", lambda *_: 1 / 0)
    (kept,) = (bug for bug in BUGS if bug.finds == "gradients_kept")
    assert ("gradients_kept", "error") in kept().run()
    assert caplog.text.count("the audit 'groups' failed and is switched off") == 1


def test_a_device_that_cannot_measure_costs_the_audits_and_not_the_monitor(caplog, monkeypatch):
    def fails(tensors):
        raise TypeError("no float64 here")

    monkeypatch.setattr("rmetric.audits.auditor.peaks", fails)
    loop = Loop()
    assert loop.run() == set()
    assert loop.monitor.last.step == STEPS
    assert caplog.text.count("parameters cannot be measured, no audits: no float64 here") == 1


@pytest.mark.parametrize(
    ("audits", "problem"),
    [
        ("groups", "names are accepted"),
        (["grops"], "has 'grops': known are groups"),
        (["-grops"], "has 'grops': known are groups"),
        (["-resume", "groups"], r"\['-resume', 'groups'\]: all names have a minus, or none"),
    ],
)
def test_unknown_names_are_refused(audits, problem):
    with pytest.raises((TypeError, ValueError), match=problem):
        Monitor(nn.Linear(1, 1), audits=audits)


@given(st.lists(st.integers(-(2**63), 2**63 - 1), min_size=1, max_size=20))
def test_fingerprints_survive_the_way_to_the_host(numbers):
    whole = torch.tensor(numbers, dtype=torch.int64)
    assert joined(halves(whole).double().flatten().tolist()).tolist() == numbers


@given(st.integers(1, 40), st.integers(0, 39), st.sampled_from([torch.float32, torch.bfloat16]))
def test_a_fingerprint_changes_with_any_one_element(size, place, dtype):
    row = torch.randn(size, generator=torch.Generator().manual_seed(size)).to(dtype)
    other = row.clone()
    other[place % size] += 1.0
    assert fingerprint(row) != fingerprint(other)
    assert fingerprint(row) == fingerprint(row.clone())
    assert ordered(row) != ordered(other)


def flip(step, now, rank, model):
    if now == step and rank == 1:
        with torch.no_grad():
            weight = getattr(model, "module", model)[0].weight
            getattr(weight, "to_local", weight.detach)()[0, 0] += 1e-3


def sharded(model):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("copies", "shards"))
    for part in (model[0], model):
        fully_shard(part, mesh=mesh)
    return model


@pytest.mark.parametrize("step", [0, 5])
@pytest.mark.parametrize(
    ("settings", "reporting", "apart"),
    [({"ranks": 3}, (0, 1, 2), (1,)), ({"ranks": 4, "wrap": sharded}, (1, 3), (1, 3))],
    ids=["replicas", "shards"],
)
def test_copies_that_part_are_reported_with_their_ranks(settings, reporting, apart, step):
    pytest.importorskip("torch.distributed")
    from tests.monitor.ranks import on_ranks, train_on_rank, watched

    make, after = watched(config=None, audits=True), partial(flip, step)
    results = on_ranks(train_on_rank, make, after=after, steps=14, **settings)
    for rank, found in enumerate(result["findings"] for result in results):
        if step and rank in reporting:
            errors = [(f.kind, f.ranks, f.parameters) for f in found if f.severity == "error"]
            assert ("weights_apart", apart, ("0.weight",)) in errors
        else:
            assert found == []


def test_a_token_that_the_embedding_lacks_is_named_before_the_pass():
    model = nn.Embedding(5, 3)
    model.get_input_embeddings = lambda: model
    (audit,) = make_audits(["batches"])
    (found,) = audit.on_batch(Training(model), {"input_ids": torch.tensor([[1, 7]])})
    assert found.words.startswith("the batch has token 7, and the embedding has 5 rows")


def test_the_page_has_every_finding():
    page = (Path(__file__).resolve().parents[2] / "docs" / "audits.md").read_text(encoding="utf-8")
    for kind in KINDS:
        assert f"| `{kind}` (" in page
