"""Show rescue on three failing runs beside their twins, in about two minutes on two cores.

    python -m studies.fault_lab.rescue.demo [--out rescue_demo]

Three trainings of the laboratory get a fault each: corrupt data, a worker with a wrong gradient,
and a learning rate that is too high. Each is trained four times: without the fault, with the
fault alone, with the fault and a rule in use elsewhere, and with the fault and rescue. The runs
are of the open seeds; docs/fault_lab.md has the laboratory. The curves are the loss on the probe
batch, which is measured after every step; the final losses are those of the whole held-out batch.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from math import ceil, isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from rmetric._util.errors import exit_code_of, exit_with, fail
from rmetric._util.options import add_jobs
from rmetric._util.workers import delayed
from rmetric.logs import write_atomically
from studies.common.command import command_parser

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from rmetric.records import Record
    from studies.fault_lab.rescue.runner import Outcome
    from studies.fault_lab.spec import LabSpec

FIGURE, SUMMARY = "rescue", "rescue.json"
ACTIONS = {
    "go_back": ("went back once", "went back {} times"),
    "leave_out": ("left out one step", "left out {} steps"),
    "hold": ("held the run", "held the run {} times"),
}


class Panel(NamedTuple):
    """One failing run of the open seeds; `rule` is the policy that rescue is compared with."""

    name: str
    title: str
    run: str
    rule: str
    label: str


PANELS = (
    Panel(
        "data", "Data fault: all bytes random", "seed011_DATA_CORRUPTION_s1_b039",
        "palm", "PaLM: back, skip data",
    ),
    Panel(
        "worker", "Sick worker: its gradient times -10",
        "seed023_SIGN_FLIP_s10_b002",
        "leave_out_outliers", "OLMo: skip outliers",
    ),
    Panel(
        "rate", "Rate fault: learning rate times 25", "seed032_LR_SPIKE_s25_b008",
        "back_and_halve", "OPT: back, halve rate",
    ),
)  # fmt: skip


def main(argv: list[str] | None = None) -> int:
    parser = command_parser("fault_lab.rescue.demo", __doc__)
    parser.add_argument(
        "--out", type=Path, default=Path("rescue_demo"), metavar="DIR",
        help="folder of the picture and its numbers (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--redraw", action="store_true", help="draw the picture from the numbers in DIR"
    )
    add_jobs(parser)
    options = parser.parse_args(argv)
    try:
        options.out.mkdir(parents=True, exist_ok=True)
        if options.redraw:
            results = json.loads((options.out / SUMMARY).read_bytes())
        else:
            specs = open_runs()
            chosen = [(panel, *specs[panel.run]) for panel in PANELS]
            results = train(chosen, num_processes=options.jobs)
        show(results, options.out)
    except OSError as error:
        return fail(error, exit_code_of(error))
    return 0


def open_runs() -> dict[str, tuple[LabSpec, LabSpec]]:
    """Control and spec of every failing or benign run of the open seeds, by its id."""
    from studies.fault_lab.rescue.campaign import development

    return {spec.run_id: (group[0], spec) for group in development() for spec in group[1:]}


def train(
    chosen: Sequence[tuple[Panel, LabSpec, LabSpec]], *, num_processes: int
) -> dict[str, Any]:
    """The numbers of the picture, ready for JSON: of each panel, control and failing run."""
    import joblib

    from studies.fault_lab.corpus import corpus

    parallel = joblib.Parallel(n_jobs=min(num_processes, len(chosen)))
    panels = parallel(delayed(train_panel)(*task) for task in chosen)
    return {"corpus_sha256": corpus(chosen[0][1].text).digest, "panels": panels}


def train_panel(panel: Panel, control_spec: LabSpec, spec: LabSpec) -> dict[str, Any]:
    import torch

    from studies.fault_lab.rescue.policies import POLICIES, RESCUE
    from studies.fault_lab.rescue.runner import Treated, train_control, train_untreated, twin_loss

    assert spec.onset_step is not None
    assert spec.duration_steps is not None
    torch.set_num_threads(1)  # the bytes depend on it
    control = train_control(control_spec, {spec.onset_step})
    untreated = train_untreated(control, spec)
    alone, twin = (
        [(record.step, record) for record in lineage.records]
        for lineage in (untreated.lineage, control.lineage)
    )
    runs = {"fault alone": _entries(untreated.outcome, alone)}
    for label, key in ((panel.label, panel.rule), ("rescue", RESCUE)):
        make = POLICIES[key].make
        assert make is not None
        treated = Treated(control, spec, untreated, make())
        runs[label] = _entries(treated.run(), treated.trace)
    for entries in runs.values():
        entries["final_loss"] = _rounded(entries["above"] + twin_loss(control, entries["step"]))
        entries["above"] = _rounded(entries["above"])
    return {
        "name": panel.name,
        "title": panel.title,
        "run": spec.run_id,
        "steps": spec.total_steps,
        "onset": spec.onset_step,
        "fault_end": spec.onset_step + spec.duration_steps - 1,
        "twin": {
            "final_loss": _rounded(twin_loss(control, spec.total_steps)),
            "curve": _curve(twin),
        },
        "runs": runs,
    }


def _entries(outcome: Outcome, trace: Sequence[tuple[int, Record]]) -> dict[str, Any]:
    return {
        "end": outcome.end,
        "step": outcome.step,
        "above": outcome.above,
        "extra": outcome.extra,
        "actions": [list(action) for action in outcome.actions],
        "curve": _curve(trace),
    }


def _curve(trace: Sequence[tuple[int, Record]]) -> list[list[float | None]]:
    """Executed step, step of the schedule, probe loss: as before where a step was left out."""
    points: list[list[float | None]] = []
    for executed, record in trace:
        loss = record.probe_loss
        if record.skipped and points:
            points.append([executed, record.step, points[-1][2]])
        else:
            points.append([executed, record.step, _rounded(loss)])
    return points


def _rounded(value: float | None) -> float | None:
    """To four decimals; None for what is not finite, which JSON does not have."""
    return None if value is None or not isfinite(value) else round(value, 4)


# -- output


def show(results: dict[str, Any], out: Path) -> None:
    """Write the numbers and the picture to `out`, and print what happened."""
    from rmetric.reporting import style

    write_atomically(out / SUMMARY, [text_of(results).encode()])
    with style.style():
        paths = style.save(demo_figure(results["panels"]), out / FIGURE)
    for panel in results["panels"]:
        print("\n".join(lines_of(panel)), end="\n\n")
    print(f"Written: {', '.join(str(path) for path in (*paths, out / SUMMARY))}")


def text_of(results: dict[str, Any]) -> str:
    """JSON with one curve, list of actions or number a line."""
    return "".join(_pretty(results)) + "\n"


def _pretty(value: Any, indent: int = 0) -> list[str]:
    nested = isinstance(value, list) and value and isinstance(value[0], dict)
    if not (isinstance(value, dict) or nested):
        return [json.dumps(value, ensure_ascii=False)]
    space, entries = " " * (indent + 1), []
    pairs = value.items() if isinstance(value, dict) else ((None, item) for item in value)
    for key, item in pairs:
        begin = "" if key is None else f"{json.dumps(key)}: "
        entries.append(space + begin + "".join(_pretty(item, indent + 1)))
    opening, closing = "{}" if isinstance(value, dict) else "[]"
    return [opening + "\n" + ",\n".join(entries) + "\n" + " " * indent + closing]


def lines_of(panel: dict[str, Any]) -> list[str]:
    """Printed lines of one panel: the twin, then one line a run, and why rescue acted."""
    lines = [
        f"{panel['title']} ({panel['run']}), fault in steps {panel['onset']} to "
        f"{panel['fault_end']}; final loss of the twin {panel['twin']['final_loss']:.3f} nats"
    ]
    width = max(map(len, panel["runs"]))
    for label, run in panel["runs"].items():
        words = f"{outcome_words(run)}, {run['extra']:4d} extra steps"
        done = action_words(run)
        lines.append(f"  {label:{width}}  {words}{f'; {done}' if done else ''}")
    actions = panel["runs"]["rescue"]["actions"]
    shown = [*actions[:1], *actions[1:][-1:]]
    return [*lines, *(f"    {reason}" for *_, reason in shown)]


def outcome_words(run: dict[str, Any]) -> str:
    """Final loss above the twin's, or what became of the run."""
    if run["above"] is None:
        return "lost: weights that are not finite"
    if run["end"] == "not_finite":
        return f"lost: stopped at step {run['step']}"
    held = f" (held at step {run['step']})" if run["end"] == "held" else ""
    return f"{run['above']:+.3f} nats{held}"


def action_words(run: dict[str, Any]) -> str:
    counts = Counter(action[2] for action in run["actions"])
    return ", ".join(ACTIONS[kind][n > 1].format(n) for kind, n in counts.items())


# -- the picture

BEFORE = 60  # steps shown before the fault
HEIGHT = 1.5  # nats shown at most; a curve may leave the picture at the top
FAULT_COLOUR = "#f6e7e0"
#: Height of the rows of marks, as a share of the panel; the fault alone has none.
ROWS = (np.nan, 0.89, 0.95)
#: Rows and columns of the table below a panel, as shares of it.
FIRST_ROW, ROW_HEIGHT = -0.29, 0.082
NAME_X, ABOVE_X, EXTRA_X = 0.09, 0.84, 1.0


def _looks() -> list[dict[str, Any]]:
    """Styles of the lines: the twin's, the fault's alone, the rule's and rescue's."""
    from rmetric.reporting import style

    colours, widths = (style.VERMILION, style.ORANGE, style.BLUE), (0.9, 0.9, 1.4)
    runs = [{"color": c, "linewidth": w} for c, w in zip(colours, widths, strict=True)]
    return [{"color": style.BLACK, "linewidth": 2.6, "alpha": 0.3}, *runs]


def demo_figure(panels: Sequence[dict[str, Any]]) -> Figure:
    """One panel a fault. A mark shows where a run went back; the table, where each run ended."""
    from matplotlib.figure import Figure

    from rmetric.reporting import style

    figure = Figure(figsize=(style.TEXT_WIDTH, 3.2))
    figure.subplots_adjust(left=0.06, right=0.985, top=0.855, bottom=0.355, wspace=0.17)
    row = np.atleast_1d(figure.subplots(1, len(panels)))
    for axes, panel in zip(row, panels, strict=True):
        _panel(axes, panel)
    row[0].set_ylabel("loss on held-out text (nats)")
    figure.suptitle(_title(panels), fontsize=8.5, fontweight="bold", y=0.975)
    return figure


def _title(panels: Sequence[dict[str, Any]]) -> str:
    rescued = [panel["runs"]["rescue"] for panel in panels]
    if any(_is_lost(run) for run in rescued):
        return "Failing trainings, with and without rescue"
    within = ceil(100 * max(run["above"] for run in rescued)) / 100
    return (
        f"With rescue, these failing trainings end within {within:.2f} nats of their undisturbed "
        "twins"
    )


def _panel(axes: Axes, panel: dict[str, Any]) -> None:
    from matplotlib.ticker import MaxNLocator

    from rmetric.reporting.style import GREY

    first, runs = panel["onset"] - BEFORE, panel["runs"]
    axes.axvspan(panel["onset"], panel["fault_end"] + 1, color=FAULT_COLOUR, linewidth=0)
    twin, *looks = _looks()
    _line(axes, panel["twin"]["curve"], first, **twin)
    for run, look, height in zip(runs.values(), looks, ROWS, strict=True):
        _line(axes, run["curve"], first, **look)
        backs = [action[0] for action in run["actions"] if action[2] == "go_back"]
        axes.plot(backs, [height] * len(backs), "<", color=look["color"], markersize=3.2,
                  markeredgewidth=0, transform=axes.get_xaxis_transform())  # fmt: skip
    shown = [
        loss for run in (panel["twin"], *runs.values())
        for executed, _, loss in run["curve"] if executed >= first and loss is not None
    ]  # fmt: skip
    low = min(shown)
    height = min(max(shown) - low, HEIGHT)
    axes.set_ylim(low - 0.12 * height, low + 1.2 * height)
    axes.set_xlim(first, max(run["curve"][-1][0] for run in runs.values()) + 8)
    axes.yaxis.set_major_locator(MaxNLocator(5))
    small: dict[str, Any] = dict(color=GREY, fontsize=6.5, transform=axes.get_xaxis_transform())
    middle = (panel["onset"] + panel["fault_end"] + 1) / 2
    axes.text(middle, 0.02, "fault", ha="center", va="bottom", **small)
    axes.text(panel["onset"] - 3, (ROWS[1] + ROWS[2]) / 2, "goes\nback", ha="right", va="center",
              linespacing=0.9, **small)  # fmt: skip
    axes.set_title(panel["title"])
    axes.set_xlabel("computed steps (with repeated ones)", labelpad=2)
    _table(axes, runs)


def _table(axes: Axes, runs: dict[str, Any]) -> None:
    """Legend of a panel, with the numbers of its runs."""
    from rmetric.reporting.style import GREY

    def write(row: int, x: float, words: str, **look: Any) -> None:
        y = FIRST_ROW - ROW_HEIGHT * row
        axes.text(x, y, words, transform=axes.transAxes, va="center", fontsize=6.5, **look)

    def draw(row: int, **look: Any) -> None:
        y = FIRST_ROW - ROW_HEIGHT * row
        axes.plot([0, NAME_X - 0.02], [y, y], transform=axes.transAxes, clip_on=False, **look)

    write(0, ABOVE_X, "nats above\nthe twin", ha="right", color=GREY, linespacing=0.95)
    write(0, EXTRA_X, "extra\nsteps", ha="right", color=GREY, linespacing=0.95)
    twin, *looks = _looks()
    draw(1, **twin)
    write(1, NAME_X, "twin: no fault")
    for row, ((label, run), look) in enumerate(zip(runs.items(), looks, strict=True), start=2):
        weight = "bold" if label == "rescue" else "normal"
        above = "lost" if _is_lost(run) else f"{run['above']:+.3f}"
        draw(row, **look)
        write(row, NAME_X, label, fontweight=weight)
        write(row, ABOVE_X, above, ha="right", fontweight=weight)
        write(row, EXTRA_X, str(run["extra"]), ha="right", fontweight=weight)


def _is_lost(run: dict[str, Any]) -> bool:
    return run["end"] == "not_finite"


def _line(axes: Axes, curve: Sequence[Sequence[Any]], first: int, **look: Any) -> None:
    points = [(x, np.nan if loss is None else loss) for x, _, loss in curve if x >= first]
    axes.plot(*zip(*points, strict=True), **look)
    axes.plot(*points[-1], "o", color=look["color"], markersize=2.4, alpha=look.get("alpha"))


if __name__ == "__main__":
    exit_with(main)
