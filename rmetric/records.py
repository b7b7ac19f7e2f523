"""The one row that every part of rmetric reads or writes.

The simulator, the log readers and the live monitor all yield `Record`; the
metric, the detectors and the reports take it. `Run` is a run's records with
what is known about how it went.

Three things are told apart everywhere: a value that was *not logged* (None), a
value that was logged and *is not a number* (nan), and one that was logged as
*infinite* (inf).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rmetric._util.lazy import needed

if TYPE_CHECKING:
    from pandas import DataFrame

#: This many consecutive records without a loss do not yet mean that logging stopped.
_FEW_SILENT = 4


class MissingLosses:
    """Counts rows or records in a row that have no loss, once one was logged.

    Attributes:
        known: True from the first loss on.
        missing: since the last loss.
        longest: of those before it.
    """

    def __init__(self) -> None:
        self.known = False
        self.missing = self.longest = 0

    def update(self, *, logged: bool) -> None:
        if logged:
            self.known, self.longest = True, max(self.longest, self.missing)
        self.missing = 0 if logged else self.missing + self.known

    @property
    def stay_away(self) -> bool:
        """True if more are missing than a few, and than twice as many as ever before."""
        return self.missing > max(2 * self.longest, _FEW_SILENT)


@dataclass(slots=True)
class HardwareEvent:
    """One thing the hardware or the network reported.

    Attributes:
        time: seconds since the run began.
        kind: e.g. ``ecc_corrected``, ``link_retry``; it begins with ``application_`` where the
            training program did it to itself.
        worker: index of the data-parallel worker, or None where unknown.
    """

    time: float
    kind: str
    worker: int | None = None

    @property
    def is_hardware(self) -> bool:
        """False for a fault of the application, which is kept but does not count."""
        return not self.kind.startswith("application_")


@dataclass(slots=True)
class Record:
    """The measurements of one training step (or one evaluation).

    Attributes:
        step: optimiser step, counted from 1.
        time: seconds since the run began.
        training_loss: nats per token on this step's batch.
        validation_loss: nats per token on held-out data, where evaluated.
        gradient_norm: L2 norm of the averaged gradient, before clipping.
        worker_gradient_norms: that norm for each data-parallel worker's own
            gradient, before averaging, shape (workers,).
        learning_rate: as scheduled for this step.
        update_norm: L2 norm of the change the optimiser made to the weights.
        parameter_norm: L2 norm of the weights.
        events: hardware events since the previous record; None where the run
            does not log any, an empty tuple where it does and there were none.
        worker_gradient_cosines: cosine of each worker's own gradient to the
            mean over all, shape (workers,).
        non_finite_gradients: gradient entries that are nan or inf, before the reduction, over
            all workers; at least so many, where tensors that have any were counted.
        layer_gradient_norms: L2 norm of the averaged gradient by layer, before
            clipping.
        activation_headroom: powers of two between the largest activation and
            the largest number that its type can hold.
        attention_logit_max: largest attention logit, after scaling.
        router_load: largest share of the tokens that an expert gets, in units
            of the uniform share: 1 is balanced.
        probe_loss: nats per token on a small batch that stays the same.
        planned_events: changes that the user announced for this step, such as
            ``learning_rate``, ``batch_size``, ``data_mixture``.
        loss_scale: of mixed-precision training, as the scaler set it.
        skipped: whether the optimiser left this step out (an overflow, a guard).
        step_seconds: host time of the step, without pauses that are known as such.
        data_wait_seconds: of that, from the optimiser's step before to the forward pass.
        forward_backward_seconds: of that, in forward and backward, without `exchange_seconds`.
        exchange_seconds: of that, waiting in backward for the other ranks' gradients.
        optimizer_seconds: of that, in the optimiser's step.
        loss_parts: losses by their names, where the log states several and no whole; those of an
            evaluation begin with ``validation ``.
        failure_rate, gradient_variance, loss_drift: the three signals as
            another program's log states them (events per hour, squared norm
            units, nats), for logs that lack what they are computed from.
        stated_score: R as the log states it. It is not measured, so records
            that differ in it alone are equal.
        actions: changes that the monitor's own actions made from this step on, in words;
            unlike `planned_events` they do not reset any baseline.
        failure_rate_normalised, gradient_variance_normalised, loss_drift_normalised:
            n of the three signals as the log states it, from 0 to 1.
        policy: what reinforcement learning logs beside the loss, where it does: ``reward``,
            ``reward_spread`` (standard deviation), ``kl`` (nats a token), ``answer_kl`` (nats an
            answer), ``entropy`` (nats; some log it negative), ``response_length`` (tokens),
            ``clip_fraction``, ``equal_rewards``, the share of the groups whose answers have one
            reward, and ``preference_accuracy``, the share of pairs of answers that are told apart.
        memory: bytes in use, ``host`` and ``device``, and where they end: ``host_limit``,
            ``device_limit``; or ``host_percent`` and ``device_percent`` of what there is.
        throughput: ``tokens`` and ``samples`` a second, as another program's log states them.
    """

    step: int
    time: float | None = None
    training_loss: float | None = None
    validation_loss: float | None = None
    gradient_norm: float | None = None
    worker_gradient_norms: tuple[float, ...] | None = None
    learning_rate: float | None = None
    update_norm: float | None = None
    parameter_norm: float | None = None
    worker_gradient_cosines: tuple[float, ...] | None = None
    non_finite_gradients: int | None = None
    layer_gradient_norms: dict[str, float] | None = None
    activation_headroom: float | None = None
    attention_logit_max: float | None = None
    router_load: float | None = None
    probe_loss: float | None = None
    planned_events: tuple[str, ...] | None = None
    loss_scale: float | None = None
    skipped: bool | None = None
    events: tuple[HardwareEvent, ...] | None = None
    failure_rate: float | None = None
    gradient_variance: float | None = None
    loss_drift: float | None = None
    stated_score: float | None = field(default=None, compare=False)
    actions: tuple[str, ...] | None = None
    failure_rate_normalised: float | None = None
    gradient_variance_normalised: float | None = None
    loss_drift_normalised: float | None = None
    step_seconds: float | None = None
    data_wait_seconds: float | None = None
    forward_backward_seconds: float | None = None
    exchange_seconds: float | None = None
    optimizer_seconds: float | None = None
    policy: dict[str, float] | None = None
    loss_parts: dict[str, float] | None = None
    memory: dict[str, float] | None = None
    throughput: dict[str, float] | None = None


@dataclass(slots=True, kw_only=True)
class Truth:
    """The true course of a run, where that is known.

    Attributes:
        fault: name of the injected fault or benign change, ``NONE`` for none.
        severity: in the fault's own unit; None for none.
        benign: a change that looks like trouble and is not.
        applicable: False where the fault has nothing to act on.
        onset_step: first step under the fault.
        duration_steps: how many steps the fault acts.
        outcome: ``healthy``, ``absorbed``, ``not_applicable`` or ``failed``.
        failure_kind: ``non_finite``, ``diverged``, ``degraded``, ``lost_worker`` or
            ``scripted_crash`` (or the log's own words); None where it did not fail.
        failure_step: first step at which the failure holds.
    """

    fault: str = "NONE"
    severity: float | None = None
    benign: bool = False
    applicable: bool = True
    onset_step: int | None = None
    duration_steps: int | None = None
    outcome: str = "healthy"
    failure_kind: str | None = None
    failure_step: int | None = None

    @property
    def failed(self) -> bool:
        return self.outcome == "failed"


@dataclass(slots=True, kw_only=True)
class LogEvent:
    """An alert of the monitor or a decision of its rescue, as a log states it.

    Attributes:
        kind: ``alert`` or ``decision``.
        name: source of the alert; ``leave_out``, ``go_back`` or ``hold`` of a decision.
        to: step that a decision went back to; None for none.
    """

    step: int
    kind: str
    name: str
    reason: str
    to: int | None = None


@dataclass(slots=True, kw_only=True)
class AuditFinding:
    """What an audit of the live monitor found, as a log states it; docs/audits.md has the kinds.

    Attributes:
        severity: ``error``, or ``hint`` for what may be on purpose.
        words: what was measured, and what to do; of a resume with the parts that differ.
        rows: parts of the state before and after a resume: ``part``, ``was``, ``now``,
            ``outlook`` (what the loss shows; empty where both are equal, or not logged).
    """

    step: int
    kind: str
    severity: str
    words: str
    rows: list[dict[str, str]] = field(default_factory=list)


@dataclass(slots=True, kw_only=True)
class Run:
    """One training run: an id, its records, and what is known about it.

    Attributes:
        id: unique among the runs analysed together.
        records: in the order of the log.
        config: the log's own description of the run; empty where it has none.
        truth: None where nobody recorded how the run went.
        notes: what a reader guessed or had to leave out, in sentences.
        source: the file that the run was read from.
        log_events: alerts and decisions of the live monitor, in the order of the log.
        findings: of its audits, likewise.
        unread: what stands behind the last record in the log and could not be read, in words;
            empty for nothing.
    """

    id: str
    records: list[Record]
    config: dict[str, Any] = field(default_factory=dict)
    truth: Truth | None = None
    notes: list[str] = field(default_factory=list)
    source: Path | None = None
    log_events: list[LogEvent] = field(default_factory=list)
    findings: list[AuditFinding] = field(default_factory=list)
    unread: str = ""

    def to_frame(self) -> DataFrame:
        """The records as a pandas DataFrame; see `records_to_frame`.

        >>> Run(id="a", records=[Record(step=1, training_loss=2.5), Record(step=2)]).to_frame()
           step  training_loss
        0     1            2.5
        1     2            NaN
        """
        return records_to_frame(self.records)


def records_to_frame(records: Sequence[Record]) -> DataFrame:
    """Records as a pandas DataFrame: one row each, and a column for each field that was logged.

    Numbers are float64 (`step` is int64) and `skipped` is a nullable boolean. A value that was
    not logged is missing: in a column of numbers it looks like a logged nan. Tuples and
    dictionaries, such as `worker_gradient_norms`, are kept as they are. A field that no record
    has makes no column, except `step`.
    """
    pd = needed("pandas")
    columns = {}
    for each in fields(Record):
        name, several = each.name, "[" in str(each.type)
        values = [getattr(record, name) for record in records]
        if name == "step" or any(value is not None for value in values):
            dtype = {"step": "int64", "skipped": "boolean"}.get(name, "float64")
            columns[name] = pd.Series(values, dtype="object" if several else dtype)
    frame: DataFrame = pd.DataFrame(columns)
    return frame
