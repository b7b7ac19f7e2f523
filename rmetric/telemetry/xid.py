"""Xid numbers, the NVIDIA driver's error reports: what they mean and what they ask for."""

from __future__ import annotations

import re
from dataclasses import dataclass

#: What an Xid is about. `application`: the program that runs on the GPU.
CLASSES = ("application", "engine", "memory", "link", "bus", "firmware", "notice")


@dataclass(frozen=True)
class Xid:
    """One entry of the Xid catalogue.

    Attributes:
        number: the driver's.
        words: what happened.
        about: one of `CLASSES`.
        level: of `rmetric.telemetry.verdict.LEVELS`.
        action: of `rmetric.telemetry.verdict.ACTIONS`.
    """

    number: int
    words: str
    about: str
    level: str
    action: str


#: Number -> entry. The numbers and what each asks for: NVIDIA, Xid errors (catalogue, in the GPU
#: deployment documentation); words and levels are ours. Where NVIDIA asks to look into a status
#: that NVML does not hand out (144 to 150), the entry is for the worse of its cases. Ours is
#: stricter in four: NVIDIA has 63 ignored (we: reset) and asks for a reset after 64 and 95 (we:
#: drain, so that somebody looks at the memory first); for 48 it has a workflow (we: drain).
CATALOGUE = {
    entry.number: entry
    for entry in (
        Xid(8, "the GPU stopped processing", "engine", "risk", "restart_application"),
        Xid(11, "damaged commands from the program", "engine", "risk", "restart_application"),
        Xid(13, "illegal instruction or address in the program", "application", "healthy", "none"),
        Xid(31, "page fault of the program", "application", "healthy", "none"),
        Xid(32, "commands damaged on their way over PCIe", "engine", "risk", "restart_application"),
        Xid(43, "a channel of the program was stopped", "application", "healthy", "none"),
        Xid(45, "a channel was torn down after another error", "application", "healthy", "none"),
        Xid(46, "the GPU timed out", "engine", "fatal", "reset"),
        Xid(48, "uncorrectable memory error", "memory", "fatal", "drain"),
        Xid(62, "the internal micro-controller halted", "firmware", "fatal", "reset"),
        Xid(63, "a row of memory is to be replaced at the next reset", "memory", "risk", "reset"),
        Xid(64, "a failing row of memory could not be replaced", "memory", "fatal", "drain"),
        Xid(69, "the program asked for what the engine lacks", "engine", "risk",
            "restart_application"),
        Xid(74, "NVLink error, here or at the other end", "link", "risk", "reset"),
        Xid(79, "the GPU has fallen off the bus", "bus", "fatal", "reboot"),
        Xid(92, "many corrected memory errors", "memory", "healthy", "watch"),
        Xid(94, "memory error, contained in one application", "memory", "risk",
            "restart_application"),
        Xid(95, "memory error that was not contained", "memory", "fatal", "drain"),
        Xid(109, "switching between programs timed out", "engine", "fatal", "reset"),
        Xid(110, "security fault", "firmware", "fatal", "reset"),
        Xid(119, "the GPU's system processor (GSP) does not answer", "firmware", "fatal", "reset"),
        Xid(120, "error in the GPU's system processor (GSP)", "firmware", "fatal", "reset"),
        Xid(121, "corrected error on the link to the CPU", "link", "healthy", "watch"),
        Xid(136, "an NVLink could not be trained", "link", "fatal", "reset"),
        Xid(137, "illegal access over NVLink", "link", "healthy", "watch"),
        Xid(140, "memory error that was not recovered", "memory", "fatal", "reset"),
        Xid(143, "the GPU could not be initialised", "firmware", "fatal", "reset"),
        Xid(144, "NVLink error (SAW)", "link", "fatal", "reset"),
        Xid(145, "NVLink error (RLW)", "link", "fatal", "reset"),
        Xid(146, "NVLink error (TLW)", "link", "fatal", "reset"),
        Xid(147, "NVLink error (TREX)", "link", "healthy", "watch"),
        Xid(148, "NVLink error (NVLPW)", "link", "healthy", "watch"),
        Xid(149, "NVLink error (NETIR)", "link", "fatal", "reset"),
        Xid(150, "NVLink error (MSE)", "link", "fatal", "reset"),
        Xid(154, "what the driver recommends has changed", "notice", "healthy", "watch"),
        Xid(155, "an NVLink was taken down by software", "link", "risk", "reset"),
        Xid(156, "a part was retired, in force after a reset", "memory", "risk", "reset"),
        Xid(157, "a part could not be retired", "memory", "healthy", "watch"),
        Xid(158, "the GPU timed out for good", "bus", "fatal", "reset"),
    )
}  # fmt: skip

#: Faults of the program that runs on the GPU, and the tear-down after one.
APPLICATION_XIDS = frozenset(n for n, xid in CATALOGUE.items() if xid.about == "application")


def xid_entry(number: int) -> Xid:
    """Catalogue entry of an Xid; a `watch` entry for an unknown number.

    >>> xid_entry(79).action, xid_entry(12345).action
    ('reboot', 'watch')
    """
    unknown = Xid(number, "not in the catalogue", "notice", "healthy", "watch")
    return CATALOGUE.get(number, unknown)


def xid_kind(xid: int) -> str:
    """Kind of the event of an Xid.

    An Xid that a training program brings upon itself is kept, for the log, and
    marked: `HardwareEvent.is_hardware` is False for it, and λ does not count it.
    Every other number, unknown ones too, is taken for the hardware's.

    >>> xid_kind(79), xid_kind(13)
    ('xid_79', 'application_xid_13')

    Source: NVIDIA, Xid errors (the catalogue in the GPU deployment documentation).
    Weakness: a broken GPU can raise 13 or 31 too; on several workers at once the
    program is the likelier cause, on one worker again and again the GPU is.
    """
    return f"application_xid_{xid}" if xid in APPLICATION_XIDS else f"xid_{xid}"


def xid_of_kind(kind: str) -> int | None:
    """Inverse of `xid_kind`: the Xid number of a kind; None for other events.

    >>> xid_of_kind("application_xid_13"), xid_of_kind("gpu_lost")
    (13, None)
    """
    found = re.fullmatch(r"(?:application_)?xid_(\d+)", kind)
    return int(found[1]) if found else None
