"""The fault library: signature files of YAML, read and checked, and their search in a log.

A signature is a mapping of the fields of `Signature`, and no others; docs/diagnosis.md has one.

Patterns are those of the package `regex`, case-sensitive without (?i); ^ and $ stand for
the ends of each line of an entry; a dot does not match a line break. A named group becomes a
field of the match. Groups with a fixed meaning:

    rank, node, host   the one that the entry implicates; "2, 3" for several ranks
    last_rank          the one that wrote it, or that was first to report another's failure
    remote_rank, remote_host, port   the other end of a connection that failed
    local_host, local_device, remote_device   the two ends of a link of devices
    gpu, xid, device, nic            a part of the machine, as the text names it
    path, code, signal, step         a file, an error's number or name, a signal, a step

Gates are sought first: see `Signature`. They stand in one of the lines that a pattern matches.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Collection, Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import regex
import yaml

from rmetric._util.lazy import read_yaml
from rmetric._util.strict_json import refused, shown
from rmetric.diagnosis.reading import FRAGMENT
from rmetric.diagnosis.reading.text import WordIndex
from rmetric.diagnosis.signature import CHOICES, Signature
from rmetric.telemetry.xid import TABLE, read_table

#: Roles after which nobody has anything to do.
QUIET_ROLES = ("success", "harmless")
#: Seconds of the processor that one pattern may take on one entry; a sound one takes microseconds.
PATTERN_SECONDS = 0.05
#: Text before an exception that a logger, a log service or a launcher's report repeats: a time,
#: perhaps a bracket, and in an indented traceback the indentation.
_DATE = r"[\[(]?\d+[-/]\d+[-/]\d+[T _-]\d+:\d+:\d+(?:[.,]\d+)*(?:Z|[+-]\d+:?\d*)?[\])]?[ \t|:-]+"
_STAMPED = re.compile(rf"^{_DATE}", re.MULTILINE)
_INDENT = re.compile(r"^[ \t]+(?=(?:[A-Za-z_]\w*\.)*_?[A-Z]\w*(?:Error|Exception)\b)", re.MULTILINE)
_SET_IN_TRACE = re.compile(r"\S.*Traceback \(most recent|^\s+Traceback \(", re.MULTILINE)
#: From this rank on a signature is more specific than the type of an exception.
SPECIFIC = 6
#: Forms of entries whose gates are remembered.
FORMS = 4096
#: A look, a border or a name, which go; an atom and how often it comes; the same of a group.
_TOKEN = regex.compile(
    r"\(\?<?[=!](?<in>(?:\\.|\[(?:\\.|[^\]\\])*\]|[^()\[\\]|\((?&in)\))*)\)|\\[bB]"
    r"|(?<named>\(\?P?<\w+>)"
    r"|(?<atom>\[\^?\]?(?:\\.|[^\]\\])*\]|\\x\w\w|\\u\w{4}|\\.|[.\d])"
    r"(?<times>[+*?]|\{(?:\d*,)?(?<most>\d*)\})?|(?<other>\{[\d,]*\})"
)
#: Atoms that may take a digit.
_TAKES_DIGITS = regex.compile(r"\\[dwS1-9]|[.\d]$|\[(?:\^|.*(?:\d|\\[dwWDS]|[ -/]-[^\]]))")
_ROLE_ORDER = {role: place for place, role in enumerate(CHOICES["role"])}

Matches = list[tuple[Signature, dict[str, str]]]


class SignatureError(ValueError):
    """A signature file that cannot be used; names the file, the signature and the field."""


def form_of(text: str) -> bytes:
    """A text as gates are sought in it: lower case (of ASCII) and without digits."""
    return text.encode("utf-8", "replace").lower().translate(None, b"0123456789")


@cache  # when it is needed: no log needs more than a few
def compiled(pattern: str) -> regex.Pattern[str]:
    """Raises regex.error."""
    return regex.compile(pattern, regex.MULTILINE)


def read(path: Path) -> Iterator[Signature]:
    """The signatures of one file, without their examples tried (`check`).

    Raises SignatureError: not YAML, not a list, an unknown, missing or mistyped field.
    """
    try:
        entries = read_yaml(path)
    # A date that is none or a number of thousands of digits is a plain ValueError.
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise SignatureError(f"{path}: cannot be read as YAML: {error}") from None
    if not isinstance(entries, list):
        raise SignatureError(f"{path}: found {shown(entries)}, expected a list of signatures")
    for place, entry in enumerate(entries, 1):
        name = entry.get("id") if isinstance(entry, dict) else None
        yield signature_of(path, f"entry {place}" if name is None else name, entry)


def signature_of(path: Path, name: Any, entry: Any) -> Signature:
    """The signature of a mapping of fields. Raises SignatureError, which names path and name."""
    try:
        fault = msgspec.convert(entry, Signature)
    except msgspec.ValidationError as error:
        why, field = refused(entry, error), re.search(r"\$\.(\w+)", str(error))
        if "enum value" in why or "unknown field" in why:
            words = CHOICES[field[1]] if field else Signature.__struct_fields__
            why += f"; accepted are {', '.join(map(repr, words))}"
        raise SignatureError(f"{path}: {name}: {why}") from None
    if (fault.role in QUIET_ROLES) == bool(fault.actor) or bool(fault.actor) > bool(fault.to_do):
        accepted = f"both, or neither for {' and '.join(QUIET_ROLES)}"
        raise wrong(path, name, "actor, to_do", f"{fault.actor!r}, {list(fault.to_do)}", accepted)
    traits, stage = traits_of(fault.family), families().get(fault.family, {}).get("stage", "")
    return msgspec.structs.replace(fault, traits=(*fault.traits, *traits), usual_stage=stage)


@cache
def families() -> dict[str, dict[str, Any]]:
    """Family -> `traits` and `stage` of its signatures."""
    return dict(read_yaml(Path(__file__).with_name("families.yaml")))


def traits_of(family: str) -> tuple[str, ...]:
    """What holds of all signatures of a family."""
    return tuple(families().get(family, {}).get("traits", ()))


def check(path: Path, fault: Signature) -> None:
    """Try a signature's patterns and gates on its own examples. Raises SignatureError."""
    found: dict[str, list[Any]] = {text: [] for text in ("", *fault.matches, *fault.misses)}
    for pattern in fault.patterns:
        try:
            for text, matches in found.items():
                if match := compiled(pattern).search(text, timeout=1.0):
                    matches.append(match)
        except regex.error as why:
            raise wrong(path, fault.id, "patterns", f"{pattern!r} ({why})", "a pattern") from None
        except TimeoutError:
            accepted = "one that ends on the signature's own examples within a second"
            raise wrong(path, fault.id, "patterns", repr(pattern), accepted) from None
        if found[""]:
            raise wrong(path, fault.id, "patterns", repr(pattern), "one that needs some text")
    for text in fault.matches:
        if not found[text]:
            raise wrong(path, fault.id, "matches", repr(text), "a text that a pattern matches")
        for match in found[text]:
            before, after = text[: match.start()], text[match.end() :]
            lines = form_of(before.rpartition("\n")[2] + match[0] + after.partition("\n")[0])
            if not any(gate.encode() in lines for gate in fault.gates):
                raise wrong(path, fault.id, "gates", repr(text), "a gate in a line of this example")
    for text in fault.misses:
        if found[text]:
            raise wrong(path, fault.id, "misses", repr(text), "a text that no pattern matches")


def wrong(path: Path, name: Any, key: Any, found: str, accepted: str) -> SignatureError:
    """The error that names file, signature and field."""
    return SignatureError(f"{path}: {name}: {key}: found {found}, accepted is {accepted}")


def _of_xid(table: dict[str, Any], n: int, given: dict[str, Any]) -> dict[str, Any]:
    """The fields of a signature, by xid.yaml and what is given of an Xid."""
    words = {"n": str(n), "next": str(n + 1), "example": given["example"]}
    entry = {**table["fields"], **given}
    entry |= {"id": f"xid_{n}_{given['id']}", "title": f"{given['title']} (Xid {n})"}
    for key, texts in table["every"].items():
        more = table["cause"].get(key, []) if entry["role"] == "cause" else []
        entry[key] = [FRAGMENT.sub(lambda found: words[found[1]], text) for text in texts + more]
    del entry["example"]
    return entry


@cache
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


class SignatureLibrary:
    """Signatures, each with the file that it is from, found by gate and pattern.

    Raises SignatureError for an id given twice.
    """

    def __init__(self, signatures: Iterable[tuple[Signature, Path]]) -> None:
        self._by_id: dict[str, Signature] = {}
        self.files: dict[str, Path] = {}
        for fault, path in signatures:
            if fault.id in self._by_id:
                accepted = f"an id of its own: {self.files[fault.id]} has it"
                raise wrong(path, fault.id, "id", "one given twice", accepted)
            self._by_id[fault.id] = fault
            self.files[fault.id] = path
        self._gates = WordIndex((gate.encode(), fault.id) for fault in self for gate in fault.gates)
        self._patterns = {fault.id: fault.patterns for fault in self}
        self._of_form: dict[bytes, list[str]] = {}

    @classmethod
    @cache
    def shipped(cls) -> SignatureLibrary:
        """The signatures that come with rmetric, read once by a process."""
        return cls(_shipped())

    @classmethod
    def load(cls, paths: Iterable[Path | str]) -> SignatureLibrary:
        """The shipped signatures and those of the user's files, tried on their examples.

        Raises SignatureError.
        """
        own = [(fault, path) for path in map(Path, paths) for fault in read(path)]
        for fault, path in own:
            check(path, fault)
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
        """The signatures that match an entry of a level, with their fields; the best first.

        The higher rank is the better, and of equals the role that vocabulary.yaml has earlier.
        Where a harmless one matches, only harmless ones are returned. An entry of which nothing
        specific is known is read once more without the times that its lines begin with.
        """
        found = self._found(text, level)
        if (not found or found[0][0].rank < SPECIFIC) and (bare := _bare(text)) != text:
            return self._found(bare, level) or found
        return found

    def _found(self, text: str, level: str) -> Matches:
        candidates = self._candidates(form_of(text), level)
        fields = [(fault, self._fields(fault, text)) for fault in candidates]
        found = [(fault, groups) for fault, groups in fields if groups is not None]
        harmless = [pair for pair in found if pair[0].role == "harmless"]
        return sorted(
            harmless or found,
            key=lambda pair: (-pair[0].rank, _ROLE_ORDER[pair[0].role], pair[0].id),
        )

    def may_match(self, plain: str, level: str = "") -> bool:
        """Return False only if no signature matches a line, in `plain` with "0" for each number."""
        try:
            return any(
                compiled(any_digits(pattern)).search(way.replace("0", ""), timeout=PATTERN_SECONDS)
                for way in {plain, _bare(plain)}
                for fault in self._candidates(form_of(way), level)
                for pattern in self._patterns[fault.id]
            )
        except TimeoutError:
            return True

    def _candidates(self, form: bytes, level: str) -> list[Signature]:
        """Those with a gate in the form, by id."""
        signatures = (self._by_id[id] for id in self._ids(form))
        return [fault for fault in signatures if not fault.levels or level in fault.levels]

    def _ids(self, form: bytes, words: Collection[bytes] | None = None) -> list[str]:
        ids = self._of_form.get(form)
        if ids is None:
            ids = sorted(set(self._gates.items(form, words)))
            if len(self._of_form) >= FORMS:
                self._of_form.clear()
            self._of_form[form] = ids
        return ids

    def _fields(self, fault: Signature, text: str) -> dict[str, str] | None:
        try:
            for pattern in self._patterns[fault.id]:
                if match := compiled(pattern).search(text, timeout=PATTERN_SECONDS):
                    return {key: value for key, value in match.groupdict().items() if value}
        except TimeoutError:
            self._patterns[fault.id] = ()
            why = f"a pattern took more than {PATTERN_SECONDS} s on one entry"
            warnings.warn(f"{self.files[fault.id]}: {fault.id}: switched off: {why}", stacklevel=3)
        return None


def _bare(text: str) -> str:
    """An entry without the times before its lines, nor spaces before a set-in exception."""
    text = _STAMPED.sub("", text)
    traced = "Traceback (" in text and _SET_IN_TRACE.search(text)
    return _INDENT.sub("", text) if traced else text


def _shipped() -> Iterator[tuple[Signature, Path]]:
    for path in sorted(Path(__file__).with_name("signatures").glob("*.yaml")):
        yield from ((fault, path) for fault in read(path))
    table = read_yaml(Path(__file__).with_name("xid.yaml"))
    for entry in read_table():
        if "signature" in entry:
            fields = _of_xid(table, entry["number"], entry["signature"])
            yield signature_of(TABLE, fields["id"], fields), TABLE
