"""Benchmarks of the gateway: real processes in front of synthetic engines, so that the gateway is what is measured."""
