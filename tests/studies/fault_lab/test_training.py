"""The training itself: against plain torch, against its own twin, on real ranks; the designs."""

import random
from dataclasses import replace

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="the laboratory trains with torch")
transformers = pytest.importorskip("transformers", reason="the laboratory's models are theirs")

from rmetric.readers.archive import run_to_line  # noqa: E402
from studies.fault_lab.branches import take_step, train_seed  # noqa: E402
from studies.fault_lab.corpus import CORPORA, corpus, generated_text  # noqa: E402
from studies.fault_lab.design import campaign  # noqa: E402
from studies.fault_lab.models import ARCHITECTURES, BALANCE, FlatModel, build_module  # noqa: E402
from studies.fault_lab.spec import AXES, LabSpec, config_of, entries_of  # noqa: E402
from studies.fault_lab.training import Settings, Training, Weights, muon, schedule, sgd  # noqa: E402
from tests.studies.fault_lab.training import branch, control, trained  # noqa: E402


@pytest.mark.parametrize(
    ("architecture", "optimizer"),
    [*((name, "adamw") for name in ARCHITECTURES), ("mixtral", "muon"), ("mixtral", "sgd")],
)
def test_a_branch_without_a_fault_is_its_control_bit_for_bit(architecture, optimizer):
    base = control(architecture, optimizer=optimizer)
    nothing = branch(base, "GRADIENT_SCALE", severity=1.0)
    something = branch(base, "LR_SPIKE", severity=25.0)
    twin, disturbed, same = train_seed([base, something, nothing])
    assert same.records == twin.records
    assert disturbed.records[:10] == twin.records[:10]
    assert disturbed.records[10] != twin.records[10]
    assert disturbed.records[-1].validation_loss != twin.records[-1].validation_loss


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"size": "small"},
        {"context": 128},
        {"optimizer": "muon"},
        {"optimizer": "sgd", "peak_rate": 0.1},
        {"restarts": 2},
        {"text": "documentation"},
    ],
    ids=str,
)
def test_each_axis_trains_and_gives_the_same_bytes_again(changes):
    base = replace(control(steps=60), **changes)
    specs = [base, branch(base, "INFINITE_GRADIENT", onset=58)]
    first, again = (list(train_seed(specs)) for _ in range(2))
    assert list(map(run_to_line, first)) == list(map(run_to_line, again))
    run = first[0]
    assert run.records[-1].training_loss < run.records[0].training_loss - 0.5
    assert [record.learning_rate for record in run.records] == [
        float(f"{base.peak_rate * schedule(step, 60, base.restarts):.6g}") for step in range(1, 61)
    ]
    named = {name: value for name, value in changes.items() if name in AXES}
    assert named.items() <= run.config.items()
    other = Training(replace(base, seed=4))
    assert take_step(other).training_loss != run.records[0].training_loss


def test_nothing_touches_the_global_random_state():
    def states() -> list[str]:
        numpy_state = np.random.get_state()  # noqa: NPY002
        return [repr(of) for of in (torch.get_rng_state().tolist(), numpy_state, random.getstate())]

    before = states()
    list(train_seed([control(steps=2), branch(control(steps=2), "GRADIENT_NOISE", onset=2)]))
    assert states() == before


@pytest.mark.parametrize("architecture", ["qwen2", "mixtral"])
def test_a_step_is_that_of_plain_torch(architecture):
    """The mean of the micro-batches by autograd, clip_grad_norm_ and torch's own AdamW."""
    training = Training(control(architecture))
    module = build_module(architecture, training.spec.seed)
    decayed = [p for p in module.parameters() if p.ndim > 1]
    plain = [p for p in module.parameters() if p.ndim == 1]
    groups = [{"params": decayed}, {"params": plain, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1.0, betas=(0.9, 0.95), weight_decay=0.1)
    for step in range(1, 4):
        settings = training.settings(step)
        batch = training.batch(step, settings)
        optimizer.zero_grad()
        for tokens, labels in zip(batch.tokens_WBT, batch.labels_WBT, strict=True):
            (reference_loss(module, architecture, tokens, labels) / 4).backward()
        norm = torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = settings.scheduled_rate
        optimizer.step()
        assert take_step(training).gradient_norm == pytest.approx(float(norm), rel=1e-4)
    flat_N = torch.cat([p.detach().flatten() for p in module.parameters()])
    assert float((flat_N - training.model.weights_N).abs().max()) < 1e-5


def reference_loss(module, architecture, tokens, labels):
    """As transformers computes it, with its own mask, experts and balancing loss."""
    inputs, targets = torch.from_numpy(tokens), torch.from_numpy(labels)
    if architecture == "mixtral":
        module.config._experts_implementation = "eager"
    logits = module(input_ids=inputs).logits
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
    if architecture != "mixtral":
        return loss
    routers = tuple(layer.mlp.gate.last_logits for layer in module.model.layers)
    balance = transformers.models.mixtral.modeling_mixtral.load_balancing_loss_func
    # a layer at a time: together theirs would balance the layers' mean only
    return loss + BALANCE * sum(balance((logits,), 4, 2) for logits in routers)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_the_sizes_are_those_of_the_page(architecture):
    for size, millions in (("tiny", 0.16), ("small", 0.46), ("large", 1.95)):
        number = len(FlatModel(architecture, 0, size).weights_N) / 1e6
        assert number == pytest.approx(millions, abs=0.011)


# Theirs iterates in bfloat16, so its directions agree to a few percent.
@pytest.mark.parametrize(
    ("name", "shape", "ours", "close", "options"),
    [
        ("SGD", (50,), sgd, 1e-6, {"momentum": 0.9, "weight_decay": 1e-4}),
        *(
            ("Muon", shape, muon, 0.02,
             {"momentum": 0.95, "weight_decay": 0.1, "adjust_lr_fn": "match_rms_adamw"})
            for shape in ((24, 40), (40, 24))
        ),
    ],
)  # fmt: skip
def test_an_optimiser_is_that_of_torch(name, shape, ours, close, options):
    if not hasattr(torch.optim, name):
        pytest.skip(f"this torch has no {name}")
    start, *gradients = torch.randn(4, *shape, generator=torch.Generator().manual_seed(0))
    plain = start.clone().requires_grad_()
    optimizer = getattr(torch.optim, name)([plain], lr=0.01, **options)
    weights = start.clone()
    first, second_moment = torch.zeros(2, *shape)
    for gradient in gradients:
        plain.grad = gradient.clone()
        optimizer.step()
        ours(Weights(weights, first, second_moment, gradient, torch.ones(shape)), 0.01)
    moved = torch.linalg.vector_norm(plain.detach() - start)
    assert torch.linalg.vector_norm(weights - plain.detach()) < close * moved


def test_a_run_that_is_no_longer_finite_ends_soon_after():
    base = control()
    _, broken = train_seed([base, branch(base, "INFINITE_GRADIENT", onset=12)])
    assert (broken.truth.failure_kind, broken.truth.failure_step) == ("non_finite", 12)
    assert [record.step for record in broken.records] == list(range(1, 16))
    assert broken.records[11].non_finite_gradients == 1


def test_records_hold_everything_that_is_measured_to_six_digits():
    record = take_step(trained("mixtral", steps=9))
    assert record.validation_loss is not None
    assert set(record.layer_gradient_norms) >= {"model.layers.0", "model.layers.1"}
    assert record.router_load >= 1
    assert record.attention_logit_max > 0
    assert record.activation_headroom > 0
    assert len(record.worker_gradient_norms) == len(record.worker_gradient_cosines) == 4
    squares = sum(norm**2 for norm in record.layer_gradient_norms.values())
    assert squares == pytest.approx(record.gradient_norm**2, rel=1e-4)
    assert record.update_norm == float(f"{record.update_norm:.6g}")


def test_a_planned_change_is_announced_once_and_a_fault_never():
    base = control()
    branches = (branch(base, name) for name in ("BATCH_SIZE_DOWN", "DEAD_WORKER"))
    _, planned, fault = train_seed([base, *branches])
    planned_at = {r.step: r.planned_events for r in planned.records if r.planned_events}
    assert planned_at == {11: ("batch_size",)}
    assert not any(record.planned_events for record in fault.records)


def test_corpora_are_real_text_or_the_same_bytes_everywhere_and_some_is_held_out():
    text = corpus("generated")
    assert text.digest == "1115bd3812ee5b114c4a6276124eefec0bf785506787319f585c5959db5c145e"
    assert not np.array_equal(generated_text(1)[:1000], generated_text(2)[:1000])
    assert b"def " in corpus("standard_library").home[:100_000].tobytes()
    manual = corpus("documentation")
    assert b"The standard type hierarchy" in manual.home.tobytes() + manual.held_out.tobytes()
    assert b"def " in manual.other[:100_000].tobytes()
    with pytest.raises(ValueError, match="unknown corpus 'wiki': known are standard_library"):
        corpus("wiki")
    whole, _ = CORPORA["generated"]()
    assert np.array_equal(np.concatenate([text.home, text.held_out]), whole)
    assert len(text.held_out) == len(whole) // 10
    batch = Training(control()).batch(1, Settings(0.001, batch_size=2000))
    assert batch.tokens_WBT.shape == (4, 2000, 48)


def test_the_first_sets_runs_are_described_as_before():
    spec = campaign()[0]
    assert not set(AXES) & set(entries_of(spec))
    assert not set(AXES) & set(config_of(spec, ""))
    assert entries_of(replace(spec, restarts=1)) == entries_of(spec) | {"restarts": 1}


SPIKE, DEAD = ({"fault": name, "onset_step": 9} for name in ("LR_SPIKE", "DEAD_WORKER"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"total_steps": 0}, "total_steps is 0: it must be at least 1"),
        ({"architecture": "gpt"}, "unknown architecture 'gpt': known are llama, "),
        ({"text": "wiki"}, "unknown text 'wiki'"),
        ({"optimizer": "lion"}, "unknown optimizer 'lion': known are adamw, muon, sgd"),
        ({"seed": -1}, "seed is -1"),
        ({"fault": "GREMLIN"}, "unknown fault 'GREMLIN'"),
        (SPIKE | {"onset_step": 21}, r"onset_step is 21: .* from 1 to .*\(20\)"),
        (SPIKE | {"onset_step": 0}, "onset_step is 0"),
        (SPIKE | {"onset_step": None}, "onset_step is None"),
        (SPIKE | {"severity": float("nan")}, "severity of LR_SPIKE"),
        (SPIKE | {"duration_steps": -1}, "duration_steps is -1"),
        (SPIKE | {"fault": "EXPERT_FAILURE"}, "acts on mixtral only, not on llama"),
        (SPIKE | {"fault": "BETA_FAULT", "optimizer": "sgd"}, "acts on adamw only, not on sgd"),
        (DEAD | {"severity": 5.0}, "at most 4"),
        (DEAD | {"severity": 1.5}, "a whole number"),
    ],
)
def test_a_run_that_makes_no_sense_is_refused(changes, message):
    whole = dict(run_id="x", seed=1, architecture="llama", total_steps=20, text="generated")
    with pytest.raises(ValueError, match=message):
        LabSpec(**whole | changes)
