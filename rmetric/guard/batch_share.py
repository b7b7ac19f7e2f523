"""Split of a global batch over copies that need not divide it, with the exact mean kept.

The first `batch % copies` copies take one sample more than the others, and each copy cuts its
share into the same number of micro-batches. DistributedDataParallel and FSDP average the
gradients of the copies with equal weight; the weights here make that the mean over all samples
of the batch, whatever the number of copies. Needs no torch.

docs/planner.md has the loop of a training. Where samples have different numbers of tokens and the
loss is a mean over tokens, use sums of losses over the batch's number of tokens instead of these
weights.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class MicroBatch:
    """Samples of one forward and backward pass, at least 1, from `first` in the global batch.

    `weight` is the factor of their mean loss; 0.0 where a sample is computed only because
    another copy has one more micro-batch.
    """

    first: int
    samples: int
    weight: float

    @property
    def rows(self) -> slice:
        """Slice of the global batch."""
        return slice(self.first, self.first + self.samples)


@dataclass(frozen=True)
class BatchShare(MicroBatch):
    """Share of one copy in the global batch, likewise; `most` are the samples of the fullest copy.

    The mean over the copies of their mean losses times `weight` is the mean over the batch.
    """

    most: int

    def micro_batches(self, at_most: int) -> tuple[MicroBatch, ...]:
        """Cut the share into `ceil(most / at_most)` micro-batches, so many on each copy.

        Their sizes differ by at most one, and the sum of their weights is that of the share. A
        copy with fewer samples than there are micro-batches repeats its first sample with the
        weight 0.0. Raises ValueError if `at_most`, the most samples of one, is below 1.
        """
        if type(at_most) is not int or at_most < 1:
            raise ValueError(f"at_most is {at_most!r}: a whole number from 1 is accepted")
        number = -(-self.most // at_most)
        each, over = divmod(self.samples, number)
        found, first = [], self.first
        for index in range(number):
            size = each + (index < over)
            weight = self.weight * size / self.samples
            found.append(MicroBatch(first if size else self.first, max(size, 1), weight))
            first += size
        return tuple(found)


def batch_share(batch: int, copies: int, copy: int) -> BatchShare:
    """Share of a copy, counted from 0, in a global batch of `batch` samples.

    It has `batch // copies` samples, one more for the first `batch % copies` copies. Raises
    ValueError if there are more copies than samples, or no such copy.

    >>> tuple(batch_share(16, 3, copy).samples for copy in range(3))
    (6, 5, 5)
    >>> tuple(part.samples for part in batch_share(16, 3, 0).micro_batches(4))
    (3, 3)
    """
    if any(type(number) is not int for number in (batch, copies, copy)):
        raise ValueError(f"batch {batch!r}, copies {copies!r}, copy {copy!r}: whole numbers needed")
    if not 1 <= copies <= batch:
        raise ValueError(f"copies is {copies}: from 1 to the {batch} samples of the batch")
    if not 0 <= copy < copies:
        raise ValueError(f"copy is {copy}: from 0 to {copies - 1}")
    each, over = divmod(batch, copies)
    samples = each + (copy < over)
    first = copy * each + min(copy, over)
    return BatchShare(first, samples, samples * copies / batch, each + (over > 0))
