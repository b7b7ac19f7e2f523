"""From a scored run and the traces of detectors to the panels of its page."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from rmetric.evaluation.verdict_words import RunVerdict
from rmetric.metric import PAPER_WEIGHTS, RMetricConfig
from rmetric.records import Record, Run
from rmetric.replay.scored_run import ScoredRun
from rmetric.reporting.page.sentences import decisions_of, short_words
from rmetric.reporting.page.series import WIDE, Charts, Floats, Line, Panel, Series
from rmetric.reporting.page.traces import STATED, SYMBOLS, DetectorTrace

#: Panel, title, hint, and the record's fields in it with their labels and colours.
LOGGED = (
    ("loss", "Loss", "", (("training_loss", "training", "training"),
                          ("validation_loss", "validation", "validation"),
                          ("probe_loss", "fixed probe batch", "probe"))),
    ("gradient_norm", "Gradient norm", "before clipping",
     (("gradient_norm", "gradient norm", "norm"),)),
    ("update_norm", "Update norm", "", (("update_norm", "update norm", "norm"),)),
    ("learning_rate", "Learning rate", "", (("learning_rate", "learning rate", "plain"),)),
)  # fmt: skip
#: Quantity in `Record.policy` -> title and hint of its panel.
POLICY = {
    "reward": ("Reward", ""),
    "reward_spread": ("Spread of the rewards", "standard deviation"),
    "equal_rewards": ("Groups with equal rewards", "share"),
    "kl": ("KL divergence", "a token"),
    "answer_kl": ("KL divergence", "an answer"),
    "entropy": ("Entropy", ""),
    "response_length": ("Length of the answers", "tokens"),
    "clip_fraction": ("Clipped", "share"),
    "preference_accuracy": ("Preference accuracy", "share"),
}
_RAW = {
    "failure_rate": ("λ, hardware events", "per hour over the last events"),
    "gradient_variance": ("σ², variance of the gradient norms", ""),
    "loss_drift": ("ΔL, loss above its recent mean", ""),
    "authors_simulator": ("ΔL, loss above the first one", ""),
}
_COLOURS = {"failure_rate": "rate", "gradient_variance": "variance", "loss_drift": "drift"}
_SOURCE_HINTS = {
    "workers": "between the workers",
    "logged": "as the log states it",
    "logged_normalised": "as the log states it",
    "trailing": "of one norm over time, not between workers",
}
#: Workers up to which each has its own curve.
_FEW_WORKERS = 8
_NUM_COLOURS = 8
#: Times the threshold, above which a score is only marked: a nan would flatten all the rest.
_HIGHEST = 5.0
#: Spikes of a verdict that are drawn; of more the first and the highest.
_MOST_EVENTS = 5
#: Decisions of a rescue that are drawn.
_MOST_DECISIONS = 30
#: Label and tag of the line at the onset of a verdict's event, by its class.
EVENTS = {
    "diverged": ("verdict: diverged from here", "diverged"),
    "not_finite": ("verdict: not finite from here", "not finite"),
    "unstable": ("verdict: unstable from here", "unstable"),
    "spike": ("verdict: the highest spike", "spike"),
    "stuck": ("verdict: nothing is learnt from here on", "stuck"),
    "learns_nothing": ("verdict: nothing is learnt from here on", "learns nothing"),
    "reward_collapsed": ("verdict: the reward collapsed here", "reward collapsed"),
    "kl_ran_away": ("verdict: KL ran away from here", "KL ran away"),
    "entropy_collapsed": ("verdict: the entropy collapsed here", "entropy collapsed"),
    "no_advantage": ("verdict: no advantage from here on", "no advantage"),
    "length_ran_away": ("verdict: the length ran away from here", "length ran away"),
    "level_rose": ("verdict: the level rose here", "level rose"),
    "overfitting": ("verdict: lowest validation loss", "overfits"),
    "cannot_tell": ("verdict: cannot tell from here", "cannot tell"),
}
#: The detector whose alarms are drawn as such.
OURS = "calibrated"


def charts_of(
    scored: ScoredRun, traces: Sequence[DetectorTrace], verdict: RunVerdict | None = None
) -> Charts:
    """All panels of a run; `traces` begin with the R-Metric's own."""
    r_metric, *others = traces
    logged = _logged(scored.run.records, verdict.part if verdict else "")
    groups: dict[str, list[Panel]] = {"What was logged": logged} if logged else {}
    # The R-Metric stands below the other detectors, and R as stated below ours.
    for trace in (*(t for t in others if t.detector != STATED), r_metric):
        of_trace = _of_r_metric(scored, trace) if trace is r_metric else _of_detector(trace)
        groups[trace.title] = of_trace
    groups |= {trace.title: _of_detector(trace) for trace in others if trace.detector == STATED}
    groups = {title: panels for title, panels in groups.items() if panels}
    lines = _alarm_lines(scored.run, traces, verdict) + _decision_lines(scored.run)
    stretches: list[tuple[int, int | None]] = []
    if verdict is not None and verdict.onset_step is not None and verdict.kind in EVENTS:
        lines = _event_lines(verdict, verdict.onset_step) + lines
        stretches = [(verdict.onset_step, verdict.end_step)]
        if verdict.kind == "spike":
            stretches = list(zip(verdict.event_steps, verdict.event_end_steps, strict=True))
    return Charts(steps=r_metric.steps, groups=groups, lines=lines, event=stretches)


def _logged(records: Sequence[Record], judged: str) -> list[Panel]:
    """Panels of logged series; first the one judged: the reward, or the `judged` loss part."""
    panels = []
    for name, (title, hint) in POLICY.items():
        curve = [(record.policy or {}).get(name) for record in records]
        panels += _panel(f"policy_{name}", title, hint, [_series(title.lower(), "training", curve)])
    parts = dict.fromkeys(name for record in records for name in record.loss_parts or ())
    for name in sorted(parts, key=lambda name: name != judged):
        curves = [
            _series(of, colour, [(record.loss_parts or {}).get(of) for record in records])
            for of, colour in ((name, "training"), (f"validation {name}", "validation"))
        ]
        panels += [] if name.startswith("validation ") else _panel(f"part_{name}", name, "", curves)
    for name, title, hint, fields in LOGGED:
        curves = [
            _series(label, colour, [getattr(record, field) for record in records])
            for field, label, colour in fields
        ]
        panels += _panel(name, title, hint, curves)
        if name == "gradient_norm":
            panels += _workers(records)
    return panels


def _panel(name: str, title: str, hint: str, curves: Sequence[Series]) -> list[Panel]:
    series = [curve for curve in curves if len(curve.values)]
    panel = Panel(name=name, title=title, hint=hint, series=series, log=_is_wide(series))
    return [panel] if series else []


def _series(label: str, colour: str, logged: Sequence[float | None]) -> Series:
    positions = [i for i, value in enumerate(logged) if value is not None]
    return Series(
        label=label,
        colour=colour,
        positions=np.array(positions, dtype=np.intp),
        values=np.array([logged[i] for i in positions], dtype=float),
    )


def _workers(records: Sequence[Record]) -> list[Panel]:
    """Each worker's norm, or where they are many the smallest, the middle and the greatest."""
    norms = [record.worker_gradient_norms or () for record in records]
    most = max(map(len, norms), default=0)
    if most <= _FEW_WORKERS:
        series = [
            _series(f"worker {i}", f"e{i + 1}", [n[i] if len(n) > i else None for n in norms])
            for i in range(most)
        ]
        return _panel("workers", "Gradient norm of each worker", "", series)
    # All three hand a nan on: that one worker has it is to be seen.
    named: tuple[tuple[str, str, Any], ...] = (
        ("smallest", "e1", np.min), ("median", "plain", np.median), ("greatest", "e2", np.max)
    )  # fmt: skip
    series = [
        _series(label, colour, [float(of(n)) if n else None for n in norms])
        for label, colour, of in named
    ]
    hint = f"over {most} workers"
    return _panel("workers", "Gradient norms of the workers", hint, series)


def _is_wide(series: Sequence[Series]) -> bool:
    """True if a linear scale would show one peak and nothing else."""
    values = np.concatenate([np.zeros(0), *(curve.values for curve in series)])
    values = values[np.isfinite(values)]
    return bool(len(values) and values.min() > 0 and values.max() > WIDE * np.median(values))


def _of_r_metric(scored: ScoredRun, trace: DetectorTrace) -> list[Panel]:
    weights = scored.config.weights
    top = max(1.06 * sum(weights), 1.2 * scored.config.threshold)
    score = _column("R", "score", trace.scores)
    if not len(score.values):
        return []
    panels = [
        Panel(
            name="r_metric", title="R", series=[score], bounds=(0.0, top),
            hint=f"alert above {scored.config.threshold:g}; shaded where it alerts",
            threshold=scored.config.threshold, alarms=trace.alarms,
        )
    ]  # fmt: skip
    normalised, raw = [], []
    for name, symbol in SYMBOLS.items():
        values = np.array([getattr(score.raw, name) for score in scored.scores], dtype=float)
        scaled = np.array([getattr(score.normalised, name) for score in scored.scores], dtype=float)
        defined, label = ~np.isnan(values), f"n({symbol}) × {getattr(weights, name):g}"
        if not defined.any():
            if scaled.any():
                label += ", as the log states it"
                normalised.append(_column(label, _COLOURS[name], scaled))
            continue
        normalised.append(_column(label, _COLOURS[name], scaled, defined))
        first_loss = name == "loss_drift" and scored.config.variant == "authors_simulator"
        title, hint = _RAW["authors_simulator" if first_loss else name]
        if name == "gradient_variance":
            hint = _SOURCE_HINTS.get(scored.variance_source or "", "several sources")
        series = [_column(symbol, _COLOURS[name], values, defined)]
        raw.append(
            Panel(
                name=f"raw_{name}", title=title, hint=hint, series=series, small=True,
                log=_is_wide(series) if np.all(values[defined] > 0) else None,
            )
        )  # fmt: skip
    if normalised:
        hint = "each scaled to its own recent range; the weight in R stands beside it"
        panels.append(
            Panel(name="normalised", title="Components of R, normalised", hint=hint,
                  series=normalised, bounds=(0.0, 1.0))
        )  # fmt: skip
    return panels + raw


def _of_detector(trace: DetectorTrace) -> list[Panel]:
    tone = "alert" if trace.detector == OURS else "neutral"
    hint = "" if trace.threshold is None else f"alarm above {trace.threshold:g}; "
    score = _column("R" if trace.detector == STATED else "score", "score", trace.scores)
    if not len(score.values):
        return []
    panels = [
        Panel(
            name=f"score_{trace.detector}", series=[score],
            title="R, as stated" if trace.detector == STATED else f"{trace.title}: score",
            hint=f"{hint}shaded where it alarms", threshold=trace.threshold, alarms=trace.alarms,
            log=False, tone=tone,
            cap=None if trace.threshold is None else _HIGHEST * trace.threshold,
        )
    ]  # fmt: skip
    if trace.evidence:
        peaks = {label: np.max(values, initial=0.0, where=~np.isnan(values))
                 for label, values in trace.evidence.items()}  # fmt: skip
        strongest = sorted(peaks, key=lambda label: -peaks[label])[:_NUM_COLOURS]
        series = [
            _column(label.replace("_", " "), f"e{i + 1}", trace.evidence[label])
            for i, label in enumerate(strongest)
        ]
        hint = "how unusual against the run's own past, in units of its threshold"
        if len(strongest) < len(trace.evidence):
            hint += f"; the {len(strongest)} strongest of {len(trace.evidence)}"
        panels.append(
            Panel(name=f"evidence_{trace.detector}", title="Evidence", series=series, hint=hint,
                  threshold=1.0, log=False, tone=tone, cap=_HIGHEST)
        )  # fmt: skip
    if trace.contributions:
        panels.append(_calibrated_r(trace))
    return panels


def _calibrated_r(trace: DetectorTrace) -> Panel:
    """The R-Metric's equation over components that are set against what healthy runs show."""
    parts = trace.contributions
    r = np.sum(
        [getattr(PAPER_WEIGHTS, name) * np.nan_to_num(values) for name, values in parts.items()],
        axis=0,
    )
    series = [_column("R, calibrated", "score", r)]
    series += [
        _column(f"n({SYMBOLS[name]}) × {getattr(PAPER_WEIGHTS, name):g}", _COLOURS[name], values)
        for name, values in parts.items()
    ]
    return Panel(
        name=f"contributions_{trace.detector}", title="The R-Metric's three ideas, calibrated",
        series=series, bounds=(0.0, 1.06 * sum(PAPER_WEIGHTS)), threshold=RMetricConfig().threshold,
        hint="0 is usual for this run, 1 more than healthy runs show; weights as published",
    )  # fmt: skip


def _column(label: str, colour: str, values: Floats, defined: Any = None) -> Series:
    """A value after each record; nan stands for not defined yet, and is left out."""
    positions = np.flatnonzero(~np.isnan(values) if defined is None else defined)
    return Series(
        label=label, colour=colour, positions=positions, values=values[positions], stairs=True
    )


def _alarm_lines(
    run: Run, traces: Sequence[DetectorTrace], verdict: RunVerdict | None
) -> list[Line]:
    """Onset and failure as the log states them, and the first alarm of each detector."""
    lines, truth = [], run.truth
    if truth is not None and truth.onset_step is not None:
        lines.append(
            Line(step=truth.onset_step, kind="onset", label=f"onset of {truth.fault}", tag="fault")
        )
    if truth is not None and truth.failed and truth.failure_step is not None:
        label = f"failure: {truth.failure_kind or 'of unknown kind'}"
        lines.append(Line(step=truth.failure_step, kind="failure", label=label, tag="failure"))
    event = None if verdict is None else verdict.alarm_step
    for trace in traces:
        first, label = trace.first_alert, f"first alarm: {trace.title}"
        if first is None:
            continue
        if trace.detector != OURS:
            kind = "published-alarm" if trace.detector == "r_metric" else "own-alarm"
            lines.append(Line(step=first, kind=kind, label=label))
            continue
        number = len(trace.alarm_steps)
        tag = "alarm" if number == 1 else f"alarm (first of {number})"
        lines.append(Line(step=first, kind="alarm", label=label, tag=tag))
        if event is not None and event != first:
            label = f"alarm at the verdict's event: {trace.title}"
            lines.append(Line(step=event, kind="alarm", label=label, tag="alarm"))
    return lines


def _event_lines(verdict: RunVerdict, onset: int) -> list[Line]:
    """The lines of a verdict's event: of several spikes each, or of many the two that matter."""
    label, tag = EVENTS[verdict.kind]
    steps = verdict.event_steps
    if verdict.kind != "spike" or len(steps) < 2:
        if verdict.training_only:
            label, tag = f"{label}, training loss only", f"{tag} (training loss only)"
        if verdict.kind == "spike":
            label = "verdict: the spike"
        return [Line(step=onset, kind="event", label=label, tag=tag)]
    lines = []
    for number, step in enumerate(steps, start=1):
        if len(steps) > _MOST_EVENTS and number > 1 and step != onset:
            continue
        highest = ", the highest" if step == onset else ""
        words = f"spike ({number} of {len(steps)}{highest})"
        lines.append(Line(step=step, kind="event", label=f"verdict: {words}", tag=words))
    return lines


def _decision_lines(run: Run) -> list[Line]:
    """One for the equal decisions at a step; of very many, returns and holds come first."""
    counts = Counter((event.step, event.name, short_words(event)) for event in decisions_of(run))
    drawn = sorted(counts, key=lambda decision: decision[1] == "leave_out")[:_MOST_DECISIONS]
    return [
        Line(step=step, kind="decision", label=label + (f", {n} times" if n > 1 else ""))
        for (step, name, label), n in counts.items()
        if (step, name, label) in drawn
    ]
