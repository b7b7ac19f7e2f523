"""Scores and alarms of logs that the readers open: finished ones, and ones that still grow."""
