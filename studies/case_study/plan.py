"""Which recipe a device has the memory for, and why."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache

import torch
from transformers import PreTrainedConfig

from studies.case_study.device import Device
from studies.case_study.memory import USABLE, Memory, in_units, memory_needed
from studies.case_study.recipe import Recipe
from studies.case_study.settings import CaseStudyError, Settings

#: Shorter sequences than this hold no question with its answer.
SHORTEST = 64


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A recipe with what it needs, and why none that asks for more was taken."""

    recipe: Recipe
    memory: Memory
    reason: str


def plan_training(
    config: PreTrainedConfig, settings: Settings, device: Device, method: str = "auto"
) -> Plan:
    """The first way to train `config` that fits: all weights, or else LoRA.

    Args:
        method: ``auto``, ``full`` or ``lora``.

    Raises CaseStudyError where none fits; it names what would.
    """

    @cache
    def needed(recipe: Recipe, length: int) -> Memory:
        return memory_needed(
            config, recipe, sequence_length=length, micro_batch_size=settings.micro_batch_size
        )

    too_much: list[str] = []
    for recipe in _ways(device, method):
        memory = needed(recipe, settings.sequence_length)
        if memory.fits(device):
            return Plan(recipe=recipe, memory=memory, reason=_reason(recipe, too_much))
        too_much.append(f"{recipe} needs {in_units(memory.total)}")
    raise CaseStudyError(
        f"too little memory on {device.name}: {too_much[-1]}, and of the "
        f"{in_units(device.free)} free {USABLE:.0%} can be planned for. "
        + _ways_out(device, method, settings, needed)
    )


def _ways(device: Device, method: str) -> Iterator[Recipe]:
    """The most thorough first; checkpointing costs a third more time, LoRA changes the training."""
    if method in ("auto", "full"):
        yield Recipe.on(device, lora=False, gradient_checkpointing=False)
        yield Recipe.on(device, lora=False, gradient_checkpointing=True)
    if method in ("auto", "lora"):
        yield Recipe.on(device, lora=True, gradient_checkpointing=True)


def _reason(recipe: Recipe, too_much: list[str]) -> str:
    numbers = {
        torch.float32: "a processor computes in float32",
        torch.bfloat16: "this GPU has bfloat16",
        torch.float16: "this GPU has no bfloat16 of its own",
    }
    return "; ".join([numbers[recipe.dtype], *too_much[-1:]])


def _ways_out(
    device: Device, method: str, settings: Settings, needed: Callable[[Recipe, int], Memory]
) -> str:
    """The options with which it would fit."""
    ways = []
    for kind in ("full", "lora") if method == "full" else ("lora",):
        thriftiest = list(_ways(device, kind))[-1]
        length = settings.sequence_length
        while length >= SHORTEST and not needed(thriftiest, length).fits(device):
            length //= 2
        if length >= SHORTEST:
            options = ["--lora"] if kind != method and method == "full" else []
            if length < settings.sequence_length:
                options.append(f"--sequence-length {length}")
            ways.append(f"{' '.join(options)} fits")
    if settings.micro_batch_size > 1:
        ways.append("--micro-batch-size 1 needs less")
    ways.append("--tiny trains a small model on any machine")
    return "What helps: " + "; ".join(ways)
