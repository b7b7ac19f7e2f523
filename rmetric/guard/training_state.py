"""State of a training in the form that `Checkpoints` saves."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

#: One flat name a tensor, so that pipeline stages never give two things one name.
OPTIONS = StateDictOptions(flatten_optimizer_state_dict=True)


class ModelState:
    """Model and optimiser state under names that are the same in every layout.

    `Checkpoints` saves ``{"training": ModelState(model, optimizer)}`` and loads it in place;
    sharded tensors (DTensor) stay sharded.

    Args:
        model: model, or its parts on this rank with pipeline parallelism.
        optimizer: optimiser, or one per part; none to save no optimiser.
    """

    def __init__(
        self,
        model: nn.Module | Sequence[nn.Module],
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] = (),
    ) -> None:
        self.models = [model] if isinstance(model, nn.Module) else list(model)
        single = isinstance(optimizer, torch.optim.Optimizer)
        self.optimizers: list[Any] = [optimizer] if single else list(optimizer)  # type: ignore[arg-type]
        if len(self.optimizers) not in (0, len(self.models)):
            raise ValueError(
                f"{len(self.optimizers)} optimisers for {len(self.models)} parts of a model: "
                "none, or one a part is needed"
            )

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = {"model": {}, "optimizer": {}}
        for model in self.models:
            state["model"].update(get_model_state_dict(model))
        for model, optimizer in zip(self.models, self.optimizers, strict=False):
            state["optimizer"].update(get_optimizer_state_dict(model, optimizer, options=OPTIONS))
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for model in self.models:
            names = get_model_state_dict(model)
            set_model_state_dict(model, {name: state["model"][name] for name in names})
        for model, optimizer in zip(self.models, self.optimizers, strict=False):
            set_optimizer_state_dict(model, optimizer, dict(state["optimizer"]), options=OPTIONS)


def random_values() -> dict[str, Any]:
    """Random state of this process (python, numpy, torch, CUDA) as JSON values.

    For `own` of `Checkpoints.begin`, since each rank has its own.
    """
    version, numbers, gauss = random.getstate()
    name, keys, position, has_gauss, cached = np.random.get_state()  # noqa: NPY002
    cuda = torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None  # type: ignore[no-untyped-call]
    return {
        "python": [version, list(numbers), gauss],
        "numpy": [name, [int(key) for key in keys], position, has_gauss, cached],
        "torch": torch.get_rng_state().numpy().tobytes().hex(),
        "cuda": None if cuda is None else cuda.numpy().tobytes().hex(),
    }


def set_random_values(values: Mapping[str, Any]) -> None:
    """Restore the random state that `random_values` returned."""
    version, numbers, gauss = values["python"]
    random.setstate((version, tuple(numbers), gauss))
    name, keys, *rest = values["numpy"]
    np.random.set_state((name, np.array(keys, dtype=np.uint32), *rest))  # noqa: NPY002
    torch.set_rng_state(_tensor(values["torch"]))
    if values["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(_tensor(values["cuda"]))


def _tensor(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray.fromhex(text), dtype=torch.uint8)
