"""A batch of 16 on 3 real ranks: the gradient and the losses are those of one process."""

from contextlib import nullcontext

import pytest

torch = pytest.importorskip("torch")
if not torch.distributed.is_available():
    pytest.skip("torch is without its distributed part", allow_module_level=True)
import torch.distributed as dist  # noqa: E402
from torch.distributed.fsdp import fully_shard  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402

from rmetric.guard.batch_share import batch_share  # noqa: E402
from tests.monitor.ranks import on_ranks, plain_model  # noqa: E402
from tests.monitor.training import FEATURES, flat, squared_error  # noqa: E402
from tests.studies.reference_runs import losses_of, plain_losses, settings, train_on  # noqa: E402

BATCH = 16


def global_batch():
    generator = torch.Generator().manual_seed(7)
    inputs = torch.randn(BATCH, FEATURES, generator=generator, dtype=torch.float64)
    return inputs, torch.randn(BATCH, 1, generator=generator, dtype=torch.float64)


def gradient_of(model):
    return flat(p.grad for p in model.parameters())


def gradients_on(rank, at_most):
    """As docs/planner.md has the loop."""
    inputs, targets = global_batch()
    found = []
    for how in ("ddp", "fsdp2"):
        model = plain_model().double()
        model = DistributedDataParallel(model) if how == "ddp" else fully_shard(model)
        parts = batch_share(BATCH, dist.get_world_size(), dist.get_rank()).micro_batches(at_most)
        for number, part in enumerate(parts, start=1):
            last = number == len(parts)
            if how == "fsdp2":
                model.set_requires_gradient_sync(last)
            with nullcontext() if last or how == "fsdp2" else model.no_sync():
                rows = (inputs[part.rows], targets[part.rows])
                (squared_error(model, rows) * part.weight).backward()
        found.append(gradient_of(model).tolist())
    return found


@pytest.mark.parametrize("at_most", [1, 4])
def test_the_gradient_of_three_copies_is_that_of_one_process(at_most):
    model = plain_model().double()
    squared_error(model, global_batch()).backward()
    alone = gradient_of(model)
    for found in on_ranks(gradients_on, at_most, ranks=3):
        for gradient in found:
            assert torch.tensor(gradient, dtype=torch.float64).allclose(alone, rtol=0, atol=1e-14)


@pytest.mark.parametrize(
    ("ranks", "more"),
    [
        (3, ("--micro-batch=2",)),
        (6, ("--layout=pipeline=2", "--micro-batch=2")),
        (6, ("--layout=tensor=2", "--micro-batch=1")),
        (3, ("--layout=replicas=3", "--micro-batch=5")),
    ],
)
def test_the_reference_training_loses_on_ranks_what_one_plain_process_does(tmp_path, ranks, more):
    options = ("--batch=16", "--uneven-batch", "--precision=float64")
    on_ranks(train_on, tmp_path, ("run", (*options, *more)), ranks=ranks, seconds=120)
    plain = plain_losses(settings(tmp_path / "plain", *options))
    found = losses_of(tmp_path / "run").values()
    assert len(found) == len(plain)
    for ours, theirs in zip(found, plain, strict=True):
        assert ours == pytest.approx(theirs, rel=0, abs=1e-12)
