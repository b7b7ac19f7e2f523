"""Replay a training log record by record and take the alarms as Python objects.

`python examples/watch.py LOG` reads any log that `rmetric replay` reads. Without an argument it
simulates one: a run in which the learning rate jumps at step 2500.
"""

import sys
from pathlib import Path

import rmetric
from rmetric.readers import open_log
from rmetric.replay.watch import Watch

if len(sys.argv) > 1:
    path = Path(sys.argv[1])
else:
    path = Path("simulated.csv")
    settings = {"experiment_id": "spike", "architecture": "Llama-3-8B", "fault": "LR_SPIKE"}
    [run] = rmetric.simulate([rmetric.RunSpec(**settings, evaluate_every=10)])
    rows = [f"{r.step},{r.training_loss},{r.validation_loss}" for r in run.records]
    path.write_text("\n".join(["step,loss,eval_loss", *rows]) + "\n")

alarms = []
watch = Watch(rmetric.CalibratedDetector, alarms.append)
for run_id, record in open_log(path):  # a stream: memory does not grow with the log
    watch.take(run_id, record)

for alarm in alarms:
    print(f"{alarm.event:7} of {alarm.id}: {alarm.words}")
print(f"{watch.num_records} records, {watch.num_alarms} alarms")
