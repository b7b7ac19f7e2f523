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

import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import regex
import yaml

from rmetric._util.strict_json import refused, shown
from rmetric.diagnosis.signature import CHOICES, Signature

#: Roles after which nobody has anything to do.
QUIET_ROLES = ("success", "harmless")
_FAMILIES = Path(__file__).with_name("families.yaml")
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
        raise SignatureError(f"{path}: found {shown(entries)}, expected a list of signatures")
    for place, entry in enumerate(entries, 1):
        name = entry.get("id") if isinstance(entry, dict) else None
        yield signature_of(path, f"entry {place}" if name is None else name, entry)


def signature_of(path: Path, name: Any, entry: Any) -> Signature:
    """The signature of a mapping of fields. Raises SignatureError, which names path and name."""
    try:
        one = msgspec.convert(entry, Signature)
    except msgspec.ValidationError as error:
        why, field = refused(entry, error), re.search(r"\$\.(\w+)", str(error))
        if "enum value" in why or "unknown field" in why:
            words = CHOICES[field[1]] if field else Signature.__struct_fields__
            why += f"; accepted are {', '.join(map(repr, words))}"
        raise SignatureError(f"{path}: {name}: {why}") from None
    if (one.role in QUIET_ROLES) == bool(one.actor) or bool(one.actor) > bool(one.to_do):
        accepted = f"both, or neither for {' and '.join(QUIET_ROLES)}"
        raise wrong(path, name, "actor, to_do", f"{one.actor!r}, {list(one.to_do)}", accepted)
    traits = (*one.traits, *traits_of(one.family))
    stage = families().get(one.family, {}).get("stage", "")
    return msgspec.structs.replace(one, traits=traits, usual_stage=stage)


@cache
def families() -> dict[str, dict[str, Any]]:
    """Family -> `traits` and `stage` of its signatures."""
    read: dict[str, dict[str, Any]] = yaml.safe_load(_FAMILIES.read_text(encoding="utf-8"))
    return read


def traits_of(family: str) -> tuple[str, ...]:
    """What holds of all signatures of a family."""
    return tuple(families().get(family, {}).get("traits", ()))


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
