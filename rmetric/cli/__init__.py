"""The subcommands of `rmetric`, one module each, loaded on use.

A module has ``EXAMPLES``, ``add_arguments(parser)`` and ``run(options)``, which returns the
exit code. docs/commands.md has the options and exit codes that they share.
"""

#: Name -> summary in `rmetric --help`, which must not load the modules.
COMMANDS = {
    "replay": "replay existing logs: scores, alarms and a page for each run",
    "watch": "follow a log that is being written, and print alarms",
    "compare": "compare trainings: is one as good as another, beyond the noise of both",
    "calibrate": "make a threshold file for the calibrated detector from healthy logs",
    "telemetry": "watch this machine's GPUs: readings, risk and recommended actions",
    "diagnose": "diagnose a failed job from its text logs: cause, place, time and next steps",
    "logs": "learn what the logs of successful jobs have in common, for diagnose",
    "supervise": "start a training, and restart it after a failure on the remaining GPUs",
    "stacks": "look at the ranks of a training that hangs, and name the one that is waited for",
    "run": "run a training with the monitor in it, without a change of its code",
    "save": "request a checkpoint from a running training, through its run folder",
    "plan": "find the fastest TP x PP x DP layout for the remaining GPUs",
    "doctor": "print versions, extras, GPUs and permissions, for a report of a problem",
}
