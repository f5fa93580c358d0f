"""Settings of the audit log."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.config.fields import setting


@dataclass(frozen=True, slots=True)
class AuditConfig:
    """The log of decisions by data rules: who, what, which rule, which outcome. Never text. It is in the store."""

    enabled: bool = setting(True, doc="Whether decisions are stored.")
    retention_days: float | None = setting(365.0, doc="Days that entries are kept; null: for ever.", least=0.01)
    max_entries: int = setting(
        1_000_000, doc="Maximum of entries; beyond it the oldest are deleted.", least=100, most=10**9
    )
