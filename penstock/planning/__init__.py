"""What a model costs before it is served: memory, time and money, and how many replicas are worth running."""
