"""KV blocks between engines: one computes a prompt, another takes the blocks and goes on (docs/disaggregation.md)."""
