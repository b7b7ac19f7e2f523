"""What the GPUs say of themselves: events for λ, and readings with their units.

Nothing is imported here: `rmetric.telemetry.nvml` alone touches NVML.
"""
