"""Find the log files of a job among files and folders, and leave out non-log files.

Dumps and stacks beside the logs, which state where ranks are, are read here.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path

from rmetric._util.durable import PACKED, PACKED_SUFFIXES, refuse_special, unpacked
from rmetric._util.errors import LogError
from rmetric._util.lazy import read_yaml
from rmetric.diagnosis.patterns.recorder import Dump, is_dump, read_dump
from rmetric.diagnosis.patterns.stacks import Stack, holds_stacks, is_stack_dump, read_stacks
from rmetric.diagnosis.reading.file_names import ATTEMPT, identify_files, natural
from rmetric.diagnosis.reading.records import Export
from rmetric.diagnosis.reading.source import LogSource, unwrapped, utf16

#: Bytes of a file's beginning by which its kind is recognised, and of one beside the logs.
_SNIFFED, _SNIFFED_BESIDE = 1 << 16, 4096
#: Bytes that are read of stacks.
_MOST_BESIDE = 1 << 26
#: Non-log files, by their names.
_OTHER = read_yaml(Path(__file__).with_name("input_files.yaml"))
_KINDS: dict[str, str] = {
    suffix: kind for kind, suffixes in _OTHER["suffixes"].items() for suffix in suffixes
}
_TABLES = _KINDS["csv"]
_NAMES = re.compile(_OTHER["names"])
_MAGIC = (b"\x89PNG", b"PK\x03\x04", b"\x7fELF", b"\x80\x02", b"\x80\x04", b"BZh", b"\xfd7zXZ")
_CONTROL_BYTES = bytes(set(range(32)) - set(b"\t\n\v\f\r\b\x07\x1b")) + b"\x7f"
#: How a job ended, in the description that a managed service or a cluster gives of it.
_ENDED = re.compile(
    rb"\bJOB_STATE_(?:FAILED|CANCELLED|EXPIRED|SUCCEEDED)\b|\bFailureReason\b"
    rb"|\b(?:lastTerminationState|containerStatuses)\b|\bBackoffLimitExceeded\b"
)
#: A run of the project's own: a log of numbers, which `rmetric replay` reads.
_OWN = re.compile(rb'\s*\{[^\n]*"event": ?"(?:EXPERIMENT_START|METRICS)"')


class LogFiles:
    """Log files sorted by name, and notes on files left out.

    Attributes:
        auxiliary: flight recorder dumps and stacks, which patterns/ reads.
        tables: files of settings, read where there is no log.
        left_out: kind -> number of files.
    """

    def __init__(self) -> None:
        self.sources, self.auxiliary, self.tables = [list[LogSource]() for _ in range(3)]
        self.notes: list[str] = []
        self.left_out: Counter[str] = Counter()

    def add(self, path: Path, name: str) -> None:
        """A file of a folder."""
        kind = other_by_name(path)
        if not kind or path.suffix[1:] in _OTHER["may be logs"]:
            try:
                kind = self._add(*_opened(path, name), kind)
            except LogError as error:
                self.notes.append(str(error))
                return
        self.left_out += Counter([kind] if kind else [])

    def _add(self, source: LogSource, head: bytes, kind: str) -> str:
        """Take a file of a folder; return its kind where it is left out."""
        if _is_auxiliary(head):
            self.auxiliary.append(source)
            return ""
        if holds_stacks(head):  # in notes, which are a log too
            self.auxiliary.append(replace(source))
        by_content = other_by_content(head)
        if kind == _TABLES and (Export.of(head) or _ENDED.search(head)):
            kind = ""
        elif kind == _TABLES and not by_content:
            self.tables.append(source)
        if not (kind or by_content):
            self.sources.append(source)
        return kind or by_content

    def add_named(self, path: Path) -> None:
        """A file that is named: it is read whatever its suffix."""
        source, head = _opened(path, str(path))
        auxiliary = _is_auxiliary(head)
        if not auxiliary and (kind := other_by_content(head)):
            raise LogError(path, None, f"not a text log but {kind}; text, {PACKED} are accepted")
        (self.auxiliary if auxiliary else self.sources).append(source)

    def files_below(self, folder: Path) -> Iterator[Path]:
        """Files, through links too; a folder that several links lead to is entered once."""
        entered: set[tuple[int, int]] = set()

        def refused(error: OSError) -> None:
            self.notes.append(f"{error.filename}: cannot be read: {error.strerror}")

        for where, below, names in os.walk(folder, followlinks=True, onerror=refused):
            seen = Path(where).stat()
            place = seen.st_dev, seen.st_ino
            known = place in entered
            try:
                refuse_special(where)
            except LogError as error:
                self.notes.append(str(error))
                known = True
            entered.add(place)
            below[:] = [] if known else sorted(name for name in below if not name.startswith("."))
            paths = (Path(where, name) for name in sorted(names) if not name.startswith("."))
            yield from filter(Path.is_file, () if known else paths)


def find(paths: Sequence[str | Path]) -> LogFiles:
    """The logs among files and folders.

    A file that is named is read whatever its suffix. Of a folder, and those below, all text is
    read that is not known to be something else; tables only where there is no other. One content
    is read once, unless the files' names state different ranks, nodes or attempts.

    Raises LogError: a path does not exist or cannot be read, a named file is binary, or nothing is
    left to read.
    """
    found = LogFiles()
    for path in map(Path, paths):
        refuse_special(path)
        if path.is_dir():
            # Of several folders the files may have one name.
            above = path if len(paths) > 1 else Path()
            for file in found.files_below(path):
                found.add(file, str(above / file.relative_to(path)))
        else:
            found.add_named(path)
    if not found.sources and not found.auxiliary:  # as collectors of logs export them
        found.sources = found.tables
        found.left_out -= Counter({_TABLES: len(found.tables)})
    for some in (found.auxiliary, found.sources):
        some.sort(key=lambda source: (natural(source.name), source.name))
        if some:
            _identify(some, paths)
    found.sources = _once(found.sources, found.notes)
    if found.left_out:
        listed = ", ".join(f"{count} {kind}" for kind, count in sorted(found.left_out.items()))
        found.notes.append(f"non-log files were left out: {listed}")
    if not found.sources and not found.auxiliary:
        why = "; ".join(found.notes) or "no files"
        why = f"no text log to read here ({why}); accepted are text files, {PACKED} of them"
        raise LogError(", ".join(map(str, paths)) or "no path", None, why)
    return found


def _is_auxiliary(head: bytes) -> bool:
    return is_dump(head) or is_stack_dump(head)


def _opened(path: Path, name: str) -> tuple[LogSource, bytes]:
    """A file and its beginning, by which its kind is recognised."""
    try:
        source = LogSource(path=path, name=name, size=path.stat().st_size)
    except OSError as error:
        raise LogError(path, None, f"cannot be read: {error.strerror}") from None
    return source, b"".join(islice(unpacked(path, _SNIFFED // 2, [], may_be_empty=True), 2))


def _identify(sources: list[LogSource], paths: Sequence[str | Path]) -> None:
    """Set ranks and nodes by the files' names, below the folder that all of them are in."""
    given = [Path(path).absolute() for path in paths]
    base = os.path.commonpath([path if path.is_dir() else path.parent for path in given])
    names = [source.path.absolute().relative_to(base).as_posix() for source in sources]
    for source, file in zip(sources, identify_files(names), strict=True):
        source.rank, source.node, source.local_rank = file.rank, file.node, file.local_rank


def _once(sources: list[LogSource], notes: list[str]) -> list[LogSource]:
    """Without files whose content another has; the file itself stays rather than a link to it."""
    sizes = Counter(source.size for source in sources)
    first: dict[tuple[object, ...], LogSource] = {}
    copies: dict[int, str] = {}
    for source in sorted(sources, key=lambda source: source.path.is_symlink()):
        content: object = id(source)
        if source.size and sizes[source.size] > 1:
            digest = hashlib.blake2b()
            with source.path.open("rb") as file:
                while block := file.read(1 << 20):
                    digest.update(block)
            content = digest.digest()
        attempt = ATTEMPT.search(source.name)
        key = (source.rank, source.node, source.local_rank, attempt and attempt[1], content)
        if (original := first.setdefault(key, source)) is not source:
            copies[id(source)] = f"{source.name} has the content of {original.name}: read once"
    notes += [copies[id(source)] for source in sources if id(source) in copies]
    return [source for source in sources if id(source) not in copies]


def other_by_name(path: Path) -> str:
    """Kind of a non-log file by its name; "" if it may be a log."""
    name = path.stem if path.suffix in PACKED_SUFFIXES else path.name
    if _NAMES.fullmatch(name):
        return "documentation"
    return _KINDS.get(Path(name).suffix[1:].lower(), "")


def other_by_content(head: bytes) -> str:
    """Kind of a non-log file by its first unpacked bytes; "" if it may be a log."""
    if _OWN.match(head):
        return "logs of numbers, for rmetric replay"
    if utf16(head):
        return ""
    if head.startswith(_MAGIC) or (head[4:9] == b"\0\0\0\0{"):
        return "binary"
    # A hole in a text, where a log was cut while it was written to, is a run of zeros; other
    # control characters are rare in text and common in everything else.
    if b"\x1b" in head or b"\0" in head:
        head = re.sub(rb"\x1b\[[0-?]*[@-~]|\0{16,}", b"", head)
    control = len(head) - len(head.translate(None, _CONTROL_BYTES))
    return "binary" if control > 0.02 * len(head) else ""


@dataclass(kw_only=True)
class AuxiliaryFiles:
    """Content of the files beside the logs.

    Attributes:
        notes: files that could not be read.
    """

    dumps: list[Dump] = field(default_factory=list)
    stacks: list[Stack] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def read_auxiliary(files: Sequence[LogSource]) -> AuxiliaryFiles:
    """Read the files; one that cannot be read becomes a note."""
    found = AuxiliaryFiles()
    for source in files:
        try:
            with source.path.open("rb") as file:
                head = file.read(_SNIFFED_BESIDE)
                if is_dump(head):
                    found.dumps.append(read_dump(source.path, source.name))
                    continue
                content = unwrapped(head + file.read(_MOST_BESIDE - len(head)))
            text = content.decode("utf-8", "replace")
            found.stacks += read_stacks(text, source.name, source.rank, source.node)
        except LogError as error:
            found.notes.append(str(error))
        except OSError as error:
            found.notes.append(f"{source.name}: cannot be read: {error.strerror}")
    return found
