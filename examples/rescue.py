"""Supervised fine-tuning past a poisoned stretch of data, on a small Llama: no download.

Each row is a prompt of four letters and its answer, the same letters in order. Of 96 rows in
the middle the answers are noise. `Rescue` takes snapshots; when the loss climbs, it goes back and
makes the steps again. The loss climbs at the same place, so it is of the data: it goes back once
more, leaves those batches out, and saves them, so that a person can look at them.

Needs `pip install -e ".[live]"`. Writes run.jsonl and the skipped batches beside it.
"""

import random

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, set_seed

from rmetric import HuggingFaceCallback
from rmetric.rescue import Rescue

ROWS, BATCH = 4000, 16
POISONED = range(2400, 2496)  # rows: steps 151 to 156
ANSWER = 26  # the token between prompt and answer

random.seed(0)
set_seed(0)


def example(row: int) -> dict[str, list[int]]:
    prompt = [random.randrange(26) for _ in range(4)]
    answer = sorted(prompt)
    if row in POISONED:
        answer = [random.randrange(26) for _ in range(4)]
    return {"input_ids": [*prompt, ANSWER, *answer], "labels": [-100] * 5 + answer}


model = LlamaForCausalLM(
    LlamaConfig(
        vocab_size=27,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=16,
    )
)
rescue = Rescue()
trainer = Trainer(
    model=model,
    args=TrainingArguments(
        output_dir="out",
        num_train_epochs=1,
        per_device_train_batch_size=BATCH,
        learning_rate=5e-3,
        train_sampling_strategy="sequential",  # in the order of the file
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        logging_steps=100,
    ),
    train_dataset=[example(row) for row in range(ROWS)],
    eval_dataset=[example(-1) for _ in range(200)],
    callbacks=[HuggingFaceCallback("run.jsonl", actions=[rescue])],
)
trainer.train()
loss = trainer.evaluate()["eval_loss"]

for decision in rescue.decisions:
    print(f"step {decision['step']}: {decision['action']} to {decision['to']}")
    data = decision["data"]
    for interval in data.get("skipped", []):
        first, last = interval["batches"]
        print(
            f"  skipped batches {first} to {last}: rows {first * BATCH} to {(last + 1) * BATCH - 1}"
        )
    if "file" in data:
        last_batch = torch.load(data["file"], weights_only=True)[-1]["value"]
        print(f"  {data['file']}: the last one begins with {last_batch['input_ids'][0].tolist()}")
print(f"{trainer.state.global_step} steps, validation loss {loss:.2f}")
