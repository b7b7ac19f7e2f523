"""From lines to events: masks, what is remembered of a line's form, and Drain.

A line's form is the line without its digits. What is true of a line whatever its digits is worked
out once a form (`Forms`), so that most lines cost one look into a dictionary. Drain (`Events`) sees
each masked text once, in the order of the files, however many processes read them.
"""
