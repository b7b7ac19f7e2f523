"""Plumbing: nothing here is for users of the package, and nothing here knows the metric."""
