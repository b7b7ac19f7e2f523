"""Read text logs: files, lines, exports, prefixes, times, names, entries of several lines."""
