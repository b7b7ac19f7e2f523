"""A small Llama trained with tensor, pipeline and data parallelism, to be broken and mended.

    torchrun --standalone --nproc-per-node 4 -m studies.tiny_llama \\
        --layout tensor=2,data=2 --folder RUN

Nothing is imported here, and `settings`, `shape`, `data`, `injection` and `loss_log` need no
torch. `model` is the model, `parallel` cuts it up, `loop` trains it; docs/reference_training.md
has the rest.
"""
