"""Rescue in the Hugging Face Trainer and in Lightning: it goes back, and the end is the same."""

import re
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

from rmetric.rescue import Rescue, RescueConfig
from rmetric.rescue.policy import Evidence
from rmetric.rescue.recent_batches import RecentBatches
from tests.rescue.trainers import (
    EPOCH,
    ROWS,
    SMALL,
    STEPS,
    Planted,
    Stream,
    hugging_face,
    lightning,
)

TRAINERS = {"hugging_face": hugging_face, "lightning": lightning}
#: Executed steps with a wrong target, and the step at which that is found.
WRONG, FOUND = (21, 22, 23), 23


@pytest.fixture
def rescue(monkeypatch):
    """A rescue with evidence at the given steps of the monitor."""

    def make(*evidence):
        planted = Planted(list(evidence))
        monkeypatch.setattr("rmetric.rescue.judgement.evidence_of", planted)
        return Rescue(SMALL)

    return make


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """The same training without a disturbance and without a monitor, once for each kind."""
    known = {}

    def make(trainer, **settings):
        key = trainer, repr(sorted(settings.items(), key=str))
        if key not in known:
            data = {"data": Stream(ROWS * EPOCH)} if settings.pop("stream", False) else {}
            folder = tmp_path_factory.mktemp("undisturbed")
            known[key] = TRAINERS[trainer](folder, **settings, **data)
        return known[key]

    return make


def curve(outcome):
    return [(entry["step"], entry["epoch"], entry.get("loss")) for entry in outcome.history]


SETTINGS = {
    "hugging_face": {
        "plain": {"eval_strategy": "steps", "eval_steps": 7},
        "accumulated in half precision": {"gradient_accumulation_steps": 2, "half": True},
        "stream": {"stream": True, "max_steps": STEPS},
    },
    "lightning": {
        "plain": {"val_check_interval": 7},
        "accumulated in half precision": {"accumulate_grad_batches": 2, "half": True},
        "stream": {"stream": True, "max_steps": STEPS},
    },
}


@pytest.mark.parametrize("kind", SETTINGS["hugging_face"])
@pytest.mark.parametrize("trainer", TRAINERS)
def test_a_run_that_went_back_ends_as_one_that_was_never_disturbed(
    trainer, kind, rescue, undisturbed, tmp_path
):
    settings = dict(SETTINGS[trainer][kind])
    plain = undisturbed(trainer, **settings)
    if settings.pop("stream", False):
        settings["data"] = Stream(ROWS * EPOCH)
    step, wrong = FOUND, WRONG
    if "accumulated" in kind:  # two batches a step; the second epoch begins after step 9
        step, wrong = 12, (21, 22, 23, 24)
    action = rescue(Evidence(step=step, since=step - 1, words="planted"))
    found = TRAINERS[trainer](tmp_path, [action], wrong=wrong, **settings)
    assert not action.problem
    [entry] = action.decisions
    assert (entry["action"], entry["step"]) == ("go_back", step)
    assert entry["to"] == (15 if step == FOUND else 5)
    assert found.steps == plain.steps
    assert len(found.seen) > len(plain.seen)
    assert torch.equal(found.weights, plain.weights)
    # Each step, evaluation and end of an epoch at the same place, some of them twice.
    assert set(found.calls) == set(plain.calls)
    assert found.calls[-EPOCH // 2 :] == plain.calls[-EPOCH // 2 :]
    if plain.history:
        assert curve(found) == curve(plain)


@pytest.mark.parametrize(
    ("steps", "wrong", "to"),
    [
        ([(STEPS - 1, STEPS - 2)], (STEPS - 2, STEPS - 1), [45]),
        ([(STEPS, STEPS - 2)], (STEPS - 2, STEPS - 1), [45]),
        ([(FOUND, 21), (18, 17)], (*WRONG, 26, 27), [15, 15]),
    ],
    ids=["the step before the last", "the last", "again while steps are repeated"],
)
@pytest.mark.parametrize("trainer", TRAINERS)
def test_it_goes_back_at_any_step(trainer, steps, wrong, to, rescue, undisturbed, tmp_path):
    settings = SETTINGS[trainer]["plain"]
    action = rescue(*(Evidence(step=step, since=since, words="planted") for step, since in steps))
    found = TRAINERS[trainer](tmp_path, [action], wrong=wrong, **settings)
    assert [decision["to"] for decision in action.decisions] == to
    assert found.steps == STEPS
    assert torch.equal(found.weights, undisturbed(trainer, **settings).weights)


@pytest.mark.parametrize("trainer", TRAINERS)
def test_it_goes_past_the_data_of_the_window(trainer, rescue, undisturbed, tmp_path):
    settings = SETTINGS[trainer]["plain"]
    plain = undisturbed(trainer, **settings)
    planted = Evidence(step=FOUND, since=FOUND - 2, kind="data", words="planted")
    action = rescue(planted, planted)  # it comes back once
    found = TRAINERS[trainer](tmp_path, [action], wrong=WRONG, **settings)
    assert found.steps == STEPS
    # Three steps of evidence, and twice as many that are to come.
    assert [decision["skipped"] for decision in action.decisions] == [None, [21, 29]]
    made, again = FOUND + 1, FOUND + 1 - 15  # steps before it went back, and those repeated
    assert found.seen[:made] == plain.seen[:made]
    assert found.seen[made : made + again] == plain.seen[15:made]
    # The data of steps 16 to 20 are used again. Step 21 has those of step 30, to the epoch's end.
    rest = [*range(15, 20), *range(29, 2 * EPOCH)]
    made += again
    assert found.seen[made : made + len(rest)] == [plain.seen[i] for i in rest]
    # Of the stretch, the batches up to that of step 24, which was at hand, were drawn by then.
    skipped = action.decisions[1]["data"]["skipped"]
    assert skipped == [{"epoch": 1, "batches": [2, 5]}]
    if trainer == "hugging_face":  # Lightning's order depends on the numbers drawn before
        assert found.seen[-EPOCH:] == plain.seen[-EPOCH:]
    assert found.calls[-1] == plain.calls[-1]
    file = tmp_path / "run.skipped_epoch1_batch2_to_epoch1_batch5.pt"
    assert action.decisions[1]["data"]["file"] == str(file)
    kept = torch.load(file, weights_only=True)
    assert [(entry["epoch"], entry["batch"]) for entry in kept] == [(1, i) for i in range(2, 6)]
    assert [first_number(entry["value"]) for entry in kept] == plain.seen[20 : FOUND + 1]


@pytest.mark.parametrize("trainer", TRAINERS)
def test_a_second_stretch_is_of_the_data_that_were_used_instead(
    trainer, rescue, undisturbed, tmp_path
):
    plain = undisturbed(trainer, **SETTINGS[trainer]["plain"])
    planted = Evidence(step=FOUND, since=FOUND - 1, kind="data", words="planted")
    action = rescue(planted, planted, planted)
    found = TRAINERS[trainer](tmp_path, [action], **SETTINGS[trainer]["plain"])
    assert found.steps == STEPS
    # The first four are to come up to the batch of step 27, so step 22 has that of step 28; up to
    # step 31, eight more, is then the batch of step 37, the first of the third epoch.
    assert [decision["skipped"] for decision in action.decisions] == [None, [22, 27], [22, 31]]
    made = FOUND + 1 + 9
    third = [*range(15, 21), 27, 28, 29]
    assert found.seen[made : made + 9] == [plain.seen[i] for i in third]
    # The second epoch is over before the stretch is: another pass replaces it, in which the
    # rest of the stretch is left out too. No step of the schedule is lost.
    made += 9
    assert found.seen[made : made + 6] == [plain.seen[i] for i in range(15, 21)]
    assert len(found.seen) == made + STEPS - 15


def first_number(batch):
    while not isinstance(batch, dict):  # Lightning's also has the number of the batch
        batch = batch[0]
    return float(batch["inputs"][0, 0])


@pytest.mark.parametrize("trainer", TRAINERS)
def test_batches_that_are_not_kept_are_reported_once(
    trainer, rescue, monkeypatch, tmp_path, caplog
):
    kept = partial(RecentBatches, limit=100)
    monkeypatch.setattr("rmetric.rescue.data_position.RecentBatches", kept)
    first = Evidence(step=FOUND, since=21, words="planted")
    action = rescue(first, Evidence(step=18, since=17, words="planted"))
    found = TRAINERS[trainer](tmp_path, [action], wrong=WRONG)
    assert len(action.decisions) == 2
    assert found.steps == STEPS
    assert len(set(found.seen[EPOCH : 2 * EPOCH])) == EPOCH  # none of this pass twice
    messages = [record.message for record in caplog.records if "not kept" in record.message]
    assert messages == [
        "rmetric: the batches of the repeated steps are not kept (they take more than 100 bytes): "
        "the training goes on with the data that come next"
    ]


def test_checkpoints_of_repeated_steps_are_written_again(rescue, undisturbed, tmp_path):
    """The checkpoint of step 20 is that of a run that was never disturbed; one resumes from it."""
    settings = {"save_strategy": "steps", "save_steps": 10, "eval_strategy": "epoch"}
    plain = undisturbed("hugging_face", **settings)
    action = rescue(Evidence(step=FOUND, since=20, words="planted"))
    found = hugging_face(tmp_path, [action], wrong=(20, *WRONG), **settings)
    assert [decision["to"] for decision in action.decisions] == [15]
    assert torch.equal(found.weights, plain.weights)
    for step in (10, 20, 50):
        weights, expected = (
            load_file(run.folder / f"checkpoint-{step}" / "model.safetensors")
            for run in (found, plain)
        )
        assert all(torch.equal(weights[name], expected[name]) for name in weights)
    settings["resume"] = str(found.folder / "checkpoint-20")
    plain = hugging_face(tmp_path / "resumed", **settings)
    action = rescue(Evidence(step=33, since=32, words="planted"))
    found = hugging_face(tmp_path / "rescued", [action], wrong=(12, 13), **settings)
    # The incident of the checkpoint, with evidence at step 23, lasts to step 28.
    assert [decision["to"] for decision in action.decisions] == [30]
    assert torch.equal(found.weights, plain.weights)


def test_a_held_training_ends_at_the_snapshot(rescue, tmp_path):
    rescue(*(Evidence(step=step, since=21, words="planted") for step in (23, 24, 25)))
    action = Rescue(RescueConfig(every=5, probation=5, far=20, budget=1, observe=1))
    found = hugging_face(tmp_path, [action], wrong=range(21, 99))
    assert [decision["action"] for decision in action.decisions] == ["hold"]
    assert found.steps == action.decisions[0]["to"] == 15


def test_a_trainer_of_an_older_transformers_is_named_and_trains_on(caplog):
    from rmetric.integrations.hugging_face_loop import followed

    with followed(Rescue(SMALL), SimpleNamespace(), SimpleNamespace()):
        pass
    [line] = [record.getMessage() for record in caplog.records]
    assert re.search(r"the Trainer of transformers \d+\.\d.* has no _run_epoch", line)
    assert "needs transformers 5.5.4 or newer" in line
