"""Other people's detectors behind our contract, each run by its own code where it is installed.

They are an extra (`peers`) and no dependency: the packages are imported when an adapter is
made. Each sees the very records that the others see, with its own defaults. What they hold
is theirs, so `rmetric.state` cannot carry it into a checkpoint and the live monitor does not
offer them.
"""

from rmetric.detectors.peers.trainproof import TrainProof
from rmetric.detectors.peers.trainpulse import TrainPulse
from rmetric.detectors.peers.trainscope import TrainScope

__all__ = ["TrainProof", "TrainPulse", "TrainScope"]
