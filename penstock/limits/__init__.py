"""Rate limits, concurrency limits and budgets of callers: reserved at admission, settled when the request ends."""

from penstock.limits.base import Amounts, Decision, Limit, LimitState, LimitStore, Refusal

__all__ = ["Amounts", "Decision", "Limit", "LimitState", "LimitStore", "Refusal"]
