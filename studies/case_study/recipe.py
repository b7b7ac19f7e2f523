"""How a model is trained on a device: number type, what is trained, what is kept."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from studies.case_study.device import Device

#: Highest learning rates that are usual for fine-tuning a language model.
LEARNING_RATE = {"full": 1e-5, "lora": 1e-4}


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """A way to train; `plan.plan_training` chooses one.

    Attributes:
        device: ``cuda`` or ``cpu``.
        dtype: of the arithmetic.
        lora: train low-rank adapters in place of all weights.
        gradient_checkpointing: compute activations again in the backward pass.
    """

    device: str
    dtype: torch.dtype
    lora: bool
    gradient_checkpointing: bool

    @property
    def mixed(self) -> bool:
        """Whether the arithmetic is narrower than the weights that are trained."""
        return self.dtype != torch.float32

    @property
    def weights_dtype(self) -> torch.dtype:
        """Of the model's own weights: those that are trained need float32.

        In bfloat16 an update of a thousandth of a weight would be rounded away.
        """
        return self.dtype if self.lora else torch.float32

    @property
    def scales_loss(self) -> bool:
        """float16 gradients underflow without it."""
        return self.dtype == torch.float16

    @property
    def learning_rate(self) -> float:
        return LEARNING_RATE["lora" if self.lora else "full"]

    def __str__(self) -> str:
        numbers = str(self.dtype).removeprefix("torch.")
        scaling = " with loss scaling" if self.scales_loss else ""
        trained = "LoRA" if self.lora else "full fine-tuning"
        kept = ", gradient checkpointing" if self.gradient_checkpointing else ""
        return f"{trained} in {numbers}{scaling}{kept}"

    @classmethod
    def on(cls, device: Device, *, lora: bool, gradient_checkpointing: bool) -> Recipe:
        return cls(
            device=device.kind,
            dtype=number_type(device),
            lora=lora,
            gradient_checkpointing=gradient_checkpointing,
        )


def number_type(device: Device) -> torch.dtype:
    if device.kind == "cpu":
        return torch.float32
    return torch.bfloat16 if device.has_bfloat16 else torch.float16
