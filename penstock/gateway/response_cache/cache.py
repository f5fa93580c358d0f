"""The response cache in front of generation: what may be looked up, under which key, and what is cached afterwards.

There are two: the exact cache finds equal requests, the semantic cache similar ones. Invariants: a key and a partition
hold everything that decides an answer (tenant, model, adapter, prompt or context, parameters, form), so nothing crosses
from one tenant or setting to another; a lookup never fails a request, and waits for the encoder no longer than
`cache.lookup_s`.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections import deque
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol, cast

import msgspec

from penstock.caching.semantic import Embeds, SearchResult, SemanticIndex
from penstock.caching.store import NOTES, AnswerStore, CacheKey, MemoryStore
from penstock.config.cache import CacheConfig
from penstock.gateway.app.data_rules import withheld
from penstock.gateway.app.exchange import Exchange
from penstock.gateway.generation.base import Generation
from penstock.gateway.generation.schemas import ChatRequest
from penstock.gateway.generation.spec import CacheFacts, CacheQuestion
from penstock.identity.labels import Demand, Requirement
from penstock.protocol.errors import ApiError, InvalidRequest
from penstock.telemetry.cache_metrics import CacheMetrics

log = logging.getLogger(__name__)

HEADER = b"x-penstock-cache"
LONGEST_QUESTION = 1000
"""Characters: about what an encoder reads, and what can be compared in no time."""
MOST_UNINDEXED = 256
CacheMode = Literal["off", "refresh", "exact", "semantic"]
_MODES = ("off", "refresh", "exact", "semantic")
_encode = msgspec.msgpack.Encoder().encode


class QuestionEncoder(Embeds, Protocol):
    """An encoder, here or elsewhere, that compares questions."""

    @property
    def name(self) -> str: ...

    @property
    def up(self) -> bool: ...

    def unmet(self, demand: Demand) -> list[Requirement]:
        """What of a demand it does not meet; empty: it may get the request's texts."""

    async def open(self) -> object:
        """Starts it, if that is needed."""


@dataclass(slots=True)
class ResponseCacheLookup:
    """How one request uses the cache."""

    cache: ResponseCache
    generation: Generation
    question: CacheQuestion | None
    key: CacheKey
    exact: bool
    partition: CacheKey | None
    """Where the semantic cache looks; None: it does not."""
    read: bool
    """Whether a cached answer may be given; otherwise it is replaced."""
    found: Literal["exact", "semantic", "miss"] = "miss"
    search: SearchResult = field(default_factory=SearchResult)
    match: CacheKey | None = None
    """Of a semantic hit: the answer that was given."""

    async def store(self, response_id: str) -> None:
        await self.cache.store_answer(self, response_id)


class ResponseCacheOff:
    """A gateway without a response cache."""

    def question(self, request: ChatRequest, messages: list[dict[str, Any]]) -> None:
        return None

    def check(self, exchange: Exchange) -> None:
        cache_mode(exchange, _OFF)

    async def look_up(self, exchange: Exchange, generation: Generation) -> None:
        cache_mode(exchange, _OFF)

    async def suspect(self, tenant: str, response_id: str) -> bool:
        return False

    async def evict(self, tenant: str | None = None, model: str | None = None) -> int:
        return 0

    async def close(self) -> None:
        return


class ResponseCache:
    """Exact and semantic cache of one gateway process."""

    def __init__(
        self, config: CacheConfig, store: AnswerStore, embedder: QuestionEncoder | None, metrics: CacheMetrics
    ) -> None:
        self.config = config
        self.store = store
        self.metrics = metrics
        self._embedder = embedder
        self._index = None if embedder is None else SemanticIndex(store, embedder, config.threshold)
        self._opening: asyncio.Task[None] | None = None
        self._unindexed: deque[tuple[CacheKey, str, str]] = deque(maxlen=MOST_UNINDEXED)
        """Questions answered while the encoder was away: partition, text, digest of the answer's key."""

    def question(self, request: ChatRequest, messages: list[dict[str, Any]]) -> CacheQuestion | None:
        """What the semantic cache compares: the last message, with those of otherwise equal requests."""
        if self.config.semantic == "off":
            return None
        *before, last = messages
        if last["role"] != "user" or not 0 < len(last["content"]) <= LONGEST_QUESTION:
            return None
        # Who asks, and how the answer is delivered, does not decide what it says.
        rest = msgspec.structs.replace(
            request, messages=[], seed=request.seed if request.temperature != 0 else None, stream=None,
            stream_options=None, user=None, safety_identifier=None, metadata=None, service_tier=None,
            prompt_cache_key=None, speculation=None,
        )  # fmt: skip
        return CacheQuestion(last["content"], msgspec.json.encode((rest, before)))

    def check(self, exchange: Exchange) -> None:
        # An answer that is never cached: asking for a cache is an error, as where there is none.
        cache_mode(exchange, _OFF)

    async def look_up(self, exchange: Exchange, generation: Generation) -> ResponseCacheLookup | None:
        lookup = self._lookup(exchange, generation, generation.cache_facts())
        if lookup is None:
            return None
        exchange.timeline.follow("prepare")
        with exchange.timeline.phase("cache"):
            found = lookup.read and await self._find(lookup)
        if not found:
            generation.record()
        exchange.extra_headers.append((HEADER, lookup.found.encode()))
        if lookup.exact:
            self.metrics.looked("exact", hit=lookup.found == "exact")
        if lookup.partition is not None and lookup.found != "exact":
            self.metrics.looked("semantic", hit=lookup.found == "semantic")
        return lookup

    def _lookup(self, exchange: Exchange, generation: Generation, facts: CacheFacts) -> ResponseCacheLookup | None:
        """None when the request does not use the cache."""
        mode = cache_mode(exchange, self.config)
        if mode == "off":
            return None
        repeatable = facts.repeatable
        exact = mode == "exact" or (repeatable and self.config.exact == "on")
        semantic = mode == "semantic" or (repeatable and self.config.semantic == "on")
        if mode == "semantic":
            exact = exact or self.config.exact != "off"
        if mode == "refresh":
            exact, semantic = self.config.exact != "off", self.config.semantic != "off"
        if not exact and not semantic:
            return None
        tenant, model = exchange.caller.tenant, generation.model
        # An answer that was made somewhere else is not given to a request that demands a place.
        common = [*facts.common, *([str(exchange.demand)] if exchange.demand else [])]
        key = CacheKey(tenant, model.name, _digest([*common, *facts.asked]))
        partition = None
        if semantic and facts.question is not None and self._index is not None and self._may_compare(exchange):
            partition = CacheKey(tenant, model.name, _digest([*common, facts.question.context]))
        return ResponseCacheLookup(self, generation, facts.question, key, exact, partition, read=mode != "refresh")

    async def store_answer(self, lookup: ResponseCacheLookup, response_id: str) -> None:
        """After the answer: store a new one; note which cached answer a semantic hit was."""
        generation, key, match = lookup.generation, lookup.key, lookup.match
        if generation.from_cache:
            self.metrics.saved_tokens.inc(generation.completion_tokens)
        if match is not None:
            await self.store.put(_hit(key.tenant, response_id), _encode([match.model, match.digest]))
            return
        recorded = generation.recorded
        if recorded is None:
            return
        await self.store.put(key, recorded)
        question = lookup.question
        if lookup.partition is None or question is None:
            return
        assert self._index is not None and self._embedder is not None
        if lookup.search.vector:
            await self._index.add(lookup.partition, question.text, key.digest, lookup.search.vector)
        elif lookup.read:
            # Later: asked again, it is an exact hit, and would never get into the index.
            self._unindexed.append((lookup.partition, question.text, key.digest))
            if self._embedder.up:
                self._start_encoder(self._embedder)

    async def suspect(self, tenant: str, response_id: str) -> bool:
        """A user disliked an answer. If it was a semantic hit, the cached answer is dropped and counted as wrong."""
        note = _hit(tenant, response_id)
        found = await self.store.get(note)
        if found is None:
            return False
        model, digest = msgspec.msgpack.decode(found, type=tuple[str, str])
        await self.store.drop(CacheKey(tenant, model, digest))
        await self.store.drop(note)
        self.metrics.suspected.inc()
        return True

    async def evict(self, tenant: str | None = None, model: str | None = None) -> int:
        """Drop the answers of a tenant, a model or both; how many there were."""
        return await self.store.evict(tenant, model)

    async def close(self) -> None:
        if self._opening is not None:
            self._opening.cancel()
            await asyncio.gather(self._opening, return_exceptions=True)
        await self.store.close()

    async def _find(self, lookup: ResponseCacheLookup) -> bool:
        """Whether there is an answer, which the generation then replays."""
        if lookup.exact and await self._replayed(lookup, lookup.key):
            lookup.found = "exact"
            return True
        if lookup.partition is None or not self._encoder_up():
            return False
        assert self._index is not None and lookup.question is not None
        try:
            async with asyncio.timeout(self.config.lookup_s):
                lookup.search = await self._index.search(lookup.partition, lookup.question.text)
        except TimeoutError:
            self.metrics.gave_up.inc()
            return False
        except ApiError as error:
            log.warning("the semantic cache could not be searched: %s", error)
            return False
        self.metrics.refused(lookup.search.refusals)
        for match in lookup.search.matches:
            key = replace(lookup.key, digest=match.digest)
            if await self._replayed(lookup, key):
                lookup.found, lookup.match = "semantic", key
                return True
        return False

    async def _replayed(self, lookup: ResponseCacheLookup, key: CacheKey) -> bool:
        found = await self.store.get(key)
        if found is None:
            return False
        try:
            lookup.generation.replay(found)
        except msgspec.MsgspecError:
            log.warning("a cached answer cannot be decoded; it is dropped")
            await self.store.drop(key)
            return False
        return True

    def _may_compare(self, exchange: Exchange) -> bool:
        """Whether the encoder may see the request."""
        if self._embedder is None or not exchange.demand:
            return True
        return not withheld(exchange, "encoder", self._embedder.name, self._embedder.unmet(exchange.demand))

    def _encoder_up(self) -> bool:
        """No request waits for the encoder to start: the first one starts it, later ones use it."""
        if self._embedder is None:
            return False
        if not self._embedder.up or self._unindexed:
            self._start_encoder(self._embedder)
        return self._embedder.up

    def _start_encoder(self, embedder: QuestionEncoder) -> None:
        """Starts it where it is not up, and indexes what was answered without it."""
        if self._opening is None or self._opening.done():
            self._opening = asyncio.create_task(self._open(embedder), name="encoder of the semantic cache")

    async def _open(self, embedder: QuestionEncoder) -> None:
        assert self._index is not None
        try:
            await embedder.open()
            while self._unindexed:
                partition, text, digest = self._unindexed.popleft()
                vector = (await embedder.embed([text])).vectors[0].tobytes()
                await self._index.add(partition, text, digest, vector)
        except ApiError as error:
            log.warning("the encoder of the semantic cache is not up: %s", error)


_OFF = CacheConfig()


def cache_mode(exchange: Exchange, config: CacheConfig) -> CacheMode | None:
    """What the request itself asks of the cache; raises when there is no such cache."""
    sent = exchange.header(HEADER)
    if sent is None:
        return None
    mode = sent.decode("latin-1").strip().lower()
    if mode not in _MODES:
        raise InvalidRequest(f"The header `x-penstock-cache` is one of {', '.join(_MODES)}.", param="x-penstock-cache")
    on = {"exact": config.exact, "semantic": config.semantic}
    if on.get(mode) == "off":
        raise InvalidRequest(f"This server has no {mode} cache (`cache.{mode}` is off).", param="x-penstock-cache")
    return cast(CacheMode, mode)


def open_store(config: CacheConfig) -> AnswerStore:
    if not config.url:
        return MemoryStore(config.memory, config.ttl_s, config.questions)
    from penstock.caching.redis import RedisStore

    return RedisStore(config.url, config.ttl_s, config.questions)


def _hit(tenant: str, response_id: str) -> CacheKey:
    return CacheKey(tenant, NOTES, hashlib.sha256(response_id.encode()).hexdigest())


def _digest(parts: object) -> str:
    return hashlib.sha256(_encode(parts)).hexdigest()
