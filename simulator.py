"""Simulate one training run, write its log, say what happened.

    python simulator.py --architecture Llama-3-8B --fault LR_SPIKE --severity 15 --seed 7 --out logs_demo
    python simulator.py --dynamics published --fault LR_SPIKE --seed 7

The fault changes a mechanism at its onset. Whether the run fails, when and how
follows from the equations of docs/simulator.md, never from a script.

With --dynamics published it is the simulator of the paper's authors instead, where the
crash is scripted: at the k-th step of a fault that acts it is drawn with chance (k/15)².
"""  # noqa: E501

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from studies.common.command import add_preset, counted, ends_at_once, require

with ends_at_once():
    from rmetric.logs import log_path, run_lines, start_line, write_atomically
    from rmetric.metric import MODES, PRESETS, RMetric, RMetricConfig
    from rmetric.records import Run, Truth
    from rmetric.simulation import ARCHITECTURES, FAULTS, RunSpec, published, simulate
    from rmetric.simulation.architectures import architecture
    from rmetric.simulation.engine import config_of
    from rmetric.simulation.published import PublishedDynamics, PublishedSpec


@dataclass(frozen=True, kw_only=True)
class RequestedRun:
    """One requested run, whichever simulator makes it.

    Attributes:
        about: its configuration, under the names of the log.
        metric: the settings that its log is judged by, without the mode.
        make: simulates it.
        title: of the run, in words.
        injected: what was injected, in words, once its truth is known.
    """

    experiment_id: str
    about: dict[str, Any]
    metric: RMetricConfig
    make: Callable[[], Run]
    title: str
    injected: Callable[[Truth], str]


def parse_arguments(argv: list[str] | None = None) -> tuple[argparse.Namespace, RequestedRun]:
    parser = argparse.ArgumentParser(
        description=__doc__,
        epilog=list_faults(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    known = RunSpec(experiment_id="defaults", architecture="Llama-3-8B")
    parser.add_argument(
        "--dynamics", choices=list(DYNAMICS), default="emergent",
        help="whose simulator: ours, or that of the paper's authors (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--architecture", default="Llama-3-8B", metavar="NAME",
        help=f"{', '.join(ARCHITECTURES)} (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--fault", default="LR_SPIKE", metavar="NAME",
        help="fault or benign change, listed below (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument("--severity", type=float, help="in the fault's unit (default: middling)")
    parser.add_argument("--onset", type=int, metavar="STEP", help="first step under the fault")
    parser.add_argument("--duration", type=int, metavar="STEPS", help="0 for the rest of the run")
    parser.add_argument("--seed", type=int, default=0, help="same seed, same bytes (default: 0)")
    parser.add_argument("--steps", type=int, default=known.total_steps, help="default: %(default)s")
    parser.add_argument(
        "--eval-every", type=int, default=known.evaluate_every, metavar="STEPS",
        help="default: %(default)s",
    )  # fmt: skip
    parser.add_argument(
        "--workers", type=int, default=known.num_workers, metavar="N",
        help="data-parallel workers of the simulated job (default: %(default)s)",
    )  # fmt: skip
    add_preset(parser)
    parser.add_argument("--mode", choices=list(MODES), default="FULL_METRIC")
    parser.add_argument("--id", metavar="NAME", help="names the run and its log")
    parser.add_argument(
        "--out", type=Path, default=Path("logs_demo"), metavar="DIR", help="default: %(default)s"
    )
    arguments = parser.parse_args(argv)
    try:
        requested = DYNAMICS[arguments.dynamics](arguments)
        log_path(arguments.out, requested.experiment_id)
    except ValueError as error:
        parser.error(str(error))
    return arguments, requested


def emergent_run(arguments: argparse.Namespace) -> RequestedRun:
    """The run on our simulator. Raises ValueError for what cannot be."""
    severity = "" if arguments.severity is None else f"_{arguments.severity:g}"
    name = f"{arguments.architecture}_{arguments.fault}{severity}_seed{arguments.seed}"
    spec = RunSpec(
        experiment_id=name if arguments.id is None else arguments.id,
        architecture=arguments.architecture,
        fault=arguments.fault,
        severity=arguments.severity,
        onset_step=onset_of(arguments),
        duration_steps=arguments.duration,
        seed=arguments.seed,
        num_workers=arguments.workers,
        total_steps=arguments.steps,
        evaluate_every=arguments.eval_every,
    )

    def injected(truth: Truth) -> str:
        what = "benign change" if truth.benign else "fault"
        return (
            f"{what} {truth.fault}, severity {truth.severity:g} ({spec.kind.unit}), "
            f"steps {truth.onset_step} to {spec.end_step - 1}"
        )

    return RequestedRun(
        experiment_id=spec.experiment_id,
        about=config_of(spec),
        metric=PRESETS[arguments.preset](),
        make=lambda: simulate([spec])[0],
        title=f"{spec.architecture}, {spec.total_steps} steps, seed {spec.seed}",
        injected=injected,
    )


def published_run(arguments: argparse.Namespace) -> RequestedRun:
    """The run on the authors' simulator. Raises ValueError for what cannot be."""
    for name in ("severity", "duration"):
        if getattr(arguments, name) is not None:
            raise ValueError(
                f"--{name} is not for --dynamics published, whose faults have none: "
                "a fault that acts does so until the crash"
            )
    architecture(arguments.architecture)
    known = published.ACTING + published.WITHOUT_EFFECT
    if arguments.fault not in known:
        raise ValueError(
            f"fault {arguments.fault!r} is not in the published simulator: "
            f"known are {', '.join(known)}"
        )
    seed = arguments.seed
    require("seed", seed, 0 <= seed < 2**63, "at least 0 and below 2^63")
    name = f"{arguments.architecture}_{arguments.fault}_published_seed{seed}"
    spec = PublishedSpec(
        experiment_id=name if arguments.id is None else arguments.id,
        mode=arguments.mode,
        architecture=arguments.architecture,
        fault=arguments.fault,
        recipe="single",
    )
    dynamics = PublishedDynamics(
        total_steps=arguments.steps,
        evaluate_every=arguments.eval_every,
        num_workers=arguments.workers,
        onset_step=onset_of(arguments),
    )

    def injected(truth: Truth) -> str:
        if not spec.acts:
            return f"fault {truth.fault} has no effect in this simulator"
        return (
            f"fault {truth.fault} from step {truth.onset_step} on; the crash is scripted: "
            "drawn with chance (k/15)² at its k-th step"
        )

    return RequestedRun(
        experiment_id=spec.experiment_id,
        about=published.config_of(spec, dynamics, seed),
        metric=PRESETS[arguments.preset](variant="authors_simulator"),
        make=lambda: next(published.simulate_published([spec], Random(seed), dynamics, seed=seed)),
        title=f"{spec.architecture}, {dynamics.total_steps} steps, seed {seed}, as published",
        injected=injected,
    )


#: What `--dynamics` names.
DYNAMICS = {"emergent": emergent_run, "published": published_run}


def onset_of(arguments: argparse.Namespace) -> int:
    return max(arguments.steps // 2, 1) if arguments.onset is None else arguments.onset


def list_faults() -> str:
    lines = ["faults and benign changes (severities: mild, middling, severe; unit):"]
    for kind in FAULTS.values():
        severities = "/".join(f"{severity:g}" for severity in kind.severities)
        benign = " (benign)" if kind.benign else ""
        lines.append(f"  {kind.name:20} {severities:14} {kind.unit}{benign}")
    lines += [
        "with --dynamics published, without severity or duration:",
        f"  {', '.join(published.ACTING)}: all the same",
        f"  {', '.join(published.WITHOUT_EFFECT)}: no effect",
    ]
    return "\n".join(lines)


def describe(run: Run, requested: RequestedRun, config: RMetricConfig) -> str:
    """What happened, in a few lines."""
    truth = run.truth
    assert truth is not None
    injected = "nothing injected" if truth.fault == "NONE" else requested.injected(truth)
    lines = [requested.title, injected]
    if truth.failure_step is not None:
        onset = truth.onset_step or 0
        after = truth.failure_step - onset
        kind = str(truth.failure_kind).replace("_", " ")
        lines.append(f"failed: {kind} at step {truth.failure_step}, {after} steps after the onset")
    else:
        lines.append(f"outcome: {truth.outcome.replace('_', ' ')}")
    metric = RMetric(config)
    alarms = [record.step for record in run.records if metric.update(record).alarm]
    if alarms:
        lines.append(f"R-Metric: {counted(len(alarms), 'alarm')}, the first at step {alarms[0]}")
    else:
        lines.append("R-Metric: no alarm")
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    arguments, requested = parse_arguments(argv)
    path = log_path(arguments.out, requested.experiment_id)
    try:
        arguments.out.mkdir(parents=True, exist_ok=True)
        if path.exists():
            first = start_line(
                requested.about, requested.experiment_id, requested.metric, arguments.mode
            )
            if not path.read_bytes().startswith(first):
                print(f"{path} is the log of another run: give this one an --id", file=sys.stderr)
                return 1
        run = requested.make()
        write_atomically(path, run_lines(run, requested.metric, arguments.mode))
    except OSError as error:
        print(f"cannot write to --out {arguments.out}: {error.strerror}", file=sys.stderr)
        return 1
    print(describe(run, requested, requested.metric.with_mode(arguments.mode)))
    print(path)
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
