"""The monitor in a plain PyTorch loop; a spike of the learning rate at step 100 ends the run.

Needs `pip install -e ".[live]"`. Writes run.jsonl, which `rmetric replay run.jsonl` shows.
"""

import torch
from torch import nn

import rmetric
from rmetric.monitor.actions import Stop

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
truth = torch.randn(16, 1)

with rmetric.Monitor(
    model, optimizer, log="run.jsonl", actions=[print, Stop()], audits=True
) as monitor:
    for step in range(1, 151):
        if step == 100:
            optimizer.param_groups[0]["lr"] = 5.0
        inputs = torch.randn(32, 16)
        loss = nn.functional.mse_loss(model(inputs), inputs @ truth)
        optimizer.zero_grad()
        loss.backward()
        monitor.check_before_step(loss)  # after backward, before the optimiser's step
        optimizer.step()
        if monitor.should_stop:
            break

print(f"{monitor.last.step} steps, {len(monitor.alerts)} alarms")
