"""Checkpoints before a failure, and restarts on the GPUs that are left after one.

Start with `Guard`, which runs inside of the training; `supervisor` runs beside it. `policy`,
`interval`, `layout`, `planner` and `run_folder` are pure and need no torch. Every module is
imported when it is asked for.
"""

from typing import TYPE_CHECKING

from rmetric._util.lazy import lazy

if TYPE_CHECKING:
    from rmetric.guard.checkpoints import Checkpoints
    from rmetric.guard.guard import Guard
    from rmetric.guard.hugging_face import GuardCallback
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
            "rmetric.guard.hugging_face": "GuardCallback",
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
    "GuardCallback",
    "ModelState",
    "PolicyConfig",
    "RunFolder",
    "guard_megatron",
    "plan",
]
