"""Whether the advice on a restart is what an engineer would do who knows what happened.

    python -m studies.diagnosis_benchmark.restart_advice    # writes results/restart_advice.csv
    python -m studies.diagnosis_benchmark.restart_advice --peer    # first, results/restart_peer.csv

data/restart_labels.csv has a label for 250 written jobs that failed or were ended: the action, the
nodes to leave out, and a second action where two are defensible, by judges who saw the jobs and
their manifests and no answer. The advice was last changed after the first labels (set 1) were seen;
results/restart_advice_before_labels.csv is of the code before that, commit e3450940.

The peer is the restart agent of nvidia-resiliency-ext 0.7.0 without its language model, and with
the settings that it has by default. `--peer` needs that package and httpx.
"""

from __future__ import annotations

import csv
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from rmetric._util.errors import exit_with
from rmetric._util.options import add_jobs
from rmetric.diagnosis.decide import diagnose
from rmetric.diagnosis.ingest import ingest_attempts
from rmetric.diagnosis.library.load import SignatureLibrary
from studies.common.command import command_parser
from studies.common.csv_rows import read_dicts
from studies.common.processes import mapped
from studies.common.renderers import to_csv, to_text
from studies.common.table import Cell, Table
from studies.diagnosis_benchmark.written_sets import opened

FOLDER = Path(__file__).parent
LABELS = FOLDER / "data" / "restart_labels.csv"
WITHOUT = "restart_without"
PEER = FOLDER / "results" / "restart_peer.csv"


def advised(folder: Path) -> tuple[str, set[str]]:
    """Action and nodes for the logs in a folder."""
    advice = diagnose(folder).restart
    return (advice.action, set(advice.nodes)) if advice else ("", set())


def decided_by_peer(folder: Path) -> tuple[str, str]:
    """Decision and basis of the peer after the last attempt, when it has seen those before.

    It reads one log of each attempt, so it gets the lines of all files, split where we split them.
    """
    from nvidia_resiliency_ext.attribution import restart_agent as peer

    memory = peer.InMemoryAttemptRecordStore()
    agent = peer.RestartAgentRuntime(peer.RestartAgent(), attempt_record_store=memory)
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    left = {str(path.relative_to(folder)): path.read_bytes().splitlines(True) for path in files}
    attempts = [job.files for job in ingest_attempts([folder], SignatureLibrary.shipped())]
    with TemporaryDirectory() as work:
        log = Path(work, "cycle.log")
        for cycle, counts in enumerate(attempts):
            text = b""
            for name, lines in left.items():
                count = counts.get(name, 0) if cycle < len(attempts) - 1 else len(lines)
                text += b"".join(lines[:count]) + b"\n"
                del lines[:count]
            log.write_bytes(text)
            request = peer.RestartAgentRequest(log_path=str(log), job_id="job", cycle_id=cycle)
            found = agent.analyze_one(request).result.to_payload()
    return found["decision"].lower(), found["decision_basis"]


def row(labels: list[dict[str, str]], given: list[tuple[str, set[str]]]) -> tuple[Cell, ...]:
    """Counts of one policy on one set of labels."""
    pairs = list(zip(labels, given, strict=True))
    accepted = [(action in (r["action"], r["also"] or None), r, action) for r, (action, _) in pairs]
    without = [(r, nodes) for r, (action, nodes) in pairs if action == r["action"] == WITHOUT]
    return (
        len(labels),
        sum(action == r["action"] for r, (action, _) in pairs),
        sum(right for right, *_ in accepted),
        sum(r["action"] == "stop" != action and not right for right, r, action in accepted),
        sum(action == "stop" and not right for right, _, action in accepted),
        sum(nodes == set(r["nodes"].split()) for r, nodes in without),
    )


HEADINGS = (
    "Labels | Advice | Jobs | As labelled | As labelled or the second action | Restart in vain | "
    "Stopped without need | The same nodes left out"
)


def main(arguments: list[str] | None = None) -> int:
    parser = command_parser("diagnosis_benchmark.restart_advice", __doc__)
    parser.add_argument("--out", type=Path, default=FOLDER / "results", metavar="DIR")
    parser.add_argument("--peer", action="store_true", help="ask nvidia-resiliency-ext alone")
    add_jobs(parser)
    options = parser.parse_args(arguments)
    labels = {label["job"]: label for label in read_dicts(LABELS)}
    with opened(sorted({name.partition("/")[0] for name in labels})) as jobs:
        folders = {f"{job.set}/{job.case.name}": job.case.folder for job in jobs}
        ask: Callable[[Path], Any] = decided_by_peer if options.peer else advised
        answers = mapped(ask, (folders[name] for name in labels), processes=options.jobs)
    if options.peer:
        with open(PEER, "w", encoding="utf-8", newline="") as file:
            lines = [(job, *answer) for job, answer in zip(labels, answers, strict=True)]
            csv.writer(file, lineterminator="\n").writerows([("job", "decision", "basis"), *lines])
        return 0
    of_peer = {entry["job"]: (entry["decision"], set[str]()) for entry in read_dicts(PEER)}
    rows: list[tuple[Cell, ...]] = []
    policies = {
        "rmetric diagnose": dict(zip(labels, answers, strict=True)),
        "nvidia-resiliency-ext 0.7.0, no model": of_peer,
        "always restart": dict.fromkeys(labels, ("restart", set[str]())),
    }
    for name in dict.fromkeys(label["set"] for label in labels.values()):
        those = {job: label for job, label in labels.items() if label["set"] == name}
        for title, given in policies.items():
            rows.append((name, title, *row([*those.values()], [given[job] for job in those])))
    found = Table("restart_advice", "advice on the next start of a job", HEADINGS, rows, notes=[])
    (options.out / "restart_advice.csv").write_text(to_csv(found), encoding="utf-8")
    print(to_text(found))
    return 0


if __name__ == "__main__":
    exit_with(main)
