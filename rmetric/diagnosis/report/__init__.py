"""What people see of a diagnosis: its lines of the log, its text, and the page of an incident.

`evidence` selects the events to show, `frames` reads tracebacks, `render` writes at most 15 lines
with the means of `layout`, and `incident` an HTML page with time lines, a metric and GPU readings.
"""
