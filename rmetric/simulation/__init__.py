"""Simulated training whose failures emerge. See docs/simulator.md for the equations."""

from rmetric.simulation.architectures import ARCHITECTURES, Architecture
from rmetric.simulation.engine import RunSpec, simulate
from rmetric.simulation.faults import FAULTS, Fault

__all__ = ["ARCHITECTURES", "FAULTS", "Architecture", "Fault", "RunSpec", "simulate"]
