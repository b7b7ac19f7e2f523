"""What people read: tables and figures, computed from logs and nothing else."""
