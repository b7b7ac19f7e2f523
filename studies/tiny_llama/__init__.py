r"""Reference training: a small Llama with tensor, pipeline and data parallelism.

    torchrun --standalone --nproc-per-node 4 -m studies.tiny_llama \
        --layout tensor=2,data=2 --folder RUN

Nothing is imported here, and `settings`, `shape` and `data` need no torch. `model` defines the
model, `parallel` distributes it, `loop` trains it. See docs/reference_training.md.
"""
