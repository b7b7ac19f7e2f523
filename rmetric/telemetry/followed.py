"""Verdicts that other nodes write into a run folder."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from rmetric.telemetry.lines import read_line
from rmetric.telemetry.sources import Verdicts
from rmetric.telemetry.verdict import GpuVerdict


@dataclass
class _File:
    """How far one file was read: its identity, and the place after its last whole line."""

    identity: int = 0
    place: int = 0


class FollowedVerdicts:
    """A `VerdictSource` that follows the files ``*.jsonl`` of a folder (see `lines`).

    `rmetric telemetry --run FOLDER` writes FOLDER/telemetry/NODE.jsonl; this reads what
    was added since the last poll. A line that is not whole yet waits; one that cannot be
    read is passed over and told in `problem`. A file that was cut short or replaced is
    read from its beginning; what it said before still holds for GPUs it no longer names.

    Args:
        folder: of the files; it may come later.
        without: names of nodes whose files are left alone, such as this one.

    Weakness: a node that died says nothing more, and its last verdicts stay; the
    heartbeats of its ranks tell that.
    """

    def __init__(self, folder: Path | str, without: Iterable[str] = ()) -> None:
        self._folder, self._without = Path(folder), frozenset(without)
        self._files: dict[Path, _File] = {}
        self._verdicts = Verdicts()
        self._closed = False
        self.problem: str | None = None

    def poll(self) -> tuple[GpuVerdict, ...]:
        if not self._closed:
            for path in sorted(self._folder.glob("*.jsonl")):
                if path.stem not in self._without:
                    self._follow(path)
        return self._verdicts.news()

    def verdicts(self) -> dict[str, GpuVerdict]:
        return dict(self._verdicts.latest)

    def close(self) -> None:
        self._closed = True

    def _follow(self, path: Path) -> None:
        state = self._files.setdefault(path, _File())
        try:
            for line in _new_lines(path, state):
                self._take(path, line)
        except OSError as error:
            self.problem = f"{path}: {error.strerror or error}"

    def _take(self, path: Path, line: bytes) -> None:
        try:
            entry = read_line(line)
        except ValueError as error:
            self.problem = f"{path}: {error}"
            return
        if entry is not None and isinstance(entry[1], GpuVerdict):
            self._verdicts.add(entry[1])


def _new_lines(path: Path, state: _File) -> list[bytes]:
    """The whole lines since the last call."""
    with open(path, "rb") as file:
        size = file.seek(0, 2)
        identity = path.stat().st_ino
        if identity != state.identity or size < state.place:
            state.identity, state.place = identity, 0
        file.seek(state.place)
        whole, end, _ = file.read().rpartition(b"\n")
    state.place += len(whole) + len(end)
    return whole.split(b"\n") if end else []
