"""Read text logs: files, prefixes, times and multi-line entries.

for source in sources:                     # source.py, one for each file
    prefixes = PrefixParser.learn(source.sample())
    for lines in source.chunks():          # raw lines: no colours, no line ends
        for line in lines:
            prefix, start = prefixes.split(line)
            kind = kind_of(line[start:])   # joining.py: independent of the line's digits
            joined, state = TRANSITIONS[state][kind]
"""
