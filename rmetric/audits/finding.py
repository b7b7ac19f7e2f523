"""The finding of an audit, and the words of each kind."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

Severity = Literal["error", "hint"]
#: Names in a sentence; the others are counted.
NAMED = 2

#: Words of `KINDS` where they are about one parameter, and about several.
ONE = {"s": "s", "are": "is", "have": "has", "do": "does", "them": "it", "their": "its"}
SEVERAL = {"s": "", "are": "are", "have": "have", "do": "do", "them": "them", "their": "their"}
#: Kind -> words with what was measured, and what to do. `{parameters}` are counted and named.
KINDS = {
    "in_two_groups": "{parameters} stand{s} in two groups: each group's step moves {them}",
    "frozen_in_group": "{parameters} {are} frozen and stand{s} in a group of the optimizer, which "
    "does not train {them}",
    "rate_zero": "the learning rate of {groups} was 0 in the first {steps} steps: nothing of "
    "it is trained; look at the scheduler, or leave the group out",
    "stale_optimizer": "the optimizer holds {stale} that the model does not have any "
    "more, and lacks {parameters}: make it after the model was moved, wrapped or changed",
    "tied_weights_apart": "{parameters} should be one tensor and are two, which train apart: "
    "tie them again after the model was moved or loaded",
    "not_in_optimizer": "{parameters} ({share} of the weights) {have} gradients and stand{s} in no "
    "group of an optimizer, so nothing trains {them}: add {them} to a group, or set requires_grad "
    "to False",
    "not_updated": "{parameters} {have} gradients and stand{s} in the optimizer, and its steps do "
    "not change {them}: what it writes does not reach the model (a compiled step, a copy)",
    "rounded_away": "{parameters} ({share} of the weights) {have} gradients and {do} not change: "
    "the update is below the rounding of {their} type; keep float32 weights, or raise the rate",
    "no_gradient": "{parameters} ({share} of the weights) stand{s} in the optimizer and get{s} no "
    "gradient while others do: detached, under no_grad, or not used",
    "zero_gradient": "{parameters} ({share} of the weights) {have} a gradient of exactly 0 "
    "while others do not: the loss does not depend on {them}",
    "frozen_changes": "{parameters} {are} frozen and change{s}: the optimizer moves {them} by "
    "gradients or moments of before; leave {them} out of its groups",
    "weights_apart": "the weights of replicas differ, those of {ranks}, in {parameters}: "
    "hooks or messages that were lost, clipping on one rank, a GPU that computes wrong",
    "gradients_apart": "the exchanged gradients of replicas differ, those of {ranks}, in "
    "{parameters}: hooks or messages that were lost, clipping on one rank",
    "moments_apart": "the optimizer's moments of replicas differ, those of {ranks}, in "
    "{parameters}: one of them resumed from another state",
    "same_batch_on_ranks": "{ranks} train on the same batches: give each rank its share of "
    "the data (DistributedSampler)",
    "same_batch": "the last {times} batches are one and the same: the loop takes the first "
    "batch of the loader each time, or the loader gives no other",
    "batch_again": "{again}: workers with one seed, an IterableDataset that each worker reads "
    "whole (get_worker_info), a sampler that draws twice, or a loader that was begun anew",
    "same_order": "the epoch has the batches of the one before, in the same order: call "
    "sampler.set_epoch(epoch), or shuffle",
    "no_labels": "every label of the batch is {ignored}, which the loss leaves out: the step "
    "trains on nothing; look at the mask, the template and the cut length",
    "token_outside_vocabulary": "the batch has token {token}, and the embedding has {rows} "
    "rows: the tokenizer is of another model, or the embedding was not resized",
    "evaluation_mode_in_training": "the model trained in evaluation mode (no dropout, fixed "
    "batch norm) for {times} steps: call model.train() after each evaluation",
    "training_mode_in_evaluation": "the model was evaluated in training mode, with {layer} at "
    "work: call model.eval() before the evaluation",
    "gradients_kept": "no backward pass of the last {times} steps began with gradients of 0, "
    "so each step takes those of all steps before: call optimizer.zero_grad()",
    "no_autocast": "the forward pass runs in float32 without autocast, though {why}: wrap "
    "it in torch.autocast",
    "no_graph": "no parameter of the optimizer has a gradient in {times} steps: the loss does "
    "not depend on the model (detached, .item(), no_grad)",
    "constant_loss": "the loss is {loss} to the last digit for {times} steps, though weights "
    "change: it does not depend on them, or not on the data",
    "high_first_loss": "the first loss is {loss}; a uniform guess among {words} words has "
    "{uniform}: look at the initial weights, the labels and their shift",
    "scheduler_too_often": "the scheduler is stepped {times} times for each step of the "
    "optimizer, so the schedule ends too early: step it once, after the optimizer",
    "scheduler_never": "the scheduler was not stepped in {times} steps and its rate is 0: "
    "call scheduler.step() after each step of the optimizer",
    "rate_above_peak": "the learning rate is {rate}, {times} times its former peak: if that is "
    "not planned, set it back",
    "warm_up_again": "the learning rate fell from {before} to less than a tenth and rises "
    "again: a warm-up in the middle of the training; was the scheduler restored?",
    "restored": "all that is compared came back from the checkpoint: {parts}",
    "not_restored": "not everything came back from the checkpoint:{lost}",
}


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One thing that a training does and its author may not expect.

    Attributes:
        kind: a key of `KINDS`.
        severity: ``error``, the training does not do what it should; ``hint``, a fact that is on
            purpose in some trainings.
        words: what was measured, and what to do.
        step: at which it was found.
        ranks, parameters: all that it is about.
        rows: what was compared, part by part.
    """

    kind: str
    severity: Severity
    words: str
    step: int = 0
    ranks: tuple[int, ...] = ()
    parameters: tuple[str, ...] = ()
    rows: tuple[Mapping[str, Any], ...] = ()

    def as_entry(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        return f"step {self.step}: {self.kind}: {self.words}"


def named(names: Sequence[str]) -> str:
    """Parameters in a sentence: their number, and the first names.

    >>> named(["a"]), named(["a", "b", "c", "d"])
    ('1 parameter (a)', '4 parameters (a, b, ...)')
    """
    shown = ", ".join(names[:NAMED]) + (", ..." if len(names) > NAMED else "")
    return f"{len(names):,} parameter{'s' * (len(names) != 1)} ({shown})"


def numbered(ranks: Sequence[int]) -> str:
    """Ranks in a sentence.

    >>> numbered([2]), numbered([0, 1])
    ('rank 2', 'ranks 0, 1')
    """
    return f"rank{'s' * (len(ranks) != 1)} {', '.join(map(str, ranks))}"
