"""Latency-aware choice of a region: the nearest one, unless another is expected to answer sooner.

The expected time to the first token of each region is that of its best replica: the measured round trip plus the
predicted wait. Another region than the nearest must be faster by `gain_s` to be used, and is left again when it is
faster by less than half of that. A region that was away is used only after it has been back for `return_s`, unless
there is no other. A plain object; the caller passes the time.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

UNKNOWN_S = 0.1
"""Assumed round trip to another region that has not been measured."""


class RegionChoice:
    """The choice of one gateway for one model."""

    def __init__(self, home: str = "", gain_s: float = 0.05, return_s: float = 10.0) -> None:
        """`home`: the region of this gateway."""
        self.home = home
        self._gain_s = gain_s
        self._return_s = return_s
        self._up: set[str] | None = None
        self._back_at: dict[str, float] = {}
        self._away = ""
        """The region that was last used in place of the nearest."""
        self.chosen: dict[str, int] = {}
        """Requests so far, by region."""

    def seen(self, up: Collection[str], now: float) -> None:
        """Reports the regions that have a working replica."""
        if self._up is not None:
            for region in set(up) - self._up:
                self._back_at[region] = now
        self._up = set(up)

    def settled(self, region: str, now: float) -> bool:
        """Whether it was not away recently."""
        return now - self._back_at.get(region, float("-inf")) >= self._return_s

    def choose(
        self, regions: Sequence[str], expected_s: Sequence[float], round_trips: Sequence[float | None], now: float
    ) -> list[int]:
        """The indices of the candidates in the region to use. For each candidate: its region, the expected time to the
        first token without its round trip, and that round trip if it is known."""
        cost: dict[str, float] = {}
        distance: dict[str, float] = {}
        for region, expected, measured in zip(regions, expected_s, round_trips, strict=True):
            away = measured if measured is not None else 0.0 if region == self.home else UNKNOWN_S
            cost[region] = min(cost.get(region, float("inf")), expected + away)
            distance[region] = min(distance.get(region, float("inf")), away)
        usable = [region for region in cost if self.settled(region, now)] or list(cost)
        nearest = min(usable, key=lambda region: (distance[region], region != self.home, region))
        best = min(usable, key=lambda region: (cost[region], distance[region], region))
        gain = cost[nearest] - cost[best]
        if gain > (self._gain_s / 2 if self._away == best else self._gain_s):
            chosen = self._away = best
        else:
            chosen, self._away = nearest, ""
        self.chosen[chosen] = self.chosen.get(chosen, 0) + 1
        return [index for index, region in enumerate(regions) if region == chosen]
