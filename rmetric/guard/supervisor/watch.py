"""What is noticed of a running training: steps, hangs, verdicts on GPUs, alarms of its log."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from math import inf
from pathlib import Path

from rmetric.guard.run_folder import Heartbeat
from rmetric.guard.supervisor import diagnosis
from rmetric.guard.supervisor.allocation import Allocation, Gpu
from rmetric.guard.supervisor.events import Failure
from rmetric.guard.supervisor.spoken import gpu_name
from rmetric.telemetry.sources import VerdictSource
from rmetric.telemetry.verdict import GpuVerdict

#: A verdict that lay there already counts if it is no older than this many seconds.
FRESH_SECONDS = 600.0


@dataclass(frozen=True, kw_only=True)
class Patience:
    """How long a training may show no sign of life, in seconds, by what it last said it does.

    Attributes:
        start: until it trains; also to exit, once it is finished. Until the first heartbeat
            output counts as a sign of life.
        hang: while it trains.
        saving: while it saves and may not beat.
        quiet: how long its output may not grow once there is some, for a program without
            heartbeats; None not to look.
    """

    start: float = 600.0
    hang: float = 300.0
    saving: float = 1800.0
    quiet: float | None = None

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value is not None and not 0 < value < inf:
                raise ValueError(f"{name} is {value}: a number of seconds above 0 is accepted")

    def of(self, phase: str) -> float:
        return {"training": self.hang, "saving": self.saving}.get(phase, self.start)


class Pulse:
    """Follows the heartbeats and the output of one launch.

    A beat counts as seen when its file says something else than before: clocks of other
    nodes are not compared with ours.

    Args:
        now: seconds, on the clock of `look`.

    Attributes:
        resumed: step at which it came back; None until it trains.
        resumed_at: time of that, by the beat's clock.
        step: the last that any rank has done, which then the others have begun; None until then.
        step_at: time of that, by the beat's clock.
    """

    def __init__(self, patience: Patience, allocation: Allocation, log: Path, now: float) -> None:
        self.patience, self.allocation, self.log = patience, allocation, log
        self.resumed: int | None = None
        self.step: int | None = None
        self.resumed_at = self.step_at = 0.0
        self.beats: dict[int, Heartbeat] = {}
        self._seen: dict[int, float] = {}
        self._size, self._grew = 0, now

    def look(self, beats: Mapping[int, Heartbeat], now: float) -> Failure | None:
        """Take the beats of now; what is wrong, if it hangs."""
        for rank, beat in beats.items():
            if self.beats.get(rank) != beat:
                self._seen[rank] = now
        self.beats = dict(beats)
        self._note_step()
        self._note_output(now)
        return self._silent(now) or self._quiet(now)

    @property
    def last_sign(self) -> float | None:
        """Seconds since the epoch of the oldest last heartbeat; None where there is none."""
        return min((beat.time for beat in self.beats.values()), default=None)

    def _note_step(self) -> None:
        at_work = [beat for beat in self.beats.values() if beat.phase != "starting"]
        if not at_work:
            return
        first = min(at_work, key=lambda beat: (beat.time, beat.rank))
        if self.resumed is None:
            said = [beat.resumed for beat in at_work if beat.resumed is not None]
            self.resumed = min(said, default=min(beat.step for beat in at_work))
            self.resumed_at = first.time
        last = max(at_work, key=lambda beat: (beat.step, -beat.time))
        if self.step is None or last.step > self.step:
            self.step, self.step_at = last.step, last.time

    def _silent(self, now: float) -> Failure | None:
        if not self.beats:
            # A program that never beats cannot be told from one that starts, but by its output.
            silent, limit = now - self._grew, self.patience.start
            return None if silent <= limit or self.patience.quiet else self._hang(silent, limit)
        for rank, beat in self.beats.items():
            silent, limit = now - self._seen[rank], self.patience.of(beat.phase)
            if silent > limit:
                return self._hang(silent, limit)
        return None

    def _note_output(self, now: float) -> None:
        size = self.log.stat().st_size if self.log.exists() else 0
        if size != self._size:
            self._size, self._grew = size, now

    def _quiet(self, now: float) -> Failure | None:
        if self.patience.quiet is None:
            return None
        silent = now - self._grew
        limit = self.patience.quiet if self._size else self.patience.start
        if silent <= limit:
            return None
        words = f"it has printed nothing for {silent:.0f} s, {limit:g} are allowed"
        return Failure(kind="hang", words=words)

    def _hang(self, silent: float, limit: float) -> Failure:
        return diagnosis.of_hang(self.beats, silent, limit, self.allocation)


def fresh_verdicts(source: VerdictSource, now: float) -> list[GpuVerdict]:
    """What a source that has been there before us thinks of each GPU, if it is no history.

    Args:
        now: seconds since the epoch.
    """
    source.poll()
    oldest = now - FRESH_SECONDS
    return [verdict for verdict in source.verdicts().values() if verdict.time >= oldest]


class News:
    """Lets through only verdicts that say something else of their GPU than the last.

    Args:
        nodes: that are used; with one, a verdict without a node, or with this machine's
            name, is about it.
        here: this machine's name.
    """

    def __init__(self, nodes: Iterable[str], here: str) -> None:
        self._nodes, self._here = list(nodes), here
        self._last: dict[Gpu, tuple[str, str]] = {}

    def of(self, verdict: GpuVerdict) -> Gpu | None:
        """The GPU that is thought of otherwise than before; None where there is no news."""
        node = self._node(verdict.node)
        if node is None:
            return None
        gpu = (node, verdict.gpu)
        said = (verdict.level, verdict.action)
        if self._last.get(gpu, ("healthy", "none")) == said:
            return None
        self._last[gpu] = said
        return gpu

    def _node(self, name: str) -> str | None:
        if name in self._nodes:
            return name
        alone = len(self._nodes) == 1 and name in ("", self._here)
        return self._nodes[0] if alone else None


def words_of(verdict: GpuVerdict) -> str:
    """A verdict in a line."""
    name = gpu_name((verdict.node, verdict.gpu))
    level = "at risk" if verdict.level == "risk" else verdict.level
    return f"{name} is {level}: {'; '.join(verdict.reasons) or verdict.action}"[:500]


class Polled:
    """Asks a source for verdicts from a thread of its own: a driver may keep it waiting.

    Args:
        source: see `VerdictSource`.
        told: called with each verdict.
        wrong: called with what keeps the source from knowing, in words, when that changes.
        seconds: between two questions.
    """

    def __init__(
        self,
        source: VerdictSource,
        told: Callable[[GpuVerdict], None],
        wrong: Callable[[str], None],
        seconds: float,
    ) -> None:
        self._source, self._told, self._wrong = source, told, wrong
        self._seconds, self._stop = seconds, threading.Event()
        self._problem: str | None = None
        threading.Thread(target=self._run, name="verdicts", daemon=True).start()

    def close(self) -> None:
        self._stop.set()
        self._source.close()

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                self._ask()
            except Exception as error:
                self._wrong(f"no more verdicts on GPUs: {type(error).__name__}: {error}")
                return
            self._stop.wait(self._seconds)

    def _ask(self) -> None:
        for verdict in self._source.poll():
            self._told(verdict)
        problem, before = self._source.problem, self._problem
        self._problem = problem
        if problem and problem != before:
            self._wrong(problem)


def follow_alarms(
    log: Path, told: Callable[[str], None], wrong: Callable[[str], None], seconds: float
) -> Callable[[], None]:
    """Follow a training's log with the calibrated detector, on a thread; returns what stops it.

    Args:
        log: in any form that `rmetric watch` reads; it may not be there yet.
        told: called with the words of each alarm that is news.
        wrong: called with why it cannot be followed.
        seconds: between two looks.
    """
    from rmetric._util.errors import LogError
    from rmetric.detectors import make_detector
    from rmetric.readers.follow import Follower
    from rmetric.readers.watch import Watch, Word

    past = True

    def tell(word: Word) -> None:
        if word.urgent and not past:
            told(f"{word.id}: {word.words}")

    def caught_up(_log: object) -> None:
        nonlocal past
        past = False

    past = log.exists()
    watch = Watch(lambda: make_detector("calibrated"), tell)
    follower = Follower(
        log, watch.take, wrong, wait=inf, poll=seconds,
        begun_again=watch.begin_again, caught_up=caught_up,
    )  # fmt: skip

    def run() -> None:
        try:
            follower.run()
        except LogError as error:
            wrong(str(error))

    threading.Thread(target=run, name="alarms", daemon=True).start()
    return follower.stop
