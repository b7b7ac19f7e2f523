"""A small training with each trainer of others: of a net that returns its loss, on given rows."""

import logging
import warnings
from importlib import import_module

import torch

import rmetric
from rmetric.logs import read_log
from rmetric.monitor import MonitorConfig

torch.set_num_threads(1)
#: Measured at each step.
EVERYTHING = MonitorConfig(workers_every=1, layers_every=1, forward_every=1, probe_every=1)
for name in ("lightning", "pytorch_lightning"):
    warnings.filterwarnings("ignore", module=name)
    logging.getLogger(name).setLevel(logging.ERROR)
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
logging.getLogger("accelerate").setLevel(logging.ERROR)


def records_of(folder):
    return read_log(folder / "run.jsonl").records


def make_scaler(**settings):
    return torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=10, **settings)


def hugging_face_trainer(
    net, rows, folder, callbacks=(), *, kind=None, optimizers=(None, None), batch_size=2,
    evaluated=None, precision="32", **settings,
):  # fmt: skip
    """A Trainer, or one of the class `kind`."""
    from transformers import Trainer, TrainingArguments

    usual = dict(
        output_dir=str(folder / "out"), per_device_train_batch_size=batch_size, save_strategy="no",
        report_to=[], use_cpu=True, disable_tqdm=True, dataloader_pin_memory=False,
        bf16=precision == "bf16",
    )  # fmt: skip
    trainer = (kind or Trainer)(
        model=net,
        args=TrainingArguments(**usual | settings),
        train_dataset=rows,
        eval_dataset=evaluated,
        callbacks=[*callbacks],
        optimizers=optimizers,
    )
    if precision == "fp16":  # which accelerate itself only offers on a GPU
        trainer.accelerator.scaler = make_scaler()
        trainer.accelerator.native_amp = True
        trainer.accelerator.state._mixed_precision = "fp16"
    return trainer


def hugging_face(*words, resume=None, **settings):
    """The same after its training."""
    from accelerate.state import AcceleratorState

    try:
        trainer = hugging_face_trainer(*words, **settings)
        trainer.train(resume_from_checkpoint=resume)
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)
    return trainer


def lightning(
    net, rows, folder, callbacks=(), *, optimizers=(None, None), batch_size=2, shuffle=False,
    evaluated=None, precision="32", resume=None, package="lightning", **settings,
):  # fmt: skip
    """A Trainer after its training; `net` is a LightningModule, or is wrapped in one."""
    package = import_module(package)

    class Module(package.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = net

        def training_step(self, batch, index):
            return self.net(**batch)["loss"]

        def validation_step(self, batch, index):
            self.log("val_loss", self.net(**batch)["loss"])

        def configure_optimizers(self):
            optimizer, scheduler = optimizers
            schedulers = [{"scheduler": scheduler, "interval": "step"}] if scheduler else []
            return [optimizer], schedulers

    usual = dict(
        accelerator="cpu", devices=1, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, num_sanity_val_steps=0,
        default_root_dir=folder,
    )  # fmt: skip
    if precision == "fp16":
        plugins = import_module("lightning.pytorch.plugins.precision")
        usual["plugins"] = [plugins.MixedPrecision("16-mixed", "cpu", make_scaler())]
    else:
        usual["precision"] = {"32": "32-true", "bf16": "bf16-mixed"}[precision]
    trainer = package.Trainer(callbacks=[*callbacks], **usual | settings)
    loaders = [torch.utils.data.DataLoader(rows, batch_size, shuffle=shuffle)]
    if evaluated is not None:
        loaders.append(torch.utils.data.DataLoader(evaluated, batch_size))
    own = isinstance(net, package.LightningModule)
    trainer.fit(net if own else Module(), *loaders, ckpt_path=resume)
    return trainer


TRAINERS = {"hugging_face": hugging_face, "lightning": lightning}
CALLBACKS = {"hugging_face": "HuggingFaceCallback", "lightning": "LightningCallback"}


def make_callback(trainer, *words, **settings):
    return getattr(rmetric, CALLBACKS[trainer])(*words, **settings)
