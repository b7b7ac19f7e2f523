"""Simulated training whose failures emerge. See docs/simulator.md for the equations."""

from rmetric.simulation.architectures import ARCHITECTURES, Architecture
from rmetric.simulation.engine import simulate
from rmetric.simulation.faults import FAULTS, Fault
from rmetric.simulation.spec import RunSpec

__all__ = ["ARCHITECTURES", "FAULTS", "Architecture", "Fault", "RunSpec", "simulate"]
