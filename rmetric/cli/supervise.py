"""Start a training, watch it, and restart it after a failure on the remaining GPUs.

FOLDER is shared with the training: heartbeats, checkpoints, requests, the journal of events,
and summary.md. The command after `--` is run without a shell. For torchrun and ft_launcher the
numbers of processes and nodes are set. In the arguments of any program the placeholders {tensor}
{pipeline} {context} {data} {expert} {micro_batch} {accumulation} {batch} {gpus} are filled in.
See docs/supervisor.md.
"""

from __future__ import annotations

import argparse
import os
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rmetric._util.errors import error_text, exit_code_of, fail
from rmetric._util.options import DEFAULT_GPU, layout_of, path_in, seconds, share, whole
from rmetric.guard.layout import Layout
from rmetric.guard.planner import BatchSpec
from rmetric.guard.planner.cluster import GPUS, Cluster
from rmetric.guard.planner.model_shape import ModelShape
from rmetric.guard.planner.problem import ENGINES, LARGEST_CHANGE, SIZES
from rmetric.guard.run_folder import RESUMES, RunFolder
from rmetric.guard.supervisor import Settings
from rmetric.guard.supervisor.allocation import ShrinkData, allot, by_model
from rmetric.guard.supervisor.journal import FolderLockedError
from rmetric.guard.supervisor.processes import Program, option_of
from rmetric.guard.supervisor.supervise import Supervisor
from rmetric.guard.trust import make_private, require_trusted
from rmetric.telemetry.risk import RiskConfig
from rmetric.telemetry.sources import GpuWatch

LOCKED = 3
NVML_SECONDS = 10.0
#: GPUs of one node, more than any has.
MOST_GPUS = 1024
EXAMPLES = """examples:
  rmetric supervise runs/a -- torchrun --nproc-per-node 4 train.py
  rmetric supervise runs/a --batch 64 --layout tensor=2,data=4 --hang-seconds 120 \\
      -- torchrun --nproc-per-node 8 train.py --tp {tensor} --accumulate {accumulation}
  rmetric supervise runs/a --nodes n1:8,n2:8 --prefix 'ssh {node}' -- torchrun train.py

exit codes: 0 finished, now or before; 1 given up or an internal error, summary.md says why, or
FOLDER cannot be written; 2 the command line is wrong; 3 another supervisor has the folder; 4 a
request asked the training to stop; 5 the training ended, but its last steps are not saved; 6 its
rescue holds it; 128 + the signal that ended the supervisor"""

#: Setting -> help text; its option has its name, and its type and default.
_RESTARTS = {
    "max_restarts": "consecutive restarts without progress before giving up",
    "backoff_seconds": "wait before a restart without progress, doubled with each consecutive one",
    "suspect_after": "consecutive failures of a GPU or node before it is dropped",
    "save_seconds": "longest wait for a checkpoint before a bad GPU is dropped",
    "stop_seconds": "longest wait for a checkpoint when the supervisor itself is stopped",
}
_TIMES = {
    "start_seconds": "no heartbeat before training begins",
    "hang_seconds": "no heartbeat during training",
    "saving_seconds": "no heartbeat during a save",
    "quiet_seconds": "no output, for programs without heartbeats (default: off)",
    "poll_seconds": "between two checks of the training and its folder",
    "look_seconds": "for a diagnosis, before a hang is ended, and beside other restarts; 0: none",
    "grace_seconds": "for processes to exit before they are killed; 0.5 after a rank died or hung",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", type=path_in, metavar="FOLDER", help="run folder")
    parser.add_argument(
        "command", nargs="+", metavar="-- COMMAND", help="the training: a program and its arguments"
    )
    place = parser.add_argument_group("where it runs").add_argument
    place("--gpus", metavar="LIST", type=gpu_list,
          help="GPUs of this machine to use, such as 0-3,6 "
          "(default: the first --nproc-per-node)")  # fmt: skip
    place("--nodes", metavar="NAME:GPUS,...", type=node_list,
          help="machines and the number of GPUs of each")  # fmt: skip
    place("--prefix", default="", metavar="WORDS",
          help="prefix of the command on each node, such as 'ssh {node}'")  # fmt: skip
    layout = parser.add_argument_group("layout and batch").add_argument
    layout("--layout", metavar="NAME=N,...", type=layout_of(list(Layout().as_json())), default={},
           help="tensor, pipeline, context, expert, micro_batch, accumulation, data")  # fmt: skip
    layout("--batch", type=whole(1), metavar="SAMPLES",
           help="samples of a step; kept by accumulation when there are fewer GPUs")  # fmt: skip
    layout("--uneven-batch", action="store_true",
           help="the training splits the batch by rmetric.guard.batch_share, so the copies need "
           "not divide it")  # fmt: skip
    layout("--allow-batch-change", type=share, nargs="?", const=LARGEST_CHANGE, default=0.0,
           metavar="SHARE", help="the batch may change by this share to keep more GPUs at work "
           "(default, if given: %(const)s)")  # fmt: skip
    layout("--model", type=path_in, metavar="FILE",
           help="shape of the model: plan any layout whose sizes have a placeholder in the "
           "command; needs --batch")  # fmt: skip
    layout("--engine", choices=tuple(ENGINES), default="megatron",
           help="engine to plan for (default: %(default)s)")  # fmt: skip
    layout("--gpu", choices=tuple(GPUS), default=DEFAULT_GPU,
           help="type of the GPUs to plan for (default: %(default)s)")  # fmt: skip
    layout("--gpu-memory", type=float, metavar="GIB", help="GPU memory, if it differs")
    group = parser.add_argument_group("restarts")
    _add_settings(group, _RESTARTS)
    restarts = group.add_argument
    restarts("--resume", choices=RESUMES,
             help="checkpoint that a guard resumes from: the newest good one, or the newest clean "
             "one, which was not saved during an alarm (default: newest)")  # fmt: skip
    restarts("--preload", metavar="MODULES", type=module_list, default=[],
             help="modules, such as torch,transformers, that the spare launcher imports, too, and "
             "from which it forks the ranks of a restart (default: they start anew)")  # fmt: skip
    restarts("--no-spare", dest="spare", action="store_false",
             help="start torchrun anew at a restart (default: while the training runs on this "
             "machine, a spare torchrun waits that has imported torch)")  # fmt: skip
    restarts("--again", action="store_true", help="run a finished folder again")
    _add_settings(parser.add_argument_group("timeouts and intervals, in seconds"), _TIMES)
    watching = parser.add_argument_group("watching").add_argument
    watching("--watch-log", type=path_in, metavar="LOG",
             help="training log for the calibrated detector")  # fmt: skip
    watching("--nvml-seconds", type=seconds, metavar="N",
             help="interval at which this machine's GPUs are read (default: 10 if there are any; "
             "0: never); FOLDER/telemetry is always read")  # fmt: skip
    watching("--webhook", metavar="URL", default=os.environ.get("RMETRIC_WEBHOOK"),
             help="post failures, diagnoses and the end there (default: RMETRIC_WEBHOOK, which "
             "keeps the address from other users)")  # fmt: skip
    watching("--echo", action="store_true", help="show the output of the training")


def _add_settings(group: argparse._ArgumentGroup, words: dict[str, str]) -> None:
    for name, text in words.items():
        default = getattr(Settings, name)
        group.add_argument(
            f"--{name.replace('_', '-')}", metavar="N",
            type=int if isinstance(default, int) else float, default=default,
            help=text if default is None else f"{text} (default: {default:g})",
        )  # fmt: skip


def module_list(text: str) -> tuple[str, ...]:
    """`torch,a.b` as ('torch', 'a.b')."""
    names = tuple(text.split(","))
    if not all(part.isidentifier() for name in names for part in name.split(".")):
        raise argparse.ArgumentTypeError(
            f"{text!r}: modules such as torch,transformers are accepted"
        )
    return names


def gpu_list(text: str) -> tuple[int, ...]:
    """`0-2,5` as (0, 1, 2, 5)."""
    found: list[int] = []
    try:
        for part in text.split(","):
            first, dash, last = part.partition("-")
            found += range(int(first), int(last if dash else first) + 1)
    except ValueError:
        found = []
    if not found or len(set(found)) < len(found):
        raise argparse.ArgumentTypeError(f"{text!r}: GPUs such as 0-3,6 are accepted, each once")
    return tuple(found)


def node_list(text: str) -> dict[str, tuple[int, ...]]:
    """`a:4,b:2` as {'a': (0, 1, 2, 3), 'b': (0, 1)}."""
    found: dict[str, tuple[int, ...]] = {}
    for part in text.split(","):
        name, _, number = part.rpartition(":")
        if not name or not number.isdigit() or int(number) < 1 or name in found:
            raise argparse.ArgumentTypeError(
                f"{part!r}: NAME:GPUS with at least one GPU is accepted, each name once"
            )
        found[name] = tuple(range(int(number)))
    return found


def run(options: argparse.Namespace) -> int:
    try:
        supervisor = _supervisor(options)
        make_private(options.folder)
        require_trusted(options.folder)
    except (ValueError, OSError, ImportError) as error:
        return fail(str(error), exit_code_of(error))
    try:
        return supervisor.run()
    except FolderLockedError as error:
        return fail(str(error), LOCKED)
    except OSError as error:  # the lock or the journal cannot be opened
        return fail(error_text(error), exit_code_of(error))


def _supervisor(options: argparse.Namespace) -> Supervisor:
    for name in ("uneven_batch", "allow_batch_change"):
        if getattr(options, name) and options.batch is None:
            raise ValueError(f"--{name.replace('_', '-')} needs --batch")
    pool = _pool(options)
    prefixes = {
        node: tuple(word.replace("{node}", node) for word in shlex.split(options.prefix))
        for node in pool
    }
    program = Program(
        arguments=tuple(options.command), prefixes=prefixes, resume=options.resume,
        visible=options.gpus is not None or _has_gpus(),
        master="" if any(prefixes.values()) else "127.0.0.1",
    )  # fmt: skip
    if len(pool) > 1 and not program.is_torchrun:
        raise ValueError(f"--nodes needs torchrun or ft_launcher, found {options.command[0]}")
    planner = _planner(options, pool, program.unit(pool))
    names = ("watch_log", "echo", "webhook", "again", "spare", "preload")
    return Supervisor(
        RunFolder(options.folder), program, pool, planner, settings=_settings(options),
        sources=_sources(options, pool), adopt=True,
        **{name: getattr(options, name) for name in names},
    )  # fmt: skip


def _settings(options: argparse.Namespace) -> Settings:
    values = {name: getattr(options, name) for name in (*_RESTARTS, *_TIMES)}
    try:
        return Settings(**values)
    except ValueError as error:  # it begins with the name of the setting
        name, _, problem = str(error).partition(" ")
        raise ValueError(f"--{name.replace('_', '-')} {problem}") from None


def _pool(options: argparse.Namespace) -> dict[str, tuple[int, ...]]:
    if options.nodes is not None:
        if options.gpus is not None:
            raise ValueError("--gpus and --nodes: one of the two")
        return dict(options.nodes)
    return {"": options.gpus if options.gpus is not None else _visible()[: _num_requested(options)]}


def _visible() -> tuple[int, ...]:
    """The GPUs that this process may use, by CUDA_VISIBLE_DEVICES; without it, as many as asked."""
    listed = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    if not listed:
        return tuple(range(MOST_GPUS))
    try:
        return tuple(map(int, listed.split(",")))
    except ValueError:
        raise ValueError(
            f"CUDA_VISIBLE_DEVICES is {listed!r}: say the numbers of these GPUs with --gpus"
        ) from None


def _num_requested(options: argparse.Namespace) -> int:
    """Number of processes in the command, or of GPUs of the layout."""
    number = option_of(options.command, "nproc-per-node")
    if number is None:
        return Layout(**options.layout).num_gpus
    if not number.isdigit() or int(number) < 1:
        raise ValueError(f"--nproc-per-node is {number!r}: say which GPUs there are with --gpus")
    return int(number)


def _planner(options: argparse.Namespace, pool: dict[str, tuple[int, ...]], unit: str) -> Any:
    first = _first_layout(options, sum(map(len, pool.values())))
    change, uneven = options.allow_batch_change, options.uneven_batch
    if options.model is not None:
        if options.batch is None:
            raise ValueError("--model needs --batch")
        # A layout that does not come to the batch is planned anew: the batch is never changed
        # unasked.
        fits = options.layout and first.global_batch == options.batch
        return by_model(
            ModelShape.from_json(options.model),
            Cluster.of([1], options.gpu, memory_gib=options.gpu_memory).gpu,
            BatchSpec(samples=options.batch, largest_change=change), engine=options.engine,
            first=first if fits else None, uneven_batch=uneven,
            fixed_sizes=_fixed_sizes(options.command, options.layout),
        )  # fmt: skip
    if allot(first, pool) is None:
        given = ",".join(f"{name}={n}" for name, n in options.layout.items())
        raise ValueError(
            f"--layout {given} needs {first.num_gpus} GPUs, "
            f"evenly on nodes; there are {', '.join(str(len(gpus)) for gpus in pool.values())}"
        )
    return ShrinkData(first, options.batch, unit, uneven_batch=uneven, largest_change=change)


def _first_layout(options: argparse.Namespace, gpus: int) -> Layout:
    given, batch = options.layout, options.batch
    one_copy = Layout(**{**given, "data": 1}).num_gpus
    whole = {"data": max(1, gpus // one_copy), **given}
    if batch is not None and "accumulation" not in given:
        if options.uneven_batch and batch >= whole["data"]:
            return Layout.split(batch, **whole)
        whole["accumulation"] = max(1, batch // (whole["data"] * given.get("micro_batch", 1)))
    return Layout(**whole)


def _fixed_sizes(command: Sequence[str], layout: Mapping[str, int]) -> dict[str, int]:
    """Sizes without a placeholder in the command: those of `--layout`, else 1.

    >>> _fixed_sizes(["torchrun", "train.py", "--tp={tensor}", "{pipeline}"], {"context": 2})
    {'context': 2, 'expert': 1}
    """
    return {name: layout.get(name, 1) for name in SIZES if f"{{{name}}}" not in "\0".join(command)}


def _sources(options: argparse.Namespace, pool: dict[str, tuple[int, ...]]) -> list[Any]:
    here = "" if "" in pool else os.uname().nodename
    if options.nvml_seconds and here not in pool:
        raise ValueError(f"--nvml-seconds: this machine, {here}, is not one of the nodes")
    own = here in pool and _has_gpus()
    seconds = NVML_SECONDS * own if options.nvml_seconds is None else options.nvml_seconds
    if not seconds:
        return []
    return [GpuWatch(pool[here], RiskConfig(interval=seconds))]


def _has_gpus() -> bool:
    return any(Path("/dev").glob("nvidia[0-9]*"))
