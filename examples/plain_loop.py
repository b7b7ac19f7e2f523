"""The monitor in a plain PyTorch loop; a spike of the learning rate at step 200 ends it.

Needs `pip install -e ".[live]"`. Writes run.jsonl, which `rmetric replay run.jsonl` draws.
"""

import torch
from torch import nn

import rmetric
from rmetric.monitor.actions import Stop

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
truth = torch.randn(16, 1)


def report(alert):
    print(f"alert at step {alert.step} by {alert.source}: {alert.reason}")


with rmetric.Monitor(model, optimizer, log="run.jsonl", actions=[report, Stop()]) as monitor:
    for step in range(1, 301):
        if step == 200:
            optimizer.param_groups[0]["lr"] = 5.0
        inputs = torch.randn(32, 16)
        loss = nn.functional.mse_loss(model(inputs), inputs @ truth)
        optimizer.zero_grad()
        loss.backward()
        monitor.check_before_step(loss)  # after backward, before the optimiser's step
        optimizer.step()
        if monitor.should_stop:
            break

records = rmetric.read_log("run.jsonl").run.records
print(f"{len(records)} records, {len(monitor.alerts)} alerts")
