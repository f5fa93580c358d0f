"""The condition of a query that selects by whatever its caller asks for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal


class Where:
    """Conditions that all hold, with the values of their placeholders: `f"... WHERE {where}", *where.values`."""

    def __init__(self, *parts: tuple[str, Any]) -> None:
        """Conditions with one placeholder each. One whose value is None was not asked for, and is left out."""
        self._conditions: list[str] = []
        self.values: list[Any] = []
        for condition, value in parts:
            if value is not None:
                self.add(condition, value)

    def add(self, condition: str, *values: Any) -> None:
        self._conditions.append(condition)
        self.values += values

    def one_of(self, column: str, values: Sequence[Any]) -> None:
        """No row has one of no values."""
        self.add(f"{column} IN ({', '.join('?' * len(values))})" if values else "1 = 0", *values)

    def beyond(self, created_at: float, id: str, order: Literal["ASC", "DESC"]) -> None:
        """Only what follows this row where rows are sorted by `created_at`, then `id`, in `order` (ASC or DESC)."""
        sign = ">" if order == "ASC" else "<"
        self.add(f"(created_at {sign} ? OR (created_at = ? AND id {sign} ?))", created_at, created_at, id)

    def __str__(self) -> str:
        return " AND ".join(self._conditions) or "1 = 1"
