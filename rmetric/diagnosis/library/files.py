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
from rmetric.telemetry.xid import TABLE, read_table

#: Roles after which nobody has anything to do.
QUIET_ROLES = ("success", "harmless")
_FAMILIES = Path(__file__).with_name("families.yaml")
_DIGITS = b"0123456789"
#: The fast loader of YAML, where the package has it.
LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
#: The driver's own line of an Xid is in the kernel's log; monitors repeat it in words of their own.
_DRIVER = r"\bXid \((?<gpu>(?:PCI:)?[0-9a-fA-F:.]+)\): "
_NUMBER = r"(?: (?:error|code|event))?(?:: |[ =:])(?<xid>{n})\b"
_LINE = "NVRM: Xid (PCI:0000:9b:00): "


class SignatureError(ValueError):
    """A signature file that cannot be used; names the file, the signature and the field."""


def form_of(text: str | bytes) -> bytes:
    """A text as gates see it: lower case (of ASCII) and without digits."""
    raw = text.encode("utf-8", "replace") if isinstance(text, str) else text
    return raw.lower().translate(None, _DIGITS)


def compiled(pattern: str) -> regex.Pattern[str]:
    """Raises regex.error."""
    return regex.compile(pattern, regex.MULTILINE)


def read(path: Path) -> Iterator[Signature]:
    """The signatures of one file, without their examples tried (`check`).

    Raises SignatureError: not YAML, not a list, an unknown, missing or mistyped field.
    """
    try:
        entries = yaml.load(path.read_text(encoding="utf-8"), LOADER)
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
    return dict(yaml.load(_FAMILIES.read_text(encoding="utf-8"), LOADER))


def traits_of(family: str) -> tuple[str, ...]:
    """What holds of all signatures of a family."""
    return tuple(families().get(family, {}).get("traits", ()))


def check(path: Path, one: Signature) -> None:
    """Try a signature's patterns and gates on its own examples.

    Raises SignatureError: a broken pattern, one that matches nothing at all, an example that is not
    matched, one that no gate finds, a near-miss that is matched.
    """

    def found(text: str) -> list[Any]:
        return [match for each in patterns if (match := searched(each, text))]

    def searched(pattern: Any, text: str) -> Any:
        try:
            return pattern.search(text, timeout=1.0)
        except TimeoutError:
            accepted = "one that ends on the signature's own examples within a second"
            raise wrong(path, one.id, "patterns", repr(pattern.pattern), accepted) from None

    patterns = []
    for pattern in one.patterns:
        try:
            patterns.append(compiled(pattern))
        except regex.error as error:
            raise wrong(path, one.id, "patterns", f"{pattern!r} ({error})", "a pattern") from None
    for match in found(""):
        accepted = "one that needs some text"
        raise wrong(path, one.id, "patterns", repr(match.re.pattern), accepted)
    for text in one.matches:
        if not (matches := found(text)):
            raise wrong(path, one.id, "matches", repr(text), "a text that a pattern matches")
        for match in matches:
            if not any(gate.encode() in line for line in _lines_of(match) for gate in one.gates):
                raise wrong(path, one.id, "gates", repr(text), "a gate in a line of this example")
    for text in one.misses:
        if found(text):
            raise wrong(path, one.id, "misses", repr(text), "a text that no pattern matches")


def _lines_of(match: Any) -> list[bytes]:
    """The lines that a match touches, as gates see them."""
    text = match.string
    start = text.rfind("\n", 0, match.start()) + 1
    end = text.find("\n", match.end())
    return [form_of(line) for line in text[start : end if end >= 0 else None].split("\n")]


def wrong(path: Path, name: Any, key: Any, found: str, accepted: str) -> SignatureError:
    """The error that names file, signature and field."""
    return SignatureError(f"{path}: {name}: {key}: found {found}, accepted is {accepted}")


def read_xids() -> Iterator[Signature]:
    """One signature for each entry of the Xids' table that has a `signature`."""
    for entry in read_table():
        if "signature" in entry:
            of_xid = _entry(entry["number"], dict(entry["signature"]))
            yield signature_of(TABLE, of_xid["id"], of_xid)


def _entry(n: int, given: dict[str, Any]) -> dict[str, Any]:
    """The fields of a signature, of which the table gives those in which Xids differ."""
    number, example = _NUMBER.format(n=n), given.pop("example")
    entry = {
        "family": "GPU hardware",
        "role": "cause",
        "actor": "hardware",
        "rank": 85,
        "gates": ["xid"],
        "source": "NVIDIA, Xid errors (catalogue in the GPU deployment documentation)",
        **given,
        "id": f"xid_{n}_{given['id']}",
        "title": f"{given['title']} (Xid {n})",
        "patterns": [
            rf"{_DRIVER}(?<xid>{n})\b",
            rf"(?i)\bXid(?:CriticalError: Xid)?{number}.{{0,60}}?(?:\bGPU|Device\b|nvidia)",
            rf"(?i)\b(?:GPU|nvidia)\b.{{0,60}}?\bXid{number}",
        ],
        "matches": [
            f"[Sun Feb 23 16:24:18 2025] {_LINE}{n}, {example}",
            f"XidCriticalError: Xid={n} on Device=GPU-5096, the device will go unhealthy.",
            f"health check: GPU 3 reported Xid error {n}",
        ],
        "misses": [
            f"{_LINE}{n + 1}, pid=4711, name=python",
            f"{_LINE}{n}0, pid={n}, name=python",
            f"postgres: transaction xid={n} committed",
            f"GPU 3: {n} processes, 0 Xid errors",
        ],
    }
    if entry["role"] == "cause":  # a later Xid may name it as its own cause
        entry["patterns"].append(rf"{_DRIVER}\d+\b.{{0,160}}caused by previous Xid (?<xid>{n})\b")
        entry["matches"].append(
            f"{_LINE}45, pid=4711, name=python, Ch 00000003 caused by previous Xid {n}"
        )
    return entry
