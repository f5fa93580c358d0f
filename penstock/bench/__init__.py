"""Benchmarks: fixed workloads, load generation, reports; `commands/` has one module per `penstock bench` command.

Every figure is printed next to the bound, or the peer, that was measured in the same run.
"""
