"""Stages and steps: every rule by its example, near-misses, the gates that let lines through."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rmetric.diagnosis.job import STAGES
from rmetric.diagnosis.patterns.stages import RULES, next_stage, possible_rules, stated_stage
from rmetric.diagnosis.patterns.steps import (
    match_step,
    may_state_step,
    never_states_step,
)


def step_of(text: str) -> int | None:
    found = match_step(text)
    return None if found is None else found.step


def form(text: str) -> bytes:
    return text.lower().encode().translate(None, b"0123456789")


#: Stage, program and an entry that this rule, and none before it, matches; in the order of `RULES`.
EXAMPLES = [
    ("initialise", "MLPerf", ':::MLLOG {"time_ms": 1, "key": "init_start", "value": null}'),
    ("load data", "MLPerf", ':::MLLOG {"time_ms": 1, "key": "run_start", "value": null}'),
    ("evaluate", "MLPerf", ':::MLLOG {"time_ms": 1, "key": "eval_start", "value": null}'),
    ("checkpoint", "MLPerf", ':::MLLOG {"time_ms": 1, "key": "checkpoint_start", "value": null}'),
    ("tear-down", "MLPerf", ':::MLLOG {"time_ms": 1, "key": "run_stop", "value": null}'),
    ("train", "MLPerf", ':::MLLOG {"time_ms": 1, "key": "epoch_start", "value": null}'),
    ("tear-down", "any", "[after training is done] datetime: 2021-05-26 05:00:00"),
    ("tear-down", "Megatron", " exiting program at iteration 1000 | datetime: 2021-05-26 05:00:00"),
    (
        "tear-down",
        "HF Trainer",
        "{'train_runtime': 871.787, 'train_samples_per_second': 1.147, 'epoch': 1.0}",
    ),
    ("tear-down", "Lightning", "`Trainer.fit` stopped: `max_epochs=1` reached."),
    ("tear-down", "torch", "Destroying process group"),
    (
        "tear-down",
        "NCCL",
        "gpu-1:22:22 [0] NCCL INFO comm 0x55 rank 3 nranks 8 cudaDev 3 - Destroy COMPLETE",
    ),
    ("tear-down", "wandb", "wandb: Waiting for W&B process to finish... (success)."),
    (
        "checkpoint",
        "Megatron, DeepSpeed, NeMo",
        "saving checkpoint at iteration 500 to checkpoints/gpt2",
    ),
    (
        "checkpoint",
        "any",
        "zero checkpoint saved out/global_step100/zero_pp_rank_0.pt",
    ),
    ("checkpoint", "Hugging Face", "Model weights saved in out/checkpoint-500/pytorch_model.bin"),
    ("checkpoint", "DeepSpeed", "[Torch] Saving global_step100/mp_rank_00_model_states.pt..."),
    ("evaluate", "HF Trainer", "***** Running Evaluation *****"),
    (
        "evaluate",
        "Lightning",
        "Sanity Checking DataLoader 0:   0%|          | 0/2 [00:00<?, ?it/s]",
    ),
    (
        "evaluate",
        "Megatron",
        " validation loss at iteration 100 | lm loss value: 8.5E+00 | lm loss PPL: 4.9E+03",
    ),
    ("evaluate", "any", "Starting evaluation on 1024 samples"),
    ("compile", "Megatron", "> compiling and loading fused kernels ..."),
    ("initialise", "torch extensions", "Time to load cpu_adam op: 22.3 seconds"),
    ("compile", "torch extensions", "Building extension module fused_adam..."),
    ("compile", "torch.compile", "AUTOTUNE mm(1024x1024, 1024x1024)"),
    ("compile", "JAX/XLA", "Finished XLA compilation of jit(train_step) in 41.2 sec"),
    ("compile", "MindSpore", "Start compiling and it will take a while. Please wait..."),
    ("load data", "Megatron", "> building train, validation, and test datasets for GPT ..."),
    ("load data", "datasets", "Running tokenizer on dataset:  45%|####5     | 9/20 [00:01<00:01]"),
    ("load data", "COCO", "loading annotations into memory..."),
    ("load data", "any", "Loading training data from shards"),
    ("load data", "any", "rank 5 step 102: reading shard /corpora/c4/shard-00107.tar"),
    ("train", "HF Trainer, Megatron, any", "***** Running training *****"),
    (
        "train",
        "HF Trainer, TRL",
        "{'loss': 1.7319, 'grad_norm': 0.55, 'learning_rate': 2.7e-05, 'epoch': 1.42}",
    ),
    ("train", "MindSpore, any", "Epoch 3 of 10"),
    ("initialise", "NCCL, RCCL", "gpu-1:22:22 [0] NCCL INFO Bootstrap : Using eth0:10.0.0.1<0>"),
    ("initialise", "torch.distributed", "> initializing torch distributed ..."),
    ("initialise", "Megatron", "> initialized tensor model parallel with size 4"),
    (
        "initialise",
        "DeepSpeed",
        "[INFO] [logging.py:60:log_dist] [Rank 0] DeepSpeed info: version=0.3.16",
    ),
    ("initialise", "Hugging Face", "loading configuration file config.json from cache"),
    ("initialise", "Lightning", "Initializing distributed: GLOBAL_RANK: 3, MEMBER: 4/8"),
    ("initialise", "any, restoring", " loading checkpoint from checkpoints/gpt2 at iteration 500"),
    ("initialise", "JAX", "Connecting to JAX distributed service on 10.0.0.1:1234"),
    (
        "initialise",
        "Ascend",
        "[INFO] HCCL(1953,python):[HcclCommInitRootInfo] entry, ranks[4], rank[0]",
    ),
    ("launch", "torchrun", "[default] Starting worker group"),
    (
        "launch",
        "DeepSpeed",
        "[2024-01-01 00:00:00,000] [INFO] [launch.py:146:main] WORLD INFO DICT: {'node': [0]}",
    ),
    ("launch", "Slurm", "srun: Job 1832552 step creation temporarily disabled, retrying"),
    ("launch", "MPI, shells", "+ mpirun -np 16 python train.py"),
    ("launch", "containers", "pyxis: pulling image nvcr.io/nvidia/pytorch:24.05-py3"),
]


@pytest.mark.parametrize(
    ("rule", "example"),
    [(rule, text) for rule, (_, _, text) in zip(RULES, EXAMPLES, strict=True)],
    ids=[f"{stage}: {program}" for stage, program, _ in EXAMPLES],
)
def test_each_rule_matches_its_example_and_passes_the_gate(rule, example):
    assert rule.stage in STAGES
    assert stated_stage(example) == rule.stage
    assert re.search(rule.pattern, example.lower()), "another rule does its work"
    assert any(gate in example.lower() for gate in rule.literals)
    assert RULES.index(rule) in possible_rules(form(example))


def test_there_is_an_example_for_each_rule():
    assert [(rule.stage, rule.program) for rule in RULES] == [one[:2] for one in EXAMPLES]


def test_every_stage_has_a_rule():
    assert {rule.stage for rule in RULES} == set(STAGES)


def test_gates_are_lower_case_and_without_digits():
    for rule in RULES:
        for gate in rule.literals:
            assert gate
            assert gate == gate.lower()
            assert not any(one.isdigit() for one in gate)


@pytest.mark.parametrize(
    ("stage", "text"),
    [
        ("launch", "+ srun --ntasks 16 python train.py"),
        (
            "launch",
            "Setting OMP_NUM_THREADS environment variable for each process to be 1 in default",
        ),
        ("initialise", "LOCAL_RANK: 3 - CUDA_VISIBLE_DEVICES: [0,1,2,3]"),
        ("initialise", "process group initialised: backend gloo, rank 3, world size 8"),
        ("initialise", "NCCL version 2.21.5+cuda12.4"),
        ("load data", "loading dataset from /data/shards"),
        ("load data", "Generating train split: 100%|####| 10/10 [00:00<00:00, 99 examples/s]"),
        ("compile", "[rank0]: torch._inductor.autotune_process started"),
        ("compile", "Loading extension module utils..."),
        ("train", "start training for 40 steps"),
        ("train", "step 12 | loss 3.2 | grad norm 1.1"),
        ("train", " iteration       30/    1000 | consumed samples: 120 | lm loss: 3.2"),
        ("evaluate", "evaluation at step 20 starts"),
        ("evaluate", "{'eval_loss': 2.5, 'eval_runtime': 3.1, 'epoch': 1.0}"),
        ("checkpoint", "checkpoint of step 20 saved to /out in 0.31 s"),
        ("checkpoint", "Saving model checkpoint to out/checkpoint-500"),
        ("tear-down", "training finished after 40 steps"),
        ("tear-down", ':::MLLOG {"key": "run_stop", "value": null}'),
    ],
)
def test_lines_of_trainings(stage, text):
    assert stated_stage(text) == stage
    assert possible_rules(form(text)) or may_state_step(re.sub("[0-9]+", "0", text))


@pytest.mark.parametrize(
    "text",
    [
        "",
        'Traceback (most recent call last):\n  File "train.py", line 3, in evaluate',
        "RuntimeError: saving checkpoint at iteration 5 failed",
        "  checkpoint_activations .......................... False",
        "  eval_interval ................................... 100",
        "  train_iters ..................................... 5000",
        "srun: Job step aborted: Waiting up to 62 seconds for job step to finish.",
        "slurmstepd: error: *** STEP 12.0 ON node3 CANCELLED AT 2024-01-01T00:00:00 ***",
        "Finished training warmup: 72.2 s",
        "Namespace(data_dir='/data', load='ckpt', save='ckpt', evaluate=True)",
        "loss is nan",
        "{'loss': nan, 'epoch': 0.3}",
        "losses: {'loss': 0.3}",
    ],
)
def test_what_is_no_stage(text):
    assert stated_stage(text) == ""


def test_a_job_that_works_does_not_go_back_to_its_start():
    stage = ""
    for line in ("launch", "initialise", "train", "compile", "checkpoint", "load data", ""):
        stage = next_stage(stage, line)
    assert stage == "checkpoint"
    assert next_stage("train", "launch") == "launch"
    assert next_stage("launch", "initialise") == "initialise"


STEPS = [
    (100, "iteration 100/ 5000"),
    (30, " iteration       30/    1000 | consumed samples:          120 |"),
    (12, "step: 12"),
    (12, "Step 12 |"),
    (12, "step 12/100, loss 2.5"),
    (3, "step 0003 | loss = nan"),
    (12, " 12%|#2        | 12/100 [00:01<00:09,  9.5it/s]"),
    (12, "12/100 [00:01<00:09,  9.5it/s]"),
    (921, "Epoch 3:  45%|####4     | 120/267 [00:10<00:12, 11.5it/s, loss=2.1]"),
    (50, "05:58:36,128 Epoch[9] Batch [50]\tSpeed: 1000.00 samples/sec\taccuracy=0.87"),
    (38, "     38/89     5.62G   0.02079  0.00897   0.0009         6       640"),
    (7, "global_step=7"),
    (7, '{"global_step": 7, "loss": 2.5}'),
    (7, "{'loss': 2.5, 'grad_norm': 0.3, 'step': 7}"),
    (5, "iter 5: loss 3.21, time 30ms"),
    (50, "maskrcnn INFO: eta: 0:45:00  iter: 50  time: 0.0621 (0.0676)"),
    (4, "train_step: 4"),
    (3, "[step 3] forward"),
    (3, "Iteration: 3"),
    (3, "it=3 loss=2.2"),
    (0, "[Rank 0] step=0, skipped=0, lr=[5e-05]"),
    (12, "rank 3 at step 12"),
    (654, "Epoch [3/10], Step [120/267], Loss: 0.3"),
    (200, "| epoch   1 |   200/ 2983 batches | lr 20.00"),
    (27, "1|27|Loss: 2.31"),
    (61, "s:61 trl:8.1960 lr:0.000053 norm:1.48"),
    (1, "step:1/1000 train_time:35ms"),
    (12, "12it [00:03,  3.2it/s]"),
    (512, ':::MLLOG {"key": "train_loss", "value": 2.1, "metadata": {"samples_count": 512}}'),
    (12, ':::MLLOG {"key": "tracked_stats", "value": {"loss": 2}, "metadata": {"step_num": 12}}'),
]


@pytest.mark.parametrize(("step", "text"), STEPS)
def test_steps_that_trainings_tell(step, text):
    assert step_of(text) == step
    assert may_state_step(re.sub("[0-9]+", "0", text))


@pytest.mark.parametrize(
    "text",
    [
        "{'loss': 2.31, 'epoch': 1.5}",
        "  train_iters ..................................... 5000",
        "save_steps=500",
        "--warmup-steps 500",
        "step_size: 3",
        "max steps: 5000",
        "number of steps: 12",
        "total step = 500",
        "steps_per_print .............. 2000",
        "step: 0.5",
        "step 1832552.0 ON node3",
        "resuming from iteration 500",
        "saving checkpoint at iteration 500",
        "evaluation at step 12 starts",
        "eval step 3/20",
        "Loading checkpoint shards: 100%|####| 2/2 [00:10<00:00]",
        "Evaluating: 50%|##   | 5/10 [00:10<00:10]",
        "Step 3/12 : FROM ubuntu",
        "(after 20 iterations) memory (MB) | allocated: 19494.4",
        'Traceback (most recent call last):\n  File "t.py", line 12, in step\n    step 12',
        ':::MLLOG {"key": "eval_accuracy", "value": 0.9, "metadata": {"samples_count": 512}}',
        ':::MLLOG {"key": "tracked_stats", "value": {"validation_step_time": 7}, "m": {"step": 9}}',
        "",
    ],
)
def test_what_is_no_step(text):
    assert step_of(text) is None


WORDS = "step Step iter it epoch eval loss training finished saving checkpoint data start loading"
PIECES = st.sampled_from([*WORDS.split(), *"=/[|%", "12", "7", ".5"])


@given(st.lists(PIECES, max_size=12), st.sampled_from(["", " "]))
def test_what_tells_a_step_or_a_stage_passes_the_gates(pieces, gap):
    text = gap.join(pieces)
    if match_step(text) is not None:
        assert may_state_step(re.sub("[0-9]+", "0", text))
    stage = stated_stage(text)
    rules, step = possible_rules(form(text)), may_state_step(re.sub("[0-9]+", "0", text))
    assert stated_stage(text, rules, may_step=step) == stage
    assert not stage or rules or step


@given(
    st.sampled_from(["step {}", "iteration {:8d}/ 99 |", "[step {}]", "'step': {}}}", "it={} a"]),
    st.integers(min_value=0, max_value=10**9),
)
def test_the_number_is_read_whatever_it_is(text, step):
    assert step_of(text.format(step)) == step


BESIDE = st.sampled_from(
    [
        "step", "steps", "global_step", "iter", "iter(train)", "update", "batch", "it", "loss",
        "loss scale", "grad_norm", "epoch", "=", ":", "={'a':", "'", '"', "[", "]", "(", "|", ",",
        " - ", "--", "12", "7", "0.5", "1,234", ".5", "1e3", "nan", "2024-01-02 03:04:05", "٣", "K",
    ]
)  # fmt: skip


@given(st.lists(BESIDE, max_size=12), st.sampled_from(["", " "]))
def test_what_never_states_a_step_states_none(pieces, gap):
    text = gap.join(pieces)
    if never_states_step(re.sub("[0-9]+", "0", text)):
        assert match_step(text) is None


def test_a_scale_of_the_loss_is_no_step():
    text = "[fused_optimizer.py:0:_update_scale] Reducing dynamic loss scale from 0.0 to 0.0"
    assert may_state_step(text)
    assert never_states_step(text)
