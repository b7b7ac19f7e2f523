"""Three bugs in one training, which trains without an error: the audits name them in ten steps.

Needs `pip install -e ".[live]"`.
"""

import torch
from torch import nn

import rmetric

torch.manual_seed(0)
model = nn.Sequential(nn.Embedding(50, 32), nn.Flatten(), nn.Dropout(0.1), nn.Linear(256, 50))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
model[3] = nn.Linear(256, 50)  # a new head: the optimizer still holds the old one
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 1000)

with rmetric.Monitor(model, optimizer, audits=True) as monitor:
    monitor.schedulers = [scheduler]
    for _ in range(20):
        tokens = torch.randint(0, 50, (16, 9))
        monitor.batch_ready(tokens)
        loss = nn.functional.cross_entropy(model(tokens[:, :8]), tokens[:, 8])
        loss.backward()  # and nobody calls zero_grad
        monitor.check_before_step(loss)
        optimizer.step()
        scheduler.step()
        scheduler.step()  # once in the loop, and once more

for finding in monitor.findings:
    print(finding)
