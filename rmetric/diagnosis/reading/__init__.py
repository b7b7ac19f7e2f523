"""Reading text logs: files, who says a line, when, which lines are one entry.

found = find(paths)                        # sources.py: found.sources, found.notes
for source in found.sources:
    prefixes = Prefixes.learn(source.sample())
    for lines in source.chunks():          # raw lines: no colours, no line ends
        for line in lines:
            who, start = prefixes.split(line)
            kind = kind_of(line[start:])   # joining.py: the same for a line whatever its digits
            joined, state = NEXT[state][kind]
"""
