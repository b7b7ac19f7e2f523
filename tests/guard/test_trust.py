"""Planted links, planted pickles and folders of others: nothing is followed, nothing is run."""

import io
import json
import os
import pickle
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.fsdp import fully_shard

from rmetric._util.durable import durable_file, write_atomically
from rmetric.guard.checkpoint_dir import MANIFEST_NAME, _seal, candidates
from rmetric.guard.checkpoints import Checkpoints, FailedSave, SavedCheckpoint
from rmetric.guard.dcp import INDEX_NAME, digest, read_index
from rmetric.guard.run_folder import RunFolder
from rmetric.guard.supervisor.journal import Journal, folder_lock
from rmetric.guard.training_state import ModelState
from rmetric.guard.trust import TRUST_VARIABLE, distrust, foreign_writers
from rmetric.rescue.disk import SnapshotFolder
from tests.guard.supervisor import launched, supervise_command
from tests.monitor.ranks import on_ranks

UNTOUCHED = '{"message": "untouched"}'


def at(folder):
    return Checkpoints(folder, fingerprint="m", asynchronous=False)


def save(folder, state=None, step=1):
    checkpoints = at(folder)
    checkpoints.begin(step, state or {"weights": torch.ones(3), "lr": 0.5})
    return checkpoints.wait(60.0)


def planted(path, target):
    """A link in the place of a file, and where it leads."""
    target.write_text(UNTOUCHED)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.symlink_to(target)
    return target


@pytest.mark.parametrize(
    "name", ["lock", "journal.jsonl", "logs/launch-1.log", "heartbeats/rank-0.json",
             "request.json", "answered.json", ".request.lock", "layout.json", "summary.md"]
)  # fmt: skip
def test_no_link_in_a_run_folder_is_followed(tmp_path, name):
    target = planted(tmp_path / "run" / name, tmp_path / "outside")
    folder = RunFolder(tmp_path / "run")
    command = supervise_command(
        folder.path, "--poll-seconds", "0.1", "--max-restarts", "0",
        "--", sys.executable, "-c", "import time; time.sleep(0.2)",
    )  # fmt: skip
    # In a process of its own: the command ends every child of its process.
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    folder.beat(0, 1)
    folder.answer(1, 1)
    if name == ".request.lock":
        with pytest.raises(OSError, match=r"symbolic link, which is not followed.*request\.lock"):
            folder.ask("user", "now")
    else:
        folder.ask("user", "now")
    assert target.read_text() == UNTOUCHED
    if name in ("lock", "journal.jsonl", "logs/launch-1.log"):
        assert name in done.stderr
        assert "it is a symbolic link, which is not followed" in done.stderr


def test_what_a_link_gives_to_read_is_not_taken_and_a_pipe_is_not_waited_for(tmp_path):
    folder = RunFolder(tmp_path / "run")
    folder.ask("user", "now")
    folder.request_file.rename(tmp_path / "there")
    folder.request_file.symlink_to(tmp_path / "there")
    assert folder.request() is None
    folder.heartbeats.mkdir()
    os.mkfifo(folder.heartbeats / "rank-0.json")
    assert folder.beats() == {}


def test_the_manifest_and_the_files_of_a_checkpoint_are_no_links(tmp_path):
    save(tmp_path)
    for name in (MANIFEST_NAME, INDEX_NAME):
        path = tmp_path / "step-1" / name
        path.rename(tmp_path / "elsewhere")
        path.symlink_to(tmp_path / "elsewhere")
        assert at(tmp_path).newest_good() is None
        path.unlink()
        (tmp_path / "elsewhere").rename(path)
    assert at(tmp_path).newest_good().step == 1


def test_a_planted_part_costs_one_save_and_nothing_else(tmp_path):
    checkpoints = at(tmp_path / "checkpoints")
    save(tmp_path / "checkpoints", step=1)
    outside = tmp_path / "outside"
    outside.mkdir()
    part = tmp_path / "checkpoints" / f"step-5.{checkpoints._launch}-2.part"
    checkpoints.begin(4, {"weights": torch.ones(3)})
    assert isinstance(checkpoints.wait(60.0), SavedCheckpoint)
    part.symlink_to(outside)
    checkpoints.begin(5, {"weights": torch.ones(3)})
    failed = checkpoints.wait(60.0)
    assert isinstance(failed, FailedSave)
    assert "is a symbolic link, which is not followed" in failed.problem
    assert list(outside.iterdir()) == []


def test_a_durable_file_replaces_a_planted_link(tmp_path):
    target = planted(tmp_path / ".good.json.part", tmp_path / "outside")
    with durable_file(tmp_path / "good.json") as file:
        file.write(b"1")
    planted(tmp_path / "small.json", target)
    write_atomically(tmp_path / "small.json", [b"2"])
    assert target.read_text() == UNTOUCHED
    assert not (tmp_path / "good.json").is_symlink()
    assert not (tmp_path / "small.json").is_symlink()


def status(mode, user, group):
    return os.stat_result((mode, 0, 0, 1, user, group, 0, 0, 0, 0))


@pytest.mark.parametrize(
    ("mode", "owner", "group", "user", "trusted"),
    [
        (0o755, 7, 100, 7, True),
        (0o775, 7, 7, 7, True),  # the private group of the owner
        (0o775, 7, 100, 7, False),
        (0o777, 7, 7, 7, False),
        (0o1777, 0, 0, 7, False),  # /tmp
        (0o755, 8, 8, 7, False),
        (0o755, 0, 0, 7, True),
        (0o755, 8, 8, 0, True),  # a container's root in a user's folder
        (0o777, 8, 8, 0, False),
    ],
)
def test_who_can_write_decides(mode, owner, group, user, trusted):
    assert (not foreign_writers(status(mode, owner, group), user=user)) is trusted


def test_a_folder_that_all_can_write_is_refused_unless_the_user_trusts_it(
    tmp_path, monkeypatch, refused, errors
):
    save(tmp_path / "checkpoints")
    folder = RunFolder(tmp_path / "run")
    folder.ask("user", "now")
    (tmp_path / "ring").mkdir()
    for path in (tmp_path / "checkpoints", folder.path, tmp_path / "ring"):
        path.chmod(0o777)
    refusal = r"is not trusted: all users can write it \(mode 777\); .*RMETRIC_TRUST_FOLDER=1"
    with pytest.raises(ValueError, match=refusal):
        at(tmp_path / "checkpoints")
    with pytest.raises(ValueError, match="ring is not trusted: all users can write it"):
        SnapshotFolder(tmp_path / "ring")
    assert folder.request() is None
    assert folder.request() is None
    assert errors.text.count("requests are ignored") == 1
    error = refused("supervise", folder.path, "--", "true")
    assert "is not trusted: all users can write it" in error
    assert error.count("\n") == 1
    monkeypatch.setenv(TRUST_VARIABLE, "1")
    assert at(tmp_path / "checkpoints").newest_good().step == 1
    assert folder.request().number == 1
    monkeypatch.setenv(TRUST_VARIABLE, "yes")
    with pytest.raises(ValueError, match="RMETRIC_TRUST_FOLDER is 'yes': 1 or 0"):
        at(tmp_path / "checkpoints")


@pytest.mark.parametrize(
    ("mode", "refused"),
    [(0o777, True), (0o1777, False), (0o775, False), (0o702, True), (0o755, False)],
)
@pytest.mark.parametrize("below", ["", "mine/"])
def test_a_parent_in_which_anybody_could_swap_the_folder_is_refused(tmp_path, mode, refused, below):
    scratch = tmp_path / "scratch"
    folder = scratch / f"{below}run"
    save(folder)
    scratch.chmod(mode)
    assert ("all users can write its parent" in distrust(folder)) is refused
    if refused:
        with pytest.raises(ValueError, match=rf"parent {scratch} \(mode .*sticky"):
            at(folder)
        assert candidates(folder)[0] == []
    else:
        assert at(folder).newest_good().step == 1


def test_a_link_to_the_folder_hides_no_parent(tmp_path):
    save(tmp_path / "scratch" / "run")
    (tmp_path / "scratch").chmod(0o777)
    (tmp_path / "link").symlink_to(tmp_path / "scratch" / "run")
    with pytest.raises(ValueError, match="all users can write its parent"):
        at(tmp_path / "link")


@pytest.mark.parametrize("name", ["", MANIFEST_NAME, INDEX_NAME, "__0_0.distcp"])
def test_a_checkpoint_or_a_file_of_it_that_all_can_write_is_not_loaded(tmp_path, errors, name):
    save(tmp_path, step=1)
    save(tmp_path, step=2)
    path, mode = tmp_path / "step-2" / name, 0o666 if name else 0o777
    path.chmod(mode)
    assert at(tmp_path).newest_good().step == 1
    assert f"{path.name} is not trusted: all users can write it (mode {mode:o})" in errors.text


def test_a_trainers_folder_that_all_can_write_is_not_resumed_from(tmp_path, caplog):
    from rmetric.integrations.hugging_face import newest_checkpoint

    for step in (2, 4):
        folder = tmp_path / "out" / f"checkpoint-{step}"
        folder.mkdir(parents=True)
        (folder / "trainer_state.json").write_text("{}")
        torch.save({"w": torch.ones(1)}, folder / "pytorch_model.bin")
        os.utime(folder / "trainer_state.json", (step, step))
    assert newest_checkpoint(tmp_path / "out") == str(tmp_path / "out" / "checkpoint-4")
    (tmp_path / "out" / "checkpoint-4" / "pytorch_model.bin").chmod(0o666)
    assert newest_checkpoint(tmp_path / "out") == str(tmp_path / "out" / "checkpoint-2")
    assert "pytorch_model.bin is not trusted: all users can write it" in caplog.text
    (tmp_path / "out" / "checkpoint-2").chmod(0o777)
    with pytest.raises(ValueError, match=r"checkpoint-4.* is not trusted"):
        newest_checkpoint(tmp_path / "out")  # None would begin at step 0
    (tmp_path / "out").chmod(0o777)
    with pytest.raises(ValueError, match="out is not trusted: all users can write it"):
        newest_checkpoint(tmp_path / "out")


def test_snapshots_on_disk_run_no_planted_code(tmp_path):
    snapshots = SnapshotFolder(tmp_path / "ring")
    memory = {"block": torch.arange(8, dtype=torch.uint8)}
    snapshots.write(5, memory, [])
    snapshots.wait()
    found = {"block": torch.zeros(8, dtype=torch.uint8)}
    snapshots.read(5, found)
    assert torch.equal(found["block"], memory["block"])
    mark = tmp_path / "mark"
    (snapshots._of(5) / ".metadata").write_bytes(pickle.dumps(Runs(os.mkdir, str(mark))))
    snapshots.read(5, found)
    assert not mark.exists()
    (snapshots._of(5) / INDEX_NAME).write_text("[]")
    with pytest.raises(ValueError, match="is not an index of a checkpoint"):
        snapshots.read(5, found)
    snapshots.close()


def test_a_umask_of_zero_makes_nothing_that_all_can_write(tmp_path):
    before = os.umask(0)
    try:
        folder = RunFolder(tmp_path / "run")
        folder.ask("user", "now")
        folder.beat(0, 1)
        launched(folder, "/nonexistent/program")
        with folder_lock(folder):
            Journal(folder.journal).close()
        assert isinstance(save(folder.checkpoints), SavedCheckpoint)
    finally:
        os.umask(before)
    for path in (folder.path, *folder.path.rglob("*")):
        assert not path.stat().st_mode & 0o022, path


def sharded(rank, folder):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 8))
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model(torch.ones(4, 8)).square().mean().backward()
    optimizer.step()
    done = Checkpoints(folder, fingerprint="m")
    done.begin(1, {"training": ModelState(model, optimizer)})
    assert isinstance(done.wait(60.0), SavedCheckpoint)
    good = Checkpoints(folder, fingerprint="m").newest_good()
    done.load(good, {"training": ModelState(model, optimizer)})


def various(folder):
    model = nn.Sequential(nn.Linear(4, 4), nn.Embedding(3, 2)).to(torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=torch.tensor(1e-3))
    more = {kind: torch.ones(2, 3, dtype=getattr(torch, kind)) for kind in
            ("float16", "float64", "int8", "bool", "complex64")}  # fmt: skip
    plain = {"lr": np.float64(0.5), "n": [1, (2, {"x": None})], "size": torch.Size([1])}
    plain["bytes"] = b"1"
    save(folder, {"training": ModelState(model, optimizer), "more": more, "plain": plain})


def without_properties(metadata):
    """Of the properties of a tensor only the type decides how it is read."""
    content = metadata.state_dict_metadata.items()
    return {
        name: getattr(of, "properties", None) and (of.properties.dtype, of.size, of.chunks)
        for name, of in content
    }


@pytest.mark.parametrize("kind", ["various", "sharded"])
def test_the_index_that_is_read_is_the_one_that_dcp_reads(tmp_path, kind):
    if kind == "various":
        various(tmp_path)
    else:
        on_ranks(sharded, tmp_path, ranks=2)
    good = candidates(tmp_path)[0][0]
    found = read_index(good.path / INDEX_NAME, good.files)
    meant = FileSystemReader(good.path).read_metadata()
    assert without_properties(found) == without_properties(meant)
    assert found.planner_data == meant.planner_data
    assert list(found.storage_data.items()) == list(meant.storage_data.items())


def test_values_that_are_no_tensors_come_back(tmp_path):
    plain = {"lr": np.float64(0.25), "n": [1, (2, {"x": None})], "s": "x"}
    save(tmp_path, {"plain": plain})
    state = {"plain": {"lr": 0.0, "n": [0, (0, {"x": 1})], "s": ""}}
    checkpoints = at(tmp_path)
    checkpoints.load(checkpoints.newest_good(), state)
    assert state == {"plain": plain}


class Runs:
    """Pickled as a call."""

    def __init__(self, function, *arguments):
        self.call = function, arguments

    def __reduce_ex__(self, _protocol):
        return self.call


def of_index(change):
    """The index of a checkpoint, changed."""

    def planted(good):
        entry = json.loads((good / INDEX_NAME).read_text())
        change(entry)
        return json.dumps(entry)

    return planted


PLANTED = {
    "a pickle": lambda good: pickle.dumps(Runs(os.mkdir, "mark")).decode("latin-1"),
    "empty": lambda _: "",
    "cut": lambda good: (good / INDEX_NAME).read_text()[:-5],
    "deep": lambda _: "[" * 100_000,
    "another type": lambda _: '{"tensors": 1}',
    "a size of text": of_index(lambda entry: entry["tensors"]["weights"].update(size=["3"])),
    "a huge size": of_index(lambda entry: entry["tensors"]["weights"].update(size=[2**70])),
    "a function for a dtype": of_index(lambda e: e["tensors"]["weights"].update(dtype="load")),
    "below the file": of_index(lambda entry: entry["pieces"][0].update(start=-1)),
    "a file elsewhere": of_index(lambda entry: entry["pieces"][0].update(file="/etc/passwd")),
    "an unknown value": of_index(lambda entry: entry["pieces"][0].update(name="other")),
}


@pytest.mark.parametrize("kind", PLANTED)
def test_a_planted_index_is_refused_and_runs_nothing(tmp_path, monkeypatch, kind):
    monkeypatch.chdir(tmp_path)
    save(tmp_path / "checkpoints")
    good = tmp_path / "checkpoints" / "step-1"
    (good / INDEX_NAME).write_text(PLANTED[kind](good))
    # The index of DCP, a pickle, is not read.
    (good / ".metadata").write_bytes(pickle.dumps(Runs(os.mkdir, "mark")))
    seal_again(good)
    checkpoints = at(tmp_path / "checkpoints")
    found = checkpoints.newest_good()
    assert found.step == 1, "its seal is whole"
    with pytest.raises(ValueError, match="is not an index of a checkpoint") as error:
        checkpoints.load(found, {"weights": torch.zeros(3), "lr": 0.0})
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 1000
    assert not (tmp_path / "mark").exists()


def seal_again(good, **changed):
    entry = json.loads((good / MANIFEST_NAME).read_text()) | changed
    del entry["sha256"]
    entry["files"] = {name: digest(good / name) for name in entry["files"]}
    (good / MANIFEST_NAME).write_text(json.dumps({**entry, "sha256": _seal(entry)}))


def test_a_planted_value_is_refused_and_runs_nothing(tmp_path):
    save(tmp_path / "c")
    good, mark = tmp_path / "c" / "step-1", tmp_path / "mark"
    planted, data = io.BytesIO(), good / "__0_0.distcp"
    torch.save(Runs(os.mkdir, str(mark)), planted)
    entry = json.loads((good / INDEX_NAME).read_text())
    [piece] = [p for p in entry["pieces"] if p["name"] == "lr"]
    piece |= {"start": data.stat().st_size, "length": len(planted.getvalue())}
    data.write_bytes(data.read_bytes() + planted.getvalue())
    (good / INDEX_NAME).write_text(json.dumps(entry))
    seal_again(good)
    checkpoints = at(tmp_path / "c")
    state = {"weights": torch.zeros(3), "lr": 0.0}
    with pytest.raises(ValueError, match=r"the value lr is neither a tensor nor plain.*mkdir"):
        checkpoints.load(checkpoints.newest_good(), state)
    assert not mark.exists()


def test_a_value_that_could_not_be_loaded_fails_the_save(tmp_path):
    failed = save(tmp_path, {"a": {"own": Path("x")}})
    assert isinstance(failed, FailedSave)
    assert "the value a.own is neither a tensor nor plain" in failed.problem
    assert "PosixPath" in failed.problem
    assert list(Path(tmp_path).iterdir()) == []
