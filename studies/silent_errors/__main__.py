"""Run each silent error, its control and the sound trainings under the audits.

    python -m studies.silent_errors --set sealed --out studies/silent_errors/results

Writes SET.csv, a row for each training, and prints the shares. Each training has processes of its
own. An error is found if an audit gives an error (or a hint, which is counted apart) of one of the
kinds that its author accepts; any error in a control or a sound training is false.
"""

from __future__ import annotations

import argparse
import csv
import importlib
import multiprocessing
import queue
import sys
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rmetric._util.errors import exit_with

FOLDER = Path(__file__).parent
#: Modules with a list ERRORS or TRAININGS.
SETS = {"open": "open_errors", "sealed": "sealed_errors", "sound": "sound_trainings"}
SECONDS = 240.0
COLUMNS = (
    "name", "thread", "what", "ranks", "accepted", "found", "severity", "step", "other errors",
    "errors of the control",
)  # fmt: skip


@dataclass(frozen=True)
class Error:
    """A training with one silent error.

    Attributes:
        name, thread: of the error, and where somebody met it.
        what: is wrong, in a sentence.
        run: `run(watch, error)` trains; `watch(model, optimizer, schedulers, scaler)` gives the
            monitor. Without `error` it is the control.
        kinds: findings that name it rightly.
        ranks: processes.
    """

    name: str
    thread: str
    what: str
    run: Callable[..., None]
    kinds: tuple[str, ...] = ()
    ranks: int = 1


def findings(module: str, name: str, error: bool, ranks: int) -> list[dict[str, Any]]:
    """Findings of all ranks of one training, each kind once, as entries.

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
            worker.kill() if worker.is_alive() and not found else worker.join(5.0)
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
        one = next(one for one in _of(module) if one.name == name)
        one.run(watch, error=error)
        problem = next((m.problem for m in monitors if m.problem), None)
        found = [f.as_entry() for monitor in monitors for f in monitor.findings]
        results.put(problem or found)
    except BaseException:
        results.put(traceback.format_exc())
    if ranks > 1:
        dist.destroy_process_group()


def _of(module: str) -> list[Error]:
    loaded = importlib.import_module(f"studies.silent_errors.{module}")
    errors: list[Error] = getattr(loaded, "ERRORS", None) or loaded.TRAININGS
    return errors


def rows(module: str, only: list[str] | None = None) -> Iterator[dict[str, Any]]:
    """A row for each training of a module."""
    for one in _of(module):
        if only and one.name not in only:
            continue
        sound = not one.kinds
        found = findings(module, one.name, not sound, one.ranks)
        named = [entry for entry in found if entry["kind"] in one.kinds]
        best = next((e for e in named if e["severity"] == "error"), named[0] if named else {})
        false = [e for e in found if e["severity"] == "error" and e["kind"] not in one.kinds]
        control = [] if sound else findings(module, one.name, False, one.ranks)
        yield {
            "name": one.name,
            "thread": one.thread,
            "what": one.what,
            "ranks": one.ranks,
            "accepted": " ".join(one.kinds),
            "found": best.get("kind", ""),
            "severity": best.get("severity", ""),
            "step": best.get("step", ""),
            "other errors": " ".join(f"{e['kind']}@{e['step']}" for e in false),
            "errors of the control": " ".join(
                f"{e['kind']}@{e['step']}" for e in control if e["severity"] == "error"
            ),
        }


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m studies.silent_errors", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--set", choices=sorted(SETS), default="open", help="trainings")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these trainings alone")
    parser.add_argument("--out", type=Path, default=FOLDER / "results", help="folder")
    options = parser.parse_args(argv)
    made = []
    for row in rows(SETS[options.set], options.only):
        made.append(row)
        print(*(f"{row[key]}" for key in ("name", "found", "severity", "step")), sep="  ", end="")
        print("  FALSE" if row["errors of the control"] else "", flush=True)
    if not options.only:
        options.out.mkdir(parents=True, exist_ok=True)
        with open(options.out / f"{options.set}.csv", "w", encoding="utf-8", newline="") as file:
            writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
            writer.writeheader()
            writer.writerows(made)
    print(summary(made))
    return 0


def summary(made: list[dict[str, Any]]) -> str:
    """The shares, in a line."""
    errors = [row for row in made if row["accepted"]]
    sound = [row for row in made if not row["accepted"]]
    named = [row for row in errors if row["severity"] == "error"]
    early = [row for row in named if int(row["step"]) <= 20]
    hinted = sum(row["severity"] == "hint" for row in errors)
    false = sum(bool(r["errors of the control"]) for r in errors)
    accused = sum(bool(row["other errors"]) for row in sound)
    return (
        f"{len(named)} of {len(errors)} errors named as errors ({len(early)} within 20 steps), "
        f"{hinted} as a hint; {false} controls and {accused} of {len(sound)} sound trainings accused"
    )


if __name__ == "__main__":
    sys.exit(exit_with(main))
