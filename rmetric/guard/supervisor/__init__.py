"""Starts a training, watches it, and starts it again: `rmetric supervise`.

    core.py        what is decided: events in, actions out; pure. Read this first.
    events.py      the words that it speaks
    allocation.py   which GPUs of which nodes, in which layout
    launch.py      the commands and environments of one launch, and its processes
    watch.py       what is noticed: exits, hangs, verdicts, alarms
    diagnosis.py   why a launch failed, in words
    processes.py   ends every process of a launch, by pid
    last_checkpoint.py   what can be come back to
    journal.py     what happened, a line an event; the lock
    summary.py     the same in short, from the journal alone
    spoken.py      a line of it as it is said at the terminal
    supervise.py   what acts: connects all of these

Nothing is imported here.
"""
