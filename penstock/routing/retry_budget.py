"""Retry budget: limits retries and hedges to a share of the requests.

Every request adds `share` of a retry to the budget; every retry or hedge takes one. The budget starts empty and holds
at most `most`, so the retries of any period are at most `share` of its requests plus `most`, and over the life of the
process at most `share` of all requests. When replicas fail because they are overloaded, retries fade out instead of
doubling the load.
"""

from __future__ import annotations

_WHOLE = 1_000_000
"""One retry, counted in millionths so that sums stay exact."""


class RetryBudget:
    def __init__(self, share: float = 0.1, most: int = 100) -> None:
        self._share = round(share * _WHOLE)
        self._most = most * _WHOLE
        self._left = 0
        self.taken = 0
        self.refused = 0

    def began(self) -> None:
        """Counts a request."""
        self._left = min(self._left + self._share, self._most)

    def take(self) -> bool:
        """Takes one retry from the budget; False when it is spent."""
        if self._left < _WHOLE:
            self.refused += 1
            return False
        self._left -= _WHOLE
        self.taken += 1
        return True
