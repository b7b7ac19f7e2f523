"""The training itself: against plain torch, against its own twin, on real ranks."""

from __future__ import annotations

import random
from collections import Counter

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="the laboratory trains with torch")
transformers = pytest.importorskip("transformers", reason="the laboratory's models are theirs")

from studies.fault_lab.branches import new_training, rounded, take_step, train_seed  # noqa: E402
from studies.fault_lab.corpus import CORPORA, corpus, generated_text  # noqa: E402
from studies.fault_lab.design import DESIGN, campaign  # noqa: E402
from studies.fault_lab.faults import FAULTS  # noqa: E402
from studies.fault_lab.models import ARCHITECTURES, BALANCE, FlatModel, build_module  # noqa: E402
from studies.fault_lab.spec import LabSpec  # noqa: E402
from studies.fault_lab.training import Settings, schedule  # noqa: E402
from tests.studies.lab.training import branch, control, trained  # noqa: E402


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_branch_without_a_fault_is_its_control_bit_for_bit(architecture):
    base = control(architecture)
    nothing = branch(base, "GRADIENT_SCALE", severity=1.0)
    something = branch(base, "LR_SPIKE", severity=25.0)
    twin, disturbed, same = train_seed([base, something, nothing])
    assert same.records == twin.records
    assert disturbed.records[:10] == twin.records[:10]
    assert disturbed.records[10] != twin.records[10]
    assert disturbed.records[-1].validation_loss != twin.records[-1].validation_loss


def test_the_same_seed_trains_the_same_run_and_another_another():
    first, again = (list(train_seed([control()])) for _ in range(2))
    assert first[0].records == again[0].records
    other = list(train_seed([control(seed=4)]))
    assert other[0].records[0].training_loss != first[0].records[0].training_loss


def test_nothing_touches_the_global_random_state():
    before = global_states()
    list(train_seed([control(steps=2), branch(control(steps=2), "GRADIENT_NOISE", onset=2)]))
    assert global_states() == before


def global_states() -> tuple[str, str, str]:
    numpy_state = np.random.get_state()  # noqa: NPY002
    return repr(torch.get_rng_state().tolist()), repr(numpy_state), repr(random.getstate())


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_architecture_learns(architecture):
    training = new_training(control(architecture, steps=60))
    losses = [take_step(training).training_loss for _ in range(25)]
    assert losses[0] == pytest.approx(np.log(256), abs=0.2)
    assert np.mean(losses[-5:]) < losses[0] - 1


@pytest.mark.parametrize("architecture", ["qwen2", "mixtral"])
def test_a_step_is_that_of_plain_torch(architecture):
    """The mean of the micro-batches by autograd, clip_grad_norm_ and torch's own AdamW."""
    spec = control(architecture)
    training = new_training(spec)
    module = build_module(architecture, spec.seed)
    decayed = [p for p in module.parameters() if p.ndim > 1]
    plain = [p for p in module.parameters() if p.ndim == 1]
    groups = [{"params": decayed}, {"params": plain, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1.0, betas=(0.9, 0.95), weight_decay=0.1)
    for step in range(1, 4):
        settings = training.settings(step)
        batch = training.batch(step, settings)
        optimizer.zero_grad()
        for tokens, labels in zip(batch.tokens_WBT, batch.labels_WBT, strict=True):
            loss = reference_loss(module, architecture, tokens, labels)
            (loss / 4).backward()
        norm = torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = settings.scheduled_rate
        optimizer.step()
        record = take_step(training)
        assert record.gradient_norm == pytest.approx(float(norm), rel=1e-4)
    flat_N = torch.cat([p.detach().flatten() for p in module.parameters()])
    moved = float((flat_N - training.model.weights_N).abs().max())
    assert moved < 1e-5


def reference_loss(module, architecture, tokens, labels):
    """As transformers computes it, with its own mask, experts and balancing loss."""
    inputs, targets = torch.from_numpy(tokens), torch.from_numpy(labels)
    if architecture != "mixtral":
        logits = module(input_ids=inputs).logits
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
    module.config._experts_implementation = "eager"
    output = module(input_ids=inputs)
    routers = tuple(layer.mlp.gate.last_logits for layer in module.model.layers)
    balance = transformers.models.mixtral.modeling_mixtral.load_balancing_loss_func
    loss = torch.nn.functional.cross_entropy(output.logits.flatten(0, 1), targets.flatten())
    # a layer at a time: together theirs would balance the layers' mean only
    return loss + BALANCE * sum(balance((logits,), 4, 2) for logits in routers)


def test_mistral_looks_back_no_further_than_its_window():
    model = FlatModel("mistral", 0)
    tokens = torch.arange(48)[None] % 7
    with torch.no_grad():
        theirs = model.module(input_ids=tokens).logits
        ours = model.module(**model._inputs(tokens)).logits
    assert torch.allclose(theirs, ours, atol=1e-5)


def test_a_snapshot_is_taken_and_given_back_whole():
    training = trained(steps=3)
    snapshot = training.snapshot()
    ahead = [take_step(training) for _ in range(3)]
    training.restore(snapshot)
    assert [take_step(training) for _ in range(3)] == ahead


def test_a_run_that_is_no_longer_finite_ends_soon_after():
    base = control()
    _, broken = train_seed([base, branch(base, "INFINITE_GRADIENT", onset=12)])
    assert broken.truth.failure_kind == "non_finite"
    assert broken.truth.failure_step == 12
    assert [record.step for record in broken.records] == list(range(1, 16))
    assert broken.records[11].non_finite_gradients == 1


def test_records_hold_everything_that_is_measured_to_six_digits():
    record = rounded(take_step(trained("mixtral", steps=9)))
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
    _, planned, fault = train_seed(
        [base, branch(base, "BATCH_SIZE_DOWN"), branch(base, "DEAD_WORKER")]
    )
    told = {r.step: r.planned_events for r in planned.records if r.planned_events}
    assert told == {11: ("batch_size",)}
    assert not any(record.planned_events for record in fault.records)


def test_the_rate_warms_up_and_falls_to_its_floor():
    rates = [schedule(step, 400) for step in range(1, 401)]
    assert rates.index(max(rates)) == 39
    assert rates[:39] == sorted(rates[:39])
    assert rates[39:] == sorted(rates[39:], reverse=True)
    assert rates[-1] == pytest.approx(0.1)


@pytest.mark.slow
def test_four_ranks_train_what_four_micro_batches_train():
    from studies.fault_lab.ranks import train_seed_on_ranks

    specs = [control(steps=6), branch(control(steps=6), "SIGN_FLIP", onset=4)]
    together, apart = list(train_seed(specs)), train_seed_on_ranks(specs)
    for ours, theirs in zip(together, apart, strict=True):
        assert (ours.id, ours.truth, ours.config) == (theirs.id, theirs.truth, theirs.config)
        for one, other in zip(ours.records, theirs.records, strict=True):
            assert other.training_loss == pytest.approx(one.training_loss, rel=1e-3)
            assert other.gradient_norm == pytest.approx(one.gradient_norm, rel=1e-3)
            assert other.worker_gradient_norms == pytest.approx(one.worker_gradient_norms, rel=1e-3)
            assert other.worker_gradient_cosines == pytest.approx(
                one.worker_gradient_cosines, abs=1e-3
            )


# -- corpora


def test_generated_text_is_the_same_bytes_everywhere():
    assert corpus("generated").digest == (
        "1115bd3812ee5b114c4a6276124eefec0bf785506787319f585c5959db5c145e"
    )
    assert not np.array_equal(generated_text(1)[:1000], generated_text(2)[:1000])


def test_held_out_text_is_not_trained_on():
    text = corpus("generated")
    whole, _ = CORPORA["generated"]()
    assert np.array_equal(np.concatenate([text.home, text.held_out]), whole)
    assert len(text.held_out) == len(whole) // 10
    batch = new_training(control()).batch(1, Settings(0.001, batch_size=2000))
    assert batch.tokens_WBT.shape == (4, 2000, 48)


def test_the_standard_library_is_real_text_of_this_machine():
    assert b"def " in corpus("standard_library").home[:100_000].tobytes()
    with pytest.raises(ValueError, match="unknown corpus 'wiki': known are standard_library"):
        corpus("wiki")


# -- the design


def test_the_campaign_covers_every_fault_and_severity_on_every_architecture():
    specs = campaign()
    controls = [spec for spec in specs if spec.fault is None]
    assert len(controls) == 160
    assert len({spec.run_id for spec in specs}) == len(specs) > 500
    cells = Counter((s.fault, s.severity, s.architecture) for s in specs if s.fault)
    assert len(set(DESIGN)) == len(DESIGN)
    for name in DESIGN:
        kind = FAULTS[name]
        for severity in kind.severities:
            for architecture in ARCHITECTURES:
                wanted = {None: 1, architecture: 4}.get(kind.only, 0)
                assert cells[name, float(severity), architecture] == wanted
    benign = [spec for spec in specs if spec.fault and FAULTS[spec.fault].benign]
    assert len(benign) >= 90
    assert len({spec.fault for spec in benign}) >= 8


def test_the_campaign_is_split_by_seed():
    specs = campaign()
    splits = {spec.seed: spec.split for spec in specs if spec.fault is None}
    assert all(spec.split == splits[spec.seed] for spec in specs)
    shares = Counter(splits.values())
    assert shares == {"calibration": 48, "development": 48, "test": 64}
    kinds = {(spec.fault, spec.split) for spec in specs}
    common = [name for name in DESIGN if len(FAULTS[name].severities) > 1]
    assert kinds >= {(name, split) for name in common for split in shares}


def test_a_branch_is_its_controls_but_for_the_fault():
    specs = campaign()
    controls = {spec.seed: spec for spec in specs if spec.fault is None}
    for spec in specs:
        twin = controls[spec.seed]
        assert (spec.peak_rate, spec.architecture) == (twin.peak_rate, twin.architecture)
        assert spec.onset_step is None or 120 <= spec.onset_step <= 240


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"total_steps": 0}, "total_steps is 0: at least 1"),
        ({"architecture": "gpt"}, "unknown architecture 'gpt': known are llama, "),
        ({"text": "wiki"}, "unknown text 'wiki'"),
        ({"peak_rate": 0.0}, "peak_rate is 0.0"),
        ({"seed": -1}, "seed is -1"),
        ({"fault": "GREMLIN"}, "unknown fault 'GREMLIN'"),
        ({"fault": "LR_SPIKE", "onset_step": 21}, r"onset_step is 21: .* from 1 to .*\(20\)"),
        ({"fault": "LR_SPIKE", "onset_step": 0}, "onset_step is 0"),
        ({"fault": "LR_SPIKE"}, "onset_step is None"),
        ({"fault": "EXPERT_FAILURE", "onset_step": 9}, "acts on mixtral only, not on llama"),
        ({"fault": "DEAD_WORKER", "onset_step": 9, "severity": 5.0}, "at most 4"),
        ({"fault": "DEAD_WORKER", "onset_step": 9, "severity": 1.5}, "a whole number"),
        ({"fault": "LR_SPIKE", "onset_step": 9, "severity": float("nan")}, "severity of LR_SPIKE"),
        ({"fault": "LR_SPIKE", "onset_step": 9, "duration_steps": -1}, "duration_steps is -1"),
    ],
)
def test_a_run_that_makes_no_sense_is_refused(changes, message):
    whole = dict(run_id="x", seed=1, architecture="llama", total_steps=20, text="generated")
    with pytest.raises(ValueError, match=message):
        LabSpec(**whole | changes)
