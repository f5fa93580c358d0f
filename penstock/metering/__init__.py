"""What was used and what it costs: prices, and a ledger that survives whatever dies."""
