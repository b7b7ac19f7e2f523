"""The stage of a failure is that of its cause, independent of the writer and of later lines."""

from __future__ import annotations

from pathlib import Path

import pytest

from rmetric.diagnosis.decide import diagnose
from rmetric.diagnosis.report.frames import stage_of

LAUNCH = ["INFO: [default] Starting worker group"]
AGAIN = [
    "ERROR torch/distributed/elastic/multiprocessing/api.py:869] failed (exitcode: 1)"
    " local_rank: 2 (pid: 12) of binary: /usr/bin/python",
    "INFO: [default] Rendezvous'ing worker group",
    "INFO: [default] Starting worker group",
]
TASK = ["srun: error: n1: task 2: Exited with exit code 1"]
KILLED = ["srun: Job 71 step creation still disabled, retrying", "srun: error: n1: task 2: Killed"]
MISSING = "FileNotFoundError: [Errno 2] No such file or directory: '/data/x.bin'"
ILLEGAL = "RuntimeError: CUDA error: an illegal memory access was encountered"
CLEANED = ["Destroying process group"]


def traceback(error: str, before: str = "", function: str = "main") -> list[str]:
    frames = [f'  File "/w/fit.py", line 7, in {name}' for name in ("<module>", function)]
    return [before + line for line in ("Traceback (most recent call last):", *frames, error)]


def steps(before: str = "") -> list[str]:
    return [f"{before}step {at} loss {4 / at:.3f}" for at in range(1, 30)]


def every(words: str) -> list[str]:
    return [f"[rank{rank}]: {words}" for rank in range(4)]


STAGES = {
    # Launchers' lines, before or after, in the same stream or another.
    "launcher after": ("initialise", [*LAUNCH, "> initializing torch distributed ...",
                                      *traceback(MISSING), *AGAIN]),
    "launcher beside": ("load data", [*LAUNCH, *every("loading training data from shards"),
                                      *traceback(MISSING, "[rank2]: "), *TASK, *AGAIN]),
    "told by the launcher": ("train", [*LAUNCH, *steps("[rank0]: "), *KILLED]),
    "an error of nobody": ("train", [*LAUNCH, *steps("[rank0]: "), *traceback(ILLEGAL)]),
    # Ranks that leave the telling to rank 0.
    "a quiet rank": ("train", [*every("loading training data from shards"), *steps("[rank0]: "),
                               *traceback(ILLEGAL, "[rank2]: ")]),
    # Banners of the end.
    "banner after": ("train", [*LAUNCH, *steps(), *traceback(ILLEGAL), *CLEANED]),
    "banner by finally": ("train", [*LAUNCH, *steps(), *CLEANED, *traceback(ILLEGAL)]),
    "in the tear-down": ("tear-down", [*LAUNCH, *steps(), *CLEANED,
                                       *traceback(ILLEGAL, function="destroy_process_group")]),
    "after the planned end": ("tear-down", [*LAUNCH, *steps(), "Training completed successfully.",
                                            *CLEANED, *traceback(ILLEGAL)]),
    # Logs that hold nothing but the failure.
    "only a traceback": ("train", traceback(ILLEGAL, function="backward")),
    "only an import": ("launch", ["Traceback (most recent call last):",
                                  '  File "/w/fit.py", line 3, in <module>', "    import flash",
                                  "OSError: libc10.so: cannot open shared object file"]),
    "only a trainer that is made": ("initialise", traceback("ValueError: no", function="__init__")),
    "only a fault of one stage": ("launch", ["OSError: [Errno 98] Address already in use"]),
    "made after steps": ("train", [*steps(), *traceback(ILLEGAL, function="__init__")]),
}  # fmt: skip


@pytest.mark.parametrize("name", STAGES)
def test_the_stage_is_that_of_the_cause(name: str, tmp_path: Path) -> None:
    stage, lines = STAGES[name]
    (tmp_path / "job.log").write_text("\n".join(lines) + "\n")
    found = diagnose([tmp_path / "job.log"])
    assert (found.outcome, found.stage) == ("failed", stage)


def test_errors_in_a_file_of_their_own_are_of_their_rank_s_stage(tmp_path: Path) -> None:
    """Rank 0 came to its end; rank 1 was still training, as its other file tells."""
    for rank, end in enumerate((CLEANED, [], [])):
        lines = [*LAUNCH, *steps(), *end]
        (tmp_path / f"rank_{rank}.out").write_text("\n".join(lines) + "\n")
    (tmp_path / "rank_1.err").write_text("\n".join(traceback(ILLEGAL)) + "\n")
    assert diagnose([tmp_path]).stage == "train"


def test_a_launcher_s_own_frames_tell_no_stage() -> None:
    torch = '  File "/lib/torch/{}", line 3, in {}\n'
    launcher = torch.format("distributed/elastic/agent/api.py", "_initialize_workers")
    layers = torch.format("nn/modules/container.py", "__getitem__")
    assert stage_of("Traceback (most recent call last):\n" + launcher + layers) == ""


@pytest.mark.parametrize(
    ("said", "stage"),
    [
        (
            "E filesystem_async:318] no checkpoint written: [Errno 122] Disk quota exceeded",
            "checkpoint",
        ),
        ("OSError: [Errno 122] Disk quota exceeded: '/tmp/cache/a.bin'", "train"),
        (
            "RuntimeError: PytorchStreamReader failed reading zip archive: invalid header",
            "checkpoint",
        ),
    ],
)
def test_storage_that_fails_a_checkpoint_fails_at_the_checkpoint(said, stage, tmp_path):
    steps = [f"2025-03-04 10:00:{at:02d} step {at} loss 2.1" for at in range(50)]
    (tmp_path / "job.log").write_text("\n".join([*steps, said]) + "\n")
    assert diagnose([tmp_path]).stage == stage
