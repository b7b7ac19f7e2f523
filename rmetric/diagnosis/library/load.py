"""Match log entries against the library of fault signatures."""

from __future__ import annotations

import re
import warnings
from collections.abc import Collection, Iterable, Iterator
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import regex

from rmetric.diagnosis.library.files import check, compiled, form_of, read, read_xids, wrong
from rmetric.diagnosis.reading.text import WordIndex
from rmetric.diagnosis.signature import ROLES, Signature
from rmetric.telemetry.xid import TABLE

#: Seconds of the processor that one pattern may take on one entry; a sound one takes microseconds.
PATTERN_SECONDS = 0.05
#: Text before an exception that a logger, a log service or a launcher's report repeats: a time,
#: perhaps a bracket, and in an indented traceback the indentation.
_TIME = r"[\[(]?\d+[-/]\d+[-/]\d+[T _-]\d+:\d+:\d+(?:[.,]\d+)*(?:Z|[+-]\d+:?\d*)?[\])]?[ \t|:-]+"
_BEFORE = re.compile(rf"^{_TIME}", re.MULTILINE)
_SET_IN = re.compile(r"^[ \t]+(?=(?:[A-Za-z_]\w*\.)*_?[A-Z]\w*(?:Error|Exception)\b)", re.MULTILINE)
_SET_IN_TRACE = re.compile(r"\S.*Traceback \(most recent|^\s+Traceback \(", re.MULTILINE)
#: From this rank on a signature is more specific than the type of an exception.
SPECIFIC = 6
#: Forms of entries whose gates are remembered.
FORMS = 4096
_FOLDER = Path(__file__).parent / "signatures"
#: A look, a border or a name, which go; an atom and how often it comes; the same of a group.
_TOKEN = regex.compile(
    r"\(\?<?[=!](?<in>(?:\\.|\[(?:\\.|[^\]\\])*\]|[^()\[\\]|\((?&in)\))*)\)|\\[bB]"
    r"|(?<named>\(\?P?<\w+>)"
    r"|(?<atom>\[\^?\]?(?:\\.|[^\]\\])*\]|\\x\w\w|\\u\w{4}|\\.|[.\d])"
    r"(?<times>[+*?]|\{(?:\d*,)?(?<most>\d*)\})?|(?<other>\{[\d,]*\})"
)
#: Atoms that may take a digit.
_TAKES_DIGITS = regex.compile(r"\\[dwS1-9]|[.\d]$|\[(?:\^|.*(?:\d|\\[dwWDS]|[ -/]-[^\]]))")
_ROLE_ORDER = {role: place for place, role in enumerate(ROLES)}


def any_digits(pattern: str) -> str:
    """A looser pattern, for lines without their digits: what may take one may take nothing."""
    return str(_TOKEN.sub(_without_digits, pattern))


def _without_digits(token: Any) -> str:
    atom, times = token["atom"], token["times"] or ""
    if not atom:
        return "(?:" if token["named"] else token["other"] or ""
    if not _TAKES_DIGITS.match(atom):
        return str(token[0])
    if atom[0] == "\\" and atom[1].isdigit():
        return r"[\s\S]*"
    most = f"{{0,{token['most']}}}" if times[:1] == "{" else "*" if times in ("*", "+") else "?"
    return f"{atom}{most}"


class Pattern:
    """A pattern of a signature, compiled when it is needed: no log needs more than a few."""

    def __init__(self, text: str) -> None:
        self._text = text

    @cached_property
    def compiled(self) -> Any:
        return compiled(self._text)

    @cached_property
    def loose(self) -> Any:
        """It matches each line that the pattern matches, where that has lost its digits."""
        return compiled(any_digits(self._text))


Matches = list[tuple[Signature, dict[str, str]]]


class SignatureLibrary:
    """Signatures, each with the file that it is from, found by gate and pattern.

    Raises SignatureError for an id given twice.
    """

    def __init__(self, signatures: Iterable[tuple[Signature, Path]]) -> None:
        self._by_id: dict[str, Signature] = {}
        self.files: dict[str, Path] = {}
        for one, path in signatures:
            if one.id in self._by_id:
                accepted = f"an id of its own: {self.files[one.id]} has it"
                raise wrong(path, one.id, "id", "one given twice", accepted)
            self._by_id[one.id] = one
            self.files[one.id] = path
        self._gates = WordIndex((gate.encode(), one.id) for one in self for gate in one.gates)
        self._patterns = {one.id: tuple(map(Pattern, one.patterns)) for one in self}
        self._of_form: dict[bytes, list[str]] = {}

    @classmethod
    @cache
    def shipped(cls) -> SignatureLibrary:
        """The signatures that come with rmetric, read once by a process."""
        return cls(_shipped())

    @classmethod
    def load(cls, paths: Iterable[Path | str]) -> SignatureLibrary:
        """The shipped signatures and those of files of the user's, tried on their examples.

        Raises SignatureError, which names the file, the signature and the field.
        """
        own = []
        for path in map(Path, paths):
            for one in read(path):
                check(path, one)
                own.append((one, path))
        return cls([*_shipped(), *own])

    def __getitem__(self, id: str) -> Signature:
        return self._by_id[id]

    def __iter__(self) -> Iterator[Signature]:
        return iter(self._by_id.values())

    def __len__(self) -> int:
        return len(self._by_id)

    def gate(self, form: bytes, words: Collection[bytes] | None = None) -> bool:
        """Return False only if no entry with a line of this form (`form_of`) can match."""
        return bool(self._ids(form, words))

    def find(self, text: str, level: str = "") -> Matches:
        """The signatures that match an entry, with their fields; the best first.

        The higher rank is the better, and of equals the role that stands earlier in `ROLES`.
        Where a harmless one matches, only harmless ones are returned. An entry of which nothing
        specific is known is read once more without the times that its lines begin with.

        Args:
            text: one entry of a log; lines are joined by newlines.
            level: "error", "warning", "info" or "" as the entry states it.
        """
        found = self._found(text, level)
        if (not found or found[0][0].rank < SPECIFIC) and (bare := _bare(text)) != text:
            return self._found(bare, level) or found
        return found

    def _found(self, text: str, level: str) -> Matches:
        candidates = self._candidates(form_of(text), level)
        fields = [(one, self._fields(one, text)) for one in candidates]
        found = [(one, groups) for one, groups in fields if groups is not None]
        harmless = [pair for pair in found if pair[0].role == "harmless"]
        return sorted(
            harmless or found,
            key=lambda pair: (-pair[0].rank, _ROLE_ORDER[pair[0].role], pair[0].id),
        )

    def may_match(self, plain: str, level: str = "") -> bool:
        """Return False only if no signature matches an entry of one line, for any digits.

        Args:
            plain: the line with "0" for every number.
            level: as the entry states it.
        """
        try:
            return any(
                pattern.loose.search(way.replace("0", ""), timeout=PATTERN_SECONDS)
                for way in {plain, _bare(plain)}
                for one in self._candidates(form_of(way), level)
                for pattern in self._patterns[one.id]
            )
        except TimeoutError:
            return True

    def _candidates(self, form: bytes, level: str) -> list[Signature]:
        """Those with a gate in the form, by id."""
        signatures = (self._by_id[id] for id in self._ids(form))
        return [one for one in signatures if not one.levels or level in one.levels]

    def _ids(self, form: bytes, words: Collection[bytes] | None = None) -> list[str]:
        ids = self._of_form.get(form)
        if ids is None:
            ids = sorted(set(self._gates.items(form, words)))
            if len(self._of_form) >= FORMS:
                self._of_form.clear()
            self._of_form[form] = ids
        return ids

    def _fields(self, one: Signature, text: str) -> dict[str, str] | None:
        try:
            for pattern in self._patterns[one.id]:
                if match := pattern.compiled.search(text, timeout=PATTERN_SECONDS):
                    return {key: value for key, value in match.groupdict().items() if value}
        except TimeoutError:
            self._patterns[one.id] = ()
            taken = f"a pattern took more than {PATTERN_SECONDS} s on one entry"
            warnings.warn(f"{self.files[one.id]}: {one.id}: switched off: {taken}", stacklevel=3)
        return None


def _bare(text: str) -> str:
    """An entry without the times before its lines, nor spaces before a set-in exception."""
    text = _BEFORE.sub("", text)
    traced = "Traceback (" in text and _SET_IN_TRACE.search(text)
    return _SET_IN.sub("", text) if traced else text


def _shipped() -> Iterator[tuple[Signature, Path]]:
    for path in sorted(_FOLDER.glob("*.yaml")):
        yield from ((one, path) for one in read(path))
    yield from ((one, TABLE) for one in read_xids())
