"""Log formats of the ranks, written through Python's logging and torch's."""

from __future__ import annotations

import faulthandler
import logging
import signal
import sys
import time
import warnings

import numpy as np
from torch._logging import set_logs
from torch._logging._internal import TorchLogsFormatter

from studies.diagnosis_benchmark.injected.plan import Settings

FORMATS = {
    "plain": "%(asctime)s %(levelname)s %(name)s: %(message)s",
    "deepspeed": "[%(asctime)s] [%(levelname)s] [%(filename)s:%(lineno)d:%(funcName)s] "
    "[Rank %(rank)s] %(message)s",
    "megatron": "%(message)s",
    "bare": "%(message)s",
    "transformers": "[%(levelname)s|%(filename)s:%(lineno)d] %(asctime)s >> %(message)s",
    "iso": "%(asctime)s %(levelname)-7s [rank %(rank)s] %(message)s",
}


class _Clock(logging.Filter):
    """Puts the rank and the time of the node's own clock into each record."""

    def __init__(self, rank: str, offset: float) -> None:
        super().__init__()
        self.rank, self.offset = rank, offset

    def filter(self, record: logging.LogRecord) -> bool:
        record.rank = self.rank
        if not getattr(record, "dated", False):
            # A record may pass two handlers.
            record.created += self.offset
            record.msecs = record.created % 1 * 1000
            record.dated = True
        return True


def clock_offset(settings: Settings, node: str, seed: int) -> float:
    """Seconds by which a node's clock is wrong; one in two nodes is right."""
    rng = np.random.default_rng([seed, int(node.split("-")[1])])
    return float(rng.uniform(-settings.skew, settings.skew)) if rng.random() < 0.5 else 0.0


def set_up(settings: Settings, rank: str, offset: float) -> logging.Logger:
    """The trainer's logger of this process; warnings and torch's loggers write to stderr."""
    clock = _Clock(rank, offset)
    set_logs(distributed=getattr(logging, settings.torch_level))
    for one in list(logging.Logger.manager.loggerDict.values()):
        for handler in getattr(one, "handlers", ()):
            if isinstance(handler.formatter, TorchLogsFormatter):
                handler.addFilter(clock)
    handler = logging.StreamHandler(sys.stderr if settings.style == "torch" else sys.stdout)
    handler.addFilter(clock)
    handler.setFormatter(_formatter(settings.style))
    logger = logging.getLogger("trainer")
    logger.handlers, logger.propagate = [handler], False
    logger.setLevel(logging.INFO)
    warnings.simplefilter("default")
    if settings.crash_stacks:
        faulthandler.enable(file=sys.stderr, all_threads=False)
    if settings.stacks:
        faulthandler.register(signal.SIGTERM, file=sys.stderr, all_threads=False, chain=True)
    return logger


def _formatter(style: str) -> logging.Formatter:
    if style == "torch":
        return TorchLogsFormatter()
    formatter = logging.Formatter(FORMATS[style])
    if style == "iso":
        formatter.converter = time.gmtime
        formatter.default_time_format = "%Y-%m-%dT%H:%M:%S"
        formatter.default_msec_format = "%s.%03dZ"
    return formatter


def step_line(style: str, *, step: int, steps: int, loss: float, rate: float, norm: float,
              seconds: float, samples: int) -> str:  # fmt: skip
    """Step line in this logging style."""
    if style == "megatron":
        return (
            f" [{time.strftime('%Y-%m-%d %H:%M:%S')}] iteration {step:8d}/{steps:8d} | "
            f"consumed samples: {samples:12d} | elapsed time per iteration (ms): "
            f"{1000 * seconds:.1f} | learning rate: {rate:.6E} | global batch size: "
            f"{samples // step:5d} | lm loss: {loss:.6E} | grad norm: {norm:.3f} | number of "
            f"skipped iterations:   0 | number of nan iterations:   {int(loss != loss)} |"
        )
    if style == "deepspeed":
        return f"step={step}, skipped=0, lr=[{rate:.3e}], mom=[(0.9, 0.95)], loss={loss:.4f}"
    if style == "transformers":
        return (
            f"{{'loss': {loss:.4f}, 'grad_norm': {norm:.4f}, 'learning_rate': {rate:.3e}, "
            f"'step': {step}}}"
        )
    return f"step {step} | loss {loss:.4f} | grad norm {norm:.3f} | lr {rate:.2e} | {seconds:.3f} s"
