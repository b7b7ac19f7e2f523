"""What the GPUs say of themselves: readings with their units, events for λ, and verdicts.

`nvml` reads (through `library`, the one user of pynvml); `risk` scores and `rules` override;
`judge` puts both into a verdict on one GPU; `sources` says who has verdicts, `export` who
gets them. Nothing is imported here, and all but `nvml` and `library` is pure or files.
"""
