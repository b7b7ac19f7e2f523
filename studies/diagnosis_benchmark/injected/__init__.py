"""Real runs with injected faults: worlds of gloo processes that train, log and really fail.

What a diagnosis says of them can be checked, since the guilty rank is known. Faults change the
state of one process or are done to it from outside; what it and the others then write is what
Python and torch write. Only the words of srun and of torchrun's agent are ours, about exits that
happened. A plan says what shall happen, and a job counts only when it did.

`python -m studies.diagnosis_benchmark.injected --out FOLDER --jobs 240` makes, two jobs at a time,

- FOLDER/SPLIT/JOB/logs/: what a diagnosis reads,
- FOLDER/SPLIT/JOB/manifest.json: what it must not read: outcome, kind, variant, rank, node, stage,
  step and time of the fault, how it was verified, exit codes, the healthy `siblings` of the same
  settings, and the lines that indicate the failure with their roles (rules in labels.py).

No kind of fault and no group of settings is in two splits. `--split blind` makes the third, whose
kinds came later: its nodes have addresses of their own, and its ranks check themselves. In a group
whose ranks say neither their times nor warn of slow steps, nothing tells which rank is slow: such
jobs are kept.

In order: variants and plan; logs, storage and trainer are the training; faults, with parts,
are its hooks; launchers are what stands around the ranks; world runs one job, verify and labels
judge it, generate runs them all.
"""
