"""Who is who in a job, and which attempt: ranks, nodes, processes and GPUs.

`statements` is the table of what lines state, `graph` ties it together, `world` is what follows
for the whole job, `layout` the rank and the node of each stream. `starts` finds the attempts in one
file. `job` is the data model of all of it.
"""
