"""What generation needs to know of the configuration."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.gateway.accounting.batch_line import batch_line
from penstock.gateway.accounting.request_limits import RequestLimits, note_cap
from penstock.gateway.app.exchange import Exchange
from penstock.gateway.generation.choice import TIME_LIMIT
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
    request_limits: RequestLimits

    def time_limit(self, exchange: Exchange, model: str) -> float | None:
        """Seconds that a request may take. Lines of batches have a limit of their own."""
        if batch_line(exchange) is not None:
            return self.batch_time_limit_s
        cap = self.request_limits.cap(exchange.caller, "time_limit_s", model)
        if cap is None or (self.time_limit_s is not None and self.time_limit_s <= cap.value):
            return self.time_limit_s
        note_cap(exchange, cap, TIME_LIMIT)
        return cap.value

    def cache_salt(self, caller: Caller, asked: str | None = None) -> str:
        """Keeps tenants out of each other's cached prefixes; callers without a key share one salt. `asked`: of the
        request itself, which divides the prefixes of its tenant further."""
        own = "" if self.share_prefixes or not caller.key else caller.tenant
        return f"{own}\0{asked}" if asked else own
