#!/usr/bin/env python3
"""The tables of a study, computed from its logs.

Reads logs_<MODE>/*.jsonl in --logs DIR and writes to --out DIR, each as .csv, .md and .tex:

  table1_approaches  existing approaches: what kind, what scope, what lead time
  table2_scenarios   the scenario matrix and what became of its runs
  table3_detectors   R-Metric, ablations, baselines and anchors; for the published study
                     studies/paper/published_tables.py, else every protocol in tables.py
  table4_faults      R-Metric by fault type
  table5_claims      the paper's claims beside what the logs show
  table6_transfer    weights fitted on one architecture, used on another
  table7_anatomy     the published F1 with one thing changed at a time (published study alone)

Table 5 also has the real runs of results/case_study*/summary.json. The spreads over seeds
and table 7 of the published study are simulated anew by the command itself.

It also writes provenance.json: command, digest of the logs, seeds, versions, commit.
The .tex files need the packages booktabs and graphicx. table1 to table6 have a slim form each,
*_slim.tex, with fewer columns in 7-point type at the width of one column of a two-column page,
or of both (tables 3 and 5); it needs the packages array and booktabs.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from studies.common.command import FAILED, ends_at_once, fail

with ends_at_once():
    from rmetric.evaluation import Study, UnusableStudy, read_study
    from rmetric.logs import write_atomically
    from studies.common.real_runs import read_summaries
    from studies.common.renderers import RENDERERS, to_text
    from studies.common.table import Table
    from studies.paper.script import folder_for, parser, provenance, report_inputs, warn
    from studies.paper.slim_tables import SLIM, slim_tex
    from studies.paper.tables import FEW_RUNS, build_tables

#: Tables for the terminal: the comparison, the faults and the claims.
PRINTED = ("table3_detectors", "table4_faults", "table5_claims", "table7_anatomy")
#: Holds case_study*/summary.json, the real runs among the claims.
RESULTS = Path("results")
#: For fitting the forests, the only part that takes seconds.
NUM_PROCESSES = os.cpu_count() or 1


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the tables; the exit code.

    0: all well; 1: some logs could not be used or contradict themselves, or a table could not be
    written; 2: no tables.
    """
    options = parser(__doc__, "tables").parse_args(arguments)
    try:
        study = read_study(options.logs)
    except UnusableStudy as error:
        return fail(str(error))
    out = options.out or folder_for(study, "tables")
    print(f"{study.num_logs} logs of {len(study.reference)} runs read from {options.logs}")
    summaries = read_summaries(RESULTS)
    try:
        with provenance(out, "generate_paper_tables.py", study):
            tables, disagreements = build_tables(study, summaries, num_processes=NUM_PROCESSES)
            write(out, tables)
    except OSError as error:
        return fail(f"cannot write to {out}: {error.strerror or error}", FAILED)
    for table in tables:
        if table.name in PRINTED:
            print(f"\n{to_text(table)}")
    print(f"{len(tables)} tables as .csv, .md and .tex, and provenance.json: {out}")
    return report(study, disagreements)


def write(folder: Path, tables: Sequence[Table]) -> None:
    for table in tables:
        for suffix, render in RENDERERS.items():
            write_atomically(folder / f"{table.name}.{suffix}", [render(table).encode()])
        if table.name in SLIM:
            write_atomically(folder / f"{table.name}_slim.tex", [slim_tex(table).encode()])


def report(study: Study, disagreements: Sequence[str]) -> int:
    """Print on stderr what a reader must know of the logs."""
    for mode in study.missing:
        warn(f"no logs in {study.folder / f'logs_{mode}'}: its rows are left out")
    if len(study.reference) < FEW_RUNS:
        warn(f"only {len(study.reference)} runs: the intervals are wide")
    report_inputs(study)
    for disagreement in disagreements:
        warn(f"the log contradicts its records, from which R was recomputed: {disagreement}")
    return 1 if study.skipped or disagreements else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        print("stopped; tables already written stay", file=sys.stderr)
        sys.exit(130)
