"""GPU telemetry: readings with units, hardware events, risk scores and verdicts.

`nvml` reads GPUs (through `nvml_library`, the only importer of pynvml). `risk` scores the
readings, `rules` override the score, and `judge` combines both into a verdict on one GPU.
`sources` defines the interface of verdict sources, `export` writes verdicts and readings.
Nothing is imported here; all modules but `nvml` and `nvml_library` are pure or use files.
"""
