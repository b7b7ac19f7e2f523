"""The guard as a whole: the reference training under the supervisor, struck for real.

What is compared is the loss of every step with that of the same training written plainly,
in one process, uninterrupted.
"""

import json
import os
import signal
import subprocess
import time

import numpy as np
import pytest

pytest.importorskip("torch")
psutil = pytest.importorskip("psutil")

from rmetric.guard.layout import Layout  # noqa: E402
from rmetric.guard.supervisor import processes  # noqa: E402
from rmetric.telemetry.lines import GpuVerdict, verdict_line  # noqa: E402
from tests.guard.supervisor import TORCHRUN, SupervisedRun, supervise_command  # noqa: E402
from tests.guard.test_checkpoints import flip  # noqa: E402
from tests.studies.reference_runs import SMALL, losses_of, plain_losses, settings  # noqa: E402
from tests.telemetry import fake_nvml  # noqa: E402

SAVE_EVERY = 3


class Guarded(SupervisedRun):
    """A supervised reference training in a process of its own."""

    def __init__(self, folder, *training, ranks=2, options=(), environment=None):
        self.training = training
        copies = f"data={ranks},micro_batch=1,accumulation={12 // ranks}"
        command = supervise_command(
            folder, "--gpus", f"0-{ranks - 1}", "--layout", copies, "--batch", "12",
            "--poll-seconds", "0.1", "--backoff-seconds", "0.1", "--grace-seconds", "5",
            "--save-seconds", "60", *options, "--", *TORCHRUN, "--nproc-per-node", str(ranks),
            "-m", "studies.tiny_llama", *SMALL, f"--save-every={SAVE_EVERY}", *training,
        )  # fmt: skip
        environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", **(environment or {})}
        process = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)
        super().__init__(folder, process=process)

    def step(self):
        """The last step of which the loss is written."""
        try:
            lines = (self.folder.path / "losses.jsonl").read_bytes().splitlines()
            return json.loads(lines[-1]).get("step", 0)
        except (OSError, ValueError, IndexError):
            return 0

    def worker(self, rank):
        return self.folder.beats(self.of("launch")[-1]["token"])[rank].pid

    def losses_are_those_of_an_uninterrupted_run(self, *more, within=1e-5):
        reference = settings(self.folder.path, f"--save-every={SAVE_EVERY}", *self.training, *more)
        plain = plain_losses(reference)
        losses = losses_of(self.folder.path)
        assert len(losses) == len(plain) == reference.options.steps
        assert [losses[step + 1][0] for step in range(len(plain))] == pytest.approx(
            [loss for loss, _ in plain], rel=0, abs=within
        )


@pytest.mark.parametrize(
    ("kind", "words"),
    [("exception", "rank 1 failed with exit code 1"), ("hang", "no heartbeat for")],
)
def test_an_exception_or_a_hang_of_one_rank(tmp_path, kind, words):
    options = ("--hang-seconds", "6" if kind == "hang" else "300")  # torchrun ends slowly
    run = Guarded(tmp_path, "--steps=8", f"--inject={kind}@6:1", options=options).end()
    assert (tmp_path / "injected" / f"{kind}@6:1.json").exists()
    assert run.failures[0].startswith(words)
    assert kind == "hang" or "InjectedError: injected at step 6" in run.failures[0]
    run.losses_are_those_of_an_uninterrupted_run()


def test_sigterm_in_the_middle_of_a_save(tmp_path):
    run = Guarded(tmp_path, "--steps=12", "--sleep=0.1")

    run.until(lambda: run.step() >= 6 and any(run.folder.checkpoints.glob("*.part")))
    os.kill(run.worker(0), signal.SIGTERM)
    run.end()
    # The rank that received it and those that did not saved one step together, and ended.
    assert run.failures == ["it ended with exit code 0 before it had finished"]
    assert "SIGTERM" in run.log(1)
    assert run.summary.steps_lost == 0
    run.losses_are_those_of_an_uninterrupted_run()


def test_a_disk_that_is_full_in_a_save_and_has_room_again(tmp_path):
    run = Guarded(tmp_path, "--steps=30", "--sleep=0.2")
    run.until(lambda: run.step() >= 4)
    worker = psutil.Process(run.worker(1))
    worker.rlimit(psutil.RLIMIT_FSIZE, (4096, psutil.RLIM_INFINITY))
    run.until(lambda: "save of step" in run.log(1))
    worker.rlimit(psutil.RLIMIT_FSIZE, (psutil.RLIM_INFINITY, psutil.RLIM_INFINITY))
    failed_at = run.step()
    run.until(lambda: any(step_of(path) > failed_at for path in good(run.folder)))
    os.kill(run.worker(1), signal.SIGKILL)
    run.end()
    assert run.of("resumed")[1]["step"] > failed_at
    run.losses_are_those_of_an_uninterrupted_run()


def good(folder):
    # One that is being put away has a suffix until it is gone.
    found = [path.parent for path in folder.checkpoints.glob("step-*/good.json")]
    return [path for path in found if not path.suffix]


def step_of(path):
    return int(path.name.split("-")[1])


def test_a_corrupted_newest_checkpoint_falls_back_to_the_one_before(tmp_path):
    run = Guarded(tmp_path, "--steps=40", "--sleep=0.4")
    run.until(lambda: len(good(run.folder)) >= 2)
    os.kill(run.process.pid, signal.SIGKILL)
    run.process.wait()
    processes.end(run.of("supervisor")[0]["token"], grace=1.0)
    before, newest = sorted(good(run.folder), key=step_of)[-2:]
    flip(max(newest.glob("*.distcp"), key=lambda path: path.stat().st_size))
    again = Guarded(tmp_path, "--steps=40").end()
    assert again.of("resumed")[-1]["step"] == step_of(before) < step_of(newest)
    again.losses_are_those_of_an_uninterrupted_run()


def test_from_4_ranks_to_3_to_2_with_a_batch_that_3_do_not_divide(tmp_path):
    """A GPU falls off the bus by NVIDIA's own bindings, the next is condemned in the folder."""
    library = fake_nvml.build(tmp_path)
    run = Guarded(
        tmp_path / "run", "--steps=150", "--sleep=0.2", "--save-every=1000", "--batch=16",
        "--micro-batch=2", "--precision=float64", ranks=4,
        options=("--batch", "16", "--layout", "data=4,micro_batch=2", "--uneven-batch",
                 "--nvml-seconds", "0.5"),
        environment=fake_nvml.environment_of(library, [(60, 2, "xid", 79)], gpus=4),
    )  # fmt: skip
    run.until(lambda: len(run.of("resumed")) == 2)
    resumed = run.of("resumed")[1]["step"]
    run.until(lambda: run.step() >= resumed + 4)
    verdict = GpuVerdict(gpu=3, time=time.time(), level="fatal", action="drain", reasons=("new",))
    run.folder.telemetry.mkdir(exist_ok=True)
    (run.folder.telemetry / "node.jsonl").write_bytes(verdict_line(verdict))
    run.end()
    fatal = [line["words"] for line in run.of("verdict") if line["level"] == "fatal"]
    assert ["Xid 79" in words for words in fatal] == [True, False]
    layouts = [Layout.from_json(line["layout"]) for line in run.of("launch")]
    assert layouts == [
        Layout(data=4, micro_batch=2, accumulation=2),
        Layout(data=3, micro_batch=2, accumulation=3, samples=16),
        Layout(data=2, micro_batch=2, accumulation=4),
    ]
    assert [line["gpus"][""] for line in run.of("launch")] == [[0, 1, 2, 3], [0, 1, 3], [0, 1]]
    answered = [line["step"] for line in run.of("answered")]
    assert [line["step"] for line in run.of("resumed")] == [0, *answered]
    assert answered[0] > 0
    assert run.summary.steps_lost == 0
    run.losses_are_those_of_an_uninterrupted_run("--uneven-batch", within=1e-6)


def test_twenty_random_kills_in_one_run(tmp_path):
    """Each kill loses at most the interval, the step that runs, and a save in flight."""
    rng = np.random.default_rng(20)
    run = Guarded(tmp_path, "--steps=200", "--sleep=0.05",
                  options=("--max-restarts", "30", "--backoff-seconds", "0.1"))  # fmt: skip
    lost, step = [], 0
    for kill in range(20):
        target = step + int(rng.integers(2, 9))
        run.until(lambda target=target, n=kill: len(run.of("resumed")) > n and run.step() >= target)
        victims = [run.of("started")[-1]["pids"][""], *(run.worker(rank) for rank in (0, 1))]
        before = run.step()
        os.kill(int(rng.choice(victims)), signal.SIGKILL)
        run.until(lambda n=kill: len(run.of("resumed")) > n + 1)
        step = run.of("resumed")[-1]["step"]
        lost.append(before - step)
    run.end()
    assert len(run.of("failure")) == 20
    assert run.summary.outcome == "finished"
    assert max(lost) <= 2 * SAVE_EVERY + 1
    run.losses_are_those_of_an_uninterrupted_run()
