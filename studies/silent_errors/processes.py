"""One training under the audits, in processes of its own."""

from __future__ import annotations

import importlib
import multiprocessing
import queue
import traceback
from typing import Any

SECONDS = 240.0


def findings(module: str, name: str, error: bool, ranks: int) -> list[dict[str, Any]]:
    """Findings of all ranks of one training, each kind once of each severity, as entries.

    Raises:
        RuntimeError: a rank raised or did not end in time.
    """
    context = multiprocessing.get_context("spawn")
    results: Any = context.Queue()
    import torch.distributed as dist

    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    workers = [
        context.Process(target=_train, args=(module, name, error, r, ranks, store.port, results))
        for r in range(ranks)
    ]
    for worker in workers:
        worker.start()
    found: dict[str, dict[str, Any]] = {}
    try:
        for _ in workers:
            entries = results.get(timeout=SECONDS)
            if isinstance(entries, str):
                raise RuntimeError(f"{name}: {entries}")
            for entry in entries:
                found.setdefault(f"{entry['kind']} {entry['severity']}", entry)
    except queue.Empty:
        raise RuntimeError(f"{name} did not end within {SECONDS:g} s") from None
    finally:
        for worker in workers:
            worker.join(5.0)
            worker.kill()
    return sorted(found.values(), key=lambda entry: int(entry["step"]))


def _train(
    module: str, name: str, error: bool, rank: int, ranks: int, port: int, results: Any
) -> None:
    import torch
    import torch.distributed as dist

    from rmetric.monitor import Monitor, MonitorConfig

    torch.set_num_threads(1)
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
        one = next(one for one in trainings(module) if one.name == name)
        one.run(watch, error=error)
        problem = next((m.problem for m in monitors if m.problem), None)
        found = [f.as_entry() for monitor in monitors for f in monitor.findings]
        results.put(problem or found)
    except BaseException:
        results.put(traceback.format_exc())
    if ranks > 1:
        dist.destroy_process_group()


def trainings(module: str) -> list[Any]:
    loaded = importlib.import_module(f"studies.silent_errors.trainings.{module}")
    errors: list[Any] = getattr(loaded, "ERRORS", None) or loaded.TRAININGS
    return errors
