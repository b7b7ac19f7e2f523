"""Contract of all audits."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

from torch import Tensor

from rmetric.audits.finding import KINDS, ONE, SEVERAL, Finding, Severity, named, numbered
from rmetric.audits.training import Seen, Training


class Audit:
    """Looks for one kind of silent error; each method does nothing unless an audit overrides it.

    None of them changes the training or waits for a device. An audit that raises is switched off.
    """

    name: ClassVar[str]

    def __init__(self) -> None:
        self._raised: dict[tuple[str, Severity], set[str]] = {}  # parameters, and the kind itself

    def install(self, training: Training) -> Iterator[Callable[[], Any]]:
        """Install hooks; yields the functions that remove them."""
        yield from ()

    def before_training(self, training: Training) -> Iterable[Finding]:
        """Before the first optimiser's step."""
        return ()

    def measure(self, training: Training) -> Mapping[str, Tensor]:
        """Between backward and the optimiser's step: float64 on the device, for `Seen.values`."""
        return {}

    def on_step(self, training: Training, seen: Seen) -> Iterable[Finding]:
        """At the next check, with what was measured at the step before it."""
        return ()

    def on_batch(self, training: Training, batch: Any) -> Iterable[Finding]:
        """A batch is about to be trained on."""
        return ()

    def on_evaluation(self, training: Training) -> Iterable[Finding]:
        """The validation loss of the previous step was recorded."""
        return ()

    def on_save(self, training: Training) -> Mapping[str, Any]:
        """Plain values that a checkpoint keeps for `on_resume`."""
        return {}

    def on_resume(self, training: Training, saved: Mapping[str, Any]) -> Iterable[Finding]:
        """Check, before the first step after a load, what `on_save` saved."""
        return ()

    def restart(self) -> None:
        """State was restored: discard what was learned about earlier steps."""

    def find(
        self, kind: str, step: int, severity: Severity = "error", *,
        parameters: Sequence[str] = (), ranks: Any = (), table: Any = (), **facts: Any,
    ) -> Iterator[Finding]:  # fmt: skip
        """A finding with the words of its kind, which `facts` fill in, and the rows of a `table`.

        None if it was given before; of parameters, if it was for all of them. A hint that turns out
        to be an error is given again.
        """
        raised = self._raised.setdefault((kind, severity), set())
        known = raised if severity == "error" else raised | self._raised.get((kind, "error"), set())
        if not known.issuperset((kind, *parameters)):
            raised.update((kind, *parameters))
            facts |= {"parameters": named(parameters), "ranks": numbered(ranks)}
            facts |= ONE if len(parameters) == 1 else SEVERAL
            yield Finding(
                kind=kind, severity=severity, words=KINDS[kind].format(**facts), step=step,
                ranks=tuple(ranks), parameters=tuple(parameters), rows=tuple(table),
            )  # fmt: skip
