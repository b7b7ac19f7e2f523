"""The fault laboratory: about 500 real training runs, many of which fail.

    python -m studies.fault_lab                      the whole campaign, then the archives
    python -m studies.fault_lab --set second         the second set: other models, optimisers, ...
    python -m studies.fault_lab --list               faults and benign changes
    python -m studies.fault_lab --fault LR_SPIKE --architecture llama      one run and its twin
    python -m studies.fault_lab --report             tables and figure from the archives
    python -m studies.fault_lab --unpack studies/fault_lab/data/development.tar.xz --out logs_dev

Tiny Llama, Mistral, Mixtral and Qwen2 models are trained on Python's own sources;
faults and benign changes are injected into copies of each run, so that every
disturbed run has an exact twin. docs/fault_lab.md has the findings.

It can be interrupted: started again, it completes the missing runs and ends
with the same bytes.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from tqdm import tqdm

from rmetric.logs import LogError, log_path, run_lines, write_atomically
from rmetric.metric import RMetricConfig
from rmetric.readers.archive import read_runs
from studies.common.command import add_jobs, command_parser

#: Options that choose the runs, in the order of the arguments of `design.campaign`.
OF_THE_FIRST_SET = ("seeds", "first_seed", "steps", "corpus", "only")


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = command_parser("fault_lab", __doc__)
    parser.add_argument(
        "--out", type=Path, metavar="DIR",
        help="where the runs go (default: lab_runs, lab_runs_second for --set second, "
        "lab_runs_single for --fault, "
        "studies/fault_lab/results for --report, the archive's name for --unpack)",
    )  # fmt: skip
    parser.add_argument(
        "--archives", type=Path, default=Path("studies/fault_lab/data"), metavar="DIR",
        help="where a finished campaign is packed to (default: studies/fault_lab/data)",
    )  # fmt: skip
    parser.add_argument(
        "--set", choices=["first", "second"], default="first",
        help="second: other sizes, contexts, texts, optimisers and schedules; its design is fixed",
    )  # fmt: skip
    parser.add_argument("--seeds", type=int, default=160, metavar="N", help="default: 160")
    parser.add_argument("--first-seed", type=int, default=0, metavar="N", help="default: 0")
    parser.add_argument("--steps", type=int, default=400, metavar="N", help="default: 400")
    parser.add_argument(
        "--only", nargs="+", metavar="NAME", help="only these faults and benign changes"
    )
    parser.add_argument(
        "--corpus", default="standard_library", metavar="NAME",
        help="standard_library: Python's own sources (default); generated: the same bytes "
        "on every machine",
    )  # fmt: skip
    parser.add_argument(
        "--diverged", type=float, default=1.2, metavar="RATIO",
        help="failed where the loss stays above so many times the best so far (default: 1.2)",
    )  # fmt: skip
    parser.add_argument(
        "--degraded", type=float, default=0.10, metavar="NATS",
        help="failed where the loss stays so far above the twin's (default: 0.10)",
    )  # fmt: skip
    add_jobs(parser, "processes; the result does not depend on it")
    pair = parser.add_argument_group("one run and its twin, as ordinary logs")
    pair.add_argument("--fault", metavar="NAME", help="what to inject")
    pair.add_argument("--architecture", default="llama", metavar="NAME", help="default: llama")
    pair.add_argument("--severity", type=float, metavar="X", help="default: the fault's middle one")
    pair.add_argument("--onset", type=int, metavar="STEP", help="default: half of the steps")
    pair.add_argument("--duration", type=int, metavar="STEPS", help="default: the fault's own")
    pair.add_argument("--seed", type=int, default=0, metavar="N", help="default: 0")
    parser.add_argument("--list", action="store_true", help="what can be injected")
    parser.add_argument(
        "--report",
        action="store_true",
        help="tables and figure from the archives (studies/fault_lab/results)",
    )
    parser.add_argument(
        "--unpack", type=Path, metavar="ARCHIVE", help="write its runs as ordinary logs"
    )
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    arguments = parse_arguments(argv)
    if arguments.unpack:
        act: Callable[[argparse.Namespace], int] = unpack
    elif arguments.report:
        act = report
    else:
        act = list_faults if arguments.list else one_run if arguments.fault else whole_campaign
    try:
        return act(arguments)
    except KeyboardInterrupt:
        print("stopped; start the same command again to finish what is missing", file=sys.stderr)
        return 130
    except ImportError as error:
        print(f"{error}: training needs pip install -e '.[live]'", file=sys.stderr)
    except (LogError, OSError) as error:
        print(error, file=sys.stderr)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    return 1


def whole_campaign(arguments: argparse.Namespace) -> int:
    from studies.fault_lab import campaign, design
    from studies.fault_lab.branches import Definitions

    definitions = Definitions(diverged_ratio=arguments.diverged, degraded_nats=arguments.degraded)
    if arguments.set == "second":
        refuse_options_of_the_first_set(arguments)
        specs = design.second_campaign()
        campaign.check_seal(specs, definitions)
    else:
        specs = design.campaign(*(getattr(arguments, name) for name in OF_THE_FIRST_SET))
    out = arguments.out or Path("lab_runs_second" if arguments.set == "second" else "lab_runs")
    campaign.open_folder(out, specs, definitions)
    groups = campaign.unfinished(out, specs)
    done = len(specs) - sum(map(len, groups))
    with tqdm(total=len(specs), initial=done, unit="run", desc="fault lab") as bar:
        for number in campaign.run_campaign(groups, out, definitions, arguments.jobs):
            bar.update(number)
    manifest = campaign.pack(out, specs, arguments.archives)
    size = sum(entry["bytes"] for entry in manifest["archives"].values()) / 1e6
    print(f"{len(specs)} runs in {out}, packed in {arguments.archives} ({size:.1f} MB)")
    if arguments.set == "second":
        print("\n".join(campaign.counts(out, specs)))
    return 0


def refuse_options_of_the_first_set(arguments: argparse.Namespace) -> None:
    """Raises ValueError: the second set's design is sealed."""
    plain = parse_arguments([])
    for name in OF_THE_FIRST_SET:
        if getattr(arguments, name) != getattr(plain, name):
            option = "--" + name.replace("_", "-")
            raise ValueError(f"{option} is of the first set: the second one's design is sealed")


def one_run(arguments: argparse.Namespace) -> int:
    import torch

    from studies.fault_lab.branches import Definitions, train_seed
    from studies.fault_lab.spec import LabSpec, control_id

    torch.set_num_threads(1)
    control = LabSpec(
        run_id=control_id(arguments.seed),
        seed=arguments.seed,
        architecture=arguments.architecture,
        total_steps=arguments.steps,
        text=arguments.corpus,
    )
    branch = replace(
        control,
        run_id=f"{control.run_id}_{arguments.fault}",
        fault=arguments.fault,
        severity=arguments.severity,
        onset_step=max(1, arguments.steps // 2) if arguments.onset is None else arguments.onset,
        duration_steps=arguments.duration,
    )
    definitions = Definitions(diverged_ratio=arguments.diverged, degraded_nats=arguments.degraded)
    out = arguments.out or Path("lab_runs_single")
    out.mkdir(parents=True, exist_ok=True)
    for run in tqdm(train_seed([control, branch], definitions), total=2, unit="run"):
        write_atomically(log_path(out, run.id), run_lines(run, RMetricConfig.simulation()))
        truth = run.truth
        assert truth is not None
        how = (
            f"{truth.failure_kind} at step {truth.failure_step}" if truth.failed else truth.outcome
        )
        tqdm.write(f"{run.id}: {how}")
    print(f"both logs are in {out}")
    return 0


def unpack(arguments: argparse.Namespace) -> int:
    archive = arguments.unpack
    runs = list(read_runs(archive))
    folder = arguments.out or Path(archive.name.split(".")[0])
    folder.mkdir(parents=True, exist_ok=True)
    for run in tqdm(runs, unit="run", desc="unpack"):
        write_atomically(log_path(folder, run.id), run_lines(run, RMetricConfig.simulation()))
    print(f"{len(runs)} logs in {folder}")
    return 0


def report(arguments: argparse.Namespace) -> int:
    from rmetric.reporting.style import save
    from studies.common.renderers import write_tables
    from studies.common.table import numbered
    from studies.fault_lab import tables
    from studies.fault_lab.figure import fault_figure

    archives, out = arguments.archives, arguments.out or Path("studies/fault_lab/results")
    # The first set's alone: the signals of the second one are reserved.
    paths = {
        split: archives / f"{split}.tar.xz"
        for split in ("calibration", "development", "test")
        if (archives / f"{split}.tar.xz").exists()
    }
    if not paths:
        raise LogError(archives, None, "no archive (*.tar.xz); train a campaign first")
    parts = {split: list(read_runs(path)) for split, path in tqdm(paths.items(), desc="read")}
    everything = tables.facts(run for runs in parts.values() for run in runs)
    opened = [run for split, runs in parts.items() if split != "test" for run in runs]
    seen = tables.all_responses(opened)
    made = [  # in the order of their numbers
        tables.outcomes(everything),
        tables.outcomes(everything, by_severity=True),
        tables.signals(seen),
        tables.signals_by_fault(seen),
        tables.detectors(opened, os.cpu_count() or 1),
        tables.comparison(everything, tables.facts(tables.simulated())),
        tables.times(everything),
        tables.twins(opened),
    ]
    write_tables(numbered(made), out)
    save(fault_figure(everything, seen), out / "fault_lab")
    print(f"{len(made)} tables and a figure: {out}")
    return 0


def list_faults(arguments: argparse.Namespace) -> int:
    from studies.fault_lab.faults import FAULTS

    for kind in FAULTS.values():
        sort = "benign" if kind.benign else "fault"
        severities = ", ".join(f"{s:g}" for s in kind.severities)
        print(f"{kind.name:24} {sort:7} {kind.summary}\n{'':32} {kind.unit}: {severities}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
