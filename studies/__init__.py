"""What reproduces the results: not installed, run from the clone as `python -m studies.NAME`.

A study imports rmetric; rmetric imports no study, and no study another one.
"""
