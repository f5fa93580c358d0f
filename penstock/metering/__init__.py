"""Usage and cost: prices, a crash-safe ledger, and the request log."""
