"""Known faults of a job: the matches of each signature, survived or not, and what follows what.

The log of a failed job contains many faults: the cause, the echoes on other ranks, the launcher's
reports, and faults that the training survived. The explanation is a cause that was not survived
and that does not follow from an earlier cause.
"""

from rmetric.diagnosis.faults.consequences import GENERIC, Fault
from rmetric.diagnosis.faults.find import ended_alone, find_faults
from rmetric.diagnosis.faults.survival import IN_FLIGHT, LOSS

__all__ = ["GENERIC", "IN_FLIGHT", "LOSS", "Fault", "ended_alone", "find_faults"]
