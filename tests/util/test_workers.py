"""Workers of studies end with the process that started them."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from joblib import Parallel

from rmetric._util import workers
from rmetric._util.workers import delayed, follow_shares
from rmetric.simulation import RunSpec
from rmetric.simulation.study import run_study

STUDY = """
import os, time
from joblib import Parallel
from rmetric._util.workers import delayed, follow_shares
from rmetric.simulation import RunSpec
from rmetric.simulation.study import run_study

def work(which):
    os.write(1, b"%d\\n" % os.getpid())  # one write: the workers have the same pipe
    time.sleep(300)

if __name__ == "__main__":
    Parallel(n_jobs=2)(delayed(work)(which) for which in range(4))
"""


@pytest.mark.long
@pytest.mark.skipif(os.name != "posix", reason="a killed parent is seen on POSIX alone")
def test_the_workers_of_a_killed_study_end_in_the_middle_of_a_task(start, tmp_path):
    (tmp_path / "study.py").write_text(STUDY)
    environment = os.environ | {"PYTHONPATH": str(Path.cwd())}
    study = start([sys.executable, tmp_path / "study.py"], stdout=subprocess.PIPE, env=environment)
    workers = [psutil.Process(int(study.stdout.readline())) for _ in range(2)]
    study.send_signal(signal.SIGKILL)
    study.wait()
    began = time.monotonic()
    _, alive = psutil.wait_procs(workers, timeout=60)
    print(f"the workers ended {time.monotonic() - began:.2f} s after the study")
    for worker in alive:
        worker.kill()
    assert not alive, "their tasks take 300 s"


def double(number, *, add=0):
    return 2 * number + add


@pytest.mark.parametrize("jobs", [1, 2])
def test_a_task_gives_what_its_function_gives(jobs):
    tasks = (delayed(double)(number, add=1) for number in range(5))
    assert Parallel(n_jobs=jobs)(tasks) == [1, 3, 5, 7, 9]


def stepped(steps, on_step):
    for step in range(1, steps + 1):
        on_step(step)
        time.sleep(0.02)


@pytest.mark.long
@pytest.mark.parametrize("jobs", [1, 2])
def test_progress_comes_in_the_middle_of_tasks(jobs, monkeypatch):
    monkeypatch.setattr(workers, "POLL_SECONDS", 0.02)
    seen = []
    with follow_shares(seen.append) as share_file:
        tasks = (delayed(stepped)(50, share_file(10, 50)) for _ in range(2))
        Parallel(n_jobs=jobs)(tasks)
    assert seen == sorted(seen)
    assert any(0 < number < 10 for number in seen)
    assert all(0 <= number <= 20 for number in seen)


def test_a_study_reports_progress_before_its_first_run_is_whole(tmp_path, monkeypatch):
    """Its runs are stepped together: all end at once."""
    monkeypatch.setattr(workers, "POLL_SECONDS", 0.005)
    seen = []
    specs = [
        RunSpec(experiment_id=str(n), architecture="Llama-3-8B", onset_step=150, total_steps=300)
        for n in range(12)
    ]
    study = run_study(specs, ["FULL_METRIC"], tmp_path, num_processes=1, on_progress=seen.append)
    assert sum(study) == len(specs)
    assert any(0 < number < len(specs) for number in seen)


def test_no_study_starts_workers_that_outlive_it():
    of_joblib = re.compile(r"from joblib import .*\bdelayed\b|joblib\.delayed\(")
    files = [path for folder in ("rmetric", "studies") for path in Path(folder).rglob("*.py")]
    plain = [path for path in files if of_joblib.search(path.read_text(encoding="utf-8"))]
    assert plain == [Path("rmetric/_util/workers.py")]
