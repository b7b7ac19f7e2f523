"""Diagnose why a training job failed from its text logs, after L4 (arXiv 2503.20263).

One pass over the logs builds a `Job`: its streams, its events and the known faults found in it.
Three patterns and an unfiltered channel find outliers, the signature library names known faults,
and `diagnose` selects the earliest cause.
"""
