"""From lines to events: masks, cached facts per line form, and Drain.

The form of a line is the line without its digits. Facts that do not depend on digits are computed
once per form (`FactsOf`), so that most lines cost one dictionary look-up. Drain (`Events`) sees
each masked text once, in the order of the files, regardless of the number of processes.
"""
