"""Claims as claims.yaml has them, their values in results, and their place in documents."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from rmetric._util.lazy import read_yaml
from studies.common.csv_rows import read_dicts

ROOT = Path(__file__).resolve().parents[2]
TABLE = Path(__file__).with_name("claims.yaml")
_NUMBER = r"([-+]?\d[\d,]*(?:\.\d+)?)"


class Source(msgspec.Struct, frozen=True):
    """Results that a few commands make.

    Attributes:
        results: folder of the committed results.
        commands: arguments of Python; ``{out}`` is a folder, with the results in ``results``.
        minutes: run time on two cores, about.
        recomputed: `verify` runs the commands.
    """

    name: str
    results: str
    commands: tuple[str, ...]
    minutes: float
    recomputed: bool
    note: str = ""


class Claim(msgspec.Struct, frozen=True, rename={"name": "id", "documents": "in"}):
    """A statement with numbers.

    Attributes:
        documents: paths of the documents that have it.
        text: ``{}`` for each number, ``*`` for a cell of a table row that is passed over.
        values: where each number stands in the results.
        tolerance: absolute, of a recomputed value.
        listed: on the page of claims.
    """

    name: str
    documents: tuple[str, ...]
    source: Source
    text: str
    values: tuple[Any, ...]
    tolerance: float
    listed: bool = True

    def committed(self) -> list[float]:
        """Values in the committed results."""
        return self.read(ROOT / self.source.results)

    def read(self, folder: Path) -> list[float]:
        """Values in a folder of results; raises ValueError if it lacks one of them."""
        return [_value(value, folder) for value in self.values]

    def shown(self, numbers: Sequence[float]) -> list[str]:
        """The numbers as the documents write them."""
        return [_shown(n, value) for n, value in zip(numbers, self.values, strict=True)]

    def stated(self, document: str) -> list[str]:
        """The numbers in a document; raises ValueError unless it has the statement once."""
        found = [match.groups() for match in pattern(self.text).finditer(flat(document))]
        if len(set(found)) != 1:
            raise ValueError(f"{self.text!r} stands {len(found)} times")
        return list(found[0])


class Table(msgspec.Struct, frozen=True):
    """Claims; statement -> file of the test that checks it; texts whose numbers are not results."""

    claims: tuple[Claim, ...]
    elsewhere: Mapping[str, str]
    no_results: tuple[str, ...]


def load(path: Path = TABLE) -> Table:
    """Read claims.yaml; raises ValueError for an unknown source, and for a name used twice."""
    given = read_yaml(path)
    sources = {name: {"name": name, **row} for name, row in given["sources"].items()}
    for row in given["claims"]:
        if row["source"] not in sources:
            raise ValueError(f"{path}: {row['id']} has the source {row['source']!r}, not defined")
        row["source"] = sources[row["source"]]
    claims = msgspec.convert(given["claims"], tuple[Claim, ...])
    names = [claim.name for claim in claims]
    if twice := {name for name in names if names.count(name) > 1}:
        raise ValueError(f"{path}: two claims are named {sorted(twice)}")
    elsewhere = {row["text"]: row["test"] for row in given["elsewhere"]}
    return Table(claims, elsewhere, tuple(given["no_results"]))


def flat(text: str) -> str:
    """Text with single spaces, so that line ends do not matter."""
    return " ".join(text.split())


def pattern(text: str) -> re.Pattern[str]:
    """Expression for a statement, with a group for each number."""
    escaped = re.escape(flat(text)).replace(r"\{\}", _NUMBER)
    return re.compile(escaped.replace(r"\*\ \|", r"[^|]*\|"))


def uncovered(document: str, table: Table) -> list[str]:
    """Numbers of a document that no claim has, each with the text around it; not those of code."""
    text = re.sub(r"```.*?```|^    .*?$", " ", document, flags=re.DOTALL | re.MULTILINE)
    text = re.sub(r"\]\([^)]*\)", "]", text)
    text = flat(text)
    statements = [claim.text for claim in table.claims]
    known = [
        match.span()
        for statement in (*statements, *table.elsewhere, *table.no_results)
        for match in pattern(statement).finditer(text)
    ]
    text_without_code = re.sub(r"`[^`]*`", lambda code: " " * len(code[0]), text)
    return [
        text[max(0, match.start() - 30) : match.end() + 20]
        for match in re.finditer(r"(?<![\w.])[-+]?\d[\d,]*(?:\.\d+)?", text_without_code)
        if not any(low <= match.start() and match.end() <= high for low, high in known)
    ]


def _shown(number: float, value: Any) -> str:
    form = value["as"] if isinstance(value, dict) else value.rsplit(" : ", 1)[1]
    return format(number, form)


def _value(value: Any, folder: Path) -> float:
    if isinstance(value, str):
        return _cell(value.rsplit(" : ", 1)[0], folder)
    if "minus" in value:
        more, less = (_cell(cell, folder) for cell in value["minus"])
        return more - less
    if "ceiling" in value:
        return math.ceil(_cell(value["ceiling"][0], folder))
    return value.get("times", 1) * sum(_cell(cell, folder) for cell in value["sum"])


def _cell(place: str, folder: Path) -> float:
    """Number at a place: ``FILE : WHERE : COLUMN`` or ``FILE : PATH``, ``~ REGEX`` behind it."""
    place, _, expression = place.partition(" ~ ")
    name, *rest = place.split(" : ")
    path = folder / name
    if not path.is_file():
        raise ValueError(f"{path}: no such file")
    text = _of_json(path, rest[0]) if path.suffix == ".json" else _of_csv(path, *rest)
    if expression:
        found = re.search(expression, text)
        if found is None:
            raise ValueError(f"{path}: {text!r} has no match of {expression!r}")
        text = found[1]
    return float(text)


def _of_csv(path: Path, where: str, column: str) -> str:
    wanted = dict(term.split("=", 1) for term in where.split(" & "))
    rows = [row for row in read_dicts(path) if all(row.get(k) == v for k, v in wanted.items())]
    if len(rows) != 1 or column not in rows[0]:
        raise ValueError(f"{path}: {len(rows)} rows have {where}, one with {column!r} is wanted")
    return rows[0][column]


def _of_json(path: Path, keys: str) -> str:
    found = json.loads(path.read_bytes())
    for key in keys.split("/"):
        if key.startswith("@"):  # by position in an object
            found = [*found.values()][int(key[1:])]
        else:
            found = found[int(key)] if isinstance(found, list) else found[key]
    return str(found)
