"""What will be asked of a model: users, requests and tokens in a day, and how they spread over its hours.

Rates are per second. The day's average times the curve's value is the rate of an hour; within an hour, bursts raise it
by the same factor all day, chosen so that the busiest hour reaches the average times `peak_factor`. So capacity for the
peak is capacity for every hour, and the hours of the day say how much of it stands idle.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Sequence
from dataclasses import dataclass

from penstock.errors import ConfigError

SECONDS_PER_DAY = 86_400
HOURS = 24


@dataclass(frozen=True, slots=True)
class Curve:
    """The load of each hour of a day, over the day's average: 24 values whose mean is 1."""

    name: str
    hours: tuple[float, ...]

    @classmethod
    def of(cls, name: str, values: Sequence[float]) -> Curve:
        """A curve from loads in any unit."""
        if len(values) != HOURS:
            raise ConfigError(f"curve {name}: {len(values)} values; give {HOURS}, one for each hour from midnight")
        if not all(math.isfinite(value) and value >= 0 for value in values) or not any(values):
            raise ConfigError(f"curve {name}: loads must be numbers of 0 or more, and not all 0")
        mean = sum(values) / HOURS
        return cls(name, tuple(value / mean for value in values))

    @property
    def peak(self) -> float:
        """The busiest hour over the average."""
        return max(self.hours)


# Shapes, not measurements of any one service: offices in one time zone, and an app used in the evening.
CURVES = {
    curve.name: curve
    for curve in (
        Curve.of("flat", [1] * HOURS),
        Curve.of("office", [2, 1, 1, 1, 1, 2, 4, 7, 11, 14, 15, 15, 12, 13, 15, 15, 14, 12, 9, 6, 5, 4, 3, 2]),
        Curve.of("consumer", [5, 3, 2, 2, 2, 3, 4, 6, 8, 9, 9, 10, 11, 11, 10, 10, 11, 12, 13, 15, 16, 15, 12, 8]),
    )
}


def curve(text: str) -> Curve:
    """A curve by its name, or from 24 loads separated by commas."""
    if text in CURVES:
        return CURVES[text]
    if "," in text:
        try:
            return Curve.of("custom", [float(value) for value in text.split(",")])
        except ValueError as error:
            raise ConfigError(f"curve {text}: write {HOURS} numbers separated by commas") from error
    near = difflib.get_close_matches(text, CURVES, n=1)
    hint = f"did you mean {near[0]}? " if near else ""
    raise ConfigError(f"no curve is named {text}; {hint}known: {', '.join(CURVES)}, or {HOURS} numbers with commas")


@dataclass(frozen=True, slots=True)
class Rate:
    """Requests and tokens per second. `cached_tokens` are those of the input that a prefix cache supplies."""

    requests: float
    input_tokens: float
    cached_tokens: float
    output_tokens: float

    @property
    def computed_tokens(self) -> float:
        """Prompt tokens that are computed."""
        return self.input_tokens - self.cached_tokens

    @property
    def tokens(self) -> float:
        return self.input_tokens + self.output_tokens


@dataclass(frozen=True, slots=True)
class Workload:
    """A day of requests. `input_tokens` is what a request adds; in a conversation, the history comes on top of it."""

    users: float
    requests_per_user: float
    input_tokens: float
    output_tokens: float
    peak_factor: float = 3.0
    """The highest rate that is served in time, over the day's average."""
    curve: Curve = CURVES["consumer"]
    turns: float = 1.0
    """Requests of one conversation, each sent with the whole history before it."""
    cache_hit_rate: float | None = None
    """Share of prompt tokens found in the prefix cache. None: the histories of conversations, and the shared prefix."""
    shared_prefix: float = 0.0
    """Of the input of a first request: tokens with which all conversations begin, such as a system prompt."""

    def __post_init__(self) -> None:
        _check("users", self.users)
        _check("requests per user and day", self.requests_per_user)
        _check("input tokens", self.input_tokens, least=1)
        _check("output tokens", self.output_tokens, least=1)
        _check("turns of a conversation", self.turns, least=1)
        _check("the peak factor", self.peak_factor, least=1)
        if self.cache_hit_rate is not None and not 0 <= self.cache_hit_rate < 1:
            raise ConfigError(f"the cache hit rate is a share from 0 to below 1, not {self.cache_hit_rate:g}")
        if not 0 <= self.shared_prefix < self.input_tokens:
            raise ConfigError(
                f"the shared prefix must be 0 or more tokens, and fewer than the {self.input_tokens:g} of the input, "
                f"not {self.shared_prefix:g}"
            )
        if self.peak_factor < self.curve.peak - 1e-9:
            raise ConfigError(
                f"peak factor {self.peak_factor:g} is below the busiest hour of the curve {self.curve.name}, which has "
                f"{self.curve.peak:.2f} times the average; give at least that, or the curve flat"
            )

    @property
    def requests_per_day(self) -> float:
        return self.users * self.requests_per_user

    @property
    def history_tokens(self) -> float:
        """Of an average request: the turns before it, half of the conversation on average."""
        return (self.turns - 1) / 2 * (self.input_tokens + self.output_tokens)

    @property
    def prompt_tokens(self) -> float:
        return self.history_tokens + self.input_tokens

    @property
    def hit_rate(self) -> float:
        """Only the first request of a conversation finds the shared prefix alone; later ones find their history."""
        if self.cache_hit_rate is not None:
            return self.cache_hit_rate
        return (self.history_tokens + self.shared_prefix / self.turns) / self.prompt_tokens

    @property
    def cached_tokens(self) -> float:
        return self.hit_rate * self.prompt_tokens

    @property
    def longest_context(self) -> int:
        """Tokens of the last request of a conversation and its answer."""
        return math.ceil(self.turns * (self.input_tokens + self.output_tokens))

    @property
    def burst(self) -> float:
        """How far the rate rises above an hour's average."""
        return self.peak_factor / self.curve.peak

    @property
    def average(self) -> Rate:
        return self._rate(self.requests_per_day / SECONDS_PER_DAY)

    @property
    def peak(self) -> Rate:
        return self._rate(self.requests_per_day / SECONDS_PER_DAY * self.peak_factor)

    def hour(self, hour: int) -> Rate:
        """The average of an hour, from 0 to 23."""
        return self._rate(self.requests_per_day / SECONDS_PER_DAY * self.curve.hours[hour])

    def hour_peak(self, hour: int) -> Rate:
        """What an hour's bursts reach."""
        return self._rate(self.requests_per_day / SECONDS_PER_DAY * self.curve.hours[hour] * self.burst)

    def _rate(self, requests: float) -> Rate:
        return Rate(
            requests, requests * self.prompt_tokens, requests * self.cached_tokens, requests * self.output_tokens
        )


def _check(what: str, value: float, least: float = 0) -> None:
    if not math.isfinite(value) or value < least or (least == 0 and value == 0):
        raise ConfigError(f"{what} must be {f'{least:g} or more' if least else 'more than 0'}, not {value:g}")
