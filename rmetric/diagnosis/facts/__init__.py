"""Who is who in a job, and which attempt: ranks, nodes, processes and GPUs."""
