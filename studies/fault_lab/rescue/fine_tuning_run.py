"""Short fine-tunings under faults, with the package's own monitor and rescue in a plain loop.

A small Llama, trained on Python's sources, is fine-tuned on Python's reference manual for 60 to
200 steps. A fault begins at step 5 or later, by executed steps; half of the faults pass, half are
for good. Each run is trained four times: undisturbed (the twin), undisturbed under rescue, with
the fault alone, and with the fault under rescue.
"""

from __future__ import annotations

import hashlib
import logging
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from itertools import islice
from math import cos, isfinite, pi
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from rmetric.monitor import Monitor
from rmetric.rescue import Rescue, RescueConfig
from studies.common.llama import Llama, initialise
from studies.common.llama_shape import Shape
from studies.fault_lab.corpus import corpus

SHAPE = Shape(layers=2, heads=4, kv_heads=2, hidden=64, ffn=172, vocabulary=256, sequence=64)
BATCH_SIZE, PRETRAINING, HELD_OUT_BATCHES = 16, 1200, 4
#: Steps of the twin whose loss is known: those that a snapshot may be of.
EVERY = 10
NEVER = 10**9  # the onset of no fault


@dataclass(frozen=True, kw_only=True)
class Run:
    """One fine-tuning and its fault.

    The learning rate rises to `rate` over `warm_up` steps and then takes its `shape` (``cosine``,
    ``linear``, ``constant``), by a scheduler that rescue is given or not. The fault acts from
    executed step `onset` on, for `duration` of them; 0 for good.
    """

    seed: int
    steps: int
    rate: float
    warm_up: int
    shape: str
    scheduler: bool
    fault: str
    severity: float
    onset: int
    duration: int

    def acts(self, executed: int) -> bool:
        since = executed - self.onset
        return since >= 0 and (not self.duration or since < self.duration)

    def factor(self, step: int) -> float:
        """Share of the highest rate at a step, counted from 0."""
        if step < self.warm_up:
            return (step + 1) / self.warm_up
        left = 1 - (step - self.warm_up) / max(1, self.steps - self.warm_up)
        of_shape = {"cosine": (1 + cos(pi * (1 - left))) / 2, "linear": left, "constant": 1.0}
        return max(of_shape[self.shape], 1e-3)


#: Severities of each fault; what they mean is in `Disturbed`.
SEVERITIES: dict[str, tuple[float, ...]] = {
    "rate": (5, 20, 50, 100),
    "rate_runaway": (1.1, 1.2, 1.3, 1.5),
    "rate_zero": (0,),
    "hidden_rate": (5, 20, 50),
    "ascent": (0.1, 0.5, 1),
    "gradient_noise": (3, 10, 30),
    "gradient_zero": (0,),
    "not_finite": (1,),
    "labels": (0.5, 1),
    "label_drift": (0.01, 0.02, 0.05),
    "weights": (0.1, 0.3),
    "beta": (0.5, 0.1),
}


def draw(seed: int) -> Run:
    rng = np.random.default_rng([seed, 45])
    steps = int(rng.integers(60, 201))
    fault = str(rng.choice(list(SEVERITIES)))
    passes = bool(seed % 2) or fault == "weights"
    return Run(
        seed=seed,
        steps=steps,
        rate=float(np.exp(rng.uniform(np.log(1e-3), np.log(3e-3)))),
        warm_up=int(rng.integers(0, 21)),
        shape=str(rng.choice(["cosine", "linear", "constant"])),
        scheduler=bool(rng.random() < 0.75),
        fault=fault,
        severity=float(rng.choice(SEVERITIES[fault])),
        onset=int(rng.integers(5, int(0.8 * steps))),
        duration=int(rng.integers(10, 41)) if passes else 0,
    )


class Disturbed:
    """The fault of one run, by executed steps.

    The rate is multiplied (``rate``), so at each step anew (``rate_runaway``), or 0; the update
    is multiplied with the logged rate as it was (``hidden_rate``), or β1 and β2 are changed; the
    gradient is reversed and scaled, has noise of so many times its norm, or is 0; the loss is nan;
    a share of the labels is random, or one that grows by so much a step; the weights get noise of
    a share of their own size, once.
    """

    def __init__(self, run: Run, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.run, self.model, self.optimizer = run, model, optimizer
        self.generator = torch.Generator().manual_seed(run.seed)
        self.executed = 0
        self._before: list[Tensor] = []

    def begin(self) -> None:
        self.executed += 1
        if self.run.fault == "weights" and self.executed == self.run.onset:
            with torch.no_grad():
                for param in self.model.parameters():
                    param.add_(self._noise(param), alpha=self.run.severity * float(param.std()))

    @property
    def acts(self) -> bool:
        return self.run.acts(self.executed)

    def labels(self, labels: Tensor) -> Tensor:
        share = {"labels": self.run.severity, "label_drift": self._age * self.run.severity}
        if not self.acts or self.run.fault not in share:
            return labels
        random = torch.randint(0, SHAPE.vocabulary, labels.shape, generator=self.generator)
        wrong = torch.rand(labels.shape, generator=self.generator) < share[self.run.fault]
        return torch.where(wrong, random, labels)

    def loss(self, loss: Tensor) -> Tensor:
        return loss * torch.nan if self.acts and self.run.fault == "not_finite" else loss

    def gradients(self) -> None:
        if not self.acts:
            return
        found = [param.grad for param in self.model.parameters() if param.grad is not None]
        if self.run.fault == "ascent":
            torch._foreach_mul_(found, -self.run.severity)
        elif self.run.fault == "gradient_zero":
            torch._foreach_zero_(found)
        elif self.run.fault == "gradient_noise":
            for gradient in found:
                scale = self.run.severity * float(gradient.norm()) / gradient.numel() ** 0.5
                gradient.add_(self._noise(gradient), alpha=scale)

    def settings(self, scheduled: float) -> None:
        """Set the rate and the betas of the step, which the schedule sets anew at each."""
        group, severity = self.optimizer.param_groups[0], self.run.severity
        if self.acts and self.run.fault in ("rate", "rate_zero"):
            group["lr"] = scheduled * severity
        elif self.acts and self.run.fault == "rate_runaway":
            group["lr"] = scheduled * min(severity ** (self._age + 1), 1e6)
        group["betas"] = (0.9, 0.999)
        if self.acts and self.run.fault == "beta":
            group["betas"] = (0.9, self.run.severity)

    def before_update(self) -> None:
        if self.acts and self.run.fault == "hidden_rate":
            self._before = [param.detach().clone() for param in self.model.parameters()]

    def after_update(self) -> None:
        before, self._before = self._before, []
        with torch.no_grad():
            for param, old in zip(self.model.parameters(), before, strict=False):
                param.add_(param - old, alpha=self.run.severity - 1)

    @property
    def _age(self) -> int:
        return self.executed - self.run.onset

    def _noise(self, like: Tensor) -> Tensor:
        return torch.randn(like.shape, generator=self.generator)


@dataclass(frozen=True, kw_only=True)
class Trained:
    """Result of one training: the step and the held-out loss of its final weights.

    Attributes:
        losses: the same at multiples of `EVERY`, of the last pass.
        executed: steps that were computed.
        decisions: kinds of what rescue did, with their numbers.
        alarm: executed step of the first alert from the onset on; 0 for none.
    """

    step: int
    loss: float
    losses: dict[int, float]
    held: bool
    executed: int
    digest: str
    decisions: dict[str, int]
    alarm: int


def train(run: Run, *, disturbed: bool, rescued: bool) -> Trained:
    model = Llama(SHAPE)
    model.load_state_dict(base())
    optimizer = torch.optim.AdamW(model.parameters(), lr=run.rate)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, run.factor)
    fault = Disturbed(run if disturbed else replace(run, onset=NEVER), model, optimizer)
    rescue = monitor = None
    batches: Iterator[tuple[int, Any]] = enumerate(islice(forever(run), run.steps), start=1)
    if rescued:
        rescue = Rescue(
            RescueConfig(every=EVERY), scheduler=scheduler if run.scheduler else None,
            extra=None if run.scheduler else {"scheduler": scheduler},
            hold_folder=Path(tempfile.mkdtemp()),
        )  # fmt: skip
        monitor = Monitor(model, optimizer, actions=[rescue])
        batches = rescue.steps(loader(run), run.steps)
    losses: dict[int, float] = {}
    step = alarm = 0
    for step, (tokens,) in batches:
        fault.begin()
        loss = fault.loss(loss_of(model, tokens[:, :-1], fault.labels(tokens[:, 1:])))
        loss.backward()
        fault.gradients()
        fault.settings(float(scheduler.get_last_lr()[0]))
        if monitor is not None:
            monitor.check_before_step(loss)
            if not alarm and fault.executed >= fault.run.onset and monitor.alerts:
                alarm = fault.executed
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        fault.before_update()
        optimizer.step()
        fault.after_update()
        scheduler.step()
        optimizer.zero_grad()
        if step % EVERY == 0:
            losses[step] = held_out(model)
            if monitor is not None:
                monitor.evaluated(losses[step])
    held, decisions = None, Counter[str]()
    if rescue is not None and monitor is not None:
        held, decisions = rescue.held, Counter(entry["action"] for entry in rescue.decisions)
        monitor.close()
    return Trained(
        step=step if held is None else held["step"],
        loss=held_out(model),
        losses=losses,
        held=held is not None,
        executed=fault.executed,
        digest=digest_of(model),
        decisions=dict(decisions),
        alarm=alarm,
    )


def digest_of(model: nn.Module) -> str:
    weights = b"".join(tensor.detach().numpy().tobytes() for tensor in model.state_dict().values())
    return hashlib.sha256(weights).hexdigest()[:16]


def loss_of(model: nn.Module, inputs: Tensor, labels: Tensor) -> Tensor:
    return nn.functional.cross_entropy(model(inputs).flatten(0, 1), labels.flatten())


@torch.no_grad()
def held_out(model: nn.Module) -> float:
    """Loss on held-out text, nats a token."""
    tokens = windows(corpus("documentation").held_out, HELD_OUT_BATCHES * BATCH_SIZE, 77)
    loss = float(loss_of(model, tokens[:, :-1], tokens[:, 1:]))
    return loss if isfinite(loss) else float("nan")


def windows(text: Any, number: int, seed: int) -> Tensor:
    """Stretches of text, shape (number, S + 1)."""
    starts = np.random.default_rng(seed).integers(len(text) - SHAPE.sequence - 1, size=number)
    return torch.tensor(np.stack([text[s : s + SHAPE.sequence + 1] for s in starts])).long()


@lru_cache(maxsize=2)
def loader(run: Run) -> DataLoader[Any]:
    tokens = windows(corpus("documentation").home, run.steps * BATCH_SIZE, run.seed)
    return DataLoader(TensorDataset(tokens), batch_size=BATCH_SIZE)


def forever(run: Run) -> Iterator[Any]:
    while True:
        yield from loader(run)


@lru_cache(maxsize=1)
def base() -> dict[str, Tensor]:
    """Weights after the training on sources; the same on each call."""
    torch.set_num_threads(1)
    model = Llama(SHAPE)
    initialise(model, SHAPE, seed=0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    tokens = windows(corpus("documentation").other, PRETRAINING * BATCH_SIZE, 5)
    for step in range(PRETRAINING):
        for group in optimizer.param_groups:
            group["lr"] = 3e-3 * min(1, (step + 1) / 50) * (1 - step / PRETRAINING) + 1e-5
        batch = tokens[step * BATCH_SIZE : (step + 1) * BATCH_SIZE]
        loss_of(model, batch[:, :-1], batch[:, 1:]).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict()


def row(seed: int) -> dict[str, Any]:
    """All four trainings of a seed."""
    torch.set_num_threads(1)
    logging.getLogger("rmetric").setLevel(logging.CRITICAL)
    run = draw(seed)
    kinds = {
        "twin": (False, False), "idle": (False, True),
        "nothing": (True, False), "rescue": (True, True),
    }  # fmt: skip
    return {"run": asdict(run)} | {
        name: asdict(train(run, disturbed=disturbed, rescued=rescued))
        for name, (disturbed, rescued) in kinds.items()
    }
