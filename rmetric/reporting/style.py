"""Style of all figures: one palette, one width, one way to save.

Colours are those of Okabe and Ito, distinct to readers with any common colour
blindness (Okabe and Ito, "Color universal design", 2008). Sizes are for a
figure set at the width of a column of a two-column page, without scaling.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from typing import Any

import matplotlib
from cycler import cycler
from matplotlib.figure import Figure

from rmetric._util.durable import write_atomically

BLACK = "#000000"
GREY = "#7f7f7f"
ORANGE = "#E69F00"
SKY = "#56B4E9"
GREEN = "#009E73"
BLUE = "#0072B2"
VERMILION = "#D55E00"
PURPLE = "#CC79A7"

#: Series of no particular meaning, in this order.
CYCLE = (BLUE, VERMILION, GREEN, PURPLE, ORANGE, SKY, BLACK)

#: Things that come back in many figures, always in the same colour.
MEANING = {
    "failure_rate": ORANGE,
    "gradient_variance": GREEN,
    "loss_drift": BLUE,
    "score": BLACK,
    "stated": BLUE,
    "alert": VERMILION,
    "onset": PURPLE,
    "failure": BLACK,
    "training_loss": SKY,
    "validation_loss": BLUE,
}

#: Vertical lines of a run. Each differs from the other, and from the solid black line of R, in
#: its dashes and its width, so also in grey.
ONSET_LINE: dict[str, Any] = {
    "color": MEANING["onset"], "linestyle": (0, (1, 1)), "linewidth": 1.5,
}  # fmt: skip
FAILURE_LINE: dict[str, Any] = {
    "color": MEANING["failure"], "linestyle": (0, (6, 1.2, 1.2, 1.2)), "linewidth": 1.2,
}  # fmt: skip
#: At the upper end of a line of a failure.
FAILURE_MARK: dict[str, Any] = {
    "color": MEANING["failure"], "marker": "X", "markersize": 5, "markeredgewidth": 0,
}  # fmt: skip

#: Smallest type at printed size, points.
LEAST_POINTS = 7.0
#: Colours of the severities of a verdict.
SEVERITIES = {"bad": "#b3261e", "warning": "#8a5a00", "good": "#00704f", "unknown": "#4a5568"}

#: Inches: one column, and both with the gap between them.
COLUMN_WIDTH = 3.35
TEXT_WIDTH = 6.95

_PARAMETERS: Any = {
    "font.family": "DejaVu Sans",  # comes with matplotlib, so figures are alike everywhere
    "mathtext.fontset": "dejavusans",
    "font.size": 7.5,
    "axes.titlesize": 8,
    "axes.labelsize": 7.5,
    "xtick.labelsize": 7,
    "ytick.labelsize": 7,
    "legend.fontsize": 7,
    "figure.titlesize": 8,
    "axes.prop_cycle": cycler(color=CYCLE),
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.linewidth": 0.6,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#e3e3e3",
    "grid.linewidth": 0.5,
    "lines.linewidth": 1.0,
    "lines.markersize": 3,
    "xtick.major.width": 0.6,
    "ytick.major.width": 0.6,
    "xtick.major.size": 2.5,
    "ytick.major.size": 2.5,
    "legend.frameon": False,
    "legend.handlelength": 1.6,
    "legend.columnspacing": 1.0,
    "legend.borderaxespad": 0.2,
    "figure.dpi": 150,
    "savefig.dpi": 300,
    "pdf.fonttype": 42,  # text stays text, as publishers ask
    "path.simplify": True,
}


#: A date or a version in the file would make every run's output differ.
_METADATA: dict[str, dict[str, Any]] = {
    "pdf": {"CreationDate": None, "Creator": None, "Producer": None},
    "png": {"Software": None},
}


@contextmanager
def style() -> Iterator[None]:
    """Inside, figures made and saved look like the project's; outside, nothing changes."""
    with matplotlib.rc_context(_PARAMETERS):
        yield


def save(figure: Figure, stem: Path) -> list[Path]:
    """Write `stem`.pdf and `stem`.png, each whole or not at all.

    The same figure gives the same bytes. Raises OSError that names the file.
    """
    paths = []
    for kind, metadata in _METADATA.items():
        path, file = stem.with_name(f"{stem.name}.{kind}"), BytesIO()
        # In memory first: on a full disk matplotlib raises an AttributeError.
        figure.savefig(file, format=kind, metadata=metadata)
        write_atomically(path, [file.getvalue()])
        paths.append(path)
    return paths
