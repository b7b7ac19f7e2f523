"""Guard for Megatron-LM, which saves in its own format. Megatron is not imported here."""

from __future__ import annotations

import inspect
import signal
import sys
import time
from collections.abc import Callable, Mapping
from functools import wraps
from pathlib import Path
from typing import Any

from rmetric._util.errors import require
from rmetric.guard.checkpoint_dir import (
    CheckpointManifest,
    FailedSave,
    SavedCheckpoint,
    SaveOutcome,
)
from rmetric.guard.checkpoint_requests import SAVE
from rmetric.guard.guard import Guard
from rmetric.guard.policy import PolicyConfig
from rmetric.guard.run_folder import RunFolder
from rmetric.telemetry.sources import VerdictSource

#: SIGTERM is left to Megatron's own --exit-signal-handler.
MEGATRON_SIGNALS: Mapping[int, str] = {signal.SIGUSR1: SAVE}
TRACKER = "latest_checkpointed_iteration.txt"


def megatron_arguments(checkpoints: Path | str, *, save_interval: int) -> list[str]:
    """Command-line arguments of Megatron that the guard needs.

    Saves are written in the background, in a form that another TP x PP x DP can load.

    Args:
        checkpoints: folder to save to and to resume from.
        save_interval: iterations between regular saves, at least 1.
    """
    whole = type(save_interval) is int and save_interval >= 1
    require("save_interval", save_interval, whole, "an int of at least 1")
    return [
        *("--save", str(checkpoints), "--load", str(checkpoints)),
        *("--save-interval", str(save_interval), "--ckpt-format", "torch_dist"),
        # Without the worker 0.19 turns --async-save off, with no more than a warning.
        *("--async-save", "--use-persistent-ckpt-worker"),
        *("--dist-ckpt-optim-fully-reshardable", "--exit-signal-handler"),
    ]


def guard_megatron(
    training: Any,
    *,
    policy: PolicyConfig | None = None,
    folder: RunFolder | None = None,
    telemetry: VerdictSource | None = None,
    signals: Mapping[int, str] = MEGATRON_SIGNALS,
) -> Callable[[], Guard | None]:
    """Run the guard after each iteration of `pretrain`.

    `checkpoint_and_decide_exit` and `save_checkpoint_and_time` of Megatron's module
    `training` are wrapped. Megatron decides and saves as before; a checkpoint that the
    guard requests is made by the same function with the same arguments. A checkpoint is
    durable when Megatron's tracker file names it. A request to stop makes Megatron leave
    its loop after that.

    Limit: a Megatron save that raises ends the training, as without the guard.

    Args:
        training: the module ``megatron.training.training``.
        policy: when to save; None for Megatron's ``--save-interval``.
        folder: run folder; None for the supervisor's.
        telemetry: see `Guard`.
        signals: see `Guard`.

    Returns a function that returns the guard; None before the first iteration. Raises ValueError
    if the module lacks these functions, or their arguments differ.
    """
    for name, needed in (
        ("checkpoint_and_decide_exit", ("iteration",)),
        ("save_checkpoint_and_time", ("iteration", "train_data_iterator")),
    ):
        found = inspect.signature(getattr(training, name, lambda: None)).parameters
        if not set(needed) <= set(found):
            raise ValueError(
                f"{getattr(training, '__name__', training)!r} has no {name}({', '.join(needed)}): "
                "megatron.training.training is needed, of a version that guard_megatron knows"
            )
    saver = _MegatronSaver(training)
    guard: Guard | None = None
    save, decide = training.save_checkpoint_and_time, training.checkpoint_and_decide_exit
    save_takes, decide_takes = inspect.signature(save), inspect.signature(decide)

    def new_guard(iteration: int) -> Guard:
        args = training.get_args()
        if not args.save:
            raise ValueError("Megatron has no --save: there is nowhere to save to")
        saver.folder = Path(args.save)
        made = Guard(
            saver, policy=policy or PolicyConfig(interval_steps=args.save_interval), state=dict,
            folder=folder, telemetry=telemetry, signals=signals,
        )  # fmt: skip
        made.start(iteration - 1)
        return made

    @wraps(save)
    def save_and_record(*args: Any, **kwargs: Any) -> Any:
        result = save(*args, **kwargs)
        given = save_takes.bind(*args, **kwargs).arguments
        if not given.get("non_persistent_ckpt"):
            saver.saved_at = given["iteration"]
        return result

    @wraps(decide)
    def decide_and_guard(*args: Any, **kwargs: Any) -> bool:
        nonlocal guard
        if decide(*args, **kwargs):
            return True
        given = decide_takes.bind(*args, **kwargs).arguments
        iteration = given["iteration"]
        guard = guard or new_guard(iteration)
        if saver.saved_at == iteration:
            saver.follows(iteration)
            guard.adopt(iteration)
        saver.save = lambda: training.save_checkpoint_and_time(
            **{name: value for name, value in given.items() if name in save_takes.parameters}
        )
        guard.step(iteration)
        return guard.should_stop

    training.save_checkpoint_and_time = save_and_record
    training.checkpoint_and_decide_exit = decide_and_guard
    return lambda: guard


class _MegatronSaver:
    """Saver interface of Megatron."""

    saves_later = False

    def __init__(self, training: Any) -> None:
        self.folder, self.saved_at = Path(), -1
        self.save: Callable[[], Any] = lambda: None
        self._training = training
        self._step: int | None = None
        self._found_before = -1
        self._began = self._blocking = 0.0

    def begin(self, step: int, *_: Any, **__: Any) -> None:
        self.follows(step)
        self.save()
        self._blocking = time.perf_counter() - self._began

    def follows(self, step: int) -> None:
        """Note that a save was begun, by the guard or by Megatron."""
        if self._step is None:
            self._step, self._began, self._blocking = step, time.perf_counter(), 0.0
            self._found_before = self._tracked()

    def poll(self) -> SaveOutcome | None:
        # Megatron finalises saves on all ranks together, at the beginning of an iteration, so
        # the queue is the same on all ranks; rank 0 writes the tracker.
        if self._step is None or self._queue_is_filled():
            return None
        step, self._step = self._step, None
        seconds = time.perf_counter() - self._began
        found = self._tracked()
        # A later save may have followed; an entry that was there before proves nothing.
        if found < step or (found > step and found == self._found_before):
            words = f"{self.folder / TRACKER} says {found}, not {step}"
            return FailedSave(step=step, problem=words)
        path = self.folder / f"iter_{step:07d}"
        return SavedCheckpoint(
            step=step, path=path, blocking_seconds=self._blocking, durable_seconds=seconds,
            seconds=seconds,
        )  # fmt: skip

    def wait(self, timeout: float | None = None) -> SaveOutcome | None:
        if self._step is not None and self._queue_is_filled():
            self._training.maybe_finalize_async_save(blocking=True)
        return self.poll()

    def newest_good(self, *, trusted_only: bool = False) -> CheckpointManifest | None:
        raise NotImplementedError("Megatron resumes by --load")

    def load(self, good: CheckpointManifest, state: dict[str, Any]) -> dict[str, Any]:
        raise NotImplementedError("Megatron resumes by --load")

    def _queue_is_filled(self) -> bool:
        finalize = getattr(self._training, "maybe_finalize_async_save", None)
        module = sys.modules.get(getattr(finalize, "__module__", ""))
        is_empty = getattr(module, "is_empty_async_queue", lambda: True)
        return bool(self._training.get_args().async_save) and not is_empty()

    def _tracked(self) -> int:
        try:
            return int((self.folder / TRACKER).read_text())
        except (OSError, ValueError):
            return -1
