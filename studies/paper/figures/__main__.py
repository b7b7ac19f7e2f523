"""Keep where Graphviz places the diagrams of the study in a folder, by default here."""

import json
import sys
from dataclasses import asdict
from pathlib import Path

from rmetric.evaluation import read_study
from studies.paper.figures import diagrams
from studies.paper.figures.dot import PLACED, by_dot, digest, dot_version

if __name__ == "__main__":
    made = {
        digest(one): {"version": dot_version(), "layout": asdict(by_dot(one))}
        for one in diagrams(read_study(Path(*sys.argv[1:2])))
    }
    PLACED.write_text(json.dumps(made) + "\n", encoding="utf-8")
