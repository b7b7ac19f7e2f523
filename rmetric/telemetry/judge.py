"""Verdict on one GPU: rules for single signs, and the judge that puts them above the risk score.

Pure: no clock, no NVML.
"""

from __future__ import annotations

from dataclasses import dataclass

from rmetric.telemetry.lines import ACTIONS, LEVELS, GpuVerdict
from rmetric.telemetry.reading import Counters, Reading, states
from rmetric.telemetry.risk import Risk, RiskConfig, RiskScore
from rmetric.telemetry.xid import xid_entry, xid_of_kind

#: Kind of the sign of a GPU without recent readings.
SILENT = "silent"


@dataclass(frozen=True)
class GpuRule:
    """Verdict that one sign implies; `kind` as `Changes`, `xid_kind` and `held` name it."""

    kind: str
    level: str
    action: str
    words: str


#: By kind; those of Xids follow from `xid.catalogue`.
RULES = {
    rule.kind: rule
    for rule in (
        GpuRule("gpu_lost", "fatal", "reboot", "the driver has lost the GPU"),
        GpuRule("gpu_reset_required", "fatal", "reset", "the driver refuses the GPU until a reset"),
        GpuRule("row_remap_failed", "fatal", "drain", "no spare row of memory for a failing one"),
        GpuRule("ecc_uncorrected", "fatal", "drain", "new uncorrectable memory errors"),
        GpuRule("row_remap_pending", "risk", "reset", "a row of memory is replaced at a reset"),
        GpuRule("page_retirement_pending", "risk", "reset", "a page is retired at a reset"),
        GpuRule("recovery_gpu_reset", "fatal", "reset", "the driver asks for a reset of the GPU"),
        GpuRule("recovery_bus_reset", "fatal", "reset", "the driver asks for a reset of the bus"),
        GpuRule("recovery_node_reboot", "fatal", "reboot", "the driver asks for a reboot"),
        GpuRule("recovery_system_reboot", "fatal", "reboot", "the driver asks for a reboot"),
        GpuRule("recovery_drain_p2p", "fatal", "drain", "the driver asks to stop peer traffic"),
        GpuRule("recovery_drain_and_reset", "risk", "reset",
              "the GPU runs at reduced capacity; the driver asks for a reset when work is done"),
        GpuRule("recovery_recover_imex_domain", "risk", "watch",
              "the driver asks to recover the IMEX domain"),
        GpuRule("over_temperature", "healthy", "watch", "hotter than where it slows down"),
        GpuRule("thermal_throttle", "healthy", "watch", "slowed down by heat"),
        GpuRule("hardware_slowdown", "healthy", "watch", "slowed down by its hardware"),
        GpuRule("power_brake", "healthy", "watch", "slowed down by the power supply"),
        GpuRule(SILENT, "risk", "watch", "the GPU sends no readings"),
    )
}  # fmt: skip

#: Signs that another one explains: an uncorrectable error that was contained (Xid 94)
#: costs the application and not the GPU.
EXPLAINED_BY = {"ecc_uncorrected": "xid_94"}


def rule_of(kind: str) -> GpuRule | None:
    """Rule of a sign; None for a kind without one, such as a PCIe replay.

    >>> rule_of("xid_79").action, rule_of("pcie_replay")
    ('reboot', None)
    """
    number = xid_of_kind(kind)
    if number is not None:
        entry = xid_entry(number)
        return GpuRule(kind, entry.level, entry.action, f"Xid {number}: {entry.words}")
    if kind.startswith("recovery_unknown_"):
        words = f"the driver recommends action {kind.rpartition('_')[2]}, which is not known here"
        return GpuRule(kind, "risk", "watch", words)
    return RULES.get(kind)


def held(reading: Reading) -> set[str]:
    """Kinds of the signs that are active while readings show them."""
    found = states(reading)
    if reading.recovery_action not in (None, "none"):
        found.add(f"recovery_{reading.recovery_action}")
    return found


_MEASURED = {
    "temperature": "{0:.0f} °C; from {low:.0f} to {high:.0f}",
    "memory": "{0:.1%} in use; from {config.memory_low:.1%}",
    "errors": "{0:.2f} of a full rise in {window:.0f} s",
    "power": "varies by {0:.0%}; full at {config.power_full:.0%}",
    "utilisation_drop": "down by {0:.0%}",
    "temperature_rise": "{0:+.1f} °C a minute; full at {config.temperature_rise_full:g}",
}
#: Events after which a GPU is gone until its next reading.
GPU_GONE_EVENTS = ("gpu_lost", "gpu_reset_required")


class Judge:
    """Online verdict on one GPU: the score of `RiskScore`, and rules that override it.

    Call `take` with each reading, `happened` with each event and `silent` while readings
    are missing, in order of time; each returns the verdict.

    A state (a pending row remap, overheating) is active while readings show it. A GPU that
    is gone stays so until its next reading. Any other fatal sign is active until `renewed`,
    a milder one for a window (interval x window) after it was last seen.

    >>> judge = Judge(gpu=3)
    >>> judge.take(Reading(gpu=3, time=0.0, temperature_celsius=60.0)).level
    'healthy'
    >>> verdict = judge.happened("xid_79", 4.0)
    >>> verdict.level, verdict.action, verdict.reasons[0]
    ('fatal', 'reboot', 'Xid 79: the GPU has fallen off the bus')

    Limits: with one GPU the two ends of a link cannot be distinguished.
    """

    def __init__(self, gpu: int, node: str = "", config: RiskConfig | None = None) -> None:
        self.gpu, self.node, self.config = gpu, node, config or RiskConfig()
        self._hold = self.config.interval * self.config.window
        self.renewed()

    def renewed(self) -> None:
        """Reset the state after the driver was reloaded, by a reset or a reboot."""
        self._score = RiskScore(self.config)
        self._risk: Risk | None = None
        self._reading: Reading | None = None
        self._at_risk = False
        self._states: set[str] = set()
        self._last_seen: dict[str, float] = {}
        self._counters = Counters()
        self._silence = ""

    def take(self, reading: Reading) -> GpuVerdict:
        self._silence = ""
        for kind in GPU_GONE_EVENTS:
            self._last_seen.pop(kind, None)
        if self._counters.rise(reading, "ecc_uncorrected_errors"):
            self._last_seen["ecc_uncorrected"] = reading.time
        self._states = held(reading)
        self._risk, self._reading = self._score.update(reading), reading
        threshold, value = self.config.threshold, self._risk.value
        least = threshold * self.config.release if self._at_risk else threshold
        self._at_risk = value is not None and value >= least
        return self.verdict(reading.time)

    def happened(self, kind: str, time: float) -> GpuVerdict:
        """`kind` as named by `Changes` and `xid_kind`."""
        if rule_of(kind) is not None and kind not in self._states:
            self._last_seen[kind] = time
        return self.verdict(time)

    def silent(self, time: float, why: str) -> GpuVerdict:
        """`why` is quoted in the reasons."""
        if not set(self._last_seen) & set(GPU_GONE_EVENTS):
            self._silence = why
        return self.verdict(time)

    def verdict(self, time: float) -> GpuVerdict:
        """Verdict at a time without new input."""
        rules = self._holding(time)
        levels = [rule.level for rule in rules] + ["risk" if self._at_risk else "healthy"]
        actions = [rule.action for rule in rules] + ["watch" if self._at_risk else "none"]
        measured = [(rule.words, self._numbers(rule.kind)) for rule in rules]
        reasons = [f"{words}: {numbers}" if numbers else words for words, numbers in measured]
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

    def _holding(self, time: float) -> list[GpuRule]:
        """Active rules, most severe first."""
        for kind, last in list(self._last_seen.items()):
            rule = rule_of(kind)
            if rule is not None and rule.level != "fatal" and time - last >= self._hold:
                del self._last_seen[kind]
        for kind, other in EXPLAINED_BY.items():
            if other in self._last_seen:
                self._last_seen.pop(kind, None)
        kinds = self._states | set(self._last_seen) | ({SILENT} if self._silence else set())
        rules = [rule for kind in sorted(kinds) if (rule := rule_of(kind)) is not None]
        rules.sort(key=lambda r: (LEVELS.index(r.level), ACTIONS.index(r.action)), reverse=True)
        return rules

    def _numbers(self, kind: str) -> str:
        """Measured value of a sign that has one; else empty."""
        if kind == SILENT:
            return self._silence
        reading = self._reading
        if kind == "over_temperature" and kind in self._states and reading is not None:
            celsius, limit = reading.temperature_celsius, reading.slowdown_temperature_celsius
            return f"{celsius:.0f} °C, its limit is {limit:.0f} °C"
        if kind == "ecc_uncorrected" and "ecc_uncorrected_errors" in self._counters.last_values:
            errors = self._counters.last_values["ecc_uncorrected_errors"]
            return f"{errors} since the driver was loaded"
        return ""

    def _score_in_words(self) -> str:
        """Score, threshold and contributions, largest first."""
        assert self._risk is not None
        assert self._risk.value is not None
        weights = self.config.weights
        share = {name: getattr(weights, name) / weights.sum for name in self._risk.factors}
        adds = {name: share[name] * (factor or 0) for name, factor in self._risk.factors.items()}
        reading, config = self._reading, self.config
        high = self._score.limit(reading) if reading else config.temperature_high
        limits = {"config": config, "low": high - config.temperature_span, "high": high,
                  "window": self._hold}  # fmt: skip
        parts = [
            f"{name.replace('_', ' ')} {adds[name]:.2f} of {share[name]:.2f} "
            f"({_MEASURED[name].format(self._risk.measured[name], **limits)})"
            for name in sorted(adds, key=adds.__getitem__, reverse=True)
            if adds[name] > 0
        ]
        value, threshold = self._risk.value, self.config.threshold
        least = threshold if value >= threshold else threshold * self.config.release
        unknown = [name.replace("_", " ") for name, f in self._risk.factors.items() if f is None]
        not_known = f"; not known: {', '.join(unknown)}" if unknown else ""
        return f"risk {value:.2f}, the limit is {least:.2f}: {', '.join(parts)}{not_known}"
