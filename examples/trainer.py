"""The monitor in the Hugging Face Trainer, on a small Llama with random weights: no download.

Needs `pip install -e ".[live]"`. Writes run.jsonl, and the Trainer's own files to out/.
"""

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import rmetric
from rmetric import HuggingFaceCallback

torch.manual_seed(0)
config = LlamaConfig(
    vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2
)
rows = [{"input_ids": tokens, "labels": tokens} for tokens in torch.randint(64, (64, 16))]
arguments = TrainingArguments(
    output_dir="out", max_steps=10, save_strategy="no", report_to=[], use_cpu=True
)
trainer = Trainer(
    model=LlamaForCausalLM(config),
    args=arguments,
    train_dataset=rows,
    callbacks=[HuggingFaceCallback("run.jsonl")],
)
trainer.train()

last = rmetric.read_log("run.jsonl").run.records[-1]
print(f"step {last.step}: loss {last.training_loss:.3f}, gradient norm {last.gradient_norm:.3f}")
