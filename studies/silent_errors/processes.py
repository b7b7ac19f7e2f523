"""One training under the audits, in processes of its own.

The trainings are archives of Python files as their authors wrote them: those of the first sets are
modules, those of the second are programs that import `judged`.
"""

from __future__ import annotations

import importlib.util
import json
import multiprocessing
import os
import queue
import subprocess
import sys
import tarfile
import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from studies.common.csv_rows import read_dicts

DATA = Path(__file__).parent / "data"
SECONDS = 240.0
#: A second of processor time may take as many where other programs run.
SCRIPT_SECONDS = 900.0


@dataclass(frozen=True)
class Script:
    """A training of the second set."""

    name: str
    what: str
    path: Path
    thread: str = ""
    ranks: int = 1


@contextmanager
def unpacked() -> Iterator[Path]:
    """A folder with the files of both archives."""
    with TemporaryDirectory(prefix="rmetric-") as folder:
        for path in sorted(DATA.glob("*.tar.xz")):
            with tarfile.open(path) as archive:
                archive.extractall(folder, filter="data")
        yield Path(folder)


def trainings(folder: Path, name: str) -> list[Any]:
    """Trainings of a set, from the folder of `unpacked`."""
    if name.startswith("second"):
        kind = "sound" if name.endswith("sound") else "error"
        rows = [row for row in read_dicts(folder / "labels.csv") if row["label"] == kind]
        paths = [folder / row["file"] for row in rows]
        return [Script(p.stem, row["kind"], p) for p, row in zip(paths, rows, strict=True)]
    loaded = _module(folder / f"{name}.py")
    errors: list[Any] = getattr(loaded, "ERRORS", None) or loaded.TRAININGS
    return errors


@lru_cache
def _module(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location(f"silent_errors_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def of_script(script: Script) -> list[dict[str, Any]]:
    """Findings of a program, as those of `findings`. Raises RuntimeError if it fails."""
    with TemporaryDirectory(prefix="rmetric-") as out:
        paths = [str(DATA.parent), *filter(None, [str(Path.cwd()), os.environ.get("PYTHONPATH")])]
        more = {"JUDGED_OUT": out, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
        try:
            subprocess.run(
                [sys.executable, str(script.path)], env=os.environ | more, cwd=out, check=True,
                capture_output=True, timeout=SCRIPT_SECONDS,
            )  # fmt: skip
        except subprocess.CalledProcessError as error:
            raise RuntimeError(f"{script.name}: {error.stderr.decode()[-2000:]}") from None
        except subprocess.TimeoutExpired as error:
            raise RuntimeError(f"{script.name}: {error}") from None
        seen = [json.loads(path.read_text()) for path in sorted(Path(out).glob("*.json"))]
    if problem := next((problem for process in seen for problem in process["problems"]), None):
        raise RuntimeError(f"{script.name}: {problem}")
    return _once(entry for process in seen for entry in process["findings"])


def _once(entries: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Each kind once of each severity, in the order of the steps."""
    found: dict[str, dict[str, Any]] = {}
    for entry in entries:
        found.setdefault(f"{entry['kind']} {entry['severity']}", entry)
    return sorted(found.values(), key=lambda entry: int(entry["step"]))


def findings(folder: Path, module: str, training: Any, error: bool) -> list[dict[str, Any]]:
    """Findings of all ranks of one training, each kind once of each severity, as entries."""
    if isinstance(training, Script):
        return of_script(training)
    name, ranks = training.name, training.ranks
    context = multiprocessing.get_context("spawn")
    results: Any = context.Queue()
    import torch.distributed as dist

    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    workers = [
        context.Process(
            target=_train, args=(folder, module, name, error, r, ranks, store.port, results)
        )
        for r in range(ranks)
    ]
    for worker in workers:
        worker.start()
    found: list[dict[str, Any]] = []
    try:
        for _ in workers:
            entries = results.get(timeout=SECONDS)
            if isinstance(entries, str):
                raise RuntimeError(f"{name}: {entries}")
            found += entries
    except queue.Empty:
        raise RuntimeError(f"{name} did not end within {SECONDS:g} s") from None
    finally:
        for worker in workers:
            worker.join(5.0)
            worker.kill()
    return _once(found)


def _train(
    folder: Path, module: str, name: str, error: bool, rank: int, ranks: int, port: int,
    results: Any,
) -> None:  # fmt: skip
    import torch
    import torch.distributed as dist

    from rmetric.monitor import Monitor, MonitorConfig

    torch.set_num_threads(1)
    # Workers of a data loader begin as in a program of its own, and not as this process did.
    multiprocessing.set_start_method(None, force=True)
    if ranks > 1:
        store = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
    monitors: list[Any] = []

    def watch(model: Any, optimizer: Any, schedulers: Any = (), scaler: Any = None) -> Any:
        config = MonitorConfig(patience=10.0)
        monitor = Monitor(model, optimizer, scaler=scaler, config=config, audits=True)
        monitor.schedulers = list(schedulers)
        monitor.wait_for_ranks(30.0)
        monitors.append(monitor)
        return monitor

    try:
        training = next(training for training in trainings(folder, module) if training.name == name)
        training.run(watch, error=error)
        problem = next((m.problem for m in monitors if m.problem), None)
        found = [f.as_entry() for monitor in monitors for f in monitor.findings]
        results.put(problem or found)
    except BaseException:
        results.put(traceback.format_exc())
    if ranks > 1:
        dist.destroy_process_group()
