"""Engines and servers without a model, for tests, benchmarks and simulations. Production code does not import this."""
