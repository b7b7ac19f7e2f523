"""Files beside the logs that state where ranks are: flight recorder dumps, stacks."""
