"""Answers that need not be computed again: the exact cache, and the semantic cache with its verifier. No HTTP here."""
