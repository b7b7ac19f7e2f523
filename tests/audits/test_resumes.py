"""Resumes that lost one part, in each program that can lose it: the table names that part."""

import copy
import json
import shutil
from functools import cache, partial
from itertools import product

import pytest

torch = pytest.importorskip("torch")
import torch.nn.functional as F  # noqa: E402
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn  # noqa: E402

from rmetric._util.background import Background  # noqa: E402
from rmetric.audits.resume import _data  # noqa: E402
from rmetric.monitor import Monitor  # noqa: E402
from rmetric.monitor.log_file import MonitorLog  # noqa: E402
from tests.audits.test_audits import WORDS, Model, batches  # noqa: E402
from tests.monitor.ranks import on_ranks  # noqa: E402

#: What is lost -> the row that says so, and its present value where that is the same everywhere.
PARTS = {
    "nothing": (),
    "moments": ("moments", "lost, 0"),
    "step counts": ("optimizer step", "0"),
    "rate": ("rate", "0.02"),
    "scheduler": ("scheduler", "step 0"),
    "scaler": ("scaler", "2"),
    "random states": ("random states", "other ones"),
    "data again": ("data", "batch 0"),
    "data skipped": ("data", "batch "),
    "weights": ("weights", "other ones"),
    "EMA": ("EMA", "begun anew"),
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
    for state in optimizer["state"].values():
        if part == "moments":
            state["exp_avg"].zero_(), state["exp_avg_sq"].zero_()
        if part == "step counts":
            state["step"].zero_()
    if part == "rate":
        optimizer["param_groups"][0]["lr"] = 2e-2
    if part == "scheduler":
        scheduler["last_epoch"] = 0
    if part == "scaler" and scaler:
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
        # A dict of tensors is as good as the module.
        monitor.ema = average if rank is None else dict(average.state_dict())
        if part is not None:
            step, states, older, random, kept = torch.load(path)
            lose(part, *states[1:4])
            states[0] = older if part == "weights" else states[0]
            for one, state in zip(parts, states, strict=True):
                if (one, part) != (average, "EMA"):
                    one.load_state_dict(state)
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
                states = [one.state_dict() for one in parts]
                kept = json.dumps(monitor.state_dict())
                torch.save((SAVED, states, older, torch.get_rng_state(), kept), path)
    return monitor


def trainer(folder, part):
    """The Trainer of Hugging Face."""
    transformers = pytest.importorskip("transformers")
    from rmetric.integrations.hugging_face import RMetricCallback

    class Averages(transformers.TrainerCallback):
        def on_train_begin(self, args, state, control, model=None, **_):
            self.module = copy.deepcopy(model)
            if part not in (None, "EMA"):
                self.module.load_state_dict(torch.load(folder / "ema.pt"))
            callback.monitor.ema = self.module

        def on_step_end(self, args, state, control, model=None, **_):
            with torch.no_grad():
                for mean, weight in zip(self.module.parameters(), model.parameters(), strict=True):
                    mean.lerp_(weight, 0.1)

        def on_save(self, args, state, control, **_):
            if part is None and state.global_step == SAVED:
                torch.save(self.module.state_dict(), folder / "ema.pt")

    transformers.set_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=WORDS, hidden_size=16, intermediate_size=32, num_hidden_layers=1,
        num_attention_heads=2, max_position_embeddings=16, attention_dropout=0.1,
    )  # fmt: skip
    arguments = transformers.TrainingArguments(
        output_dir=str(folder), max_steps=STEPS, per_device_train_batch_size=4, save_steps=2,
        report_to=[], use_cpu=True, disable_tqdm=True, warmup_steps=2,
        ignore_data_skip=part == "data again",
    )  # fmt: skip
    callback = RMetricCallback(folder / "run.jsonl")
    rows = [{"input_ids": t[0].tolist(), "labels": t[0].tolist()} for t in batches(60)]
    saved = folder / f"checkpoint-{SAVED}"
    with pytest.MonkeyPatch.context() as patch:
        if part == "data skipped":
            skip = transformers.trainer.skip_first_batches
            patch.setattr(
                "transformers.trainer.skip_first_batches", lambda loader, n: skip(loader, n + 1)
            )
        if part == "random states":
            (saved / "rng_state.pth").unlink()
        if part == "weights":
            shutil.copy(folder / "checkpoint-2" / "model.safetensors", saved)
        if part is not None:
            files = saved / "optimizer.pt", saved / "scheduler.pt"
            states = [torch.load(file) for file in files]
            lose(part, *states)
            for file, state in zip(files, states, strict=True):
                torch.save(state, file)
        transformers.Trainer(
            model=transformers.LlamaForCausalLM(config), args=arguments, train_dataset=rows,
            callbacks=[callback, Averages()],
        ).train(resume_from_checkpoint=None if part is None else str(saved))  # fmt: skip
    return callback.monitor


def lightning(folder, part):
    """Lightning's Trainer, with averages by its own callback."""
    pl = pytest.importorskip("lightning.pytorch")
    from rmetric.integrations.lightning import RMetricCallback

    class Module(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.model = Model()

        def training_step(self, batch, _):
            logits = self.model(batch[:, :-1])
            return F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())

        def configure_optimizers(self):
            optimizer = torch.optim.AdamW(self.parameters(), lr=3e-3)
            scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
            return [optimizer], [{"scheduler": scheduler, "interval": "step"}]

    pl.seed_everything(0, verbose=False)
    callback, path = RMetricCallback(folder / "run.jsonl"), folder / f"{SAVED}.ckpt"
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
    loader = torch.utils.data.DataLoader(batches(60)[begin:], batch_size=None)
    saver = pl.callbacks.ModelCheckpoint(
        folder, "{step}", every_n_train_steps=2, save_top_k=-1, auto_insert_metric_name=False
    )
    pl.Trainer(
        max_steps=STEPS, accelerator="cpu", logger=False, default_root_dir=folder,
        enable_progress_bar=False, enable_model_summary=False,
        callbacks=[saver, pl.callbacks.EMAWeightAveraging(decay=0.9), callback],
    ).fit(Module(), loader, ckpt_path=None if part is None else path)  # fmt: skip
    return callback.monitor


def ddp(rank, folder, parts):
    plain(folder, None, rank)
    return {part: rows_of(plain(_copy(folder, part), part, rank)) for part in parts}


def _copy(folder, part):
    return shutil.copytree(folder, folder.parent / f"{folder.name}-{part}", dirs_exist_ok=True)


@pytest.fixture(scope="module")
def resumed(tmp_path_factory):
    """Rows of a resume of a program that lost a part; on each rank."""

    @cache
    def first(program):
        folder = tmp_path_factory.mktemp(program) / "run"
        folder.mkdir()
        if program == "ddp":
            return on_ranks(ddp, folder, tuple(PARTS), ranks=2, seconds=120.0)
        assert rows_of_program[program](folder, None).findings == []
        return folder

    rows_of_program = {"plain": plain, "trainer": trainer, "lightning": lightning}

    def rows(part, program):
        made = first(program)
        if program == "ddp":
            return [rank[part] for rank in made]
        return [rows_of(rows_of_program[program](_copy(made, part), part))]

    return rows


@pytest.mark.parametrize(
    ("part", "program"),
    [
        pytest.param(part, program, marks=[] if program == "plain" else pytest.mark.long)
        for part, program in product(PARTS, ("plain", "trainer", "lightning", "ddp"))
        if (part, program) not in CANNOT
    ],
)
def test_a_resume_that_lost_one_part_names_it_alone(part, program, resumed):
    for rows in resumed(part, program):
        if ("random states", program) in CANNOT:
            assert rows.pop("random states")
        if part == "nothing":
            assert rows == {}
            continue
        name, now = PARTS[part]
        assert list(rows) == [name]
        assert rows[name][1].startswith(now)
        assert rows[name][0] != rows[name][1]


def test_the_table_stands_in_the_log_and_a_foreign_ema_is_named(tmp_path, caplog):
    plain(tmp_path, None)
    [found] = plain(tmp_path, "moments").findings
    assert "moments" in found.words.splitlines()[3]
    assert "lost, 0" in found.words.splitlines()[3]
    log = (tmp_path / "run-0.jsonl").read_text().splitlines()
    [entry] = [e for e in map(json.loads, log) if e["event"] == "AUDIT"]
    assert [row["part"] for row in entry["rows"]] == [row["part"] for row in found.rows]
    monitor = Monitor(Model(), audits=["resume"])
    monitor.ema = [1, 2]
    monitor.check_before_step(1.0)
    monitor.state_dict()
    assert monitor.usable
    assert "monitor.ema is list without tensors" in caplog.text


SHUFFLED = {"number": 12, "chains": [[0, [1, 2, 3]], [8, [9, 10]], [8, [9, 10, 11, 12]]]}
ALIKE = {"number": 5, "chains": [[0, [1, 2, 3]], [3, [1, 2]], [1, [2, 3, 1, 2]]]}
ONE = {"number": 3, "chains": [[0, [1, 1, 1]], [0, [1, 1, 1]], [0, [1, 1, 1]]]}
FIRST = {"number": 4, "chains": [[0, [1, 2, 3]], [0, [1, 2, 3]], [0, [1, 2, 3, 4]]]}


@pytest.mark.parametrize(
    ("saved", "batch", "logged", "length", "expected"),
    [
        (ALIKE, 3, {}, None, ("batch 5", "")),  # the next one, as in the epoch before
        (ONE, 1, {}, None, ("batch 3", "")),  # all data are one batch
        (ALIKE, 2, {}, None, ("batch 4", "data")),
        (FIRST, 1, {}, None, ("batch 0", "first data")),  # an epoch may begin
        (FIRST, 1, {}, 4, None),  # an epoch begins
        (FIRST, 1, {}, 5, ("batch 0", "data")),
        (FIRST, 1, {4: [5, 6]}, None, ("batch 0", "data")),
        (FIRST, 3, {}, None, ("batch 2", "data")),
        (SHUFFLED, 1, {}, 4, ("batch 0", "data")),  # the first epoch again
        (SHUFFLED, 20, {}, 4, None),  # nobody knows
        (SHUFFLED, 20, {12: [13, 14]}, 4, ("none of those to 13", "other data")),
        (SHUFFLED, 14, {12: [13, 14]}, 4, ("batch 13", "data skipped")),
        (SHUFFLED, 18, {12: [13], 16: [17, 18]}, 4, ("batch 17", "data skipped")),
    ],
)
def test_the_place_of_the_first_batch(saved, batch, logged, length, expected):
    rows = [
        (row.now.removeprefix("next: "), row.key) for row in _data(batch, saved, logged, length)
    ]
    assert rows == ([expected] if expected else [])


def test_a_log_that_was_cut_off_keeps_its_entries(tmp_path):
    path = tmp_path / "run.jsonl"
    path.write_bytes(b'{"event": "BATCHES", "after": 1}\n{"event": "BATCHES", "aft')
    entries = partial(MonitorLog(path, Background(), b"").entries, "BATCHES")
    assert entries() == [{"event": "BATCHES", "after": 1}]
    path.unlink()
    assert entries() == []
