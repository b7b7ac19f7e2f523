"""Read text logs: files, lines, exports, prefixes, times, names, entries of several lines."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any

from rmetric._util.lazy import read_yaml

#: What stands in a text of YAML for another one, as in grok.
FRAGMENT = re.compile(r"%\{(\w+)\}")


def read_patterns(path: Path, given: Mapping[str, str] | None = None) -> dict[str, Any]:
    """The tables of a YAML file: name of a section -> its rows, each a mapping with a `pattern`.

    `%{NAME}` in a pattern stands for a fragment, as in grok: one that is given, or one of the
    section `fragments`, which may use those above it. A pattern may be a list of its pieces.
    """
    tables: dict[str, Any] = read_yaml(path)
    fragments = dict(given or {})

    def expanded(pattern: str | list[str]) -> str:
        return FRAGMENT.sub(lambda found: fragments[found[1]], "".join(pattern))

    for name, pattern in tables.pop("fragments").items():
        fragments[name] = expanded(pattern)
    for row in chain(*tables.values()):
        row["pattern"] = expanded(row["pattern"])
    return tables | {"fragments": fragments}


@cache
def line_heads() -> dict[str, Any]:
    """The tables of line_heads.yaml, which is read when one is needed first."""
    return read_patterns(Path(__file__).with_name("line_heads.yaml"))


def head_patterns(section: str) -> dict[str, str]:
    """Form -> its pattern, of one of these tables."""
    return {row["name"]: row["pattern"] for row in line_heads()[section]}
