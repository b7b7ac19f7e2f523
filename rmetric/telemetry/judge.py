"""From one GPU's readings and events to what is thought of it. Pure: no clock, no NVML."""

from __future__ import annotations

from rmetric.telemetry.changes import Counters
from rmetric.telemetry.reading import Reading
from rmetric.telemetry.risk import Risk, RiskConfig, RiskScore
from rmetric.telemetry.rules import EXPLAINED_BY, SILENT, Rule, held, rule_of
from rmetric.telemetry.verdict import ACTIONS, LEVELS, GpuVerdict

#: What each factor was made of, and where it begins and is full.
_MEASURED = {
    "temperature": "{0:.0f} °C; from {low:.0f} to {high:.0f}",
    "memory": "{0:.1%} in use; from {config.memory_low:.1%}",
    "errors": "{0:.2f} of a full rise in {window:.0f} s",
    "power": "varies by {0:.0%}; full at {config.power_full:.0%}",
    "utilisation_drop": "down by {0:.0%}",
    "temperature_rise": "{0:+.1f} °C a minute; full at {config.temperature_rise_full:g}",
}
#: Kinds of events after which a GPU does not answer until it is read again.
GONE = ("gpu_lost", "gpu_reset_required")


class Judge:
    """One GPU's verdict, online: the score of `RiskScore`, and rules that override it.

    Call `take` with each reading, `happened` with each event and `silent` while nothing
    is heard of the GPU, in the order of their times; each returns the verdict.

    A state (a pending row remap, heat) holds while readings show it. A GPU that is gone
    is so until it is read again. Any other fatal sign holds until `renewed`: a GPU does
    not get well by itself. A milder one holds for a window (interval x window) after it
    was last seen. A sign that is told again is the same sign.

    Args:
        gpu, node: as in `GpuVerdict`.
        config: of the score, see `RiskConfig`.

    >>> judge = Judge(gpu=3)
    >>> judge.take(Reading(gpu=3, time=0.0, temperature_celsius=60.0)).level
    'healthy'
    >>> verdict = judge.happened("xid_79", 4.0)
    >>> verdict.level, verdict.action, verdict.reasons[0]
    ('fatal', 'reboot', 'Xid 79: the GPU has fallen off the bus')

    Weaknesses: it sees one GPU, so it cannot tell a link's one end from the other; an
    Xid 94 is believed, and excuses the uncorrectable errors counted beside it.
    """

    def __init__(self, gpu: int, node: str = "", config: RiskConfig | None = None) -> None:
        self.gpu, self.node, self.config = gpu, node, config or RiskConfig()
        self._hold = self.config.interval * self.config.window
        self.renewed()

    def renewed(self) -> None:
        """The driver was loaded again, which is what a reset or a reboot leads to: begin anew."""
        self._score = RiskScore(self.config)
        self._risk: Risk | None = None
        self._reading: Reading | None = None
        self._at_risk = False
        self._states: set[str] = set()
        self._last_seen: dict[str, float] = {}
        self._counters = Counters()
        self._silence = ""

    def take(self, reading: Reading) -> GpuVerdict:
        """The verdict after the next reading."""
        self._silence = ""
        for kind in GONE:
            self._last_seen.pop(kind, None)
        if self._counters.rise(reading, "ecc_uncorrected_errors"):
            self._last_seen["ecc_uncorrected"] = reading.time
        self._states = held(reading)
        self._risk, self._reading = self._score.update(reading), reading
        self._at_risk = self._above(self._risk.value)
        return self.verdict(reading.time)

    def happened(self, kind: str, time: float) -> GpuVerdict:
        """The verdict after an event, of a kind as `Changes` and `xid_kind` name it."""
        rule = rule_of(kind)
        if rule is not None and kind not in self._states:
            self._last_seen[kind] = time
        return self.verdict(time)

    def silent(self, time: float, why: str) -> GpuVerdict:
        """The verdict while nothing is heard of the GPU; `why` is told as it is."""
        if not set(self._last_seen) & set(GONE):
            self._silence = why
        return self.verdict(time)

    def verdict(self, time: float) -> GpuVerdict:
        """What is thought of the GPU at a time, without anything new."""
        rules = self._holding(time)
        levels = [rule.level for rule in rules] + ["risk" if self._at_risk else "healthy"]
        actions = [rule.action for rule in rules] + ["watch" if self._at_risk else "none"]
        reasons = [self._words(rule) for rule in rules]
        if self._at_risk:
            reasons.append(self._score_in_words())
        return GpuVerdict(
            gpu=self.gpu,
            node=self.node,
            time=time,
            level=max(levels, key=LEVELS.index),
            action=max(actions, key=ACTIONS.index),
            risk=self._risk.value if self._risk else None,
            reachable=self._risk.reachable if self._risk else None,
            factors=dict(self._risk.factors) if self._risk else {},
            rules=tuple(rule.kind for rule in rules),
            reasons=tuple(reasons),
        )

    def _holding(self, time: float) -> list[Rule]:
        """The rules that hold, the gravest first."""
        for kind, last in list(self._last_seen.items()):
            rule = rule_of(kind)
            if rule is not None and rule.level != "fatal" and time - last >= self._hold:
                del self._last_seen[kind]
        for kind, other in EXPLAINED_BY.items():
            if other in self._last_seen:
                self._last_seen.pop(kind, None)
        kinds = self._states | set(self._last_seen) | ({SILENT} if self._silence else set())
        rules = [rule for kind in sorted(kinds) if (rule := rule_of(kind)) is not None]
        return sorted(rules, key=lambda rule: rule.gravity, reverse=True)

    def _above(self, value: float | None) -> bool:
        """Whether the score is at its threshold, or was and has not come down enough."""
        threshold = self.config.threshold
        least = threshold * self.config.release if self._at_risk else threshold
        return value is not None and value >= least

    def _words(self, rule: Rule) -> str:
        numbers = self._numbers(rule.kind)
        return f"{rule.words}: {numbers}" if numbers else rule.words

    def _numbers(self, kind: str) -> str:
        """What was measured, for the signs that rest on a number."""
        if kind == SILENT:
            return self._silence
        reading = self._reading
        if kind == "over_temperature" and kind in self._states and reading is not None:
            celsius, limit = reading.temperature_celsius, reading.slowdown_temperature_celsius
            return f"{celsius:.0f} °C, its limit is {limit:.0f} °C"
        if kind == "ecc_uncorrected" and "ecc_uncorrected_errors" in self._counters.told:
            return f"{self._counters.told['ecc_uncorrected_errors']} since the driver was loaded"
        return ""

    def _score_in_words(self) -> str:
        """The score against its threshold, and what it is made of, the largest share first."""
        if self._risk is None or self._risk.value is None:
            return ""
        weights = self.config.weights
        share = {name: getattr(weights, name) / weights.sum for name in self._risk.factors}
        adds = {name: share[name] * (factor or 0) for name, factor in self._risk.factors.items()}
        parts = [
            f"{name.replace('_', ' ')} {adds[name]:.2f} of {share[name]:.2f} "
            f"({self._measured(name)})"
            for name in sorted(adds, key=adds.__getitem__, reverse=True)
            if adds[name] > 0
        ]
        value, threshold = self._risk.value, self.config.threshold
        least = threshold if value >= threshold else threshold * self.config.release
        unknown = [name.replace("_", " ") for name, f in self._risk.factors.items() if f is None]
        not_told = f"; not known: {', '.join(unknown)}" if unknown else ""
        return f"risk {value:.2f}, the limit is {least:.2f}: {', '.join(parts)}{not_told}"

    def _measured(self, name: str) -> str:
        risk, reading, config = self._risk, self._reading, self.config
        high = self._score.limit(reading) if reading else config.temperature_high
        return _MEASURED[name].format(
            risk.measured[name] if risk else None,
            config=config,
            low=high - config.temperature_span,
            high=high,
            window=self._hold,
        )
