"""The steady state of one replica: latency and throughput at a rate of requests, and the most requests within an SLO.

Mean values, not a simulation. With n sequences decoding on average, a request spends `output` steps, each as long as
a decode step of n sequences, and waits while the prompts of later requests are computed in between:

    time in service R = output * decode_step(n) + n * prompt(n),  rate = n / R  (Little's law)

where prompt(n) is how much longer steps get by one prompt. This gives the rate for every n, and is inverted for a given
rate. In a pipeline as many steps are in flight as there are stages, each with an equal part of the sequences: a step is
as long as one of so many sequences, and all of them share the prompts. Arrivals are taken to be random (Poisson), so a
request sees one sequence more than the mean. Waiting is approximated by queues: one server for prompts (M/D/1), and one
server per slot (M/M/c, Sakasegawa's formula), where slots are what the KV cache and `max_running` allow; the 95th
percentile is that of a moment with as many sequences as one in twenty has. Not modelled: preemption, and lengths that
differ from their mean; `penstock simulate` has both. Beside it, the p95 of first tokens (8B on an H200, 2,000 and 500
tokens) is 10% too early at 38 and 76% of the largest rate, and 60% at 96%: there, plan with less or simulate.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import inf, log, sqrt

from penstock.errors import ConfigError
from penstock.planning.calibration import Calibration
from penstock.planning.deployment import Deployment
from penstock.planning.memory import memory_plan
from penstock.planning.step_time import StepTime, StepWork

_LATE = 0.05
"""One minus the percentile of `ttft_s`."""
_DEVIATIONS = 1.645
"""Standard deviations above the mean at that percentile."""


@dataclass(frozen=True, slots=True)
class RequestShape:
    """A mean request, in tokens."""

    prompt: float
    output: float
    cached: float = 0.0
    """Of the prompt, found in the prefix cache."""

    def __post_init__(self) -> None:
        if not self.prompt >= 1 or not self.output >= 1:
            raise ConfigError(
                f"a request has at least one prompt token and one output token, not {self.prompt:g} and {self.output:g}"
            )
        if not 0 <= self.cached <= self.prompt:
            raise ConfigError(
                f"cached prompt tokens must be between 0 and the {self.prompt:g} of a prompt, not {self.cached:g}"
            )

    @property
    def computed(self) -> float:
        """Prompt tokens that are computed; the last one always is."""
        return max(1.0, self.prompt - self.cached)

    @property
    def context(self) -> float:
        """Mean length of a sequence while it decodes."""
        return self.prompt + self.output / 2


@dataclass(frozen=True, slots=True)
class Slo:
    """What latency must not exceed; None: anything goes."""

    ttft_s: float | None = None
    """95th percentile of the time to the first token."""
    itl_s: float | None = None
    """Mean time between two tokens of a stream."""

    def __post_init__(self) -> None:
        for name, value in (("ttft_s", self.ttft_s), ("itl_s", self.itl_s)):
            if value is not None and not value > 0:
                raise ConfigError(f"the SLO's {name} must be greater than 0 seconds, not {value:g}")


@dataclass(frozen=True, slots=True)
class Steady:
    """One replica in its steady state."""

    requests_per_s: float
    concurrency: float
    """Mean number of sequences that run."""
    ttft_s: float
    """95th percentile; infinite where more arrive than the replica can serve: the other figures are those of a full
    replica then."""
    ttft_mean_s: float
    itl_s: float
    """Mean time per output token after the first."""
    gap_s: float
    """Time between two tokens while prompts are computed."""
    e2e_s: float
    """Mean time of a whole request."""
    output_tps: float
    input_tps: float
    """Prompt tokens per second, cached ones included."""
    prefill_share: float
    """Part of the time that goes to prompts."""
    kv_use: float
    """Mean part of the KV cache that running sequences hold."""
    utilisation: float
    """The rate over the largest that is stable."""
    slots: int
    """Most sequences that can run at once."""
    bottleneck: str
    """What most of the time goes to: `bandwidth`, `compute`, `links` or `overhead`; `memory` or `slots` (`max_running`)
    where larger batches would help and cannot be had."""
    limited_by: str = ""
    """Of `most_load`: what stops the rate: `ttft`, `itl`, or the bottleneck."""


class Replica:
    """The steady states of one deployment for one shape of requests, by how many sequences run on average."""

    def __init__(self, deployment: Deployment, calibration: Calibration, request: RequestShape) -> None:
        plan = memory_plan(deployment)
        if plan.problem is not None:
            raise ConfigError(plan.problem)
        if request.prompt + request.output > plan.longest:
            raise ConfigError(
                f"a request of {request.prompt + request.output:,.0f} tokens does not fit {deployment.label}, "
                f"which takes {plan.longest:,}; shorten it, raise max_model_len or take more memory"
            )
        self.request = request
        self.time = StepTime(deployment, calibration)
        self.budget = deployment.step_tokens
        self.in_flight = deployment.pipeline_parallel
        """Steps at the same time, between which sequences are divided."""
        self.room = max(1, plan.concurrency(round(request.context)))
        """Sequences of mean length that the KV cache holds."""
        self.slots = min(self.room, deployment.most_running)
        self.memory_bound = self.room < deployment.most_running
        self.most = self.rate(self.slots, self.slots)
        """The rate with every slot taken: the largest that is stable."""

    def rate(self, running: float, batch: float) -> float:
        """Requests per second with `running` sequences on average, in batches of `batch`; no more than have their
        prompts within the token budget."""
        longer, step, _ = self._prompt(batch)
        budget = self.in_flight * max(1.0, self.budget - batch / self.in_flight) / (self.request.computed * step)
        return min(budget, running / (self.request.output * self._decode(batch) + running * longer))

    def open(self, running: float) -> Steady:
        """Random arrivals that keep this many sequences running on average."""
        batch = min(running + 1, self.slots)
        return self._state(self.rate(running, batch), running, batch, queues=True)

    def at(self, requests_per_s: float) -> Steady:
        """Random arrivals at this rate."""
        if requests_per_s >= self.most:
            full = self._state(self.most, self.slots, self.slots, queues=False)
            utilisation = requests_per_s / self.most
            return replace(full, ttft_s=inf, ttft_mean_s=inf, e2e_s=inf, utilisation=utilisation)
        rare = 0.01  # so few sequences hardly ever meet: their number is proportional to the rate
        at_most = self.rate(rare, min(1 + rare, self.slots))
        if requests_per_s <= at_most:
            return self.open(rare * requests_per_s / at_most)
        return self.open(
            _largest(lambda running: self.rate(running, min(running + 1, self.slots)) <= requests_per_s, self.slots)
        )

    def closed(self, concurrency: int) -> Steady:
        """Always this many requests in flight; those without a slot wait."""
        running = min(concurrency, self.slots)
        state = self._state(self.rate(running, running), running, running, queues=False)
        waited = (concurrency - running) / state.requests_per_s
        return replace(
            state, ttft_s=state.ttft_s + waited, ttft_mean_s=state.ttft_mean_s + waited, e2e_s=state.e2e_s + waited
        )

    def _decode(self, batch: float) -> float:
        """A decode step; with speculation, the time per token."""
        batch /= self.in_flight
        return self.time.token_s(batch, batch * self.request.context)

    def _prompt(self, batch: float) -> tuple[float, float, float]:
        """By how much one prompt lengthens steps, all together; the length of a step with prompts; and how many such
        steps a prompt takes. Prompts share a step where they arrive faster than steps end."""
        request = self.request
        batch /= self.in_flight
        together = max(1.0, batch / request.output) * request.computed
        chunk = min(together, max(1.0, self.budget - batch))
        positions = chunk * (request.prompt - request.computed + (request.computed + 1) / 2)
        context = batch * request.context
        step = self.time.of(batch, context, chunk, positions, batch + chunk / request.computed)
        longer = (step - self.time.of(batch, context, 0, 0, batch)) * request.computed / chunk
        return longer / self.in_flight, step, max(1.0, request.computed / chunk)

    def _state(self, rate: float, running: float, batch: float, queues: bool) -> Steady:
        request = self.request
        longer, step, _ = self._prompt(batch)
        itl = self._decode(batch) + running * longer / request.output
        mean, late = self._first_token(rate, running, batch, queues)
        if queues:
            many = self._many(rate, running)
            crowd = min(many, self.slots)
            slots = _wait(running / self.slots, self.slots, request.output * itl)
            mean += slots[0]
            late = self._first_token(rate, crowd, max(batch, crowd), queues)[1]
            late += max(slots[1], (many - crowd) / self.most)
        return Steady(
            requests_per_s=rate,
            concurrency=running,
            ttft_s=late,
            ttft_mean_s=mean,
            itl_s=itl,
            gap_s=step,
            e2e_s=mean + (request.output - 1) * itl,
            output_tps=rate * request.output,
            input_tps=rate * request.prompt,
            prefill_share=min(1.0, rate * longer),
            kv_use=min(1.0, running / self.room),
            utilisation=rate / self.most,
            slots=self.slots,
            bottleneck=self._bottleneck(rate, running, batch, itl),
        )

    def _first_token(self, rate: float, running: float, batch: float, queues: bool) -> tuple[float, float]:
        """Mean and 95th percentile of the time from a slot to the first token."""
        longer, step, chunks = self._prompt(batch)
        decode, service = self._decode(batch), chunks * step
        share = batch / self.in_flight
        shared = max(1.0, share / self.request.output)
        busy = min(1.0, rate * service / shared / self.in_flight)
        # Prompts that come one at a time queue for steps; the more share a step, the more only its budget counts.
        fits = max(1.0, (self.budget - share) / self.request.computed)
        budget = min(busy, rate * (longer + decode / fits / self.in_flight))
        load = budget + (busy - budget) / shared
        # Who arrives waits for the step in progress: half of it on average, all of it at worst.
        ahead = busy * step + (1 - busy) * decode if running >= 1 else running * decode
        mean, late = _wait(load, 1, service / 2) if queues else (0.0, 0.0)
        return service + ahead / 2 + mean, service + ahead + late

    def _many(self, rate: float, running: float) -> float:
        """95th percentile of how many requests are there. Their number returns to its mean the more slowly, the less a
        larger batch gains: near saturation it swings widely (variance = rate / slope of the rate by the number)."""
        low, high = 0.98 * running, min(1.02 * running, self.slots)
        if high <= low:
            return running
        slope = (self.rate(high, min(high + 1, self.slots)) - self.rate(low, min(low + 1, self.slots))) / (high - low)
        return running + _DEVIATIONS * sqrt(rate / max(slope, 1e-3 * rate / running))

    def _bottleneck(self, rate: float, running: float, batch: float, itl: float) -> str:
        """What most of a mean step goes to; where all slots are taken while the device still has something to
        give by larger batches, what limits the slots."""
        request = self.request
        batch /= self.in_flight
        prefill = rate * itl * request.computed / self.in_flight
        positions = prefill * (request.prompt - request.computed + request.computed / 2)
        work = StepWork(round(batch), round(batch * request.context), round(prefill), round(positions), round(batch))
        shares = self.time.shares(work)
        largest = max(shares, key=lambda name: shares[name])
        if running > 0.9 * self.slots and largest != "compute":
            return "memory" if self.memory_bound else "slots"
        return largest


def steady(deployment: Deployment, calibration: Calibration, request: RequestShape, requests_per_s: float) -> Steady:
    """One replica at a rate of requests that arrive at random."""
    if not requests_per_s > 0:
        raise ConfigError(f"requests per second must be greater than 0, not {requests_per_s:g}")
    return Replica(deployment, calibration, request).at(requests_per_s)


def closed_loop(deployment: Deployment, calibration: Calibration, request: RequestShape, concurrency: int) -> Steady:
    """One replica with a fixed number of requests in flight."""
    if concurrency < 1:
        raise ConfigError(f"concurrency must be at least 1, not {concurrency}")
    return Replica(deployment, calibration, request).closed(concurrency)


def most_load(deployment: Deployment, calibration: Calibration, request: RequestShape, slo: Slo) -> Steady:
    """The largest rate that keeps the SLO. A rate of 0 means that even a request alone misses it: `limited_by` says
    which objective, and the latencies are those of that request."""
    replica = Replica(deployment, calibration, request)
    if slo.ttft_s is None and slo.itl_s is None:
        full = replica.closed(replica.slots)
        return replace(full, limited_by=full.bottleneck)
    alone = replica.open(replica.slots * 1e-6)
    missed = _missed(alone, slo)
    if missed is not None:
        return replace(
            alone, requests_per_s=0.0, concurrency=0.0, output_tps=0.0, input_tps=0.0, prefill_share=0.0, kv_use=0.0,
            utilisation=0.0, limited_by=missed,
        )  # fmt: skip
    running = _largest(lambda running: _missed(replica.open(running), slo) is None, replica.slots)
    state = replica.open(running)
    over = _missed(replica.open(min(running * 1.01, replica.slots)), slo)
    # Waiting for a slot is what makes a first token late where slots, not prompts, are the scarce thing.
    late_for_slots = over == "ttft" and state.bottleneck in ("memory", "slots")
    return replace(state, limited_by=state.bottleneck if over is None or late_for_slots else over)


def _missed(state: Steady, slo: Slo) -> str | None:
    if slo.itl_s is not None and state.itl_s > slo.itl_s:
        return "itl"
    if slo.ttft_s is not None and state.ttft_s > slo.ttft_s:
        return "ttft"
    return None


def _wait(load: float, servers: int, service: float) -> tuple[float, float]:
    """Mean and 95th percentile of waiting for one of the servers."""
    if load >= 1:
        return inf, inf
    waits = load ** (sqrt(2 * (servers + 1)) - 1)
    mean_if_any = service / (servers * (1 - load))
    return waits * mean_if_any, max(0.0, log(waits / _LATE)) * mean_if_any if waits > 0 else 0.0


def _largest(holds: Callable[[float], bool], most: float) -> float:
    """The largest value up to `most` at which `holds` is still true; it is at 0 and changes once."""
    if holds(most):
        return most
    low, high = 0.0, most
    for _ in range(26):
        middle = (low + high) / 2
        if holds(middle):
            low = middle
        else:
            high = middle
    return low
