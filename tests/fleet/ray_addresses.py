ADDRESSES = [f"10.77.0.{number}" for number in range(1, 7)]
"""Of the simulated nodes, the head's first."""
