"""Extract stage, exception and the user's own frame from a traceback."""

from __future__ import annotations

import re
from collections.abc import Sequence

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
