"""The authors' simulator, from its specification: same seed, same R, to the last bit.

Nothing here emerges. The loss is a fixed curve with uniform noise, three faults add the
same rise to it, and the crash is drawn: with chance (k / 15)² at the k-th step of the
fault. All randomness comes from one `random.Random` in the authors' order of draws, through
all 720 runs, so that a study equals theirs with Python's `random` seeded alike. Whatever
shapes a run is in `PublishedDynamics`; `published_batch` does the same for many studies.

Source: the repository of Fatima 2025, `simulator.py` of commit a3f0b99 (4 July 2025) and
`run_ablation_studies.py` of commit 233ba7f. Independent of that code; see docs/published_study.md.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import exp
from random import Random
from typing import Any

from rmetric._util.errors import require
from rmetric.metric import MODES
from rmetric.records import Record, Run, Truth

PUBLISHED_ARCHITECTURES = ("Llama-3-8B", "Mistral-7B", "GPT-4-MoE")
#: In the order of the matrix, with what the authors' configuration states of each.
PUBLISHED_FAULTS: dict[str, dict[str, Any]] = {
    "EXPERT_FAILURE": {"expert_to_kill": 2},
    "ROUTER_IMBALANCE": {"imbalance_factor": 0.7},
    "GRADIENT_EXPLOSION": {},
    "LR_SPIKE": {},
    "NONE": {},
}
#: Those that do something, all three the same; any other name changes nothing.
ACTING = ("LR_SPIKE", "DATA_CORRUPTION", "GRADIENT_EXPLOSION")
#: Other names that the authors use.
WITHOUT_EFFECT = ("EXPERT_FAILURE", "ROUTER_IMBALANCE", "NODE_FAILURE", "NONE")
REPETITIONS = 12
#: The crash is certain at this step of the fault.
LONGEST_FAULT = 15
COMMIT = "a3f0b99"


@dataclass(frozen=True, kw_only=True)
class PublishedDynamics:
    """The constants of the simulator; the defaults are the authors'.

    Attributes:
        total_steps, evaluate_every, num_workers: of the training.
        onset_step: first step under the fault. The authors' is an evaluation step.
        training_noise: range of the uniform noise of the training loss, nats.
        evaluation_noise: range of what the validation loss adds to it, nats.
    """

    total_steps: int = 5000
    evaluate_every: int = 100
    num_workers: int = 8
    onset_step: int = 2500
    training_noise: tuple[float, float] = (0.1, 0.2)
    evaluation_noise: tuple[float, float] = (0.05, 0.1)

    def __post_init__(self) -> None:
        check_training(self)

    @cached_property
    def evaluation_steps(self) -> list[int]:
        return list(range(self.evaluate_every, self.total_steps + 1, self.evaluate_every))


def check_training(of: Any) -> None:
    """Raise ValueError where steps, cadence, workers or onset of a training are out of range."""
    for name, least in (("total_steps", 1), ("evaluate_every", 1), ("num_workers", 2)):
        value = getattr(of, name)
        require(name, value, value >= least, f"at least {least}")
    steps, onset = of.total_steps, of.onset_step
    require("onset_step", onset, 1 <= onset <= steps, f"from 1 to total_steps ({steps})")


#: What a fault adds to the loss: this much a step, and a uniform number from this range, nats.
RISE, RISE_NOISE = 0.3, (0.0, 2.0)
#: A worker's gradient norm over the usual one of the step, and what a fault multiplies it by.
NORM_SPREAD, NORM_BLOW = (0.9, 1.1), (1.0, 20.0)


def usual_loss(step: int) -> float:
    """Training loss without noise, nats."""
    return 3.0 * exp(-step / 3000)


def usual_norm(step: int) -> float:
    """Gradient norm of a worker without noise."""
    return 10.0 * exp(-step / 2000) + 1.0


def crash_chance(age: int) -> float:
    """Chance of the crash at the `age`-th step of a fault, counted from 1."""
    return (age / LONGEST_FAULT) ** 2


@dataclass(frozen=True, kw_only=True)
class PublishedSpec:
    """One run of the matrix.

    Attributes:
        experiment_id: names the run and its log.
        mode: of the metric; a run of one mode is not a run of another.
        architecture, fault, repetition: which cell of the matrix; the first changes nothing.
        recipe: the study that the run is part of.
    """

    experiment_id: str
    mode: str
    architecture: str
    fault: str
    repetition: int = 1
    recipe: str = "published"

    @property
    def acts(self) -> bool:
        return self.fault in ACTING


def published_specs() -> list[PublishedSpec]:
    """The 720 runs in the order in which they are drawn."""
    cells = [
        (mode, architecture, fault, repetition)
        for mode in MODES
        for architecture in PUBLISHED_ARCHITECTURES
        for fault in PUBLISHED_FAULTS
        for repetition in range(1, REPETITIONS + 1)
    ]
    return [
        PublishedSpec(
            experiment_id=(
                f"run_{number:03d}_{architecture.lower()}_{fault.lower()}_rep{repetition}"
            ),
            mode=mode,
            architecture=architecture,
            fault=fault,
            repetition=repetition,
        )
        for number, (mode, architecture, fault, repetition) in enumerate(cells, start=1)
    ]


def simulate_published(
    specs: Sequence[PublishedSpec],
    random: Random,
    dynamics: PublishedDynamics | None = None,
    *,
    seed: int | None = None,
) -> Iterator[Run]:
    """The runs one after the other, from one stream of draws.

    Args:
        specs: in the order of their draws; leaving one out changes all that follow.
        random: advanced by each run.
        dynamics: constants of the simulator; None for the authors'.
        seed: what `random` was seeded with, for the runs' configuration.
    """
    dynamics = dynamics or PublishedDynamics()
    for spec in specs:
        records, failure_step = _train(spec, random, dynamics)
        yield Run(
            id=spec.experiment_id,
            records=records,
            config=config_of(spec, dynamics, seed),
            truth=_truth(spec, dynamics, failure_step),
        )


def _train(
    spec: PublishedSpec, random: Random, dynamics: PublishedDynamics
) -> tuple[list[Record], int | None]:
    """The evaluations of one run, and the step at which it crashed."""
    uniform, chance = random.uniform, random.random
    records = []
    for step in range(1, dynamics.total_steps + 1):
        acting = spec.acts and step >= dynamics.onset_step
        evaluated = step % dynamics.evaluate_every == 0
        if not (acting or evaluated):
            chance()  # the noise of a loss that is neither logged nor used; the stream moves on
            continue
        loss = usual_loss(step) + uniform(*dynamics.training_noise)
        crashed = False
        if acting:
            age = step - dynamics.onset_step + 1
            loss += RISE * age + uniform(*RISE_NOISE)
            crashed = chance() < crash_chance(age)
        if evaluated:
            validation_loss = loss + uniform(*dynamics.evaluation_noise)
            low, high = (edge * usual_norm(step) for edge in NORM_SPREAD)
            norms = [uniform(low, high) for _ in range(dynamics.num_workers)]
            if acting:
                norms = [norm * uniform(*NORM_BLOW) for norm in norms]
            records.append(
                Record(
                    step=step,
                    training_loss=loss,
                    validation_loss=validation_loss,
                    worker_gradient_norms=tuple(norms),
                )
            )
        if crashed:
            return records, step
    return records, None


def _truth(spec: PublishedSpec, dynamics: PublishedDynamics, failure_step: int | None) -> Truth:
    truth = Truth(fault=spec.fault)
    if spec.fault == "NONE":
        return truth
    truth.onset_step = dynamics.onset_step
    if not spec.acts:
        truth.applicable, truth.outcome = False, "not_applicable"
    elif failure_step is not None:
        truth.outcome, truth.failure_kind = "failed", "scripted_crash"
        truth.failure_step = failure_step
    else:  # the training ended within the first steps of the fault
        truth.outcome = "absorbed"
    return truth


def config_of(
    spec: PublishedSpec, dynamics: PublishedDynamics, seed: int | None = None
) -> dict[str, Any]:
    """The run under the names of the log; the authors' trigger step stands for NONE too."""
    return {
        "model_type": spec.architecture,
        "num_workers": dynamics.num_workers,
        "total_training_steps": dynamics.total_steps,
        "eval_every_n_steps": dynamics.evaluate_every,
        "seconds_per_step": 5.0,
        "seed": seed,
        "repetition": spec.repetition,
        "recipe": spec.recipe,
        "fault_injection": {
            "type": spec.fault,
            "trigger_step": dynamics.onset_step,
            "params": PUBLISHED_FAULTS.get(spec.fault, {}),
        },
        "simulator": {"source": f"commit {COMMIT} of the authors' repository, from its equations"},
    }
