"""Log events to display, of the causes and unusual ones; what a traceback states in them."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from rmetric._util.printed import counted
from rmetric.diagnosis.clock import Ordering
from rmetric.diagnosis.facts.job import Event, Job, Occurrence
from rmetric.diagnosis.library.files import compiled
from rmetric.diagnosis.library.load import PATTERN_SECONDS
from rmetric.diagnosis.result import Evidence
from rmetric.diagnosis.signature import Signature

if TYPE_CHECKING:
    from rmetric.diagnosis.faults import Fault

#: Largest number of events, and of their streams.
MAX_EVENTS = 20
MAX_WHO = 8
#: Signatures of less confidence are shown only if there is nothing else, as is any error line.
LEAST = 0.3
#: The order in which roles are shown.
_ORDER = ("cause", "ending", "symptom", "echo", "odd")
_FRAME = re.compile(
    r"^\s*File \"(?P<path>.{1,400})\", line (?P<line>\d+), in (?P<name>\S+)"
    r"(?:\n(?![ \t]*File \")[ \t]+(?P<code>[^\n]{1,300}))?",
    re.MULTILINE,
)
#: Functions that a line of code calls.
_CALLS = re.compile(r"\b([A-Za-z_]\w*)\(")
#: Frames of libraries, of the interpreter and of what it makes up.
_NOT_OWN = re.compile(r"(?:site|dist)-packages|/lib(?:64)?/python[\d.]*/|[\\/]Lib[\\/]|^<")
#: Frames without a stage: a launcher starts workers again, a list of layers has items too, and
#: activations are computed again from what is called a checkpoint.
_BESIDES = re.compile(
    r"[\\/]torch[\\/](?:distributed[\\/](?:run|launch|elastic)|nn[\\/]|utils[\\/]checkpoint)"
    r"|tensor_parallel[\\/]random|activation_checkpoint"
)
_RAISED = re.compile(
    r"^(?:[ \t]*|[^\n]{0,80}[ :\]])(?P<name>(?:[A-Za-z_]\w*\.)*(?:_?[A-Z]\w*|error|timeout))"
    r"(?:: ?(?P<message>[^\n]*))?$",
    re.MULTILINE,
)
_ENDS = re.compile(r"(?:Error|Exception|Failure|Interrupt|Exit|Warning|Timeout|error|timeout)$")
_CHAINED = re.compile(
    r"^(?:During handling of the above exception|The above exception was the direct)", re.MULTILINE
)
#: Name of a function that stands for a file's -> such files, whatever their functions are called.
_FILES = {
    "checkpoint": re.compile(r"(?i)checkpoint\w*(?:\.py$|[\\/])"),
    "dataset": re.compile(r"(?i)data_?(?:set|loader)s?\w*\.py$|torch[\\/]utils[\\/]data[\\/]"),
}
#: Stage -> words in a function's name; of the innermost frame that any fits the first that does.
_STAGES = {stage: re.compile(words, re.IGNORECASE) for stage, words in {
    "checkpoint": r"checkpoint|save_(?:model|state|pretrained|sharded)|(?:^|\.)_?save$",
    # Validation of arguments or of a result is not that of a model.
    "evaluate": r"^_?(?:run_)?(?:eval\w*|validation\w*)|_(?:eval|validation)"
                r"|(?:^|_)validate(?:_(?:epoch|step|loop|model|one|and))?(?![a-z_])",
    "load data": r"__getitem__|collate|data_?loader|dataset|load_data|_next_data"
                 r"|^_?fetch|get_batch",
    "initialise": r"init_process_group|initiali[sz]e|setup_(?:model|distributed)|build_model"
                  r"|from_pretrained|^_new_process_group|^_?load_(?:state|weights|model|params)"
                  r"|^_?restore",
    "tear-down": r"destroy_process_group|^_?(?:clean_?up|tear_?down|finali[sz]e|__del__)$",
    "compile": r"^compile|_compile|inductor|dynamo",
}.items()}  # fmt: skip
_TRAINS = re.compile(r"^_?(?:inner_)?train(?:ing)?(?:_\w*(?:step|loop|batch|epoch|iter\w*))?$|^fit")


def of_causes(job: Job, causes: Sequence[Fault], ordering: Ordering) -> tuple[Evidence, ...]:
    """One for each event that a cause matched, the causes first; generic ones if nothing else."""
    specific = [one for one in causes if one.signature.rank and one.signature.confidence >= LEAST]
    shown: dict[int, Evidence] = {}
    for cause in sorted(specific or causes, key=lambda one: _ORDER.index(one.signature.role)):
        for number in sorted(cause.events - shown.keys()):
            matches = [match for match in cause.matches if number in match.events]
            firsts = [match.first for match in matches if match.first.event == number]
            event, who = job.events[number], [match.stream for match in matches]
            first, signature = [*firsts, event.first][0], cause.signature
            shown[number] = _evidence(event, first, ordering, who, signature.title, signature)
    return tuple(shown.values())[:MAX_EVENTS]


def of_odd(
    job: Job, odd: Iterable[tuple[int | Occurrence, str]], ordering: Ordering
) -> tuple[Evidence, ...]:
    """Events by number, or single entries, that a pattern found, with its reason; each once."""
    shown: dict[int, Evidence] = {}
    for one, why in odd:
        event = job.events[one if isinstance(one, int) else one.event]
        if event.number not in shown:
            often = sorted(event.counts, key=lambda name: (-event.counts[name], name))
            first, who = (event.first, often) if isinstance(one, int) else (one, [one.stream])
            shown[event.number] = _evidence(event, first, ordering, who, why)
    return tuple(shown.values())[:MAX_EVENTS]


def _evidence(
    event: Event, first: Occurrence, ordering: Ordering, who: Sequence[str], why: str,
    signature: Signature | None = None,
) -> Evidence:  # fmt: skip
    return Evidence(
        role=signature.role if signature else "odd",
        signature=signature.id if signature else "",
        why=why,
        template=event.template,
        text=first.text,
        file=first.file,
        line=first.line,
        time=ordering.dated(first),
        who=tuple(who[:MAX_WHO]),
        count=sum(event.counts.get(one, 0) for one in who),
        point=_point(signature.patterns, first.text) if signature else "",
    )


def _point(patterns: Sequence[str], text: str) -> str:
    """Text matched by the first matching pattern; "" on timeout."""
    try:
        found = (compiled(one).search(text, timeout=PATTERN_SECONDS) for one in patterns)
        return next((one[0] for one in found if one), "")
    except TimeoutError:
        return ""


def how_often(cause: Fault, job: Job) -> str:
    """Number of entries of a cause, and of the ranks, nodes and other files that logged it."""
    times = "logged once" if cause.count == 1 else f"logged {cause.count:,} times"
    if len(cause.streams) == 1:
        return times
    # A rank within a node is a rank, though its number is not known.
    kinds = Counter(
        "rank" if one.rank is not None or " local " in one.name else "node" if one.node else "file"
        for one in map(job.streams.__getitem__, cause.streams)
    )
    by = [counted(kinds[kind], kind) for kind in ("rank", "node", "file") if kinds[kind]]
    return f"{times} by {' and '.join(by)}"


def stage_of(text: str) -> str:
    """The stage in which the entry's traceback was raised; "" where it is not known."""
    # The first of a chain of exceptions is the failure; the others are of handling it.
    chain = (_names(_frames(one)) for one in _CHAINED.split(text))
    stages = (
        _innermost(names) or ("train" if any(map(_TRAINS.search, names)) else "") for names in chain
    )
    return next(filter(None, stages), "")


def _frames(text: str) -> list[re.Match[str]]:
    return [one for one in _FRAME.finditer(text) if not _BESIDES.search(one["path"])]


def _names(frames: Sequence[re.Match[str]]) -> list[str]:
    """Names of functions, outermost first: of each frame's file, its own, and what it calls."""
    names = []
    for frame in frames:
        if frame["name"] != "<module>":  # a whole program may be called after its data
            names += [name for name, files in _FILES.items() if files.search(frame["path"])]
        names.append(frame["name"])
        if not _NOT_OWN.search(frame["path"]):
            names += _CALLS.findall(frame["code"] or "")
    return names


def _innermost(names: Sequence[str]) -> str:
    fits = (stage for name in names[::-1] for stage, words in _STAGES.items() if words.search(name))
    return next(fits, "")


def raised(text: str) -> str:
    """The exception that ends an entry and the frame of the user's own code that led to it.

    The own frame is the innermost that lies in no library; "" where there is no exception.
    """
    frames = list(_FRAME.finditer(text))
    behind = _RAISED.finditer(text, frames[-1].end() if frames else 0)
    found = next((one for one in behind if frames or _ENDS.search(one["name"])), None)
    if found is None:
        return ""
    name = found["name"].rpartition(".")[2]
    name = found["name"] if name in ("error", "timeout") else name
    own = [frame for frame in frames if not _NOT_OWN.search(frame["path"])][-1:]
    places = [(one["name"], re.split(r"[\\/]", one["path"])[-1], one["line"]) for one in own]
    place = "".join(f" in {function} ({file}:{line})" for function, file, line in places)
    message = (found["message"] or "").strip()
    return f"{name}{place}: {message}" if message else f"{name}{place}"
