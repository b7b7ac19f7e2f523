"""Imported by each Python that `rmetric run` starts; nothing but the standard library.

An own sitecustomize of the environment, which this one hides, runs too.
"""

from __future__ import annotations

import os
import sys
from importlib import import_module
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any

#: The modules that define a trainer to which `attach` can add us.
TRAINERS = (
    "transformers.trainer",
    "lightning.pytorch.trainer.trainer",
    "pytorch_lightning.trainer.trainer",
    "torchtitan.trainer",
)


class TrainerFinder:
    """Finds the modules of `TRAINERS` as others do, and attaches to them once they have run."""

    def __init__(self) -> None:
        self._searched: set[str] = set()  # a finder of others may ask all finders, this one too

    def find_spec(self, name: str, *_: object) -> ModuleSpec | None:
        if name not in TRAINERS or name in self._searched:
            return None
        self._searched.add(name)
        try:
            spec = find_spec(name)
        finally:
            self._searched.discard(name)
        if spec is not None and spec.loader is not None:
            loader: Any = spec.loader
            run = loader.exec_module

            def run_and_attach(module: ModuleType) -> None:
                run(module)
                if module.__name__ == name:  # a loader may have several modules
                    _attach(module)

            loader.exec_module = run_and_attach
        return spec


def _attach(module: ModuleType) -> None:
    try:
        import_module("rmetric.integrations.startup").attach(module)
    except Exception as error:  # an error of ours must not end the training
        words = f"rmetric: {error}: nothing is watched in {sys.executable}"
        print(words, file=sys.stderr, flush=True)


def _run_hidden() -> None:
    """Run the sitecustomize that comes after this one on the path, if there is one."""
    here = os.path.dirname(os.path.abspath(__file__))  # noqa: PTH100, PTH120 (pathlib is slow)
    places = [index for index, folder in enumerate(sys.path) if folder == here]
    for index in reversed(places):
        del sys.path[index]
    own = sys.modules.pop("sitecustomize")
    try:
        import_module("sitecustomize")
    except ModuleNotFoundError as error:
        if error.name != "sitecustomize":
            raise
        sys.modules["sitecustomize"] = own
    finally:
        sys.path[:0] = [here] * len(places)


if __name__ == "sitecustomize":
    sys.meta_path.insert(0, TrainerFinder())
    _run_hidden()
