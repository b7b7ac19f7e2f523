"""Output of a diagnosis for people: its lines of the log, its text, the page of an incident."""
