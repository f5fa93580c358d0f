"""The recent load of every model, in memory: minutes for some hours, hours for two weeks.

It is fed with metric readings, merged over all gateway processes of the server, every few seconds; a request costs
nothing. A counter that fell was reset with its process, so its value is its growth. The engines' counters and gauges
include what gateways on other machines send them; arrivals and refusals are those of this server's gateways.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections import deque
from collections.abc import Callable, Iterable
from itertools import islice
from typing import NamedTuple

import msgspec

from penstock.planning.headroom import LoadPoint, mean
from penstock.telemetry.exposition import Readings

SAMPLE_S = 5.0
MINUTES = 360
HOURS = 14 * 24
FORGET_S = 86400.0
"""After this long without a reading, a model's history is dropped."""

PROMPT, OUTPUT = "vllm:prompt_tokens_total", "vllm:generation_tokens_total"
PREFILL, DECODE = "vllm:request_prefill_time_seconds", "vllm:request_decode_time_seconds"
FINISHED = "vllm:request_generation_tokens"
ADMITTED, REFUSED = "penstock_queue_wait_seconds", "penstock_sheds_total"
RUNNING, WAITING, QUEUED = "vllm:num_requests_running", "penstock_engine_requests_waiting", "penstock_queue_depth"
KV_USE, UP = "vllm:kv_cache_usage_perc", "penstock_engine_up"
_COUNTED = {
    PROMPT: PROMPT,
    OUTPUT: OUTPUT,
    REFUSED: REFUSED,
    f"{PREFILL}_sum": PREFILL,
    f"{DECODE}_sum": DECODE,
    f"{FINISHED}_sum": FINISHED,
    f"{FINISHED}_count": FINISHED,
    f"{ADMITTED}_count": ADMITTED,
}
"""The series that are counted, with the families they belong to."""
_OF_ENGINES = (PROMPT, OUTPUT)
_GAUGES = (RUNNING, WAITING, QUEUED, KV_USE, UP)
FAMILIES = frozenset((*_COUNTED.values(), *_GAUGES))
"""The families that a reading needs."""
_MOST_PARSED = 4096
_MODEL = re.compile(r'[{,]model_name="((?:[^"\\]|\\.)*)"')

_ESCAPED = re.compile(r"\\(.)")


class _Sample(NamedTuple):
    """A value of one model; `labels` as in the exposition format."""

    series: str
    labels: str
    value: float


class ModelHistory(msgspec.Struct, frozen=True):
    """What is known of one model, oldest first. The hours end where the minutes of the present hour begin."""

    minutes: list[LoadPoint] = []
    hours: list[LoadPoint] = []


class _Minute:
    """What has been added up since the minute began."""

    __slots__ = ("at", "gauges", "grown", "queues", "seconds")

    def __init__(self, at: float) -> None:
        self.at = at
        self.seconds = 0.0
        self.grown: dict[str, float] = dict.fromkeys(_COUNTED, 0.0)
        self.gauges: dict[str, float] = dict.fromkeys(_GAUGES, 0.0)
        self.queues = False
        """Whether requests pass an admission queue; if not, the finished ones are counted."""

    def point(self) -> LoadPoint:
        grown, seconds = self.grown, self.seconds
        finished = grown[f"{FINISHED}_sum"]
        time_taken = grown[f"{PREFILL}_sum"] + grown[f"{DECODE}_sum"]
        ran = grown[f"{ADMITTED}_count" if self.queues else f"{FINISHED}_count"]
        return LoadPoint(
            self.at,
            seconds,
            requests=(ran + grown[REFUSED]) / seconds,
            refused=grown[REFUSED] / seconds,
            prompt_tokens=grown[PROMPT] / seconds,
            output_tokens=grown[OUTPUT] / seconds,
            token_time=time_taken / finished if finished else 0.0,
            running=self.gauges[RUNNING] / seconds,
            waiting=(self.gauges[WAITING] + self.gauges[QUEUED]) / seconds,
            kv_use=self.gauges[KV_USE] / seconds,
            replicas=self.gauges[UP] / seconds,
        )


class _Model:
    def __init__(self, now: float) -> None:
        self.minute = _Minute(now)
        self.minutes: deque[LoadPoint] = deque(maxlen=MINUTES)
        self.hours: deque[LoadPoint] = deque(maxlen=HOURS)
        self.seen = now
        self.counters: dict[str, float] = {}
        """The last value of each series."""
        self.up: set[str] = set()
        """The labels of the engines that were up at the last reading."""

    def begin(self, samples: list[_Sample]) -> None:
        """The first reading: what was counted before it is not of this history."""
        self.counters = {sample.series + sample.labels: sample.value for sample in samples if sample.series in _COUNTED}
        self.up = _up(samples)

    def add(self, samples: list[_Sample], passed: float, now: float) -> None:
        """Adds `passed` seconds that ended with these samples."""
        minute, up = self.minute, _up(samples)
        self.seen = now
        minute.seconds += passed
        for series, labels, value in samples:
            if series in _GAUGES:
                minute.gauges[series] += value * passed / (max(len(up), 1) if series == KV_USE else 1)
                continue
            known = self.counters.get(series + labels, 0.0)
            self.counters[series + labels] = value
            if series in _OF_ENGINES and labels not in self.up:
                continue  # an engine that this server has just reached may have counted for days
            minute.grown[series] += value - known if value >= known else value
            minute.queues = minute.queues or series == f"{ADMITTED}_count"
        self.up = up

    def close_minute(self, now: float) -> None:
        if self.minute.seconds > 0:
            point = self.minute.point()
            if self.minutes and int(self.minutes[-1].at // 3600) != int(point.at // 3600):
                self._close_hour(int(self.minutes[-1].at // 3600))
            self.minutes.append(point)
        self.minute = _Minute(now)

    def _close_hour(self, hour: int) -> None:
        points = [point for point in islice(reversed(self.minutes), 120) if int(point.at // 3600) == hour]
        self.hours.append(mean(points[::-1]))


class LoadHistory:
    """The histories of all models. The caller passes the time, in seconds since 1970."""

    def __init__(self) -> None:
        self._models: dict[str, _Model] = {}
        self._last: float | None = None
        self._parsed: dict[str, tuple[str, str, str]] = {}

    def record(self, now: float, readings: Iterable[Readings]) -> None:
        """Adds what has happened since the last reading."""
        passed = 0.0 if self._last is None else max(now - self._last, 0.0)
        self._last = now
        for name, samples in self._by_model(readings).items():
            model = self._models.get(name)
            if model is None:
                model = self._models[name] = _Model(now)
                model.begin(samples)
                continue
            model.add(samples, passed, now)
            if int(model.minute.at // 60) != int(now // 60):
                model.close_minute(now)
        for name in [name for name, model in self._models.items() if now - model.seen > FORGET_S]:
            del self._models[name]

    def models(self) -> dict[str, ModelHistory]:
        return {name: ModelHistory(_with_open(model), list(model.hours)) for name, model in self._models.items()}

    def _by_model(self, readings: Iterable[Readings]) -> dict[str, list[_Sample]]:
        found: dict[str, list[_Sample]] = {}
        for family in needed(readings):
            for prefix, value in family.samples.items():
                series, labels, model = self._parsed.get(prefix) or self._parse(prefix)
                if series in _COUNTED or series in _GAUGES:
                    found.setdefault(model, []).append(_Sample(series, labels, value))
        return found

    def _parse(self, prefix: str) -> tuple[str, str, str]:
        """The name of a series, its labels as text, and the model among them."""
        if len(self._parsed) >= _MOST_PARSED:
            self._parsed.clear()
        series, brace, labels = prefix.partition("{")
        found = _MODEL.search(prefix)
        model = _ESCAPED.sub(lambda one: "\n" if one[1] == "n" else one[1], found[1]) if found is not None else ""
        self._parsed[prefix] = parsed = (series.rstrip(), brace + labels, model)
        return parsed


def _up(samples: Iterable[_Sample]) -> set[str]:
    return {sample.labels for sample in samples if sample.series == UP and sample.value}


def _with_open(model: _Model) -> list[LoadPoint]:
    """The minutes, with the present one as far as it has come."""
    points = list(model.minutes)
    if model.minute.seconds > 0:
        points.append(model.minute.point())
    return points


async def keep(history: LoadHistory, read: Callable[[], Iterable[Readings]]) -> None:
    """Records readings until cancelled."""
    while True:
        history.record(time.time(), read())
        await asyncio.sleep(SAMPLE_S)


def needed(readings: Iterable[Readings]) -> list[Readings]:
    """The families that a history reads."""
    return [family for family in readings if _name(family) in FAMILIES]


def _name(family: Readings) -> str:
    return family.head.split(" ", 3)[2]  # "# HELP name ..."
