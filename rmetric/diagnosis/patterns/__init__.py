"""The patterns of L4 (arXiv 2503.20263, section 4) and the unfiltered absence channel.

`stages` and `iterations` (temporal pattern) read entries during the pass; `spatial` and
`unfiltered` analyse the finished `Job`. Each reports outliers; none determines a cause.
"""
