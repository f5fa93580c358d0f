"""Discrete-event simulation of a fleet: the real scheduler, router and admission on a virtual clock."""
