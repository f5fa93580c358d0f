"""Model selection: which model answers a request that names a route (`model: auto`) instead of a model.

`representation` turns a question into features (n-grams, `concepts`, shape), `complexity` weighs them, `selector`
applies the rules of a route, `trainer` makes the weights, and `classifier` is an optional trained model on embeddings.
"""
