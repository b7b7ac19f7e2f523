"""Monitoring of a running launch: heartbeats, hangs, GPU verdicts and alarms of its log."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from math import inf
from pathlib import Path

from rmetric._util.errors import require
from rmetric.guard.run_folder import Heartbeat
from rmetric.guard.supervisor.allocation import Allocation, Gpu
from rmetric.guard.supervisor.journal import gpu_name
from rmetric.guard.supervisor.launch_failure import LaunchFailure, explain_hang, read_states
from rmetric.telemetry.lines import GpuVerdict
from rmetric.telemetry.sources import VerdictSource

#: Greatest age of a verdict that existed before the supervisor started, seconds.
FRESH_SECONDS = 600.0


@dataclass(frozen=True, kw_only=True)
class Timeouts:
    """Greatest times without a sign of life, seconds, by the last reported phase.

    Attributes:
        start: until training begins, and to exit once it finished. Until the first heartbeat
            output counts as a sign of life.
        hang: while training.
        saving: while saving, when heartbeats may stop.
        quiet: without new output, once there was some, for a program without heartbeats;
            None for no limit.
    """

    start: float = 600.0
    hang: float = 300.0
    saving: float = 1800.0
    quiet: float | None = None

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            above = value is None or 0 < value < inf
            require(name, value, above, "a number of seconds above 0")

    def of(self, phase: str) -> float:
        """Timeout of a phase, seconds."""
        return {"training": self.hang, "saving": self.saving}.get(phase, self.start)


class HeartbeatTracker:
    """Tracks the heartbeats and the output of one launch.

    A heartbeat counts when the content of its file changes, so that clocks of other nodes
    are never compared with the local one.

    Attributes:
        resumed: step at which training resumed; None before.
        resumed_at: time of that, on the heartbeat's clock.
        step: greatest step completed by any rank; None before the first.
        step_at: time of that, on the heartbeat's clock.
    """

    def __init__(self, timeouts: Timeouts, allocation: Allocation, log: Path, now: float) -> None:
        self.timeouts, self.allocation, self.log = timeouts, allocation, log
        self.resumed: int | None = None
        self.step: int | None = None
        self.resumed_at = self.step_at = 0.0
        self.beats: dict[int, Heartbeat] = {}
        self._seen: dict[int, float] = {}
        self._size, self._grew = 0, now

    def look(self, beats: Mapping[int, Heartbeat], now: float) -> LaunchFailure | None:
        """Process the current heartbeats; the failure if the launch hangs, else None."""
        for rank, beat in beats.items():
            if self.beats.get(rank) != beat:
                self._seen[rank] = now
        self.beats = self.beats | dict(beats)  # a file may be unreadable for a moment
        self._update_step()
        size = self._size
        with suppress(OSError):
            size = self.log.stat().st_size
        if size != self._size:
            self._size, self._grew = size, now
        return self._silent(now) or self._quiet(now)

    def restart(self, now: float) -> None:
        """Count all timeouts from now on, after a time without signs that was no hang."""
        self._seen = dict.fromkeys(self._seen, now)
        self._grew = now

    @property
    def last_sign(self) -> float | None:
        """Time of the oldest last heartbeat, seconds since the epoch; None without any."""
        return min((beat.time for beat in self.beats.values()), default=None)

    def _update_step(self) -> None:
        at_work = [beat for beat in self.beats.values() if beat.phase != "starting"]
        if not at_work:
            return
        first = min(at_work, key=lambda beat: (beat.time, beat.rank))
        if self.resumed is None:
            resumed = [beat.resumed for beat in at_work if beat.resumed is not None]
            self.resumed = min(resumed, default=min(beat.step for beat in at_work))
            self.resumed_at = first.time
        last = max(at_work, key=lambda beat: (beat.step, -beat.time))
        if self.step is None or last.step > self.step:
            self.step, self.step_at = last.step, last.time

    def _silent(self, now: float) -> LaunchFailure | None:
        """Failure if a rank, or a launch without heartbeats, gave no sign of life in time."""
        waits = [(now - self._seen[rank], self.timeouts.of(beat.phase))
                 for rank, beat in self.beats.items()]  # fmt: skip
        if not waits and not self.timeouts.quiet:
            # Without heartbeats only output distinguishes a start from a hang.
            waits = [(now - self._grew, self.timeouts.start)]
        for silent, limit in waits:
            if silent > limit:
                states = read_states(self.beats)
                return explain_hang(self.beats, silent, limit, self.allocation, states)
        return None

    def _quiet(self, now: float) -> LaunchFailure | None:
        if self.timeouts.quiet is None:
            return None
        silent = now - self._grew
        limit = self.timeouts.quiet if self._size else self.timeouts.start
        words = f"no output for {silent:.0f} s, the limit is {limit:g}"
        return LaunchFailure(kind="hang", words=words) if silent > limit else None


def fresh_verdicts(source: VerdictSource, now: float) -> list[GpuVerdict]:
    """Verdicts of one poll that are at most `FRESH_SECONDS` old; `now`: since the epoch."""
    source.poll()
    oldest = now - FRESH_SECONDS
    return [verdict for verdict in source.verdicts().values() if verdict.time >= oldest]


class VerdictDedup:
    """Drops verdicts that repeat the last level and action of their GPU.

    With a single node in use, a verdict without a node, or with the name of this machine
    (`here`), applies to it.
    """

    def __init__(self, nodes: Iterable[str], here: str) -> None:
        self._nodes, self._here = list(nodes), here
        self._last: dict[Gpu, tuple[str, str]] = {}

    def changed(self, verdict: GpuVerdict) -> Gpu | None:
        """GPU whose verdict changed; None for a repetition or an unknown node."""
        node = verdict.node
        if node not in self._nodes:
            if len(self._nodes) != 1 or node not in ("", self._here):
                return None
            node = self._nodes[0]
        gpu = (node, verdict.gpu)
        current = (verdict.level, verdict.action)
        if self._last.get(gpu, ("healthy", "none")) == current:
            return None
        self._last[gpu] = current
        return gpu


def words_of(verdict: GpuVerdict) -> str:
    """One-line text of a verdict."""
    name = gpu_name((verdict.node, verdict.gpu))
    level = "at risk" if verdict.level == "risk" else verdict.level
    return f"{name} is {level}: {'; '.join(verdict.reasons) or verdict.action}"[:500]


def poll_verdicts(
    source: VerdictSource,
    on_verdict: Callable[[GpuVerdict], None],
    on_problem: Callable[[str], None],
    seconds: float,
) -> Callable[[], None]:
    """Poll a source of verdicts on a thread of its own, because a driver may block.

    The polls are `seconds` apart. `on_problem` is called when the problem of the source
    changes. Returns a function that stops polling and closes the source.
    """
    stopped = threading.Event()

    def run() -> None:
        problem: str | None = None
        while not stopped.is_set():
            try:
                for verdict in source.poll():
                    on_verdict(verdict)
                before, problem = problem, source.problem
                if problem and problem != before:
                    on_problem(problem)
            except Exception as error:
                on_problem(f"GPU telemetry stopped: {type(error).__name__}: {error}")
                return
            stopped.wait(seconds)

    def stop() -> None:
        stopped.set()
        source.close()

    threading.Thread(target=run, name="verdicts", daemon=True).start()
    return stop


def follow_alarms(
    log: Path,
    on_alarm: Callable[[str], None],
    on_problem: Callable[[str], None],
    seconds: float,
) -> Callable[[], None]:
    """Follow a training log with the calibrated detector, on a thread.

    The log has any format that `rmetric watch` reads and may not exist yet. Alarms that it
    already contains are ignored. Returns a function that stops following.
    """
    from rmetric._util.errors import LogError
    from rmetric.detectors import make_detector
    from rmetric.replay.follow import Follower
    from rmetric.replay.watch import AlarmEvent, Watch

    past = log.exists()

    def report(event: AlarmEvent) -> None:
        if event.urgent and not past:
            on_alarm(f"{event.id}: {event.words}")

    def caught_up(_log: object) -> None:
        nonlocal past
        past = False

    watch = Watch(lambda: make_detector("calibrated"), report)
    follower = Follower(
        log, watch.take, on_problem, wait=inf, poll=seconds,
        begun_again=watch.begin_again, caught_up=caught_up,
    )  # fmt: skip

    def run() -> None:
        try:
            follower.run()
        except LogError as error:
            on_problem(str(error))

    threading.Thread(target=run, name="alarms", daemon=True).start()
    return follower.stop
