"""From panels and words to one HTML file that needs nothing beside itself."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape

from rmetric.reporting.page.series import Charts, Floats, Panel, Series, kept, merged, spans
from rmetric.reporting.page.traces import Alarm

_HERE = Path(__file__).parent
#: A page stays below 2 MB, whatever the run.
MOST_BYTES = 1_900_000
#: Points drawn on a page, at first; over all of its series.
_POINTS = 40_000
_MOST_BUCKETS, _FEWEST_BUCKETS = 2000, 8
_MOST_SPANS = 1000
#: Alarms of one detector that are listed, and letters of one text from a log.
MOST_ALARMS = 100
LONGEST_TEXT = 2000
#: Style of the marks of decisions, on pages that have them.
_OF_DECISIONS = """
:root { --decision: var(--e2); }
.key .decision { border-left-style: dashed; }
.mark.decision { --tone: var(--decision); }
.saying.rescue { border-top-color: var(--decision); }
""".strip()


def render_run(charts: Charts, **words: Any) -> str:
    """The page of one run, from its charts and the values of templates/run.html."""
    return _with_charts("run.html", charts, words)


def render_incident(charts: Charts | None, **words: Any) -> str:
    """The page of one incident, without charts without a script; see templates/incident.html."""
    if charts is None:
        return _render("incident.html", "", charts=None, **words)
    return _with_charts("incident.html", charts, words)


def _with_charts(template: str, charts: Charts, words: Mapping[str, Any]) -> str:
    """The page, its curves thinned out until it is below `MOST_BYTES`."""
    count = max(1, sum(len(panel.series) for panel in charts.panels))
    buckets = min(_MOST_BUCKETS, max(_FEWEST_BUCKETS, _POINTS // (2 * count)))
    style = _OF_DECISIONS if any(line.kind == "decision" for line in charts.lines) else ""
    while True:
        data = drawn(charts, buckets)
        html = _render(template, "chart.js", style, charts=charts, data=embedded(data),
                       stretch=data["stretch"], **words)  # fmt: skip
        if len(html.encode("utf-8", "replace")) <= MOST_BYTES or buckets <= _FEWEST_BUCKETS:
            return html
        buckets //= 2


def render_index(columns: Sequence[tuple[str, str]], numbers: Sequence[str], **words: Any) -> str:
    """The page over many runs, by names and headings of the `columns` of its table.

    `numbers` are the names of those that hold numbers, `words` the values of templates/index.html.
    """
    rules = []
    # By the place of the column, as a class in each of thousands of rows would add up.
    for place, (name, label) in enumerate(columns, start=1):
        cells = f"#runs td:nth-child({place})"
        rules.append(f'{cells}::before {{ --label: "{label} "; }}')
        if name in numbers:
            rules.append(
                f"#runs :is(td, thead th):nth-child({place}) {{ text-align: var(--side); }}"
            )
            rules.append(f"{cells} {{ white-space: nowrap; }}")
        elif name not in ("outcome", "verdict"):
            rules.append(f"{cells} {{ grid-column: 1 / -1; min-width: var(--widest); }}")
            rules.append(f"{cells} {{ font-size: .82rem; color: var(--quiet); }}")
    return _render("index.html", "index.js", style="\n".join(rules), columns=columns, **words)


def drawn(charts: Charts, num_buckets: int) -> dict[str, Any]:
    """The data of chart.js, as JSON holds it; numbers to six digits."""
    axis, last = charts.places, float(charts.places[-1])
    counts = [len(series.values) for panel in charts.panels for series in panel.series]
    return {
        "byRecord": charts.by_record,
        "records": len(charts.steps),
        "range": [*charts.range],
        "stretch": max((-(-n // num_buckets) for n in counts if n > 2 * num_buckets), default=1),
        "event": [
            [_rounded(charts.place(first)), _rounded(last if end is None else charts.place(end))]
            for first, end in charts.event
        ],
        "lines": [
            asdict(line) | {"x": _rounded(charts.place(line.step)), "label": _cut(line.label)}
            for line in charts.lines
        ],
        "panels": [_panel(panel, charts, axis, num_buckets) for panel in charts.panels],
    }


def _panel(panel: Panel, charts: Charts, axis: Floats, num_buckets: int) -> dict[str, Any]:
    shaded: list[list[Any]] = []
    if panel.alarms is not None:
        places = merged(axis[spans(panel.alarms)], min(_MOST_SPANS, 2 * num_buckets))
        shaded = [[_rounded(a), _rounded(b)] for a, b in places.tolist()]
    found: dict[str, Any] = {
        name: getattr(panel, name)
        for name in ("name", "title", "threshold", "bounds", "log", "small", "cap", "tone")
    }
    series = [_series(curve, charts, axis, num_buckets) for curve in panel.series]
    return found | {"shaded": shaded, "series": series}


def _series(series: Series, charts: Charts, axis: Floats, num_buckets: int) -> dict[str, Any]:
    chosen = kept(series.values, num_buckets)
    positions, values = series.positions[chosen], series.values[chosen]
    x = axis[positions]
    found: dict[str, Any] = {
        "label": _cut(series.label, 80),
        "colour": series.colour,
        "stairs": series.stairs,
        "x": [_rounded(place) for place in x.tolist()],
        "y": [_number(value) for value in values.tolist()],
    }
    if charts.by_record:
        found["steps"] = charts.steps[positions].tolist()
    for name, test in (("nan", np.isnan), ("inf", np.isposinf), ("-inf", np.isneginf)):
        if (strange := test(values)).any():
            found.setdefault("marks", {})[name] = [_rounded(place) for place in x[strange].tolist()]
    return found


def _rounded(place: float) -> int | float:
    return int(place) if place == int(place) else round(place, 3)


def _number(value: float) -> int | float | None:
    """To six digits, whole ones in full; None for what is not finite."""
    if value != value or value in (np.inf, -np.inf):
        return None
    if value == int(value) and abs(value) < 2**53:
        return int(value)
    return float(f"{value:.6g}")


def embedded(value: Any) -> Markup:
    r"""`value` as JSON that no HTML parser can take for anything else.

    >>> str(embedded({"id": "</script>"}))
    '{"id":"\\u003c/script\\u003e"}'
    """
    text = json.dumps(value, separators=(",", ":"), allow_nan=False)
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return Markup(text)


def _cut(text: str, longest: int = LONGEST_TEXT) -> str:
    """Text of a log at a length that a page can hold, without what no page can show."""
    shown = "".join(c if c.isprintable() or c == "\n" else "\ufffd" for c in text[:longest])
    return shown if len(text) <= longest else f"{shown}… ({len(text):,} letters in all)"


def _render(template: str, script: str, style: str = "", **values: Any) -> str:
    """The template with our own styles and `script` (empty for none), and `style` after them."""
    files = _files()
    styles = [Markup(files[name]) for name in ("vendor/uPlot.min.css", "page.css")]
    scripts = [Markup(files[script])] if script else []
    if script == "chart.js":
        scripts.insert(0, Markup(files["vendor/uPlot.iife.min.js"]))
        styles += [Markup(style)] if style else []
    else:
        styles = [styles[1], Markup(style)]
    # With this the browser runs our own scripts, no other, and calls no other machine.
    policy = "; ".join([
        "default-src 'none'",
        "script-src " + (" ".join(map(_source_hash, scripts)) or "'none'"),
        "style-src " + " ".join(map(_source_hash, styles)),
        "img-src data:",
        "base-uri 'none'",
        "form-action 'none'",
    ])  # fmt: skip
    page = _environment().get_template(template)
    return page.render(styles=styles, scripts=scripts, policy=policy, **values)


@cache
def _files() -> Mapping[str, str]:
    names = ["page.css", "chart.js", "index.js"]
    names += ["vendor/uPlot.min.css", "vendor/uPlot.iife.min.js"]
    return {name: (_HERE / name).read_text(encoding="utf-8").strip() for name in names}


def _source_hash(text: str) -> str:
    digest = hashlib.sha256(text.encode("utf-8")).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=FileSystemLoader(_HERE / "templates"), autoescape=True, undefined=StrictUndefined,
        trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip
    environment.filters |= {
        "cut": _cut,
        "short": lambda text: _cut(str(text), 200),
        "outcome": lambda value: _cut(value or "not known", 200).replace("_", " "),
        "length_of": _length,
        "file_name": lambda path: re.split(r"[/\\\\]", str(path))[-1],
        "in_parts": _in_parts,
        # No line ends within an arrow.
        "arrows": lambda text: Markup(
            str(escape(text)).replace("-&gt;", '<span class="arrow">-&gt;</span>')
        ),
        "thousands": lambda value: f"{value:,}",
    }
    return environment


def _length(alarm: Alarm, charts: Charts) -> float:
    """Length of an alarm on the axis; of one that lasts, to the last record."""
    last = len(charts.steps) - 1
    places = charts.places
    return float(places[last if alarm.until is None else alarm.until] - places[alarm.position])


def _in_parts(text: str) -> tuple[str, str]:
    """The words in capitals at the beginning of a verdict, and the rest.

    >>> _in_parts("2 SPIKES, all recovered"), _in_parts("NOT FINITE from step 9 to the end")
    (('2 SPIKES', ', all recovered'), ('NOT FINITE', ' from step 9 to the end'))
    """
    found = re.match(r"(\d+ )?[A-Z]{2,}( [A-Z]{2,})*", text)
    place = found.end() if found else 0
    return text[:place], text[place:]


def listed(values: Sequence[Any], most: int) -> tuple[Sequence[Any], int]:
    """The first `most`, and how many more there are."""
    return values[:most], max(0, len(values) - most)
