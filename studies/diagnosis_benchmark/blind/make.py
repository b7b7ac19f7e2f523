"""Make all jobs of a split: in memory, into a folder, or as a digest."""

from __future__ import annotations

import hashlib
import io
import json
import tarfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from studies.diagnosis_benchmark.blind import shown
from studies.diagnosis_benchmark.blind.job import dumped, manifest, rendered
from studies.diagnosis_benchmark.blind.plan import Plan, begun

SEEDS = {"development": 1, "sealed": 2}
#: Splits, and what they are.
TITLES = {
    "development": "written jobs, development",
    "sealed": "written jobs, sealed until their first look",
    "second": "written jobs by two other authors, unseen until their first look",
    "third": "written jobs by a fourth author, unseen until their first look",
    "fourth": "written jobs by a fifth author, unseen until their first look",
    "fifth": "written jobs by two further authors, unseen until their first look",
    "sixth": "written jobs by one of these two, unseen until their first look",
    "seventh": "written jobs by two more authors, unseen until their first look",
    "eighth": "written jobs by a further author, unseen until their first look",
    "ninth": "written jobs by three more authors, unseen until their first look",
    "tenth": "written jobs by one more author, unseen until their first look",
    "eleventh": "written jobs by three other authors, unseen until their first look",
    "twelfth": "written jobs by seven other authors, unseen until their first look",
    "thirteenth": "written jobs by five more authors, unseen until their first look",
    "fourteenth": (
        "written jobs by six authors, two of the set before, unseen until their first look"
    ),
    "fifteenth": "written jobs by eight more authors, unseen until their first look",
    "sixteenth": "written jobs by eight further authors, unseen until their first look",
    "seventeenth": "written jobs by one author more, unseen until their first look",
    "eighteenth": "written jobs by again one author, unseen until their first look",
    "nineteenth": "written jobs by a last author, unseen until their first look",
    "twentieth": "written jobs by five authors more, unseen until their first look",
    "twentyfirst": "written jobs by an author of Slurm jobs, unseen until their first look",
    "twentysecond": "written jobs by yet another author, unseen until their first look",
    "twentythird": "written jobs by an author of cloud jobs, unseen until their first look",
    "twentyfourth": "written jobs by eight authors anew, unseen until their first look",
    "twentyfifth": "written jobs by another eight authors, unseen until their first look",
    "twentysixth": "written jobs by eight authors once more, unseen until their first look",
    "opened": "written jobs by nine more authors, seen while the code was changed",
}
#: Those that others wrote by hand and by scripts of their own: kept as archives.
ARCHIVES = {
    split: Path(__file__).parent / f"{split}.tar.xz" for split in TITLES if split not in SEEDS
}


def plans(split: str) -> tuple[list[Plan], tuple[str, ...], tuple[dict[str, str], ...]]:
    """The plans of a split, its patterns of host names and its other words."""
    if split == "development":
        return shown.PLANS, shown.HOSTS, ({},)
    from studies.diagnosis_benchmark.blind import sealed

    return sealed.PLANS, sealed.HOSTS, sealed.SWAPS


def jobs(split: str, seed: int) -> Iterator[tuple[str, dict[str, bytes], dict[str, Any]]]:
    """Name, files below logs/, and manifest of each job."""
    made, names, swaps = plans(split)
    for number, plan in enumerate(made):
        job = begun(plan, number, seed, names, swaps)
        plan.write(job)
        files, _ = rendered(job)
        told = manifest(job, split=split, kind=plan.kind, variant=plan.variant, seed=seed)
        yield job.name, files, told


def written(split: str, seed: int, out: Path) -> tuple[int, int]:
    """Write the jobs below out/split; number of jobs and lines."""
    count = lines = 0
    for name, files, told in jobs(split, seed):
        folder = out / split / name
        for path, data in files.items():
            (folder / "logs" / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / "logs" / path).write_bytes(data)
        (folder / "manifest.json").write_bytes(dumped(told))
        count, lines = count + 1, lines + told["lines"]
    return count, lines


def unpacked(split: str, out: Path) -> tuple[int, int]:
    """Unpack the jobs of an archive below out/split; number of jobs and lines."""
    with tarfile.open(ARCHIVES[split]) as tar:
        tar.extractall(out / split, filter="data")
    manifests = sorted((out / split).glob("*/manifest.json"))
    return len(manifests), sum(json.loads(path.read_bytes())["lines"] for path in manifests)


def packed(folder: Path, archive: Path) -> str:
    """Pack the jobs in FOLDER/JOB, without owners and times; the archive's SHA-256."""

    def bare(info: tarfile.TarInfo) -> tarfile.TarInfo:
        info.mtime, info.mode = 0, 0o755 if info.isdir() else 0o644
        info.uid = info.gid = 0
        info.uname = info.gname = ""
        return info

    with tarfile.open(archive, "w:xz", format=tarfile.PAX_FORMAT, preset=9) as tar:
        for job in sorted(folder.iterdir()):
            tar.add(job, job.name, filter=bare)
    return hashlib.sha256(archive.read_bytes()).hexdigest()


def sealed_as(split: str, seed: int, path: Path) -> str:
    """Write the SHA-256 of a tar of the jobs, with fixed metadata, made in memory."""
    buffer, kinds, outcomes, lines = io.BytesIO(), Counter[str](), Counter[str](), 0
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.USTAR_FORMAT) as tar:
        for name, files, told in jobs(split, seed):
            kinds[told["made_as"]] += 1
            outcomes[told["outcome"]] += 1
            lines += told["lines"]
            members = {f"logs/{path}": data for path, data in files.items()}
            for member, data in sorted({**members, "manifest.json": dumped(told)}.items()):
                info = tarfile.TarInfo(f"{split}/{name}/{member}")
                info.size = len(data)
                tar.addfile(info, io.BytesIO(data))
    digest = hashlib.sha256(buffer.getvalue()).hexdigest()
    told = {
        "split": split,
        "seed": seed,
        "sha256_of_tar": digest,
        "jobs": sum(kinds.values()),
        "lines": lines,
        "outcomes": dict(sorted(outcomes.items())),
        "kinds": len(kinds),
    }
    path.write_text(json.dumps(told, indent=1) + "\n")
    return digest
