"""Guard: emergency checkpoints, restarts and layouts for the remaining GPUs.

Nothing is imported here. `policy`, `interval`, `layout`, `planner` and `run_folder` are
pure or use files, and need no torch. `checkpoints` and `guard` run inside the training,
`supervisor` runs in a process of its own.
"""
