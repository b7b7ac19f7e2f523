"""Ranks that deviate from their peers: in their events, numbers, settings and iterations."""

from __future__ import annotations

from collections.abc import Iterator

from rmetric.diagnosis.evidence.row import Row, Scene
from rmetric.diagnosis.facts.job import Iteration, Occurrence
from rmetric.diagnosis.inferred import STARTED_OTHERWISE
from rmetric.diagnosis.patterns.spatial import THRESHOLD
from rmetric.diagnosis.patterns.values import NumberOutlier, setting_outliers

#: Robust z of evidence with full strength.
FULL_STRENGTH_Z = 2.0 * THRESHOLD
#: Prefixes of stack lines, which are not informative alone.
FRAME_PREFIXES = ("File ", "frame #", "Thread ")


def unlike_events(scene: Scene) -> Iterator[Row]:
    """Rows against the peers whose events deviate."""
    events = scene.job.events
    for one in scene.outliers:
        texts = [events[event].template[:60] for event in one.events]
        shown = [text for text in texts if not text.startswith(FRAME_PREFIXES)][:2] or texts[:1]
        words = f"differs from its peers in: {'; '.join(shown)}"
        yield Row(one.name, "unlike", words, min(1.0, one.score / FULL_STRENGTH_Z))


def unlike_numbers(scene: Scene) -> Iterator[Row]:
    """Rows against ranks whose losses or times are not those of the others."""
    found = scene.number_outliers
    for one in found:
        yield Row(one.stream, "numbers", compared(one), len(found) ** -0.5, entry=one.place)


def compared(one: NumberOutlier) -> str:
    return f"its {one.name} is {one.value:.4g}, the others' {one.usual:.4g}"


def unlike_settings(scene: Scene) -> Iterator[Row]:
    """Rows against ranks that were started otherwise; a job that reached its steps bore it."""
    if scene.job.trained:
        return
    found = setting_outliers(scene.job, scene.known.siblings)
    each = len({one.stream for one in found}) ** -0.5 if found else 0.0
    for one in found:
        words = f"logs {one.name} {one.value}; {one.others} others log {one.usual}"
        first = scene.job.streams[one.stream].first
        yield Row(one.stream, "settings", words, each, STARTED_OTHERWISE, entry=first)


def took(one: Iteration[Occurrence]) -> str:
    if one.seconds is None:
        return f"step {one.step} differs from those before"
    return f"step {one.step} took {one.seconds:.3g} s, usual {one.usual_seconds:.3g} s"
