"""Diagnose a failed job from the text logs of its ranks.

`python examples/diagnose.py PATH...` reads your logs. Without an argument it writes those of
two ranks, of which one runs out of memory.
"""

import sys
from pathlib import Path

import rmetric

paths = sys.argv[1:]
if not paths:
    folder = Path("job_logs")
    folder.mkdir(exist_ok=True)
    steps = [f"2026-01-05 10:00:{step:02} INFO step {step} loss 2.1" for step in range(1, 31)]
    error = (
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a "
        "total capacity of 79.10 GiB of which 1.20 GiB is free."
    )
    (folder / "rank0.log").write_text("\n".join(steps) + "\n")
    (folder / "rank1.log").write_text("\n".join([*steps, error]) + "\n")
    paths = [folder]

diagnosis = rmetric.diagnose(paths)
print(diagnosis.summary)
print(f"\noutcome {diagnosis.outcome}, cause {diagnosis.cause}, actor {diagnosis.actor}")
