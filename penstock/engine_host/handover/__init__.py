"""KV blocks between engines: one computes a prompt, another takes its blocks and decodes (docs/disaggregation.md)."""
