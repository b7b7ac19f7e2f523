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

from rmetric._util.workers import delayed

STUDY = """
import os, time
from joblib import Parallel
from rmetric._util.workers import delayed

def work(which):
    os.write(1, b"%d\\n" % os.getpid())  # one write: the workers have the same pipe
    time.sleep(300)

if __name__ == "__main__":
    Parallel(n_jobs=2)(delayed(work)(which) for which in range(4))
"""


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


def test_no_study_starts_workers_that_outlive_it():
    of_joblib = re.compile(r"from joblib import .*\bdelayed\b|joblib\.delayed\(")
    files = [path for folder in ("rmetric", "studies") for path in Path(folder).rglob("*.py")]
    plain = [path for path in files if of_joblib.search(path.read_text(encoding="utf-8"))]
    assert plain == [Path("rmetric/_util/workers.py")]
