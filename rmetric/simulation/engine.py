"""The specification of a run; many runs stepped at once, each beside its twin without the fault.

A run is fixed by its spec alone. Its random numbers come from generators spawned
from (seed, run id), one each for the training, the fault, the hardware and the
workers' own shares, so that neither the batch, the number of processes nor the
cadence of the log can matter, and a fault never shifts the noise of the training
that it strikes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from rmetric._util.errors import require
from rmetric.records import HardwareEvent, Record, Run, Truth
from rmetric.simulation.architectures import (
    CONSTANTS,
    MODES_PER_BLOCK,
    NUM_BLOCKS,
    NUM_MODES,
    SIMULATOR_VERSION,
    Floats,
    architecture,
    schedule,
)
from rmetric.simulation.dynamics import Dynamics, Knobs, Noise, Step, TrainingState
from rmetric.simulation.faults import Fault, Turn, fault
from rmetric.simulation.hardware import simulate_hardware
from rmetric.simulation.outcome import TRUTH_EVERY, soft_failure
from rmetric.simulation.published import check_training

CHUNK = 25  # steps whose noise is drawn at a time; changes no number


@dataclass(frozen=True, kw_only=True)
class RunSpec:
    """Everything that fixes one simulated run.

    Attributes:
        experiment_id: unique in its study; names the log.
        severity: in the fault's unit; None for the fault's middle one.
        onset_step: first step under the fault, 1 to total_steps.
        duration_steps: steps that it acts; None for the fault's default.
        seed: of the study. The run's own numbers follow from it and the id.
        num_workers: data-parallel workers, at least 2.
        total_steps, evaluate_every: of the training.
        seconds_per_step: of an undisturbed step.
        recipe, repetition: where in a study the run stands.
    """

    experiment_id: str
    architecture: str
    fault: str = "NONE"
    severity: float | None = None
    onset_step: int = 2500
    duration_steps: int | None = None
    seed: int = 0
    num_workers: int = 8
    total_steps: int = 5000
    evaluate_every: int = 100
    seconds_per_step: float = 5.0
    recipe: str = "single"
    repetition: int = 0

    def __post_init__(self) -> None:
        architecture(self.architecture)
        kind = fault(self.fault)
        if self.severity is None:
            object.__setattr__(self, "severity", kind.severities[len(kind.severities) // 2])
        severity = self.severity
        assert severity is not None
        sort = "whole" if kind.whole else "finite"
        fits = kind.lowest <= severity <= kind.highest and severity < np.inf
        if not fits or (kind.whole and severity != int(severity)):
            most = f" and at most {kind.highest:g}" if kind.highest < np.inf else ""
            wanted = f"a {sort} number, at least {kind.lowest:g}{most} ({kind.unit})"
            raise ValueError(f"severity of {self.fault} is {severity}: it must be {wanted}")
        object.__setattr__(self, "severity", float(severity))
        require("seed", self.seed, self.seed >= 0, "at least 0")
        require("seed", self.seed, self.seed < 2**63, "below 2^63, which is what a log holds")
        seconds = self.seconds_per_step
        require("seconds_per_step", seconds, 0 < seconds < np.inf, "above 0")
        check_training(self)
        duration = kind.duration_steps if self.duration_steps is None else self.duration_steps
        require("duration_steps", duration, duration >= 0, "at least 0 (0: to the end)")
        rest = self.total_steps - self.onset_step + 1
        object.__setattr__(self, "duration_steps", min(duration or rest, rest))

    @property
    def kind(self) -> Fault:
        return fault(self.fault)

    @property
    def applicable(self) -> bool:
        return self.kind.applies_to(architecture(self.architecture))

    @property
    def acts(self) -> bool:
        """True if the training itself is disturbed, so that it needs a twin."""
        return self.kind.act is not None and self.applicable

    @property
    def end_step(self) -> int:
        """First step after the fault."""
        assert self.duration_steps is not None
        return self.onset_step + self.duration_steps

    def generators(self) -> list[np.random.Generator]:
        """Random generators of the training, the fault, the hardware and the workers' shares."""
        root = np.random.SeedSequence([self.seed, *self.experiment_id.encode()])
        return [np.random.Generator(np.random.SFC64(s)) for s in root.spawn(4)]


def config_of(spec: RunSpec) -> dict[str, Any]:
    """The spec under the names of the log; see docs/log_format.md."""
    kind = spec.kind
    injected = spec.fault != "NONE"
    return {
        "model_type": spec.architecture,
        "num_workers": spec.num_workers,
        "total_training_steps": spec.total_steps,
        "eval_every_n_steps": spec.evaluate_every,
        "seconds_per_step": spec.seconds_per_step,
        "seed": spec.seed,
        "repetition": spec.repetition,
        "recipe": spec.recipe,
        "fault_injection": {
            "type": spec.fault,
            "trigger_step": spec.onset_step if injected else None,
            "params": {
                "severity": spec.severity,
                "severity_unit": kind.unit,
                "duration_steps": spec.duration_steps,
            }
            if injected
            else {},
        },
        "architecture": asdict(architecture(spec.architecture)),
        "simulator": {"version": SIMULATOR_VERSION, "constants": asdict(CONSTANTS)},
    }


def simulate(specs: Sequence[RunSpec]) -> list[Run]:
    """Simulate training runs together; the result of each depends on its own spec only.

    Args:
        specs: they must share `num_workers`, `total_steps` and `evaluate_every`.

    Returns:
        One run for each spec, in their order, with records and truth.

    Raises:
        ValueError: the specs differ in what they must share.
    """
    if not specs:
        return []
    shapes = {(s.num_workers, s.total_steps, s.evaluate_every) for s in specs}
    if len(shapes) > 1:
        raise ValueError("runs stepped together must share workers, steps and evaluation cadence")
    with np.errstate(all="ignore"):  # a diverging run overflows, and that is its result
        return _Batch(specs).run()


class _Batch:
    """The runs of one call, and behind them the twins of those that a fault disturbs."""

    def __init__(self, specs: Sequence[RunSpec]) -> None:
        self.specs = specs
        self.num_runs = len(specs)
        first = specs[0]
        self.workers, self.steps = first.num_workers, first.total_steps
        rngs = [spec.generators() for spec in specs]
        self.noise_rngs = [rng[0] for rng in rngs]
        self.share_rngs = [rng[3] for rng in rngs]
        self.hardware = [
            simulate_hardware(
                rng[2], num_workers=spec.num_workers, total_steps=spec.total_steps,
                seconds_per_step=spec.seconds_per_step,
                process=spec.kind.hardware if spec.applicable else None,
                severity=spec.severity or 0.0, onset_step=spec.onset_step,
                duration_steps=spec.end_step - spec.onset_step,
            )
            for spec, rng in zip(specs, rngs, strict=True)
        ]  # fmt: skip
        kinds = [architecture(spec.architecture) for spec in specs]
        schedules = {a.name: schedule(a.warmup_steps, self.steps) for a in kinds}
        spread = CONSTANTS.rate_spread
        own = 1.0 + spread * np.array([rng.uniform(-1.0, 1.0) for rng in self.noise_rngs])
        relative_RT = own[:, None] * np.stack([schedules[a.name] for a in kinds])
        self.dynamics = Dynamics(kinds, self.workers, relative_RT)
        draws = [rng.standard_normal((NUM_BLOCKS, MODES_PER_BLOCK)) for rng in self.noise_rngs]
        self.state: TrainingState = self.dynamics.start(np.stack(draws))
        self.untouched = Knobs.neutral(self.num_runs)
        self.twins = [row for row, spec in enumerate(specs) if spec.acts]
        self.faults = [
            (
                spec,
                Turn(
                    knobs=self.untouched, state=self.state, row=row, age=0,
                    severity=spec.severity or 0.0, duration=spec.end_step - spec.onset_step,
                    rng=rngs[row][1],
                ),
            )
            for row, spec in enumerate(specs)
            if spec.acts
        ]  # fmt: skip
        self.rows = np.arange(self.num_runs)
        self.records: list[list[Record]] = [[] for _ in specs]
        self.broken: list[int | None] = [None] * self.num_runs  # step, where not finite
        num_rows = self.num_runs + len(self.twins)
        self.truth_RT = np.full((num_rows, self.steps // TRUTH_EVERY), np.nan)

    def run(self) -> list[Run]:
        split_step = min((s.onset_step for s in self.specs if s.acts), default=None)
        for begin in range(0, self.steps, CHUNK):
            length = min(CHUNK, self.steps - begin)
            draws = np.empty((length, self.num_runs, Noise.WIDTH))
            for row, rng in enumerate(self.noise_rngs):
                draws[:, row] = rng.standard_normal((length, Noise.WIDTH))
            Noise.spread_batches(draws)
            for offset in range(length):
                step = begin + offset + 1
                if step == split_step:
                    self._split_twins()
                self._step(step, Noise.split(draws[offset][self.rows]))
        return [
            Run(
                id=spec.experiment_id,
                records=self.records[row],
                config=config_of(spec),
                truth=self._truth(row),
            )
            for row, spec in enumerate(self.specs)
        ]

    def _split_twins(self) -> None:
        """From the first onset on, a disturbed run's twin goes on beside it."""
        self.rows = np.concatenate([self.rows, np.array(self.twins, dtype=np.intp)])
        self.untouched = Knobs.neutral(len(self.rows))
        self.state = self.state.take(self.rows)
        self.dynamics.take(self.rows)
        self.truth_RT[self.num_runs :] = self.truth_RT[self.twins]

    def _step(self, step: int, noise: Noise) -> None:
        knobs = self._knobs(step)
        # The evaluation comes before the update: it sees the weights that the step starts from.
        ahead = self.dynamics.forward(self.state, knobs)
        shown = self.dynamics.step(self.state, knobs, ahead, noise, step - 1)
        if step % TRUTH_EVERY == 0:
            self.truth_RT[: len(self.rows), step // TRUTH_EVERY - 1] = ahead.loss_R
        finite = np.isfinite(shown.gradient_norm_R[: self.num_runs])
        finite &= np.isfinite(ahead.loss_R[: self.num_runs])
        for row in np.flatnonzero(~finite):
            if self.broken[row] is None:
                self.broken[row] = step
        if step % self.specs[0].evaluate_every == 0:
            scale = CONSTANTS.validation_loss_noise * knobs.validation_noise_R
            self._record(step, shown, ahead.loss_R + scale * noise.validation_R)

    def _knobs(self, step: int) -> Knobs:
        """The knobs as the faults that act at this step turn them."""
        acting = [f for f in self.faults if f[0].onset_step <= step < f[0].end_step]
        if not acting:
            return self.untouched
        knobs = Knobs.neutral(len(self.rows))
        for spec, turn in acting:
            assert spec.kind.act is not None
            turn.knobs, turn.state, turn.age = knobs, self.state, step - spec.onset_step
            spec.kind.act(turn)
        return knobs

    def _record(self, step: int, shown: Step, validation_R: Floats) -> None:
        # Each worker's norm is drawn only here, where it is logged.
        shape = self.workers - 1, NUM_MODES + 1
        draws = np.stack([rng.standard_normal(shape) for rng in self.share_rngs])
        norms_RW = self.dynamics.worker_norms(
            shown.gradient, draws[:, :, :NUM_MODES], draws[:, :, NUM_MODES]
        )
        weights = CONSTANTS.start_norm * np.sqrt(self.state.norm_squared_R)
        rate = self.dynamics.peak_R * self.dynamics.relative_RT[:, step - 1]
        for row, hardware in enumerate(self.hardware):
            broken, lost = self.broken[row], hardware.lost_step
            if (broken is not None and step > broken) or (lost is not None and step >= lost):
                continue
            time = float(hardware.end_seconds[step - 1])
            self.records[row].append(
                Record(
                    step=step,
                    time=_rounded(time),
                    training_loss=_rounded(shown.training_loss_R[row]),
                    validation_loss=_rounded(validation_R[row]),
                    gradient_norm=_rounded(shown.gradient_norm_R[row]),
                    worker_gradient_norms=tuple(_rounded(norm) for norm in norms_RW[row]),
                    learning_rate=_rounded(rate[row]),
                    update_norm=_rounded(shown.update_norm_R[row]),
                    parameter_norm=_rounded(weights[row]),
                    events=_take_events(hardware.events, time),
                )
            )

    def _truth(self, row: int) -> Truth:
        spec = self.specs[row]
        truth = Truth(fault=spec.fault, benign=spec.kind.benign, applicable=spec.applicable)
        if spec.fault != "NONE":
            truth.severity = spec.severity
            truth.onset_step, truth.duration_steps = spec.onset_step, spec.duration_steps
        failure = self._failure(row)
        if failure is not None:
            truth.outcome = "failed"
            truth.failure_kind, truth.failure_step = failure
        elif not spec.applicable:
            truth.outcome = "not_applicable"
        elif spec.fault != "NONE":
            truth.outcome = "absorbed"
        return truth

    def _failure(self, row: int) -> tuple[str, int] | None:
        """Kind and step of the failure, the hardest kind first."""
        broken, lost = self.broken[row], self.hardware[row].lost_step
        if broken is not None and (lost is None or broken <= lost):
            return "non_finite", broken
        if lost is not None:
            return "lost_worker", lost
        twin_T = None
        if row in self.twins:
            twin_T = self.truth_RT[self.num_runs + self.twins.index(row)]
        failure = soft_failure(self.truth_RT[row], twin_T)
        return failure and (failure[0], (failure[1] + 1) * TRUTH_EVERY)


def _take_events(events: list[HardwareEvent], until: float) -> tuple[HardwareEvent, ...]:
    taken = tuple(event for event in events if event.time <= until)
    del events[: len(taken)]
    return taken


def _rounded(value: float) -> float:
    """Nine digits, which is what the log keeps and all that is computed from it sees."""
    return float(f"{value:.9g}")
