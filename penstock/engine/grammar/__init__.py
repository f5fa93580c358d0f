"""Constrained sampling: which tokens a grammar allows next, as bit masks that the sampler applies."""
