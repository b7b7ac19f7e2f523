"""Supervisor that starts, monitors and restarts a training: `rmetric supervise`.

    core.py              state machine: events in, actions out; pure. Read this first.
    allocation.py        GPUs, nodes and layout of a launch
    launch_processes.py  commands of a launch, and the spare launcher of the next
    warm_launcher.py     script of the spare launcher; it may fork the ranks
    attempt.py           one launch, its processes from start to exit
    watch.py             heartbeats, GPU verdicts and alarms of a running training
    launch_failure.py    cause of a failed or hanging launch, and whether it may pass
    stacks.py            what the ranks of a hang do; the diagnosis of a hang or failure
    nccl_ras.py          the ranks that NCCL's RAS service names
    processes.py         ends every process of a launch, by pid
    journal.py           event log and lock of the run folder; the text of its lines
    summary.py           summary of a journal
    supervise.py         event loop that connects these parts

Nothing is imported here.
"""
