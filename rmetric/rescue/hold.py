"""Hold: save good weights and the verdict, then stop, end the process, or wait."""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemWriter

from rmetric._util.strict_json import encode_line
from rmetric.guard.run_folder import RunFolder
from rmetric.guard.training_state import ModelState
from rmetric.monitor.actions.action import rank
from rmetric.monitor.actions.checkpoint_file import (
    POINTER,
    checkpoint_content,
    plain_states,
    random_state,
    write_whole,
)
from rmetric.monitor.gradients import is_sharded
from rmetric.rescue.snapshot import Parts

logger = logging.getLogger("rmetric")

#: Exit code of a training that a rescue has ended, for its supervisor.
HELD = 6
ON_HOLD = ("stop", "exit", "wait")
VERDICT, GO = "verdict.json", "go"
_POLL_SECONDS = 1.0


def hold_folder(log: Path | None) -> Path:
    """Folder of a held run: in the run folder of its supervisor, else beside its log."""
    run = RunFolder.of_environment()
    return run.hold if run is not None else (log or Path("run")).parent / "rescue-hold"


def save_held(folder: Path, parts: Parts, step: int, group: Any = None) -> Path:
    """Save the state that a run is held at, and return the file or the folder.

    Whole weights go to one file, by the first rank; `rmetric.monitor.actions.restore` restores
    it. A part that is not a plain value is left out, with an error in the log. Sharded weights
    are saved by all ranks of the gloo `group` with torch.distributed.checkpoint, in the form of
    `rmetric.guard.ModelState`.
    """
    if is_sharded(parts.parameters):
        path = folder / f"step_{step:08d}"
        state = {"training": ModelState(parts.model, parts.optimizer or ())}
        dcp.save(state, storage_writer=FileSystemWriter(path), process_group=group)
        return path
    path = folder / f"step_{step:08d}.pt"
    if rank() == 0:
        write_whole(path, _content(parts, step))
        write_whole(folder / POINTER, f"{path.name}\n".encode())
    return path


def _content(parts: Parts, step: int) -> dict[str, Any]:
    left_out: dict[str, str] = {}
    others = plain_states({name: part.state_dict for name, part in parts.others.items()}, left_out)
    optimizer = None if parts.optimizer is None else parts.optimizer.state_dict
    own = plain_states({"optimizer": optimizer, "monitor": parts.monitor.state_dict}, left_out)
    own |= {"scheduler": others.get("scheduler 0"), "scaler": others.get("scaler"), "extra": others}
    random = random_state(parts.devices())
    return checkpoint_content(parts.model, step, random, left_out, **own)


def save_verdict(folder: Path, verdict: Mapping[str, Any]) -> None:
    """Write `VERDICT`, on the first rank; what cannot be written is reported."""
    if rank() != 0:
        return
    try:
        write_whole(folder / VERDICT, encode_line(dict(verdict)))
    except Exception as error:
        logger.error("rmetric: rescue: the verdict is not saved: %s", error)


@contextmanager
def signalled() -> Iterator[threading.Event]:
    """Within it, SIGUSR1 sets the event; it must last from before the verdict to the wait's end."""
    event = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        logger.warning("rmetric: SIGUSR1 does not end the wait: this is not the main thread")
        yield event
        return
    before = signal.signal(signal.SIGUSR1, lambda *_: event.set())
    try:
        yield event
    finally:
        # None: it was installed by other means than Python's, which cannot install it again.
        signal.signal(signal.SIGUSR1, signal.SIG_DFL if before is None else before)


def wait_to_go_on(
    folder: Path, seconds: float | None, most_of_ranks: Callable[[int], int], woken: threading.Event
) -> str:
    """Wait for SIGUSR1, which sets `woken`, for the file `GO` in the folder, or for the time.

    Returns which it was, on all ranks. `most_of_ranks` gives the largest of their values.
    """
    words = "rmetric: rescue waits: SIGUSR1 to process %d or the file %s ends it"
    logger.warning(words, os.getpid(), folder / GO)
    until = None if seconds is None else time.monotonic() + seconds
    why = "another rank goes on"
    while True:
        own = False
        if woken.is_set():
            own, why = True, "SIGUSR1"
        elif (folder / GO).exists():
            own, why = True, f"the file {folder / GO}"
        elif until is not None and time.monotonic() >= until:
            own, why = True, f"{seconds:g} seconds are over"
        if most_of_ranks(int(own)):
            remove_go(folder)
            return why
        left = _POLL_SECONDS if until is None else until - time.monotonic()
        woken.wait(max(0.0, min(_POLL_SECONDS, left)))


def remove_go(folder: Path) -> None:
    with suppress(OSError):
        (folder / GO).unlink()
