"""Measurements of one step that are still on the device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from rmetric.monitor.forward import forward_fields
from rmetric.monitor.gradients import nine_digits, norms_by_layer
from rmetric.monitor.stalls import SECONDS, StepTimes
from rmetric.monitor.workers import WorkerStatistics
from rmetric.records import Record

Scalar = Tensor | float | None
AUDIT = "audit "  # before the names of the audits' measurements


@dataclass
class Pending:
    """Measurements of one step, which go to the host in one transfer.

    `send` begins it; `read` waits for it, and for nothing that a CUDA device does after `send`.
    """

    record: Record  # what the host knows already; `read` completes it
    loss: Scalar = None
    norm: Scalar = None  # of the gradient, before clipping
    shard_norm: Tensor | None = None  # of this rank's part of it, without the whole norm
    #: What else was measured, by name: of each worker's and this rank's own gradient, the update,
    #: the forward pass, the fixed batch, each parameter's gradient, and by the audits.
    measured: dict[str, Scalar] = field(default_factory=dict)
    layers: Sequence[str] = ()  # that each parameter of ``tensor_norms`` is part of
    sharded: bool = False  # the update is of this rank's part; the record waits for the other ranks
    #: One over the ranks that hold the same part; None where that differs between parameters.
    moved_share: float | None = None
    broken_rules: list[tuple[str, str]] | None = None  # (rule, reason); None until it is judged
    sent: Transfer | None = None  # once it has begun
    is_read: bool = False  # everything is in the record
    where: str = ""  # which part of the gradient is not finite, in words
    times: StepTimes | None = None  # on the host; None before the next check
    message: dict[str, float | None] = field(default_factory=dict)  # to other ranks, once read
    audited: dict[str, list[float]] = field(default_factory=dict)  # once read, by name

    @classmethod
    def of(cls, record: Record) -> Pending:
        """A record that was read and judged before, and is not yet complete."""
        return cls(
            record, record.training_loss, record.gradient_norm, broken_rules=[], is_read=True
        )

    def read_loss_and_norm(self) -> tuple[float | None, float | None]:
        """On the host, now; waits for the device where they are still on it."""
        host = to_host({"loss": self.loss, "norm": self.norm})
        self.loss, self.norm = host.get("loss", [None])[0], host.get("norm", [None])[0]
        return self.loss, self.norm

    def read_shard_norm(self) -> float | None:
        """Norm of this rank's part of the gradient, on the host, now."""
        return to_host({"shard": self.shard_norm}).get("shard", [None])[0]

    def send(self) -> None:
        """Begin the transfer of everything to the host, and wait for nothing."""
        if self.sent is not None or self.is_read:
            return
        values = {"loss": self.loss, "norm": self.norm, "shard": self.shard_norm}
        self.sent = Transfer(values | self.measured)

    def read(self) -> Record:
        record = self.record
        if self.is_read:
            return record
        self.send()
        assert self.sent is not None
        self.is_read = True
        exact = self.sent.received()
        audits = [name for name in exact if name.startswith(AUDIT)]
        self.audited = {name.removeprefix(AUDIT): exact.pop(name) for name in audits}
        host = _rounded(exact)

        def get(name: str) -> float | None:
            return host[name][0] if name in host else None

        self.loss, self.norm = record.training_loss, record.gradient_norm = get("loss"), get("norm")
        names = ("loss", *(f"own_{name}" for name in WorkerStatistics._fields))
        self.message = {name: get(name) for name in names}
        if self.sharded:
            share = self.moved_share
            self.message["gradient_square"] = _square(get("shard"), 1.0)
            self.message["update_square"] = _square(get("update"), share)
            self.message["parameter_square"] = _square(get("parameter"), share)
        else:
            record.update_norm, record.parameter_norm = get("update"), get("parameter")
        record.probe_loss = get("probe")
        if "worker_norms" in host:
            record.worker_gradient_norms = tuple(host["worker_norms"])
            record.worker_gradient_cosines = tuple(host["worker_cosines"])
            record.non_finite_gradients = round(sum(host["worker_non_finite"]))
        for name, value in forward_fields({n: row[0] for n, row in exact.items() if row}).items():
            setattr(record, name, value)
        if "tensor_norms" in host:
            record.layer_gradient_norms = self._by_layer(host["tensor_norms"])
        return record

    def add_times(self, times: StepTimes) -> None:
        self.times, record = times, self.record
        record.step_seconds = round(times.total, 6)
        for name, part in SECONDS.items():
            if (value := getattr(times, part)) is not None:
                setattr(record, name, round(value, 6))
        if not times.compiled:
            self.message |= {name: getattr(record, name) for name in ("step_seconds", *SECONDS)}
            self.message["step_size"] = times.size

    def _by_layer(self, norms: list[float]) -> dict[str, float]:
        """Norms before clipping, even if they were measured after it."""
        measured = sum(norm * norm for norm in norms) ** 0.5
        whole = self.record.gradient_norm
        before = whole / measured if whole is not None and measured > 0.0 else 1.0
        return norms_by_layer(self.layers, [norm * before for norm in norms])


class Transfer:
    """Values by name on their way to the host, all tensors in one copy; None was not measured."""

    @torch.no_grad()
    def __init__(self, values: Mapping[str, Scalar]) -> None:
        there = {name: value for name, value in values.items() if value is not None}
        self._floats = {n: float(v) for n, v in there.items() if not isinstance(v, Tensor)}
        rows = {n: v.detach().reshape(-1) for n, v in there.items() if isinstance(v, Tensor)}
        self._lengths = {name: len(row) for name, row in rows.items()}
        self._copied: torch.cuda.Event | None = None
        self._whole = torch.zeros(0)
        if not rows:
            return
        where = next(iter(rows.values())).device
        wide = torch.float32 if where.type == "mps" else torch.float64
        self._whole = torch.cat([row.to(where, wide) for row in rows.values()])
        if where.type == "cuda" and not torch.cuda.is_current_stream_capturing():
            # Here and not in `received`: that would wait for the next step's backward pass too,
            # which the stream has by then.
            self._whole = self._whole.to("cpu", non_blocking=True)  # into pinned memory
            self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._copied.record(torch.cuda.current_stream(where))

    def received(self) -> dict[str, list[float]]:
        """Each value that there is, as a list of floats; waits for the copy."""
        if self._copied is not None and not self._copied.query():  # type: ignore[no-untyped-call]
            self._copied.synchronize()
        host = {name: [value] for name, value in self._floats.items()}
        whole = self._whole.tolist()
        for name, length in self._lengths.items():
            host[name], whole = whole[:length], whole[length:]
        return host


def to_host(values: Mapping[str, Scalar]) -> dict[str, list[float]]:
    """Each as a list of floats, to nine digits; all tensors come over in one transfer."""
    return _rounded(Transfer(values).received())


def _rounded(host: Mapping[str, list[float]]) -> dict[str, list[float]]:
    return {name: [nine_digits(value) for value in row] for name, row in host.items()}


def _square(value: float | None, share: float | None) -> float | None:
    return None if value is None or share is None else share * value * value
