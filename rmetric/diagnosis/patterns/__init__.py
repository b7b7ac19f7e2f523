"""The patterns of L4 (arXiv 2503.20263, section 4), and values that deviate from the peers'.

`iterations` (temporal pattern) reads entries during the pass; `spatial`, `values` and `odd_stacks`
compare the ranks of the finished `Job`. Each reports outliers; none determines a cause.
"""
