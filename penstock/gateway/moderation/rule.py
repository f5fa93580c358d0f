"""A guardrail that asks a moderator about texts: a bounded number at a time, each with a time limit.

Invariant: every character of a text is checked before the text passes, or the check failed and the rule lets failures
pass. Digests of texts found harmless are cached per tenant, so that the time of an answer does not reveal what other
tenants have asked.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from time import monotonic
from typing import Literal

from penstock.config.guardrails import GuardrailConfig
from penstock.gateway.app.exchange import Exchange
from penstock.gateway.moderation.moderators import FAILURES, Moderator
from penstock.identity.labels import Demand, Requirement
from penstock.telemetry.metrics import Metrics

log = logging.getLogger(__name__)

PART = 4000
"""Characters that are checked together."""
OVERLAP = 200
"""Characters that neighbouring parts share, so that nothing is missed across their border."""
AT_ONCE = 4
"""Parts of one request that are checked at the same time."""
CACHED_PARTS = 4096
"""Parts found harmless: the turns of a conversation, which every request repeats, are checked once."""

FAILED_S = 10.0

Stage = Literal["input", "output"]
Verdict = Literal["passed", "flagged", "failed"]


class ModerationRule:
    """A guardrail of the kind `model`."""

    def __init__(self, config: GuardrailConfig, moderator: Moderator, metrics: Metrics) -> None:
        self.config = config
        self._moderator = moderator
        self._metrics = metrics
        self._slots = asyncio.Semaphore(config.concurrency)
        self._harmless: OrderedDict[bytes, None] = OrderedDict()
        self._failed_at: float | None = None
        """When its moderator failed, unless it has worked since."""

    async def close(self) -> None:
        await self._moderator.close()

    def unmet(self, demand: Demand) -> list[Requirement]:
        """What of a demand its moderator does not meet."""
        return self._moderator.unmet(demand)

    @property
    def refuses_all(self) -> bool:
        """Whether the rule refuses every request because its moderator failed. It is believed to work again after
        `FAILED_S`, because only requests can tell."""
        config = self.config
        if config.on_error != "refuse" or config.stage == "output" or config.tenants or config.tiers:
            return False
        return self._failed_at is not None and monotonic() - self._failed_at < FAILED_S

    async def probability(self, exchange: Exchange, text: str) -> float:
        """That `text` breaks the rule; raises one of `FAILURES` when its moderator fails."""
        found = 0.0
        for part in parts_of(text):
            began = monotonic()
            verdict: Verdict = "failed"
            try:
                async with asyncio.timeout(self.config.timeout_s), self._slots:
                    score = await self._moderator.probability(exchange, part)
                verdict = "flagged" if score >= self.threshold else "passed"
                found = max(found, score)
            finally:
                self._metrics.context.moderated(self.config.name, "request", verdict, monotonic() - began)
        return found

    @property
    def threshold(self) -> float:
        """The probability from which a text is refused."""
        return self._moderator.threshold

    async def verdict(self, exchange: Exchange, texts: Iterable[str], stage: Stage) -> Verdict:
        """The verdict on all texts together; `failed` only where failures do not pass."""
        parts = [part for text in texts for part in parts_of(text)]
        for start in range(0, len(parts), AT_ONCE):
            asked = (self._part(exchange, part, stage) for part in parts[start : start + AT_ONCE])
            said = await asyncio.gather(*asked)
            verdict: Verdict = "flagged" if "flagged" in said else "failed" if "failed" in said else "passed"
            if verdict == "flagged" or (verdict == "failed" and self.config.on_error == "refuse"):
                self._metrics.guardrail(self.config.name, stage, "refuse")
                return verdict
        return "passed"

    def unchecked(self, stage: Stage) -> Verdict:
        """The verdict on texts that the moderator must not see."""
        refused = self.config.on_error == "refuse"
        self._metrics.context.moderated(self.config.name, stage, "failed", 0.0)
        if refused:
            self._metrics.guardrail(self.config.name, stage, "refuse")
            log.warning("guardrail %r is refused to a caller who may not use its model", self.config.name)
        return "failed" if refused else "passed"

    async def _part(self, exchange: Exchange, part: str, stage: Stage) -> Verdict:
        said = f"{exchange.caller.tenant}\0{part}".encode("utf-8", "surrogatepass")
        digest = hashlib.blake2b(said, digest_size=16).digest()
        if digest in self._harmless:
            self._harmless.move_to_end(digest)
            return "passed"
        began = monotonic()
        verdict: Verdict = "failed"
        try:
            async with asyncio.timeout(self.config.timeout_s), self._slots:
                found = await self._moderator.probability(exchange, part)
            verdict = "flagged" if found >= self._moderator.threshold else "passed"
            self._failed_at = None
        except FAILURES as error:  # its message may quote the text, so only its type is logged
            log.warning("guardrail %r could not ask its model: %s", self.config.name, type(error).__name__)
            self._failed_at = monotonic()
        self._metrics.context.moderated(self.config.name, stage, verdict, monotonic() - began)
        if verdict == "passed":
            self._harmless[digest] = None
            if len(self._harmless) > CACHED_PARTS:
                self._harmless.popitem(last=False)
        return verdict


def parts_of(text: str) -> Iterator[str]:
    """All of `text`, in parts that overlap; nothing for blank text."""
    if text.strip():
        for start in range(0, max(len(text) - OVERLAP, 1), PART - OVERLAP):
            yield text[start : start + PART]
