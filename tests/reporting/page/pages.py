"""Runs for tests of the pages, and what an HTML parser finds on a page."""

from __future__ import annotations

import json
from html.parser import HTMLParser
from math import inf, nan

from rmetric import Record, Run, Truth
from rmetric.replay.scored_run import ScoredRun, score_run
from rmetric.reporting.page import Origin, page_of, trace_of_r_metric, trace_with_reasons

HOSTILE = "<script>window.hacked = 1</script>"
#: Texts that would end a script, open a tag or an attribute, or speak to a template.
TEXTS = (
    HOSTILE,
    "</script><img src=x onerror='window.hacked = 1'>",
    '" onmouseover="window.hacked = 1" x=\'',
    "<!--<script>",
    "{{ 7 * 7 }}{% raw %}",
    "\u2028\u202e\x00\x1b[31m&amp;",
)


def hostile_run() -> Run:
    """A run that carries each of `TEXTS` wherever a log can put text."""
    text = " ".join(TEXTS)
    records = [
        Record(step=s, training_loss=3.0 + (s == 7) * 9, gradient_norm=1.0) for s in range(9)
    ]
    truth = Truth(fault=text, onset_step=2, outcome=HOSTILE, failure_kind=text, failure_step=8)
    return Run(
        id=text, records=records, config={text: text}, truth=truth, notes=list(TEXTS),
        source=text.replace("\x00", ""),
    )  # fmt: skip


def eventful_run(count: int = 400) -> Run:
    """A loss that falls, breaks, and becomes nan and inf; workers, evaluations, a fault."""
    records = []
    for step in range(1, count + 1):
        loss = 4 - step / count + (step % 7) / 50 + (8.0 if step > 0.8 * count else 0.0)
        records.append(
            Record(step=step, gradient_norm=1 + (step % 5) / 10,
                   training_loss=nan if step == count - 5 else inf if step == count - 3 else loss,
                   validation_loss=loss + 0.1 if step % 10 == 0 else None,
                   worker_gradient_norms=(1.0, 1.1, 1 + (step % 3) / 10))
        )  # fmt: skip
    truth = Truth(
        fault="LR_SPIKE", onset_step=count // 2, outcome="failed", failure_kind="diverged",
        failure_step=int(0.9 * count),
    )  # fmt: skip
    return Run(id="eventful", records=records, truth=truth, source="logs/eventful.jsonl")


def page(run: Run | ScoredRun, *detectors: str, command: str = "python replay.py log") -> str:
    scored = run if isinstance(run, ScoredRun) else score_run(run)
    traces = [trace_of_r_metric(scored), *(trace_with_reasons(d, scored.run) for d in detectors)]
    return page_of(scored, traces, Origin("a format", command, "ab" * 32), {"rmetric": "0"})


class Found(HTMLParser):
    """Elements, attributes and texts of a page.

    Attributes:
        tags: of all elements, in their order.
        attributes: (tag, name, value) of all of them.
        text: outside of scripts and styles.
        scripts: the texts of script elements, styles those of style elements.
        data: what the page gives its script.
    """

    def __init__(self, html: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str, str | None]] = []
        self.scripts: list[str] = []
        self.styles: list[str] = []
        self.text = ""
        self._inside = ""
        self.feed(html)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += [(tag, name, value) for name, value in attrs]
        self._inside = tag
        if tag == "script":
            self.scripts.append("")
        if tag == "style":
            self.styles.append("")

    def handle_endtag(self, tag):
        self._inside = ""

    def handle_data(self, data):
        if self._inside == "script":
            self.scripts[-1] += data
        elif self._inside == "style":
            self.styles[-1] += data
        else:
            self.text += data

    def values(self, tag: str, name: str) -> list[str | None]:
        """Of an attribute of all elements of a tag."""
        return [value for *of, value in self.attributes if of == [tag, name]]

    @property
    def data(self) -> dict:
        return json.loads(self.scripts[0])
