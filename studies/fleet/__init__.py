"""What a guard is worth over many GPUs: whom it warns in time, whom for nothing, what it saves.

Nothing is imported here; `python -m studies.fleet` lists what there is to run.
"""
