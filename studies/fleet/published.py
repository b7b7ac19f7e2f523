"""Published failure rates of large fleets, used by the simulation.

Sources: Llama 3 405B: "The Llama 3 Herd of Models" (arXiv 2407.21783), section 3.3.4, the
counts of unexpected interruptions in 54 days on 16,384 H100. Memory errors: Delta (arXiv
2503.11901). Precursors: 504 B200 (arXiv 2605.09370). The first two were read in secondary
copies; percentages printed elsewhere do not match the counts, which are what is used here.
"""

from __future__ import annotations

#: Unexpected interruptions of the Llama 3 405B run by cause.
INTERRUPTIONS = {
    "gpu": 148,
    "hbm": 72,
    "software": 54,
    "network": 35,
    "maintenance": 32,
    "sram": 19,
    "gsp": 17,
    "other": 16,
    "nic": 7,
    "nccl": 7,
    "silent_data_corruption": 6,
    "thermal": 6,
}
LLAMA_GPUS, LLAMA_DAYS = 16_384, 54.0
GPU_DAYS = LLAMA_GPUS * LLAMA_DAYS

#: Causes that the telemetry of a GPU could announce at all. Of the others a GPU shows, if
#: anything, that its job stands still.
OF_A_GPU = ("gpu", "hbm", "sram", "gsp", "thermal")
NUM_INTERRUPTIONS = sum(INTERRUPTIONS.values())
NUM_OF_A_GPU = sum(INTERRUPTIONS[cause] for cause in OF_A_GPU)

#: How often a GPU stops because its job does, whoever is to blame.
STOPS_PER_DAY = NUM_INTERRUPTIONS / LLAMA_DAYS
SOFTWARE_SHARE = INTERRUPTIONS["software"] / NUM_INTERRUPTIONS

#: Failures of a GPU on a GPU-day.
FAILURES_PER_GPU_DAY = NUM_OF_A_GPU / GPU_DAYS

#: Hours between two uncorrectable memory errors of one H100; most are contained.
HOURS_BETWEEN_MEMORY_ERRORS = 88_768.0
MEMORY_ERRORS_PER_GPU_DAY = 24.0 / HOURS_BETWEEN_MEMORY_ERRORS

#: Of ten failures, those with a sign before the Xid.
PRECURSORS_SEEN, PRECURSORS_ASKED = 2, 10

#: Failures of the training itself and GPU-days (TPU v4 chips for PaLM). PaLM (arXiv 2204.02311):
#: loss spikes; 6144 chips for 1200 h and 3072 for 336 h. OPT-175B (arXiv 2205.01068; 54 restarts in
#: 56 days by S. Zhang's talk on it): restarts beyond the 35 that the paper gives to hardware, an
#: upper bound. Llama 3 405B: silent corruption alone. All read in secondary copies.
TRAINING_FAILURES = {
    "Llama 3 405B, silent corruption": (INTERRUPTIONS["silent_data_corruption"], GPU_DAYS),
    "PaLM, loss spikes": (20, (6144 * 1200 + 3072 * 336) / 24),
    "OPT-175B, restarts not by hardware, at most": (54 - 35, 992 * 56.0),
}
