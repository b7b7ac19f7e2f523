"""Words for the decisions of a rescue that stand in a log."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from rmetric._util.printed import counted
from rmetric.records import LogEvent, Run


def decisions_of(run: Run) -> list[LogEvent]:
    """The decisions among the events of the run's log."""
    return [event for event in run.log_events if event.kind == "decision"]


def kind_words(name: str) -> str:
    """Decisions of a kind, without their places.

    >>> kind_words("go_back")
    'went back'
    """
    known = {"leave_out": "left out", "go_back": "went back", "hold": "held"}
    return known.get(name, name.replace("_", " "))


def short_words(event: LogEvent) -> str:
    """A decision without step and reason.

    >>> short_words(LogEvent(step=713, kind="decision", name="go_back", reason="", to=690))
    'went back to 690'
    """
    place = {"go_back": "to", "hold": "at"}.get(event.name, "")
    to = "" if event.to is None else f"{event.to:,}"
    return f"{kind_words(event.name)} {place} {to}" if place else kind_words(event.name)


def summed_up(decisions: Sequence[LogEvent]) -> str:
    """The number of each kind, in one line.

    >>> went = LogEvent(step=713, kind="decision", name="go_back", reason="", to=690)
    >>> summed_up([went, went])
    'Went back 2 times'
    """
    counts = Counter(event.name for event in decisions)
    parts = []
    if back := counts.pop("go_back", 0):
        parts.append("went back once" if back == 1 else f"went back {back:,} times")
    if left := counts.pop("leave_out", 0):
        parts.append(f"{counted(left, 'step')} left out")
    if counts.pop("hold", 0):
        last = [event for event in decisions if event.name == "hold"][-1]
        parts.append(short_words(last))
    parts += [f"{name.replace('_', ' ')}: {count:,}" for name, count in counts.items()]
    words = ", ".join(parts)
    return words[:1].upper() + words[1:]
