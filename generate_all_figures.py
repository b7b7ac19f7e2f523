#!/usr/bin/env python3
"""The figures of the study, computed from its logs and nothing else.

Reads logs_<MODE>/*.jsonl in --logs DIR and writes to --out DIR, each as .pdf and .png:

  figure1_system           from a training run to an alert, and to the tables
  figure2_failure_process  what a fault does, and how many runs went each way
  figure3_example_runs     loss, signals, R, alerts and failure of one run of each kind
  figure4_thresholds       precision, recall and F1 at every threshold, both protocols
  figure5_lead_times       lead times against the time from fault to failure
  figure6_anatomy          the published F1 with one thing changed (published study alone)

and provenance.json: command, captions, digest of the logs, seeds, versions, commit.
The same logs give the same bytes. The logs of the full metric suffice: the ablations
of figure 4 are computed from the records of the same runs. Graphviz, where it is installed,
places the boxes of figures 1 and 2; without it they are placed more simply.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

from studies.common.command import FAILED, ends_at_once, fail

with ends_at_once():
    import studies.paper  # noqa: F401 (first: it names the extra that is missing)
    from rmetric.evaluation import Study, UnusableStudy, read_study
    from rmetric.logs import write_atomically
    from rmetric.reporting.style import save, style
    from studies.paper.figures import build_figures, diagrams, dot_version, kept
    from studies.paper.script import folder_for, parser, provenance, report_inputs, warn
    from studies.paper.tables import FEW_RUNS

#: For simulating the studies of figure 6, the only part that takes seconds.
NUM_PROCESSES = os.cpu_count() or 1
#: Packages whose versions the bytes of the figures depend on.
DRAWN_WITH = ("matplotlib", "pandas", "seaborn")


def main(arguments: Sequence[str] | None = None) -> int:
    """0: all well; 1: some logs could not be used, or a figure not be written; 2: no figures."""
    options = parser(__doc__, "figures").parse_args(arguments)
    try:
        study = read_study(options.logs)
    except UnusableStudy as error:
        return fail(str(error))
    out = options.out or folder_for(study, "figures")
    print(f"{study.num_logs} logs of {len(study.reference)} runs read from {options.logs}")
    found = [kept(diagram) for diagram in diagrams(study)]
    dot = found[0]["version"] if found[0] and found[1] else dot_version()
    try:
        with provenance(out, "generate_all_figures.py", study) as sources:
            captions = write(out, study, with_dot=dot is not None)
            sources["versions"] |= {name: version(name) for name in DRAWN_WITH} | {"graphviz": dot}
            sources["captions"] = captions
            write_atomically(out / "README.md", [gallery(captions).encode()])
    except OSError as error:
        return fail(f"cannot write to {out}: {error.strerror or error}", FAILED)
    print(f"{len(captions)} figures as .pdf and .png, and provenance.json: {out}")
    return report(study, dot)


def write(folder: Path, study: Study, *, with_dot: bool) -> dict[str, str]:
    """Draw and save every figure; returns their captions."""
    captions = {}
    with style():
        for name, caption, figure in build_figures(
            study, with_dot=with_dot, num_processes=NUM_PROCESSES
        ):
            save(figure, folder / name)
            print(f"{name}: {caption}")
            captions[name] = caption
    return captions


def gallery(captions: dict[str, str]) -> str:
    """A page that shows the figures with their captions."""
    entries = (f"![{name}]({name}.png)\n\n{caption}\n" for name, caption in captions.items())
    return "# Figures\n\n" + "\n".join(entries)


def report(study: Study, dot: str | None) -> int:
    """Print on stderr what a reader must know."""
    if dot is None:
        warn("no Graphviz: figures 1 and 2 are placed more simply (apt-get install graphviz)")
    if len(study.reference) < FEW_RUNS:
        failed = sum(run.truth is not None and run.truth.failed for run in study.reference)
        warn(f"only {len(study.reference)} runs, of which {failed} failed: the curves are coarse")
    report_inputs(study)
    return 1 if study.skipped else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        print("stopped; figures already written stay", file=sys.stderr)
        sys.exit(130)
