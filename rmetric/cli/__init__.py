"""The subcommands of `rmetric`, a module each, loaded when they are asked for.

A module has ``NAME``, ``HELP``, ``add_arguments(parser)`` and ``run(options)``,
which returns the exit code.
"""

#: Name -> what `rmetric --help` says, which must not load the modules. To add one: a line here.
COMMANDS = {
    "replay": "replay logs that exist already: scores, alerts, a page for each run",
    "watch": "follow a log that is being written, and alarm (replay --follow)",
    "calibrate": "make a threshold file for the calibrated detector from healthy logs",
    "telemetry": "watch this machine's GPUs: readings, risk, and what each asks for",
    "diagnose": "why did the job fail? what, where, when and what to do, from its text logs",
    "logs": "learn what the logs of successful jobs have in common, for diagnose",
    "supervise": "start a training and restart it after a failure, with the GPUs that are left",
    "save": "ask a training for a checkpoint, through its run folder",
    "plan": "the best TP x PP x DP layout for the GPUs that are left",
}
