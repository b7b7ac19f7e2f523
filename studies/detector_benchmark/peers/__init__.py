"""Other people's detectors behind our contract, each run by its own code where it is installed.

They are an extra (`peers`) and no dependency: the packages are imported when an adapter is
made. Each sees the very records that the others see, with its own defaults. What they hold
is theirs, so `rmetric._util.state` cannot carry it into a checkpoint and the live monitor does not
offer them.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec

import numpy as np

from rmetric.detectors.contract import Detector
from rmetric.detectors.registry import Entry
from studies.detector_benchmark.peers.trainproof import TrainProof
from studies.detector_benchmark.peers.trainpulse import TrainPulse
from studies.detector_benchmark.peers.trainscope import TrainScope

__all__ = ["PEERS", "TrainProof", "TrainPulse", "TrainScope", "installed"]


#: By the package that each needs.
PEERS: dict[str, Callable[[], Detector]] = {
    "trainpulse": TrainPulse,
    "trainscope": TrainScope,
    "trainproof": TrainProof,
}


def installed() -> dict[str, Entry]:
    """Those that are installed; looking does not import them."""
    return {
        package: Entry(title=f"{package} (peer)", kind="peer", make=_maker(adapter))
        for package, adapter in PEERS.items()
        if find_spec(package) is not None
    }


def _maker(adapter: Callable[[], Detector]) -> Callable[[np.random.Generator], Detector]:
    return lambda generator: adapter()
