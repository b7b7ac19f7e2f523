"""Xid numbers, the NVIDIA driver's error reports: what they mean and what they ask for."""

from __future__ import annotations

import re
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any

from rmetric._util.lazy import read_yaml

#: The one table of Xids, which the diagnosis reads too; its head has the sources.
TABLE = Path(__file__).with_name("xids.yaml")


@dataclass(frozen=True)
class Xid:
    """Entry of the Xid catalogue; level and action are those of `rmetric.telemetry.lines`."""

    number: int
    words: str
    about: str  # application (the program on the GPU), engine, memory, link, bus, firmware, notice
    level: str
    action: str


@cache
def read_table() -> list[dict[str, Any]]:
    """Entries of `TABLE`, as they stand there; read once, and not to be changed."""
    return list(read_yaml(TABLE)["xids"])


@cache
def catalogue() -> dict[int, Xid]:
    """Number -> entry, of those that telemetry judges."""
    return {
        entry["number"]: Xid(**{field.name: entry[field.name] for field in fields(Xid)})
        for entry in read_table()
        if "level" in entry
    }


def xid_entry(number: int) -> Xid:
    """Catalogue entry of an Xid; a `watch` entry for an unknown number.

    >>> xid_entry(79).action, xid_entry(12345).action
    ('reboot', 'watch')
    """
    unknown = Xid(number, "not in the catalogue", "notice", "healthy", "watch")
    return catalogue().get(number, unknown)


def xid_kind(xid: int) -> str:
    """Kind of the event of an Xid.

    One that a program brings upon itself is marked: `HardwareEvent.is_hardware` is False for it,
    and λ does not count it. Every other number is taken for the hardware's.

    >>> xid_kind(79), xid_kind(13)
    ('xid_79', 'application_xid_13')

    Source: NVIDIA, Xid errors (the catalogue in the GPU deployment documentation).
    Weakness: a broken GPU can raise 13 or 31 too.
    """
    return f"application_xid_{xid}" if xid_entry(xid).about == "application" else f"xid_{xid}"


def xid_of_kind(kind: str) -> int | None:
    """Inverse of `xid_kind`: the Xid number of a kind; None for other events.

    >>> xid_of_kind("application_xid_13"), xid_of_kind("gpu_lost")
    (13, None)
    """
    found = re.fullmatch(r"(?:application_)?xid_(\d+)", kind)
    return int(found[1]) if found else None
