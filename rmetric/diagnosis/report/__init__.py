"""What people see of a diagnosis: its lines of the log, its text, the page of an incident."""
