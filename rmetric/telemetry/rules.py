"""Rules that override the risk score: single signs that determine the verdict. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from rmetric.telemetry.changes import states
from rmetric.telemetry.reading import Reading
from rmetric.telemetry.verdict import ACTIONS, LEVELS
from rmetric.telemetry.xid import xid_entry, xid_of_kind

#: Kind of the sign of a GPU without recent readings.
SILENT = "silent"


@dataclass(frozen=True)
class GpuRule:
    """Verdict that one sign implies.

    Attributes:
        kind: of the event or state, as `Changes`, `xid_kind` and `held` name it.
        level, action: of `verdict.LEVELS` and `verdict.ACTIONS`.
        words: why.
    """

    kind: str
    level: str
    action: str
    words: str

    @property
    def gravity(self) -> tuple[int, int]:
        return LEVELS.index(self.level), ACTIONS.index(self.action)


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
        GpuRule(SILENT, "risk", "watch", "nothing is heard of the GPU"),
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
