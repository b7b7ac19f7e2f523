"""Whether the diagnosis gives the same answer to logs that went through other tools.

    python -m studies.diagnosis_benchmark.transformed [--set 2 ... 26 | all]

Every log of a written job is transformed alike: quoted, numbered, cut and so on. The answers are
compared with those to the logs as they are; no label is used.
"""

from __future__ import annotations

import html
import re
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import pandas as pd
from tqdm import tqdm

from rmetric._util.errors import LogError, exit_with
from rmetric._util.options import add_jobs
from rmetric.diagnosis.decide import diagnose
from rmetric.diagnosis.report.result import Diagnosis
from studies.common.command import command_parser
from studies.common.processes import mapped
from studies.diagnosis_benchmark.written_sets import WrittenCase, add_sets, opened

RESULTS = Path(__file__).parent / "results"
#: Files that are not text logs, and stay as they are.
OTHERS = (".gz", ".json", ".jsonl", ".csv", ".tsv", ".pkl", ".xz", ".zst")

Lines = list[str]
#: Content of each file of a job, by its name.
Files = dict[str, bytes]
_ADDRESS = re.compile(r"\b\d{1,3}(?:\.\d{1,3}){3}\b")
_FOLDERS = re.compile(r"(?<![\w/])/(?:[\w.@-]+/){2,}")
_FRACTION = re.compile(r"(\d\d:\d\d:\d\d)[.,]\d+")


def each(change: Callable[[int, str], str]) -> Callable[[Lines], Lines]:
    """The change of every line, which gets the line's number."""
    return lambda lines: [change(at, line) for at, line in enumerate(lines, 1)]


#: Nothing is lost.
KEPT: dict[str, Callable[[Lines], Lines]] = {
    "quoted (`> `)": each(lambda at, line: f"> {line}"),
    "numbered by `cat -n`": each(lambda at, line: f"{at:6d}\t{line}"),
    "numbered by `grep -n`": each(lambda at, line: f"{at}:{line}"),
    "numbered in brackets": each(lambda at, line: f"[{at}] {line}"),
    "tagged `[stdout] `": each(lambda at, line: f"[stdout] {line}"),
    "set in by four spaces": each(lambda at, line: f"    {line}"),
    "coloured": each(lambda at, line: f"\x1b[32m{line}\x1b[0m"),
    "blanks at the ends of lines": each(lambda at, line: f"{line}   "),
    "Windows' line ends": each(lambda at, line: f"{line}\r"),
    "an empty line behind each": lambda lines: [text for line in lines for text in (line, "")],
    "HTML entities": each(lambda at, line: html.escape(line)),
}
#: Something is lost, which may change an answer rightly.
LOST: dict[str, Callable[[Lines], Lines]] = {
    "without indents": each(lambda at, line: line.lstrip()),
    "without fractions of seconds": each(lambda at, line: _FRACTION.sub(r"\1", line)),
    "folders hidden": each(lambda at, line: _FOLDERS.sub("/xxx/", line)),
    "addresses hidden": each(lambda at, line: _ADDRESS.sub("x.x.x.x", line)),
    "without the first 30 % of lines": lambda lines: lines[int(0.3 * len(lines)) :],
    "without the last three lines": lambda lines: lines[:-3],
}


def answer(files: Files, change: Callable[[Lines], Lines] | None = None) -> tuple[object, ...]:
    """Outcome, cause, stage, step and first suspect of some logs, changed."""
    try:
        found = diagnosed({name: changed(name, data, change) for name, data in files.items()})
    except LogError as error:
        return "refused", type(error).__name__
    place = found.nodes[0].name if found.nodes else None
    return found.outcome, found.cause, found.stage, found.iteration, place


def changed(name: str, data: bytes, change: Callable[[Lines], Lines] | None) -> bytes:
    if change is None or name.endswith(OTHERS) or not data:
        return data
    try:
        text = data.decode()
    except UnicodeDecodeError:  # a dump of the flight recorder
        return data
    end = "\n" if text.endswith("\n") else ""
    return ("\n".join(change(text.removesuffix("\n").split("\n"))) + end).encode()


def files_of(folder: Path) -> Files:
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in paths}


def diagnosed(files: Files) -> Diagnosis:
    """The diagnosis of some logs. Raises LogError where nothing is left to read."""
    with tempfile.TemporaryDirectory() as folder:
        for name, data in files.items():
            path = Path(folder, "logs", name)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
        return diagnose([Path(folder, "logs")], jobs=1)


def table(jobs: Sequence[WrittenCase], cores: int) -> pd.DataFrame:
    """A row for each transformation: how many answers differ from those to the logs as they are."""
    logs = [files_of(job.case.folder) for job in jobs]
    plain = mapped(answer, logs, processes=cores)
    rows = []
    for name, change in tqdm({**KEPT, **LOST}.items(), unit="transformation"):
        given = mapped(partial(answer, change=change), logs, processes=cores)
        pairs = list(zip(given, plain, strict=True))
        rows.append(
            {
                "Logs": name,
                "Jobs": len(jobs),
                "Another outcome or cause": sum(a[:2] != b[:2] for a, b in pairs),
                "Another answer in anything": sum(a != b for a, b in pairs),
                "Lost": "something" if name in LOST else "nothing",
            }
        )
    return pd.DataFrame(rows)


def command(
    name: str,
    description: str | None,
    made: Callable[[Sequence[WrittenCase], int], pd.DataFrame],
    arguments: Sequence[str] | None,
) -> int:
    """Print and write a table that `made` makes of written jobs, on so many cores."""
    parser = command_parser(f"diagnosis_benchmark.{name}", description)
    add_sets(parser)
    parser.add_argument("--out", type=Path, default=RESULTS / f"{name}.csv", metavar="FILE")
    add_jobs(parser)
    given = parser.parse_args(arguments)
    with opened(given.sets) as jobs:
        found = made(jobs, given.jobs)
    print(found.to_string(index=False))
    found.to_csv(given.out, index=False, lineterminator="\n")
    print(given.out)
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    return command("transformed", __doc__, table, arguments)


if __name__ == "__main__":
    exit_with(main)
