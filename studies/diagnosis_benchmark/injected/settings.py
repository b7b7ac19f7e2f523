"""Settings of a training job: size, logging and launcher."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

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


def as_on_a_cluster(settings: Settings, rng: np.random.Generator) -> Settings:
    """With addresses of nodes, and the checks of themselves that larger trainings have."""
    return replace(
        settings,
        addresses=True,
        crash_stacks=bool(rng.random() < 0.5),
        gradient_check=bool(rng.random() < 0.5),
        parameter_check=str(rng.choice(["names", "tells"])),
        spike_guard=True,
    )


def draw_settings(groups: int, ranks: tuple[int, int], rng: np.random.Generator) -> list[Settings]:
    """Every layout and style comes before one comes twice."""
    layouts, styles = _dealt(tuple(LAYOUTS), groups, rng), _dealt(STYLES, groups, rng)
    launchers, worlds = _dealt(LAUNCHERS, groups, rng), _worlds(groups, ranks, rng)
    return [_draw(*given, rng) for given in zip(worlds, layouts, styles, launchers, strict=True)]


def _dealt(choices: tuple[str, ...], count: int, rng: np.random.Generator) -> list[str]:
    rounds = [rng.permutation(choices).tolist() for _ in range(-(-count // len(choices)))]
    return [str(one) for dealt in rounds for one in dealt][:count]


def _worlds(groups: int, ranks: tuple[int, int], rng: np.random.Generator) -> list[int]:
    """Of eight groups four have 16 ranks, three 24 or 32, one 48 or 64, where the range allows."""
    low, high = ranks
    wanted = [16, 24, 16, 32, 16, 64, 16, 32]
    if rng.random() < 0.5:
        wanted[5] = 48
    return [min(max(wanted[number % len(wanted)], low), high) for number in range(groups)]


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
