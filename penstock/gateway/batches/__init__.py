"""Files, and batches of requests that are read from one and answered into another."""
