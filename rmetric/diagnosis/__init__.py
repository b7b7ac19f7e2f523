"""Why did the job fail? Diagnosis from its text logs, after L4 (arXiv 2503.20263).

One pass over the logs leaves a `Job`: who spoke, which events, which known faults. Three
patterns and an unfiltered channel say what is odd about it, the fault library what is known,
and `diagnose` what came first.
"""
