"""`penstock bench soak`: every feature at once, for as long as wanted.

Random requests of every kind (adapters, grammars, tool calls, sampling, log-probabilities) run on engines in which
everything is scarce (blocks, slots, budget) and everything is on (speculation, prefix cache, host tier), while requests
are cancelled, expire, are malformed, adapters come and go, and steps fail. After every round nothing may be
leaked, and every answer must equal that of the same request alone on a plain engine.
"""
