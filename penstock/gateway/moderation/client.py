"""A guardrail that asks: texts are shown to a moderation model, a bounded number at a time, each within its time.

Invariant: every character of a text is looked at before the text passes, or asking failed and the rule lets failures
pass. Of texts found harmless digests are remembered, per tenant, so that nobody can tell from the time an answer takes
what others have asked.
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
from penstock.gateway.moderation.models import FAILURES, Moderator
from penstock.telemetry.metrics import Metrics

log = logging.getLogger(__name__)

PART = 4000
"""Characters that are looked at together."""
OVERLAP = 200
"""Characters of a part that the next one begins with, so that nothing is said across a border unseen."""
AT_ONCE = 4
"""Questions of one request that are asked at the same time."""
REMEMBERED = 4096
"""Parts found harmless: the turns of a conversation that come again with every request are asked about once."""

Stage = Literal["input", "output"]
Verdict = Literal["passed", "flagged", "failed"]


class Moderation:
    """One rule."""

    def __init__(self, config: GuardrailConfig, moderator: Moderator, metrics: Metrics) -> None:
        self.config = config
        self._moderator = moderator
        self._metrics = metrics
        self._slots = asyncio.Semaphore(config.concurrency)
        self._harmless: OrderedDict[bytes, None] = OrderedDict()

    async def close(self) -> None:
        await self._moderator.close()

    async def verdict(self, exchange: Exchange, texts: Iterable[str], stage: Stage) -> Verdict:
        """On all texts together; `failed` only where failures do not pass."""
        parts = [part for text in texts for part in parts_of(text)]
        for start in range(0, len(parts), AT_ONCE):
            asked = (self._part(exchange, part, stage) for part in parts[start : start + AT_ONCE])
            said = await asyncio.gather(*asked)
            verdict: Verdict = "flagged" if "flagged" in said else "failed" if "failed" in said else "passed"
            if verdict == "flagged" or (verdict == "failed" and self.config.on_error == "refuse"):
                self._metrics.guardrail(self.config.name, stage, "refuse")
                return verdict
        return "passed"

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
        except FAILURES as error:  # its words may quote the text: they are not logged
            log.warning("guardrail %r could not ask its model: %s", self.config.name, type(error).__name__)
        self._metrics.context.moderated(self.config.name, stage, verdict, monotonic() - began)
        if verdict == "passed":
            self._harmless[digest] = None
            if len(self._harmless) > REMEMBERED:
                self._harmless.popitem(last=False)
        return verdict


def parts_of(text: str) -> Iterator[str]:
    """All of `text`, in parts that overlap; none of a text that says nothing."""
    if text.strip():
        for start in range(0, max(len(text) - OVERLAP, 1), PART - OVERLAP):
            yield text[start : start + PART]
