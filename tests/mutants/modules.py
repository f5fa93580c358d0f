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
    Module("penstock/text/stop_strings.py", ("tests/text/test_stop_strings.py",)),
    Module("penstock/metering/prices.py", ("tests/metering/test_prices.py",)),
    Module("penstock/config/units.py", ("tests/config/test_units.py",)),
    Module("penstock/conversations/window.py", ("tests/conversations/test_window.py",)),
)

EARLIER = "only searches text that is known to hold no beginning"
TUNING = "a value that was chosen, not derived: one more or less is as good"
NEVER_NEGATIVE = "the other side of the maximum is never below zero here"

EQUIVALENT: dict[str, dict[str, str]] = {
    "penstock/limits/memory.py": {
        "_SWEEP = (4095)": TUNING,
        "_SWEEP = 4097": TUNING,
        "expires: float = (-1.0)": "set before it is read",
        "expires: float = 1.0": "set before it is read",
        "return Refusal(limit, max((-1.0), (step + 1) * limit.step_s + limit.window_s - now))": NEVER_NEGATIVE,
        "return max((-1.0), (max(window.steps) + 1) * limit.step_s + limit.window_s - now)": NEVER_NEGATIVE,
    },
    "penstock/gateway/accounting/quotas.py": {
        "left: float = (0.0)": "always given",
        "left: float = 2.0": "always given",
    },
    "penstock/text/stop_strings.py": {
        "if best is None or (candidate <= best):": "no two stop strings are equal",
        "position = text.find(stop[0], max(0, (len(text) - len(stop) - 1)))": EARLIER,
        "position = text.find(stop[0], max(0, len(text) - len(stop) + (0)))": EARLIER,
        "while (0 <= position <= first):": "what begins at `first` is known to be a beginning",
        "continue": "the condition of the loop ends it as well",
    },
}
"""By module: the changed line, and why no test can tell it from the original."""
