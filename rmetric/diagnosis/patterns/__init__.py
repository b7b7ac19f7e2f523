"""The patterns of L4 (arXiv 2503.20263, section 4) and the channel of absences.

`stages` and `iterations` read entries during the one pass (temporal pattern), `spatial` and
`unfiltered` look at the `Job` that it leaves. Each says what is odd, none says why.
"""
