"""Monitor, guard and rescue in the loop of a trainer.

`HuggingFaceCallback` and `LightningCallback` run the monitor and let a `Rescue` among its actions
set the loop back. `GuardCallback` is a class of its own: it is used without the monitor too,
installs signal handlers, and raises where it cannot guard, while the monitor never ends a training.
Each module needs the trainer's own package.
"""
