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

    @property
    def outcome_text(self) -> str:
        """The outcome with the kind and the step of a failure.

        >>> Result("LR_SPIKE", "failed", "non_finite", 5, 9, {}).outcome_text
        'non-finite at 9'
        """
        if self.outcome != "failed":
            return self.outcome
        return f"{str(self.kind).replace('_', '-')} at {self.failure}"

    def is_early(self, step: int | None) -> bool:
        """True if `step` lies before the onset."""
        return step is not None and self.onset is not None and step < self.onset

    def is_in_time(self, step: int | None) -> bool:
        """True if `step` lies from the onset to before the failure, if there is one."""
        if step is None or self.onset is None or step < self.onset:
            return False
        return self.failure is None or step < self.failure


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
        found.append(
            Result(name, run["outcome"], run["failure_kind"], run["onset_step"],
                   run["failure_step"], alarms)
        )  # fmt: skip
    return found


def sentence(results: Sequence[Result]) -> str:
    """The failed runs, the absorbed faults, then the steps of each detector's alarms."""
    ordered = sorted(results, key=lambda result: ORDER[result.outcome])

    def warns(title: str) -> bool:
        return any(r.failure is not None and r.is_in_time(r.alarms[title].first) for r in ordered)

    titles = sorted(DETECTORS, key=lambda title: not warns(title))
    text = "; ".join([_outcomes(ordered), *(_detector_part(ordered, title) for title in titles)])
    return f"{text[:1].upper()}{text[1:]}."


def _outcomes(results: Sequence[Result]) -> str:
    faulty = [result for result in results if result.onset is not None]
    control = [result for result in results if result.onset is None]
    told = faulty or control
    if any(result.failure is not None for result in control):
        told = [*faulty, *control]
    onsets = {result.onset for result in faulty}
    several = "faults" if len(told) > 1 else "fault"
    since = f"of the {several} at step {onsets.pop()} " if len(onsets) == 1 else ""
    return since + " and ".join(map(_outcome, told))


def _outcome(result: Result) -> str:
    if result.outcome == "failed":
        broke = "failed" if result.onset is None else "broke its run"
        kind = str(result.kind).replace("_", "-")
        return f"{result.subject} {broke} by step {result.failure} ({kind})"
    return f"{result.subject} {'stayed healthy' if result.onset is None else 'was absorbed'}"


def _detector_part(results: Sequence[Result], title: str) -> str:
    firsts = {result.alarms[title].first for result in results}
    if firsts == {None}:
        return f"{DETECTORS[title][1]} did not alarm"
    text = f"{DETECTORS[title][1]} {_first_alarms(results, title)}"
    warned_early = [
        r for r in results if r.failure is not None and r.is_early(r.alarms[title].first)
    ]
    again = [r for r in warned_early if r.is_in_time(r.alarms[title].since_onset)]
    for result in again:
        step = result.alarms[title].since_onset
        text += f", and again at {step} in {result.subject}, {_beside_failure(result, step or 0)}"
    silent = [result.subject for result in warned_early if result not in again]
    if silent:
        text += f", and not between the start and the failure of {' or '.join(silent)}"
    return text


def _first_alarms(results: Sequence[Result], title: str) -> str:
    firsts = [result.alarms[title].first for result in results]
    onsets = {result.onset for result in results if result.onset is not None}
    same = len(results) > 1 and len(set(firsts)) == 1 and len(onsets) == 1
    if same and (firsts[0] or 0) < (onset := onsets.pop()):
        before = _steps(onset - (firsts[0] or 0))
        return f"alarmed at {firsts[0]} in every run, {before} before any fault"
    told = [
        _first_alarm(result, step)
        for result, step in zip(results, firsts, strict=True)
        if step is not None
    ]
    silent = [r.subject for r, step in zip(results, firsts, strict=True) if step is None]
    not_in = f", and not in {' or '.join(silent)}" if silent else ""
    return f"alarmed {', '.join(told)}{not_in}"


def _first_alarm(result: Result, step: int) -> str:
    place = f"at {step} in {result.subject}, "
    if result.onset is not None and step < result.onset:
        return f"{place}{_steps(result.onset - step)} before its start"
    if result.failure is not None:
        return place + _beside_failure(result, step)
    if result.onset is None:
        return f"{place}a false alarm"
    after = step - result.onset
    return place + (f"{_steps(after)} after its start" if after else "its first step")


def _beside_failure(result: Result, step: int) -> str:
    ahead = (result.failure or 0) - step
    if ahead == 0:
        return "at the failure"
    return f"{_steps(abs(ahead))} {'before' if ahead > 0 else 'after'} the failure"


def _steps(number: int) -> str:
    return f"{number} step{'' if number == 1 else 's'}"


def verdict(result: Result, first: int | None) -> str:
    """The judgement on the first alarm by the causal rule, with its step."""
    failed = result.failure is not None
    if first is None:
        return "missed" if failed else "no alarm"
    if result.is_in_time(first):
        ahead = f"{_steps((result.failure or 0) - first)} ahead"
        return f"{first}: {ahead if failed else 'on a fault that was absorbed'}"
    too_late = failed and result.onset is not None and first >= result.onset
    return f"{first}: {'too late' if too_late else 'false alarm'}"


def rows_of(results: Sequence[Result]) -> list[tuple[str, ...]]:
    """A row of text for each run, under `HEADINGS`."""
    return [
        (result.name, str(result.onset or "-"), result.outcome_text,
         *(verdict(result, alarms.first) for alarms in result.alarms.values()))
        for result in results
    ]  # fmt: skip


def table(results: Sequence[Result]) -> str:
    """`rows_of` in columns."""
    rows = [HEADINGS, *rows_of(results)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    )
