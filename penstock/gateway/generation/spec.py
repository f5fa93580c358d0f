"""What an engine is asked to generate: `GenerationSpec`, made here for requests of clients and for the gateway's own
questions to a model (summaries, moderation, grading).

Adding an option of a request means a field of its schema, its place here or in `sampling.py`, and the engine's field.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct

from penstock.engine.request import Request, SamplingParams
from penstock.gateway.accounting.targets import gap_target, ttft_target
from penstock.gateway.generation.attempt import Attempt
from penstock.gateway.generation.resumption import Resumption
from penstock.gateway.generation.schemas import TokenDetails
from penstock.gateway.generation.settings import GenerationSettings
from penstock.gateway.generation.thoughts import ThoughtReading, at_once
from penstock.identity.labels import Demand
from penstock.metering.engine_counts import engine_id
from penstock.protocol.errors import DataRuleForbids
from penstock.routing.admission.queue import CLASSES
from penstock.routing.placement import ANYWHERE, Placement, PlacementFacts
from penstock.routing.registry import ServedModel
from penstock.tools.toolbox import Toolbox


class TokenPrompt(Struct, frozen=True):
    """One prompt and the parameters of its choices, one entry per choice."""

    tokens: list[int]
    params: list[SamplingParams]
    text: str | None = None
    """What `tokens` stand for, where it was text: they may begin with a token that the tokenizer added."""


class CacheQuestion(Struct, frozen=True):
    """What the semantic cache compares: the last message of the user, and everything else in the request, which must
    be equal for a hit."""

    text: str
    context: bytes


class CacheFacts(Struct, frozen=True):
    """What the response cache needs to know of a generation."""

    repeatable: bool
    """The same request gives the same answer."""
    common: Sequence[object]
    """What decides the answer besides parameters and prompt: equal for all that may be compared."""
    asked: Sequence[object]
    """Parameters and prompt."""
    question: CacheQuestion | None
    """What similar requests are found by."""


class GenerationSpec(Struct, frozen=True):
    """Everything that decides what engines generate, and how their tokens become an answer."""

    id: str
    """Names the generation in the ledger, in the engine and to the client; never used before."""
    model: ServedModel
    prompts: Sequence[TokenPrompt]
    started_at: float
    """When the request arrived; latencies count from here."""
    priority: int = 0
    """In the engine, smaller first."""
    owner: str = ""
    """The tenant that asked; empty for the gateway's own questions."""
    cache_salt: str = ""
    affinity: str = ""
    patient: bool = True
    """Whether to wait for an engine that is away."""
    speculation: bool = True
    time_limit_s: float | None = None
    length_limit: str = ""
    """See `Generation`."""
    stops: Sequence[str] = ()
    logprobs: bool = False
    """Whether the client is shown log-probabilities."""
    token_ids: bool = False
    """Whether the client is shown token ids."""
    prompt_only: bool = False
    """The request is only run for its prompt; what it generates is neither shown nor counted."""
    continuation: bool = False
    """The text continues the prompt, so a leading space stays."""
    continued: str = ""
    """The beginning of a chat's answer that is in the prompt already."""
    skip_special: bool = True
    """Control tokens are not shown."""
    include_stop: bool = False
    """The stop string or stop token is part of the text."""
    toolbox: Toolbox | None = None
    """Functions that the text may call."""
    thoughts: ThoughtReading | None = None
    """How thoughts are told from the answer; None: there are none."""
    resumption: Resumption | None = None
    """Set where the client may resume the stream, or does."""
    seeded: bool = False
    """The client chose the seed, so the answer is the same every time."""
    cache_question: CacheQuestion | None = None
    target_gap_s: float | None = None
    """Seconds between tokens that prompts of other requests may not exceed; None: the engine's own target."""
    first_token_by: float | None = None
    """Until when, by the clock of `started_at`, it may wait for an engine that is away before its first token; None: as
    long as others."""
    placement: Placement = ANYWHERE
    """The pools and regions that it may run in."""

    @property
    def form(self) -> tuple[bool, ...]:
        """What besides parameters and prompt decides how tokens become an answer; part of cache keys."""
        return (
            self.logprobs,
            self.prompt_only,
            self.continuation,
            self.toolbox is not None,
            self.thoughts is not None,
            self.skip_special,
            self.include_stop,
        )

    def requests(self) -> list[Request]:
        """The requests to the engine, one per choice."""
        return [
            Request(
                engine_id(self.id, place, number, counted=not self.prompt_only),
                prompt.tokens,
                params,
                priority=self.priority,
                owner=self.owner,
                cache_salt=self.cache_salt,
                pools=self.placement.pools,
                regions=self.placement.regions,
                affinity=self.affinity,
                patient=self.patient,
                timeout_s=self.time_limit_s,
                target_gap_s=self.target_gap_s,
                speculation=self.speculation,
                adapter=self.model.adapter,
                resumable_by="" if self.resumption is None else self.resumption.client,
            )
            for place, prompt in enumerate(self.prompts)
            for number, params in enumerate(prompt.params)
        ]


def request_spec(
    attempt: Attempt,
    settings: GenerationSettings,
    request: TokenDetails,
    model: ServedModel,
    prompts: Sequence[TokenPrompt],
    *,
    stops: Sequence[str],
    priority: int,
    length_limit: str,
    logprobs: bool,
    prompt_only: bool = False,
    continuation: bool = False,
    continued: str = "",
    toolbox: Toolbox | None = None,
    thoughts: ThoughtReading | None = None,
    cache_question: CacheQuestion | None = None,
    placement: Placement = ANYWHERE,
) -> GenerationSpec:
    """The spec of a client's request."""
    exchange, resumption = attempt.exchange, attempt.resumption
    return GenerationSpec(
        id=attempt.ids.next() if resumption is None or not resumption.id else resumption.id,
        model=model,
        prompts=prompts,
        started_at=exchange.started_at,
        priority=priority,
        owner=exchange.caller.tenant,
        cache_salt=settings.cache_salt(exchange.caller, request.cache_salt),
        affinity=attempt.affinity(request.prompt_cache_key),
        patient=attempt.patient,
        speculation=request.speculation is not False,
        time_limit_s=settings.time_limit(exchange, model.base_name),
        target_gap_s=gap_target(exchange),
        first_token_by=None if (target := ttft_target(exchange)) is None else exchange.started_at + target,
        length_limit=length_limit,
        stops=stops,
        logprobs=logprobs,
        token_ids=bool(request.return_token_ids),
        prompt_only=prompt_only,
        continuation=continuation,
        continued=continued,
        skip_special=request.skip_special_tokens is not False,
        include_stop=bool(request.include_stop_str_in_output or request.no_stop_trim),
        toolbox=toolbox,
        thoughts=thoughts,
        resumption=resumption,
        seeded=request.seed is not None,
        cache_question=cache_question,
        placement=placement,
    )


def internal_spec(
    id: str,
    model: ServedModel,
    tokens: list[int],
    params: Sequence[SamplingParams],
    *,
    started_at: float,
    priority: int,
    cache_salt: str,
    time_limit_s: float | None,
    caller: tuple[str, str],
    demand: Demand,
    counted: bool = True,
) -> GenerationSpec:
    """The spec of a question that the gateway itself asks a model. `caller`: the tenant and tier for whose request it
    asks. `demand`: the labels that this request needs. `counted`: its tokens belong to a charge."""
    tenant, tier = caller
    rank = min(max(priority + 1, 0), len(CLASSES) - 1)
    longest = max((one.max_tokens for one in params), default=0)
    facts = PlacementFacts(tenant, tier, CLASSES[rank], len(tokens), len(tokens) + longest, demand=demand)
    if demand and (missing := model.unmet(demand)):
        raise DataRuleForbids(f"`{model.name}` may not get this request: {demand.why(missing)}.")
    tokens, asked, thoughts = at_once(model, tokens, params)
    return GenerationSpec(
        id=id,
        model=model,
        prompts=(TokenPrompt(tokens, asked),),
        thoughts=thoughts,
        started_at=started_at,
        priority=priority,
        cache_salt=cache_salt,
        time_limit_s=time_limit_s,
        prompt_only=not counted,
        placement=model.place(facts),
    )
