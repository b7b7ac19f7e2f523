"""Benchmark of the diagnosis: events, outcome, cause, stage and faulty rank.

`python -m studies.diagnosis_benchmark` scores the diagnosis, its ablations and simple baselines on
the failure logs and on the injected jobs, and writes the tables. See docs/diagnosis_evaluation.md.
"""
