"""Cost of snapshots: step time of a training with and without a rescue, paired.

    python -m benchmarks.rescue_snapshots

A model of about 100 million weights is trained with AdamW. On a GPU, where copies run beside the
steps, rounds with and without the rescue alternate; each round has the steps of whole intervals
between snapshots. On a CPU a snapshot is taken between two steps, so its own time is measured, and
set against that of the steps of an interval.
"""

from __future__ import annotations

import argparse
import logging
import statistics
import time
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.report import write_report
from rmetric.monitor import Monitor
from rmetric.rescue import Rescue, RescueConfig
from rmetric.rescue.snapshot_keeper import LEAST, snapshots_kept

WIDTH, LAYERS = 768, 14
FEW_TOKENS = 4  # of a row, in the steps that only fill the ring
SHARE = 0.01  # of a step's time: the aim


def make_model(width: int, layers: int, dtype: torch.dtype = torch.float32) -> nn.Module:
    layer = nn.TransformerEncoderLayer(
        width, max(1, width // 64), 4 * width, dropout=0.0, batch_first=True, dtype=dtype
    )
    return nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)


def config_of(args: argparse.Namespace) -> RescueConfig:
    return RescueConfig(every=args.every, far=args.far)


def batches(device: str, args: argparse.Namespace) -> Iterator[Tensor]:
    generator = torch.Generator().manual_seed(0)
    shape = args.rows, args.tokens, args.width
    batch = torch.randn(shape, generator=generator).to(device, getattr(torch, args.dtype))
    while True:
        yield batch


class Training:
    """One model with a monitor, and with or without a rescue."""

    def __init__(self, args: argparse.Namespace, device: str, *, rescued: bool) -> None:
        torch.manual_seed(0)
        self.device = device
        with torch.device(device):
            self.model = make_model(args.width, args.layers, getattr(torch, args.dtype))
        fused = device == "cuda"
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-5, fused=fused)
        self.rescue = Rescue(config_of(args), where=args.where) if rescued else None
        actions = [] if self.rescue is None else [self.rescue]
        self.monitor = Monitor(self.model, self.optimizer, actions=actions)
        data = batches(device, args)
        loop = self.rescue or Rescue()
        self._steps = loop.steps(data, 10**9)
        self.between = 0.0

    def step(self, tokens: int | None = None) -> float:
        """Seconds of one step, of so many tokens a row."""
        began = time.perf_counter()
        _, batch = next(self._steps)
        self.between = time.perf_counter() - began  # the batch is there already
        batch = batch[:, :tokens]
        with torch.autocast(self.device, torch.bfloat16, enabled=self.device == "cuda"):
            loss = self.model(batch).float().square().mean()
        loss.backward()
        self.monitor.check_before_step(loss)
        self.optimizer.step()
        self.optimizer.zero_grad()
        if self.device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - began


def paired(args: argparse.Namespace, device: str) -> dict[str, Any]:
    """Share of a step's time, with and without the rescue in turns."""
    every = args.every
    without = Training(args, device, rescued=False)
    with_rescue = Training(args, device, rescued=True)
    for training in (without, with_rescue):
        for _ in range(args.warm_up * every):
            training.step()
    rounds = []
    for number in range(args.rounds):
        order = [without, with_rescue] if number % 2 == 0 else [with_rescue, without]
        seconds = {id(run): sum(run.step() for _ in range(every)) for run in order}
        rounds.append((seconds[id(without)] / every, seconds[id(with_rescue)] / every))
    shares = sorted(after / before - 1.0 for before, after in rounds)
    return {
        "measured": "paired rounds",
        "rounds": args.rounds,
        "median_step_seconds_without": statistics.median(before for before, _ in rounds),
        "median_step_seconds_with": statistics.median(after for _, after in rounds),
        "median_share_of_a_step": statistics.median(shares),
        "smallest_and_largest_share": [shares[0], shares[-1]],
        **of_model(with_rescue, args),
    }


def own_time(args: argparse.Namespace, device: str) -> dict[str, Any]:
    """Share of a step's time, from the time of the snapshots themselves."""
    every = args.every
    training = Training(args, device, rescued=True)
    snapshots = []
    for _ in range((args.warm_up + args.rounds) * every):
        training.step(FEW_TOKENS)
        snapshots.append(training.between)
    # The largest of every interval is the step that took a snapshot.
    rounds = [max(snapshots[i : i + every]) for i in range(0, len(snapshots), every)]
    rounds = rounds[args.warm_up :]
    steps = [training.step() - training.between for _ in range(args.steps)]
    step = statistics.median(steps)
    shares = sorted(seconds / (every * step) for seconds in rounds)
    return {
        "measured": "own time of the snapshots",
        "rounds": args.rounds,
        "median_snapshot_seconds": statistics.median(rounds),
        "median_step_seconds_without": step,
        "median_share_of_a_step": statistics.median(shares),
        "smallest_and_largest_share": [shares[0], shares[-1]],
        **of_model(training, args),
    }


def of_model(training: Training, args: argparse.Namespace) -> dict[str, Any]:
    """Numbers of the model and its snapshots."""
    assert training.rescue is not None
    assert not training.rescue.problem, training.rescue.problem
    weights = sum(p.numel() for p in training.model.parameters())
    of_weight = next(training.model.parameters()).element_size()
    return {
        "weights": weights,
        "snapshot_bytes": 3 * of_weight * weights,
        "snapshots_kept": snapshots_kept(config_of(args)),
        "every": args.every,
    }


def measure(args: argparse.Namespace) -> dict[str, Any]:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    found = (paired if device == "cuda" else own_time)(args, device)
    return {
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
        "where": args.where,
        "tokens_a_step": args.rows * args.tokens,
        **found,
        "aim": SHARE,
        "met": found["median_share_of_a_step"] <= SHARE,
    }


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """The options, from the command line or from `argv`."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=10, help="of one interval each")
    parser.add_argument("--warm-up", type=int, default=8, help="intervals before; fills the ring")
    parser.add_argument("--steps", type=int, default=5, help="measured steps on a CPU")
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--width", type=int, default=WIDTH)
    parser.add_argument("--layers", type=int, default=LAYERS)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--every", type=int, default=LEAST, help="steps between two")
    parser.add_argument("--far", type=int, default=RescueConfig().far, help="age of the oldest")
    parser.add_argument("--where", default="host", help="host, device, or a folder")
    parser.add_argument("--name", default="rescue_snapshots", help="of the report")
    return parser.parse_args(argv)


def main() -> None:
    logging.basicConfig(level=logging.INFO)
    args = arguments()
    measured = measure(args)
    print(measured)
    print(write_report(args.name, measured))


if __name__ == "__main__":
    main()
