"""The view that an audit has of a training, on one rank."""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from math import inf
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook

logger = logging.getLogger("rmetric")

#: What wrappers put into the names of parameters.
_WRAPPED = re.compile(r"(?:^module\.)+|_orig_mod\.|_fsdp_wrapped_module\.")
_none = partial(np.zeros, 0, dtype=np.int64)


@dataclass(frozen=True, kw_only=True)
class Seen:
    """A step as it was before the optimiser changed the weights, on the host.

    Attributes:
        loss: of the step; None where it is not known.
        full: all parameters were measured; else the arrays, of shape (parameters,), are empty.
        consecutive: the step before was measured in full, too.
        weights, gradients, moments: fingerprints, int64; the last two only of several ranks.
        peaks: largest magnitude in each gradient; -1 where there is none.
        trainable: which parameters ask for a gradient.
        rates: highest learning rate of each parameter; -1 for one in no group.
        made: steps so far of the optimisers that hold it; of all for one in no group.
        values: what single audits measured, by name.
    """

    step: int
    loss: float | None = None
    full: bool = False
    consecutive: bool = False
    weights: np.ndarray = field(default_factory=_none)
    gradients: np.ndarray = field(default_factory=_none)
    moments: np.ndarray = field(default_factory=_none)
    peaks: np.ndarray = field(default_factory=_none)
    trainable: np.ndarray = field(default_factory=_none)
    rates: np.ndarray = field(default_factory=_none)
    made: np.ndarray = field(default_factory=_none)
    values: Mapping[str, np.ndarray] = field(default_factory=dict)


class OwnHook:
    """A hook of a module that compiled code leaves out, or it would be compiled anew, or refused.

    It does nothing in a copy of the model, and after its first exception.
    """

    def __init__(self, call: Callable[..., Any] | None = None, what: str = "an audit hook") -> None:
        self._call, self._what = call, what

    def __call__(self, *args: Any) -> None:
        if self._call is None or torch.compiler.is_compiling():
            return
        try:
            self._call(*args)
        except Exception as error:
            self._call = None
            text = "rmetric: %s failed and does nothing any more: %s: %s"
            logger.error(text, self._what, type(error).__name__, error)

    def __reduce__(self) -> Any:
        return OwnHook, ()


class Training:
    """Model, optimisers and schedulers of a training; nothing in here changes them.

    Args:
        model: as trained, in its wrappers.
        optimizer: the one that the monitor follows; None for none.

    Attributes:
        names, parameters: of the model; names without what wrappers add.
        optimizers: that one first, then every other that made a step with some of the parameters.
        made: steps that each of them made, by its id.
        schedulers, scaler, ema, epoch, loader: as far as they are known; `ema` as `Monitor.ema`.
        step: steps checked so far.
        autocast: the training was asked for mixed precision.
        rank, ranks: this process, and how many train together.
        channel: exchanges numbers with the other ranks without waiting; None for none.
        log: writes an entry of that name with these values.
        half: which parameters are of half precision or less, shape (parameters,).
        replicated: a wrapper keeps the weights of several ranks equal.
    """

    def __init__(self, model: nn.Module, optimizer: Any = None) -> None:
        self.model = model
        named = dict(model.named_parameters())
        self.names = [_WRAPPED.sub("", name) for name in named]
        self.parameters = list(named.values())
        self.optimizers: list[Any] = [] if optimizer is None else [optimizer]
        self.made: Counter[int] = Counter()
        self.schedulers: list[Any] = []
        self.scaler: Any = None
        self.ema: Any = None
        self.step = 0
        self.autocast = False
        self.epoch: int | None = None
        self.loader: Any = None
        self.rank, self.ranks = 0, 1
        self.channel: Any = None
        self.log: Callable[..., None] = lambda event, **values: None
        self.half = np.array([p.element_size() <= 2 for p in self.parameters], dtype=bool)
        self.replicated = isinstance(model, nn.parallel.DistributedDataParallel)
        self._sizes = np.array([p.numel() for p in self.parameters], dtype=np.int64)
        self._ids = frozenset(map(id, self.parameters))

    def install(self) -> Iterator[Callable[[], Any]]:
        """Follow the steps of all optimisers of the process; yields what removes the hook."""
        # Not compiled where the step is.
        hook = torch.compiler.disable(self._after_step)  # type: ignore[no-untyped-call]
        yield register_optimizer_step_post_hook(hook).remove

    def _after_step(self, optimizer: Any, *_: Any) -> None:
        if not any(optimizer is known for known in self.optimizers):
            held = (id(p) for group in optimizer.param_groups for p in group["params"])
            if self._ids.isdisjoint(held):
                return
            self.optimizers.append(optimizer)
        self.made[id(optimizer)] += 1

    @property
    def root(self) -> nn.Module:
        """The model without its wrappers."""
        model = self.model
        while True:
            inner = getattr(model, "module", getattr(model, "_orig_mod", None))
            if not isinstance(inner, nn.Module):
                return model
            model = inner

    @property
    def groups(self) -> list[dict[str, Any]]:
        return [group for optimizer in self.optimizers for group in optimizer.param_groups]

    @property
    def trainable(self) -> np.ndarray:
        return np.array([p.requires_grad for p in self.parameters], dtype=bool)

    def host_facts(self) -> dict[str, np.ndarray]:
        """`trainable`, `rates` and `made` of `Seen`, as they are now."""
        rates: dict[int, float] = {}
        made: Counter[int] = Counter()
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                rate = rate_of(group)
                for key in map(id, group["params"]):
                    rates[key] = max(rates.get(key, 0.0), rate)
                    made[key] += self.made[id(optimizer)]
        whole = sum(self.made.values())
        keys = list(map(id, self.parameters))
        return {
            "trainable": self.trainable,
            "rates": np.array([rates.get(key, -1.0) for key in keys]),
            "made": np.array([made.get(key, whole) for key in keys], dtype=int),
        }

    def moments(self) -> list[Tensor | None]:
        """The largest tensor that an optimiser keeps for each parameter; None where it has none."""
        found: dict[int, Tensor] = {}
        for optimizer in self.optimizers:
            for parameter, state in optimizer.state.items():
                tensors = [v for v in state.values() if isinstance(v, Tensor) and v.numel()]
                if tensors:
                    found[id(parameter)] = max(tensors, key=torch.numel)
        return [found.get(id(p)) for p in self.parameters]

    def named(self, which: np.ndarray) -> tuple[str, ...]:
        return tuple(name for name, there in zip(self.names, which, strict=True) if there)

    def share(self, which: np.ndarray) -> float:
        """Their share of all weights that are trained."""
        whole = int(self._sizes[self.trainable].sum())
        return float(self._sizes[which].sum()) / whole if whole else 0.0


def rate_of(group: Mapping[str, Any]) -> float:
    """A group's learning rate; inf for one on a device, which is not waited for."""
    rate = group.get("lr", inf)
    on_host = not isinstance(rate, Tensor) or rate.device.type == "cpu"
    return float(rate) if on_host else inf
