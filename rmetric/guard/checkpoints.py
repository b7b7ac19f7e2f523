"""Sharded checkpoints that are good or absent, by torch.distributed.checkpoint (DCP)."""

from __future__ import annotations

import json
import logging
import shutil
import time
import warnings
from collections.abc import Collection, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save
from torch.distributed.checkpoint.stateful import Stateful

from rmetric._util.errors import require
from rmetric.guard import dcp
from rmetric.guard.checkpoint_dir import (
    PART,
    CheckpointDirectory,
    CheckpointManifest,
    FailedSave,
    SavedCheckpoint,
    SaveOutcome,
    UnfitCheckpoint,
    candidates,
    own_name,
    write_durably,
)
from rmetric.guard.policy import SuspectMark, suspect_note
from rmetric.guard.ranks import Ranks
from rmetric.guard.trust import withdraw_write

__all__ = ["CheckpointManifest", "Checkpoints", "FailedSave", "SavedCheckpoint", "UnfitCheckpoint"]

logger = logging.getLogger("rmetric")

# DCP warns about a single process from its own thread; that is intended.
warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninit")


class Checkpoints:
    """Checkpoints of one training, in a folder that all ranks share.

    DCP writes a save, in the background unless `asynchronous` is False: training waits only
    for the copy to host memory. The folder has the suffix ``.part`` until it is complete.
    When all ranks are durable, each reads its files back, hashes them and checks that the
    tensors are finite. If all succeed, rank 0 writes `good.json` and renames the folder to
    ``step-N``. A save that fails on one rank fails on all and leaves earlier checkpoints
    unchanged. The newest one with non-finite tensors is kept as ``step-N.not-finite``.

    All ranks create it, and call `begin`, `newest_good` and `load` together and in the same
    order. Without a process group there is one rank.

    Args:
        folder: directory of the checkpoints; created if missing.
        keep: clean good checkpoints of this model to retain, at least 1. Damaged ones are
            deleted first, then the oldest, once a newer one is good.
        keep_suspect: suspect ones to retain in addition, at least 1; see `set_alarm`.
        asynchronous: write in the background.
        fingerprint: identifies the model, the same on every rank and in every layout: a
            string, or a mapping of plain values.
        may_be_infinite: patterns of tensor names that may hold infinities, such as masks.

    No code of a checkpoint is run, see `rmetric.guard.dcp`, and a save of values that could not be
    loaded fails. A folder that other users can write is refused; see `rmetric.guard.trust`.
    """

    saves_later = False

    def __init__(
        self,
        folder: Path | str,
        *,
        keep: int = 3,
        keep_suspect: int = 2,
        asynchronous: bool = True,
        fingerprint: str | Mapping[str, Any],
        may_be_infinite: Collection[str] = (),
    ) -> None:
        require("keep", keep, keep >= 1, "at least 1")
        require("keep_suspect", keep_suspect, keep_suspect >= 1, "at least 1")
        self.folder = Path(folder)
        fingerprint = json.loads(json.dumps(fingerprint))
        self._directory = CheckpointDirectory(
            self.folder, keep=keep, keep_suspect=keep_suspect, fingerprint=fingerprint
        )
        self.ranks = Ranks()
        self._asynchronous, self._may_be_infinite = asynchronous, tuple(may_be_infinite)
        self._stager = dcp.HostMemoryStager()
        self._save: dcp.Save | None = None
        self._outcome: Future[SaveOutcome] = Future()
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="checkpoints")
        self._num_saves = 0
        self._launch = self._prepare()

    @property
    def in_flight(self) -> bool:
        """A save was begun and its outcome not yet collected."""
        return self._save is not None

    def begin(
        self,
        step: int,
        state: Mapping[str, Any],
        about: Mapping[str, Any] | None = None,
        *,
        own: Any = None,
        request: int = 0,
        problem: str = "",
    ) -> None:
        """Begin to save the state after `step`; on return the state may be changed.

        A failure of the save is not raised; `poll` and `wait` return it. Raises RuntimeError if
        another save is in flight.

        Args:
            step: last completed step, the same on all ranks.
            state: tensors or objects with a `state_dict`, by name; see `ModelState`.
            about: JSON values; those of rank 0 are kept.
            own: JSON values of this rank, such as its random state.
            request: number of the answered request in the run folder.
            problem: reason why this rank cannot save; the save then fails on all ranks.
        """
        if self._save is not None:
            raise RuntimeError(f"the save of step {self._save.step} is still in flight")
        if self._num_saves == 0 and self.ranks.rank == 0:
            self._directory.clear()
        self._num_saves += 1
        name = f"step-{step}.{self._launch}-{self._num_saves}{PART}"
        alarm = self._directory.alarm
        suspect = alarm if alarm is not None and step >= alarm.since else None
        save = self._save = dcp.Save(
            step=step, part=self.folder / name, request=request, suspect=suspect, problem=problem
        )
        with save.catching("plain values"):
            save.about = json.loads(json.dumps(dict(about or {})))
            save.own = None if own is None else json.dumps(own)
        plain: dict[str, Any] = {}
        with save.catching("state"):
            plain = {
                key: part.state_dict() if isinstance(part, Stateful) else part
                for key, part in state.items()
            }
        try:
            written = self._written(save, plain)
            save.blocking_seconds = save.seconds()
            self._outcome = self._pool.submit(self._finish, save, written)
        except Exception as error:  # no thread available: the other ranks time out in gloo
            self._outcome = Future()
            self._outcome.set_result(FailedSave(step=step, problem=dcp.error_text(error)))
        if not self._asynchronous:
            wait([self._outcome])
            save.blocking_seconds = save.seconds()

    def poll(self) -> SaveOutcome | None:
        """Outcome of the save in flight, returned once; None while it runs or without one."""
        if self._save is None or not self._outcome.done():
            return None
        save, self._save, outcome = self._save, None, self._outcome.result()
        if isinstance(outcome, SavedCheckpoint):  # until here the time of rank 0
            return replace(outcome, blocking_seconds=save.blocking_seconds)
        return outcome

    def wait(self, timeout: float | None = None) -> SaveOutcome | None:
        """`poll` after at most `timeout` seconds; None waits without a limit."""
        if self._save is not None:
            wait([self._outcome], timeout)
        return self.poll()

    def set_alarm(self, since: int | None, reason: str, step: int) -> None:
        """Set the alarm that is open at `step`, None for none; all ranks call it.

        Checkpoints with a step of at least `since` that are saved during the alarm are marked
        suspect in their manifest, and so are earlier ones of the same course of training. They
        stay suspect when the alarm ends, and never cause the deletion of a clean one.
        """
        if self.ranks.rank == 0:
            alarm = None if since is None else SuspectMark(since=since, reason=reason)
            self._directory.set_alarm(alarm, step)

    def newest_good(self, *, trusted_only: bool = False) -> CheckpointManifest | None:
        """Newest checkpoint whose files are unchanged; None if there is none.

        Damaged ones are skipped and logged, and suspect ones with `trusted_only`. Each rank
        verifies a share of the files.

        Raises:
            UnfitCheckpoint: the newest checkpoint is of another model.
            RuntimeError: a save is in flight.
        """
        if self._save is not None:
            raise RuntimeError(f"the save of step {self._save.step} is still in flight")
        found, problems = candidates(self.folder) if self.ranks.rank == 0 else ([], [])
        for problem in problems:
            logger.error("rmetric: checkpoint skipped: %s", problem)
        found = self.ranks.broadcast(found)
        for good in found:
            if differing := self._directory.differs(good):
                raise UnfitCheckpoint(f"{good.path} is of another model: {differing}")
            if trusted_only and good.suspect is not None:
                if self.ranks.rank == 0:
                    logger.warning("rmetric: checkpoint %s skipped: %s", good.path, good.suspect)
                continue
            names = sorted(good.files)[self.ranks.rank :: self.ranks.size]
            found_damaged = self.ranks.gather(dcp.damaged(good.path, good.files, names))
            problem = "; ".join(filter(None, found_damaged))
            if not problem:
                if good.suspect is not None and self.ranks.rank == 0:
                    older = (old.path for old in found[found.index(good) :] if not old.suspect)
                    note = suspect_note(good.suspect, next(older, None))
                    logger.warning("rmetric: checkpoint %s %s", good.path, note)
                return good
            self._directory.damaged.add(good.path)
            logger.error("rmetric: checkpoint %s skipped: %s", good.path, problem)
        return None

    def load(self, good: CheckpointManifest, state: dict[str, Any]) -> dict[str, Any]:
        """Load a checkpoint into `state`, in place and resharded to the current layout.

        Returns the values saved as `about`. Raises ValueError on all ranks if the checkpoint
        lacks a part of `state`.
        """
        reader = dcp.IndexReader(good.path, good.files)
        try:
            load(
                state, storage_reader=reader, planner=dcp.PlainLoadPlanner(),
                process_group=self.ranks.group, no_dist=self.ranks.single_process,
            )  # fmt: skip
        except CheckpointException as error:
            problem = reader.problem or dcp.error_text(error)
            raise ValueError(f"{good.path} does not fit: {problem}") from None
        return dict(good.about)

    # -- a save, on the training's thread

    def _written(self, save: dcp.Save, plain: dict[str, Any]) -> Future[Any]:
        """Future of DCP's metadata; an earlier problem of a rank fails it on all ranks."""
        with save.catching("copy to host memory"):
            plain = self._stager.copied(plain) if not save.problem else {}
        future = async_save(
            plain,
            # The tensors are in host memory: copying ahead would wait, for each tensor, for
            # the stream of the first GPU.
            storage_writer=dcp.IndexedWriter(save.part, per_thread_copy_ahead=0),
            planner=dcp.FailingSavePlanner(save, self.folder),
            process_group=self.ranks.group,
            async_stager=self._stager,
            no_dist=self.ranks.single_process,
        )
        assert isinstance(future, Future)  # the stager is synchronous
        return future

    # -- a save, in the background

    def _finish(self, save: dcp.Save, written: Future[Any]) -> SaveOutcome:
        try:
            metadata = written.result()
            save.durable_seconds = save.seconds()
            return self._agreed(save, metadata)
        except BaseException as error:  # CheckpointException is not an Exception
            problem = dcp.error_text(error)
            self._clean(save)
            return FailedSave(step=save.step, problem=problem + dcp.free_space(self.folder))

    def _agreed(self, save: dcp.Save, metadata: Any) -> SaveOutcome:
        files, problem, infinite = self._read_back(save, metadata)
        by_rank = self.ranks.gather((files, problem, infinite))
        problems, infinities = (
            [f"rank {rank}: {found[n]}" for rank, found in enumerate(by_rank) if found[n]]
            for n in (1, 2)
        )
        outcome: SaveOutcome | None = None
        if self.ranks.rank == 0:
            every = {name: of for files, _, _ in by_rank for name, of in files.items()}
            meant = {where.relative_path for where in metadata.storage_data.values()}
            if not problems and (missing := sorted(meant - every.keys())):
                problems = [f"{', '.join(missing)}: written, but missing"]
            outcome = self._decided(save, every, problems, infinities)
        outcome = self.ranks.broadcast(outcome)
        assert outcome is not None
        return outcome

    def _read_back(self, save: dcp.Save, metadata: Any) -> tuple[dict[str, Any], str, str]:
        """Files of this rank, the problem with them, and the non-finite tensors in them."""
        rank = self.ranks.rank
        try:
            if save.own is not None:
                write_durably(save.part / own_name(rank), save.own)
            names = [path.name for path in save.part.glob(f"__{rank}_*")]
            names += [own_name(rank)] if save.own is not None else []
            names += [".metadata", dcp.INDEX_NAME] if rank == 0 else []
            for path in (save.part, *(save.part / name for name in names)):
                withdraw_write(path)  # of a umask that gives it to all
            files = {name: dcp.digest(save.part / name) for name in names}
            if problem := dcp.unloadable(save.part, metadata, names):
                return {}, problem, ""
            infinite = dcp.non_finite(
                save.part, metadata, names, may_be_infinite=self._may_be_infinite
            )
            return files, "", infinite
        except Exception as error:
            return {}, f"{type(error).__name__}: {error}", ""

    def _decided(
        self, save: dcp.Save, files: dict[str, Any], problems: list[str], infinities: list[str]
    ) -> SaveOutcome:
        """Commit or reject the checkpoint; rank 0 only."""
        try:
            if problems:
                raise OSError("; ".join(problems))
            if infinities:
                problem = f"not finite: {'; '.join(infinities)}"
                kept = self._directory.put_aside(save.part, save.step)
                return FailedSave(step=save.step, problem=problem, kept=kept)
            good = self._directory.commit(
                save.part, save.step, about=save.about, request=save.request,
                suspect=save.suspect, world_size=self.ranks.size, files=files,
            )  # fmt: skip
            return SavedCheckpoint(
                step=save.step, path=good.path, good=good, seconds=save.seconds(),
                blocking_seconds=save.blocking_seconds, durable_seconds=save.durable_seconds,
            )  # fmt: skip
        except Exception as error:
            self._clean(save)
            words = str(error) if problems else f"rank 0: {type(error).__name__}: {error}"
            return FailedSave(step=save.step, problem=words + dcp.free_space(self.folder))

    def _clean(self, save: dcp.Save) -> None:
        if self.ranks.rank == 0:
            shutil.rmtree(save.part, ignore_errors=True)

    # -- beginning

    def _prepare(self) -> str:
        """Create the folder; return a name for the partial saves of this launch."""
        problem, launch = "", f"{time.time_ns():x}"
        if self.ranks.rank == 0:
            try:
                self._directory.make(launch)
            except OSError as error:
                problem = f"checkpoints cannot be written to {self.folder}: {error}"
            except ValueError as error:
                problem = str(error)
        problem, launch = self.ranks.broadcast((problem, launch))
        if not problem and not self.folder.is_dir():
            problem = f"rank {self.ranks.rank} does not see {self.folder}, which rank 0 does"
        problem = next((words for words in self.ranks.gather(problem) if words), "")
        if problem:
            raise ValueError(problem)
        return launch
