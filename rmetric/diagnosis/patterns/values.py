"""Find ranks whose logged values deviate from their peers: numbers, settings, a loss.

Event counts cannot show a rank that logs the same lines with other values, for templates mask them.
Not part of L4.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import isfinite
from statistics import median
from typing import NamedTuple

from rmetric.diagnosis.facts.job import Job, JobStream, Occurrence
from rmetric.diagnosis.patterns.spatial import robust_deviation

#: Least share of the ranks that log a value, and least number of them, to compare it.
MIN_RANK_SHARE = 0.75
MIN_RANKS = 4

# -- numbers of steps

#: An outlier is at least this many times the median of the others, and so many robust deviations
#: above it.
MIN_RATIO_TO_MEDIAN = 5.0
MIN_DEVIATIONS = 6.0
#: Number of last common steps that are compared, and at how many of them a number must be odd.
NUM_STEPS = 4
MIN_OUTLIER_STEPS = 2
#: Least size relative to the largest number in the others' same entries: a fifteenfold
#: millisecond does not matter in a step of seconds.
MIN_SHARE_OF_LARGEST = 0.3
#: A name and its number, as in "data 12.3", "loss=nan", "time (ms): 7".
_NAMED = re.compile(
    r"(?P<name>[A-Za-z][A-Za-z_/-]*(?: ?\([A-Za-z/ ]{1,12}\))?)\s?[ =:|]\s?"
    r"(?P<value>[-+]?\d+(?:\.\d+)?(?:[eE][-+]?\d+)?|nan|inf)(?![\w:/-]|\.\d)"
)
#: Names of identities and times, which are not quantities.
_NO_QUANTITY = re.compile(
    r"(?i)(?:^|[_ -])(?:rank|step|iteration|iter|epoch|pid|node|gpu|device|line)s?$"
)


class NumberOutlier(NamedTuple):
    """A number of one stream that differs from the others'."""

    stream: str
    name: str
    value: float  # at the last step at which it and the others' are logged
    usual: float  # the others' median there
    steps: int  # number of the last steps at which it differs
    place: Occurrence

    @property
    def times(self) -> float:
        """How many times the others' it is."""
        return abs(self.value) / max(abs(self.usual), 1e-9) if isfinite(self.value) else 1e9


def number_outliers(job: Job) -> list[NumberOutlier]:
    """Per stream the number that is most times the others'; recurring ones only.

    Compares the numbers of all ranks' last entries at the same steps. At most one rank in four can
    be odd: a number of more of them is usual.
    """
    recurring: dict[tuple[str, int, str], list[NumberOutlier]] = defaultdict(list)
    for event, number in _odd_at_steps(job):
        recurring[number.stream, event, number.name].append(number)
    often = [group[0]._replace(steps=len(group)) for group in reversed(recurring.values())]
    often = [number for number in often if number.steps >= MIN_OUTLIER_STEPS]
    worst = {number.stream: number for number in sorted(often, key=lambda number: number.times)}
    return sorted(worst.values(), key=lambda number: (-number.times, number.stream))


def _odd_at_steps(job: Job) -> Iterator[tuple[int, NumberOutlier]]:
    """(event, outlier) at the last common steps, the last one first."""
    ranks = [stream for stream in job.streams.values() if stream.rank is not None]
    least = max(MIN_RANKS, MIN_RANK_SHARE * len(ranks))
    entries: dict[tuple[int, int], list[Occurrence]] = defaultdict(list)
    for entry in (entry for stream in ranks for entry in stream.tail):
        if entry.step is not None:
            entries[entry.event, entry.step].append(entry)
    compared: Counter[tuple[int, str]] = Counter()
    # The numbers of one step at a time: those of all would need much memory.
    for event, step in sorted(entries, reverse=True):
        logged: dict[str, dict[str, tuple[float, Occurrence]]] = defaultdict(dict)
        for entry in entries[event, step]:
            for name, value in numbers(entry.text):
                logged[name][entry.stream] = value, entry
        finite = {
            name: [value for value, _ in values.values() if isfinite(value)]
            for name, values in logged.items()
        }
        largest = max((median(map(abs, each)) for each in finite.values() if each), default=0.0)
        for name, values in logged.items():
            if len(values) < least or compared[event, name] >= NUM_STEPS:
                continue
            compared[event, name] += 1
            for number in _odd(name, values, finite[name], MIN_SHARE_OF_LARGEST * largest):
                yield event, number


def _odd(
    name: str, values: Mapping[str, tuple[float, Occurrence]], finite: list[float], matters: float
) -> Iterator[NumberOutlier]:
    """Those of one number that are far above the others', if they are few."""
    if len(finite) < MIN_RANK_SHARE * len(values):
        return
    usual = median(finite)
    spread = MIN_DEVIATIONS * robust_deviation(finite, usual)
    off = max(abs(usual) * (MIN_RATIO_TO_MEDIAN - 1.0), spread, matters - usual)
    odd = [
        NumberOutlier(stream, name, value, usual, 1, place)
        for stream, (value, place) in values.items()
        if not isfinite(value) or value - usual > off > 0.0
    ]
    if len(odd) <= max(1.0, (1.0 - MIN_RANK_SHARE) * len(values)):
        yield from odd


def numbers(text: str) -> Iterator[tuple[str, float]]:
    """The named numbers of an entry's first line.

    >>> list(numbers("rank 3 step 7: data 12.5 | loss=nan at 12:30:01"))
    [('data', 12.5), ('loss', nan)]
    """
    for match in _NAMED.finditer(text.partition("\n")[0]):
        if not _NO_QUANTITY.search(match["name"]):
            yield match["name"], float(match["value"])


# -- settings

#: One rank in this many may differ; at least one.
RANKS_PER_OUTLIER = 16
#: Number of words before a bare value that make its name.
NUM_CONTEXT_WORDS = 3
_WORD_OF_TEXT = re.compile(r"[^\s,;()\[\]{}|'\"]+")
#: A number or a version: no time, no duration, no address, no name with a number.
_SETTING = re.compile(r"v?\d+(?:[./]\d+){0,2}(?:[+-][A-Za-z][\w.]*)?")
#: Names of addresses that all ranks of a job share.
_SHARED = re.compile(
    r"(?i)(?:master|rendezvous|rdzv|coordinator|init_method|scheduler|chief|head)\D*$"
)
#: Names of identities and of what differs by chance, which are not settings.
_NO_SETTINGS = re.compile(
    r"(?i)(?:^|[_ -])(?:(?:local|node|group|global|world|own|my|machine|worker|task)?[_ -]?"
    r"(?:rank|id|index|idx|num(?:ber)?)|pid|tid|ppid|process|thread|node|host(?:name)?|gpus?|device"
    r"|cpus?|uuid|serial|seed|port|bus(?:id)?|pci|took|in|after|at|to|from|by)[\W_]*$"
)


def setting_outliers(job: Job, siblings: Sequence[Job] = ()) -> list[tuple[str, str]]:
    """Streams with a setting that is not that of their peers, in words; each setting once.

    All ranks of a job log the same settings at start; one with another value was launched
    differently. A setting that differs in a healthy sibling is left out, and so is one that only
    rank 0 logs otherwise: it has duties of its own.
    """
    usual = {key for sibling in siblings for key in _odd_settings(sibling)}
    return [(key[0], words) for key, words in _odd_settings(job).items() if key not in usual]


def _odd_settings(job: Job) -> dict[tuple[str, str], str]:
    """(stream, name) -> a value that few ranks have at a place in the first lines of all."""
    ranks = [stream for stream in job.streams.values() if stream.rank is not None]
    least = max(MIN_RANKS, MIN_RANK_SHARE * len(ranks))
    leaders = {stream.name for stream in ranks if stream.rank == 0}
    found = {}
    for values in _settings(ranks):
        ((usual, times),) = Counter(value for _, value in values.values()).most_common(1)
        odd = {rank: pair for rank, pair in values.items() if pair[1] != usual}
        few = len(odd) <= max(1, len(values) // RANKS_PER_OUTLIER)
        if len(values) >= least and few and odd.keys() != leaders:
            for rank, (name, value) in odd.items():
                found[rank, name] = f"logs {name} {value}; {times} others log {usual}"
    return found


def _settings(ranks: Sequence[JobStream]) -> Iterable[dict[str, tuple[str, str]]]:
    """For each place in the first lines of some ranks: stream -> name and value there."""
    texts: dict[int, dict[str, str]] = defaultdict(dict)
    for stream in ranks:
        for entry in stream.head:
            if entry.step is None:
                texts[entry.event].setdefault(stream.name, entry.text.partition("\n")[0])
    logged: dict[tuple[int, int, int], dict[str, tuple[str, str]]] = defaultdict(dict)
    for event, by_rank in texts.items():
        for rank, text in by_rank.items() if len(set(by_rank.values())) > 1 else ():
            words = _WORD_OF_TEXT.findall(text)
            for at in range(len(words)):
                if setting := _setting(words, at):
                    logged[event, len(words), at][rank] = setting
    return logged.values()


def _setting(words: Sequence[str], at: int) -> tuple[str, str] | None:
    """Name and value of a word that is a number or a shared address; None for an identity."""
    name, equals, value = words[at].rpartition("=")
    name = name if equals else " ".join(words[max(0, at - NUM_CONTEXT_WORDS) : at])
    value = value.rstrip(".:")
    number = _SETTING.fullmatch(value) and not _NO_SETTINGS.search(name)
    shared = any(map(str.isdigit, value)) and _SHARED.search(name)
    return (name, value) if number or shared else None


# -- a loss that is not finite any more, to the last step

#: Least number of lines with such a loss; a scaler leaves out a step or two.
MIN_LINES = 3
#: The loss of a training step, not of an evaluation, and not the loss scale.
_LOSS = re.compile(
    r"(?i)(?<![a-z])(?P<of>(?:[a-z]+[ _/-])*)loss['\"]?\s{0,3}[:=|]?\s{0,8}['\"]?"
    r"(?:(?P<bad>[-+]?(?:nan|inf(?:inity)?)\b)|[-+]?\d)"
)
_EVALUATION = re.compile(r"(?i)eval|val|test|probe")


def is_not_finite(text: str) -> bool | None:
    """True for a training loss that is not finite; None where the text states none.

    >>> is_not_finite("step: 6190  loss:     nan"), is_not_finite("step: 9  eval_loss: nan")
    (True, None)
    """
    if "loss" not in text and "Loss" not in text and "LOSS" not in text:
        return None
    losses = (match for match in _LOSS.finditer(text) if not _EVALUATION.search(match["of"]))
    return next((match["bad"] is not None for match in losses), None)


def loss_not_finite(job: Job) -> Occurrence | None:
    """The first line of a loss that is not finite, if it was before and never was again.

    The last lines of every stream that states a loss must have such a one.
    """
    if job.not_finite is None:
        return None
    losses = [[is_not_finite(entry.text) for entry in stream.tail] for stream in job.stepping]
    lasts = [[bad for bad in each if bad is not None][-MIN_LINES:] for each in losses]
    never_again = [len(each) == MIN_LINES and all(each) for each in lasts if each]
    was_finite = any(is_not_finite(event.first.text) is False for event in job.events)
    return job.not_finite if never_again and all(never_again) and was_finite else None
