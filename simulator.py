"""Simulate one training run, write its log, say what happened.

    python simulator.py --architecture Llama-3-8B --fault LR_SPIKE --severity 15 --seed 7 --out logs_demo

The fault changes a mechanism at its onset. Whether the run fails, when and how
follows from the equations of docs/simulator.md, never from a script.
"""  # noqa: E501

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from rmetric.logs import log_path, run_lines, start_line, write_atomically
from rmetric.metric import MODES, RMetric, RMetricConfig
from rmetric.records import Run
from rmetric.simulation import ARCHITECTURES, FAULTS, RunSpec, simulate
from rmetric.simulation.spec import config_of


def parse_arguments(argv: list[str] | None = None) -> tuple[argparse.Namespace, RunSpec]:
    parser = argparse.ArgumentParser(
        description=__doc__,
        epilog=list_faults(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    known = RunSpec(experiment_id="defaults", architecture="Llama-3-8B")
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
        "--evaluate-every", type=int, default=known.evaluate_every, metavar="STEPS",
        help="default: %(default)s",
    )  # fmt: skip
    parser.add_argument(
        "--workers", type=int, default=known.num_workers, metavar="N",
        help="data-parallel workers of the simulated job (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument("--mode", choices=list(MODES), default="FULL_METRIC")
    parser.add_argument("--id", metavar="NAME", help="names the run and its log")
    parser.add_argument(
        "--out", type=Path, default=Path("logs_demo"), metavar="DIR", help="default: %(default)s"
    )
    arguments = parser.parse_args(argv)
    try:
        spec = spec_of(arguments)
        log_path(arguments.out, spec.experiment_id)
    except ValueError as error:
        parser.error(str(error))
    return arguments, spec


def spec_of(arguments: argparse.Namespace) -> RunSpec:
    """The run that was asked for. Raises ValueError for what cannot be."""
    severity = "" if arguments.severity is None else f"_{arguments.severity:g}"
    name = f"{arguments.architecture}_{arguments.fault}{severity}_seed{arguments.seed}"
    return RunSpec(
        experiment_id=name if arguments.id is None else arguments.id,
        architecture=arguments.architecture,
        fault=arguments.fault,
        severity=arguments.severity,
        onset_step=max(arguments.steps // 2, 1) if arguments.onset is None else arguments.onset,
        duration_steps=arguments.duration,
        seed=arguments.seed,
        num_workers=arguments.workers,
        total_steps=arguments.steps,
        evaluate_every=arguments.evaluate_every,
    )


def list_faults() -> str:
    lines = ["faults and benign changes (severities: mild, middling, severe; unit):"]
    for kind in FAULTS.values():
        severities = "/".join(f"{severity:g}" for severity in kind.severities)
        benign = " (benign)" if kind.benign else ""
        lines.append(f"  {kind.name:20} {severities:14} {kind.unit}{benign}")
    return "\n".join(lines)


def describe(run: Run, spec: RunSpec, config: RMetricConfig) -> str:
    """What happened, in a few lines."""
    truth = run.truth
    assert truth is not None
    lines = [f"{spec.architecture}, {spec.total_steps} steps, seed {spec.seed}"]
    if truth.fault == "NONE":
        lines.append("nothing injected")
    else:
        what = "benign change" if truth.benign else "fault"
        lines.append(
            f"{what} {truth.fault}, severity {truth.severity:g} ({spec.kind.unit}), "
            f"steps {truth.onset_step} to {spec.end_step - 1}"
        )
    if truth.failure_step is not None:
        onset = truth.onset_step or 0
        after = truth.failure_step - onset
        kind = str(truth.failure_kind).replace("_", " ")
        lines.append(f"failed: {kind} at step {truth.failure_step}, {after} steps after the onset")
    else:
        lines.append(f"outcome: {truth.outcome.replace('_', ' ')}")
    metric = RMetric(config)
    alerts = [record.step for record in run.records if metric.update(record).alarm]
    if alerts:
        lines.append(f"R-Metric: {len(alerts)} alerts, the first at step {alerts[0]}")
    else:
        lines.append("R-Metric: no alert")
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    arguments, spec = parse_arguments(argv)
    config = RMetricConfig.simulation()
    path = log_path(arguments.out, spec.experiment_id)
    try:
        arguments.out.mkdir(parents=True, exist_ok=True)
        if path.exists():
            first = start_line(config_of(spec), spec.experiment_id, config, arguments.mode)
            if not path.read_bytes().startswith(first):
                print(f"{path} is the log of another run: give this one an --id", file=sys.stderr)
                return 1
        [run] = simulate([spec])
        write_atomically(path, run_lines(run, config, arguments.mode))
    except OSError as error:
        print(f"cannot write to --out {arguments.out}: {error.strerror}", file=sys.stderr)
        return 1
    print(describe(run, spec, config.with_mode(arguments.mode)))
    print(path)
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
