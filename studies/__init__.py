"""Programs that reproduce the results: not installed, run as `python -m studies.NAME`.

A study imports rmetric; rmetric imports no study, and no study another one.
"""
