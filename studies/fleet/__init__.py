"""Fleet study: failure warnings, false alarms and savings of a guard over many GPUs.

Nothing is imported here; `python -m studies.fleet` lists the commands.
"""
