"""A diagnosis for people: the result, its lines of the log, its text, the page of an incident."""
