"""Response caches: the exact cache, and the semantic cache with its verifier. No HTTP here."""
