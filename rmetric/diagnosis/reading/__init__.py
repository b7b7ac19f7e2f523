"""Read text logs: files, prefixes, times and multi-line entries.

found = find(paths)                        # sources.py: found.sources, found.notes
for source in found.sources:
    prefixes = PrefixParser.learn(source.sample())
    for lines in source.chunks():          # raw lines: no colours, no line ends
        for line in lines:
            prefix, start = prefixes.split(line)
            kind = kind_of(line[start:])   # joining.py: independent of the line's digits
            joined, state = NEXT[state][kind]
"""
