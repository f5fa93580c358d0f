"""Models that no family describes, run by the modelling code of the `transformers` library (extra
`penstock[transformers]`).

The library computes a step's packed tokens; keys and values lie in the engine's paged cache, and scheduler, sampler and
the rest are the engine's own. Nothing here imports the library before such a model is loaded. Invariant: what is served
equals what the library computes by itself; a model for which that cannot be had is refused at load.
"""
