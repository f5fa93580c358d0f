"""Model selection: which model answers a request that names a route (`model: auto`) instead of a model.

`features` extracts features from the question, `score` combines them into one explainable number, `selector` applies
the rules of a route, and `classifier` is an optional trained model.
"""
