"""Every fault does what it says, to what it says, and to nothing else."""

from dataclasses import asdict

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="the laboratory trains with torch")
pytest.importorskip("transformers", reason="the laboratory's models are those of transformers")

from studies.fault_lab.faults import FAULTS, Turn, fault  # noqa: E402
from studies.fault_lab.training import WORKERS  # noqa: E402
from tests.studies.fault_lab.training import trained  # noqa: E402

TRAINED = {name: trained(name) for name in ("llama", "mixtral")}
SNAPSHOTS = {name: training.snapshot() for name, training in TRAINED.items()}
ONE = "gradient of worker 0"
ALL = tuple(f"gradient of worker {w}" for w in range(WORKERS))

#: What faults change, and nothing else.
CHANGED = {
    ("rate_factor",): ("LR_SPIKE", "LR_RUNAWAY"),
    ("scheduled_rate",): ("RATE_REWARMUP", "RATE_CUT"),
    ("beta2",): ("BETA_FAULT",),
    ("half_scale",): ("HALF_OVERFLOW",),
    ("router_bias",): ("ROUTER_IMBALANCE",),
    ("other_share",): ("DOMAIN_SHIFT",),
    ("evaluated",): ("NOISY_EVALUATION",),
    ("batch_size",): ("BATCH_SIZE_UP", "BATCH_SIZE_DOWN"),
    ("length",): ("SEQUENCE_LENGTH",),
    ("labels",): ("LABEL_SHUFFLE",),
    ("tokens", "labels"): ("DATA_CORRUPTION", "BAD_BATCH", "REPEATED_BATCH"),
    ("experts.gate_up_proj", "experts.down_proj"): ("EXPERT_FAILURE",),
    ("self_attn.q_proj.weight",): ("ATTENTION_SCALE", "ATTENTION_GROWTH"),
    ("first moment",): ("FIRST_MOMENT_CORRUPTED",),
    ("second moment",): ("SECOND_MOMENT_ZEROED",),
    (ONE,): (
        *("GRADIENT_EXPLOSION", "GRADIENT_SCALE", "SIGN_FLIP", "GRADIENT_NOISE"),
        *("INFINITE_GRADIENT", "STALE_WORKER"),
    ),
    ALL[:3]: ("DEAD_WORKER",),
    ALL: (
        *("GRADIENT_SCALE_ALL", "SIGN_FLIP_ALL", "GRADIENT_NOISE_ALL", "STALE_ALL"),
        "GRADIENT_SPIKE",
    ),
}
CHANGES = {name: set(things) for things, names in CHANGED.items() for name in names}


def turn_of(name: str, severity: float | None = None, age: int = 0, memory=None) -> Turn:
    """A step under a fault, before the fault has done anything."""
    kind = fault(name)
    training = TRAINED[kind.only or "llama"]
    training.restore(SNAPSHOTS[kind.only or "llama"])
    rng = np.random.default_rng(age)
    turn = Turn(
        training=training,
        settings=training.settings(3),
        age=age,
        severity=kind.severities[-1] if severity is None else severity,
        duration=kind.duration_steps or 30,
        rng=rng,
        memory={} if memory is None else memory,
    )
    turn.batch = training.batch(3 + age, turn.settings)
    shape = (WORKERS, len(training.model.weights_N))
    turn.gradients_WN = torch.from_numpy(rng.standard_normal(shape, dtype=np.float32))
    return turn


def state_of(turn: Turn) -> dict[str, object]:
    """All that a fault can touch, by name."""
    model, training = turn.model, turn.training
    state = dict(asdict(turn.settings))
    for name, weights in zip(model.names, model.tensors(model.weights_N), strict=True):
        key = ".".join(name.split(".")[-3:]).removeprefix("mlp.")
        state[f"{name}|{key}"] = weights.clone()
    for worker, gradient_N in enumerate(turn.gradients_WN):
        state[f"gradient of worker {worker}"] = gradient_N.clone()
    return state | {
        "first moment": training.first_N.clone(),
        "second moment": training.second_N.clone(),
        "tokens": torch.from_numpy(turn.batch.tokens_WBT.copy()),
        "labels": torch.from_numpy(turn.batch.labels_WBT.copy()),
    }


def changed(before: dict, after: dict) -> set[str]:
    def same(a, b):
        return torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b

    return {key.split("|")[-1] for key in before if not same(before[key], after[key])}


def strike(name: str, severity: float | None = None, **options) -> tuple[dict, dict]:
    """The state before and after the fault."""
    turn = turn_of(name, severity, **options)
    before = state_of(turn)
    fault(name).act(turn)
    return before, state_of(turn)


@pytest.mark.parametrize("name", CHANGES)
def test_a_fault_changes_what_it_says_and_nothing_else(name):
    memory: dict = {}
    before, after = strike(name, memory=memory)
    if name.startswith(("STALE", "REPEATED")):  # the first step is the one that is repeated
        assert not changed(before, after)
        before, after = strike(name, age=1, memory=memory)
    assert changed(before, after) == CHANGES[name]


def test_a_flipped_bit_is_one_of_the_exponent_in_as_many_weights_as_stated():
    assert set(CHANGES) | {"WEIGHT_BIT_FLIP"} == set(FAULTS)  # every fault is tested
    turn = turn_of("WEIGHT_BIT_FLIP", severity=16)
    before_N = turn.model.weights_N.clone()
    fault("WEIGHT_BIT_FLIP").act(turn)
    bits = (before_N.view(torch.int32) ^ turn.model.weights_N.view(torch.int32)).tolist()
    flipped = [bit for bit in bits if bit]
    assert len(flipped) == 16
    assert set(flipped) <= {1 << place for place in range(23, 31)}


@pytest.mark.parametrize(
    ("name", "severity", "age", "factor"),
    [
        ("SIGN_FLIP", 3, 0, -3),
        ("SIGN_FLIP_ALL", 3, 0, -3),
        ("GRADIENT_EXPLOSION", 30, fault("GRADIENT_EXPLOSION").duration_steps - 1, -30),
    ],
)
def test_a_gradient_is_turned_and_multiplied_as_stated(name, severity, age, factor):
    before, after = strike(name, severity, age=age)
    assert torch.allclose(after[ONE], factor * before[ONE])


def test_what_is_repeated_is_repeated_as_often_as_stated():
    memory: dict = {}
    steps = [strike("STALE_WORKER", 3, age=age, memory=memory) for age in range(5)]
    sent = [after[ONE] for _, after in steps]
    assert [torch.equal(sent[i], sent[0]) for i in range(5)] == [True, True, True, False, False]
    assert torch.equal(sent[4], steps[3][0][ONE])
    memory = {}
    strike("REPEATED_BATCH", 3, memory=memory)
    repeated = [changed(*strike("REPEATED_BATCH", 3, age=age, memory=memory)) for age in (2, 3)]
    assert repeated == [{"tokens", "labels"}, set()]


def test_corrupt_text_is_read_and_predicted_consistently_and_shuffled_labels_are_the_same():
    before, after = strike("DATA_CORRUPTION", 0.5)
    assert torch.equal(after["tokens"][..., 1:], after["labels"][..., :-1])
    assert 0.35 < float((after["tokens"] != before["tokens"]).float().mean()) < 0.65
    before, after = strike("LABEL_SHUFFLE", 1.0)
    assert sorted(after["labels"].flatten()) == sorted(before["labels"].flatten())


def record_with(architecture: str = "llama", **settings):
    """The record of a step that is trained with other settings."""
    training = TRAINED[architecture]
    training.restore(SNAPSHOTS[architecture])
    training.step = 9  # so that the step is evaluated
    planned = training.settings(10)
    for name, value in settings.items():
        setattr(planned, name, value)
    gradients_WN, losses_W = training.gradients(training.batch(10, planned), planned)
    return training.finish_step(planned, training.average(losses_W, gradients_WN))


def test_the_real_rate_moves_the_weights_and_the_scheduled_one_is_recorded():
    plain, spiked = record_with(), record_with(rate_factor=10.0)
    assert spiked.learning_rate == plain.learning_rate
    assert spiked.update_norm == pytest.approx(10 * plain.update_norm, rel=0.01)
    planned = record_with(scheduled_rate=10 * plain.learning_rate)
    assert planned.learning_rate == pytest.approx(10 * plain.learning_rate)
    assert planned.update_norm == pytest.approx(spiked.update_norm, rel=1e-6)


def test_half_precision_overflows_beyond_its_range_only_and_a_router_can_be_biased():
    plain = record_with("mixtral")
    fine, broken = (record_with("mixtral", half_scale=scale) for scale in (16.0, 1e9))
    assert fine.training_loss == pytest.approx(plain.training_loss, abs=0.01)
    assert not np.isfinite(broken.training_loss)
    assert broken.non_finite_gradients > 0
    biased = record_with("mixtral", router_bias=(2, 50.0))
    assert plain.router_load < 1.99
    assert biased.router_load == pytest.approx(2.0)
    assert record_with("mixtral") == plain  # neither stays
