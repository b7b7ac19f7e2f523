"""Reader of the jobs in tests/diagnosis/corpus, whose README describes them, and of tables."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

from rmetric._util.lazy import read_yaml

CORPUS = Path(__file__).parents[2] / "tests" / "diagnosis" / "corpus"
#: What lines, entries and names of files state.
TABLES = read_yaml(CORPUS.with_name("lines.yaml"))
LOOP = "%%"
#: A first value, its steps by the counters of loops, and where it begins again: <00+2n%60>.
VARIED = re.compile(
    r"<((?:\d{4}-\d\d-\d\d[ T])?\d\d:\d\d:\d\d|\d+(?:\.\d+)?)((?:[+-][\d.]*[a-z])+)(?:%(\d+))?>"
)
STEP = re.compile(r"([+-])([\d.]*)([a-z])")


@dataclass(frozen=True)
class CorpusJob:
    """A job's logs, and what is right of its diagnosis.

    Attributes:
        files: path within the job's folder -> text.
        healthy: the same of a job that succeeded, which is given beside it.
        attempt: the one that is diagnosed; None for the last.
        miss: what is stated instead, where the diagnosis is known to be wrong; "" else.
    """

    name: str
    files: Mapping[str, str]
    expected: Mapping[str, Any]
    healthy: Mapping[str, str] = field(default_factory=dict)
    attempt: int | None = None
    note: str = ""
    miss: str = ""
    topic: str = ""


def corpus() -> Iterator[CorpusJob]:
    for path in sorted(CORPUS.glob("*.yaml")):
        yield from (CorpusJob(**entry, topic=path.stem) for entry in read_yaml(path))


def write(files: Mapping[str, str], folder: Path) -> Path:
    """Write the files of a job with their loops expanded."""
    for name, text in expanded(files).items():
        (path := folder / name).parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text.encode())
    return folder


def expanded(files: Mapping[str, str]) -> dict[str, str]:
    """Files with the loops in their names and texts written out."""
    written = {}
    for name, text in files.items():
        pattern, loop, times = name.partition(f" {LOOP} ")
        counters = [{times[-1]: at} for at in range(int(times[:-2]))] if loop else [{}]
        for each in counters:
            (path,) = _lines([pattern], each)
            written[path] = "\n".join(_lines(text.split("\n"), each))
    return written


def _lines(lines: list[str], counters: Mapping[str, int]) -> Iterator[str]:
    at = 0
    while at < len(lines):
        line = lines[at]
        at += 1
        if not line.startswith(LOOP):
            yield VARIED.sub(lambda found: _value(found, counters), line) if counters else line
            continue
        depth, begin = 1, at
        while depth:
            depth += -1 if lines[at] == LOOP else lines[at].startswith(LOOP)
            at += 1
        words = line.split()[1:]
        loops = [(int(times), name) for times, name in zip(words[::2], words[1::2], strict=True)]
        yield from _repeated(lines[begin : at - 1], loops, counters)


def _repeated(
    body: list[str], loops: list[tuple[int, str]], counters: Mapping[str, int]
) -> Iterator[str]:
    if not loops:
        yield from _lines(body, counters)
        return
    (times, name), *inner = loops
    for at in range(times):
        yield from _repeated(body, inner, {**counters, name: at})


def _value(found: re.Match[str], counters: Mapping[str, int]) -> str:
    first, steps, again = found.groups()
    more = Decimal(0)
    for sign, step, name in STEP.findall(steps):
        if name not in counters:
            return found[0]
        more += int(f"{sign}1") * Decimal(step or 1) * counters[name]
    if ":" in first:
        form = f"%Y-%m-%d{first[10]}%H:%M:%S" if "-" in first else "%H:%M:%S"
        return (datetime.strptime(first, form) + timedelta(seconds=int(more))).strftime(form)
    value = Decimal(first) + more
    value = value % int(again) if again else value
    digits = len(first.partition(".")[2])
    width = f"0{len(first)}" if first[0] == "0" else ""
    return f"{value:{width}.{digits}f}"
