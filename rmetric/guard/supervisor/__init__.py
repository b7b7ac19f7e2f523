"""Supervisor that starts, monitors and restarts a training: `rmetric supervise`.

    core.py            state machine: events in, actions out; pure. Read this first.
    allocation.py      GPUs, nodes and layout of a launch
    processes.py       commands of a launch, the spare launcher of the next, the end of all by pid
    warm_launcher.py   script of the spare launcher; it may fork the ranks
    attempt.py         one launch from start to exit; GPU verdicts and alarms of its log meanwhile
    launch_failure.py  a launch that fails or hangs: its heartbeats, its cause, whether it may pass
    stacks.py          what the ranks of a hang do; the diagnosis of a hang or failure
    journal.py         event log and lock of the run folder; the text of its lines
    summary.py         summary of a journal
    supervise.py       event loop that connects these parts

Nothing is imported here.
"""
