"""Rescue: from an alarm to a run that ends as if nothing had happened.

`policy` and `judgement` are pure and need no torch. `action` is the monitor's action, which runs
inside the training.
"""

from typing import TYPE_CHECKING

from rmetric._util.lazy import lazy

if TYPE_CHECKING:
    from rmetric.rescue.action import Rescue
    from rmetric.rescue.policy import RescueConfig
else:
    __getattr__, __dir__ = lazy(
        __name__, {"rmetric.rescue.action": "Rescue", "rmetric.rescue.policy": "RescueConfig"}
    )

__all__ = ["Rescue", "RescueConfig"]
