"""Settings and plan of all jobs, drawn from a seed before anything runs."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from studies.diagnosis_benchmark.injected.variants import VARIANTS, Variant

LAYOUTS = {
    "rank files": "node-03/rank_12.log",
    "attempt folders": "node-03/attempt_0/4/stdout.log and stderr.log, by local rank",
    "node files": "node-03.log, lines begin with [rank12]: ",
    "torchrun": "node-03.log, lines begin with [default4]:, which is the local rank",
    "srun": "one file, lines begin with 12: as srun -l writes it",
    "mpirun": "one file, lines begin with [1,12]<stdout>: as mpirun --tag-output writes it",
}
STYLES = ("plain", "deepspeed", "torch", "megatron", "bare", "transformers", "iso")
LAUNCHERS = ("none", "srun", "torchrun")


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Settings that the jobs of a group share.

    Attributes:
        layout: of `LAYOUTS`. style: of `STYLES`, how a line looks. launcher: of `LAUNCHERS`,
            whose lines stand in launcher.log or, under torchrun, among the node's.
        step_lines: who says the steps: "first", "last" or "all" ranks.
        timings: all ranks say how long each step's parts took.
        watchdog: a rank warns when its own part of a step takes 4 times its median or more.
        stacks: SIGTERM makes a process write its stack, by Python's faulthandler.
        caught: an exception is logged by the trainer, else left to Python.
        torch_level: level of torch's loggers of torch.distributed.
        nan_check: "local" before the gradients are reduced, "global" after it.
        checksums: the loader compares a shard with the index.
        skew: seconds by which a node's clock may be wrong in either direction.
        grace: seconds from the first bad exit until the launcher ends the others; None for never.
        init_timeout, timeout: seconds, of the rendezvous and of a collective.
        addresses: each node has an address of its own, to which its ranks are bound.
        crash_stacks: a fatal signal makes a process write its stack, by Python's faulthandler.
        gradient_check: a rank fails whose own gradients are not finite, before they are reduced.
        parameter_check: after each evaluation all compare their parameters, and who finds a
            difference "names" the ranks or only "tells" of it; "" for no such check.
        spike_guard: all ranks fail when the mean loss is many times the usual.
    """

    world_size: int
    ranks_per_node: int
    layout: str
    style: str
    launcher: str
    step_lines: str
    timings: bool
    watchdog: bool
    stacks: bool
    caught: bool
    torch_level: str
    nan_check: str
    checksums: bool
    skew: float
    grace: float | None
    steps: int
    evaluate_every: int
    save_every: int
    init_timeout: float
    timeout: float
    # Left out of the plan's JSON where they are off, as in the jobs made before they were there.
    addresses: bool = False
    crash_stacks: bool = False
    gradient_check: bool = False
    parameter_check: str = ""
    spike_guard: bool = False

    def node(self, rank: int) -> str:
        return f"node-{rank // self.ranks_per_node:02d}"

    def address(self, rank: int) -> str:
        """Address of the rank's node; all of 127.0.0.0/8 is this machine."""
        return f"127.0.0.{10 + rank // self.ranks_per_node}" if self.addresses else "127.0.0.1"

    @property
    def nodes(self) -> int:
        return -(-self.world_size // self.ranks_per_node)


#: Fields that came later: where they are off, a plan is as it was before.
LATER = ("addresses", "crash_stacks", "gradient_check", "parameter_check", "spike_guard")


def _as_on_a_cluster(settings: Settings, rng: np.random.Generator) -> Settings:
    """With addresses of nodes, and the checks of themselves that larger trainings have."""
    return replace(
        settings, addresses=True, crash_stacks=bool(rng.random() < 0.5),
        gradient_check=bool(rng.random() < 0.5),
        parameter_check=str(rng.choice(["names", "tells"])), spike_guard=True,
    )  # fmt: skip


def draw_settings(groups: int, ranks: tuple[int, int], rng: np.random.Generator) -> list[Settings]:
    """Every layout and style comes before one comes twice."""

    def dealt(choices: tuple[str, ...]) -> list[str]:
        rounds = [rng.permutation(choices).tolist() for _ in range(-(-groups // len(choices)))]
        return [str(choice) for turn in rounds for choice in turn][:groups]

    layouts, styles, launchers = dealt(tuple(LAYOUTS)), dealt(STYLES), dealt(LAUNCHERS)
    # Of eight groups four have 16 ranks, three 24 or 32, one 48 or 64, where the range allows.
    wanted = [16, 24, 16, 32, 16, 48 if rng.random() < 0.5 else 64, 16, 32]
    worlds = [min(max(wanted[n % len(wanted)], ranks[0]), ranks[1]) for n in range(groups)]
    return [_draw(*given, rng) for given in zip(worlds, layouts, styles, launchers, strict=True)]


def _draw(world: int, layout: str, style: str, launcher: str, rng: np.random.Generator) -> Settings:
    launcher = "torchrun" if layout == "torchrun" else launcher
    by_rank = "all" if rng.random() < 0.4 else str(rng.choice(["first", "last"]))
    large = world > 32
    steps = int(rng.integers(16, 21)) if large else int(rng.integers(24, 41 if world <= 16 else 31))
    graces = {"none": (None, 3.0), "srun": (None, 2.0, 0.5), "torchrun": (0.0,)}[launcher]
    return Settings(
        world_size=world,
        ranks_per_node=min(world, 8 if large or rng.random() < 0.5 else 4),
        layout=layout,
        style=style,
        launcher=launcher,
        step_lines=by_rank,
        timings=bool(rng.random() < 0.5),
        watchdog=bool(rng.random() < 0.4),
        stacks=bool(rng.random() < 0.4),
        caught=bool(rng.random() < 0.5),
        torch_level=str(rng.choice(["WARNING", "INFO", "DEBUG"])),
        nan_check=str(rng.choice(["local", "global"])),
        checksums=bool(rng.random() < 0.5),
        skew=float(rng.choice([0.0, 0.0, 0.0, 3.0, 40.0])),
        grace=graces[int(rng.integers(len(graces)))],
        steps=steps,
        evaluate_every=int(rng.integers(4, 9)),
        save_every=int(rng.integers(5, 11)),
        init_timeout=45.0 if large else 20.0 if world > 16 else 12.0,
        timeout=15.0 if large else 9.0 if world > 16 else 6.0,
    )


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
        drawn = [_as_on_a_cluster(one, rng) for one in drawn]
    settings = dict(zip(names, drawn, strict=True))
    out = [
        _plan(f"{name}-sibling-{number}", split, name, "sibling", settings[name], rng)
        for name in names
        for number in range(SIBLINGS)
    ]
    variants = {
        kind: [VARIANTS[kind][place] for place in rng.permutation(len(VARIANTS[kind]))]
        for kind in kinds
    }
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
        given = "judged", settings[group], rng, kind, variant
        out.append(_plan(f"job-{number:03d}", split, group, *given))
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
    # A large world that is slowed down would not end within minutes.
    limited = kind == "slow" and (settings.world_size > 24 or rng.random() < 0.5)
    return replace(
        plan, kind=kind, variant=variant.name, rank=int(rng.integers(1, settings.world_size)),
        stage=stage, step=_step(stage, settings, rng),
        limit=round(float(rng.uniform(5, 9)), 1) if limited else None,
    )  # fmt: skip


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
