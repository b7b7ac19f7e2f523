"""What reinforcement learning logs, by the names of the programs that print it."""

import json

import pytest

from rmetric.evaluation import judge_run
from rmetric.readers import read_log

TRL = {
    "loss": 0.0, "grad_norm": 0.42, "learning_rate": 1e-6, "completions/mean_length": 120.5,
    "completions/clipped_ratio": 0.1, "rewards/accuracy/mean": 0.2, "reward": 0.5,
    "reward_std": 0.2, "frac_reward_zero_std": 0.25, "kl": 0.001, "entropy": 0.4,
    "clip_ratio/region_mean": 0.01,
}  # fmt: skip
EXPECTED = {
    "reward": 0.5, "reward_spread": 0.2, "equal_rewards": 0.25, "kl": 0.001, "entropy": 0.4,
    "response_length": 120.5, "clip_fraction": 0.01,
}  # fmt: skip
VERL = (
    "step:{} - actor/entropy_loss:0.4 - actor/kl_loss:0.001 - actor/pg_loss:0.02"
    " - actor/pg_clipfrac:0.01 - actor/ppo_kl:0.3 - actor/grad_norm:0.42 - critic/score/mean:0.5"
    " - critic/score/max:1.0 - critic/rewards/mean:0.4 - response_length/mean:120.5"
    " - response_length/clip_ratio:0.1"
)
PPO = {
    "objective/kl": 4.0, "objective/entropy": 20.0, "objective/scores": 0.5,
    "policy/approxkl_avg": 0.01, "policy/clipfrac_avg": 0.01, "loss/policy_avg": -0.01,
}  # fmt: skip
SB3 = {
    "rollout/ep_rew_mean": 0.5, "rollout/ep_len_mean": 30, "train/approx_kl": 0.001,
    "train/entropy_loss": -0.4, "train/clip_fraction": 0.01, "train/loss": 7.0,
}  # fmt: skip


def write(path, entries):
    path.write_text("\n".join(json.dumps({"step": n, **e}) for n, e in enumerate(entries, 1)))
    return read_log(path)


def test_trl_prints_a_dict(tmp_path):
    path = tmp_path / "train.log"
    path.write_text("\n".join(str(TRL | {"epoch": n / 10}) for n in range(1, 4)))
    log = read_log(path)
    assert log.format == "Hugging Face Trainer text"
    assert [record.policy for record in log.run.records] == [EXPECTED] * 3
    assert [record.step for record in log.run.records] == [1, 2, 3]


def test_verl_prints_pairs(tmp_path):
    path = tmp_path / "train.log"
    path.write_text("\n".join(VERL.format(n) for n in range(1, 4)))
    records = read_log(path).run.records
    expected = {k: v for k, v in EXPECTED.items() if k not in ("reward_spread", "equal_rewards")}
    assert [record.policy for record in records] == [expected] * 3
    assert records[0].gradient_norm == 0.42
    assert records[0].training_loss is None


@pytest.mark.parametrize("lines", [5, 500])
def test_lines_of_json(tmp_path, lines):
    log = write(tmp_path / "log.jsonl", [TRL] * lines)
    assert [record.policy for record in log.run.records] == [EXPECTED] * lines
    assert log.run.records[0].training_loss == 0.0


def test_a_trainer_state(tmp_path):
    path = tmp_path / "trainer_state.json"
    history = [TRL | {"step": n} for n in range(1, 6)]
    path.write_text(json.dumps({"log_history": history, "global_step": 5}))
    assert [record.policy for record in read_log(path).run.records] == [EXPECTED] * 5


def test_a_log_needs_no_loss(tmp_path):
    records = write(tmp_path / "log.jsonl", [PPO] * 3).run.records
    assert records[0].policy == {
        "reward": 0.5, "answer_kl": 4.0, "kl": 0.01, "entropy": 20.0, "clip_fraction": 0.01,
    }  # fmt: skip
    assert records[0].training_loss is None


def test_a_table(tmp_path):
    path = tmp_path / "progress.csv"
    rows = [",".join(map(str, SB3.values()))] * 20
    path.write_text("\n".join([",".join(SB3), *rows]))
    run = read_log(path).run
    assert run.records[0].policy == {
        "reward": 0.5, "kl": 0.001, "entropy": -0.4, "clip_fraction": 0.01,
    }  # fmt: skip
    assert judge_run(run.records).text == "LEARNS NOTHING since step 0"


@pytest.mark.parametrize(
    "name", ["rewards/chosen", "rewards/accuracy/mean", "eval_reward", "reward_model_loss"]
)
def test_what_is_called_like_a_reward_and_is_none(tmp_path, name):
    records = write(tmp_path / "log.jsonl", [{"loss": 0.5, name: 0.1}] * 3).run.records
    assert records[0].policy is None


def test_trl_logs_how_dpo_tells_preferences_apart(tmp_path):
    entries = [
        {"loss": 0.6, "rewards/accuracies": 0.25 * n, "rewards/margins": 0.1} for n in (1, 2)
    ]
    found = [record.policy for record in write(tmp_path / "dpo.jsonl", entries).run.records]
    assert found == [{"preference_accuracy": 0.25}, {"preference_accuracy": 0.5}]
