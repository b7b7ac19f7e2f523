"""Imported by the programs of the second set: the monitor with its audits, used as documented."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any

import torch

import rmetric
from rmetric.monitor import Monitor, MonitorConfig

_MONITORS: list[Monitor] = []
#: State of the monitor that ended last, and whether a checkpoint was read since.
_last: dict[str, Any] = {}
_begin, _load = Monitor.__init__, torch.load


def _kept(self: Monitor, *args: Any, **kwargs: Any) -> None:
    _MONITORS.append(self)
    _begin(self, *args, **kwargs)


def _loaded(*args: Any, **kwargs: Any) -> Any:
    _last["read"] = True
    return _load(*args, **kwargs)


def _write() -> None:
    found = [finding.as_entry() for monitor in _MONITORS for finding in monitor.findings]
    problems = [monitor.problem for monitor in _MONITORS if monitor.problem]
    entry = {"findings": found, "problems": problems, "monitors": len(_MONITORS)}
    path = Path(os.environ["JUDGED_OUT"]) / f"{os.getpid()}.json"
    path.write_text(json.dumps(entry), encoding="utf-8")


if "JUDGED_OUT" in os.environ:  # else it is only imported
    Monitor.__init__ = _kept  # type: ignore[method-assign]
    torch.load = _loaded
    Finalize(None, _write, exitpriority=10)


class _Watched:
    def __init__(self, monitor: Monitor) -> None:
        self.monitor = monitor

    def __enter__(self) -> _Watched:
        self.monitor.__enter__()
        return self

    def __exit__(self, *error: Any) -> Any:
        # What a checkpoint would hold of it.
        _last.update(state=self.monitor.state_dict(), read=False)
        return self.monitor.__exit__(*error)

    def batch(self, batch: Any) -> None:
        self.monitor.batch_ready(batch)

    def check_before_step(self, loss: Any) -> None:
        self.monitor.check_before_step(loss)

    @contextmanager
    def evaluation(self) -> Iterator[None]:
        yield
        self.monitor.evaluated(1.0)


def watch(model: Any, optimizer: Any, scheduler: Any = None, **more: Any) -> _Watched:
    torch.set_num_threads(1)
    monitor = Monitor(model, optimizer, config=MonitorConfig(patience=10.0), audits=True)
    monitor.schedulers = [] if scheduler is None else [scheduler]
    if _last.get("read"):
        monitor.load_state_dict(_last["state"])
    return _Watched(monitor)


def __getattr__(name: str) -> Any:
    if name not in ("trainer_callback", "lightning_callback"):
        raise AttributeError(name)
    kind = "HuggingFaceCallback" if name == "trainer_callback" else "LightningCallback"
    globals()[name] = getattr(rmetric, kind)()
    return globals()[name]
