"""The emergency checkpoint: one file of tensors and plain values, whole or absent; its restore."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Collection, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from rmetric._util.background import Background
from rmetric._util.durable import durable_file
from rmetric._util.errors import as_number, require
from rmetric._util.open_alarms import OpenAlarms
from rmetric.monitor.actions.action import Action, rank
from rmetric.monitor.alerts import Alert, Episode
from rmetric.monitor.gradients import is_sharded
from rmetric.records import Record

if TYPE_CHECKING:
    from rmetric.monitor.monitor import Monitor

logger = logging.getLogger("rmetric")

FORMAT = "rmetric emergency checkpoint, 1"
POINTER = "last_good"
#: End of the name of a suspect checkpoint, and how many of these are kept.
SUSPECT, KEPT_SUSPECT = ".suspect.pt", 2
LAST_WRITE_SECONDS = 600.0  # that the end of a training waits for the last write
PLAIN = (type(None), bool, int, float, str, bytes)


def plain(value: Any, where: str = "", copies: dict[Any, Tensor] | None = None) -> Any:
    """A copy of `value` on the host that a `weights_only` load accepts.

    Tensors that share their memory share it in the copy. Raises TypeError, with
    the place, for what is neither a tensor nor plain.
    """
    copies = {} if copies is None else copies
    if isinstance(value, Tensor):
        tensor = value.detach()
        key = (tensor.data_ptr(), tensor.device, tensor.dtype, tensor.shape, tensor.stride())
        if key not in copies or not tensor.numel():
            copies[key] = tensor.to("cpu", copy=True)
        return copies[key]
    if isinstance(value, (np.ndarray, np.generic)):
        return value.tolist()
    if type(value) in PLAIN:
        return value
    if isinstance(value, Mapping):
        return {
            plain(key, f"a key of {where}"): plain(inner, f"{where}[{key!r}]", copies)
            for key, inner in value.items()
        }
    if isinstance(value, (list, tuple)):
        inner = [plain(item, f"{where}[{i}]", copies) for i, item in enumerate(value)]
        return tuple(inner) if isinstance(value, tuple) else inner
    raise TypeError(f"{where or 'the value'} is a {type(value).__name__}, not a plain value")


def plain_states(
    states: Mapping[str, Callable[[], Any] | None], left_out: dict[str, str]
) -> dict[str, Any]:
    """State of each part by its name, as plain values; None for a part that is None.

    So is a part without such a state, and `left_out` receives its name and why.
    """
    found: dict[str, Any] = {}
    for name, state in states.items():
        try:
            found[name] = None if state is None else plain(state(), name)
        except Exception as error:
            found[name], left_out[name] = None, str(error)
    return found


def checkpoint_content(
    model: nn.Module, step: int, random: Any, left_out: Mapping[str, str], **more: Any
) -> dict[str, Any]:
    """The content that `restore` reads; left-out parts are logged as errors."""
    for name, why in left_out.items():
        logger.error("rmetric: the checkpoint of step %d is without %s: %s", step, name, why)
    return {
        "format": FORMAT,
        "step": step,
        "alert": None,
        "suspect": None,
        "model": plain(bare(model).state_dict(), "model"),
        "random": plain(random, "random"),
        "left_out": dict(left_out),
    } | more


def write_whole(path: Path, content: Any) -> None:
    """Write a file that is on the disk, whole, before it has its name."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with durable_file(path) as file:
        if isinstance(content, bytes):
            file.write(content)
        else:
            torch.save(content, file)


def random_state(devices: set[torch.device]) -> dict[str, Any]:
    """The state of every generator that a training draws from, on the host and on `devices`."""
    return {
        "python": random.getstate(),
        "numpy": np.random.get_state(),  # noqa: NPY002 (the one that training code draws from)
        "torch": torch.get_rng_state(),
        "cuda": {str(device): torch.cuda.get_rng_state(device) for device in devices},
    }


def set_random_state(state: Mapping[str, Any]) -> None:
    version, numbers, gauss = state["python"]
    random.setstate((version, tuple(numbers), gauss))
    name, keys, *rest = state["numpy"]
    np.random.set_state((name, np.array(keys, dtype=np.uint32), *rest))  # noqa: NPY002
    torch.set_rng_state(state["torch"])
    for device, of_device in state["cuda"].items():
        if torch.cuda.is_available() and torch.device(device).index < torch.cuda.device_count():
            torch.cuda.set_rng_state(of_device, device)


def bare(model: nn.Module) -> nn.Module:
    """The model itself, without what DistributedDataParallel or torch.compile put around it."""
    while True:
        if isinstance(model, nn.parallel.DistributedDataParallel):
            model = model.module
        elif isinstance(inner := getattr(model, "_orig_mod", None), nn.Module):
            model = inner
        else:
            return model


def restore(
    path: Path | str,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    scheduler: Any = None,
    scaler: Any = None,
    monitor: Any = None,
) -> dict[str, Any]:
    """Restore a checkpoint of `EmergencyCheckpoint` in place.

    The state is that after step ``step``; the next batch is that of the step after it.
    The generators of random numbers are set last: bring the data to their place before.

    Args:
        path: a checkpoint, or the folder, whose last good one is taken.
        model: receives the weights; of the same shape, wrapped or not.
        optimizer: restored, as are the next three; None is left out.
        scheduler: the learning-rate scheduler.
        scaler: the GradScaler.
        monitor: the `Monitor`.

    Returns:
        ``step``, ``alert`` (as a mapping), ``extra`` (what `extra_state` gave;
        None without it), ``suspect`` (``since`` and ``reason`` of the alarm during which it
        was saved; None for a clean one) and ``left_out`` (name of a part -> why it was not
        saved).

    Raises:
        ValueError: no such checkpoint, a file of something else, or of another model.
    """
    found = last_good(Path(path)) if Path(path).is_dir() else Path(path)
    if found is None or not found.is_file():
        raise ValueError(f"{path} is neither a checkpoint nor a folder whose {POINTER!r} names one")
    path = found
    try:
        saved = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        raise ValueError(f"{path} cannot be read as a checkpoint: {error}") from None
    if not isinstance(saved, dict) or saved.get("format") != FORMAT:
        raise ValueError(f"{path} is not a checkpoint of rmetric's EmergencyCheckpoint")
    parts = {"optimizer": optimizer, "scheduler": scheduler, "scaler": scaler, "monitor": monitor}
    for name, part in parts.items():
        if part is not None and saved.get(name) is None:
            why = saved["left_out"].get(name, "there was none")
            raise ValueError(f"{path} holds no {name}: {why}")
    try:
        bare(model).load_state_dict(saved["model"])
    except RuntimeError as error:
        raise ValueError(f"{path} does not fit this model: {error}") from None
    for name, part in parts.items():
        if part is not None:
            part.load_state_dict(saved[name])
    set_random_state(saved["random"])
    return {key: saved.get(key) for key in ("step", "alert", "extra", "suspect", "left_out")}


def last_good(folder: Path) -> Path | None:
    """The newest whole checkpoint of a folder; None where there is none."""
    pointer = folder / POINTER
    path = folder / pointer.read_text().strip() if pointer.is_file() else None
    return path if path is not None and path.is_file() else None


class EmergencyCheckpoint(Action):
    """Saves the state of a training after its last completed step; `restore` restores it.

    It saves once an episode of alarms, at its first alert, the weights as they were before the step
    that raised it: model, optimiser, scheduler, gradient scaler, generators of random numbers
    (python, numpy, torch, CUDA), the monitor, and the number of steps taken, which gives the place
    in the data. A resumed training then has the same weights as one that was never interrupted.

    Only weights and optimiser states that are all finite are saved. The training waits for the copy
    to host memory; a thread of the first rank writes the file, under another name until it is
    whole. Every file loads with ``torch.load(weights_only=True)``; ``last_good`` names the newest.

    A checkpoint of a step after the onset of an open alarm is suspect: its name ends in
    ``.suspect.pt``, and it never causes the deletion of a clean one.

    Weaknesses: sharded parameters (FSDP2) are refused. The random numbers of ranks after the
    first are not kept. Random numbers that an evaluation drew between two steps are not drawn
    again. Each step copies the state of the generators.

    Args:
        folder: for the checkpoints; made where it is missing.
        keep: how many clean ones, at least 1, beside two suspect ones; the oldest goes.
        scheduler: the learning-rate scheduler; None for the trainer's own, where there is one.
        extra_state: returns whatever else a resumed training needs, as plain values and tensors.
        wait: steps before it saves again, at least 1.
        on: sources of alerts that it reacts to; None for every alert.

    Attributes:
        last_good: the newest checkpoint that is whole; None before the first.
        problem: why the last one was not saved; None where it was.
    """

    needs_verdict_now = True
    once_an_episode = True

    def __init__(
        self,
        folder: Path | str,
        keep: int = 2,
        *,
        scheduler: Any = None,
        extra_state: Callable[[], Any] | None = None,
        wait: int = 100,
        on: Collection[str] | None = None,
    ) -> None:
        super().__init__(on=on)
        for name, value in (("keep", keep), ("wait", wait)):
            require(name, value, as_number(value) >= 1, "at least 1")
        self.folder, self.keep, self.wait = Path(folder), keep, wait
        self.scheduler, self.extra_state = scheduler, extra_state
        self.last_good = last_good(self.folder)
        self.problem: str | None = None
        self._tried_at: int | None = None
        self._episode: int | None = None  # onset of the last one
        self._open = OpenAlarms(quiet_steps=1)  # each lasts until its episode ends
        self._alarmed_at = 0
        self._devices: set[torch.device] | None = None
        self._random: dict[int, dict[str, Any]] = {}  # by the step that it is the end of
        self._background = Background(size=1)

    def record(self, record: Record, monitor: Monitor) -> None:
        if rank() != 0:  # the first rank alone writes
            return
        # Between here and the next step's batch nothing draws: this is the end of the step at hand.
        kept = {step: state for step, state in self._random.items() if step == monitor.step}
        self._random = kept | {monitor.step + 1: self._random_state(monitor)}

    def __call__(self, alert: Alert, monitor: Monitor) -> None:
        if rank() != 0:
            return
        if monitor.step < self._alarmed_at:  # the training went back: its alarm is closed
            self._open.end()
        self._alarmed_at = step = monitor.step
        self._open.open(alert.source, alert.since, alert.reason, step=step, lasts=True)
        if alert.since == self._episode:
            return
        self._episode = alert.since
        if self._tried_at is not None and 0 <= step - self._tried_at < self.wait:
            return
        self._tried_at = step
        problem = _unfit(bare(monitor.model), monitor.optimizer)
        if problem:
            self._report(f"step {monitor.weights_step} is not saved: {problem}")
            return
        content = self._content(alert, monitor)
        if not self._background.submit(partial(self._write, content)):
            self._report(f"step {monitor.weights_step} is not saved: the one before is not written")

    def ended(self, episode: Episode, monitor: Monitor) -> None:
        """The episode ended: later checkpoints are clean again."""
        for source in episode.sources:
            self._open.end(source)

    def close(self) -> None:
        if not self._background.close(LAST_WRITE_SECONDS):
            self._report(f"still not written after {LAST_WRITE_SECONDS:g} s")
        self._random = {}  # another training may follow

    def _random_state(self, monitor: Monitor) -> dict[str, Any]:
        if self._devices is None:
            devices = {parameter.device for parameter in monitor.model.parameters()}
            self._devices = {device for device in devices if device.type == "cuda"}
        return random_state(self._devices)

    def _content(self, alert: Alert, monitor: Monitor) -> dict[str, Any]:
        step = monitor.weights_step
        left_out: dict[str, str] = {}
        generators = self._random.get(step)
        if generators is None:
            left_out["random"] = f"not kept after step {step}; those of step {monitor.step} instead"
            generators = self._random_state(monitor)
        scheduler = self.scheduler
        if scheduler is None:
            scheduler = next(iter(monitor.schedulers), None)
        parts = {"optimizer": monitor.optimizer, "scheduler": scheduler, "scaler": monitor.scaler,
                 "monitor": monitor}  # fmt: skip
        states = {name: None if part is None else part.state_dict for name, part in parts.items()}
        states["extra"] = self.extra_state
        kept = plain_states(states, left_out)
        alarm = self._open.earliest(step)
        suspect = alarm._asdict() if alarm is not None and step > alarm.since else None
        noted = {"alert": alert.as_entry(), "suspect": suspect}
        return checkpoint_content(monitor.model, step, generators, left_out, **noted, **kept)

    def _write(self, content: dict[str, Any]) -> None:
        names = [f"step_{content['step']:08d}{suffix}" for suffix in (".pt", SUSPECT)]
        if content["suspect"] is not None:
            names.reverse()
        path, other = (self.folder / name for name in names)
        try:
            write_whole(path, content)
            other.unlink(missing_ok=True)
            write_whole(self.folder / POINTER, f"{path.name}\n".encode())
        except Exception as error:
            self._report(f"{path} cannot be written: {error}")
            return
        self.last_good, self.problem = path, None
        logger.warning("rmetric: emergency checkpoint %s", path)
        self._tidy(path)

    def _tidy(self, newest: Path) -> None:
        """Keep so many checkpoints, and nothing that a killed writer left."""
        found = list(self.folder.glob("step_*.pt"))
        found.sort(key=lambda path: (path == newest, path.stat().st_mtime_ns), reverse=True)
        clean = [path for path in found if not path.name.endswith(SUSPECT)]
        suspect = [path for path in found if path.name.endswith(SUSPECT)]
        left = self.folder.glob(".step_*.pt.part")
        for path in (*clean[self.keep :], *suspect[KEPT_SUSPECT:], *left):
            path.unlink(missing_ok=True)

    def _report(self, problem: str) -> None:
        self.problem = problem
        last = f"the last good one is {self.last_good}" if self.last_good else "there is none yet"
        logger.error("rmetric: emergency checkpoint: %s; %s", problem, last)


@torch.no_grad()
def _unfit(model: nn.Module, optimizer: Any) -> str | None:
    """Why this must not be saved; None where it may. One host read a device."""
    if is_sharded(model.parameters()):
        return "the parameters are sharded, save them with torch.distributed.checkpoint"
    fine: dict[torch.device, dict[str, Tensor]] = {}
    states = getattr(optimizer, "state", {})
    for name, parameter in model.named_parameters():
        of_optimizer = states.get(parameter, {}).items()
        numbers = {f"the optimiser's {key} of {name}": value for key, value in of_optimizer}
        for what, tensor in ({name: parameter} | numbers).items():
            if isinstance(tensor, Tensor) and (tensor.is_floating_point() or tensor.is_complex()):
                fine.setdefault(tensor.device, {})[what] = tensor.isfinite().all()
    for name, buffer in model.named_buffers():  # a mask may well hold infinities
        fine.setdefault(buffer.device, {})[name] = ~buffer.isnan().any()
    for tests in fine.values():
        for name, passed in zip(tests, torch.stack(list(tests.values())).tolist(), strict=True):
            if not passed:
                return f"{name} is not finite"
    return None
