"""What generation needs to know of the configuration."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from penstock.gateway.accounting.batch_line import batch_line
from penstock.gateway.app.exchange import Exchange
from penstock.identity import Caller


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationSettings:
    body_limit: int
    max_tokens: int | None
    """Most completion tokens that a request may ask for; None: no limit."""
    default_max_tokens: int | None
    """For chat requests that name no limit; None: what fits the window."""
    max_choices: int
    """Most choices of one request, over all of its prompts."""
    time_limit_s: float | None
    """Of every request that is not a line of a batch."""
    batch_time_limit_s: float | None
    """The same for lines of batches."""
    engine_wait_s: float
    """How long a request waits for an engine that is not up."""
    hold_status_s: float
    """How long the status line of a stream waits for the first token."""
    keep_alive_s: float
    """A stream that is silent for this long sends a comment."""
    share_prefixes: bool
    request_templates: bool
    """Whether requests may bring a chat template."""
    record_text: bool
    """Whether prompts and answers are recorded."""
    tier_time_limits: Mapping[str, float] = field(default_factory=dict)
    """By the name of the tier."""

    def time_limit(self, exchange: Exchange) -> float | None:
        """Seconds that a request may take. Callers without a key have no tier of their own, and no limit of one."""
        if batch_line(exchange) is not None:
            return self.batch_time_limit_s
        of_tier = self.tier_time_limits.get(exchange.caller.tier) if exchange.caller.key else None
        limits = [limit for limit in (self.time_limit_s, of_tier) if limit is not None]
        return min(limits, default=None)

    def cache_salt(self, caller: Caller, asked: str | None = None) -> str:
        """Keeps tenants out of each other's cached prefixes; callers without a key share one salt. `asked`: of the
        request itself, which divides the prefixes of its tenant further."""
        own = "" if self.share_prefixes or not caller.key else caller.tenant
        return f"{own}\0{asked}" if asked else own
