"""Xid numbers, the NVIDIA driver's error reports, as kinds of events."""

from __future__ import annotations

#: Faults of the program that runs on the GPU: an illegal instruction or address
#: (13), a page fault (31), a stopped channel (43), and the tear-down after one (45).
APPLICATION_XIDS = frozenset({13, 31, 43, 45})


def xid_kind(xid: int) -> str:
    """The kind of event that an Xid is.

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
