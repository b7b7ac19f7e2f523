"""Orderly ends are no failures, and what stood still before an end is told apart from clocks."""

from __future__ import annotations

import json

import pytest

from rmetric.diagnosis.patterns.stages import stated_stage
from rmetric.diagnosis.patterns.steps import match_step, may_state_step
from rmetric.diagnosis.reading.prefixes import PrefixParser


@pytest.mark.parametrize(
    ("line", "step"),
    [
        ("rank 3 upd 120 nll 2.1", 120),
        ("[12] it 77 ok, 1017 ms", 77),
        ("optimizer update 5 took 3 ms", 5),
        ("we saw it 77 times", None),
        ("last update 12 days ago", None),
        ("updates 0.3 s", None),
    ],
)
def test_short_words_for_steps(line, step):
    found = match_step(line)
    assert (found.step if found else None) == step
    assert step is None or may_state_step(line.replace(str(step), "0"))


def test_writing_a_checkpoint_is_one():
    assert stated_stage("rank 2 is writing part 4 of its checkpoint") == "checkpoint"
    assert stated_stage("Saving checkpoint 3") == "checkpoint"
    assert stated_stage("wrote 3 ckpts") == "checkpoint"


def test_ranks_of_loggers_that_write_json_or_keys_and_values():
    record = {"time": 1.25, "level": "info", "rank": 12, "node": "gpu-07", "message": "a"}
    parser = PrefixParser.learn([json.dumps(record).encode()] * 9)
    found = parser.split(json.dumps(record).encode())[0]
    assert (found.rank, found.node) == (12, "gpu-07")
    for other in ({"message": 'lost "rank": 3'}, {"local_rank": 3}, {"peer": {"rank": 3}}):
        assert parser.split(json.dumps(other).encode())[0].rank is None
    assert parser.split(b"lvl=info rank=31 state=sync")[0].rank == 31
    assert parser.split(b"step 7: waits for rank=31 state=sync")[0].rank is None


def test_the_step_of_a_scheduler_is_no_step():
    assert match_step("[srun] node 0 of 2: gpu-b06 job 84213 step 0 time limit 10:00:00") is None
    assert match_step("job 3 finished, step 7").step == 7
    assert match_step("[restart 2] step 100 loss 2.1").step == 100
    assert match_step("[09:20:11] job 41 on n7, restart chain step 2/6") is None
    assert match_step("[ep=0][ba=11431][event=BEFORE_DATALOADER]: Running event").step == 11431


WANDB = ["wandb:", "wandb: Run summary:", "wandb:       iter 150", "wandb: train/loss 2.5"]


@pytest.mark.parametrize("line", WANDB)
def test_the_table_of_wandb_at_the_end_states_no_step(line):
    assert match_step(line) is None
