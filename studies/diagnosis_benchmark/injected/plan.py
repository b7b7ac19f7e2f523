"""Plan of all jobs, drawn from a seed before anything runs."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from studies.diagnosis_benchmark.injected.settings import (
    LATER,
    Settings,
    as_on_a_cluster,
    draw_settings,
)
from studies.diagnosis_benchmark.injected.variants import VARIANTS, Variant

#: The kinds of fault of each split: the first eight drawn once and for all, those of `blind` added
#: when the others had been looked at.
SPLIT: dict[str, list[str]] = json.loads(Path(__file__).with_name("split.json").read_text())
SPLITS = ("development", "test", "blind")
KINDS = sorted(kind for split in SPLITS for kind in SPLIT[split])
#: Healthy jobs of each group of settings that serve as siblings only.
SIBLINGS = 3
#: Steps that a healthy job has done before a fault of the training comes, so that it has a past.
PAST = 8


@dataclass(frozen=True, kw_only=True)
class Plan:
    """One job.

    Attributes:
        part: "judged" or "sibling" (healthy, there for the pool).
        kind, variant: of `VARIANTS`; "healthy" and "" without a fault.
        rank: the faulty one; None without a fault.
        stage, step: when the fault comes; the step is None outside of the steps.
        limit: seconds from the onset until the job's time is up; None for no such limit.
        noise: harmless lines, see `trainer.Noise`.
    """

    name: str
    split: str
    group: str
    part: str
    settings: Settings
    seed: int
    kind: str = "healthy"
    variant: str = ""
    rank: int | None = None
    stage: str = ""
    step: int | None = None
    limit: float | None = None
    noise: dict[str, Any] = field(default_factory=dict)

    @property
    def faulty(self) -> bool:
        return self.kind != "healthy"

    def as_json(self) -> dict[str, Any]:
        out = asdict(self)
        for name in LATER:
            if not out["settings"][name]:
                del out["settings"][name]
        return out

    def fingerprint(self) -> str:
        """Digest of the whole plan: a different plan under the same name is a different job."""
        return hashlib.sha256(json.dumps(self.as_json(), sort_keys=True).encode()).hexdigest()[:16]


def plans(
    *,
    jobs: int,
    seed: int = 6,
    ranks: tuple[int, int] = (16, 64),
    kinds: Sequence[str] | None = None,
    splits: Sequence[str] = SPLITS[:2],
    groups: int = 8,
) -> list[Plan]:
    """The jobs of some splits, the same for the same arguments.

    Args:
        jobs: those to be judged, as many in each split, a quarter of them healthy; `SIBLINGS`
            healthy ones for each group come on top.
        groups: of settings in each split; no group is in both.
    """
    healthy = kinds is None or "healthy" in kinds
    chosen = {
        split: [one for one in SPLIT[split] if kinds is None or one in kinds] for split in splits
    }
    made = [split for split in splits if chosen[split] or healthy]
    out: list[Plan] = []
    for place, split in enumerate(made):
        rng = np.random.default_rng([seed, SPLITS.index(split)])
        share = jobs // len(made) + (jobs % len(made) > place)
        out += _of_split(
            split, share, min(groups, max(share, 1)), ranks, chosen[split], healthy, rng
        )
    return out


def _of_split(
    split: str, jobs: int, groups: int, ranks: tuple[int, int], kinds: list[str], healthy: bool,
    rng: np.random.Generator,
) -> list[Plan]:  # fmt: skip
    names = [f"{split[0]}{number:02d}" for number in range(groups)]
    drawn = draw_settings(groups, ranks, rng)
    if split == "blind":
        drawn = [as_on_a_cluster(one, rng) for one in drawn]
    settings = dict(zip(names, drawn, strict=True))
    out = []
    for name in names:
        for number in range(SIBLINGS):
            out.append(
                _plan(f"{name}-sibling-{number}", split, name, "sibling", settings[name], rng)
            )
    variants = {kind: _shuffled(VARIANTS[kind], rng) for kind in kinds}
    sequence = _kinds(jobs, kinds, healthy)
    turns = names * jobs
    if split == "blind":
        # Its six kinds in turn would each meet the same two of eight groups.
        turns = [name for _ in range(jobs) for name in rng.permutation(names).tolist()]
    for number, (kind, group) in enumerate(zip(sequence, turns, strict=False)):
        variant = None
        if kind != "healthy":
            variants[kind] = variants[kind][1:] + variants[kind][:1]
            variant = variants[kind][-1]
        label = f"job-{number:03d}"
        out.append(_plan(label, split, group, "judged", settings[group], rng, kind, variant))
    return out


def _kinds(jobs: int, kinds: list[str], healthy: bool) -> list[str]:
    """One in four is healthy, the others take the kinds in turn.

    A turn of four kinds is of five jobs and thus meets every group of settings, of which there
    are eight.
    """
    faulty = iter(kinds * jobs)
    every = 4 if kinds else 1
    return [
        "healthy" if healthy and (n + n // 8) % every == 0 else next(faulty) for n in range(jobs)
    ]


def _shuffled(variants: Sequence[Variant], rng: np.random.Generator) -> list[Variant]:
    return [variants[place] for place in rng.permutation(len(variants))]


def _plan(
    name: str, split: str, group: str, part: str, settings: Settings, rng: np.random.Generator,
    kind: str = "healthy", variant: Variant | None = None,
) -> Plan:  # fmt: skip
    plan = Plan(
        name=name, split=split, group=group, part=part, settings=settings,
        noise=_noise(settings, rng), seed=int(rng.integers(2**31)),
    )  # fmt: skip
    if variant is None:
        return plan
    stage = str(rng.choice(variant.stages))
    limited = kind == "slow" and _ends_by_limit(settings, rng)
    return replace(
        plan,
        kind=kind,
        variant=variant.name,
        rank=int(rng.integers(1, settings.world_size)),
        stage=stage,
        step=_step(stage, settings, rng),
        limit=round(float(rng.uniform(5, 9)), 1) if limited else None,
    )


def _ends_by_limit(settings: Settings, rng: np.random.Generator) -> bool:
    # A large world that is slowed down would not end within minutes.
    return settings.world_size > 24 or rng.random() < 0.5


def _step(stage: str, settings: Settings, rng: np.random.Generator) -> int | None:
    if stage == "train":
        return int(rng.integers(min(PAST, settings.steps - 2), settings.steps - 1))
    every = {"evaluate": settings.evaluate_every, "checkpoint": settings.save_every}.get(stage)
    if every is None:
        return None
    return int(rng.integers(1, settings.steps // every + 1)) * every


def _noise(settings: Settings, rng: np.random.Generator) -> dict[str, Any]:
    """Harmless lines of this job; the same sort comes to other ranks and steps in another job."""
    world, steps = settings.world_size, settings.steps

    def some(share: float) -> list[list[int]]:
        count = rng.binomial(world, share / world * 4)
        return [[int(rng.integers(world)), int(rng.integers(steps))] for _ in range(count)]

    return {
        "error_on_all": bool(rng.random() < 0.3),
        "error_on": int(rng.integers(world)) if rng.random() < 0.5 else None,
        "warning_on_all": bool(rng.random() < 0.5),
        "retries": some(0.7),
        "tracebacks": some(0.15),
    }
