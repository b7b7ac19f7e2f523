"""Real runs with injected faults: worlds of gloo processes that train, log and really fail.

What a diagnosis says of them can be checked, since the guilty rank is known. Faults change the
state of one process or are done to it from outside; what it and the others then write is what
Python and torch write. A plan says what shall happen, and a job counts only when it did.
"""
