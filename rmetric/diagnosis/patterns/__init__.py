"""The patterns of L4 (arXiv 2503.20263, section 4), and values that deviate from the peers'.

`steps`, `stages` and `iterations` (temporal pattern) read entries during the pass; `spatial` and
`values` compare the ranks of the finished `Job`. Each reports outliers; none determines a cause.
"""
