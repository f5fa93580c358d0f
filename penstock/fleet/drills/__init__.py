"""`penstock drill`: break a fleet under load on purpose, heal it, and account for everything that clients were owed.

A throw-away fleet (`throwaway`) or a running one (`live`) is loaded by clients that behave as real ones do
(`client`, `load`); a fault (`faults/`) breaks it and heals it; `run` measures, and `accounting` compares what clients
got with what they should have got and with the ledger. Nothing may be lost.
"""
