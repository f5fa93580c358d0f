"""Settings of the response caches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from penstock.config.fields import setting

CacheUse = Literal["off", "asked", "on"]


@dataclass(frozen=True, slots=True)
class CacheConfig:
    """Answers that are given again instead of computed. A tenant only ever gets its own."""

    exact: CacheUse = setting(  # noqa: RUF009
        "off",
        doc="The same request again. on: every one whose answer is always the same (temperature 0, or a seed); asked: "
        "only with the header x-penstock-cache: exact.",
    )
    semantic: CacheUse = setting(  # noqa: RUF009
        "off",
        doc="The same question in other words. on: as above; asked: only with the header x-penstock-cache: semantic.",
    )
    url: str = setting("", doc="redis://HOST:PORT, when several gateways share answers; this process when empty.")
    ttl_s: float = setting(3600.0, doc="Seconds after which an answer is forgotten.", least=0.1)
    memory: int = setting(
        64 * 2**20, doc="Most bytes of answers in this process (Redis has a limit of its own).", least=1024, size=True
    )
    threshold: float = setting(
        0.8, doc="Least cosine of two questions that the verifier is asked about.", least=0.5, most=1
    )
    questions: int = setting(
        512, doc="Questions kept per tenant, model, system prompt, tools and parameters.", least=1, most=100_000
    )
    encoder: str = setting("", doc="The encoder of the semantic cache; the first one when empty.")
    lookup_s: float = setting(0.5, doc="Seconds that a lookup in the semantic cache may take.", least=0.001)
