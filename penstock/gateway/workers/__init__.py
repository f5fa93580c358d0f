"""Several gateway processes on one port: shared limits, metrics, traces and key changes."""
