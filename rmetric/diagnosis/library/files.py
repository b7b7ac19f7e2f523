"""Signature files: YAML, a list of signatures, read and checked.

Each signature is a mapping of the fields of `Signature`, and no others:

    - id: gpu_fell_off_the_bus
      family: GPU hardware
      title: The GPU no longer answers on the PCIe bus
      role: cause
      actor: hardware
      rank: 80
      patterns: ['GPU at (?<gpu>PCI:[0-9a-f:.]+) has fallen off the bus']
      gates: [has fallen off the bus]
      to_do: [Drain the node., Power-cycle it and run the diagnostics of its maker.]
      source: NVIDIA, Xid errors
      matches: ['NVRM: GPU at PCI:0000:3b:00 has fallen off the bus.']
      misses: ['[monitor] no GPU has fallen off the bus']

Patterns are those of the package `regex`, case-sensitive without (?i); ^ and $ stand for
the ends of lines, for an entry may have many; a dot is no line break. A named group becomes a
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

from collections.abc import Iterator
from dataclasses import MISSING, fields
from functools import cache
from pathlib import Path
from typing import Any

import regex
import yaml

from rmetric.diagnosis.signature import ACTORS, LEVELS, ROLES, TRAITS, Signature

#: Roles after which nobody has anything to do.
QUIET_ROLES = ("success", "harmless")
_LISTS = (
    "patterns", "gates", "to_do", "levels", "matches", "misses", "traits", "taken_back_by",
    "reason_in",
)  # fmt: skip
_FAMILIES = Path(__file__).with_name("families.yaml")
_KINDS: dict[str, tuple[tuple[type, ...], str]] = {
    "rank": ((int,), "a whole number"),
    "confidence": ((int, float), "a number"),
    "survivable": ((bool,), "true or false"),
    "of_two": ((bool,), "true or false"),
}
_REQUIRED = {field.name for field in fields(Signature) if field.default is MISSING}
_FIELDS = {field.name for field in fields(Signature)} - {"usual_stage"}
_DIGITS = b"0123456789"


class SignatureError(ValueError):
    """A signature file that cannot be used; names the file, the signature and the field."""


def form_of(text: str | bytes) -> bytes:
    """A text as gates see it: lower case (of ASCII) and without digits.

    >>> form_of("NVRM: Xid (PCI:0000:3b:00): 79")
    b'nvrm: xid (pci::b:): '
    """
    raw = text.encode("utf-8", "replace") if isinstance(text, str) else text
    return raw.lower().translate(None, _DIGITS)


def compiled(pattern: str) -> regex.Pattern[str]:
    """Raises regex.error."""
    return regex.compile(pattern, regex.MULTILINE)


def read(path: Path) -> Iterator[Signature]:
    """The signatures of one file, checked one by one; see `check` for what is left.

    Raises:
        SignatureError: not YAML, not a list, an unknown, missing or mistyped field.
    """
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    try:
        entries = yaml.load(path.read_text(encoding="utf-8"), Loader=loader)
    # A date that is none or a number of thousands of digits is a plain ValueError.
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise SignatureError(f"{path}: cannot be read as YAML: {error}") from None
    if not isinstance(entries, list):
        raise SignatureError(f"{path}: found {_kind(entries)}, expected a list of signatures")
    for place, entry in enumerate(entries, 1):
        yield _signature(path, place, entry)


def _signature(path: Path, place: int, entry: Any) -> Signature:
    if not isinstance(entry, dict):
        raise SignatureError(
            f"{path}: entry {place}: found {_kind(entry)}, expected a mapping of fields"
        )
    name = entry.get("id", f"entry {place}")
    for key in sorted(set(entry) - _FIELDS, key=str):
        raise wrong(path, name, key, "no such field", f"one of {', '.join(sorted(_FIELDS))}")
    required = _REQUIRED - ({"to_do", "actor"} if entry.get("role") in QUIET_ROLES else set())
    for key in sorted(required - set(entry)):
        raise wrong(path, name, key, "nothing", "a value: the field is required")
    values = {key: _value(path, name, key, value) for key, value in entry.items()}
    family = values["family"]
    values["traits"] = (*values.get("traits", ()), *traits_of(family))
    values["usual_stage"] = families().get(family, {}).get("stage", "")
    signature = Signature(**{"to_do": (), "actor": "", **values})
    _check_values(path, signature)
    return signature


@cache
def families() -> dict[str, dict[str, Any]]:
    """Family -> `traits` and `stage` of its signatures."""
    read: dict[str, dict[str, Any]] = yaml.safe_load(_FAMILIES.read_text(encoding="utf-8"))
    return read


def traits_of(family: str) -> tuple[str, ...]:
    """What holds of all signatures of a family."""
    return tuple(families().get(family, {}).get("traits", ()))


def _value(path: Path, name: Any, key: str, value: Any) -> Any:
    if key in _LISTS:
        if not isinstance(value, list) or not all(isinstance(one, str) for one in value):
            raise wrong(path, name, key, repr(value)[:80], "a list of texts")
        return tuple(value)
    kinds, accepted = _KINDS.get(key, ((str,), "a text"))
    if type(value) not in kinds:  # exactly: True is an int
        raise wrong(path, name, key, repr(value)[:80], accepted)
    return value


def _check_values(path: Path, one: Signature) -> None:
    if not regex.fullmatch("[a-z][a-z0-9_]*", one.id):
        raise wrong(path, one.id, "id", repr(one.id), "lower-case words joined by underscores")
    if one.role not in ROLES:
        raise wrong(path, one.id, "role", repr(one.role), f"one of {', '.join(ROLES)}")
    actors = ("",) if one.role in QUIET_ROLES else ACTORS
    if one.actor not in actors:
        accepted = f"one of {', '.join(actors)}" if actors != ("",) else f"none for {one.role}"
        raise wrong(path, one.id, "actor", repr(one.actor), accepted)
    if not 0 <= one.confidence <= 1:
        raise wrong(path, one.id, "confidence", repr(one.confidence), "a number from 0 to 1")
    for level in one.levels:
        if level not in LEVELS:
            raise wrong(path, one.id, "levels", repr(level), f"of {', '.join(LEVELS)}")
    for trait in one.traits:
        if trait not in TRAITS:
            raise wrong(path, one.id, "traits", repr(trait), f"of {', '.join(TRAITS)}")
    for key in ("patterns", "gates", "title", "family", *(() if not one.actor else ("to_do",))):
        if not getattr(one, key):
            raise wrong(path, one.id, key, "nothing", "at least one")
    for gate in one.gates:
        if not gate.isascii() or form_of(gate).decode() != gate or len(gate.strip()) < 3:
            raise wrong(
                path, one.id, "gates", repr(gate), "3 or more characters, lower case, no digits"
            )


def check(path: Path, one: Signature) -> None:
    """Try a signature's patterns and gates on its own examples.

    Raises:
        SignatureError: a broken pattern, one that matches nothing at all, an example that is not
            matched, one that no gate finds, a near-miss that is matched.
    """
    patterns = []
    for pattern in one.patterns:
        try:
            patterns.append(compiled(pattern))
        except regex.error as error:
            raise wrong(path, one.id, "patterns", f"{pattern!r} ({error})", "a pattern") from None
        if patterns[-1].search("", timeout=1.0):
            raise wrong(path, one.id, "patterns", repr(pattern), "one that needs some text")
    for text in one.matches:
        found = [match for each in patterns if (match := _search(path, one, each, text))]
        if not found:
            raise wrong(path, one.id, "matches", repr(text), "a text that a pattern matches")
        for match in found:
            if not any(gate.encode() in line for line in _lines_of(match) for gate in one.gates):
                raise wrong(path, one.id, "gates", repr(text), "a gate in a line of this example")
    for text in one.misses:
        if any(_search(path, one, each, text) for each in patterns):
            raise wrong(path, one.id, "misses", repr(text), "a text that no pattern matches")


def _search(path: Path, one: Signature, pattern: Any, text: str) -> Any:
    try:
        return pattern.search(text, timeout=1.0)
    except TimeoutError:
        accepted = "one that ends on the signature's own examples within a second"
        raise wrong(path, one.id, "patterns", repr(pattern.pattern), accepted) from None


def _lines_of(match: Any) -> list[bytes]:
    """The lines that a match touches, as gates see them."""
    text = match.string
    start = text.rfind("\n", 0, match.start()) + 1
    end = text.find("\n", match.end())
    return [form_of(line) for line in text[start : end if end >= 0 else None].split("\n")]


def wrong(path: Path, name: Any, key: Any, found: str, accepted: str) -> SignatureError:
    """The error that names file, signature and field."""
    return SignatureError(f"{path}: {name}: {key}: found {found}, accepted is {accepted}")


def _kind(value: Any) -> str:
    return {dict: "a mapping", str: "a text", type(None): "nothing"}.get(
        type(value), type(value).__name__
    )
