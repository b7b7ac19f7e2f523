"""Train all runs of a campaign into a folder, and pack them into archives.

A run's file gets its name only when it is complete, so an interrupted campaign that is started
again ends with the bytes of an uninterrupted one.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

import joblib
import torch

from benchmarks.report import processor
from rmetric._util.workers import delayed
from rmetric.logs import write_atomically
from rmetric.readers.archive import SUFFIX, run_from_line, run_to_line, write_archive
from studies.fault_lab.branches import Definitions, train_seed
from studies.fault_lab.corpus import corpus
from studies.fault_lab.spec import SECOND_SPLITS, SPLITS, LabSpec, entries_of

CAMPAIGN, SECONDS, MANIFEST = "campaign.json", "seconds.jsonl", "manifest.json"
SECOND = "second"  # the second set's part of the manifest
#: Digest of the second set's runs, committed before the first of them was trained.
SEAL = Path(__file__).resolve().parent / "results" / "set_2_run_list_seal.json"


class CampaignError(OSError):
    """A folder in which this campaign cannot continue; the message has the file and the reason."""


def by_seed(specs: Sequence[LabSpec]) -> list[list[LabSpec]]:
    """The control of each seed with its branches."""
    seeds: dict[int, list[LabSpec]] = {}
    for spec in specs:
        seeds.setdefault(spec.seed, []).append(spec)
    return list(seeds.values())


def digest(specs: Any) -> str:
    """SHA-256 of the entries of the specs, or of whole groups of them."""
    return hashlib.sha256(json.dumps(specs, sort_keys=True).encode()).hexdigest()


def describe(specs: Sequence[LabSpec], definitions: Definitions) -> dict[str, Any]:
    """Everything that determines the bytes of a campaign."""
    return {
        "runs": len(specs),
        "seeds": len(by_seed(specs)),
        "specs_sha256": digest([entries_of(spec) for spec in specs]),
        "corpora_sha256": {name: corpus(name).digest for name in sorted({s.text for s in specs})},
        "definitions": asdict(definitions),
        "versions": {
            "python": platform.python_version(),
            **{name: version(name) for name in ("torch", "transformers", "numpy", "rmetric")},
        },
    }


def open_folder(out: Path, specs: Sequence[LabSpec], definitions: Definitions) -> None:
    """Assign `out` to this campaign. Raises CampaignError for the folder of another."""
    described = describe(specs, definitions)
    path = out / CAMPAIGN
    if path.exists():
        try:
            found = json.loads(path.read_bytes())
        except ValueError:
            raise CampaignError(f"{path} is not JSON: choose another --out, or remove it") from None
        for key, value in described.items():
            if found.get(key) != value:
                raise CampaignError(
                    f"{path} is of another campaign: its {key} is {found.get(key)!r}, this one's "
                    f"{value!r}; choose another --out, or remove the folder"
                )
        return
    if out.exists() and any(out.iterdir()):
        raise CampaignError(f"{out} is not empty and no campaign's: choose another --out")
    out.mkdir(parents=True, exist_ok=True)
    write_atomically(path, [_json(described)])


def check_seal(specs: Sequence[LabSpec], definitions: Definitions) -> None:
    """Raises CampaignError unless these are the runs and the definitions of the seal."""
    if not SEAL.exists():
        raise CampaignError(f"{SEAL} is missing: it has the digest of the second set")
    now, then = describe(specs, definitions), json.loads(SEAL.read_bytes())
    for key in ("specs_sha256", "definitions"):
        if now[key] != then[key]:
            raise CampaignError(f"{SEAL} is of another {key}: it has changed since the sealing")


def run_path(out: Path, run_id: str) -> Path:
    return out / (run_id + SUFFIX)


def unfinished(out: Path, specs: Sequence[LabSpec]) -> list[list[LabSpec]]:
    """The seeds that lack a run, each with its control first."""
    return [
        group
        for group in by_seed(specs)
        if not all(run_path(out, spec.run_id).exists() for spec in group)
    ]


def run_campaign(
    groups: Sequence[Sequence[LabSpec]],
    out: Path,
    definitions: Definitions,
    num_processes: int = 1,
) -> Iterator[int]:
    """Train the seeds in `groups`; yields the number of new runs of each that has ended."""
    parallel = joblib.Parallel(n_jobs=num_processes, return_as="generator_unordered")
    yield from parallel(delayed(_train)(group, out, definitions) for group in groups)


def _train(group: Sequence[LabSpec], out: Path, definitions: Definitions) -> int:
    """Train one seed and write the missing runs; the control is always trained."""
    torch.set_num_threads(1)  # the bytes depend on it, and seeds go side by side
    control, *branches = group
    there = {spec.run_id for spec in group if run_path(out, spec.run_id).exists()}
    wanted = [control, *(spec for spec in branches if spec.run_id not in there)]
    begun = time.perf_counter()
    for run in train_seed(wanted, definitions):
        if run.id not in there:
            write_atomically(run_path(out, run.id), [run_to_line(run)])
    seconds = {"seed": control.seed, "seconds": round(time.perf_counter() - begun, 1)}
    with (out / SECONDS).open("a") as file:
        file.write(json.dumps(seconds) + "\n")
    return len(group) - len(there)


def counts(out: Path, specs: Sequence[LabSpec]) -> Iterator[str]:
    """Numbers of runs by kind and outcome in words, for each part of a finished campaign."""
    found: dict[str, Counter[str]] = {}
    for group in by_seed(specs):
        control = run_from_line(run_path(out, group[0].run_id).read_bytes())
        for spec in group:
            truth = run_from_line(run_path(out, spec.run_id).read_bytes(), control).truth
            assert truth is not None
            kind = "benign" if truth.benign else "fault" if spec.fault else "control"
            ended = "failed" if truth.failed else "not failed"
            found.setdefault(spec.split, Counter())[f"{kind} {ended}"] += 1
    for part, number in found.items():
        yield f"{part}: {', '.join(f'{number[kind]} {kind}' for kind in sorted(number))}"


def pack(out: Path, specs: Sequence[LabSpec], archives: Path) -> dict[str, Any]:
    """An archive for each split and a manifest, from a finished campaign; returns its entries."""
    archives.mkdir(parents=True, exist_ok=True)
    packed = {}
    for split in (*SPLITS, *SECOND_SPLITS):
        ids = [spec.run_id for spec in specs if spec.split == split]
        if not ids:
            continue
        path = archives / f"{split}.tar.xz"
        write_archive(path, ((run_id, run_path(out, run_id).read_bytes()) for run_id in ids))
        packed[path.name] = {
            "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
            "bytes": path.stat().st_size,
            "runs": len(ids),
            "seeds": sorted({spec.seed for spec in specs if spec.split == split}),
        }
    seconds = [json.loads(line)["seconds"] for line in (out / SECONDS).read_text().splitlines()]
    made = json.loads((out / CAMPAIGN).read_bytes()) | {
        "archives": packed,
        "machine": platform.machine(),
        "processor": f"{os.cpu_count()} x {processor()}",
        "process_seconds": round(sum(seconds)),
    }
    path = archives / MANIFEST
    there = json.loads(path.read_bytes()) if path.exists() else {}
    if specs[0].split in SECOND_SPLITS:
        manifest = there | {SECOND: made}
    else:
        manifest = made | {key: there[key] for key in (SECOND,) if key in there}
    write_atomically(path, [_json(manifest)])
    return made


def _json(value: Any) -> bytes:
    return json.dumps(value, indent=1).encode() + b"\n"
