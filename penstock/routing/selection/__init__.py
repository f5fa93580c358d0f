"""Which model answers a request that names a route (`model: auto`) instead of a model.

`features` reads a question, `scoring` weighs what was found into one number that can be explained, `selector` turns it
into a model by the rules of a route, and `classifier` is a second opinion that can be trained.
"""
