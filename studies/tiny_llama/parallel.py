"""Model distributed by PyTorch's parallelism, and the gradient of a step in any layout.

Ranks lie on a mesh of pipeline x replicas x shards x tensor, where the replicas' shards are
the data-parallel ranks, and the tensor-parallel ones lie beside each other.

- tensor: `parallelize_module`. The embedding and the head are cut along the hidden
  size, so the vocabulary need not be divisible.
- data: FSDP2's `fully_shard`, of each layer and of the rest; with replicas, HSDP.
- pipeline: `Schedule1F1B`, or GPipe where there are fewer micro-batches than stages.

The loss is the mean over all tokens of the global batch: each micro-batch gives its sum
over that number, and sums are all that is reduced. So it is the same under any layout, but
for the order of additions. Copies that do not divide the batch have shares that differ by one
sample (`rmetric.guard.batch_share`); samples without targets fill their last micro-batch, as
all copies must run the same number of equal ones.
"""

from __future__ import annotations

import warnings
from math import prod
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn import functional

from rmetric.guard.batch_share import batch_share
from rmetric.guard.layout import Layout
from studies.common.llama import Llama, initialise
from studies.common.llama_shape import Shape, check_layout

# A tensor-parallel head gives a view. It is only read here, so its hooks stay where they are.
warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")

#: Target of a token that does not count, as torch's cross entropy has it.
IGNORED = -100
DIMENSIONS = ("pipeline", "replicas", "shards", "tensor")


class StepTotals(NamedTuple):
    """Loss, in nats per token of the global batch, and norm before clipping, on every rank."""

    loss: float
    gradient_norm: float


class Parallel:
    """This rank's part of the model; all ranks make one, and call its methods together.

    The GPUs of the layout are the ranks of the process group, which must exist; no layout changes
    the initial weights. `first_sample` and `num_samples` are this rank's slice of the global batch.
    """

    def __init__(self, shape: Shape, layout: Layout, seed: int, device: torch.device) -> None:
        check_layout(shape, layout)
        self.shape, self.layout, self.device = shape, layout, device
        shards = layout.data // layout.replicas
        sizes = (layout.pipeline, layout.replicas, shards, layout.tensor)
        self.mesh = init_device_mesh(device.type, sizes, mesh_dim_names=DIMENSIONS)
        self.stage = self.mesh.get_local_rank("pipeline")
        copy = self.mesh.get_local_rank("replicas") * shards + self.mesh.get_local_rank("shards")
        share = batch_share(layout.global_batch, layout.data, copy)
        self.first_sample, self.num_samples = share.first, share.samples
        self.model = Llama(shape, self.stage, layout.pipeline)
        initialise(self.model, shape, seed)
        self.model.to(device)
        if layout.tensor > 1:
            plan = tensor_plan(self.model)
            # Every rank has made the whole weights: nobody need send them.
            parallelize_module(self.model, self.mesh["tensor"], plan, src_data_rank=None)
            self.model.tie()
        if layout.data > 1:
            over = self.mesh["replicas", "shards"] if layout.replicas > 1 else self.mesh["shards"]
            shard(self.model, over, reshard=layout.pipeline == 1)
        self._schedule = self._make_schedule() if layout.pipeline > 1 else None

    def backward(self, tokens_BT: Tensor) -> Tensor:
        """Add this rank's gradient of its slice, shape (num_samples, sequence + 1).

        Returns a float64 scalar that sums over all ranks to the loss of the global batch.
        """
        missing = self.layout.micro_batch * self.layout.accumulation - self.num_samples
        inputs_BS = functional.pad(tokens_BT[:, :-1], (0, 0, 0, missing))
        targets_BS = functional.pad(tokens_BT[:, 1:], (0, 0, 0, missing), value=IGNORED)
        if self._schedule is None:
            losses = self._in_turn(inputs_BS, targets_BS)
        else:
            losses = self._through_the_stages(inputs_BS, targets_BS)
        counts = self.mesh.get_local_rank("tensor") == 0 and losses
        zero = torch.zeros((), dtype=torch.float64, device=self.device)
        return torch.stack(losses).double().sum() if counts else zero

    def totals(self, loss: Tensor) -> StepTotals:
        """Sum over the ranks what `backward` returned, and the squares of the gradient."""
        both = torch.stack((loss, self._sum_of_squares()))
        dist.all_reduce(both)
        total, squares = both.tolist()
        return StepTotals(total, squares**0.5)

    @torch.no_grad()
    def clip(self, norm: float, most: float) -> None:
        """Scale the gradient, whose norm is `norm`, to one of at most `most`."""
        for gradient in self.gradients():
            gradient.mul_(min(1.0, most / (norm + 1e-6)))

    def gradients(self) -> list[Tensor]:
        """This rank's part of each, which it may change in place."""
        return [local(p.grad) for p in self.model.parameters() if p.grad is not None]

    def _loss(self, logits_BSV: Tensor, targets_BS: Tensor) -> Tensor:
        tokens = self.layout.global_batch * self.shape.sequence
        summed = functional.cross_entropy(
            logits_BSV.flatten(0, 1), targets_BS.flatten(), reduction="sum", ignore_index=IGNORED
        )
        return summed / tokens

    def _in_turn(self, inputs_BS: Tensor, targets_BS: Tensor) -> list[Tensor]:
        losses = []
        size = self.layout.micro_batch
        pairs = list(zip(inputs_BS.split(size), targets_BS.split(size), strict=True))
        for number, (inputs, targets) in enumerate(pairs, start=1):
            if isinstance(self.model, FSDPModule):
                self.model.set_requires_gradient_sync(number == len(pairs))
            loss = self._loss(self.model(inputs), targets)
            loss.backward()
            losses.append(loss.detach())
        return losses

    def _through_the_stages(self, inputs_BS: Tensor, targets_BS: Tensor) -> list[Tensor]:
        first, last = self.stage == 0, self.stage == self.layout.pipeline - 1
        losses: list[Tensor] = []
        assert self._schedule is not None
        self._schedule.step(
            *((inputs_BS,) if first else ()),
            target=targets_BS if last else None,
            losses=losses if last else None,
            return_outputs=False,
        )
        return [loss.detach() for loss in losses]

    def _make_schedule(self) -> Any:
        # Not everybody has stages, and it takes its time to load.
        from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

        layout, shape = self.layout, self.shape
        inner = torch.empty(layout.micro_batch, shape.sequence, shape.hidden, device="meta")
        tokens = torch.empty(layout.micro_batch, shape.sequence, dtype=torch.int64, device="meta")
        logits = inner.new_empty(layout.micro_batch, shape.sequence, shape.vocabulary)
        stage = PipelineStage(
            self.model,
            self.stage,
            layout.pipeline,
            self.device,
            input_args=tokens if self.stage == 0 else inner.requires_grad_(),
            output_args=(logits if self.stage == layout.pipeline - 1 else inner).requires_grad_(),
            group=self.mesh.get_group("pipeline"),
        )
        kind = Schedule1F1B if layout.accumulation >= layout.pipeline else ScheduleGPipe
        return kind(stage, layout.accumulation, loss_fn=self._loss, scale_grads=False)

    @torch.no_grad()
    def _sum_of_squares(self) -> Tensor:
        """Squared norm of this rank's part of the gradient; replicated parts count once in all."""
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        for parameter in self.model.parameters():
            if parameter.grad is not None:
                square = local(parameter.grad).double().square().sum()
                total += square * shards_of(parameter) / (self.layout.data * self.layout.tensor)
        return total


def tensor_plan(model: Llama) -> dict[str, Any]:
    """Tensor-parallel plan of each module, by name; norms are left whole."""
    plan: dict[str, Any] = {}
    if model.embedding is not None:
        plan["embedding"] = ColwiseParallel(output_layouts=Replicate())
    if model.head is not None:
        plan["head"] = RowwiseParallel(input_layouts=Replicate())
    # Made distributed once a block, so that the gradients to it are added up before they travel.
    whole = Replicate()
    for number in model.layers:
        plan[f"layers.{number}.attention"] = PrepareModuleInput(
            input_layouts=(whole, None), desired_input_layouts=(whole, None)
        )
        plan[f"layers.{number}.feed_forward"] = PrepareModuleInput(
            input_layouts=(whole,), desired_input_layouts=(whole,)
        )
        for name in ("attention.q", "attention.k", "attention.v"):
            plan[f"layers.{number}.{name}"] = ColwiseParallel()
        for name in ("feed_forward.gate", "feed_forward.up"):
            plan[f"layers.{number}.{name}"] = ColwiseParallel()
        for name in ("attention.o", "feed_forward.down"):
            plan[f"layers.{number}.{name}"] = RowwiseParallel()
    return plan


def shard(model: Llama, mesh: DeviceMesh, *, reshard: bool) -> None:
    """Cut each parameter over the data-parallel ranks; their gradients are summed.

    With `reshard` a layer's weights are given up between its forward and backward pass; a
    pipeline keeps them, as its micro-batches come back to them again and again.
    """
    for module in (*model.layers.values(), model):
        sharded = fully_shard(module, mesh=mesh, reshard_after_forward=reshard)
        sharded.set_gradient_divide_factor(1.0)
        # Else a factor is sent as an operation that gloo does not know.
        sharded.set_force_sum_reduction_for_comms(True)


def local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def shards_of(parameter: nn.Parameter) -> int:
    """Number of shards of a parameter; other ranks hold copies."""
    if not isinstance(parameter, DTensor):
        return 1
    mesh = parameter.device_mesh
    return prod(
        mesh.size(dimension)
        for dimension, placement in enumerate(parameter.placements)
        if not placement.is_replicate()
    )
