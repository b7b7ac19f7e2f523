"""Memory, times and what reinforcement learning logs, in the names and units of the programs."""

from __future__ import annotations

import json
from typing import Any

import pytest

from rmetric.evaluation import judge_run
from rmetric.readers import read_log

GIB = 2.0**30
TRL = {
    "loss": 0.0, "grad_norm": 0.42, "learning_rate": 1e-6, "completions/mean_length": 120.5,
    "completions/clipped_ratio": 0.1, "rewards/accuracy/mean": 0.2, "reward": 0.5,
    "reward_std": 0.2, "frac_reward_zero_std": 0.25, "kl": 0.001, "entropy": 0.4,
    "clip_ratio/region_mean": 0.01,
}  # fmt: skip
OF_TRL = {
    "reward": 0.5, "reward_spread": 0.2, "equal_rewards": 0.25, "kl": 0.001, "entropy": 0.4,
    "response_length": 120.5, "clip_fraction": 0.01,
}  # fmt: skip
VERL = (
    "step:{} - actor/entropy_loss:0.4 - actor/kl_loss:0.001 - actor/pg_loss:0.02"
    " - actor/pg_clipfrac:0.01 - actor/ppo_kl:0.3 - actor/grad_norm:0.42 - critic/score/mean:0.5"
    " - critic/score/max:1.0 - critic/rewards/mean:0.4 - response_length/mean:120.5"
    " - response_length/clip_ratio:0.1\n"
)
PPO = {
    "objective/kl": 4.0, "objective/entropy": 20.0, "objective/scores": 0.5,
    "policy/approxkl_avg": 0.01, "policy/clipfrac_avg": 0.01, "loss/policy_avg": -0.01,
}  # fmt: skip
SB3 = {
    "rollout/ep_rew_mean": 0.5, "rollout/ep_len_mean": 30, "train/approx_kl": 0.001,
    "train/entropy_loss": -0.4, "train/clip_fraction": 0.01, "train/loss": 7.0,
}  # fmt: skip
NO_REWARDS = ("rewards/chosen", "rewards/accuracy/mean", "eval_reward", "reward_model_loss")


def lines(columns: dict[str, Any], number: int = 3) -> str:
    return "".join(json.dumps({"step": n, **columns}) + "\n" for n in range(1, number + 1))


def memory(columns: dict[str, Any], **expected: float) -> tuple[str, dict[str, Any]]:
    return lines({"loss": 2.5, **columns}), {"memory": expected, "training_loss": 2.5}


def speed(columns: dict[str, Any], seconds: float | None = None, **throughput: float) -> Any:
    expected = {"step_seconds": seconds, "throughput": throughput or None}
    return lines({"loss": 2.5, **columns}), expected


def times(wait: str, step: str, scale: int) -> tuple[str, dict[str, Any]]:
    columns = {"loss": 3.0, wait: 0.3 * scale, step: 0.5 * scale}
    return lines(columns), {"data_wait_seconds": 0.3, "step_seconds": 0.5}


#: What a program logs -> fields that each of the records has.
LOGGED: dict[str, tuple[str, dict[str, Any]]] = {
    "memory of ms-swift": memory({"memory(GiB)": 20.5}, device=20.5 * GIB),
    "memory of torchtitan": memory(
        {"memory/max_reserved(GiB)": 20.5, "memory/max_reserved(%)": 25.0},
        device=20.5 * GIB, device_percent=25.0,
    ),
    "memory of Composer": memory({"memory/current_allocated_mem": 20.5}, device=20.5e9),
    "memory of W&B": memory(
        {"system.proc.memory.rssMB": 700.0, "system.gpu.0.memoryAllocated": 40.0,
         "system.memory": 55},
        host=700e6, device_percent=40.0, host_percent=55.0,
    ),
    "memory of verl": memory(
        {"perf/max_memory_reserved_gb": 20.5, "perf/cpu_memory_used_gb": 90.0},
        device=20.5e9, host=90e9,
    ),
    "memory of Megatron": memory({"mem-allocated-bytes": 2e10}, device=2e10),
    "memory of mmcv": memory({"memory": 4321}, device=4321 * 2.0**20),
    "memory in a dict that is printed": (
        "".join(f"{ {'loss': 2.0, 'memory(GiB)': 2.5, 'epoch': n} }\n" for n in (1, 2)),
        {"memory": {"device": 2.5 * GIB}},
    ),
    "waiting for data, in seconds": times("data_time", "time", 1),
    "waiting for data, in milliseconds": times("time/data_loading_ms", "time/step_ms", 1000),
    "waiting for data, of torchtitan": times(
        "time_metrics/data_loading(s)", "time_metrics/end_to_end(s)", 1
    ),
    "a time alone is not that of a step": (
        "step,loss,time\n1,3.0,12.5\n2,2.9,13.5\n", {"step_seconds": None},
    ),
    "speed of MaxText": speed(
        {"perf/step_time_seconds": 0.5, "perf/per_device_tokens_per_sec": 900}, 0.5, tokens=900
    ),
    "speed of nanotron": speed(
        {"tokens_per_sec": 900, "elapsed_time_per_iteration_ms": 500}, 0.5, tokens=900
    ),
    "speed of NeMo-RL": speed({"timing/train/total_step_time": 0.5}, 0.5),
    "speed of T5X": speed({"timing/seconds_per_step": 0.5}, 0.5),
    "speed of torchtitan": speed({"throughput(tps)": 900, "mfu(%)": 40}, tokens=900),
    "speed of Composer": speed(
        {"throughput/batches_per_sec": 2, "throughput/samples_per_sec": 16,
         "throughput/device/tokens_per_sec": 900},
        0.5, tokens=900, samples=16,
    ),
    "speed of ms-swift in a dict that is printed": (
        "".join(f"{ {'loss': 2.0, 'train_speed(s/it)': 0.5, 'epoch': n} }\n" for n in (1, 2)),
        {"step_seconds": 0.5},
    ),
    "speed of evaluations": speed({"eval_samples_per_second": 9, "eval_steps_per_second": 2}),
    "a speed with its unit, which is no number": speed({"it/s": "2.0it/s", "tps": "1.2k"}),
    "TRL in a dict that is printed": (
        "".join(f"{TRL | {'epoch': n / 10}}\n" for n in range(1, 4)), {"policy": OF_TRL},
    ),
    "TRL in lines": (lines(TRL, 500), {"policy": OF_TRL, "training_loss": 0.0}),
    "TRL in a trainer's state": (
        json.dumps({"log_history": [TRL | {"step": n} for n in range(1, 6)], "global_step": 5}),
        {"policy": OF_TRL},
    ),
    "verl in pairs": (
        "".join(map(VERL.format, range(1, 4))),
        {"policy": {name: OF_TRL[name] for name in OF_TRL
                    if name not in ("reward_spread", "equal_rewards")},
         "gradient_norm": 0.42, "training_loss": None},
    ),
    "PPO of TRL, without a loss": (
        lines(PPO),
        {"policy": {"reward": 0.5, "answer_kl": 4.0, "kl": 0.01, "entropy": 20.0,
                    "clip_fraction": 0.01},
         "training_loss": None},
    ),
    "preferences of DPO": (
        lines({"loss": 0.6, "rewards/accuracies": 0.25, "rewards/margins": 0.1}),
        {"policy": {"preference_accuracy": 0.25}},
    ),
    "a reward as it is, beside the normalised one": (
        "step,reward_mean_norm,reward_mean_raw\n1,0.01,0.5\n2,0.02,0.5\n",
        {"policy": {"reward": 0.5}},
    ),
    "a normalised reward alone": (lines({"rollout_reward/norm": 1, "Reward/norm": 0.5}),
                                  {"policy": {"reward": 0.5}}),
    **{f"{name} is no reward": (lines({"loss": 0.5, name: 0.1}), {"policy": None})
       for name in NO_REWARDS},
}  # fmt: skip


@pytest.mark.parametrize("name", LOGGED)
def test_what_is_logged_beside_the_loss_is_read(tmp_path, name):
    text, expected = LOGGED[name]
    (tmp_path / "log").write_text(text)
    records = read_log(tmp_path / "log").run.records
    assert records
    for record in records:
        found = {field: getattr(record, field) for field in expected}
        assert found == {
            k: v if isinstance(v, dict) else pytest.approx(v) for k, v in expected.items()
        }


def test_a_table_of_rewards_is_judged_by_them(tmp_path):
    path = tmp_path / "progress.csv"
    path.write_text("\n".join([",".join(SB3), *[",".join(map(str, SB3.values()))] * 20]))
    run = read_log(path).run
    policy = {"reward": 0.5, "kl": 0.001, "entropy": -0.4, "clip_fraction": 0.01}
    assert run.records[0].policy == policy
    assert judge_run(run.records).text == "LEARNS NOTHING since step 0"


def test_the_speed_of_a_whole_training_belongs_to_its_last_record(tmp_path):
    path = tmp_path / "trainer_state.json"
    end = {"train_loss": 2.0, "train_steps_per_second": 4.0, "train_samples_per_second": 32.0}
    history = [{"step": n, "loss": 3.0} for n in (1, 2)] + [{"step": 2, **end}]
    path.write_text(json.dumps({"log_history": history, "global_step": 2}))
    first, last = read_log(path).run.records
    assert (first.step_seconds, first.throughput) == (None, None)
    assert (last.step_seconds, last.throughput) == (0.25, {"samples": 32.0})


def test_a_row_of_memory_alone_is_no_record(tmp_path):
    path = tmp_path / "log.jsonl"
    rows = [
        {"step": n, "loss": 3.0} if n % 2 else {"step": n, "gpu_memory_gb": 4} for n in range(9)
    ]
    path.write_text("\n".join(map(json.dumps, rows)))
    assert [record.step for record in read_log(path).run.records] == [1, 3, 5, 7]


EPOCHS = [{"loss": 3 - n, "epoch": n / 2} for n in range(4)]


@pytest.mark.parametrize(
    ("rows", "steps", "note"),
    [
        (EPOCHS, [0, 1, 2, 3], "rows are counted from 0"),
        (EPOCHS[1:], [0, 1, 2], "rows are counted from 0"),
        ([row | {"steps": 10 * n} for n, row in enumerate(EPOCHS)], [0, 10, 20, 30], "0.5"),
        ([row | {"epoch": n} for n, row in enumerate(EPOCHS)], [0, 1, 2, 3], "'epoch' as step"),
    ],
)
@pytest.mark.parametrize("form", ["csv", "json", "jsonl"])
def test_an_epoch_with_fractions_is_no_step(tmp_path, rows, steps, note, form):
    path = tmp_path / f"log.{form}"
    lines = [",".join(rows[0]), *(",".join(map(str, row.values())) for row in rows)]
    lines = [json.dumps(row) for row in rows] if form == "jsonl" else lines
    path.write_text(json.dumps(rows) if form == "json" else "\n".join(lines) + "\n")
    run = read_log(path).run
    assert [record.step for record in run.records] == steps
    assert note in " ".join(run.notes)


def test_an_epoch_that_is_mapped_to_the_step_is_taken_at_its_word(tmp_path):
    path = tmp_path / "log.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in EPOCHS))
    with pytest.raises(ValueError, match=r"'epoch' is 0\.5: a whole step"):
        read_log(path, {"step": "epoch"})
