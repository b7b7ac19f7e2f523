"""The reference training: the same losses under any layout, and after any recovery."""

import json
import os
import re
import shutil
import subprocess
import sys
from itertools import pairwise
from math import log
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rmetric.guard.layout import Layout
from rmetric.guard.planner.model_shape import ModelShape
from rmetric.guard.run_folder import FOLDER_VARIABLE, RunFolder
from rmetric.logs import read_log
from rmetric.records import Record
from studies.common.llama_shape import Shape
from studies.tiny_llama.__main__ import main
from studies.tiny_llama.data import ENTROPY, SUCCESSION, Chain, TokenFile, rows_of
from studies.tiny_llama.loop import LossLog, cut_back
from studies.tiny_llama.settings import InjectedError, Injection, Injector, parser, settings_of

torch = pytest.importorskip("torch")
if not torch.distributed.is_available():
    pytest.skip("torch is without its distributed part", allow_module_level=True)
from studies.common.llama import Llama, initialise  # noqa: E402
from tests.monitor.ranks import on_ranks  # noqa: E402
from tests.studies.reference_runs import (  # noqa: E402
    SMALL,
    losses_of,
    plain_losses,
    settings,
    train_on,
)

#: What is promised, and asserted: nats per token between any two layouts.
CLOSE = 1e-5


def largest_difference(folder, plain):
    found = losses_of(folder)
    assert len(found) == len(plain)
    pairs = zip(found.values(), plain, strict=True)
    return max(abs(loss - other) for both in pairs for loss, other in zip(*both, strict=True))


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    losses = plain_losses(settings(tmp_path_factory.mktemp("plain")))
    assert losses[-1][0] < losses[0][0] - 0.3  # it learns, or all would be equal for nothing
    return losses


def test_the_monitor_changes_no_loss_and_its_audits_find_nothing(tmp_path):
    on_ranks(train_on, tmp_path, ("plain", ()), ("monitored", ("--monitor",)), ranks=2)
    assert losses_of(tmp_path / "monitored") == losses_of(tmp_path / "plain")
    log = (tmp_path / "monitored" / "monitor.jsonl").read_text()
    assert log.count('"METRICS"') == 6
    assert '"AUDIT"' not in log


def test_four_ranks_lose_what_one_plain_process_does(tmp_path, plain):
    layouts = {
        "tensor and data": ("--layout=tensor=2",),
        "pipeline and data": ("--layout=pipeline=2",),
    }
    on_ranks(train_on, tmp_path, *layouts.items(), ranks=4)
    for name in layouts:
        assert largest_difference(tmp_path / name, plain) < CLOSE


DOUBLE = ("--precision=float64",)


@pytest.mark.parametrize(
    ("same", "chain"),
    [
        ((), [(2, "--layout=tensor=2")]),
        (("--tied",), [(4, "--layout=tensor=2")]),
        ((), [(2, "--layout=pipeline=2")]),
        ((), [(4, "--layout=tensor=2,pipeline=2")]),
        ((), [(4, "--layout=replicas=2,pipeline=2")]),
        ((), [(4, "--layout=tensor=2,replicas=2")]),
        # Fewer micro-batches than stages.
        (("--layers=4",), [(4, "--layout=pipeline=4", "--micro-batch=6")]),
        # Shards of unequal size.
        ((), [(6, "--layout=tensor=2", "--micro-batch=2")]),
        (DOUBLE, [(2,)]),
        # Recovery: each goes on where the one before was stopped.
        (("--tied",), [(4, "--layout=tensor=2", "--steps=2"), (2, "--steps=4"), (1,)]),
        (
            ("--steps=58",),
            [
                (6, "--layout=tensor=2", "--micro-batch=2", "--steps=3"),
                (4, "--layout=tensor=2,pipeline=2", "--steps=6"),
                (4, "--layout=replicas=2", "--steps=9"),
                (3, "--micro-batch=2", "--steps=12"),
                (2, "--layout=pipeline=2", "--steps=15"),
                (2, "--layout=tensor=2", "--steps=18"),
                (1,),
            ],
        ),
    ],
    ids=str,
)
def test_any_layouts_in_turn_lose_what_one_plain_process_does(tmp_path, same, chain):
    for ranks, *more in chain:
        on_ranks(train_on, tmp_path, ("run", (*same, *more)), ranks=ranks, seconds=120)
    expected = plain_losses(settings(tmp_path / "plain", *same))
    difference = largest_difference(tmp_path / "run", expected)
    print(f"{chain}: {difference:.1e}")
    assert difference < (1e-12 if same == DOUBLE else CLOSE)


def test_a_killed_run_logs_each_step_once(tmp_path, plain):
    more = ("--inject=kill@5:1", "--synchronous")
    with pytest.raises(AssertionError, match=r"rank 0: (.|\n)*RuntimeError"):
        on_ranks(train_on, tmp_path, ("run", more), ranks=2, lost=(1,))
    [injected] = (tmp_path / "run" / "injected").iterdir()
    assert json.loads(injected.read_text())["kind"] == "kill"
    assert injected.name == "kill@5:1.json"
    assert (tmp_path / "run" / "checkpoints" / "step-3" / "good.json").exists()
    assert list(losses_of(tmp_path / "run")) == [1, 2, 3, 4]

    on_ranks(train_on, tmp_path, ("run", more), ranks=1)  # and does not kill again
    assert largest_difference(tmp_path / "run", plain) < CLOSE
    run = read_log(tmp_path / "run" / "losses.jsonl")
    assert [record.step for record in run.records] == [1, 2, 3, 4, 5, 6]
    assert run.records[-1].learning_rate == 0.01
    assert not run.notes


def test_a_gradient_that_is_not_finite_never_reaches_the_weights(tmp_path, plain):
    more = ("--inject=nan@5", "--synchronous")
    with pytest.raises(
        AssertionError, match=r"NonFiniteError: step 5: the loss is [\d.]+, the norm"
    ):
        on_ranks(train_on, tmp_path, ("run", more), ranks=1)
    assert (tmp_path / "run" / "injected" / "nan@5:0.json").exists()
    assert losses_of(tmp_path / "run")[5][1] == "NaN"
    on_ranks(train_on, tmp_path, ("run", more), ranks=1)
    assert largest_difference(tmp_path / "run", plain) < CLOSE


@pytest.mark.parametrize("kind", ["exception", "slow", "hang"])
def test_an_injection_strikes_one_rank_once(tmp_path, monkeypatch, capsys, kind):
    monkeypatch.setattr("studies.tiny_llama.settings.time.sleep", lambda seconds: 1 / 0)
    injections = (Injection(kind=kind, step=3, rank=1),)
    Injector(tmp_path, injections, rank=0).before(3)
    struck = Injector(tmp_path, injections, rank=1)
    struck.before(2)
    assert not list(tmp_path.iterdir())
    with pytest.raises(InjectedError if kind == "exception" else ZeroDivisionError):
        struck.before(3)
    assert capsys.readouterr().err == f"injected: {kind}@3:1\n"
    entry = json.loads((tmp_path / "injected" / f"{kind}@3:1.json").read_text())
    assert entry["pid"] == os.getpid()
    Injector(tmp_path, injections, rank=1).before(3)


def test_torchrun_starts_it_again_after_a_kill(tmp_path, plain):
    setup = settings(tmp_path / "run")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    done = subprocess.run(
        [
            *torchrun, "--nproc-per-node=2", "--max-restarts=1", "-m", "studies.tiny_llama",
            *SMALL, "--folder", str(setup.folder.path), "--layout=tensor=2", "--inject=kill@5:1",
            "--synchronous",
        ],
        env={**os.environ, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"},
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert (setup.folder.path / "injected" / "kill@5:1.json").exists()
    assert "after step 3" in done.stdout
    assert largest_difference(setup.folder.path, plain) < CLOSE
    assert {beat.phase for beat in setup.folder.beats().values()} == {"finished"}


def test_a_run_that_is_asked_to_stop_saves_and_goes_on_later(tmp_path, plain):
    folder = RunFolder(tmp_path / "run")
    number = folder.ask("user", "the machine is needed", stop=True)
    on_ranks(train_on, tmp_path, ("run", ()), ranks=2)
    assert folder.answered() == number
    stopped = len(losses_of(tmp_path / "run"))
    assert 1 <= stopped < 6
    assert {beat.phase for beat in folder.beats().values()} != {"finished"}
    on_ranks(train_on, tmp_path, ("run", ()), ranks=1)
    assert largest_difference(tmp_path / "run", plain) < CLOSE


def without_a_folder(rank, folder):
    from studies.tiny_llama.loop import CheckpointNotSavedError, ReferenceTraining

    training = ReferenceTraining(settings(folder, "--steps=2"), torch.device("cpu"))
    shutil.rmtree(folder / "checkpoints")
    with pytest.raises(
        CheckpointNotSavedError, match=r"step 2, the last, is not saved: .* is gone"
    ):
        training.run()
    return training.settings.folder.beats()[0].phase


def test_a_run_whose_end_is_not_durable_has_not_finished(tmp_path):
    assert on_ranks(without_a_folder, tmp_path, ranks=1) == ["saving"]


def test_it_is_the_llama_that_transformers_has():
    transformers = pytest.importorskip("transformers")
    shape = Shape(layers=2, heads=4, kv_heads=2, hidden=32, ffn=88, vocabulary=61, sequence=16)
    ours = Llama(shape)
    initialise(ours, shape, seed=0)
    config = transformers.LlamaConfig(
        vocab_size=61, hidden_size=32, intermediate_size=88, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, rms_norm_eps=1e-5, rope_theta=10_000.0,
        tie_word_embeddings=False,
    )  # fmt: skip
    theirs = transformers.LlamaForCausalLM(config)
    theirs_by_ours = {
        r"^embedding\.": "model.embed_tokens.",
        r"^norm\.": "model.norm.",
        r"^head\.": "lm_head.",
        r"^layers\.": "model.layers.",
        r"attention_norm": "input_layernorm",
        r"feed_forward_norm": "post_attention_layernorm",
        r"\.attention\.(.)": r".self_attn.\1_proj",
        r"\.feed_forward\.(\w+)": r".mlp.\1_proj",
    }
    state = {}
    for name, weight in ours.state_dict().items():
        for pattern, replacement in theirs_by_ours.items():
            name = re.sub(pattern, replacement, name)
        state[name] = weight
    theirs.load_state_dict(state)
    tokens = torch.from_numpy(rows_of(Chain(61, 16, 0), 1, 0, 3))
    assert torch.allclose(ours(tokens), theirs(tokens).logits, atol=1e-5)


def test_a_stage_has_the_weights_that_the_whole_has():
    shape = Shape(layers=4, hidden=32, ffn=88)
    whole = Llama(shape)
    initialise(whole, shape, seed=3)
    held = dict(whole.named_parameters())
    seen = set()
    for stage in range(2):
        part = Llama(shape, stage, 2)
        initialise(part, shape, seed=3)
        for name, parameter in part.named_parameters():
            assert torch.equal(parameter, held[name])
            seen.add(name)
    assert seen == set(held)


def test_the_planner_reads_its_shape(capsys):
    assert main(["--model-json", "--hidden=96", "--heads=6", "--kv-heads=3", "--tied"]) == 0
    read = ModelShape.from_json(json.loads(capsys.readouterr().out))
    model = Llama(Shape(hidden=96, heads=6, kv_heads=3, ffn=258, tied=True))
    assert read.parameters == sum(parameter.numel() for parameter in model.parameters())


@given(st.integers(0, 5), st.integers(1, 1000), st.integers(0, 100))
def test_a_sample_is_a_function_of_seed_step_and_index(seed, step, index):
    chain = Chain(50, 20, seed)
    sample = chain.sample(step, index)
    assert np.array_equal(sample, Chain(50, 20, seed).sample(step, index))
    assert sample.shape == (20,)
    assert not np.array_equal(sample, chain.sample(step, index + 1))
    assert not np.array_equal(sample, chain.sample(step + 1, index))
    for token, after in pairwise(sample):
        assert after in chain.successors_VK[token]


def test_the_chain_has_the_entropy_that_is_stated():
    assert sum(SUCCESSION) == 1.0
    assert pytest.approx(-sum(share * log(share) for share in SUCCESSION)) == ENTROPY
    assert f"{ENTROPY:.2f} nats" in Path("docs/reference_training.md").read_text()
    chain = Chain(5, 20_001, 0)
    sample = chain.sample(1, 0)
    for place, share in enumerate(SUCCESSION):
        taken = np.mean(chain.successors_VK[sample[:-1], place] == sample[1:])
        assert taken == pytest.approx(share, abs=0.02)


def test_windows_of_a_file(tmp_path):
    tokens = np.arange(300) % 250
    np.save(tmp_path / "a.npy", tokens)
    tokens.astype("<u2").tofile(tmp_path / "a.bin")
    tokens.astype("u1").tofile(tmp_path / "a.txt")
    samples = [
        TokenFile(tmp_path / f"a.{end}", 256, 9, 0).sample(4, 2) for end in ("npy", "bin", "txt")
    ]
    for sample in samples:
        assert np.array_equal(sample, samples[0])
        assert np.array_equal(np.diff(sample) % 250, np.ones(8))


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (np.zeros(8, "i4"), "holds 8 tokens: a sample takes 9"),
        (np.zeros((4, 4), "i4"), r"holds int32 of shape \(4, 4\)"),
        (np.zeros(20), "holds float64 of shape"),
        (b"text", "cannot be read as tokens"),
        (None, "cannot be read as tokens.*No such file"),
    ],
)
def test_a_file_that_holds_something_else(tmp_path, content, problem):
    path = tmp_path / "tokens.npy"
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif content is not None:
        np.save(path, content)
    with pytest.raises(ValueError, match=problem):
        TokenFile(path, 256, 9, 0)


@given(st.integers(0, 12), st.integers(0, 3000))
def test_a_log_is_cut_back_wherever_it_broke_off(tmp_path_factory, step, broken):
    path = tmp_path_factory.mktemp("log") / "losses.jsonl"
    log_file = LossLog(path, {}, 0)
    for number in range(1, 11):
        log_file.write(Record(step=number, training_loss=number / 2))
    log_file.close(10, finished=True)
    first = path.read_bytes().index(b"\n") + 1
    path.write_bytes(path.read_bytes()[: first + broken])
    whole = path.read_bytes().count(b'"METRICS"', 0, path.read_bytes().rindex(b"\n") + 1)
    cut_back(path, step)
    assert [record.step for record in read_log(path).records] == list(
        range(1, min(step, whole) + 1)
    )


@pytest.mark.parametrize(
    ("arguments", "ranks", "problem"),
    [
        ("--layout=tensor=3", 3, "tensor is 3, which does not divide heads = 4; .*kv_heads = 2"),
        ("--batch=16", 3, "--batch is 16: it must be a multiple of micro-batch x data = 1 x 3"),
        ("--layout=tensor=2,data=2", 3, "there are 3 ranks .* from the command line, takes 4"),
        ("--layout=pipeline=2 --tied", 2, "a tied head needs pipeline = 1"),
        ("--layout=pipeline=2 --monitor", 2, "--monitor needs tensor = 1 and pipeline = 1"),
        ("--layout=replicas=3", 4, "replicas is 3: it must be a divisor of data, 4"),
        ("--heads=3", 1, "heads is 3, which does not divide hidden = 64"),
        ("--hidden=12", 1, "hidden / heads is 3: it must be even"),
        ("--vocabulary=3", 1, "vocabulary is 3: a chain needs at least 4 tokens"),
        ("--steps=0", 1, "--steps is 0: it must be at least 1"),
        ("--rate=nan", 1, "--rate is nan: it must be above 0"),
        ("--inject=kill@0", 1, "--inject is 'kill@0': KIND@STEP"),
        ("--inject=burn@3", 1, "a kind of kill, exception, hang, slow, nan"),
    ],
)
def test_what_cannot_be_trained(tmp_path, capsys, monkeypatch, arguments, ranks, problem):
    monkeypatch.setenv("WORLD_SIZE", str(ranks))
    assert main([*arguments.split(), "--folder", str(tmp_path)]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ")
    with pytest.raises(ValueError, match=problem):
        settings_of(parser().parse_args([*arguments.split(), "--folder", str(tmp_path)]), ranks)


def test_the_layout_of_a_supervisor_counts(tmp_path, monkeypatch):
    folder = RunFolder(tmp_path)
    folder.set_layout(Layout(pipeline=2, micro_batch=2, accumulation=3))
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))
    options = parser().parse_args(["--layout=tensor=2,data=2"])
    assert settings_of(options, 2).layout == folder.layout()
    with pytest.raises(ValueError, match=r"there are 4 ranks .*layout.json, takes 2"):
        settings_of(options, 4)
    with pytest.raises(ValueError, match="the supervisor's is"):
        settings_of(parser().parse_args(["--folder", str(tmp_path / "other")]), 2)
    folder.layout_file.write_text("{")
    with pytest.raises(ValueError, match=r"layout.json holds no layout"):
        settings_of(options, 2)
