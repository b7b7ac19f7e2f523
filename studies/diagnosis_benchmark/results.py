"""Scores of one data set, stored as JSON; every table is made from them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from rmetric.logs import write_atomically
from studies.diagnosis_benchmark.job_scores import ALONE, WHOLE, JobScores
from studies.diagnosis_benchmark.scoring import Counts

#: Source -> the variant that is judged by the goals. A real log comes alone; an injected job
#: with the healthy jobs of its settings.
HEADLINES = {"real": ALONE, "injected": WHOLE}
TITLES = {
    ("real", "development"): "real, development",
    ("real", "held_out"): "real, held out",
    ("injected", "development"): "injected, seen kinds",
    ("injected", "held_out"): "injected, four kinds held out",
    ("injected", "blind"): "injected, six later kinds",
}


@dataclass(frozen=True, kw_only=True)
class Results:
    """A data set, judged.

    Attributes:
        source: "real" or "injected". split: "development", "held_out" or, of injected
            jobs, "blind".
    """

    source: str
    split: str
    jobs: list[JobScores]

    @property
    def name(self) -> str:
        return f"{self.source}_{self.split}"

    @property
    def title(self) -> str:
        return TITLES[self.source, self.split]

    @property
    def headline(self) -> str:
        return HEADLINES[self.source]

    def drawn_with(self, job: JobScores) -> str:
        """Jobs of one such name are resampled together."""
        return job.group if self.source == "real" else job.name

    def counted(self, title: str, *, with_echoes: bool = False) -> tuple[list[Counts], list[str]]:
        """A method's events of each job that did not end well, and whom it is drawn with."""
        key = "events_with_echoes" if with_echoes else "events"
        found = [(job, getattr(job.answers.get(title), key, None)) for job in self.jobs]
        kept = [(counts, self.drawn_with(job)) for job, counts in found if counts is not None]
        return [counts for counts, _ in kept], [name for _, name in kept]

    def write(self, folder: Path) -> None:
        about = {"source": self.source, "split": self.split}
        jobs = ",\n".join(json.dumps(job.as_json(), allow_nan=False) for job in self.jobs)
        # One job a line, so that a change shows which jobs it moved.
        text = f'{json.dumps(about, allow_nan=False)[:-1]}, "jobs": [\n{jobs}\n]}}\n'
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(folder / f"{self.name}.json", [text.encode()])


def read_results(path: Path) -> Results:
    """Raises ValueError for a file that is no result of this command."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        jobs = [JobScores.from_json(entry) for entry in content["jobs"]]
        return Results(source=content["source"], split=content["split"], jobs=jobs)
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path}: not written by this command: {error}") from None
