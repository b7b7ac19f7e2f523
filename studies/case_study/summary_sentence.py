"""The result of a case study as one sentence and as a table in text, from its summary."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

#: Both detectors by their title: the place of their verdicts in the summary, and a short name.
DETECTORS = {
    "R-Metric (published)": ("r_metric", "R-Metric"),
    "calibrated detector": ("calibrated", "the calibrated detector"),
}
HEADINGS = ("run", "fault at", "outcome", *DETECTORS)
#: A failed run comes first, the control last.
ORDER = {"failed": 0, "absorbed": 1, "healthy": 2}


class Alarms(NamedTuple):
    """Steps of the first alarm, and of the first that began at or after the onset, if any."""

    first: int | None
    since_onset: int | None


class Result(NamedTuple):
    """One run of a case study.

    Attributes:
        name: the control's, or that of the fault.
        outcome: as in the log: healthy, absorbed or failed.
        kind: of the failure; None without one.
        onset, failure: steps; None without a fault or a failure.
        alarms: by the titles of `DETECTORS`.
    """

    name: str
    outcome: str
    kind: str | None
    onset: int | None
    failure: int | None
    alarms: Mapping[str, Alarms]

    @property
    def subject(self) -> str:
        return "the undisturbed run" if self.onset is None else self.name

    def is_in_time(self, step: int | None) -> bool:
        """True if `step` lies from the onset to before the failure, if there is one."""
        if step is None or self.onset is None or step < self.onset:
            return False
        return self.failure is None or step < self.failure

    def warned_early(self, title: str) -> bool:
        """True if the run fails, and the first alarm lies before the onset."""
        first = self.alarms[title].first
        if first is None or self.onset is None or self.failure is None:
            return False
        return first < self.onset


def results_of(summary: Mapping[str, Any]) -> list[Result]:
    """The runs of a summary, in their order."""
    found = []
    for name, run in summary["runs"].items():
        judged = {"r_metric": run["r_metric"]}
        judged |= {key: of_runs[name] for key, of_runs in summary["other_detectors"].items()}
        alarms = {
            title: Alarms(judged[key]["first_alert_step"], judged[key]["first_alert_since_onset"])
            for title, (key, _) in DETECTORS.items()
        }
        step = run["onset_step"], run["failure_step"]
        found.append(Result(name, run["outcome"], run["failure_kind"], *step, alarms))
    return found


def sentence(results: Sequence[Result]) -> str:
    """The failed runs, the absorbed faults, then the steps of each detector's alarms.

    The detector that warned before a failure comes first.
    """
    ordered = sorted(results, key=lambda result: ORDER[result.outcome])
    warn = {
        title: any(r.failure is not None and r.is_in_time(r.alarms[title].first) for r in ordered)
        for title in DETECTORS
    }
    titles = sorted(DETECTORS, key=lambda title: not warn[title])
    text = "; ".join([_outcomes(ordered), *(_of_detector(ordered, title) for title in titles)])
    return f"{text[:1].upper()}{text[1:]}."


def _outcomes(results: Sequence[Result]) -> str:
    faulty = [result for result in results if result.onset is not None]
    control = [result for result in results if result.onset is None]
    told = faulty if faulty and not any(r.failure for r in control) else [*faulty, *control]
    onsets = {result.onset for result in faulty}
    several = "faults" if len(told) > 1 else "fault"
    since = f"of the {several} at step {onsets.pop()} " if len(onsets) == 1 else ""
    return since + " and ".join(map(_outcome, told))


def _outcome(run: Result) -> str:
    if run.outcome == "failed":
        broke = "failed" if run.onset is None else "broke its run"
        return f"{run.subject} {broke} by step {run.failure} ({_kind(run)})"
    return f"{run.subject} {'stayed healthy' if run.onset is None else 'was absorbed'}"


def _kind(run: Result) -> str:
    return str(run.kind).replace("_", "-")


def _of_detector(results: Sequence[Result], title: str) -> str:
    name, firsts = DETECTORS[title][1], [result.alarms[title].first for result in results]
    onsets = {result.onset for result in results if result.onset is not None}
    if set(firsts) == {None}:
        return f"{name} did not alarm"
    ahead = min(onsets, default=0) - (firsts[0] or 0)
    if len(results) > 1 and len(set(firsts)) == len(onsets) == 1 and ahead > 0:
        text = f"{name} alarmed at {firsts[0]} in every run, {_steps(ahead)} before any fault"
    else:
        told = [_first_alarm(r, at) for r, at in zip(results, firsts, strict=True) if at]
        text = f"{name} alarmed {', '.join(told)}"
        silent = [r.subject for r, at in zip(results, firsts, strict=True) if not at]
        text += f", and not in {' or '.join(silent)}" if silent else ""
    return text + _since_onset(results, title)


def _since_onset(results: Sequence[Result], title: str) -> str:
    """Whether a detector that warned a failing run too early alarmed again in time."""
    text = ""
    early = [result for result in results if result.warned_early(title)]
    again = [r for r in early if r.is_in_time(r.alarms[title].since_onset)]
    for result in again:
        at = result.alarms[title].since_onset or 0
        text += f", and again at {at} in {result.subject}, {_beside_failure(result, at)}"
    silent = [result.subject for result in early if result not in again]
    if silent:
        text += f", and not between the start and the failure of {' or '.join(silent)}"
    return text


def _first_alarm(run: Result, step: int) -> str:
    after = None if run.onset is None else step - run.onset
    if after is not None and after < 0:
        where = f"{_steps(-after)} before its start"
    elif run.failure is not None:
        where = _beside_failure(run, step)
    elif after is None:
        where = "a false alarm"
    else:
        where = f"{_steps(after)} after its start" if after else "its first step"
    return f"at {step} in {run.subject}, {where}"


def _beside_failure(run: Result, step: int) -> str:
    ahead = (run.failure or 0) - step
    if ahead == 0:
        return "at the failure"
    return f"{_steps(abs(ahead))} {'before' if ahead > 0 else 'after'} the failure"


def _steps(number: int) -> str:
    return f"{number} step{'' if number == 1 else 's'}"


def verdict(run: Result, first: int | None) -> str:
    """The judgement on the first alarm by the causal rule, with its step."""
    failed = run.failure is not None
    if first is None:
        return "missed" if failed else "no alarm"
    if run.is_in_time(first):
        ahead = f"{_steps((run.failure or 0) - first)} ahead"
        return f"{first}: {ahead if failed else 'on a fault that was absorbed'}"
    too_late = failed and run.onset is not None and first >= run.onset
    return f"{first}: {'too late' if too_late else 'false alarm'}"


def rows_of(results: Sequence[Result]) -> list[tuple[str, ...]]:
    """A row of text for each run, under `HEADINGS`."""
    return [
        (
            run.name,
            str(run.onset or "-"),
            f"{_kind(run)} at {run.failure}" if run.outcome == "failed" else run.outcome,
            *(verdict(run, alarms.first) for alarms in run.alarms.values()),
        )
        for run in results
    ]


def table(results: Sequence[Result]) -> str:
    """`rows_of` in columns."""
    rows = [HEADINGS, *rows_of(results)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    padded = ([c.ljust(w) for c, w in zip(row, widths, strict=True)] for row in rows)
    return "\n".join("  ".join(cells).rstrip() for cells in padded)
