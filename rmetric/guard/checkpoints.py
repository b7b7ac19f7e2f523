"""Sharded checkpoints that are good or absent, by torch.distributed.checkpoint (DCP)."""

from __future__ import annotations

import json
import logging
import shutil
import threading
import time
import warnings
from collections.abc import Collection, Mapping
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import CheckpointException, FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.stateful import Stateful

from rmetric.guard.good import (
    PART,
    Done,
    Failed,
    Good,
    UnfitCheckpoint,
    candidates,
    own_name,
    write_durably,
)
from rmetric.guard.ranks import Ranks
from rmetric.guard.save_parts import Planner, Save, Stager, free_space, in_words
from rmetric.guard.shelf import Shelf
from rmetric.guard.verify import damaged, digest, non_finite

__all__ = ["Checkpoints", "Done", "Failed", "Good", "UnfitCheckpoint"]

logger = logging.getLogger("rmetric")

# That there is one process is known, and DCP says so from a thread of its own.
warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninit")


class Checkpoints:
    """The checkpoints of one training, in one folder that all its ranks see.

    A save goes through DCP, in the background unless `asynchronous` is False: the training
    waits for the copy to host memory. It is written under a name that ends in ``.part``.
    When all ranks are durable, each reads its own files back, hashes them and looks for
    what is not finite; if all agree, rank 0 writes `good.json` and gives the folder its
    name. So whatever is called ``step-N`` is whole, and a save that fails, on any rank,
    fails on all of them, leaves nothing and harms nothing that was there. The one whose
    tensors are not finite is kept as ``step-N.not-finite`` to be looked at, the newest
    of them only.

    All ranks make it, and call `begin`, `newest_good` and `load`, together and in the same
    order. Without a process group there is one rank.

    Args:
        folder: for the checkpoints; made where it is missing.
        keep: how many good ones of this model, at least 1. An older one goes when a newer one
            is good, and before it what `newest_good` found damaged.
        group: a gloo group over all ranks for nothing but this; None makes one.
        asynchronous: whether a save is written in the background.
        fingerprint: says which model this is, the same on every rank and in every layout:
            a string, or a mapping of plain values.
        may_be_infinite: patterns of tensors' names that may hold infinities, such as masks.

    Raises:
        ValueError: `keep` below 1; a folder that cannot be made or written to.

    Its weakness: DCP's index is a pickle. It is loaded after its sha256 was found right,
    which tells of damage and not of malice: load what you trust.
    """

    saves_later = False

    def __init__(
        self,
        folder: Path | str,
        *,
        keep: int = 3,
        group: dist.ProcessGroup | None = None,
        asynchronous: bool = True,
        fingerprint: str | Mapping[str, Any],
        may_be_infinite: Collection[str] = (),
    ) -> None:
        if keep < 1:
            raise ValueError(f"keep is {keep}: it must be at least 1")
        self.folder = Path(folder)
        self._shelf = Shelf(self.folder, keep=keep, fingerprint=json.loads(json.dumps(fingerprint)))
        self.ranks = Ranks(group)
        self._asynchronous, self._may_be_infinite = asynchronous, tuple(may_be_infinite)
        self._stager = Stager()
        self._save: Save | None = None
        self._thread: threading.Thread | None = None
        self._num_saves = 0
        self._launch = self._prepare()

    @property
    def in_flight(self) -> bool:
        """A save was begun whose outcome nobody has taken yet."""
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
        """Save the state after `step`; returns when it may be changed again. Never raises for
        what goes wrong with the save: `poll` and `wait` tell.

        Args:
            step: last step that is done, the same on all ranks.
            state: tensors, or what has a `state_dict`, by name; see `ModelState`.
            about: plain values that JSON holds; those of rank 0 are kept.
            own: plain values of this rank alone, such as its random numbers.
            request: number of the request in the run folder that this answers.
            problem: this rank has nothing to save, and why: the save fails on all ranks.

        Raises:
            RuntimeError: one is in flight already.
        """
        if self._save is not None:
            raise RuntimeError(f"the save of step {self._save.step} is still in flight")
        if self._num_saves == 0 and self.ranks.rank == 0:
            self._shelf.clear()
        self._num_saves += 1
        name = f"step-{step}.{self._launch}-{self._num_saves}{PART}"
        save = self._save = Save(step=step, part=self.folder / name, request=request)
        save.problem = problem
        with save.noting_problems("its plain values"):
            save.about = json.loads(json.dumps(dict(about or {})))
            save.own = None if own is None else json.dumps(own)
        plain: dict[str, Any] = {}
        with save.noting_problems("its state"):
            plain = {
                key: part.state_dict() if isinstance(part, Stateful) else part
                for key, part in state.items()
            }
        try:
            written = self._written(save, plain)
            save.blocking_seconds = save.seconds()
            thread = threading.Thread(target=self._finish, args=(save, written))
            thread.start()
        except Exception as error:  # no thread can be had: the others hear of it by gloo's time
            save.outcome = Failed(step=step, problem=f"{type(error).__name__}: {error}")
            return
        self._thread = thread
        if not self._asynchronous:
            thread.join()
            save.blocking_seconds = save.seconds()

    def poll(self) -> Done | Failed | None:
        """How the save in flight ended, once; None while it has not, or where there is none."""
        if self._save is None or self._save.outcome is None:
            return None
        if self._thread is not None:
            self._thread.join()
        save, self._save, self._thread = self._save, None, None
        if isinstance(save.outcome, Done):  # by rank 0's clock until here
            return replace(save.outcome, blocking_seconds=save.blocking_seconds)
        return save.outcome

    def wait(self, timeout: float | None = None) -> Done | Failed | None:
        """`poll`, after at most `timeout` seconds; None for as long as it takes."""
        if self._thread is not None:
            self._thread.join(timeout)
        return self.poll()

    def newest_good(self) -> Good | None:
        """The newest checkpoint that is still as it was written; None where there is none.

        One that is damaged is passed over, and said so. Each rank reads a share of it.

        Raises:
            UnfitCheckpoint: the newest is of another model.
            RuntimeError: a save is in flight.
        """
        if self._save is not None:
            raise RuntimeError(f"the save of step {self._save.step} is still in flight")
        here = candidates(self.folder) if self.ranks.rank == 0 else ([], [])
        found, _ = self.ranks.from_first(here)
        for problem in here[1]:
            logger.error("rmetric: a checkpoint is passed over: %s", problem)
        for good in found:
            if differing := self._shelf.differs(good):
                raise UnfitCheckpoint(f"{good.path} is of another model: {differing}")
            problem = self._damage(good)
            if not problem:
                return good
            self._shelf.damaged.add(good.path)
            logger.error("rmetric: checkpoint %s is passed over: %s", good.path, problem)
        return None

    def load(self, good: Good, state: dict[str, Any]) -> dict[str, Any]:
        """Fill `state` in place, resharded to the layout at hand; returns what was said about it.

        Raises ValueError, on all ranks, where the checkpoint does not hold what `state` asks for.
        """
        try:
            dcp.load(
                state,
                storage_reader=FileSystemReader(good.path),
                process_group=self.ranks.group,
                no_dist=self.ranks.alone,
            )
        except CheckpointException as error:
            raise ValueError(f"{good.path} does not fit: {in_words(error)}") from None
        return dict(good.about)

    # -- a save, on the training's thread

    def _written(self, save: Save, plain: dict[str, Any]) -> Future[Any]:
        """DCP's promise of the metadata. What failed before is told to all ranks through it."""
        with save.noting_problems("its copy to host memory"):
            plain = self._stager.copied(plain) if not save.problem else {}
        future = dcp.async_save(
            plain,
            # What is written lies in host memory: to copy ahead is to wait, for each tensor, for
            # whatever the first GPU's stream has to do.
            storage_writer=FileSystemWriter(save.part, per_thread_copy_ahead=0),
            planner=Planner(save, self.folder),
            process_group=self.ranks.group,
            async_stager=self._stager,
            no_dist=self.ranks.alone,
        )
        assert isinstance(future, Future)  # our stager is not an asynchronous one
        return future

    # -- a save, in the background

    def _finish(self, save: Save, written: Future[Any]) -> None:
        try:
            metadata = written.result()
            save.durable_seconds = save.seconds()
            save.outcome = self._agreed(save, metadata)
        except BaseException as error:  # DCP's is no Exception
            problem = in_words(error)
            self._clean(save)
            save.outcome = Failed(step=save.step, problem=problem + free_space(self.folder))

    def _agreed(self, save: Save, metadata: Any) -> Done | Failed:
        files, problem, infinite = self._read_back(save, metadata)
        said = self.ranks.gather((files, problem, infinite))
        problems = [f"rank {rank}: {words}" for rank, (_, words, _) in enumerate(said) if words]
        infinities = [f"rank {rank}: {words}" for rank, (_, _, words) in enumerate(said) if words]
        outcome: Done | Failed | None = None
        if self.ranks.rank == 0:
            every = {name: of for files, _, _ in said for name, of in files.items()}
            meant = {where.relative_path for where in metadata.storage_data.values()}
            if not problems and (missing := sorted(meant - every.keys())):
                problems = [f"{', '.join(missing)}: written, and no longer there"]
            outcome = self._decided(save, every, problems, infinities)
        outcome = self.ranks.from_first(outcome)
        assert outcome is not None
        return outcome

    def _read_back(self, save: Save, metadata: Any) -> tuple[dict[str, Any], str, str]:
        """This rank's files, what is wrong with them, what in them is not finite."""
        rank = self.ranks.rank
        try:
            if save.own is not None:
                write_durably(save.part / own_name(rank), save.own)
            names = [path.name for path in save.part.glob(f"__{rank}_*")]
            names += [own_name(rank)] if save.own is not None else []
            names += [".metadata"] if rank == 0 else []
            files = {name: digest(save.part / name) for name in names}
            infinite = non_finite(save.part, metadata, names, may_be_infinite=self._may_be_infinite)
            return files, "", infinite
        except Exception as error:
            return {}, f"{type(error).__name__}: {error}", ""

    def _decided(
        self, save: Save, files: dict[str, Any], problems: list[str], infinities: list[str]
    ) -> Done | Failed:
        """Rank 0 gives the checkpoint its name, or not."""
        try:
            if problems:
                raise OSError("; ".join(problems))
            if infinities:
                problem = f"it is not finite: {'; '.join(infinities)}"
                kept = self._shelf.put_aside(save.part, save.step)
                return Failed(step=save.step, problem=problem, kept=kept)
            return self._committed(save, files)
        except Exception as error:
            self._clean(save)
            words = str(error) if problems else f"rank 0: {type(error).__name__}: {error}"
            return Failed(step=save.step, problem=words + free_space(self.folder))

    def _committed(self, save: Save, files: dict[str, Any]) -> Done:
        good = self._shelf.commit(
            save.part,
            save.step,
            about=save.about,
            request=save.request,
            world_size=self.ranks.size,
            files=files,
        )
        return Done(
            step=save.step,
            path=good.path,
            good=good,
            blocking_seconds=save.blocking_seconds,
            durable_seconds=save.durable_seconds,
            seconds=save.seconds(),
        )

    def _clean(self, save: Save) -> None:
        if self.ranks.rank == 0:
            shutil.rmtree(save.part, ignore_errors=True)

    # -- beginning

    def _prepare(self) -> str:
        """Make the folder; a name for this launch's parts."""
        problem, launch = "", f"{time.time_ns():x}"
        if self.ranks.rank == 0:
            try:
                self._shelf.make(launch)
            except OSError as error:
                problem = f"checkpoints cannot be written to {self.folder}: {error}"
        problem, launch = self.ranks.from_first((problem, launch))
        if not problem and not self.folder.is_dir():
            problem = f"rank {self.ranks.rank} does not see {self.folder}, which rank 0 does"
        problem = next((words for words in self.ranks.gather(problem) if words), "")
        if problem:
            raise ValueError(problem)
        return launch

    def _damage(self, good: Good) -> str:
        names = sorted(good.files)[self.ranks.rank :: self.ranks.size]
        problems = self.ranks.gather(damaged(good.path, good.files, names))
        return "; ".join(problem for problem in problems if problem)
