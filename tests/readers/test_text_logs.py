"""Text logs of training programs, written here in each program's form, and damaged ones."""

# ruff: noqa: E501 - lines are as long as programs print them

from __future__ import annotations

import re
from collections.abc import Mapping
from math import inf, nan
from random import Random

import pytest

from rmetric.readers import LogError, read_log, text_formats, text_pairs, text_programs
from rmetric.readers.step_forms import STEP_FORMS, match_step, may_state_step
from rmetric.readers.text_parts import TextFormat
from rmetric.readers.text_readers import TEXT_FORMATS, as_reader
from studies.diagnosis_benchmark.corpus import TABLES
from tests.readers.test_formats import curve

OWN = (*TEXT_FORMATS, text_formats.DEEPSPEED)
Cells = list[dict[str, object]]

#: Its own reader, a log, and what must come out of it.
SAMPLES: dict[str, tuple[TextFormat, str, Cells]] = {
    "megatron": (text_formats.MEGATRON, """\
> building the model on rank 0
[default0]: iteration        1/     100 | consumed samples:            8 | elapsed time per iteration (ms): 900.1 | learning rate: 0.000E+00 | global batch size:     8 | loss scale: 65536.0 | number of skipped iterations:   1 | number of nan iterations:   0 |
time (ms) | forward-compute: 100.00 | backward-compute: 200.00
[deepspeed] OVERFLOW! Rank 0 Skipping step. Attempted loss scale: 65536, reducing to 32768
[default0]: iteration        2/     100 | consumed samples:           16 | learning rate: 1.500E-04 | lm loss: 1.250000E+01 | moe loss: 9.000000E-01 | loss scale: 32768.0 | grad norm: 2.500 | params norm: 40.125 | number of skipped iterations:   0 | number of nan iterations:   0 |[Rank 1] (after 2 iterations) memory (MB) | allocated: 5.0
-----------------------------------------------------------
 validation loss at iteration 2 | lm loss value: 1.225000E+01 | lm loss PPL: 2.089813E+05 |
 validation loss at iteration 2 on test set | lm loss value: 9.900000E+01 | lm loss PPL: 1.0E+05 |
[default0]: iteration        3/     100 | consumed samples:           24 | learning rate: 1.500E-04 | lm loss: 0.000000E+00 | loss scale: 32768.0 | grad norm: nan | number of skipped iterations:   0 | number of nan iterations:   1 |
 samples/sec: 2.1 | iteration        4/     100 | elapsed time per iteration (ms): 900.1 | learning rate: 1.500E-04 | lm_loss: 1.150000E+01 | loss scale: 32768.0 | number of skipped iterations:   0 | number of nan iterations:   0 |
""", [
        {"step": 1, "skipped": True, "learning_rate": 0.0, "loss_scale": 65536.0},
        {"step": 2, "skipped": False, "loss_scale": 32768.0, "loss": 12.5, "grad_norm": 2.5,
         "learning_rate": 1.5e-4, "parameter_norm": 40.125},
        {"step": 2, "eval_loss": 12.25},
        {"step": 3, "loss": nan, "skipped": False, "grad_norm": nan, "learning_rate": 1.5e-4,
         "loss_scale": 32768.0},
        {"step": 4, "loss": 11.5, "skipped": False, "learning_rate": 1.5e-4, "loss_scale": 32768.0},
    ]),
    "deepspeed": (text_formats.DEEPSPEED, """\
[2024-01-01 10:00:00,000] [INFO] [loss_scaler.py:188:update_scale] [deepspeed] OVERFLOW! Rank 0 Skipping step. Attempted loss scale: 65536, but hysteresis is 2. Reducing hysteresis to 1
[2024-01-01 10:00:01,000] [INFO] [loss_scaler.py:181:update_scale] [deepspeed] OVERFLOW! Rank 0 Skipping step. Attempted loss scale: 65536, reducing to 32768
[2024-01-01 10:00:02,500] [INFO] [logging.py:96:log_dist] [Rank 0] step=10, skipped=2, lr=[0.001, 0.001], mom=[(0.9, 0.95), (0.9, 0.95)]
[2024-01-01 10:00:04,500] [INFO] [logging.py:96:log_dist] [Rank 0] step=20, skipped=2, lr=[0.002, 0.002], mom=[(0.9, 0.95), (0.9, 0.95)]
ppl: 1.0
[deepscale] OVERFLOW! Skipping step. Attempted loss scale: 32768.0, reducing to 16384.0
steps: 30 loss: 2.5000 iter time (s): 0.500 samples/sec: 16.000
""", [
        {"step": 10, "skipped": True, "loss_scale": 32768.0, "time": 0.0, "learning_rate": 0.001},
        {"step": 20, "skipped": False, "time": 2.0, "learning_rate": 0.002},
        {"step": 20, "eval_loss": 0.0},
        {"step": 30, "skipped": True, "loss_scale": 16384.0, "loss": 2.5},
    ]),
    "nanogpt": (text_formats.NANOGPT, """\
tokens per iteration will be: 4,096
step 0: train loss 10.5000, val loss 10.6000
iter 0: loss 10.4000, time 100.00ms, mfu -100.00%
GRADIENT CHECK at 5
\x1b[32miter 10: loss nan, time 90.00ms, mfu 5.00%\x1b[0m
step 20: train loss 9.5000, val loss inf
20 | loss 9.2500 | lr 3.000000e-04 | 91.50ms | mfu 5.10%
iter 30: loss 9.0000, time 90.00ms, mfu 5.00%, lr 0.0002, grad norm 1.5000
""", [
        {"step": 0, "loss": 10.5, "eval_loss": 10.6},
        {"step": 0, "loss": 10.4},
        {"step": 10, "loss": nan},
        {"step": 20, "loss": 9.5, "eval_loss": inf},
        {"step": 20, "loss": 9.25, "learning_rate": 3e-4},
        {"step": 30, "loss": 9.0, "learning_rate": 2e-4, "grad_norm": 1.5},
    ]),
    "nanochat": (text_formats.NANOCHAT, """\
Step 00000 | Validation bpb: 3.2500
step 00000/00100 (0.00%) | loss: 10.500000 | grad norm: 1.2500 | lrm: 1.00 | dt: 500.00ms | tok/sec: 1,000 | mfu: 0.10 | total time: 0.00m
step 00001/00100 (1.00%) | loss: nan | grad norm: nan | lrm: 1.00 | dt: 250.00ms | tok/sec: 2,000 | mfu: 0.10 | total time: 0.00m
Step 00002/00100 | Training loss: 9.500000| lrm: 0.900000| num_tokens: 4,096
Step 00002 | Validation loss: 9.250000
""", [
        {"step": 0, "validation_bpb": 3.25},
        {"step": 0, "loss": 10.5, "grad_norm": 1.25, "time": 0.5},
        {"step": 1, "loss": nan, "grad_norm": nan, "time": 0.75},
        {"step": 2, "loss": 9.5},
        {"step": 2, "eval_loss": 9.25},
    ]),
    "modded_nanogpt": (text_formats.MODDED_NANOGPT, """\
import torch
print0(f"step:{step}/{train_steps} val_loss:{val_loss:.4f} train_time:{ms:.0f}ms")
====================================================================================
step:0/100 val_loss:10.8000 train_time:10ms step_avg:nanms
step:1/100 train_loss:10.7500 aux_loss:0.5000 grad_norm:0.4000 lr:0.0500 tok/s:39836 train_time:1500ms step_avg:1500.00ms
step:2/100 loss:nan t:2500ms avg:1250.0ms
step:50 curr_seq_len_jump:64
step:100/100 val_loss:3.2500 val_bpb:1.2000 train_time:60000ms step_avg:600.00ms
""", [
        {"step": 0, "eval_loss": 10.8, "time": 0.01},
        {"step": 1, "loss": 10.75, "grad_norm": 0.4, "learning_rate": 0.05, "time": 1.5},
        {"step": 2, "loss": nan, "time": 2.5},
        {"step": 100, "eval_loss": 3.25, "time": 60.0},
    ]),
    "llm_c": (text_formats.LLM_C, """\
| max_sequence_length T | 1024 |
val loss 11.0000
step    1/100 | loss 10.500000 (+nanz)| norm 15.2500 (+nanz)| lr 8.57e-07 | 380.60 ms | 54.8% bf16 MFU | 1377504 tok/s
step    2/100 | loss -nan (+nanz)| norm inf (+nanz)| lr 1.71e-06 | 380.60 ms | 54.8% bf16 MFU | 1377504 tok/s
val loss 9.500000
step    3/100 | train loss 9.250000 | norm 1.5000 | lr 3.00e-04 (380.60 ms, 100000 tok/s)
""", [
        {"step": 0, "eval_loss": 11.0},
        {"step": 1, "loss": 10.5, "grad_norm": 15.25, "learning_rate": 8.57e-07},
        {"step": 2, "loss": nan, "grad_norm": inf, "learning_rate": 1.71e-06},
        {"step": 2, "eval_loss": 9.5},
        {"step": 3, "loss": 9.25, "grad_norm": 1.5, "learning_rate": 3e-4},
    ]),
    "llm_c_main_log": (text_formats.LLM_C, "s:0 tel:11.0000\ns:0 trl:10.5000 lr:0.000001 norm:15.25\ns:1 trl:nan lr:0.000002 norm:nan\ns:1 eval:0.25\n", [
        {"step": 0, "eval_loss": 11.0},
        {"step": 0, "loss": 10.5, "learning_rate": 1e-6, "grad_norm": 15.25},
        {"step": 1, "loss": nan, "learning_rate": 2e-6, "grad_norm": nan},
    ]),
    "build_nanogpt": (text_formats.LLM_C, "0 val 10.9500\n0 hella 0.2400\n0 train 10.950000\n1 train 9.500000\n", [
        {"step": 0, "eval_loss": 10.95},
        {"step": 0, "loss": 10.95},
        {"step": 1, "loss": 9.5},
    ]),
    "torchtitan": (text_formats.TORCHTITAN, """\
[rank1]:[titan] 2025-01-01 10:00:00,000 - root - INFO - Training starts at step 1.
[rank0]:[titan] 2025-01-01 10:00:00,000 - root - INFO - \x1b[31mstep:  1  \x1b[32mloss:  8.2500  \x1b[38;2;180;60;0mgrad_norm:  1.5000  \x1b[34mmemory:  1.00GiB(2.00%)  \x1b[33mtps: 1,000\x1b[39m
[rank1]:[titan] 2025-01-01 10:00:00,000 - root - INFO - \x1b[31mstep:  1  \x1b[32mloss:  8.2500  \x1b[38;2;180;60;0mgrad_norm:  1.5000  \x1b[34mmemory:  1.00GiB(2.00%)  \x1b[33mtps: 1,000\x1b[39m
[rank0]:[titan] 2025-01-01 10:00:10,500 - root - INFO - validate step:  1  loss:  8.1250  memory:  1.00GiB(2.00%)  tps: 1,000
[rank0]:[titan] 2025-01-01 10:00:12,000 - root - INFO - step: 10  loss:     nan  grad_norm:     nan  memory:  1.00GiB(2.00%)  tps: 1,000
""", [
        {"step": 1, "loss": 8.25, "grad_norm": 1.5, "time": 0.0},
        {"step": 1, "eval_loss": 8.125, "time": 10.5},
        {"step": 10, "loss": nan, "grad_norm": nan, "time": 12.0},
    ]),
    "torchtune": (text_formats.TORCHTUNE, """\
INFO:torchtune.utils._logging:Learning rate scheduler is initialized.
Step 1 | loss:2.125 lr:2e-05 tokens_per_second_per_gpu:100.5 grad_norm:1.5
Step 2 | loss:nan lr:4e-05 tokens_per_second_per_gpu:100.5 grad_norm:inf
Step 2 | val_loss:2.0
""", [
        {"step": 1, "loss": 2.125, "learning_rate": 2e-5, "grad_norm": 1.5},
        {"step": 2, "loss": nan, "learning_rate": 4e-5, "grad_norm": inf},
        {"step": 2, "eval_loss": 2.0},
    ]),
    "torchtune_bar": (text_formats.TORCHTUNE, "\r  0%|          | 0/3 [00:00<?, ?it/s]\r1|1|Loss: 2.75:  33%|███| 1/3 [00:02<00:04]\r1|1|Loss: 2.75:  66%|███| 2/3 [00:04<00:02]\r1|2|Loss: 2.5:  66%|███| 2/3 [00:04<00:02]\n", [{"step": 1, "loss": 2.75}, {"step": 2, "loss": 2.5}]),
    "hugging_face": (text_programs.HUGGING_FACE, """\
Map: 100%|██████████| 1000/1000 [00:01<00:00, 900.00 examples/s]
  0%|          | 0/500 [00:00<?, ?it/s]\r  2%|▏         | 10/500 [00:10<08:10,  1.00s/it]
{'loss': 2.5, 'grad_norm': 1.25, 'learning_rate': 5e-05, 'epoch': 0.1}
  2%|▏         | 10/500 [00:10<08:10,  1.00s/it]\r  4%|▍         | 20/500 [00:20<08:00,  1.00s/it]{'loss': 'nan', 'grad_norm': 'nan', 'learning_rate': '4.9e-05', 'epoch': '0.2'}
  0%|          | 0/63 [00:00<?, ?it/s]\r 50%|█████     | 32/63 [00:01<00:01, 30.0it/s]
{'eval_loss': 2.25, 'eval_runtime': 2.0, 'epoch': 0.2}
  6%|▌         | 30/500 [00:30<07:50,  1.00s/it]
{'loss': 0.0, 'grad_norm': tensor(0.5, device='cuda:0'), 'learning_rate': 4.8e-05, 'epoch': 0.3}
{'train_runtime': 30.0, 'train_loss': 1.5, 'epoch': 0.3}
""", [
        {"step": 10, "loss": 2.5, "grad_norm": 1.25, "learning_rate": 5e-5},
        {"step": 20, "loss": nan, "grad_norm": nan, "learning_rate": 4.9e-5},
        {"step": 20, "eval_loss": 2.25},
        {"step": 30, "loss": 0.0, "grad_norm": 0.5, "learning_rate": 4.8e-5},
    ]),
    "swift": (text_programs.HUGGING_FACE, "{'loss': 2.5, 'learning_rate': 1e-05, 'epoch': 0.1, 'global_step/max_steps': '5/100'}\n{'loss': 2.25, 'learning_rate': 1e-05, 'epoch': 0.2, 'global_step/max_steps': '10/100'}\n", [
        {"step": 5, "loss": 2.5, "learning_rate": 1e-5},
        {"step": 10, "loss": 2.25, "learning_rate": 1e-5},
    ]),
    "fairseq": (text_programs.FAIRSEQ, """\
2024-01-01 10:00:00 | INFO | fairseq.trainer | NOTE: gradient overflow detected, ignoring gradient, setting loss scale to: 64.0
2024-01-01 10:00:01 | INFO | train_inner | epoch 001:     10 / 100 loss=12.5, nll_loss=12.25, ppl=4871, wps=1000, ups=2, wpb=500, bsz=8, num_updates=9, lr=1e-05, gnorm=2.5, loss_scale=64, train_wall=5, wall=6
2024-01-01 10:00:02 | INFO | valid | epoch 001 | valid on 'valid' subset | loss 11.5 | nll_loss 11.25 | ppl 2435 | num_updates 9 | best_loss 11.5
2024-01-01 10:00:03 | INFO | train | epoch 001 | loss 12.75 | nll_loss 12.5 | num_updates 9 | lr 1e-05 | gnorm 2.5 | wall 7
2024-01-01 10:00:04 | INFO | train_inner | {"epoch": 2, "update": 1.5, "loss": "nan", "nll_loss": "nan", "num_updates": "19", "lr": "2e-05", "gnorm": "inf", "loss_scale": "64", "wall": "8"}
2024-01-01 10:00:05 | INFO | valid | {"epoch": 2, "valid_loss": "10.5", "valid_ppl": "1448", "valid_num_updates": "19"}
""", [
        {"step": 9, "skipped": True, "loss": 12.5, "learning_rate": 1e-5, "grad_norm": 2.5,
         "loss_scale": 64.0, "time": 6.0},
        {"step": 9, "eval_loss": 11.5},
        {"step": 19, "loss": nan, "learning_rate": 2e-5, "grad_norm": inf, "loss_scale": 64.0,
         "time": 8.0},
        {"step": 19, "eval_loss": 10.5},
    ]),
    "fairseq_old": (text_programs.FAIRSEQ, """\
| WARNING: overflow detected, setting loss scale to: 0.25
| epoch 001 | loss 6.5 | nll_loss 5.5 | ppl 45.25 | num_updates 100 | lr 0.0005 | gnorm 0.5 | loss_scale 0.250 | wall 200
| epoch 001 | valid on 'valid' subset | valid_loss 6.25 | valid_nll_loss 5.25 | num_updates 100
| epoch 002:     10 / 100 loss=6.125, nll_loss=5.125, wps=1000, gnorm=0.25
""", [
        {"step": 100, "skipped": True, "loss": 6.5, "learning_rate": 0.0005, "grad_norm": 0.5,
         "loss_scale": 0.25, "time": 200.0},
        {"step": 100, "eval_loss": 6.25},
        {"step": 110, "loss": 6.125, "grad_norm": 0.25},
    ]),
    "stable_baselines3": (text_programs.STABLE_BASELINES3, """\
---------------------------------
| rollout/           |          |
|    ep_len_mean     | 141      |
|    ep_rew_mean     | 94.2     |
| time/              |          |
|    fps             | 82       |
|    total_timesteps | 2048     |
---------------------------------
Eval num_timesteps=4096, episode_reward=115.83 +/- 0.00
-----------------------------------------
| eval/                   |             |
|    mean_reward          | 116         |
| time/                   |             |
|    total_timesteps      | 4096        |
| train/                  |             |
|    approx_kl            | 0.013219705 |
|    learning_rate        | 0.0003      |
|    loss                 | 5.82        |
-----------------------------------------
""", [
        {"step": 2048, "reward": 94.2},
        {"step": 4096, "loss": 5.82, "learning_rate": 0.0003, "kl": 0.013219705},
    ]),
    "mlperf": (text_programs.MLPERF, """\
:::MLLOG {"namespace": "", "time_ms": 1000, "event_type": "POINT_IN_TIME", "key": "submission_benchmark", "value": "llama31_8b", "metadata": {}}
:::MLLOG {"namespace": "", "time_ms": 2000, "event_type": "INTERVAL_START", "key": "run_start", "value": null, "metadata": {}}
0: :::MLLOG {"namespace": "", "time_ms": 3500, "event_type": "POINT_IN_TIME", "key": "tracked_stats", "value": {"train_step_time": 1.5, "reduced_train_loss": 7.75}, "metadata": {"step": 64.0}}
:::MLLOG {"namespace": "", "time_ms": 4500, "event_type": "POINT_IN_TIME", "key": "train_loss", "value": NaN, "metadata": {"samples_count": 128}}
:::MLLOG {"namespace": "", "time_ms": 5500, "event_type": "POINT_IN_TIME", "key": "eval_accuracy", "value": 6.5, "metadata": {"samples_count": 128}}
:::MLLOG {"namespace": "", "time_ms": 6500, "event_type": "POINT_IN_TIME", "key": "tracked_stats", "value": {"throughput": 5.0}, "metadata": {"step": 128}}
""", [
        {"step": 64, "loss": 7.75, "time": 1.5},
        {"step": 128, "loss": nan, "time": 2.5},
        {"step": 128, "eval_loss": 6.5, "time": 3.5},
    ]),
}  # fmt: skip
MEGATRON, DEEPSPEED, NANOCHAT, MLPERF = (
    SAMPLES[name][1] for name in ("megatron", "deepspeed", "nanochat", "mlperf")
)


def test_each_text_format_has_a_sample():
    assert {own.name for own, _, _ in SAMPLES.values()} == {own.name for own in OWN}


def cells_of(reader, text: str, mapping: Mapping[str, str] | None = None) -> Cells:
    lines = enumerate(text.split("\n"), start=1)
    found = reader.rows(lines, mapping) if mapping else reader.rows(lines)
    return [dict(row.cells) for row in found]


def alike(cells: Cells) -> list[list[tuple[str, str]]]:
    """nan as a word, which equals itself; True apart from 1."""
    return [sorted((name, repr(value)) for name, value in row.items()) for row in cells]


def read_text(path, text: str, mapping: Mapping[str, str] | None = None):
    path.write_bytes(text.encode())
    return read_log(path, mapping)


def among_junk(text: str) -> str:
    """With colours, carriage returns and lines of something else."""
    junk = (
        "WARNING: step into the unknown, loss of connection\n\n\x1b[0m=== ☃ | 3.0 | : = { } [ ]\n"
    )
    ended = text.replace("\n", "\r\n") if "\r" not in text else text
    return "".join(f"\x1b[1m{line}\x1b[0m\n{junk}" for line in ended.split("\n") if line)


def in_colours(text: str) -> str:
    return re.sub(r"[^\s\r]+", "\x1b[31m\\g<0>\x1b[38;2;180;60;0m", text)


@pytest.mark.parametrize("name", SAMPLES)
@pytest.mark.parametrize("change", [str, among_junk, in_colours])
def test_a_log_is_known_and_read_whatever_stands_between_and_in_its_words(tmp_path, name, change):
    own, text, expected = SAMPLES[name]
    changed = change(text)
    assert alike(cells_of(own, changed)) == alike(expected)
    log = read_text(tmp_path / "log", changed)
    assert log.format == own.name
    records = [record for run in log.runs for record in run.records]
    for field, target in (("training_loss", "loss"), ("validation_loss", "eval_loss")):
        found = [(r.step, getattr(r, field)) for r in records if getattr(r, field) is not None]
        stated = [(cells["step"], cells[target]) for cells in expected if target in cells]
        assert repr(found) == repr(stated)


@pytest.mark.parametrize("name", SAMPLES)
def test_a_log_is_known_by_its_own_reader_alone(name):
    own, text, _ = SAMPLES[name]
    # What DeepSpeed prints stands in logs of all that it trains: its reader is last.
    known = [reader for reader in OWN if as_reader(reader).matches(text)]
    assert known[0] is own
    assert known[1:] in ([], [text_formats.DEEPSPEED])


@pytest.mark.parametrize("name", SAMPLES)
def test_a_log_that_is_cut_anywhere_gives_what_comes_before_and_never_fails(name):
    reader, text, expected = SAMPLES[name]
    for end in range(0, len(text), 7):
        found = alike(cells_of(reader, text[:end]))
        # All but what the cut line may have lost.
        assert found[:-1] == alike(expected)[: max(0, len(found) - 1)]


def test_the_loss_of_a_line_that_was_cut_in_its_middle_is_not_half_a_number():
    assert cells_of(text_formats.MEGATRON, " iteration 5/ 9 | lm loss: 1.25E+") == []
    assert cells_of(text_formats.MODDED_NANOGPT, "step:5/9 train_loss:") == []
    assert cells_of(text_programs.MLPERF, MLPERF[: MLPERF.index("7.75") + 2]) == []
    assert cells_of(text_programs.HUGGING_FACE, "{'loss': 2.2") == []


@pytest.mark.parametrize(
    ("entries", "steps"),  # by the step of the bar before
    [({0: 2}, [1, 2]), ({40: 1, 80: 1}, [40, 80]), ({10: 1, 20: 3}, [10, 20, 30, 40]),
     ({57: 5, 79: 2}, [*range(1, 8)])],
)  # fmt: skip
def test_entries_of_the_trainer_behind_a_bar(tmp_path, entries, steps):
    text = ""
    for done, number in entries.items():
        text += f" 50%|█████     | {done}/100 [00:10<08:10,  1.00s/it]\n"
        text += "{'loss': 2.5, 'epoch': 0.1}\n" * number + "{'eval_loss': 2.4, 'epoch': 0.1}\n"
    (run,) = read_text(tmp_path / "a.log", text).runs
    assert [record.step for record in run.records if record.training_loss] == steps
    assert (run.records[-1].step, run.records[-1].validation_loss) == (steps[-1], 2.4), run.notes


def test_an_accuracy_is_no_loss():
    image = MLPERF.replace("llama31_8b", "resnet")
    assert [cells.get("eval_loss") for cells in cells_of(text_programs.MLPERF, image)] == [None] * 2


#: Programs that have no reader of their own: a text, and its `curve`.
OTHERS = {
    "pairs": (
        "[2024-01-01 10:00:00] INFO step=120 loss=3.21 lr=1e-4 gnorm=0.8\n"
        "[2024-01-01 10:00:10] INFO step=121 loss=nan lr=1e-4 gnorm=inf\n",
        [(120, 3.21, None, 0.8), (121, nan, None, inf)],
    ),
    "steps inside of an epoch": (
        "Epoch 1 Iter 20/500: loss 3.2\nEpoch 1 Iter 500/500: loss 3.1\n"
        "Epoch 1 done, train loss 3.15, val loss 3.0\nEpoch 2 Iter 20/500: loss 2.9\n"
        "Epoch 2 Iter 7/9: val loss 2.75\nEpoch 2/9 Iter 40/500: loss 2.7\nEpoch 1/9 Iter 20/500: loss 3.3\n",
        [
            (20, 3.2),
            (500, 3.1),
            (500, None, 3.0),
            (520, 2.9),
            (520, None, 2.75),
            (540, 2.7),
            (20, 3.3),
        ],
    ),
    "epochs alone, two words and an equals sign": (
        "Epoch 1/3, Train Loss: 2.5, Val Loss: 2.4\nEpoch 2: Train Loss=2.3, Val Loss=2.2\n",
        [(1, 2.5, 2.4), (2, 2.3, 2.2)],
    ),
    "the step first, a count beside the batch's size": (
        "0: train loss 4.5, val loss 4.25\n100: train loss 3.5, val loss 3.25\n"
        "[000500/9000] A | loss 2.5 | batch 16\n[001000/9000] B | loss 2.4 | batch 16\n",
        [(0, 4.5, 4.25), (100, 3.5, 3.25), (500, 2.5), (1000, 2.4)],
    ),
    "rounded steps": (
        "step:4K smpl:134K loss:0.5 grdn:15.5\nstep:4K smpl:140K loss:0.5 grdn:15.5\n"
        "step:5K smpl:146K loss:0.5 grdn:15.5\nstep:5K smpl:146K loss:0.5 grdn:15.5\n",
        [(4000, 0.5, None, 15.5), (4000, 0.5, None, 15.5), (5000, 0.5, None, 15.5)],
    ),
    "a heading with values below it": (
        "2024-05-01 10:00:00.123 train:962 INFO [step=1/100,epoch=0]\n    train/CrossEntropyLoss=11.5\n"
        "    train/Perplexity=98,715\n    optim/total_grad_norm=1.25\n"
        "2024-05-01 10:00:10.123 train:962 INFO [step=2/100,epoch=0]\n    train/CrossEntropyLoss=11.25\n",
        [(1, 11.5), (1, None, None, 1.25), (2, 11.25)],
    ),
    "a heading of a batch": (
        "[batch=1/9]:\n\t Train time/batch: 0\n\t Train loss/train/total: 11.5\n"
        "[batch=2/9]:\n\t Train loss/train/total: 11.25\n",
        [(1, 11.5), (2, 11.25)],
    ),
    "bars of epochs": (
        "Epoch 1/2\n\r 1/50 [..] - ETA: 9s - loss: 2.5\r50/50 [==] - 5s 20ms/step - loss: 2.25 - val_loss: 2.0\n"
        "Epoch 2/2\n\r 1/50 [..] - ETA: 9s - loss: 1.5\n",
        [(1, 2.5), (50, 2.25, 2.0), (51, 1.5)],
    ),
    "bars with values behind": (
        "Epoch 0:  10%|█         | 10/100 [00:01<00:09,  9.90it/s, v_num=0, train_loss=3.25]\r"
        "Epoch 0:  20%|██        | 20/100 [00:02<00:08,  9.90it/s, v_num=0, train_loss=3.00]\n",
        [(10, 3.25), (20, 3.0)],
    ),
    "counts in brackets": (
        "INFO - Epoch(train) [1][ 50/1000]  lr: 1.0e-02  eta: 1:00:00  time: 0.1  grad_norm: 3.5  loss: 1.25\n"
        "INFO - Epoch(train) [2][ 50/1000]  lr: 1.0e-02  eta: 1:00:00  time: 0.1  grad_norm: 3.0  loss: 1.00\n",
        [(50, 1.25, None, 3.5), (1050, 1.0, None, 3.0)],
    ),
    "mean in parentheses": (
        "Epoch: [0][  10/500]\tTime  0.25 ( 0.30)\tLoss 6.50e+00 (6.75e+00)\tAcc@1   0.39 (  0.10)\n"
        "Epoch: [1][  10/500]\tTime  0.25 ( 0.30)\tLoss 6.25e+00 (6.75e+00)\tAcc@1   0.39 (  0.10)\n",
        [(10, 6.5), (510, 6.25)],
    ),
    "more than one loss, the word for an evaluation elsewhere": (
        "step: 1 | policy loss: 0.1 | z_loss: 0.2 | loss: 4.5\nstep: 2 | policy loss: 0.1 | loss: 4.25\n"
        "step 10: loss 3.5\nstep 20: loss 3.25\nValidation: loss 3.0\n[eval] step 20 loss=2.75\n"
        "best val loss 2.5 at step 10\ntest step 20: loss 9.0\nstep 30: loss 2.5\n",
        [(1, 4.5), (2, 4.25), (10, 3.5), (20, 3.25), (20, None, 3.0), (20, None, 2.75), (30, 2.5)],
    ),
    "two splits, a step in parentheses": (
        "Ep 1, Step 000000, Train: 9.5, Val: 9.6, Step tok/sec: 7238\nEvery effort moves you\n"
        "Ep 1 (Step 000005): Train loss 8.5, Val loss 8.25\n",
        [(0, 9.5, 9.6), (5, 8.5, 8.25)],
    ),
    "ranks": (
        "[rank0]: step=1 loss=2.5\n[rank1]: step=1 loss=2.5\n[rank0]: step=2 loss=2.25\n",
        [(1, 2.5), (2, 2.25)],
    ),
    "norms in a dict, counts with letters": (
        "tflops=63.3,step=0,loss=11.5,tgs=1.5K,lr=4e-07,loss_scale=65536.0,grad_norm={'0_default': 63.5}\n"
        "tflops=63.3,step=1,loss=11.25,tgs=1.5K,lr=4e-07,loss_scale=65536.0,grad_norm={'0_default': 60.5}\n",
        [(0, 11.5, None, 63.5), (1, 11.25, None, 60.5)],
    ),
}


def curve_of(cells: Cells) -> list[str]:
    names = ("step", "loss", "eval_loss", "grad_norm")
    return [repr(tuple(row.get(name) for name in names)) for row in cells]


@pytest.mark.parametrize("name", OTHERS)
def test_text_of_no_known_program_is_read_by_the_names_of_its_numbers(name):
    text, expected = OTHERS[name]
    assert [reader for reader in OWN if reader.mark.search(text)] == []
    assert text_pairs.matches(text)
    assert curve_of(cells_of(text_pairs, text)) == [repr(row) for row in curve(*expected)]


PROSE = "We stopped at step 100. The loss was 3.2.\nconnection lost: 3 s\n"
SOURCE = """\
step = 0
loss: float = 0.0  # of this step
for step in range(1, 100):
    loss = 0.5
    train_loss = 2.5
    step += 1
    val_loss = 1e9
    print(f"step {step}: loss {loss:.4f}")
"""


@pytest.mark.parametrize("text", [PROSE, SOURCE], ids=["prose", "source"])
def test_prose_and_a_program_s_source_are_no_logs(text):
    assert not any(as_reader(reader).matches(text) for reader in OWN)
    assert not text_pairs.matches(text)
    assert cells_of(text_pairs, text) == []


def test_a_mapping_says_which_number_is_the_loss():
    text = "tick 5 objective: 2.5 | loss: 9\ntick 6 objective: 2.25 | loss: 9\n"
    mapping = {"step": "tick", "loss": "objective"}
    assert text_pairs.matches(text, mapping)
    found = curve_of(cells_of(text_pairs, text, mapping))
    assert found == [repr(row) for row in curve((5, 2.5), (6, 2.25))]


@pytest.mark.parametrize("name", ["nanogpt", "megatron", "torchtitan", "fairseq", "mlperf"])
def test_a_program_s_start_of_any_length_may_come_first(tmp_path, name):
    reader, text, _ = SAMPLES[name]
    start = "".join(f"  argument_{i} ................ {i}, of 3 values\n" for i in range(20_000))
    log = read_text(tmp_path / "long.log", f"launching\n{start}{text}")
    assert len(start) > 2 << 18
    assert log.format == reader.name


def test_each_form_states_the_steps_of_its_lines():
    stating = set()
    for step, text in TABLES["steps"]:
        found = match_step(text)
        assert (found and found.step) == step, text
        assert found is None or may_state_step(re.sub("[0-9]+", "0", text)), text
        stating.add(found and found.form)
    # Theirs are the names of counters.
    assert {form.name for form in STEP_FORMS} - stating == {"MLPerf", "word"}
    assert not may_state_step("loss: 0.0 | grad_norm: 0.0 | batch time | 0.0s")
    assert may_state_step("loss: 0.0 | batch time: 0.0s")


def test_a_last_line_that_is_cut_off_is_left_out_and_one_without_its_end_is_not(tmp_path):
    whole = "".join(f"iter {i}: loss {9 - i / 8:.4f}, time 90.00ms, mfu 5.00%\n" for i in range(9))
    (run,) = read_text(tmp_path / "a.log", whole[:-1]).runs
    assert run.records[-1].training_loss == 8.0
    assert not any("cut off" in note for note in run.notes)
    (run,) = read_text(tmp_path / "b.log", whole + "iter 9: loss 7.").runs
    assert len(run.records) == 9
    assert any("line 10 is cut off" in note for note in run.notes)


def test_a_training_s_own_lines_go_before_those_of_deepspeed(tmp_path):
    own = "".join(f"epoch 0 step {i} loss {9 - i / 8}\n" for i in range(10, 30, 10))
    assert read_text(tmp_path / "a.log", DEEPSPEED + own).format == text_pairs.NAME
    late = DEEPSPEED + "nothing to say\n" * 30_000 + MEGATRON
    assert read_text(tmp_path / "b.log", late).format == text_formats.MEGATRON.name


def test_bits_per_byte_are_an_evaluation_only_by_map(tmp_path):
    (run,) = read_text(tmp_path / "a.log", NANOCHAT).runs
    assert [r.validation_loss for r in run.records] == [None, None, 9.25]
    assert any("validation_bpb" in note for note in run.notes)
    (run,) = read_text(tmp_path / "a.log", NANOCHAT, {"eval_loss": "validation_bpb"}).runs
    assert run.records[0].validation_loss == 3.25


@pytest.mark.parametrize("seed", range(4))
def test_damaged_bytes_never_stop_a_reader(seed):
    random = Random(seed)
    for name, (_, text, _) in SAMPLES.items():
        damaged = list(text)
        for _ in range(len(text) // 20):
            char = random.choice("0919eE.-+:|,={}[]'\" \t\r\nnaif\\x")
            damaged[random.randrange(len(text))] = char
        for reader in (*OWN, text_pairs):
            for cells in cells_of(reader, "".join(damaged)):
                assert isinstance(cells["step"], int), name
                assert cells["step"] >= 0


def test_a_step_in_more_digits_than_there_are_names_its_line(tmp_path):
    for text in ("iter 1: loss 3.0, time 1ms\n", "step:1/9 train_loss:3.0\n", "s:1 trl:3.0\n"):
        far = text.replace("1", "1" * 5000, 1)
        with pytest.raises(LogError, match="line 2"):
            read_text(tmp_path / "a.log", text + far)
