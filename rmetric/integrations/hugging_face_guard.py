"""Guard for the Hugging Face Trainer (from transformers 4.50), which saves in its own format."""

from __future__ import annotations

import json
import logging
import shutil
import time
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from transformers import Trainer, TrainerCallback
from transformers.trainer_callback import TrainerControl, TrainerState
from transformers.trainer_utils import SaveStrategy
from transformers.training_args import TrainingArguments

from rmetric.guard.checkpoint_dir import (
    NOT_FINITE,
    FailedSave,
    SavedCheckpoint,
    SaveOutcome,
    mark_since,
    mark_suspect,
    newest_first,
    rotate,
)
from rmetric.guard.checkpoint_requests import SIGNALS
from rmetric.guard.guard import Guard, resume_of_environment
from rmetric.guard.policy import PolicyConfig, SuspectMark
from rmetric.guard.ranks import Ranks
from rmetric.guard.run_folder import RunFolder
from rmetric.guard.trust import distrust, distrusted_file, require_trusted
from rmetric.integrations.hugging_face_loop import loop_methods
from rmetric.integrations.trainer_callback import replaced
from rmetric.monitor.optimizer_steps import caller_of_class
from rmetric.telemetry.sources import VerdictSource

logger = logging.getLogger("rmetric")

#: Files that the Trainer writes by torch.save.
_TORCH_FILES = ("*.pt", "*.pth", "pytorch_model*.bin", "optimizer*.bin")


class GuardCallback(TrainerCallback):
    """Trainer callback: saves on request, on all ranks at the same step.

    The Trainer saves in its own format; `newest_checkpoint` finds what to resume from. Its regular
    saves count as well. A checkpoint answers a request when its weights were read back and are
    finite; a non-finite one is renamed, so that the Trainer never resumes from it. A failed save,
    on a full disk for example, is deleted and reported, and training continues.

    With `save_total_limit` the guard deletes older checkpoints in place of the Trainer, when the
    new one is verified: the limit is that of the clean ones, and two suspect ones, which were saved
    during an alarm, stay in addition.

    Limits: training waits during a save. A failure in a sharded save (FSDP, DeepSpeed), which all
    ranks make together, can still end training.

    Args:
        policy: when to save; None for the Trainer's `save_steps` as the interval.
        folder: run folder; None for the supervisor's.
        telemetry: see `Guard`.
        signals: see `Guard`.
        read_back: verify the weights after each save.

    Attributes:
        guard: guard of the current training; None before the first.
    """

    def __init__(
        self,
        policy: PolicyConfig | None = None,
        *,
        folder: RunFolder | None = None,
        telemetry: VerdictSource | None = None,
        signals: Mapping[int, str] = SIGNALS,
        read_back: bool = True,
    ) -> None:
        self.guard: Guard | None = None
        self._policy, self._read_back = policy, read_back
        self._settings: dict[str, Any] = dict(folder=folder, telemetry=telemetry, signals=signals)
        self._saver = _TrainerSaver()
        self._training = ExitStack()

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        self._end()  # of an earlier training that was aborted
        self._saver = _TrainerSaver(Path(str(args.output_dir)), marks=bool(args.should_save))
        policy = self._policy or _policy_of(args, state)
        self.guard = Guard(self._saver, policy=policy, state=dict, **self._settings)
        self.guard.start(state.global_step)
        trainer = caller_of_class(Trainer)
        if trainer is not None:
            follow = self._training.enter_context
            save = self._catching_failure(trainer)(trainer._save_checkpoint)
            follow(replaced(trainer, "_save_checkpoint", save))
            for owner, name in loop_methods(trainer):
                run = self._closing_on_error()(getattr(owner, name))
                follow(replaced(owner, name, run))

    def on_step_end(self, args: Any, state: TrainerState, control: Any, **_: Any) -> None:
        if self.guard is not None:
            self.guard.step(state.global_step)
            control.should_save |= self._saver.requested
            control.should_training_stop |= self.guard.should_stop

    def on_save(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        if self.guard is None:
            return
        step, path = state.global_step, _checkpoint_of(args, state)
        self.guard.adopt(step)
        problem, kept = self._saver.problem, None
        if not problem:
            self._saver.mark(path, step)
        if not problem and self._read_back and self.guard.ranks.rank == 0:
            problem = not_finite(path)
            kept = _put_aside(path) if problem else None
        if not problem and self._saver.rotates and args.should_save:
            rotate(path.parent, args.save_total_limit, state.best_model_checkpoint)
        self._saver.ended(step, path, problem, kept)
        self.guard.look(step)
        control.should_training_stop |= self.guard.should_stop

    def on_train_end(self, *_: Any, **__: Any) -> None:
        self._end(finished=self.guard is not None and not self.guard.should_stop)

    @contextmanager
    def _catching_failure(self, trainer: Trainer) -> Iterator[None]:
        self._saver.problem, self._saver.rotates = "", True
        limit, trainer.args.save_total_limit = trainer.args.save_total_limit, None
        try:
            yield
        except Exception as error:
            self._saver.problem = f"{type(error).__name__}: {error}"
            if trainer.args.should_save:  # a partial checkpoint must not be resumed from
                half = _checkpoint_of(trainer.args, trainer.state)
                shutil.rmtree(half, ignore_errors=True)
        finally:
            trainer.args.save_total_limit = limit

    @contextmanager
    def _closing_on_error(self) -> Iterator[None]:
        try:
            yield
        except BaseException as error:  # the signal handlers must be restored
            if self.guard is not None:
                self.guard.__exit__(type(error), error, error.__traceback__)
            raise

    def _end(self, *, finished: bool = False) -> None:
        self._training.close()
        if self.guard is not None:
            self.guard.close(finished=finished)


class _TrainerSaver:
    """Saver interface of the Trainer."""

    saves_later = True

    def __init__(self, folder: Path | None = None, *, marks: bool = False) -> None:
        self.requested, self.problem = False, ""
        self.rotates = False  # in place of the Trainer
        self._folder, self._marks = folder, marks
        self._alarm: SuspectMark | None = None
        self._began = time.perf_counter()
        self._outcome: SaveOutcome | None = None

    def begin(self, step: int, *_: Any, **__: Any) -> None:
        self.requested, self._outcome, self._began = True, None, time.perf_counter()

    def ended(self, step: int, path: Path, problem: str, kept: Path | None) -> None:
        self.requested, seconds = False, time.perf_counter() - self._began
        if problem:
            self._outcome = FailedSave(step=step, problem=problem, kept=kept)
        else:
            self._outcome = SavedCheckpoint(
                step=step, path=path, blocking_seconds=seconds, durable_seconds=seconds,
                seconds=seconds,
            )  # fmt: skip

    def set_alarm(self, since: int | None, reason: str, step: int) -> None:
        self._alarm = None if since is None else SuspectMark(since=since, reason=reason)
        if self._alarm is not None and self._marks and self._folder is not None:
            mark_since(self._folder, self._alarm, step)

    def mark(self, path: Path, step: int) -> None:
        alarm = self._alarm
        if self._marks:
            mark_suspect(path, alarm if alarm and step >= alarm.since else None)

    def poll(self) -> SaveOutcome | None:
        outcome, self._outcome = self._outcome, None
        return outcome

    def wait(self, timeout: float | None = None) -> SaveOutcome | None:
        return self.poll()

    def load(self, *_: Any, **__: Any) -> Any:
        raise NotImplementedError("the Trainer resumes by train(resume_from_checkpoint=...)")

    newest_good = load


def not_finite(checkpoint: Path) -> str:
    """Problem of a Trainer checkpoint; empty if its weights are complete and finite.

    Weights of another form than ``.safetensors`` (FSDP, DeepSpeed) are not checked.
    """
    from safetensors import safe_open

    try:
        json.loads((checkpoint / "trainer_state.json").read_text())
        for path in sorted(checkpoint.glob("*.safetensors")):
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118 (not a mapping)
                    tensor = file.get_tensor(name)
                    if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
                        return f"{name} in {path.name} is not finite"
    except Exception as error:
        return f"it cannot be read back: {type(error).__name__}: {error}"
    return ""


def newest_checkpoint(output_dir: Path | str, *, trusted_only: bool | None = None) -> str | None:
    """Newest whole checkpoint of a Trainer, for ``train(resume_from_checkpoint=...)``, or None.

    At the first launch there is none: training then begins at step 0, while
    ``resume_from_checkpoint=True`` would raise ValueError. A damaged one, such as that of a killed
    save, is skipped with a warning. Each file is read once, by rank 0 alone. All ranks call it,
    after the TrainingArguments were made.

    Args:
        output_dir: `output_dir` of the TrainingArguments; it may not exist yet.
        trusted_only: skip suspect checkpoints, which were saved during an alarm. None: as
            ``rmetric supervise --resume`` says, else False.

    Raises:
        OSError: the folder cannot be listed.
        ValueError: RMETRIC_RESUME is neither ``clean`` nor ``newest``, or other users can write
            the folder.
    """
    if trusted_only is None:
        trusted_only = resume_of_environment() == "clean"
    ranks, found, problem = Ranks(), None, None
    if ranks.rank == 0:
        try:
            found = _newest_whole(Path(output_dir), trusted_only)
        except (OSError, ValueError) as error:
            problem = error
    found, problem = ranks.broadcast((found, problem))
    if problem is not None:
        raise problem
    return found


def _newest_whole(folder: Path, trusted_only: bool) -> str | None:
    require_trusted(folder)
    refused = ""
    for path in newest_first(folder, trusted_only=trusted_only):
        others = ""
        with suppress(OSError):  # it has just been deleted
            files = sorted(str(file.relative_to(path)) for file in path.rglob("*"))
            others = distrust(path, parents=False) or distrusted_file(path, files)
        refused = refused or others
        problem = others or not_finite(path) or _incomplete(path)
        if not problem:
            return str(path)
        logger.warning("rmetric: %s is not resumed from: %s", path, problem)
    if refused:  # else the training would begin anew
        raise ValueError(refused)
    return None


def _incomplete(checkpoint: Path) -> str:
    """Problem of the files that `not_finite` does not read; empty if they are whole."""
    try:
        for index in checkpoint.glob("*.index.json"):
            for name in set(json.loads(index.read_text())["weight_map"].values()):
                if not (checkpoint / name).is_file():
                    return f"{name} is missing"
        for path in sorted(file for form in _TORCH_FILES for file in checkpoint.glob(form)):
            with zipfile.ZipFile(path) as file:
                # Without the option torch writes no checksums.
                if torch.serialization.get_crc32_options() and (part := file.testzip()):
                    return f"{part} in {path.name} is damaged"
        weights = [*checkpoint.glob("*.safetensors"), *checkpoint.glob("*_model*.bin")]
        if not weights and not any(path.is_dir() for path in checkpoint.iterdir()):
            return "it has no weights"
    except Exception as error:
        return f"it cannot be read back: {type(error).__name__}: {error}"
    return ""


def _checkpoint_of(args: TrainingArguments, state: TrainerState) -> Path:
    return Path(str(args.output_dir)) / f"checkpoint-{state.global_step}"


def _put_aside(checkpoint: Path) -> Path | None:
    """Rename a non-finite checkpoint, replacing an earlier one; None if that fails."""
    kept = checkpoint.with_name(checkpoint.name + NOT_FINITE)
    try:
        shutil.rmtree(kept, ignore_errors=True)
        return checkpoint.rename(kept)
    except OSError as error:
        logger.error("rmetric: %s cannot be renamed: %s", checkpoint, error)
        return None


def _policy_of(args: TrainingArguments, state: TrainerState) -> PolicyConfig:
    if args.save_strategy != SaveStrategy.STEPS:
        raise ValueError(
            f"save_strategy is {args.save_strategy}: with any other than 'steps' the guard needs "
            "a policy, such as PolicyConfig(interval_steps=500)"
        )
    return PolicyConfig(interval_steps=int(state.save_steps))
