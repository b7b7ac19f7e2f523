"""The guard: when to save in an emergency, how to go on with fewer GPUs, who starts it again.

Nothing is imported here. `policy`, `interval`, `layout`, `planner` and `run_folder`
are pure and need no torch; `checkpoints` and `guard` run inside the training;
`supervisor` runs beside it.
"""
