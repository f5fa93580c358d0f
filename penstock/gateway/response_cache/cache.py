"""The response caches in front of generation: what may be looked up, under which key, and what is kept afterwards.

Invariants: a key and a partition hold everything that decides an answer (tenant, model, adapter, prompt or context,
parameters, form), so nothing crosses from one tenant or setting to another; a lookup never fails a request, and waits
for the encoder no longer than `cache.lookup_s`.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Literal, cast

import msgspec

from penstock.backends.embedder import Embedder
from penstock.caching.semantic import SearchResult, SemanticIndex
from penstock.caching.store import NOTES, AnswerStore, CacheKey, MemoryStore
from penstock.config.cache import CacheConfig
from penstock.engine.request import Delta, SamplingParams
from penstock.gateway.app.exchange import Exchange
from penstock.gateway.generation.engine import EngineGeneration
from penstock.gateway.response_cache.replay import decode_answer, encode_answer
from penstock.protocol.errors import ApiError, InvalidRequest
from penstock.telemetry.cache_metrics import CacheMetrics

log = logging.getLogger(__name__)

HEADER = b"x-penstock-cache"
Wish = Literal["off", "refresh", "exact", "semantic"]
_WISHES = ("off", "refresh", "exact", "semantic")
_encode = msgspec.msgpack.Encoder().encode


@dataclass(slots=True)
class Plan:
    """How one request uses the caches."""

    key: CacheKey
    exact: bool
    partition: CacheKey | None
    """Where the semantic cache looks; None: it does not."""
    look: bool
    found: Literal["exact", "semantic", "miss"] = "miss"
    search: SearchResult = field(default_factory=SearchResult)
    match: CacheKey | None = None
    """Of a semantic hit: the answer that was taken."""


class Recall:
    """Exact and semantic cache of one gateway process."""

    def __init__(
        self, config: CacheConfig, store: AnswerStore, embedder: Embedder | None, metrics: CacheMetrics
    ) -> None:
        self.config = config
        self.store = store
        self.metrics = metrics
        self._embedder = embedder
        self._index = None if embedder is None else SemanticIndex(store, embedder, config.threshold)
        self._opening: asyncio.Task[None] | None = None

    def plan(self, exchange: Exchange, generation: EngineGeneration) -> Plan | None:
        """None when the request has nothing to do with the caches."""
        wish = wish_of(exchange, self.config)
        if wish == "off":
            return None
        steady = generation.seeded or all(params.greedy for params in _params(generation))
        exact = wish == "exact" or (steady and self.config.exact == "on")
        semantic = wish == "semantic" or (steady and self.config.semantic == "on")
        if wish == "semantic":
            exact = exact or self.config.exact != "off"
        if wish == "refresh":
            exact, semantic = self.config.exact != "off", self.config.semantic != "off"
        if not exact and not semantic:
            return None
        tenant, model = exchange.caller.tenant, generation.model
        common = [model.name, model.fingerprint, generation.stops, generation.form]
        key = CacheKey(tenant, model.name, _digest([*common, *_parameters(generation), _prompts(generation)]))
        partition = None
        if semantic and generation.comparable is not None and self._index is not None:
            partition = CacheKey(tenant, model.name, _digest([*common, generation.comparable.context]))
        return Plan(key, exact, partition, look=wish != "refresh")

    async def find(self, plan: Plan, exchange: Exchange, generation: EngineGeneration) -> None:
        """Have `generation` say a kept answer, if there is one; otherwise have it remember what it says."""
        answer = await self._find(plan, generation) if plan.look else None
        if answer is not None:
            generation.recall(answer)
        else:
            generation.remember()
        exchange.extra_headers.append((HEADER, plan.found.encode()))
        if plan.exact:
            self.metrics.looked("exact", hit=plan.found == "exact")
        if plan.partition is not None and plan.found != "exact":
            self.metrics.looked("semantic", hit=plan.found == "semantic")

    async def keep(self, plan: Plan, generation: EngineGeneration, response_id: str) -> None:
        """After the answer: store a new one; note where a semantic hit came from."""
        if generation.recalled:
            self.metrics.saved_tokens.inc(generation.completion_tokens)
        if plan.match is not None:
            await self.store.put(_hit(plan.key.tenant, response_id), _encode([plan.match.model, plan.match.digest]))
            return
        deltas = generation.memory
        if deltas is None:
            return
        await self.store.put(plan.key, encode_answer(deltas))
        if plan.partition is not None and plan.search.vector and generation.comparable is not None:
            assert self._index is not None
            await self._index.add(plan.partition, generation.comparable.text, plan.key.digest, plan.search.vector)

    async def suspect(self, tenant: str, response_id: str) -> bool:
        """A user did not like an answer. If it was a semantic hit, the answer is forgotten, and counted as doubtful."""
        note = _hit(tenant, response_id)
        found = await self.store.get(note)
        if found is None:
            return False
        model, digest = msgspec.msgpack.decode(found, type=tuple[str, str])
        await self.store.drop(CacheKey(tenant, model, digest))
        await self.store.drop(note)
        self.metrics.suspected.inc()
        return True

    async def close(self) -> None:
        if self._opening is not None:
            self._opening.cancel()
            await asyncio.gather(self._opening, return_exceptions=True)
        await self.store.close()

    async def _find(self, plan: Plan, generation: EngineGeneration) -> list[Delta] | None:
        if plan.exact and (answer := await self._answer(plan.key)) is not None:
            plan.found = "exact"
            return answer
        if plan.partition is None or not self._encoder_up():
            return None
        assert self._index is not None and generation.comparable is not None
        try:
            async with asyncio.timeout(self.config.lookup_s):
                plan.search = await self._index.search(plan.partition, generation.comparable.text)
        except TimeoutError:
            self.metrics.gave_up.inc()
            return None
        except ApiError as error:
            log.warning("the semantic cache could not be asked: %s", error)
            return None
        self.metrics.refused(plan.search.refusals)
        for match in plan.search.matches:
            key = replace(plan.key, digest=match.digest)
            if (answer := await self._answer(key)) is not None:
                plan.found, plan.match = "semantic", key
                return answer
        return None

    async def _answer(self, key: CacheKey) -> list[Delta] | None:
        found = await self.store.get(key)
        if found is None:
            return None
        try:
            return decode_answer(found)
        except msgspec.MsgspecError:
            log.warning("an answer in the cache cannot be read; it is dropped")
            await self.store.drop(key)
            return None

    def _encoder_up(self) -> bool:
        """Nobody waits for an encoder to start: it is asked for, and used once it is there."""
        if self._embedder is None:
            return False
        if not self._embedder.up and (self._opening is None or self._opening.done()):
            self._opening = asyncio.create_task(self._open(self._embedder), name="encoder of the semantic cache")
        return self._embedder.up

    async def _open(self, embedder: Embedder) -> None:
        try:
            await embedder.open()
        except ApiError as error:
            log.warning("the encoder of the semantic cache is not up: %s", error)


def wish_of(exchange: Exchange, config: CacheConfig) -> Wish | None:
    """What the request itself says about the caches; raises when that cannot be."""
    sent = exchange.header(HEADER)
    if sent is None:
        return None
    wish = sent.decode("latin-1").strip().lower()
    if wish not in _WISHES:
        raise InvalidRequest(f"The header `x-penstock-cache` is one of {', '.join(_WISHES)}.", param="x-penstock-cache")
    on = {"exact": config.exact, "semantic": config.semantic}
    if on.get(wish) == "off":
        raise InvalidRequest(f"This server has no {wish} cache (`cache.{wish}` is off).", param="x-penstock-cache")
    return cast(Wish, wish)


def open_store(config: CacheConfig) -> AnswerStore:
    if not config.url:
        return MemoryStore(config.memory, config.ttl_s, config.questions)
    from penstock.caching.redis import RedisStore

    return RedisStore(config.url, config.ttl_s, config.questions)


def _hit(tenant: str, response_id: str) -> CacheKey:
    return CacheKey(tenant, NOTES, hashlib.sha256(response_id.encode()).hexdigest())


def _params(generation: EngineGeneration) -> Iterable[SamplingParams]:
    return (params for prompt in generation.prompts for params in prompt.params)


def _parameters(generation: EngineGeneration) -> list[SamplingParams]:
    """As far as they decide the answer: a seed does so only where the client chose it and noise is drawn."""
    return [
        params if generation.seeded and not params.greedy else replace(params, seed=0) for params in _params(generation)
    ]


def _prompts(generation: EngineGeneration) -> list[list[int]]:
    return [prompt.tokens for prompt in generation.prompts]


def _digest(parts: object) -> str:
    return hashlib.sha256(_encode(parts)).hexdigest()
