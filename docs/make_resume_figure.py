#!/usr/bin/env python3
"""Draw docs/figures/resume.png: a resume without the optimizer's state, and what the audit says.

    python docs/make_resume_figure.py

Trains a small Llama four times from one seed on one core, in about a minute: undisturbed; up to a
checkpoint; from there as it should be; and from there without the optimizer's state.
"""

from __future__ import annotations

import argparse
import copy
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor
from torch.nn.functional import cross_entropy

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from rmetric.audits.resume import OUTLOOK
from rmetric.monitor import Monitor
from rmetric.reporting.style import BLACK, BLUE, GREY, TEXT_WIDTH, VERMILION, style
from studies.common.llama import Llama, initialise
from studies.common.llama_shape import Shape
from studies.tiny_llama.data import Chain

SHAPE = Shape(layers=2, heads=2, kv_heads=1, hidden=32, ffn=96, vocabulary=64, sequence=32)
BATCH, RATE, SAVED, STEPS, BEGIN = 32, 1e-2, 300, 360, 280


def train(
    saved: Mapping[str, Any] | None = None, *, steps: int = STEPS, moments: bool = True
) -> Any:
    """Held-out losses after the steps from `BEGIN` on, the last state, and the findings."""
    torch.manual_seed(0)
    model = Llama(SHAPE)
    initialise(model, SHAPE, seed=0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 4 * STEPS)
    data = Chain(SHAPE.vocabulary, SHAPE.sequence + 1, seed=0)
    held_out = torch.cat([batch(data, step, BATCH) for step in range(1, 9)])
    losses, begin = [], 0
    with Monitor(model, optimizer, audits=True) as monitor:
        monitor.schedulers = [scheduler]
        if saved is not None:
            model.load_state_dict(saved["model"])
            scheduler.load_state_dict(saved["scheduler"])
            if moments:
                optimizer.load_state_dict(saved["optimizer"])
            optimizer.param_groups[0]["lr"] = scheduler.get_last_lr()[0]
            monitor.load_state_dict(saved["monitor"])
            begin = saved["step"]
        for step in range(begin, steps):
            tokens = batch(data, step)
            monitor.batch_ready(tokens)
            loss = loss_of(model, tokens)
            optimizer.zero_grad()
            loss.backward()
            monitor.check_before_step(loss)
            optimizer.step()
            scheduler.step()
            if step >= BEGIN:
                with torch.no_grad():
                    losses.append(loss_of(model, held_out).item())
        state = {
            "model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": steps,
            "scheduler": scheduler.state_dict(), "monitor": monitor.state_dict(),
        }  # fmt: skip
    return losses, copy.deepcopy(state), monitor.findings


def batch(data: Chain, step: int, first: int = 0) -> Tensor:
    """Samples of a step from that one on, shape (BATCH, sequence + 1)."""
    samples = [data.sample(step, first + index) for index in range(BATCH)]
    return torch.from_numpy(np.stack(samples))


def loss_of(model: Llama, tokens: Tensor) -> Tensor:
    return cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def draw() -> Figure:
    """The losses, and below them the table of the resume that went wrong."""
    torch.set_num_threads(1)
    whole, _, _ = train()
    _, saved, _ = train(steps=SAVED)
    right, _, [sound] = train(saved)
    wrong, _, [found] = train(saved, moments=False)
    assert (sound.kind, found.kind) == ("restored", "not_restored")
    figure = Figure(figsize=(TEXT_WIDTH, 4.1))
    losses, table = figure.subplots(2, 1, height_ratios=(1.5, 1))
    figure.subplots_adjust(left=0.075, right=0.985, top=0.94, bottom=0.02, hspace=0.42)
    plot_losses(losses, whole, right, wrong)
    write_table(table, found.rows)
    return figure


def plot_losses(
    axes: Axes, whole: Sequence[float], right: Sequence[float], wrong: Sequence[float]
) -> None:
    before, after = range(BEGIN + 1, STEPS + 1), range(SAVED, STEPS + 1)
    there = whole[SAVED - BEGIN - 1]
    axes.plot(
        after, [there, *wrong], color=VERMILION, label="resumed without the optimizer's state"
    )
    axes.plot(before, whole, color=BLUE, linewidth=2.4, alpha=0.4, label="never stopped")
    axes.plot(
        after,
        [there, *right],
        color=BLACK,
        linewidth=0.7,
        label="resumed with all of the checkpoint",
    )
    axes.axvline(SAVED, color=GREY, linestyle="--", linewidth=0.8)
    axes.annotate(
        f"checkpoint of step {SAVED}", (SAVED, axes.get_ylim()[1]), (-4, -2),
        textcoords="offset points", ha="right", va="top", fontsize=7, color=GREY,
    )  # fmt: skip
    axes.set(xlabel="step", ylabel="held-out loss (nats)", xlim=(BEGIN, STEPS))
    axes.margins(y=0.12)
    axes.legend(loc="upper right")
    axes.set_title(
        "(a) loss of a small language model after each step, the same batches in each run",
        loc="left",
    )


def write_table(axes: Axes, rows: Sequence[Mapping[str, Any]]) -> None:
    axes.axis("off")
    run = "the resume without the optimizer's state"
    axes.set_title(f"(b) what the audit prints at step {SAVED + 1} of {run}", loc="left")
    lines = [("part", "saved", "now", "in the loss"), *map(_cells, rows)]
    places, height = (0.0, 0.13, 0.245, 0.355), 1 / len(lines)
    for number, cells in enumerate(lines):
        lost = number > 0 and cells[2] != "equal"
        look = {"color": VERMILION if lost else BLACK, "weight": "bold" if not number else "normal"}
        for place, cell in zip(places, cells, strict=True):
            axes.text(
                place, 0.97 - (number + 0.5) * height, cell, va="baseline", fontsize=7,
                transform=axes.transAxes, **look,
            )  # fmt: skip


def _cells(row: Mapping[str, Any]) -> tuple[str, ...]:
    if row["equal"]:
        return row["part"], row["was"], "equal", ""
    return row["part"], row["was"], row["now"], OUTLOOK[row["key"] or row["part"]]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--out", type=Path, default=Path(__file__).parent / "figures", metavar="DIR",
        help="where resume.png goes (default: docs/figures)",
    )  # fmt: skip
    out = parser.parse_args(arguments).out
    out.mkdir(parents=True, exist_ok=True)
    with style():
        draw().savefig(out / "resume.png", metadata={"Software": None})
    print(out / "resume.png")
    return 0


if __name__ == "__main__":
    sys.exit(main())
