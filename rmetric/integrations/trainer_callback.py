"""The monitor in the callback of a trainer: what Hugging Face's and Lightning's share."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any, ClassVar

from torch import Tensor, nn

from rmetric.audits import make_audits
from rmetric.monitor.actions.action import Action, as_actions
from rmetric.monitor.alerts import Alert
from rmetric.monitor.config import MonitorConfig
from rmetric.monitor.monitor import Monitor
from rmetric.monitor.protocol import ArgumentError, check_settings, checked_config, found
from rmetric.monitor.step_recorder import Hardware
from rmetric.rescue.action import Rescue

logger = logging.getLogger("rmetric")

_NAMED = 12  # metrics, in a message


class MonitorCallback:
    """Keeps the settings of a `Monitor`, and makes one for each training.

    Args:
        log: JSONL file; None for none.
        config: see `MonitorConfig`.
        actions: called on an alert; a plain function is called with it.
        hardware: where hardware events come from, or what makes such a source when
            a training begins, such as the class `NvmlEvents`; None where none are logged.
        probe: returns the loss on a small fixed batch, nats per token.
        run_id: names the run in the log; by default the log's own name.
        validation_loss: name of the validation loss among the metrics of an evaluation,
            nats per token; None for the usual name.
        about: further keys for the log's description of the run.
        audits: look for silent errors (`rmetric.audits`); True for all, names of some, or names
            with a minus (``"-resume"``) of those that are left out.

    Attributes:
        monitor: of the training under way, or the last one; None before the first.
    """

    _usual_validation_loss: ClassVar[str]

    def __init__(
        self,
        log: Path | str | None = None,
        *,
        config: MonitorConfig | None = None,
        actions: Iterable[Action | Callable[[Alert], None]] = (),
        hardware: Hardware | Callable[[], Hardware] | None = None,
        probe: Callable[[], Tensor] | None = None,
        run_id: str | None = None,
        validation_loss: str | None = None,
        about: Mapping[str, Any] | None = None,
        audits: bool | Iterable[str] = True,
    ) -> None:
        super().__init__()
        self.monitor: Monitor | None = None
        check_settings(log, run_id or "run", about, probe)
        if not (hardware is None or callable(hardware) or hasattr(hardware, "poll")):
            raise ArgumentError(f"hardware is {found(hardware)}: it has no poll")
        self._settings: dict[str, Any] = dict(
            log=log,
            config=checked_config(config),
            actions=as_actions(actions),
            probe=probe,
            run_id=run_id or (Path(log).stem if log else "run"),
            audits=[audit.name for audit in make_audits(audits)],
        )
        self._hardware, self._about = hardware, dict(about or {})
        self._validation_loss = validation_loss or self._usual_validation_loss
        self._training = ExitStack()  # contexts that end with the training
        # Metrics of the evaluations that had no validation loss; None once one has had it.
        self._others: set[str] | None = set()
        self._evaluated = 0  # step of the last of them

    def _start_monitor(
        self,
        model: nn.Module,
        optimizer: Any,
        *,
        scaler: Any,
        about: Mapping[str, Any],
        step: int,
        state: Mapping[str, Any],
        schedulers: Iterable[Any] = (),
        loader: Any = None,
        autocast: bool = False,
    ) -> Monitor:
        """Make the monitor of a training that begins after `step`, with its state, if any."""
        try:
            hardware = self._hardware() if callable(self._hardware) else self._hardware
        except Exception as error:
            logger.error("rmetric: going on without hardware events: %s", error)
            hardware = None
        self.monitor = monitor = Monitor(
            model,
            optimizer,
            scaler=scaler,
            hardware=hardware,
            about={**about, **self._about},
            **self._settings,
        )
        self._others = set()
        monitor.training.loader, monitor.training.autocast = loader, autocast
        monitor.schedulers = [scheduler for scheduler in schedulers if scheduler is not None]
        if state:
            monitor.load_state_dict(state)
        else:
            monitor.step = monitor.weights_step = step
        return self._training.enter_context(monitor)

    def _follow_with_rescue(
        self, followed: Callable[[Rescue, Any, Monitor], AbstractContextManager[None]], trainer: Any
    ) -> None:
        """Let each rescue set the trainer's loop back, while it trains."""
        for action in self._settings["actions"]:
            if isinstance(action, Rescue) and self.monitor is not None:
                try:
                    self._training.enter_context(followed(action, trainer, self.monitor))
                except Exception as error:
                    logger.error("rmetric: rescue cannot follow this trainer's loop: %s", error)

    def _end(self, error: BaseException | None = None) -> None:
        """End the training's contexts, if they have not ended yet; `error` has broken it off."""
        self._warn_of_others()
        kind, traceback = (None, None) if error is None else (type(error), error.__traceback__)
        self._training.__exit__(kind, error, traceback)

    def _pass_validation_loss(self, metrics: Mapping[str, Any]) -> None:
        """Record the validation loss of an evaluation, if it is among the metrics."""
        monitor, value = self.monitor, metrics.get(self._validation_loss)
        if monitor is None or not monitor.is_open:  # an evaluation outside of a training
            return
        if value is not None:
            self._others = None
            monitor.evaluated(value)
        elif self._others is not None:
            if monitor.step > self._evaluated:  # the other data sets of that one have come
                self._warn_of_others()
            self._others |= set(metrics)
            self._evaluated = monitor.step

    def _warn_of_others(self) -> None:
        if self._others and self.monitor is not None:
            metrics = ", ".join(sorted(self._others)[:_NAMED])
            self.monitor.protocol.warn("validation_loss", name=self._validation_loss, found=metrics)

    @property
    def _should_stop(self) -> bool:
        return self.monitor is not None and self.monitor.should_stop


@contextmanager
def replaced(owner: Any, name: str, method: Callable[..., Any]) -> Iterator[None]:
    """A method of this one object is another one inside."""
    before = vars(owner).get(name)
    setattr(owner, name, method)
    try:
        yield
    finally:
        if vars(owner).get(name) is method:  # else it was replaced once more since
            if before is None:
                delattr(owner, name)
            else:
                setattr(owner, name, before)
