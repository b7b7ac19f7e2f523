"""Which of several processes this is."""

from __future__ import annotations

import torch.distributed as dist


def is_distributed() -> bool:
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def rank() -> int:
    """From 0; 0 where there is one process."""
    return dist.get_rank() if is_distributed() else 0
