"""Tables, figure and page from the committed rows."""

from __future__ import annotations

import json
import lzma
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rmetric.logs import write_atomically
from studies.common.markers import fill, parts
from studies.common.renderers import to_markdown, write_tables
from studies.common.table import Table
from studies.fault_lab.campaign import by_seed
from studies.fault_lab.design import campaign as design
from studies.fault_lab.rescue import tables
from studies.fault_lab.rescue.policies import NEWER, NOTHING, PARTS, POLICIES, RESCUE

PAGE = Path(__file__).resolve().parents[3] / "docs" / "rescue.md"
SEALED, OPEN = "rescue_sealed", "rescue_open"
#: The seeds of the laboratory itself, which were known before the policies were written.
OLD = "rescue_old"
#: The same seeds, known by then, with a detector that came after their opening.
NEWER_DETECTOR = "rescue_sealed_newer_detector"


def pack(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Write rows as compressed JSON lines; the same rows give the same bytes."""
    lines = b"".join(json.dumps(row, sort_keys=True).encode() + b"\n" for row in rows)
    write_atomically(path, [lzma.compress(lines)])


def unpack(path: Path) -> list[dict[str, Any]]:
    """The rows of `pack`. Raises FileNotFoundError where there are none."""
    return [json.loads(line) for line in lzma.decompress(path.read_bytes()).splitlines()]


def made(results: Path) -> list[Table]:
    """All tables."""
    sealed = unpack(results / f"{SEALED}.jsonl.xz")
    newer = results / f"{NEWER_DETECTOR}.jsonl.xz"
    both = sealed + (_renamed(unpack(newer)) if newer.exists() else [])
    ran = {row["policy"] for row in both}
    names = [name for name in (*POLICIES, NEWER) if name in ran]
    found = [
        tables.policies(
            both, names, name="rescue", title="Policies on the failing runs of 100 sealed seeds"
        ),
        tables.aims(sealed),
        tables.harm(both, names),
        tables.by_fault(sealed, [NOTHING, "palm", "back_and_halve", RESCUE]),
    ]
    if (opened := results / f"{OPEN}.jsonl.xz").exists():
        found.append(
            tables.policies(
                unpack(opened),
                [RESCUE, *PARTS],
                name="rescue_parts",
                title="Rescue, its parts alone and left out, on failing runs of the open seeds",
                number=13,
            )
        )
    if (old := results / f"{OLD}.jsonl.xz").exists():
        found += _of_old_seeds(unpack(old))
    return found


def _of_old_seeds(rows: Sequence[dict[str, Any]]) -> list[Table]:
    ran = {row["policy"] for row in rows}
    names = [name for name in POLICIES if name in ran]
    seeds = len({row["seed"] for row in rows})
    of_all = len(by_seed(design()))
    which = f"all {of_all} open seeds" if seeds == of_all else f"{seeds} of the {of_all} open seeds"
    return [
        tables.policies(
            rows,
            names,
            name="rescue_old",
            title=f"Policies on the failing runs of {which}",
            number=14,
        ),
        tables.harm(
            rows,
            names,
            name="rescue_old_harm",
            title=f"Runs of {which} that do not fail: what a policy does to them",
            number=15,
            note="",
        ),
    ]


def _renamed(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows of rescue, and of what it did to controls, as those of the newer detector."""
    return [
        row | {"control": {NEWER: row["control"][RESCUE]}}
        if "control" in row
        else row | {"policy": NEWER}
        for row in rows
        if "control" in row or row["policy"] == RESCUE
    ]


def fill_tables(page: Path, tables: Sequence[Table]) -> None:
    """Fill the parts of these tables; those of others stay as they are."""
    made = {f"table {table.name}": to_markdown(table) for table in tables}
    known = parts(page) | made
    fill(page, known.get, made)


def report(results: Path, page: Path = PAGE) -> int:
    """Write the tables and fill the page."""
    found = made(results)
    write_tables(found, results)
    fill_tables(page, found)
    print(f"{len(found)} tables: {results}")
    return 0
