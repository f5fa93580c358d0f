"""Batches: requests read from an input file and answered into an output file."""
