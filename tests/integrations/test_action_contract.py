"""Each action in each trainer, end to end: the bad step stays out, and no good one."""

import math
from functools import cache, partial

import pytest
import torch

from rmetric.monitor.actions import CutLearningRate, EmergencyCheckpoint, SkipStep, Stop
from tests.integrations import action_trainings
from tests.integrations.action_trainings import (
    BAD,
    EXPLOSION,
    NAN_OFF,
    RATE,
    STEPS,
    on_two_ranks,
    plain,
    share,
    with_actions,
)


def actions_of(name, folder):
    more = {
        "stop": Stop,
        "cut": partial(CutLearningRate, on={"gradient_explosion"}),
        "save": partial(EmergencyCheckpoint, folder / "saved"),
    }
    return [SkipStep(), *(make() for key, make in more.items() if key == name)]


#: The one without an action is a training whose bad steps are left out by hand.
MAKERS = {name: partial(actions_of, name) for name in ("skip", "stop", "cut", "save")}
MAKERS["by hand"] = None
SCALERS = [
    f"scaler {how}, {when}"
    for how in ("passed", "unknown")
    for when in ("unscaled early", "unscaled late", "never unscaled")
]
ONE_PROCESS = ["plain", "bf16", *SCALERS]
ONE_PROCESS += [f"{t} {p}" for t in ("hugging_face", "lightning") for p in ("32", "bf16", "fp16")]
SEVERAL = ["ddp", "fsdp2"]
TRAINERS = ONE_PROCESS + SEVERAL


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The outcome of a training on each rank, by trainer and action; each runs once."""

    @cache
    def ranks_of(trainer):
        folder = tmp_path_factory.mktemp(trainer.replace(" ", "_").replace(",", ""))
        return folder, on_two_ranks(folder, trainer, MAKERS)

    @cache
    def trained(trainer, action):
        if trainer in SEVERAL:
            folder, found = ranks_of(trainer)
            return folder / action, [rank[action] for rank in found]
        folder = tmp_path_factory.mktemp(action.replace(" ", "_"))
        if trainer.startswith(("hugging_face", "lightning")):
            name, precision = trainer.split()
            train, settings = getattr(action_trainings, name), {"precision": precision}
        else:
            train, settings = plain, {"kind": trainer}
        return folder, [with_actions(train, folder, MAKERS[action], **settings)]

    return trained


@pytest.mark.parametrize("trainer", TRAINERS)
def test_exactly_the_bad_steps_stay_out_of_the_weights(trained, trainer):
    _, by_hand = trained(trainer, "by hand")
    _, skipped = trained(trainer, "skip")
    for expected, found in zip(by_hand, skipped, strict=True):
        assert found.usable
        assert found.slips == []
        assert found.steps == expected.steps == STEPS
        assert found.weights == expected.weights
        assert found.finite
    records = skipped[0].records
    assert [record.step for record in records] == list(range(1, STEPS + 1))
    assert [record.step for record in records if record.skipped] == list(BAD)


@pytest.mark.parametrize("trainer", TRAINERS)
def test_the_training_stops_and_the_bad_step_stays_out(trained, trainer):
    _, skipped = trained(trainer, "skip")
    _, stopped = trained(trainer, "stop")
    # A scaler leaves an overflow out by itself, and all ranks act three checks later.
    overflows = "scaler" in trainer or "fp16" in trainer
    bad = EXPLOSION if overflows else NAN_OFF
    assert {found.steps for found in stopped} == {bad + (3 if trainer in SEVERAL else 0)}
    records = stopped[0].records
    assert [record.step for record in records if record.skipped][-1] == bad
    until = [r.update_norm for r in skipped[0].records[: len(records)]]
    assert [r.update_norm for r in records] == until
    assert all(found.finite for found in stopped)


@pytest.mark.parametrize("trainer", TRAINERS)
def test_a_cut_of_the_rate_lasts_to_the_end(trained, trainer):
    _, outcomes = trained(trainer, "cut")
    records = outcomes[0].records
    first = EXPLOSION + 3 if trainer in SEVERAL else EXPLOSION
    usual = [r.learning_rate for r in trained(trainer, "skip")[1][0].records]
    if trainer != "hugging_face fp16":  # where the schedule waits with a step that overflows
        assert usual == pytest.approx([RATE * share(step) for step in range(STEPS)])
    expected = [rate * (0.5 if step >= first else 1.0) for step, rate in enumerate(usual, start=1)]
    assert [r.learning_rate for r in records] == pytest.approx(expected)
    [acted] = [r for r in records if any("learning rate" in words for words in r.actions or ())]
    assert acted.step == first
    assert not any(r.planned_events for r in records)
    assert all(found.finite and found.usable for found in outcomes)


@pytest.mark.parametrize("trainer", TRAINERS)
def test_the_weights_before_the_bad_step_are_saved(trained, trainer):
    folder, outcomes = trained(trainer, "save")
    _, by_hand = trained(trainer, "by hand")
    assert [found.weights for found in outcomes] == [found.weights for found in by_hand]
    assert all(found.usable for found in outcomes)
    saved = sorted((folder / "saved").glob("*.pt"))
    if trainer == "fsdp2":  # refused, as documented
        assert saved == []
        return
    overflows = "scaler" in trainer or "fp16" in trainer
    content = torch.load(saved[0], weights_only=True)
    assert content["step"] == (EXPLOSION if overflows else NAN_OFF) - 1
    assert all(bool(part.isfinite().all()) for part in content["model"].values())
    assert not math.isnan(content["optimizer"]["param_groups"][0]["lr"])
