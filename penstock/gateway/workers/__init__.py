"""What gateway processes that share a port need to know of each other: limits, metrics, changed keys."""
