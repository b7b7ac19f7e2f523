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
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from math import inf
from pathlib import Path
from typing import Any

from rmetric._util.errors import error_text, exit_code_of, fail
from rmetric._util.options import DEFAULT_GPU, layout_of, path_in, share
from rmetric.guard.layout import Layout
from rmetric.guard.planner import BatchSpec
from rmetric.guard.planner.cluster import Cluster
from rmetric.guard.planner.model_shape import ModelShape
from rmetric.guard.planner.settings import LARGEST_CHANGE, SIZES
from rmetric.guard.run_folder import RESUMES, RunFolder
from rmetric.guard.supervisor.allocation import allot, by_model, shrink_data
from rmetric.guard.supervisor.core import RestartPolicy
from rmetric.guard.supervisor.journal import FolderLockedError
from rmetric.guard.supervisor.launch_processes import Program, option_of, unit_of
from rmetric.guard.supervisor.supervise import Intervals, Supervisor, WatchOptions
from rmetric.guard.supervisor.watch import Timeouts
from rmetric.guard.trust import make_private, require_trusted
from rmetric.telemetry.gpu_watch import GpuWatch
from rmetric.telemetry.risk import RiskConfig

LOCKED = 3
NVML_SECONDS = 10.0
#: Of one node; more than any has.
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

#: Option -> help text; the names, types and defaults are those of the settings.
_RESTARTS = {
    "max_restarts": "consecutive restarts without progress before giving up",
    "enough_steps": "new steps that count as progress, as a new good checkpoint does",
    "backoff_seconds": "wait before a restart without progress, doubled with each consecutive one",
    "longest_backoff_seconds": "upper limit of that wait",
    "suspect_after": "consecutive failures of a GPU or node before it is dropped",
    "save_seconds": "longest wait for a checkpoint before a bad GPU is dropped",
    "stop_seconds": "longest wait for a checkpoint when the supervisor itself is stopped",
}
_TIMEOUTS = {
    "start": "start-up timeout: no heartbeat before training begins",
    "hang": "heartbeat timeout during training",
    "saving": "heartbeat timeout during a save",
    "quiet": "output timeout, for programs without heartbeats (default: off)",
}
_INTERVALS = {
    "poll": "between two checks",
    "progress": "between two lines of progress in the journal",
    "grace": "for processes to exit before they are killed; 0.5 after a rank died or hung",
}
#: Settings, the title of their options, these, and the suffix of their names.
_NUMBERS: tuple[tuple[Any, str, dict[str, str], str], ...] = (
    (RestartPolicy, "trying again", _RESTARTS, ""),
    (Timeouts, "seconds", _TIMEOUTS, "_seconds"),
    (Intervals, "intervals, in seconds", _INTERVALS, "_seconds"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", type=path_in, metavar="FOLDER", help="run folder")
    parser.add_argument(
        "command", nargs="+", metavar="-- COMMAND", help="the training: a program and its arguments"
    )
    where = parser.add_argument_group("where it runs")
    where.add_argument(
        "--gpus", metavar="LIST", type=gpu_list,
        help="GPUs of this machine to use, such as 0-3,6 (default: the first --nproc-per-node)",
    )  # fmt: skip
    where.add_argument(
        "--nodes", metavar="NAME:GPUS,...", type=node_list,
        help="machines and the number of GPUs of each",
    )  # fmt: skip
    where.add_argument(
        "--prefix", default="", metavar="WORDS",
        help="prefix of the command on each node, such as 'ssh {node}'",
    )  # fmt: skip
    how = parser.add_argument_group("how it is split")
    how.add_argument(
        "--layout", metavar="NAME=N,...", type=layout, default=None,
        help="tensor, pipeline, context, expert, micro_batch, accumulation, data",
    )  # fmt: skip
    how.add_argument(
        "--batch", type=int, metavar="SAMPLES",
        help="samples of a step; kept by gradient accumulation when there are fewer GPUs",
    )  # fmt: skip
    how.add_argument(
        "--uneven-batch", action="store_true",
        help="the training splits the batch by rmetric.guard.batch_share, so the copies need not "
        "divide it",
    )  # fmt: skip
    how.add_argument(
        "--allow-batch-change", type=share, nargs="?", const=LARGEST_CHANGE, default=0.0,
        metavar="SHARE",
        help="the batch may change by this share to keep more GPUs at work "
        "(default, if given: %(const)s)",
    )  # fmt: skip
    how.add_argument(
        "--model", type=path_in, metavar="FILE",
        help="shape of the model: plan any layout whose sizes have a placeholder in the command; "
        "needs --batch",
    )  # fmt: skip
    how.add_argument("--engine", default="megatron", help="engine to plan for (default: megatron)")
    how.add_argument(
        "--gpu", default=DEFAULT_GPU,
        help="type of the GPUs, to plan (default: %(default)s, as for rmetric plan)",
    )  # fmt: skip
    how.add_argument("--gpu-memory", type=float, metavar="GIB", help="GPU memory, if it differs")
    how.add_argument(
        "--resume", choices=RESUMES,
        help="checkpoint that a guard resumes from: the newest good one, or the newest clean one, "
        "which was not saved during an alarm (default: newest)",
    )  # fmt: skip
    for kind, title, words, suffix in _NUMBERS:
        group, defaults = parser.add_argument_group(title), kind()
        for field in fields(kind):
            if field.name in words:
                default = getattr(defaults, field.name)
                said = "" if default is None else f" (default: {default:g})"
                group.add_argument(
                    f"--{(field.name + suffix).replace('_', '-')}",
                    type=int if isinstance(default, int) else float,
                    default=default, metavar="N", help=words[field.name] + said,
                )  # fmt: skip
    parser.add_argument(
        "--preload", metavar="MODULES", type=module_list, default=[],
        help="modules, such as torch,transformers, that the spare launcher imports, too, and "
        "from which it forks the ranks of a restart (default: the ranks are started anew)",
    )  # fmt: skip
    parser.add_argument(
        "--no-spare", dest="spare", action="store_false",
        help="start torchrun anew at a restart (default: while the training runs on this "
        "machine, a spare torchrun waits that has imported torch)",
    )  # fmt: skip
    watching = parser.add_argument_group("watching")
    watching.add_argument(
        "--watch-log", type=path_in, metavar="LOG", help="training log for the calibrated detector"
    )
    watching.add_argument(
        "--nvml-seconds", type=float, metavar="N",
        help="interval at which this machine's GPUs are read (default: 10 if there are any; 0: "
        "never); FOLDER/telemetry is always read",
    )  # fmt: skip
    watching.add_argument("--echo", action="store_true", help="show the output of the training")
    parser.add_argument("--again", action="store_true", help="run a folder that has finished again")
    parser.add_argument("--seed", type=int, default=0, help="of the jitter of waits (default: 0)")


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


def layout(text: str) -> dict[str, int]:
    """`tensor=2,data=4` as numbers by name."""
    return layout_of(list(Layout().as_json()))(text)


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
    if options.seed < 0:
        raise ValueError(f"--seed is {options.seed}: a number from 0 is accepted")
    if options.batch is not None and options.batch < 1:
        raise ValueError(f"--batch is {options.batch}: a number of samples from 1 is accepted")
    for name in ("uneven_batch", "allow_batch_change"):
        if getattr(options, name) and options.batch is None:
            raise ValueError(f"--{name.replace('_', '-')} needs --batch")
    if options.nvml_seconds is not None and not 0 <= options.nvml_seconds < inf:
        raise ValueError(
            f"--nvml-seconds is {options.nvml_seconds}: a number of seconds from 0 is accepted"
        )
    pool = _pool(options)
    prefixes = {
        node: tuple(word.replace("{node}", node) for word in shlex.split(options.prefix))
        for node in pool
    }
    program = Program(
        arguments=tuple(options.command),
        prefixes=prefixes,
        visible=options.gpus is not None or _has_gpus(),
        master="" if any(prefixes.values()) else "127.0.0.1",
        resume=options.resume,
    )
    if len(pool) > 1 and not program.is_torchrun:
        raise ValueError(f"--nodes needs torchrun or ft_launcher, found {options.command[0]}")
    planner = _planner(options, pool, unit_of(program, pool))
    restart_policy, timeouts, intervals = (
        _checked(kind, options, words, suffix) for kind, _, words, suffix in _NUMBERS
    )
    return Supervisor(
        RunFolder(options.folder),
        program,
        pool,
        planner,
        restart_policy=restart_policy,
        timeouts=timeouts,
        intervals=intervals,
        watching=WatchOptions(
            sources=_sources(options, pool), log=options.watch_log, echo=options.echo
        ),
        seed=options.seed,
        again=options.again,
        spare=options.spare,
        preload=options.preload,
        adopt=True,
    )


def _checked(kind: Any, options: argparse.Namespace, names: Iterable[str], suffix: str) -> Any:
    """The settings, each tried alone first: an error names the option that is meant."""
    values = {name: getattr(options, name + suffix) for name in names}
    for name, value in values.items():
        try:
            kind(**{name: value})
        except ValueError as error:
            option = f"--{name}{suffix}".replace("_", "-")
            raise ValueError(f"{option}{str(error).removeprefix(name)}") from None
    return kind(**values)


def _pool(options: argparse.Namespace) -> dict[str, tuple[int, ...]]:
    if options.nodes is not None:
        if options.gpus is not None:
            raise ValueError("--gpus and --nodes: one of the two")
        return dict(options.nodes)
    return {"": options.gpus if options.gpus is not None else _visible()[: _asked(options)]}


def _visible() -> tuple[int, ...]:
    """The GPUs that this process may use, by CUDA_VISIBLE_DEVICES; without it, as many as asked."""
    said = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    if not said:
        return tuple(range(MOST_GPUS))
    try:
        return tuple(map(int, said.split(",")))
    except ValueError:
        raise ValueError(
            f"CUDA_VISIBLE_DEVICES is {said!r}: say the numbers of these GPUs with --gpus"
        ) from None


def _asked(options: argparse.Namespace) -> int:
    """Number of processes in the command, or of GPUs of the layout."""
    said = option_of(options.command, "nproc-per-node")
    if said is None:
        return Layout(**(options.layout or {})).num_gpus
    if not said.isdigit() or int(said) < 1:
        raise ValueError(f"--nproc-per-node is {said!r}: say which GPUs there are with --gpus")
    return int(said)


def _planner(options: argparse.Namespace, pool: dict[str, tuple[int, ...]], unit: str) -> Any:
    first = _first_layout(
        options.layout or {}, sum(map(len, pool.values())), options.batch, options.uneven_batch
    )
    if options.model is not None:
        # A layout that does not come to the batch is planned anew: the batch is never changed
        # unasked.
        fits = options.layout and first.global_batch == options.batch
        return _by_model(options, first if fits else None)
    if allot(first, pool) is None:
        given = options.layout and ",".join(f"{name}={n}" for name, n in options.layout.items())
        raise ValueError(
            f"--layout {given} needs {first.num_gpus} GPUs, "
            f"evenly on nodes; there are {', '.join(str(len(gpus)) for gpus in pool.values())}"
        )
    return shrink_data(
        first, options.batch, unit,
        uneven_batch=options.uneven_batch, largest_change=options.allow_batch_change,
    )  # fmt: skip


def _first_layout(given: dict[str, int], gpus: int, batch: int | None, uneven: bool) -> Layout:
    one_copy = Layout(**{**given, "data": 1}).num_gpus
    whole = {"data": max(1, gpus // one_copy), **given}
    if batch is not None and "accumulation" not in given:
        if uneven and batch >= whole["data"]:
            return Layout.split(batch, **whole)
        whole["accumulation"] = max(1, batch // (whole["data"] * given.get("micro_batch", 1)))
    return Layout(**whole)


def _by_model(options: argparse.Namespace, first: Layout | None) -> Any:
    if options.batch is None:
        raise ValueError("--model needs --batch")
    gpu = Cluster.of([1], options.gpu, memory_gib=options.gpu_memory).gpu
    model = ModelShape.from_json(options.model)
    change = options.allow_batch_change
    batch = BatchSpec(samples=options.batch, keep=not change, largest_change=change)
    return by_model(
        model, gpu, batch, engine=options.engine, first=first,
        fixed_sizes=_fixed_sizes(options.command, options.layout or {}),
        uneven_batch=options.uneven_batch,
    )  # fmt: skip


def _fixed_sizes(command: Sequence[str], layout: Mapping[str, int]) -> dict[str, int]:
    """Sizes without a placeholder in the command: those of `--layout`, else 1.

    >>> _fixed_sizes(["torchrun", "train.py", "--tp={tensor}", "{pipeline}"], {"context": 2})
    {'context': 2, 'expert': 1}
    """
    return {name: layout.get(name, 1) for name in SIZES if f"{{{name}}}" not in "\0".join(command)}


def _sources(options: argparse.Namespace, pool: dict[str, tuple[int, ...]]) -> list[Any]:
    here = "" if "" in pool else os.uname().nodename
    if options.nvml_seconds and here not in pool:
        raise ValueError(f"--nvml-seconds: this machine, {here}, is none of the nodes")
    own = here in pool and _has_gpus()
    seconds = NVML_SECONDS * own if options.nvml_seconds is None else options.nvml_seconds
    if not seconds:
        return []
    return [GpuWatch(pool[here], RiskConfig(interval=seconds))]


def _has_gpus() -> bool:
    return any(Path("/dev").glob("nvidia[0-9]*"))
