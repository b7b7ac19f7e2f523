"""Monitor, guard and rescue in the loop of a trainer.

`hugging_face` and `lightning` each have an `RMetricCallback`, which runs the monitor and lets a
`Rescue` among its actions set the loop back. `hugging_face` also has the `GuardCallback`. It is a
class of its own: it is used without the monitor too, installs signal handlers, and raises where it
cannot guard, while the monitor never ends a training. Each module needs the trainer's own package.
"""
