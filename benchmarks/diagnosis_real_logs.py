"""The speed of a diagnosis on real logs, beside drain3.

    python benchmarks/diagnosis_real_logs.py --logs failure_logs

Five of the longest logs of the diagnosis benchmark, as published, and each repeated until it
has 100,000 lines. `ingest` does the whole pass of a diagnosis; `diagnose` is all of it, without the
imports. drain3 (its TemplateMiner) only groups the same lines, without masks and with those of
rmetric. Nothing is warmed up but the imports and the library: every turn begins with empty caches.
Processor time of one core; the median of alternating turns. Goals: 5 times drain3 with masks, never
slower than drain3 without; 300,000 lines a second on logs of 100,000 lines.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from drain3.template_miner import TemplateMiner
from drain3.template_miner_config import TemplateMinerConfig

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from benchmarks.diagnosis import seconds, times, with_masks
from benchmarks.report import write_report
from rmetric.diagnosis.decide import diagnose
from rmetric.diagnosis.ingest import ingest
from rmetric.diagnosis.library import SignatureLibrary

TURNS = 5
LONG = 100_000
#: With masks drain3 is so slow that so many lines are enough.
WITH_MASKS = 20_000
LOGS = (
    "mlperf_v2.1/azure_n16_rnnt/result_1.txt",
    "mlperf_v2.1/dell_16node_bert/result_5.txt",
    "bigscience/meg_ds_3d_gpt2_perf_n16.out",
    "bigscience/meg_gpt2_perf_n16-1999618.out",
    "deepspeed_chat/step2_dpo_finetuning__opt-350M_globalBatchSize-32.log",
)
GOALS = {"lines_per_s_of_long_logs": 300_000, "times_drain3_with_masks": 5.0, "times_drain3": 1.0}


def group(miner: TemplateMiner, lines: Iterable[str]) -> None:
    for line in lines:
        miner.add_log_message(line)


def compare(path: Path, library: SignatureLibrary, turns: int) -> dict[str, Any]:
    """Lines a second of the diagnosis and of drain3."""
    lines = path.read_text(errors="replace").splitlines()
    share = min(1.0, WITH_MASKS / len(lines))
    some = lines[: round(share * len(lines))]
    ours: list[float] = []
    whole: list[float] = []
    plain: list[float] = []
    masked: list[float] = []
    for _ in range(turns):
        plain.append(seconds(partial(group, TemplateMiner(config=TemplateMinerConfig()), lines)))
        ours.append(seconds(lambda: ingest([path], library)))
        whole.append(seconds(lambda: diagnose([path], jobs=1)))
        masked.append(seconds(partial(group, with_masks(), some)) / share)
    took = {"": ours, "whole_diagnosis_": whole, "drain3_": plain, "drain3_with_masks_": masked}
    return (
        {"lines": len(lines), "megabytes": round(path.stat().st_size / 1e6, 2)}
        | {f"{name}lines_per_s": round(len(lines) / median(some)) for name, some in took.items()}
        | {"times_drain3": times(plain, ours), "times_drain3_with_masks": times(masked, ours)}
    )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--logs", type=Path, default=Path("failure_logs"), help="their folder")
    parser.add_argument("--turns", type=int, default=TURNS)
    options = parser.parse_args()
    library = SignatureLibrary.shipped()
    measured: dict[str, Any] = {"goals": GOALS}
    for name in LOGS:
        path = options.logs / name
        measured[name] = compare(path, library, options.turns)
        print(name, measured[name], flush=True)
        with tempfile.TemporaryDirectory() as folder:
            long, text = Path(folder, path.name), path.read_bytes().removesuffix(b"\n") + b"\n"
            long.write_bytes(text * -(-LONG // text.count(b"\n")))
            key = f"{name}, repeated"
            measured[key] = compare(long, library, max(1, options.turns // 2))
        print(key, measured[key], flush=True)
    print(f"written: results/benchmarks/{write_report('diagnosis_real_logs', measured).name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
