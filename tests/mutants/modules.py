"""Which modules get faults, which tests must notice them, and which faults change nothing."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Module:
    path: str
    tests: tuple[str, ...]

    @property
    def name(self) -> str:
        return self.path.removesuffix(".py").replace("/", ".")


MODULES = (
    Module("penstock/limits/memory.py", ("tests/limits/test_memory.py",)),
    Module("penstock/gateway/accounting/quotas.py", ("tests/gateway/accounting/test_quota_rules.py",)),
    Module("penstock/routing/admission/decision.py", ("tests/routing/admission/test_decision.py",)),
    Module("penstock/routing/admission/prefix_sketch.py", ("tests/routing/admission/test_prefix_sketch.py",)),
    Module("penstock/routing/breaker.py", ("tests/routing/test_breaker.py",)),
    Module("penstock/routing/retry_budget.py", ("tests/routing/test_breaker.py",)),
    Module("penstock/routing/rate.py", ("tests/routing/test_rate.py",)),
    Module("penstock/routing/policies.py", ("tests/routing/test_policies.py",)),
    Module("penstock/routing/time_slice.py", ("tests/routing/test_time_slice.py",)),
    Module("penstock/engine/kv/allocator.py", ("tests/engine/kv/test_allocator.py",)),
    Module("penstock/engine/kv/pool.py", ("tests/engine/kv/test_pool.py",)),
    Module("penstock/engine/kv/host.py", ("tests/engine/kv/test_host.py",)),
    Module("penstock/engine/scheduler.py", ("tests/engine/test_scheduler.py",)),
    Module("penstock/engine/roster.py", ("tests/engine/test_scheduler.py",)),
    Module("penstock/engine/turns.py", ("tests/engine/test_turns.py",)),
    Module("penstock/text/stop_strings.py", ("tests/text/test_stop_strings.py",)),
    Module("penstock/metering/prices.py", ("tests/metering/test_prices.py",)),
    Module("penstock/config/units.py", ("tests/config/test_units.py",)),
    Module("penstock/knowledge/filters.py", ("tests/knowledge/test_filters.py",)),
    Module("penstock/conversations/window.py", ("tests/conversations/test_window.py",)),
    Module(
        "penstock/planning/shape.py", ("tests/planning/test_shape_arithmetic.py", "tests/planning/test_model_shape.py")
    ),
    Module(
        "penstock/planning/token_mixers.py",
        ("tests/planning/test_shape_arithmetic.py", "tests/planning/test_model_shape.py"),
    ),
    Module(
        "penstock/planning/memory.py", ("tests/planning/test_memory_arithmetic.py", "tests/planning/test_memory.py")
    ),
    Module(
        "penstock/planning/graphs.py", ("tests/planning/test_memory_arithmetic.py", "tests/planning/test_memory.py")
    ),
    Module(
        "penstock/planning/deployment.py",
        ("tests/planning/test_deployment_arithmetic.py", "tests/planning/test_deployment.py"),
    ),
    Module(
        "penstock/planning/step_time.py",
        ("tests/planning/test_step_time_arithmetic.py", "tests/planning/test_step_time.py"),
    ),
    Module(
        "penstock/planning/capacity.py",
        ("tests/planning/test_capacity_arithmetic.py", "tests/planning/test_capacity.py"),
    ),
    Module("penstock/planning/workload.py", ("tests/planning/test_workload.py",)),
    Module("penstock/planning/money.py", ("tests/planning/test_money.py",)),
    Module(
        "penstock/planning/autoscaling.py",
        ("tests/planning/test_autoscaling_arithmetic.py", "tests/planning/test_autoscaling.py"),
    ),
    Module("penstock/planning/provision.py", ("tests/planning/test_provision.py",)),
    Module("penstock/planning/trend.py", ("tests/planning/test_trend_arithmetic.py", "tests/planning/test_trend.py")),
    Module(
        "penstock/planning/headroom.py",
        ("tests/planning/test_headroom_arithmetic.py", "tests/planning/test_headroom.py"),
    ),
)

EARLIER = "searches from where no beginning can be, and finds none there"
TUNING = "a value that was chosen, not derived: one more or less is as good"
NEVER_NEGATIVE = "the other side of the maximum is never below zero"
UNUSED = "always given, or set before it is read"
ONE_BY_ONE = "only whether it takes the short way; one by one gives the same"
DEVIATIONS = "the other factor is a deviation from a mean: a constant beside it sums to nothing"
ONE_POINT = "differs at a single point of a continuous range"
ORDER = "only that these numbers differ, and their order, counts"
_TREND_ROWS = (
    "rows = [(factor, sample.at - origin, sample.value) for factor, sample in zip(factors, samples, strict={})]"
)

EQUIVALENT: dict[str, dict[tuple[str, str], str]] = {
    "penstock/limits/memory.py": {
        ("_SWEEP = 4096", "_SWEEP = (4095)"): TUNING,
        ("_SWEEP = 4096", "_SWEEP = 4097"): TUNING,
        ("expires: float = 0.0", "expires: float = (-1.0)"): UNUSED,
        ("expires: float = 0.0", "expires: float = 1.0"): UNUSED,
        (
            "return Refusal(limit, max(0.0, (step + 1) * limit.step_s + limit.window_s - now))",
            "return Refusal(limit, max((-1.0), (step + 1) * limit.step_s + limit.window_s - now))",
        ): NEVER_NEGATIVE,
        (
            "return max(0.0, (max(window.steps) + 1) * limit.step_s + limit.window_s - now)",
            "return max((-1.0), (max(window.steps) + 1) * limit.step_s + limit.window_s - now)",
        ): NEVER_NEGATIVE,
        ("return Refusal(limit, limit.window_s)", "return None"): "never reached: all steps together free enough",
    },
    "penstock/gateway/accounting/quotas.py": {
        ("left: float = 1.0", "left: float = (0.0)"): UNUSED,
        ("left: float = 1.0", "left: float = 2.0"): UNUSED,
        (
            "for limit in self.limits_of(exchange, FixedWork(ModelName(model), 1))",
            "for limit in self.limits_of(exchange, FixedWork(ModelName(model), 2))",
        ): "which limits apply does not depend on the length",
        (
            "for limit in self.limits_of(exchange, FixedWork(ModelName(model), 1))",
            "for limit in self.limits_of(exchange, FixedWork(ModelName(model), (0)))",
        ): "which limits apply does not depend on the length",
    },
    "penstock/routing/admission/prefix_sketch.py": {
        ("MOST = 65_536", "MOST = 65537"): TUNING,
        ("MOST = 65_536", "MOST = (65535)"): TUNING,
        ("break", "continue"): "the lengths after it are longer still",
    },
    "penstock/routing/policies.py": {
        ("if len(allowed) > 1:", "if (len(allowed) >= 1):"): "the best of one is that one",
    },
    "penstock/routing/rate.py": {
        (
            "def __init__(self, fade_s: float = FADE_S, kinds: int = 1) -> None:",
            "def __init__(self, fade_s: float = FADE_S, kinds: int = 2) -> None:",
        ): "a kind that nobody counts stays empty",
        (
            "self.add(now, work * -math.expm1(-passed) / passed if passed > 1e-9 else work)",
            "self.add(now, work * -math.expm1(-passed) / passed if (passed >= 1e-09) else work)",
        ): "there, both formulas give the same",
        (
            "if self._seconds < SETTLED_S or not any(self._work):",
            "if (self._seconds <= SETTLED_S) or not any(self._work):",
        ): "a sum of exponentials is never exactly that",
        (
            "if self._busy_since is None or now <= self._busy_since:",
            "if self._busy_since is None or (now < self._busy_since):",
        ): "no time has passed: nothing fades",
    },
    "penstock/routing/time_slice.py": {
        ("self._until = 0.0", "self._until = (-1.0)"): UNUSED,
        ("self._until = 0.0", "self._until = 1.0"): UNUSED,
        ("self._serial += 1", "self._serial += 2"): ORDER,
        ("self._serial = 0", "self._serial = (-1)"): ORDER,
        ("self._serial = 0", "self._serial = 1"): ORDER,
        (
            "return min(self._waiting.values(), key=lambda entry: entry[1], default=(None, 0.0))[0]",
            "return min(self._waiting.values(), key=lambda entry: entry[1], default=(None, (-1.0)))[0]",
        ): UNUSED,
        (
            "return min(self._waiting.values(), key=lambda entry: entry[1], default=(None, 0.0))[0]",
            "return min(self._waiting.values(), key=lambda entry: entry[1], default=(None, 1.0))[0]",
        ): UNUSED,
    },
    "penstock/engine/kv/allocator.py": {
        (
            "return unread + [hit for hit in hits[first:best] if hit is not None]",
            "return unread + [hit for hit in hits[first:best + 1] if hit is not None]",
        ): "were there a hit behind the best prefix, that prefix would be longer",
    },
    "penstock/engine/kv/pool.py": {
        (
            "held = {b for b in range(1, given) if self._references[b] > 0}",
            "held = {b for b in range((0), given) if self._references[b] > 0}",
        ): "that nobody holds the first block is checked as well",
        (
            "if not self._empty and first + count <= self.num_blocks:",
            "if not self._empty and (first + count < self.num_blocks):",
        ): ONE_BY_ONE,
        (
            "or count > len(self._cached)",
            "or (count >= len(self._cached))",
        ): ONE_BY_ONE,
    },
    "penstock/engine/kv/host.py": {
        ("self.now = 0.0", "self.now = (-1.0)"): UNUSED,
        ("self.now = 0.0", "self.now = 1.0"): UNUSED,
    },
    "penstock/engine/scheduler.py": {
        ("AGEING_S = 30.0", "AGEING_S = (29.0)"): TUNING,
        ("AGEING_S = 30.0", "AGEING_S = 31.0"): TUNING,
    },
    "penstock/engine/turns.py": {
        ("LEAST_SHARE, LEAST_BESIDE_DECODES = 128, 32", "LEAST_SHARE, LEAST_BESIDE_DECODES = (127), 32"): TUNING,
        ("LEAST_SHARE, LEAST_BESIDE_DECODES = 128, 32", "LEAST_SHARE, LEAST_BESIDE_DECODES = 129, 32"): TUNING,
        ("LEAST_SHARE, LEAST_BESIDE_DECODES = 128, 32", "LEAST_SHARE, LEAST_BESIDE_DECODES = 128, (31)"): TUNING,
        ("LEAST_SHARE, LEAST_BESIDE_DECODES = 128, 32", "LEAST_SHARE, LEAST_BESIDE_DECODES = 128, 33"): TUNING,
    },
    "penstock/engine/roster.py": {
        ("self._arrivals = 0", "self._arrivals = (-1)"): ORDER,
        ("self._arrivals = 0", "self._arrivals = 1"): ORDER,
        ("SLACK = 32", "SLACK = 33"): TUNING,
        ("SLACK = 32", "SLACK = (31)"): TUNING,
    },
    "penstock/planning/workload.py": {
        ('Curve.of("flat", [1] * HOURS),', 'Curve.of("flat", [2] * HOURS),'): "loads in any unit",
        (
            "if self.peak_factor < self.curve.peak - 1e-9:",
            "if (self.peak_factor <= self.curve.peak - 1e-09):",
        ): ONE_POINT,
    },
    "penstock/planning/money.py": {
        (
            "for kind, bought in zip(PRICE_KINDS, hours, strict=True):",
            "for kind, bought in zip(PRICE_KINDS, hours, strict=False):",
        ): "both have three",
        (
            "egress=sent / 1e9 * overheads.egress_per_gb,",
            "egress=sent / 1000000001.0 * overheads.egress_per_gb,",
        ): "a billionth of an estimate",
        (
            "grid = [10 ** (step / _STEPS_PER_DECADE) for step in range(decades * _STEPS_PER_DECADE + 1)]",
            "grid = [10 ** (step / _STEPS_PER_DECADE) for step in range((decades * _STEPS_PER_DECADE - 1))]",
        ): TUNING,
        (
            "low, high = grid[above[-1]], grid[above[-1] + 1]",
            "low, high = grid[above[-2]], grid[above[-1] + 1]",
        ): "begins the search a little lower",
        **{
            (
                "grid = [10 ** (step / _STEPS_PER_DECADE) for step in range(decades * _STEPS_PER_DECADE + 1)]",
                f"grid = [10 ** (step / _STEPS_PER_DECADE) for step in range(decades * _STEPS_PER_DECADE + {more})]",
            ): TUNING
            for more in ("2", "(0)")
        },
        **{
            ("dollars += bought * (price or 0.0)", f"dollars += bought * (price or {other})"): "then none was bought"
            for other in ("1.0", "(-1.0)")
        },
        (
            "egress=sent / 1e9 * overheads.egress_per_gb,",
            "egress=sent / (999999999.0) * overheads.egress_per_gb,",
        ): "a billionth of an estimate",
        ("_MOST_REQUESTS = 1e10", "_MOST_REQUESTS = (9999999999.0)"): TUNING,
        ("_MOST_REQUESTS = 1e10", "_MOST_REQUESTS = 10000000001.0"): TUNING,
        ("_STEPS_PER_DECADE = 40", "_STEPS_PER_DECADE = 41"): TUNING,
        ("_STEPS_PER_DECADE = 40", "_STEPS_PER_DECADE = (39)"): TUNING,
        ("while high - low > 1e-9 * high:", "while (high - low >= 1e-09 * high):"): ONE_POINT,
    },
    "penstock/conversations/window.py": {
        (
            "found = _first(start + 1, kept, lambda s: count(s) <= min(target, budget))",
            "found = _first(start + (0), kept, lambda s: count(s) <= min(target, budget))",
        ): "what does not fit the budget is not found",
    },
    "penstock/planning/capacity.py": {
        ("for _ in range(26):", "for _ in range(27):"): TUNING,
        ("for _ in range(26):", "for _ in range((25)):"): TUNING,
        (
            "if requests_per_s >= self.most:",
            "if (requests_per_s > self.most):",
        ): "at that rate, all slots are found to be taken, and the wait for one is infinite",
        (
            "full = self._state(self.most, self.slots, self.slots, queues=False)",
            "full = self._state(self.most, self.slots, self.slots, queues=True)",
        ): "what queues change is replaced below",
        (
            "_largest(lambda running: self.rate(running, min(running + 1, self.slots)) <= requests_per_s, self.slots)",
            "_largest(lambda running: (self.rate(running, min(running + 1, self.slots)) < requests_per_s), self.slots)",
        ): ONE_POINT,
        (
            "prefill_share=min(1.0, rate * longer),",
            "prefill_share=min(2.0, rate * longer),",
        ): "rounding apart, prompts never take longer than there is time",
        ("kv_use=min(1.0, running / self.room),", "kv_use=min(2.0, running / self.room),"): "no more run than fit",
    },
    "penstock/planning/headroom.py": {
        (
            "if speed.slowing >= speed.error and speed.slowing * sequences > COMPUTE_SHARE / (1 - COMPUTE_SHARE):",
            "if (speed.slowing > speed.error) and speed.slowing * sequences > COMPUTE_SHARE / (1 - COMPUTE_SHARE):",
        ): ONE_POINT,
        (
            "if speed.slowing >= speed.error and speed.slowing * sequences > COMPUTE_SHARE / (1 - COMPUTE_SHARE):",
            "if speed.slowing >= speed.error and (speed.slowing * sequences >= COMPUTE_SHARE / (1 - COMPUTE_SHARE)):",
        ): ONE_POINT,
        (
            "for rate, point in zip(rates, busy, strict=True)",
            "for rate, point in zip(rates, busy, strict=False)",
        ): "both are as long as `busy`",
        (
            "held = load.kv_use * size.kv_tokens * load.replicas / load.running if load.running > 0 else 0.0",
            "held = load.kv_use * size.kv_tokens * load.replicas / load.running if load.running > 0 else (-1.0)",
        ): "only whether it is above zero counts",
        (
            "rows = list(zip(rates, speeds, weights, strict=True))",
            "rows = list(zip(rates, speeds, weights, strict=False))",
        ): "one of each for every minute",
        (
            "if len(rows) < LEAST_MINUTES or math.sqrt(across / total) < LEAST_SPREAD * rate:",
            "if len(rows) < LEAST_MINUTES or (math.sqrt(across / total) <= LEAST_SPREAD * rate):",
        ): ONE_POINT,
        (
            "return _Speed(rate, speed, 0.0, math.inf)",
            "return _Speed(rate, speed, 1.0, math.inf)",
        ): "no slowing counts where its error is infinite",
        (
            "slope = sum(weight * (x - rate) * (y - speed) for x, y, weight in rows) / across",
            "slope = sum(weight * ((x + rate)) * (y - speed) for x, y, weight in rows) / across",
        ): DEVIATIONS,
        (
            "slope = sum(weight * (x - rate) * (y - speed) for x, y, weight in rows) / across",
            "slope = sum(weight * (x - rate) * ((y + speed)) for x, y, weight in rows) / across",
        ): DEVIATIONS,
        **{
            (
                "utilisation=demand / most.likely if most.likely else 0.0,",
                f"utilisation=demand / most.likely if most.likely else {other},",
            ): "a capacity is never below what was seen"
            for other in ("1.0", "(-1.0)")
        },
    },
    "penstock/planning/autoscaling.py": {
        ("self._demand_at = 0.0", "self._demand_at = 1.0"): UNUSED,
        ("self._demand_at = 0.0", "self._demand_at = (-1.0)"): UNUSED,
        ("spot: int = 0", "spot: int = 1"): UNUSED,
        ("spot: int = 0", "spot: int = (-1)"): UNUSED,
        **{
            (f"{name}: int = 0", f"{name}: int = {other}"): UNUSED
            for name in ("rate", "forecast", "busy", "wait", "kv")
            for other in ("1", "(-1)")
        },
    },
    "penstock/planning/trend.py": {
        (
            "return max(ahead, 0.0) if ahead <= trend.horizon_s else None",
            "return max(ahead, (-1.0)) if ahead <= trend.horizon_s else None",
        ): NEVER_NEGATIVE,
        **{
            (
                "freedom = max((len(rest) - parameters) * (1 - alike) / (1 + alike), 1.0)",
                f"freedom = max((len(rest) - parameters) * (1 - alike) / (1 + alike), {other})",
            ): "fewer than three degrees count as three"
            for other in ("2.0", "(0.0)")
        },
        (
            _TREND_ROWS.format("True"),
            _TREND_ROWS.format("False"),
        ): "a factor for every sample",
    },
    "penstock/text/stop_strings.py": {
        ("if best is None or candidate < best:", "if best is None or (candidate <= best):"): "no two stops are equal",
        (
            "position = text.find(stop[0], max(0, len(text) - len(stop) + 1))",
            "position = text.find(stop[0], max(0, (len(text) - len(stop) - 1)))",
        ): EARLIER,
        (
            "position = text.find(stop[0], max(0, len(text) - len(stop) + 1))",
            "position = text.find(stop[0], max(0, len(text) - len(stop) + (0)))",
        ): EARLIER,
        ("while 0 <= position < first:", "while (0 <= position <= first):"): "at `first` the same is found again",
        ("break", "continue"): "the condition of the loop ends it as well",
    },
}
"""By module: a line, what it becomes, and why no test can tell the two apart."""
