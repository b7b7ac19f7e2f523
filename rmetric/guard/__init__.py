"""Guard: emergency checkpoints, restarts and layouts for the remaining GPUs.

Each module is imported when it is asked for. `policy`, `layout`, `planner` and `run_folder` are
pure or use files, and need no torch. `checkpoints` and `guard` run inside the training,
`supervisor` runs in a process of its own.
"""

from typing import TYPE_CHECKING

from rmetric._util.lazy import lazy

if TYPE_CHECKING:
    from rmetric.guard.checkpoints import Checkpoints
    from rmetric.guard.guard import Guard
    from rmetric.guard.megatron import guard_megatron
    from rmetric.guard.planner import plan
    from rmetric.guard.policy import CheckpointPolicy, PolicyConfig
    from rmetric.guard.run_folder import RunFolder
    from rmetric.guard.training_state import ModelState
else:
    __getattr__, __dir__ = lazy(
        __name__,
        {
            "rmetric.guard.checkpoints": "Checkpoints",
            "rmetric.guard.guard": "Guard",
            "rmetric.guard.megatron": "guard_megatron",
            "rmetric.guard.planner": "plan",
            "rmetric.guard.policy": "CheckpointPolicy PolicyConfig",
            "rmetric.guard.run_folder": "RunFolder",
            "rmetric.guard.training_state": "ModelState",
        },
    )

__all__ = [
    "CheckpointPolicy",
    "Checkpoints",
    "Guard",
    "ModelState",
    "PolicyConfig",
    "RunFolder",
    "guard_megatron",
    "plan",
]
