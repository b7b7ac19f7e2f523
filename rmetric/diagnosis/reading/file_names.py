"""Infer rank and node of a log file from its name and folders."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

#: What Kubernetes puts behind the name or the number of a pod.
POD_SUFFIX = r"-[bcdfghjklmnpqrstvwxz2456789]{5}"
#: Words before a number in a folder's or a file's name, by the kind of number; a JobSet's pod has a
#: number behind that of its job ("train-worker-0-2-m2rlf.log").
_LABELLED = re.compile(
    r"(?i)(?<![a-z])(?:(?:tp|pp|dp|mp|cp|ep|sp)_?rank"
    r"|(?P<local>local(?:_?rank)?|device|workerlog|(?:gpu|npu|card)(?![-_.=]?0\d))"
    r"|(?P<node>node_?rank|node|host|worker|server|machine|pod|algo|w)"
    r"|(?P<rank>(?:global_?)?rank|r(?!\d+-[a-z]{0,4}\d)|proc|process|task))[-_.=]?(?P<number>\d+)"
    rf"(?P<pod>-\d+(?={POD_SUFFIX}(?:[._/]|$)))?(?![a-z\d])"
)
#: The attempt in a path, as torchelastic names it (``attempt_0/3/stderr.log``).
ATTEMPT = re.compile(r"(?i)(?:^|/)(?:attempt|try|restart)[-_.]?(\d+)(?=[/._-]|$)")
#: Words of a host's or a pod's name before such a word ("train_a3-node-12.log"). A single one with
#: no number in it and no other separator before it may be of the file's name ("train-node-12.log").
_BEFORE_NODE = re.compile(
    r"(?i)(?:(?<=[_.])(?:[a-z][a-z\d]*-)+|(?:^|(?<=/))(?:[a-z]+\d[a-z\d]*-|(?:[a-z\d]+-){2,})+)$"
)
_JOBSET = re.compile(r"(?:^|(?<=/))(?:[a-z\d]+-)+$")
_HOST_FORM = re.compile(
    r"(?i)(?<![a-z\d])((?:[a-z]+-)*(?:node|host|compute|gpu|dgx|hgx|cn|gn|nid|srv|ip|ascend|npu|atlas|mi\d{3}\w?|gaudi\d?"
    r"|[ahb][1-3]00)[a-z-]*\d[\d-]*"
    r"|r\d+i\d+n\d+)(?![a-z\d])"
)
#: A folder's name that may be a host's: letters, and a number at its end.
_FOLDER_NAME = re.compile(r"(?i)(?P<form>[a-z][a-z\d]*(?:[-_.][a-z\d]+)*?[-_.]?)\d+")
_MACHINE = (
    r"(?!(?:job|run|try|part|attempt|restart|boot)[-_]?\d)[a-z][a-z\d-]*\d[a-z\d-]*"
    r"|\d{1,3}(?:\.\d{1,3}){3}"
)
#: Files of a machine's own log, whose lines may not name the host.
_KERNEL_LOG = re.compile(
    rf"(?i)(?:^|/)(?:(?P<before>{_MACHINE})[-_.])?(?:dmesg(?:-T)?|kern(?:el)?|syslog|messages|journal(?:ctl)?)"
    rf"(?:[-_.](?P<after>{_MACHINE}))?(?:[-_.](?:log|txt|out|gz|bz2|xz|zst|\d+))*$"
    r"|(?:^|/)(?:dmesg|kern(?:el)?|syslog|messages|journal(?:ctl)?)(?:[-_.]?logs?)?/"
    rf"(?P<inside>{_MACHINE})(?:[-_.](?:log|txt|out|kern|gz|bz2|xz|zst))*$"
)
#: Names that torchrun gives to the files of a rank, in a folder with the rank's number.
_STREAMS = re.compile(r"/(stdout|stderr)\.log$")
_ATTEMPT = re.compile(r"(?:^|/)attempt_\d+/$")
_OF_POD = re.compile(rf"^{POD_SUFFIX}(?=[._/]|$)")
#: The files of MindSpore's launcher: one of its scheduler, and one of each rank.
_MSRUN = re.compile(r"(?P<folder>(?:.*/)?)(?:scheduler|worker_(?P<rank>\d+))\.log")
#: Numbers behind these words count runs or time, not ranks.
_COUNTS = re.compile(
    r"(?i)(?:result|run|trial|seed|attempt|exp|part|fold|version|job|epoch|step|ckpt|checkpoint"
    r"|iter|log\.|slurm-\d+_|try|restart)[a-z]*[-_.]?$"
)
#: Words of a file's name, and how many of them are looked at for the names of nodes.
_NAME_WORD = re.compile(r"[a-zA-Z\d]+")
MAX_NAME_WORDS = 40
#: Least number of files of which an unlabelled number is a rank.
_MIN_FILES = 4


@dataclass
class FileIdentity:
    """Rank and node that a file name states; the node's number, where it is a word and a number."""

    rank: int | None = None
    local_rank: int | None = None
    node: str | None = None
    node_number: int | None = None

    @property
    def ranked(self) -> bool:
        return self.rank is not None or self.local_rank is not None


def identify_files(names: Sequence[str]) -> list[FileIdentity]:
    """Rank and node of each file, by its name and folders.

    "rank_3.log" is a rank and "node-07.out" a node by the word before the number. A number without
    a word ("train_0012.log", torchrun's "attempt_0/3/stderr.log") is one where the files count from
    0 without gaps. Ranks within nodes become global ones where the nodes are numbered from 0 and
    have equally many.
    """
    files = [_labelled(name) for name in names]
    _take_msrun(names, files)
    _take_counted(names, files)
    _take_hosts(names, files)
    _take_folders(names, files)
    _count_over_nodes(files)
    return files


def is_kernel_log(name: str) -> bool:
    """Return True for the name of a machine's own log: dmesg, syslog, journal."""
    return _KERNEL_LOG.search(name) is not None


def names_in(file: str, nodes: Collection[str]) -> list[str]:
    """Those of several nodes whose whole names a file's name has in it, each once."""
    words = list(_NAME_WORD.finditer(file))[:MAX_NAME_WORDS]
    # However many nodes there are, a name has few parts.
    parts = (
        file[first.start() : last.end()] for at, first in enumerate(words) for last in words[at:]
    )
    return list(dict.fromkeys(part for part in parts if part in nodes))


def natural(name: str) -> list[tuple[int, str]]:
    """Sort key by which rank_2 precedes rank_10."""
    parts = re.split(r"(\d+)", name)
    return [(int(part), "") if at % 2 else (-1, part) for at, part in enumerate(parts)]


def _labelled(name: str) -> FileIdentity:
    file = FileIdentity()
    for match in _LABELLED.finditer(name):
        number = int(match["number"])
        if match["rank"]:
            file.rank = number
        elif match["local"]:
            file.local_rank = number
        elif match["node"]:
            words = (_JOBSET if match["pod"] else _BEFORE_NODE).search(name[: match.start()])
            file.node, file.node_number = (words[0] if words else "") + match.group(), number
    if (kernel := _KERNEL_LOG.search(name)) and any(kernel.groups()):
        # the 2 of "gpu-2.kern.log" is not a rank
        return FileIdentity(node=kernel["before"] or kernel["after"] or kernel["inside"])
    return file


def _take_msrun(names: Sequence[str], files: list[FileIdentity]) -> None:
    """Ranks of the files beside a scheduler's, and of those in the folders of other nodes."""
    found = [_MSRUN.fullmatch(name) for name in names]
    scheduled = {match["folder"] for match in found if match and match["rank"] is None}
    times = Counter(match["rank"] for match in found if match)
    for at, match in enumerate(found if scheduled else ()):
        if match and match["rank"] and (times[match["rank"]] == 1 or match["folder"] in scheduled):
            files[at] = FileIdentity(rank=int(match["rank"]))


def _take_counted(names: Sequence[str], files: list[FileIdentity]) -> None:
    """Numbers without a word, where the files that differ in nothing else count from 0."""
    series: dict[tuple[str, str], dict[int, list[FileIdentity]]] = defaultdict(dict)
    for name, file in zip(names, files, strict=True):
        for before, number, after in _unlabelled(name) if not file.ranked else ():
            series[before, after].setdefault(number, []).append(file)
    for (before, after), numbered in series.items():
        of_torchrun = after == "/*" and (not before or before.endswith("/"))
        least = 2 if of_torchrun else _MIN_FILES
        # Of a folder that torchrun makes some files may be missing.
        sure = of_torchrun and _ATTEMPT.search(before) is not None
        if sure or (len(numbered) >= least and sorted(numbered) == list(range(len(numbered)))):
            for number, files_of in numbered.items():
                for file in files_of:
                    local = of_torchrun or file.node is not None
                    setattr(file, "local_rank" if local else "rank", number)


def _unlabelled(name: str) -> Iterator[tuple[str, int, str]]:
    """Each number of a name that no word labels, with what of the name is before and behind it."""
    ends = {match.end() for match in _LABELLED.finditer(name)}
    for match in re.finditer(r"\d+", name):
        before = name[: match.start()]
        # "node-01.log" is a node and nothing else.
        if match.end() not in ends and not _COUNTS.search(before):
            after = _OF_POD.sub("-*", _STREAMS.sub("/*", name[match.end() :]))
            yield before, int(match.group()), after


def _take_hosts(names: Sequence[str], files: list[FileIdentity]) -> None:
    """Names of hosts, where several files differ by a word of one form with digits in it."""
    forms: dict[tuple[str, str], dict[int, str]] = defaultdict(dict)
    for at, (name, file) in enumerate(zip(names, files, strict=True)):
        for match in _HOST_FORM.finditer(name) if file.node is None else ():
            after = name[match.end() :]
            if file.ranked:  # on another node a file has another rank
                after = re.sub(r"\d+", "0", after)
            if not (file.ranked and _LABELLED.match(name, match.start())):
                forms[name[: match.start()], after][at] = match.group()
    for hosts in forms.values():
        if len(set(hosts.values())) > 1:
            for at, host in hosts.items():
                files[at].node = host


def _take_folders(names: Sequence[str], files: list[FileIdentity]) -> None:
    """Names of hosts of any form, where folders that differ in their number hold the same files."""
    found: dict[tuple[str, str], dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
    places: dict[int, tuple[tuple[str, str], str]] = {}
    for at, (name, file) in enumerate(zip(names, files, strict=True)):
        parts = name.split("/")
        for place, folder in enumerate(parts[:-1]):
            known = _LABELLED.search(folder) or _COUNTS.search(folder.rstrip("0123456789"))
            if file.node is None and not known and (match := _FOLDER_NAME.fullmatch(folder)):
                key = "/".join(parts[:place]), match["form"]
                found[key][folder].add("/".join(parts[place + 1 :]))
                places.setdefault(at, (key, folder))
    for at, (key, folder) in places.items():
        others = [inside for other, inside in found[key].items() if other != folder]
        if any(found[key][folder] & inside for inside in others):
            files[at].node = folder


def _count_over_nodes(files: list[FileIdentity]) -> None:
    """Ranks within numbered nodes into global ones."""
    places: dict[str, set[int]] = defaultdict(set)
    for file in files:
        within = file.local_rank if file.rank is None else file.rank
        if file.node is not None and within is not None:
            places[file.node].add(within)
    # A rank on two nodes is not of the whole job.
    of_nodes = sum(map(len, places.values())) > len(set().union(*places.values()))
    per_node = max(map(len, places.values()), default=0)
    numbered = {file.node_number for file in files if file.node in places} == {*range(len(places))}
    equal = numbered and all(ranks == {*range(per_node)} for ranks in places.values())
    for file in files:
        if file.node is None or len(places) <= 1:
            file.rank = file.local_rank if file.rank is None else file.rank
        elif file.node in places and of_nodes:
            within = file.rank if file.local_rank is None else file.local_rank
            file.local_rank, file.rank = within, None
            if equal and within is not None:
                file.rank = (file.node_number or 0) * per_node + within
