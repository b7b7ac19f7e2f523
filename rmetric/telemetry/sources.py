"""Where verdicts on GPUs come from: one interface, whoever measured."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol

from rmetric.telemetry.judge import GONE, Judge
from rmetric.telemetry.lines import Heard
from rmetric.telemetry.reading import Reading
from rmetric.telemetry.risk import RiskConfig
from rmetric.telemetry.verdict import GpuVerdict


class VerdictSource(Protocol):
    """A source of verdicts. Nothing here waits or raises, whatever becomes of the GPUs."""

    @property
    def problem(self) -> str | None:
        """What keeps the source from knowing, in words; None while nothing does."""

    def poll(self) -> tuple[GpuVerdict, ...]:
        """The verdicts that are new or changed since the last poll, in their order.

        A verdict has changed when its `gist` has: level, action or rules.
        """

    def verdicts(self) -> dict[str, GpuVerdict]:
        """The latest verdict of each GPU, by its `key`."""

    def close(self) -> None:
        """Stop; a second call does nothing."""


class Verdicts:
    """The latest verdict of each GPU, and which of them are news.

    >>> verdicts = Verdicts()
    >>> verdicts.add(GpuVerdict(gpu=0, time=1.0)), verdicts.add(GpuVerdict(gpu=0, time=2.0))
    (True, False)
    >>> [verdict.time for verdict in verdicts.news()], verdicts.latest["0"].time
    ([1.0], 2.0)
    """

    def __init__(self) -> None:
        self.latest: dict[str, GpuVerdict] = {}
        self._news: list[GpuVerdict] = []

    def add(self, verdict: GpuVerdict) -> bool:
        """Take a verdict; whether it is news."""
        before = self.latest.get(verdict.key)
        self.latest[verdict.key] = verdict
        is_news = before is None or before.gist != verdict.gist
        if is_news:
            self._news.append(verdict)
        return is_news

    def news(self) -> tuple[GpuVerdict, ...]:
        """What was news since the last call."""
        news, self._news = tuple(self._news), []
        return news


class Judges:
    """Judges each GPU by what is heard of it, and keeps its verdicts and last reading.

    Args:
        config: of the score, see `RiskConfig`.
        record: called with the node and whatever is heard, before it is judged.
    """

    def __init__(
        self,
        config: RiskConfig | None = None,
        record: Callable[[str, Heard], None] | None = None,
    ) -> None:
        self.config = config or RiskConfig()
        self.verdicts = Verdicts()
        self.readings: dict[str, Reading] = {}
        self._record = record
        self._judges: dict[tuple[str, int], Judge] = {}

    def hear(self, node: str, heard: Heard) -> None:
        """Take the next reading or sign of a GPU."""
        if self._record is not None:
            self._record(node, heard)
        judge = self.judge(node, heard.gpu)
        if isinstance(heard, Reading):
            verdict = judge.take(heard)
            self.readings[verdict.key] = heard
        elif heard.kind == "driver_loaded":
            judge.renewed()
            return  # the reading that follows says what there is
        else:
            verdict = judge.happened(heard.kind, heard.time)
            if heard.kind in GONE:
                self.readings.pop(verdict.key, None)
        self.verdicts.add(verdict)

    def silent(self, node: str, gpu: int, time: float, why: str) -> None:
        """Nothing is heard of a GPU that was heard of before."""
        verdict = self.judge(node, gpu).silent(time, why)
        self.readings.pop(verdict.key, None)
        self.verdicts.add(verdict)

    def judge(self, node: str, gpu: int) -> Judge:
        key = (node, gpu)
        if key not in self._judges:
            self._judges[key] = Judge(gpu, node, self.config)
        return self._judges[key]


class AllSources:
    """Several sources as one, such as this node's GPUs and what other nodes write."""

    def __init__(self, sources: Iterable[VerdictSource]) -> None:
        self._sources = tuple(sources)

    @property
    def problem(self) -> str | None:
        return "; ".join(one.problem for one in self._sources if one.problem) or None

    def poll(self) -> tuple[GpuVerdict, ...]:
        return tuple(verdict for one in self._sources for verdict in one.poll())

    def verdicts(self) -> dict[str, GpuVerdict]:
        return {key: verdict for one in self._sources for key, verdict in one.verdicts().items()}

    def close(self) -> None:
        for one in self._sources:
            one.close()
