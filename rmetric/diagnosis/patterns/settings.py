"""Find ranks that log different settings than their peers, such as a world size or version.

All ranks of a job log the same settings at start. A rank with another value was launched
differently; templates mask values, so only the entries show it. Not part of L4.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Container, Iterator, Sequence
from typing import NamedTuple

from rmetric.diagnosis.job import Job, JobStream
from rmetric.diagnosis.patterns.numbers import MIN_RANK_SHARE, MIN_RANKS

#: One rank in this many may differ; at least one.
RANKS_PER_OUTLIER = 16
#: Number of words before a bare value that make its name.
NUM_CONTEXT_WORDS = 3
_WORD = re.compile(r"[^\s,;()\[\]{}|'\"]+")
#: Times and dates, which differ by chance.
_TIME = re.compile(r"\d:\d\d|\d{4}[-/]\d\d")
#: Names of identities and durations, which are no settings.
_NO_SETTINGS = re.compile(
    r"(?i)(?:^|[_ -])(?:(?:local|node|group|global|world|own|my|machine|worker|task)?[_ -]?"
    r"(?:rank|id|index|idx|num(?:ber)?)|pid|tid|ppid|process|thread|node|host(?:name)?|gpus?|device"
    r"|cpus?|uuid|serial|seed|port|ip|addr(?:ess)?|server|client|peer|local|bind"
    r"|listen(?:s|ing)?(?: on)?|interface|iface|bus(?:id)?|pci|nic|mac"
    r"|took|in|after|at|to|from|by)[\W_]*$"
)
#: Identities of a machine, a device, a process or an object: addresses, names with a number.
_OWN = re.compile(
    r"(?i)\d+\.\d+\.\d+\.\d+|(?:[\da-f]{0,4}:){3,}[\da-f]*|[\da-f]{4,}:[\da-f]{2}:"
    r"|0x[\da-f]+|\w+:\d{2,}"
    r"|[\da-f]{8}-[\da-f]{4}-|^[a-z][\w.-]*?[-_]?\d+(?:\.[a-z][\w.-]*)*$|^[\da-f]{12,}$"
    r"|\b(?:mlx|bnxt|eth|en[ops]|ib|cuda|gpu|npu|card|nvme)[a-z_]*\d"
)
_VERSION = re.compile(r"(?i)^v?\d+(?:\.\d+)+\S*$|\.so\b|[+.-](?:cu|rocm)\d|version")
#: Addresses that all ranks of a job share.
_SHARED = re.compile(r"(?i)master|rendezvous|rdzv|coordinator|init_method|scheduler|chief|head")
_SECONDS = re.compile(r"(?i)^[\d.]+\s?(?:s|ms|us|sec|seconds?|min|m|h)$|^[\d.]+(?:it|s)/")

_Place = tuple[int, int, int]


class SettingOutlier(NamedTuple):
    """A value that one stream logs and its peers do not.

    Attributes:
        name: the words before the value.
        value, usual: as written.
        others: number of streams that log the usual one.
    """

    stream: str
    name: str
    value: str
    usual: str
    others: int


def setting_outliers(job: Job, siblings: Sequence[Job] = ()) -> list[SettingOutlier]:
    """In the order of the streams, each at most once for a name.

    A setting that differs in a healthy sibling is left out, and so is one that only rank 0 logs
    otherwise: it has duties of its own.
    """
    usual = {(one.stream, one.name) for sibling in siblings for one in _odd(sibling)}
    found = {(one.stream, one.name): one for one in _odd(job)}
    return [one for key, one in found.items() if key not in usual]


def _odd(job: Job) -> Iterator[SettingOutlier]:
    ranks = [one for one in job.streams.values() if one.rank is not None]
    least = max(MIN_RANKS, MIN_RANK_SHARE * len(ranks))
    lines: dict[int, list[str]] = defaultdict(list)
    for stream in ranks:
        for event, text in _lines(stream):
            lines[event].append(text)
    differ = {e for e, texts in lines.items() if len(texts) >= least and len(set(texts)) > 1}
    logged: dict[_Place, dict[str, str]] = defaultdict(dict)
    names: dict[_Place, str] = {}
    for stream in ranks:
        for place, name, value in _values(stream, differ):
            logged[place][stream.name] = value
            names.setdefault(place, name)
    leader = next((one.name for one in ranks if one.rank == 0), "")
    for place, values in logged.items():
        name = names[place]
        if len(values) < least or (_NO_SETTINGS.search(name) and not _is_shared(name)):
            continue
        ((usual, times),) = Counter(values.values()).most_common(1)
        others = len(values) - times
        if not 0 < others <= max(1, len(values) // RANKS_PER_OUTLIER):
            continue
        for stream_name, value in values.items():
            if value != usual and stream_name != leader:
                yield SettingOutlier(stream_name, name, value, usual, times)


def _lines(stream: JobStream) -> Iterator[tuple[int, str]]:
    """The first line of the first entry of each event at the start of a stream."""
    seen = set()
    for entry in stream.head:
        if entry.event not in seen and entry.step is None:
            seen.add(entry.event)
            yield entry.event, entry.text.partition("\n")[0]


def _values(stream: JobStream, events: Container[int]) -> Iterator[tuple[_Place, str, str]]:
    """Words with a digit of these events: (event, words, which word), name, value."""
    for event, text in _lines(stream):
        if event not in events:
            continue
        words = _WORD.findall(text)
        for at, word in enumerate(words):
            if not any(map(str.isdigit, word)) or _TIME.search(word) or _SECONDS.search(word):
                continue
            name, equals, value = word.rpartition("=")
            before = words[max(0, at - NUM_CONTEXT_WORDS) : at]
            name = name if equals else " ".join(before)
            # "version 2.1", "libnccl.so.2" and numbers are settings, a rank's own address is none.
            if _is_shared(name) or not (_OWN.search(value) and not _VERSION.search(value)):
                yield (event, len(words), at), name, value


def _is_shared(name: str) -> bool:
    """True for an address that all ranks use; the words before another value do not count."""
    words = name.split(" ")
    last = max((at for at, word in enumerate(words) if any(map(str.isdigit, word))), default=-1)
    return any(map(_SHARED.search, words[last + 1 :]))
