"""The monitor in Lightning, with a module of one layer.

Needs `pip install -e ".[live]" lightning`. Writes run.jsonl.
"""

import lightning
import torch
from torch.utils.data import DataLoader, TensorDataset

import rmetric
from rmetric import LightningCallback


class Regression(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(8, 1)

    def training_step(self, batch, batch_index):
        inputs, targets = batch
        return torch.nn.functional.mse_loss(self.layer(inputs), targets)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.01)


data = TensorDataset(torch.randn(320, 8), torch.randn(320, 1))
callback = LightningCallback("run.jsonl")
trainer = lightning.Trainer(
    max_epochs=1, logger=False, enable_checkpointing=False, callbacks=[callback]
)
trainer.fit(Regression(), DataLoader(data, batch_size=16))

last = rmetric.read_log("run.jsonl").run.records[-1]
print(f"step {last.step}: loss {last.training_loss:.3f}, gradient norm {last.gradient_norm:.3f}")
