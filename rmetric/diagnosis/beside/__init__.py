"""What lies beside the logs."""
