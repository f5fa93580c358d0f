"""Settings of the response caches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from penstock.config.fields import setting

CacheUse = Literal["off", "asked", "on"]


@dataclass(frozen=True, slots=True)
class CacheConfig:
    """The response caches. A tenant only ever gets its own answers."""

    exact: CacheUse = setting(  # noqa: RUF009
        "off",
        doc="Caches identical requests. on: all deterministic ones (temperature 0, or a seed); asked: "
        "only with the header x-penstock-cache: exact.",
    )
    semantic: CacheUse = setting(  # noqa: RUF009
        "off",
        doc="Caches rephrased questions. on: as above; asked: only with the header x-penstock-cache: semantic.",
    )
    url: str = setting("", doc="redis://HOST:PORT of a cache that several gateways share; empty: in this process.")
    ttl_s: float = setting(3600.0, doc="Seconds after which a cached answer expires.", least=0.1)
    memory: int = setting(
        64 * 2**20, doc="Maximum size of the cache in this process (Redis has its own limit).", least=1024, size=True
    )
    threshold: float = setting(
        0.8, doc="Minimum cosine similarity at which two questions are compared by the verifier.", least=0.5, most=1
    )
    questions: int = setting(
        512, doc="Maximum of questions per tenant, model, system prompt, tools and parameters.", least=1, most=100_000
    )
    encoder: str = setting("", doc="Encoder of the semantic cache; empty: the first encoder.")
    lookup_s: float = setting(0.5, doc="Time limit of a semantic cache lookup, in seconds.", least=0.001)
