"""Do the optimisers hold the parameters that the model trains?"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from itertools import product

from torch import Tensor, nn

from rmetric.audits.contract import Audit
from rmetric.audits.finding import Finding, Severity
from rmetric.audits.training import Seen, Training, rate_of

#: Steps after which a group without a rate above 0 is a finding; and after which a tensor
#: without a gradient no longer counts as the model's.
STEPS, STALE = 20, 3


class Groups(Audit):
    """Groups of the optimisers against the parameters of the model.

    Its weakness: what an optimiser of another library holds is not known.
    """

    name = "groups"

    def __init__(self) -> None:
        super().__init__()
        self._moved: set[int] = set()  # ids of groups that had a rate above 0
        self._judged = False

    def before_training(self, training: Training) -> Iterable[Finding]:
        counts = Counter(id(p) for group in training.groups for p in group["params"])
        named = dict(zip(training.names, training.parameters, strict=True))
        twice = [name for name, p in named.items() if counts[id(p)] > 1]
        frozen = [name for name, p in named.items() if counts[id(p)] and not p.requires_grad]
        for kind, found in (("in_two_groups", twice), ("frozen_in_group", frozen)):
            if found:
                yield from self.find(kind, 0, "hint", parameters=found)
        for pair in _untied(training.root):
            names = [name for name, p in named.items() if any(p is tied for tied in pair)]
            yield from self.find("tied_weights_apart", 0, parameters=names)

    def on_step(self, training: Training, seen: Seen) -> Iterable[Finding]:
        groups = training.groups
        self._moved |= {id(group) for group in groups if rate_of(group) > 0}
        if not self._judged and sum(training.made.values()) >= STALE:
            self._judged = True
            yield from self._stale(training, seen.step)
        if seen.step == STEPS and (still := [g for g in groups if id(g) not in self._moved]):
            whole = len(still) == len(groups)
            name = "every group" if whole else f"group {groups.index(still[0])}"
            severity: Severity = "error" if whole else "hint"
            yield from self.find("rate_zero", seen.step, severity, groups=name, steps=STEPS)

    def _stale(self, training: Training, step: int) -> Iterable[Finding]:
        """Tensors of before the model was changed, and the model's own that are of their shapes."""
        held = {id(p): p for group in training.groups for p in group["params"]}
        known = set(map(id, training.parameters))
        stale = [p for key, p in held.items() if key not in known and p.grad is None]
        shapes = {tuple(p.shape) for p in stale}
        lacking = [
            name
            for name, p in zip(training.names, training.parameters, strict=True)
            if p.grad is not None and id(p) not in held and tuple(p.shape) in shapes
        ]
        if lacking:
            words = f"{len(stale)} tensor{'s' * (len(stale) != 1)}"
            yield from self.find("stale_optimizer", step, parameters=lacking, stale=words)


def _untied(root: nn.Module) -> Iterable[tuple[Tensor, Tensor]]:
    """Embeddings and output layers that should share a tensor and do not."""
    tied = bool(getattr(getattr(root, "config", None), "tie_word_embeddings", False))
    get = getattr(root, "get_output_embeddings", None)
    output = get() if tied and callable(get) else None
    embeddings = [m for m in root.modules() if isinstance(m, nn.Embedding)]
    layers = [m for m in root.modules() if isinstance(m, nn.Linear)]
    for embedding, layer in product(embeddings, layers):
        first, second = embedding.weight, layer.weight
        apart = first is not second and first.shape == second.shape
        if apart and (layer is output or _equal(first, second)):
            yield first, second


def _equal(first: Tensor, second: Tensor) -> bool:
    """True for equal values, unless all are one constant."""
    kinds = [(p.device, p.dtype, hasattr(p, "device_mesh")) for p in (first, second)]
    if kinds[0] != kinds[1] or first.device.type == "meta" or kinds[0][2]:
        return False
    row, other = first.detach()[0], second.detach()[0]
    alike = bool((row == other).all()) and bool((row != row[0]).any())
    return alike and bool((first.detach() == second.detach()).all())
