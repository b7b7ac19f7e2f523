"""Resumes that lost one part, in each program that can lose it: the table names that part."""

import copy
import json
import shutil
from itertools import product

import pytest
import torch
import torch.nn.functional as F
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from rmetric._util.background import Background
from rmetric.audits.resume import OUTLOOK, _data
from rmetric.monitor import Monitor
from rmetric.monitor.log_file import MonitorLog
from rmetric.readers import read_log
from tests.audits.test_audits import WORDS, Model, batches
from tests.integrations import trainers
from tests.monitor.ranks import on_ranks

#: What is lost -> the row that states it, and its present value where that is the same everywhere.
PARTS = {
    "nothing": [],
    "moments": [("moments", "lost, norm 0")],
    "step counts": [("optimizer step", "0")],
    "rate": [("rate", "0.02")],
    "scheduler": [("scheduler", "step 0")],
    "scaler": [("scaler", "2")],
    "random states": [("random states", "other ones")],
    "data again": [("data", "batch 0")],
    "data skipped": [("data", "batch ")],
    "weights": [("weights", "other ones")],
    "EMA": [("EMA", "begun anew")],
}
#: The program never has that part on a CPU, or never saves it.
CANNOT = {
    ("scaler", "trainer"): "half precision with a scaler needs a GPU there",
    ("scaler", "lightning"): "half precision with a scaler needs a GPU there",
    ("random states", "lightning"): "its checkpoints hold none: they differ in each resume",
}
SAVED, STEPS = 4, 8


def lose(part, optimizer, scheduler, scaler=None):
    """Change what a checkpoint holds."""
    zeroed = {"moments": ("exp_avg", "exp_avg_sq"), "step counts": ("step",)}.get(part, ())
    for state, name in product(optimizer["state"].values(), zeroed):
        state[name].zero_()
    if part == "rate":
        optimizer["param_groups"][0]["lr"] = 2e-2
    scheduler |= {"last_epoch": 0} if part == "scheduler" else {}
    if part == "scaler":
        scaler["scale"] = 2.0


def rows_of(monitor):
    [found] = [f for f in monitor.findings if "restored" in f.kind]
    assert {f.kind for f in monitor.findings if f.severity == "error"} <= {"not_restored"}
    return {row["part"]: (row["was"], row["now"]) for row in found.rows if not row["equal"]}


def plain(folder, part, rank=None):
    """A loop of its own; under DistributedDataParallel with a rank."""
    torch.manual_seed(0)
    model = Model() if rank is None else torch.nn.parallel.DistributedDataParallel(Model())
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    with Monitor(
        model, optimizer, scaler=scaler, log=folder / "run-{rank}.jsonl", audits=True
    ) as monitor:
        monitor.schedulers, step, path = [scheduler], 0, folder / f"{rank}.pt"
        average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
        parts = (model, optimizer, scheduler, scaler, average)
        monitor.ema = average.module if rank is None else dict(average.state_dict())
        if part is not None:
            step, states, older, random, kept = torch.load(path)
            lose(part, *states[1:4])
            states[0] = older if part == "weights" else states[0]
            for stateful, state in zip(parts, states, strict=True):
                if (stateful, part) != (average, "EMA"):
                    stateful.load_state_dict(state)
            if part == "EMA":
                average.module.load_state_dict(model.state_dict())
            monitor.load_state_dict(json.loads(kept))
            if part != "random states":
                torch.set_rng_state(random)
        data = batches(60, seed=rank or 0)
        shift = {"data again": -step, "data skipped": 2}.get(part, 0)
        for number in range(step + 1, STEPS + 1):
            tokens = data[number - 1 + shift]
            monitor.batch_ready(tokens)
            with torch.autocast("cpu", dtype=torch.float16):
                logits = model(tokens[:, :-1]).flatten(0, 1)
            loss = F.cross_entropy(logits.float(), tokens[:, 1:].flatten())
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            monitor.check_before_step(loss)
            scaler.step(optimizer)
            scaler.update()
            scheduler.step()
            optimizer.zero_grad()
            average.update_parameters(model)
            if number == 2 and part is None:
                older = copy.deepcopy(model.state_dict())
            if number == SAVED and part is None:
                states = [stateful.state_dict() for stateful in parts]
                kept = json.dumps(monitor.state_dict())
                torch.save((SAVED, states, older, torch.get_rng_state(), kept), path)
    return monitor


def trainer(folder, part):
    """The Trainer of Hugging Face."""
    transformers = pytest.importorskip("transformers")

    class Averages(transformers.TrainerCallback):
        def on_train_begin(self, args, state, control, model=None, **_):
            callback.monitor.ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
            if part not in (None, "EMA"):
                callback.monitor.ema.load_state_dict(torch.load(folder / "ema.pt"))

        def on_step_end(self, args, state, control, model=None, **_):
            callback.monitor.ema.update_parameters(model)

        def on_save(self, args, state, control, **_):
            if part is None and state.global_step == SAVED:
                torch.save(callback.monitor.ema.state_dict(), folder / "ema.pt")

    transformers.set_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=WORDS, hidden_size=16, intermediate_size=32, num_hidden_layers=1,
        num_attention_heads=2, max_position_embeddings=16, attention_dropout=0.1,
    )  # fmt: skip
    callback = trainers.make_callback("hugging_face", folder / "run.jsonl")
    rows = [{"input_ids": t[0].tolist(), "labels": t[0].tolist()} for t in batches(60)]
    saved, skip = folder / f"out/checkpoint-{SAVED}", transformers.trainer.skip_first_batches
    with pytest.MonkeyPatch.context() as patch:
        if part == "data skipped":
            one_more = lambda loader, number: skip(loader, number + 1)  # noqa: E731
            patch.setattr("transformers.trainer.skip_first_batches", one_more)
        if part == "random states":
            (saved / "rng_state.pth").unlink()
        if part == "weights":
            shutil.copy(folder / "out/checkpoint-2" / "model.safetensors", saved)
        if part is not None:
            files = saved / "optimizer.pt", saved / "scheduler.pt"
            states = [torch.load(file) for file in files]
            lose(part, *states)
            for file, state in zip(files, states, strict=True):
                torch.save(state, file)
        trainers.hugging_face(
            transformers.LlamaForCausalLM(config), rows, folder, [callback, Averages()],
            batch_size=4, max_steps=STEPS, save_strategy="steps", save_steps=2, warmup_steps=2,
            ignore_data_skip=part == "data again", resume=None if part is None else str(saved),
        )  # fmt: skip
    return callback.monitor


def lightning(folder, part):
    """Lightning's Trainer, with averages by its own callback."""
    pl = pytest.importorskip("lightning.pytorch")

    class Module(Model, pl.LightningModule):
        def training_step(self, batch, _):
            return F.cross_entropy(self(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())

        def configure_optimizers(self):
            optimizer = torch.optim.AdamW(self.parameters(), lr=3e-3)
            scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
            return [optimizer], [{"scheduler": scheduler, "interval": "step"}]

    pl.seed_everything(0, verbose=False)
    callback = trainers.make_callback("lightning", folder / "run.jsonl")
    path = folder / f"{SAVED}.ckpt"
    if part is not None:
        saved = torch.load(path, weights_only=False)
        lose(part, saved["optimizer_states"][0], saved["lr_schedulers"][0])
        if part == "weights":
            older = torch.load(folder / "2.ckpt", weights_only=False)
            saved["current_model_state"] = older["current_model_state"]
        if part == "EMA":
            saved["state_dict"] = saved["current_model_state"]
        torch.save(saved, path)
    begin = {None: 0, "data again": 0, "data skipped": SAVED + 2}.get(part, SAVED)
    saver = pl.callbacks.ModelCheckpoint(
        folder, "{step}", every_n_train_steps=2, save_top_k=-1, auto_insert_metric_name=False
    )
    callbacks = [saver, pl.callbacks.EMAWeightAveraging(decay=0.9), callback]
    trainers.lightning(
        Module(), batches(60)[begin:], folder, callbacks, batch_size=None, max_steps=STEPS,
        enable_checkpointing=True, resume=None if part is None else path,
    )  # fmt: skip
    return callback.monitor


def resumes(rank, folder, program=plain):
    """Rows that differ in the resume without each part."""
    ranks = [rank] if program is plain else []
    assert program(folder, None, *ranks).findings == []
    parts = [part for part in PARTS if (part, program.__name__) not in CANNOT]
    copies = {part: folder.parent / f"{folder.name}-{part}" for part in parts}
    return {
        part: rows_of(program(shutil.copytree(folder, to, dirs_exist_ok=True), part, *ranks))
        for part, to in copies.items()
    }


@pytest.fixture(scope="module", params=["plain", "trainer", "lightning", "ddp"])
def resumed(request, tmp_path_factory):
    """A program, and the rows of its resumes on each rank."""
    program, folder = request.param, tmp_path_factory.mktemp(request.param)
    if program == "ddp":
        return program, on_ranks(resumes, folder, ranks=2, seconds=120.0)
    return program, [resumes(None, folder, globals()[program])]


@pytest.mark.parametrize("part", PARTS)
def test_a_resume_that_lost_one_part_names_it_alone(part, resumed):
    program, ranks = resumed
    for found in ranks:
        if reason := CANNOT.get((part, program)):
            assert part not in found, reason
            continue
        lost = dict(found[part])
        if program == "lightning":
            del lost["random states"]
        assert list(lost) == [name for name, _ in PARTS[part]]
        for name, now in PARTS[part]:
            assert lost[name][1].startswith(now)
            assert lost[name][1] != lost[name][0]


def test_the_table_stands_in_the_log_and_a_foreign_ema_is_named(tmp_path, caplog):
    plain(tmp_path, None)
    [found] = plain(tmp_path, "moments").findings
    assert found.words.splitlines()[3].split()[:5] == ["moments", "norm", "0.166", "lost,", "norm"]
    log = (tmp_path / "run-0.jsonl").read_text().splitlines()
    [entry] = [e for e in map(json.loads, log) if e["event"] == "AUDIT"]
    assert [row["part"] for row in entry["rows"]] == [row["part"] for row in found.rows]
    [read] = read_log(tmp_path / "run-0.jsonl").run.findings
    lost = "not everything came back from the checkpoint: moments: lost, norm 0 (was norm 0.166)"
    assert (read.words, read.severity) == (lost, "error")
    assert [row["outlook"] for row in read.rows if row["part"] == "moments"] == [OUTLOOK["moments"]]
    monitor = Monitor(Model(), audits=["resume"])
    older = {"resume": {"weights": 7, "weight_norm": 2.0}}  # as of an earlier version
    monitor.load_state_dict(monitor.state_dict() | {"audits": older})
    monitor.check_before_step(1.0)
    monitor.ema = [1, 2]
    monitor.check_before_step(1.0)
    monitor.state_dict()
    assert monitor.usable
    assert "monitor.ema is list without tensors of floats" in caplog.text


SHUFFLED = {"number": 12, "chains": [[0, [1, 2, 3]], [8, [9, 10]], [8, [9, 10, 11, 12]]]}
ALIKE = {"number": 5, "chains": [[0, [1, 2, 3]], [3, [1, 2]], [1, [2, 3, 1, 2]]]}
FIRST = {"number": 4, "chains": [[0, [1, 2, 3]], [0, [1, 2, 3]], [0, [1, 2, 3, 4]]]}
ONE = {"number": 3, "chains": [[0, [1, 1, 1]]] * 3}
DRAWN = {"number": 5, "chains": [[0, [1, 2, 1, 3, 1]]] * 3}


@pytest.mark.parametrize(
    ("saved", "batch", "logged", "epochs", "expected"),
    [
        (ALIKE, 3, {}, None, ("batch 5", "")),  # the next one, as in the epoch before
        (ALIKE, 2, {}, None, ("batch 4", "data")),
        (ONE, 1, {}, None, ("batch 3", "")),  # all data are one batch
        (DRAWN, 1, {}, None, None),  # with replacement
        (FIRST, 1, {}, None, ("batch 0", "first data")),  # an epoch may begin
        (FIRST, 1, {}, (0, 1), None),  # an epoch begins
        (FIRST, 1, {}, (0, 0), ("batch 0", "data")),
        (FIRST, 1, {4: [5, 6]}, None, ("batch 0", "data")),
        (FIRST, 3, {}, None, ("batch 2", "data")),
        (SHUFFLED, 1, {}, (2, 3), ("batch 0", "data")),  # the first epoch again
        (SHUFFLED, 20, {}, (2, 3), None),  # nobody knows
        (SHUFFLED, 20, {12: [13, 14]}, (2, 3), ("none of those to 13", "other data")),
        (SHUFFLED, 14, {12: [13, 14]}, None, ("batch 13", "data skipped")),
        (SHUFFLED, 18, {12: [13], 16: [17, 18]}, None, ("batch 17", "data skipped")),
    ],
)
def test_the_place_of_the_first_batch(saved, batch, logged, epochs, expected):
    before, now = epochs or (None, None)
    rows = _data(batch, saved | {"epoch": before}, logged, now)
    found = [(row.now.removeprefix("next: "), row.key) for row in rows]
    assert found == ([expected] if expected else [])


def test_a_log_that_was_cut_off_keeps_its_entries(tmp_path):
    path = tmp_path / "run.jsonl"
    path.write_bytes(b'{"event": "BATCHES", "after": 1}\n{"event": "BATCHES", "aft')
    log = MonitorLog(path, Background(), b"")
    assert log.entries("BATCHES") == [{"event": "BATCHES", "after": 1}]


@pytest.mark.parametrize("lost", ["", "moments", "buffers"])
def test_moments_of_other_parameters_and_running_statistics_are_reported(lost):
    def train(names, states=None):
        torch.manual_seed(0)
        linear, norm = torch.nn.Linear(4, 4, bias=False), torch.nn.BatchNorm1d(4, affine=False)
        model = torch.nn.Sequential(linear, norm, torch.nn.Linear(4, 4, bias=False))
        named = dict(model.named_parameters())
        optimizer = torch.optim.Adam([named[name] for name in names])
        with Monitor(model, optimizer, audits=True) as monitor:
            if states is not None:
                weights, moments, kept, random = states
                fresh = {k: v for k, v in model.state_dict().items() if k.startswith("1.")}
                model.load_state_dict(weights | (fresh if lost == "buffers" else {}))
                optimizer.load_state_dict(moments)
                monitor.load_state_dict(kept)
                torch.set_rng_state(random)
            for _ in range(5):
                loss = model(torch.randn(8, 4)).pow(2).mean()
                optimizer.zero_grad()
                loss.backward()
                monitor.check_before_step(loss)
                optimizer.step()
            states = (model.state_dict(), optimizer.state_dict(), monitor.state_dict())
            return monitor, (*copy.deepcopy(states), torch.get_rng_state())

    names = ["0.weight", "2.weight"]
    _, states = train(names)
    monitor, _ = train(names[::-1] if lost == "moments" else names, states)
    assert set(rows_of(monitor)) == ({lost} if lost else set())
