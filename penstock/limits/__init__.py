"""How much a caller may use: sliding windows, concurrency and budgets, reserved at admission and settled at the end."""

from penstock.limits.base import Amounts, Decision, Limit, LimitState, LimitStore, Refusal

__all__ = ["Amounts", "Decision", "Limit", "LimitState", "LimitStore", "Refusal"]
