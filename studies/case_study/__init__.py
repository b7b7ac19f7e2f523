"""One real fine-tuning with a fault in it, its twin without, and the metric live in both."""
