"""Signatures of NVIDIA's Xids, made of the table by which telemetry judges them.

The driver's own line is in the kernel's log; monitors of GPUs repeat it in words of their own.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rmetric.diagnosis.library.files import signature_of
from rmetric.diagnosis.signature import Signature
from rmetric.telemetry.xid import TABLE, read_table

_DRIVER = r"\bXid \((?<gpu>(?:PCI:)?[0-9a-fA-F:.]+)\): "
_NUMBER = r"(?: (?:error|code|event))?(?:: |[ =:])(?<xid>{n})\b"
_LINE = "NVRM: Xid (PCI:0000:9b:00): "


def read_xids() -> Iterator[Signature]:
    """One signature for each entry of the table that has a `signature`.

    Raises:
        SignatureError: as `rmetric.diagnosis.library.files.read`.
    """
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
