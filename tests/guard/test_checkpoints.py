"""A checkpoint is good or absent: whatever fails, on whatever rank, what was good stays."""

import json
import os
import resource
import shutil
import signal
import threading
import time
from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.staging import DefaultStager
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from rmetric.guard.checkpoints import Checkpoints, FailedSave, SavedCheckpoint, UnfitCheckpoint
from rmetric.guard.dcp import num_non_finite
from rmetric.guard.training_state import ModelState, random_values, set_random_values
from tests.monitor.ranks import on_ranks

MODEL = {"layers": 2, "hidden": 8}


def at(folder, **settings):
    return Checkpoints(folder, **({"fingerprint": MODEL} | settings))


def state_of(value, rows=6):
    return {"weights": torch.full((rows, 4), float(value))}


def saved(checkpoints, step, state=None, **more):
    checkpoints.begin(step, state or state_of(step), {"seen": 10 * step}, **more)
    return checkpoints.wait(30.0)


def names(folder):
    return sorted(path.name for path in Path(folder).iterdir())


def loaded(checkpoints):
    state = state_of(-1)
    good = checkpoints.newest_good()
    return good.step, checkpoints.load(good, state), float(state["weights"].mean())


@pytest.mark.parametrize("asynchronous", [True, False])
def test_what_is_saved_is_what_was_at_hand_when_it_began(tmp_path, asynchronous):
    checkpoints = at(tmp_path, asynchronous=asynchronous)
    assert checkpoints.newest_good() is None
    state = state_of(7)
    checkpoints.begin(3, state, {"seen": 30})
    state["weights"].fill_(99.0)
    done = checkpoints.wait(30.0)
    assert isinstance(done, SavedCheckpoint)
    assert 0 < done.blocking_seconds <= done.seconds or not asynchronous
    assert 0 < done.durable_seconds <= done.seconds
    assert loaded(at(tmp_path)) == (3, {"seen": 30}, 7.0)
    assert names(tmp_path) == ["step-3"]


def test_what_writes_waits_for_no_gpu(tmp_path, monkeypatch):
    calls = []
    checkpoints = at(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda *a: calls.append(a))
    assert isinstance(saved(checkpoints, 1), SavedCheckpoint)
    assert calls == []


def test_a_torch_that_indexes_a_copy_and_whose_stager_closes_itself(tmp_path, monkeypatch):
    finish, stage = FileSystemWriter.finish, DefaultStager.stage

    def of_a_copy(self, metadata, results):
        finish(self, replace(metadata), results)

    def and_close(self, state, **options):
        try:
            return stage(self, state, **options)
        finally:
            DefaultStager.close(self)

    monkeypatch.setattr(FileSystemWriter, "finish", of_a_copy)
    monkeypatch.setattr(DefaultStager, "stage", and_close)
    checkpoints = at(tmp_path)
    for step in (1, 2):
        assert isinstance(saved(checkpoints, step), SavedCheckpoint)
    assert loaded(at(tmp_path)) == (2, {"seen": 20}, 2.0)


def test_an_outcome_is_handed_out_once_and_one_save_runs_at_a_time(tmp_path):
    checkpoints = at(tmp_path)
    assert checkpoints.poll() is None
    checkpoints.begin(1, state_of(1))
    with pytest.raises(RuntimeError, match="step 1 is still in flight"):
        checkpoints.begin(2, state_of(2))
    with pytest.raises(RuntimeError, match="step 1 is still in flight"):
        checkpoints.newest_good()
    assert isinstance(checkpoints.wait(30.0), SavedCheckpoint)
    assert checkpoints.poll() is None
    assert not checkpoints.in_flight


def test_the_last_good_one_stays_until_another_is_good(tmp_path):
    checkpoints = at(tmp_path, keep=1)
    saved(checkpoints, 1)
    agreed = checkpoints._agreed

    def a_file_vanishes(save, metadata):
        (save.part / "__0_0.distcp").unlink()
        return agreed(save, metadata)

    assert "nothing to save" in saved(checkpoints, 2, problem="nothing to save").problem
    checkpoints._agreed = a_file_vanishes
    assert "__0_0.distcp: written, but missing" in saved(checkpoints, 2).problem
    assert names(tmp_path) == ["step-1"]
    checkpoints._agreed = agreed
    assert isinstance(saved(checkpoints, 3), SavedCheckpoint)
    assert names(tmp_path) == ["step-3"]


def test_a_step_that_is_reached_again_takes_the_place_of_the_older_one(tmp_path):
    saved(at(tmp_path), 5)
    assert saved(at(tmp_path), 5, state_of(6)).good.serial == 2
    assert loaded(at(tmp_path)) == (5, {"seen": 50}, 6.0)
    assert names(tmp_path) == ["step-5"]
    (tmp_path / "step-5").rename(tmp_path / "step-5.old")  # killed between two renames
    assert loaded(at(tmp_path)) == (5, {"seen": 50}, 6.0)
    saved(at(tmp_path), 3)
    assert at(tmp_path).newest_good().step == 3, "it is the one written last"


def test_what_a_killed_save_left_is_cleared(tmp_path):
    saved(at(tmp_path), 1)
    shutil.copytree(tmp_path / "step-1", tmp_path / "step-2.abc-1.part")
    assert at(tmp_path).newest_good().step == 1
    saved(at(tmp_path), 3)
    assert names(tmp_path) == ["step-1", "step-3"]


def test_whoever_only_reads_does_not_harm_a_save_under_way(tmp_path):
    checkpoints = at(tmp_path)
    saved(checkpoints, 1)
    checkpoints._agreed = lambda *a, agreed=checkpoints._agreed: (written.wait(), agreed(*a))[1]
    written = threading.Event()
    checkpoints.begin(2, state_of(2))
    while not list(tmp_path.glob("step-2.*.part/.metadata")):
        time.sleep(0.01)
    assert at(tmp_path).newest_good().step == 1
    written.set()
    assert isinstance(checkpoints.wait(30.0), SavedCheckpoint)


def test_one_that_is_damaged_takes_nobodys_place(tmp_path):
    for step in (1, 2, 3):
        saved(at(tmp_path), step)
    flip(tmp_path / "step-3" / "__0_0.distcp")
    checkpoints = at(tmp_path, keep=2)
    assert checkpoints.newest_good().step == 2
    saved(checkpoints, 4)
    assert names(tmp_path) == ["step-2", "step-4"]


def test_the_newest_stays_so_when_one_that_could_not_be_read_for_a_while_comes_back(tmp_path):
    for step in (1, 3):
        saved(at(tmp_path), step)
    seal = (tmp_path / "step-3" / "good.json").rename(tmp_path / "away")
    assert saved(at(tmp_path), 2).good.serial == 2
    seal.rename(tmp_path / "step-3" / "good.json")
    assert at(tmp_path).newest_good().step == 2


def test_another_models_are_neither_cleared_nor_replaced(tmp_path):
    for step in (1, 2):
        saved(at(tmp_path), step)
    other = at(tmp_path, keep=1, fingerprint="llama")
    assert "step-2 is of another model: {'layers': 2, 'hidden': 8} there" in saved(other, 2).problem
    for step in (3, 4):
        saved(other, step)
    assert names(tmp_path) == ["step-1", "step-2", "step-4"]
    (tmp_path / "step-4").rename(tmp_path / "other")
    more = {**MODEL, "layers": 3, "vocabulary": 9} | dict.fromkeys(("x", "y", "z", "zz"), 1)
    for fingerprint, words in (
        (more, "layers is 2 there, 3 here; vocabulary is None .*; z is None .* and 1 more$"),
        ("llama", "'llama' here"),
    ):
        with pytest.raises(UnfitCheckpoint, match=words):
            at(tmp_path, fingerprint=fingerprint).newest_good()


def flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def truncate(path):
    path.write_bytes(path.read_bytes()[:-1])


def edit(path):
    path.write_text(path.read_text().replace('"seen": 20', '"seen": 21'))


@pytest.mark.parametrize(
    ("name", "damage", "words"),
    [
        ("__0_0.distcp", flip, "is not what was written"),
        ("__0_0.distcp", truncate, "bytes instead of"),
        ("__0_0.distcp", Path.unlink, "cannot be read"),
        (".metadata", flip, "is not what was written"),
        ("rank-0.json", flip, "is not what was written"),
        ("good.json", truncate, "good.json cannot be read"),
        ("good.json", edit, "changed after it was written"),
        ("good.json", Path.unlink, "good.json cannot be read"),
    ],
)
def test_a_damaged_newest_falls_back_to_the_one_before(tmp_path, errors, name, damage, words):
    for step in (1, 2):
        saved(at(tmp_path), step, own={"seed": step})
    before = (tmp_path / "step-2" / name).read_bytes()
    damage(tmp_path / "step-2" / name)
    path = tmp_path / "step-2" / name
    assert not path.exists() or path.read_bytes() != before, "nothing was damaged"
    assert loaded(at(tmp_path)) == (1, {"seen": 10}, 1.0)
    assert "skipped" in errors.text
    assert words in errors.text


def test_a_state_of_another_shape_is_refused(tmp_path):
    checkpoints = at(tmp_path)
    saved(checkpoints, 1)
    good = checkpoints.newest_good()
    with pytest.raises(ValueError, match=r"step-1 does not fit: rank 0: .*other"):
        checkpoints.load(good, {"other": torch.zeros(6, 4)})
    with pytest.raises(ValueError, match=r"step-1 does not fit: rank 0: .*[Ss]ize"):
        checkpoints.load(good, state_of(0, rows=7))


def test_a_state_that_does_not_fit_into_host_memory_is_not_copied(tmp_path, monkeypatch):
    checkpoints = at(tmp_path)
    saved(checkpoints, 1)
    monkeypatch.setattr("rmetric._util.host_memory.available_to_rank", lambda: 0)
    assert saved(checkpoints, 2).good, "the memory of the first save is used again"
    failed = saved(checkpoints, 3, state_of(3, rows=7))
    assert "do not fit into host memory, of which 0 GB is available" in failed.problem
    assert names(tmp_path) == ["step-1", "step-2"]


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_not_finite_is_kept_aside_and_never_loaded(tmp_path, value):
    checkpoints = at(tmp_path)
    saved(checkpoints, 1)
    for step in (2, 3):
        state = state_of(step)
        state["weights"][1, 2] = value
        failed = saved(checkpoints, step, state)
        assert isinstance(failed, FailedSave)
        assert "weights holds 1 of 24 values that are not finite" in failed.problem
        assert failed.kept == tmp_path / f"step-{step}.not-finite"
    assert names(tmp_path) == ["step-1", "step-3.not-finite"]
    assert at(tmp_path).newest_good().step == 1


def test_a_mask_may_be_infinite_but_not_nan(tmp_path):
    checkpoints = at(tmp_path, may_be_infinite=["*.mask"])
    state = {"model": {"mask": torch.full((2,), -torch.inf), "steps": torch.arange(3)}}
    assert isinstance(saved(checkpoints, 1, state), SavedCheckpoint)
    state["model"]["mask"][0] = torch.nan
    assert isinstance(saved(checkpoints, 2, state), FailedSave)


def test_a_folder_that_cannot_be_made_is_one_clear_error(tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(ValueError, match=r"checkpoints cannot be written to .*file/checkpoints"):
        at(tmp_path / "file" / "checkpoints")
    with pytest.raises(ValueError, match="keep is 0"):
        at(tmp_path, keep=0)


def test_a_folder_that_goes_away_fails_the_save_and_is_not_made_again(tmp_path):
    checkpoints = at(tmp_path / "disk")
    shutil.rmtree(tmp_path / "disk")
    failed = saved(checkpoints, 1)
    assert isinstance(failed, FailedSave)
    assert f"the folder {tmp_path / 'disk'} is gone" in failed.problem
    assert names(tmp_path) == []
    (tmp_path / "disk").mkdir()
    assert isinstance(saved(checkpoints, 2), SavedCheckpoint)


def test_values_that_json_does_not_hold_fail_the_save_with_their_place(tmp_path):
    checkpoints = at(tmp_path)
    checkpoints.begin(1, state_of(1), {"loader": object()})
    assert "plain values: TypeError" in checkpoints.wait(30.0).problem
    assert names(tmp_path) == []


def test_random_numbers_go_on_where_they_were():
    import random

    def drawn():
        return random.random(), np.random.rand(), torch.rand(1).item()  # noqa: NPY002

    values = json.loads(json.dumps(random_values()))
    expected = drawn()
    assert drawn() != expected
    set_random_values(values)
    assert drawn() == expected


DTYPES = [
    torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.complex64,
    torch.float8_e4m3fn, torch.float8_e5m2,
]  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_values_that_are_not_finite_are_counted_wherever_they_are(dtype):
    assert num_non_finite(torch.empty(0, dtype=dtype), infinite_too=True) == 0
    for size, value in product((1, 7, 300_001), (torch.nan, torch.inf, -torch.inf, 1.0)):
        for places in ([0], [size // 2], [0, size - 1]):
            values = torch.randn(size, generator=torch.Generator().manual_seed(size))
            values[places] = value
            struck = values.to(dtype)  # float8_e4m3fn has no infinity: it becomes nan
            if struck.is_complex():
                struck = torch.complex(torch.zeros(size), values)
            wide = struck if struck.is_complex() else struck.double()
            assert num_non_finite(struck, infinite_too=True) == int((~wide.isfinite()).sum())
            assert num_non_finite(struck, infinite_too=False) == int(wide.isnan().sum())


def replicated(folder, step, rank):
    """A save of data-parallel ranks that hold the same, and what came of it."""
    checkpoints = at(folder)
    return checkpoints, saved(checkpoints, step, own={"rank": rank})


class Broken:
    def state_dict(self):
        raise ValueError("lost in memory")

    load_state_dict = state_dict


def failing_on_one(rank, folder, way, where):
    checkpoints, first = replicated(folder, 1, rank)
    assert isinstance(first, SavedCheckpoint)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    # More than the limit for each rank, whichever tensors DCP gives it.
    state = {f"w{i}": torch.ones(4000) for i in range(6)}
    if rank == where and way == "full disk":
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
    elif rank == where:
        state = {"w0": Broken()}
    failed = saved(checkpoints, 2, state)
    resource.setrlimit(resource.RLIMIT_FSIZE, before)
    dist.barrier()  # rank 0 has cleaned up
    left = names(folder)
    good = checkpoints.newest_good()
    dist.barrier()
    third = saved(checkpoints, 3)
    return failed.problem, left, good.step, good.own(rank), third.step


@pytest.mark.parametrize(
    ("way", "where", "ranks", "words"),
    [
        ("full disk", 0, 3, "GB are free"),
        ("full disk", 2, 3, "GB are free"),
        ("no state", 1, 2, "rank 1: RuntimeError: state: ValueError: lost in memory"),
    ],
)
def test_a_save_that_fails_on_one_rank_fails_on_all_and_harms_nothing(
    tmp_path, way, where, ranks, words
):
    found = on_ranks(failing_on_one, tmp_path, way, where, ranks=ranks)
    for rank, (problem, left, step, own, third) in enumerate(found):
        assert f"rank {where}: " in problem
        assert ("rank 1: " in problem) == (where == 1)
        assert words in problem
        assert left == ["step-1"]
        assert (step, own, third) == (1, {"rank": rank}, 3)


def killed_in_a_save(rank, folder, victim):
    checkpoints, _ = replicated(folder, 1, rank)
    if rank == victim:
        from rmetric.guard import dcp as module

        # The last moment before the ranks agree: its files are written.
        module.non_finite = lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)
    began = time.monotonic()
    checkpoints.begin(2, state_of(2))
    failed = checkpoints.wait(30.0)
    return type(failed).__name__, failed.problem, time.monotonic() - began


@pytest.mark.parametrize("victim", [0, 2])
def test_a_rank_killed_in_a_save_leaves_the_one_before(tmp_path, victim):
    results = on_ranks(killed_in_a_save, tmp_path, victim, ranks=3, lost=(victim,))
    assert results[victim] is None, "it was to be killed"
    for rank, result in enumerate(results):
        if rank != victim:
            assert result[0] == "FailedSave", result
            assert result[2] < 20
    left = [name for name in names(tmp_path) if not name.endswith(".part")]
    assert left == ["step-1"]
    assert loaded(at(tmp_path)) == (1, {"seen": 10}, 1.0)
    saved(at(tmp_path), 3)
    assert names(tmp_path) == ["step-1", "step-3"]


FULL = torch.arange(70, dtype=torch.float32).reshape(10, 7)


def resharded(rank, folder, step):
    """Load what another number of ranks left, check it, change it, save it."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    checkpoints = at(folder)
    state = {
        "sharded": distribute_tensor(torch.zeros(10, 7), mesh, [Shard(0)]),
        "replicated": torch.zeros(5),
    }
    good = checkpoints.newest_good()
    if good is None:
        state["sharded"] = distribute_tensor(FULL.clone(), mesh, [Shard(0)])
    else:
        checkpoints.load(good, state)
    assert isinstance(state["sharded"], DTensor)
    assert torch.equal(state["sharded"].full_tensor(), FULL + (good.step if good else 0))
    assert torch.equal(state["replicated"], torch.full((5,), float(good.step if good else 0)))
    with torch.no_grad():
        state["sharded"].add_(step - (good.step if good else 0))
        state["replicated"].fill_(float(step))
    done = saved(checkpoints, step, state)
    return list(state["sharded"].to_local().shape), done.good.world_size


def test_four_ranks_three_two_one_and_back(tmp_path):
    rows = {}
    for step, ranks in enumerate((4, 3, 2, 1, 3), start=1):
        results = on_ranks(resharded, tmp_path, step, ranks=ranks)
        assert [size for _, size in results] == [ranks] * ranks
        rows[step] = [shape[0] for shape, _ in results]
    assert list(rows.values()) == [[3, 3, 3, 1], [4, 4, 2], [5, 5], [10], [4, 4, 2]]


def parts(num_layers=4):
    torch.manual_seed(0)
    return nn.ModuleDict({f"layer{i}": nn.Linear(3, 3) for i in range(num_layers)})


def trained(model):
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 0.5)
    optimizer.step()
    return optimizer


def a_stage(rank, folder):
    """Two stages, each with the layers of its own."""
    whole, ranks = parts(), dist.get_world_size()
    model = nn.ModuleDict({f"layer{i}": whole[f"layer{i}"] for i in range(4) if i % ranks == rank})
    return saved(at(folder), 1, {"training": ModelState(model, trained(model))}).step


def test_pipeline_stages_become_one_model_in_one_part_or_two(tmp_path):
    on_ranks(a_stage, tmp_path, ranks=2)
    expected = parts()
    moments = trained(expected).state_dict()["state"]

    def check(state, model, optimizers):
        checkpoints = at(tmp_path)
        checkpoints.load(checkpoints.newest_good(), {"training": state})
        for name, value in model.state_dict().items():
            assert torch.equal(value, expected.state_dict()[name]), name
        found = [moment for optimizer in optimizers for moment in optimizer.state.values()]
        assert len(found) == len(moments)
        for moment, meant in zip(found, moments.values(), strict=True):
            assert torch.equal(moment["exp_avg"], meant["exp_avg"])
            assert moment["step"] == 1

    model = parts()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    check(ModelState(model, optimizer), model, [optimizer])

    model = parts()
    halves = [
        nn.ModuleDict({f"layer{i}": model[f"layer{i}"] for i in own}) for own in ((0, 1), (2, 3))
    ]
    optimizers = [torch.optim.AdamW(half.parameters(), lr=0.1) for half in halves]
    check(ModelState(halves, optimizers), model, optimizers)
    with pytest.raises(ValueError, match="1 optimisers for 2 parts"):
        ModelState(halves, optimizers[0])


def unseen_folder(rank, folder):
    with pytest.raises(ValueError, match="rank 1 does not see"):
        at(folder if rank == 0 else folder / "other")
    return True


def test_ranks_that_see_other_folders_are_reported(tmp_path):
    assert on_ranks(unseen_folder, tmp_path, ranks=2) == [True, True]
