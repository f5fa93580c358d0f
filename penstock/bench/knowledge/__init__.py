"""Benchmarks of collections: how well, and how fast, they are searched."""
