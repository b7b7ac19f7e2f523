"""The published study over many seeds, and with one change at a time.

Shape suffixes: R runs, E evaluations, S seeds.

Source: Fatima 2025; the simulator and the scoring of docs/published_study.md.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import NamedTuple

import numpy as np
from joblib import Parallel
from numpy.typing import NDArray

from rmetric._util.workers import delayed
from rmetric.detectors import DETECTORS
from rmetric.detectors.anchors import Random
from rmetric.detectors.loss_z_score import LossZScore
from rmetric.evaluation.intervals import Estimate
from rmetric.evaluation.protocols import (
    SECONDS_PER_STEP,
    Alerts,
    Outcomes,
    Windows,
    judge_alerts,
)
from rmetric.evaluation.scores import f1
from rmetric.evaluation.traces import Trace, trace_all
from rmetric.metric import RMetricConfig
from rmetric.records import Run
from rmetric.simulation.published import (
    ACTING,
    PUBLISHED_ARCHITECTURES,
    PUBLISHED_FAULTS,
    REPETITIONS,
    PublishedDynamics,
)
from studies.paper.analysis import Analysis
from studies.paper.published_batch import (
    Draws,
    Faults,
    PublishedBatch,
    run_batch,
    scores,
    with_noise,
)
from studies.paper.published_study import CONFIG

Bools = NDArray[np.bool_]
Floats = NDArray[np.float64]
#: Alarms at every evaluation, shape (R, E); the Generator is for rules that draw.
Rule = Callable[[PublishedBatch, np.random.Generator], Bools]

SPREAD_SEEDS = 300
ANATOMY_SEEDS = 200
#: Steps from which a random onset is drawn; the run has settled and the fault can end.
RANDOM_ONSETS = (1000, 4000)
#: The fault of each run of one mode, in the order of the matrix, shape (R,).
FAULT_OF_RUN = np.array(
    [name for _ in PUBLISHED_ARCHITECTURES for name in PUBLISHED_FAULTS for _ in range(REPETITIONS)]
)

DYNAMICS = PublishedDynamics()
#: R as the authors' simulator computes it; `CONFIG` is the same with the paper's weights.
AUTHORS = RMetricConfig.authors_simulator()
README_WEIGHTS = RMetricConfig.authors_readme().weights
#: ΔL against the moving average, as the paper words it.
TRUE_MEAN = replace(CONFIG, variant="paper")


def r_metric(config: RMetricConfig) -> Rule:
    return lambda batch, generator: scores(batch, config) > config.threshold


def _always(batch: PublishedBatch, generator: np.random.Generator) -> Bools:
    return np.ones(batch.validation_RE.shape, dtype=bool)


def _never(batch: PublishedBatch, generator: np.random.Generator) -> Bools:
    return ~_always(batch, generator)


def _random(batch: PublishedBatch, generator: np.random.Generator) -> Bools:
    return generator.random(batch.validation_RE.shape) > 1 - Random(generator).probability


def _at(step: int) -> Rule:
    return lambda batch, generator: _always(batch, generator) & (batch.steps_E == step)


def _loss_jump(nats: float) -> Rule:
    return lambda batch, generator: _since_last(batch.validation_RE, np.subtract) > nats


def _rises(batch: PublishedBatch, generator: np.random.Generator) -> Bools:
    rose = _since_last(batch.validation_RE, np.subtract) > 0
    return rose & np.pad(rose, ((0, 0), (1, 0)))[:, :-1]


def _norm_above(bound: float) -> Rule:
    return lambda batch, generator: batch.norms_REW.mean(axis=-1) > bound


def _norm_jump(factor: float) -> Rule:
    return lambda batch, generator: _since_last(batch.norms_REW.mean(-1), np.divide) > factor


def _since_last(x_RE: Floats, operation: np.ufunc) -> Floats:
    """Each value over, or minus, the one before it; nan at the first."""
    out = np.full(x_RE.shape, np.nan)
    operation(x_RE[:, 1:], x_RE[:, :-1], out=out[:, 1:])
    return out


def _z_score(detector: LossZScore, window: int) -> Rule:
    def rule(batch: PublishedBatch, generator: np.random.Generator) -> Bools:
        losses = batch.validation_RE
        out = np.zeros(losses.shape, dtype=bool)
        for at in range(detector.least, losses.shape[1]):
            past = losses[:, max(0, at - window) : at]
            away, spread = np.abs(losses[:, at] - past.mean(axis=1)), past.std(axis=1)
            out[:, at] = away > detector.threshold * spread
        return out

    return rule


class Row(NamedTuple):
    """A detector on the published study.

    Attributes:
        rule: its alarms on many runs at once; None if that would take hours.
        registered: its name in `DETECTORS`, where a registered one judges the logs; else "".
        redrawn: the registered detector is a metric that the logs of a mode of their own state.
    """

    group: str
    title: str
    rule: Rule | None
    registered: str = ""
    redrawn: bool = False


IN_TABLE, BY_AUTHORS, SETTINGS, OTHERS, ANCHORS = (
    "rows of the published table",
    "as the authors' simulator computes it",
    "R by other settings",
    "other detectors",
    "trivial rules",
)


def _redrawn(title: str, name: str) -> Row:
    return Row(IN_TABLE, title, _mode(DETECTORS[name].mode), registered=name, redrawn=True)


def _registered(group: str, name: str, rule: Rule | None) -> Row:
    return Row(group, DETECTORS[name].title, rule, registered=name)


def _mode(mode: str) -> Rule:
    return r_metric(CONFIG.with_mode(mode))


#: The two triples of weights in words, as tables name them.
WEIGHTS_OF_PAPER, WEIGHTS_OF_AUTHORS = "0.10 / 0.45 / 0.70", "0 / 0.50 / 0.78"
ONSET = DYNAMICS.onset_step
_MEAN = "ΔL from the moving average, as the paper words it"
_SAME = f"the same with {WEIGHTS_OF_AUTHORS}"

ROWS: dict[str, Row] = {
    "full": _redrawn(f"R-Metric ({WEIGHTS_OF_PAPER})", "r_metric"),
    "sigma": _redrawn("σ² only, re-drawn", "r_metric_sigma"),
    "delta_l": _redrawn("ΔL only, re-drawn", "r_metric_delta_l"),
    "lambda": _redrawn("λ only, re-drawn", "r_metric_lambda"),
    "sigma_paired": Row(IN_TABLE, "σ² only, on the same runs", _mode("SIGMA_ONLY")),
    "delta_l_paired": Row(IN_TABLE, "ΔL only, on the same runs", _mode("DELTA_L_ONLY")),
    "loss_rise": Row(IN_TABLE, "Val. Loss Slope (two rises in a row)", _rises, "loss_rise"),
    "isolation_forest": _registered(IN_TABLE, "isolation_forest", None),
    "authors": Row(BY_AUTHORS, f"R-Metric ({WEIGHTS_OF_AUTHORS})", r_metric(AUTHORS)),
    "true_mean": Row(SETTINGS, _MEAN, r_metric(TRUE_MEAN)),
    "authors_true_mean": Row(SETTINGS, _SAME, r_metric(replace(AUTHORS, variant="paper"))),
    "readme_weights": Row(
        SETTINGS, "weights 0.40 / 0.35 / 0.25", r_metric(replace(CONFIG, weights=README_WEIGHTS))
    ),
    "loss_z_score": _registered(OTHERS, "loss_z_score", _z_score(LossZScore(), window=20)),
    "gradient_norm": Row(OTHERS, "Gradient norm above 100", _norm_above(100.0)),
    "calibrated": _registered(OTHERS, "calibrated", None),
    "loss_jump": Row(ANCHORS, "Loss above the last one plus 0.15", _loss_jump(0.15)),
    "norm_jump": Row(ANCHORS, "Mean gradient norm doubled", _norm_jump(2.0)),
    "at_onset": Row(ANCHORS, f"Step is {ONSET}", _at(ONSET)),
    "always": _registered(ANCHORS, "always", _always),
    "never": _registered(ANCHORS, "never", _never),
    "random": _registered(ANCHORS, "random", _random),
}


def traces_of_rows(analysis: Analysis, num_processes: int = 1) -> dict[str, list[Trace]]:
    """Every row on the study of `analysis`; without the modes whose logs are missing."""
    runs = analysis.study.reference
    found = {}
    for name, row in ROWS.items():
        if row.redrawn:
            if row.registered in analysis.traces:
                found[name] = analysis.traces[row.registered]
        elif row.registered:
            found[name] = trace_all(row.registered, runs, num_processes=num_processes)
        elif row.rule is not None:
            found[name] = [_trace_by_rule(name, row.rule, run) for run in runs]
    return found


def _trace_by_rule(name: str, rule: Rule, run: Run) -> Trace:
    """A rule that draws nothing, on the records of one run, all of which are evaluations."""
    steps = np.array([record.step for record in run.records], dtype=np.int64)
    batch = PublishedBatch(
        steps_E=steps,
        validation_RE=np.array([[record.validation_loss for record in run.records]], dtype=float),
        norms_REW=np.array([[record.worker_gradient_norms for record in run.records]], dtype=float),
        seen_RE=np.ones((1, len(steps)), dtype=bool),
        onset_R=np.array([-inf]),
        failure_R=np.array([inf]),
    )
    alarms = rule(batch, np.random.default_rng(0))[0]
    return Trace(
        detector=name, run_id=run.id, steps=steps, scores=alarms.astype(float), alarms=alarms
    )


def runs_of_row(analysis: Analysis, name: str) -> Sequence[Run]:
    row = ROWS[name]
    return analysis.runs(row.registered) if row.redrawn else analysis.study.reference


class SeedScores(NamedTuple):
    """Scores of one rule in each of many studies, shape (S,).

    F1 by both rules; TP, FP and mean lead by the published rule; failing runs alarmed before their
    fault (`early`); mean lead over those that were not.
    """

    published_f1: Floats
    causal_f1: Floats
    hits: Floats
    false_alarms: Floats
    early: Floats
    lead_minutes: Floats
    lead_steps_in_time: Floats


def spread(values_S: Floats) -> Estimate:
    """Mean over the seeds, and the range of 95 % of single studies."""
    if np.isnan(values_S).all():
        return Estimate(np.nan, np.nan, np.nan)
    low, high = np.nanpercentile(values_S, [2.5, 97.5])
    return Estimate(float(np.nanmean(values_S)), float(low), float(high))


@dataclass(frozen=True, kw_only=True)
class Condition:
    """A published study with something changed.

    With `random_onset` the fault begins at a step drawn for each run; `absorbed` is the share of
    the acting faults that pass without a crash.
    """

    title: str
    dynamics: PublishedDynamics = DYNAMICS
    config: RMetricConfig = CONFIG
    random_onset: bool = False
    absorbed: float = 0.0

    def study(self, seed: int) -> PublishedBatch:
        """The 180 runs of one mode; the same seed draws the same noise under every condition."""
        num_runs = len(FAULT_OF_RUN)
        acts = np.isin(FAULT_OF_RUN, ACTING)
        generator = np.random.default_rng([seed, 1])
        onset = np.full(num_runs, self.dynamics.onset_step)
        if self.random_onset:
            onset = generator.integers(*RANDOM_ONSETS, size=num_runs, endpoint=True)
        crashes = acts.copy()
        struck = generator.permutation(np.flatnonzero(acts))
        crashes[struck[: round(self.absorbed * len(struck))]] = False
        draws = Draws.random(num_runs, self.dynamics, np.random.default_rng([seed, 0]))
        faults = Faults(acts=acts, crashes=crashes, onset=onset)
        return run_batch(self.dynamics, faults, draws)


PUBLISHED = Condition(title="As published")


_OFTEN = replace(DYNAMICS, evaluate_every=10)
ANATOMY = (
    PUBLISHED,
    Condition(title="(a) ΔL from the true moving average", config=TRUE_MEAN),
    Condition(title="(b) Onset at a random step", random_onset=True),
    Condition(title="Onset one step later (2501)", dynamics=replace(DYNAMICS, onset_step=2501)),
    Condition(title="Half of the faults absorbed", absorbed=0.5),
    Condition(title="Evaluation noise × 2", dynamics=with_noise(DYNAMICS, 1, 2)),
    Condition(title="Evaluation noise × 4", dynamics=with_noise(DYNAMICS, 1, 4)),
    Condition(title="All noise of the loss × 2", dynamics=with_noise(DYNAMICS, 2, 2)),
    Condition(title="All noise of the loss × 4", dynamics=with_noise(DYNAMICS, 4, 4)),
    Condition(title="Evaluation every 10 steps", dynamics=_OFTEN),
    Condition(title="Weights 0.40 / 0.35 / 0.25", config=replace(CONFIG, weights=README_WEIGHTS)),
    Condition(title="(a) and (b)", config=TRUE_MEAN, random_onset=True),
    Condition(
        title="(a), (b), half absorbed, noise × 2, every 10 steps", config=TRUE_MEAN,
        random_onset=True, absorbed=0.5, dynamics=with_noise(_OFTEN, 2, 2),
    ),
)  # fmt: skip


def alerts_of_batch(batch: PublishedBatch, alarms_RE: Bools) -> Alerts:
    """The first alarms of one rule, shape (R,); a crashed run has no further alarms."""
    inside = batch.onset_R[:, None] <= batch.steps_E
    inside &= batch.steps_E < batch.failure_R[:, None]
    alarms_RE = alarms_RE & batch.seen_RE
    return Alerts(first=_first(batch, alarms_RE), inside=_first(batch, alarms_RE & inside))


def _first(batch: PublishedBatch, alarms_RE: Bools) -> Floats:
    return np.where(alarms_RE.any(axis=1), batch.steps_E[alarms_RE.argmax(axis=1)], inf)


def windows_of_batch(batch: PublishedBatch) -> Windows:
    return Windows(
        failed=np.isfinite(batch.failure_R),
        onset=batch.onset_R,
        failure=batch.failure_R,
        seconds_per_step=np.full(len(batch.failure_R), SECONDS_PER_STEP),
    )


def judge_batch(batch: PublishedBatch, rule: Rule, generator: np.random.Generator) -> list[float]:
    """One study by one rule, as the fields of `SeedScores`."""
    windows = windows_of_batch(batch)
    alerts = alerts_of_batch(batch, rule(batch, generator))
    published, causal = (judge_alerts(windows, alerts, name) for name in ("published", "causal"))
    early = windows.failed & (alerts.first < windows.onset)
    return [
        _f1_of(published),
        _f1_of(causal),
        float(published.hit.sum()),
        float(published.false_alarm.sum()),
        float(early.sum()),
        _mean(published.lead_minutes),
        _mean(published.lead_steps[~early]),
    ]


def _mean(leads: Floats) -> float:
    known = leads[np.isfinite(leads)]
    return float(known.mean()) if len(known) else np.nan


def over_seeds(condition: Condition, rules: Sequence[Rule], num_seeds: int) -> list[SeedScores]:
    """The scores of each rule on the same studies, of the seeds 0 to `num_seeds` - 1."""
    rows = []
    for seed in range(num_seeds):
        batch = condition.study(seed)
        generator = np.random.default_rng([seed, 2])
        rows.append([judge_batch(batch, rule, generator) for rule in rules])
    return [SeedScores(*columns) for columns in np.array(rows).transpose(1, 2, 0)]


def spread_of_rows(num_seeds: int = SPREAD_SEEDS) -> dict[str, SeedScores]:
    """Every row that has a rule, as published, over seeds."""
    rules = {name: row.rule for name, row in ROWS.items() if row.rule is not None}
    return dict(zip(rules, over_seeds(PUBLISHED, list(rules.values()), num_seeds), strict=True))


def spread_by_fault(num_seeds: int = SPREAD_SEEDS) -> dict[str, dict[str, Floats]]:
    """F1 over seeds, shape (S,), by rule and by fault; ``Overall`` leaves NONE out."""
    chosen = {"Overall": FAULT_OF_RUN != "NONE"}
    chosen |= {name: name == FAULT_OF_RUN for name in PUBLISHED_FAULTS if name != "NONE"}
    found: dict[str, dict[str, list[float]]] = {"published": {}, "causal": {}}
    for batch, alerts in _published_alerts(num_seeds):
        for protocol, of_fault in found.items():
            outcomes = judge_alerts(windows_of_batch(batch), alerts, protocol)
            for name, runs in chosen.items():
                of_fault.setdefault(name, []).append(_f1_of(outcomes.select(runs)))
    return {
        protocol: {name: np.array(values) for name, values in of_fault.items()}
        for protocol, of_fault in found.items()
    }


def second_drift_share(num_seeds: int = ANATOMY_SEEDS) -> float:
    """Share of the false and early first alarms, as published, that come with the second ΔL."""
    firsts: list[float] = []
    for batch, alerts in _published_alerts(num_seeds):
        first = alerts.first
        healthy = np.isinf(batch.failure_R)
        firsts += first[(first < batch.onset_R) | (healthy & (first < inf))].tolist()
    return float(np.mean(np.array(firsts) == 3 * DYNAMICS.evaluate_every))


def _published_alerts(num_seeds: int) -> Iterator[tuple[PublishedBatch, Alerts]]:
    for seed in range(num_seeds):
        batch = PUBLISHED.study(seed)
        yield batch, alerts_of_batch(batch, scores(batch, CONFIG) > CONFIG.threshold)


def _f1_of(outcomes: Outcomes) -> float:
    return float(f1(outcomes, np.ones(len(outcomes.failed))))


class Anatomised(NamedTuple):
    """The metric under one condition; `by_authors` is None where the weights are the change."""

    condition: Condition
    seeds: SeedScores
    by_authors: SeedScores | None


def anatomy(num_seeds: int = ANATOMY_SEEDS, num_processes: int = 1) -> list[Anatomised]:
    """The metric under every condition."""
    return Parallel(n_jobs=num_processes)(
        delayed(_under)(index, num_seeds) for index in range(len(ANATOMY))
    )


def _under(index: int, num_seeds: int) -> Anatomised:
    condition = ANATOMY[index]  # by its number, as a rule cannot be sent to another process
    configs = [condition.config]
    if condition.config.weights == CONFIG.weights:
        configs.append(replace(condition.config, weights=AUTHORS.weights))
    found = over_seeds(condition, [r_metric(config) for config in configs], num_seeds)
    return Anatomised(condition, found[0], found[1] if len(found) > 1 else None)
