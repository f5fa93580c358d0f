"""From a validated request to engine requests: an engine that is up, the prompt's tokens, the sampling parameters.

Every API family that holds conversations says them as a `ChatRequest`; what follows from it is here, once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from penstock.engine.request import EngineInfo
from penstock.gateway.app.exchange import Exchange
from penstock.gateway.conversations.turn import OpenTurn, known_calls
from penstock.gateway.generation.attempt import Attempt
from penstock.gateway.generation.base import Generation
from penstock.gateway.generation.chat_messages import template_messages
from penstock.gateway.generation.engine import EngineGeneration, Prompt
from penstock.gateway.generation.remote_request import relay
from penstock.gateway.generation.sampling import (
    Limits,
    check_choices,
    fit,
    sampling_params,
    stop_strings,
    with_seed,
)
from penstock.gateway.generation.schemas import ChatRequest, TextFormat
from penstock.gateway.generation.tool_choice import check_tools, for_template, grammar_for, toolbox_of
from penstock.gateway.process.service import Service
from penstock.gateway.rag.retrieval import Retrieval, with_instructions
from penstock.gateway.response_cache.replay import LONGEST_QUESTION, Question
from penstock.protocol.errors import InvalidRequest
from penstock.routing.registry import ServedModel
from penstock.tools.toolbox import Toolbox

DEFAULT_ANSWER = 512
"""Tokens kept free of sources for an answer that names no limit."""
REMOTE_WINDOW = 8192
"""What a model that another server runs is taken to hold, where the configuration does not say."""
SEAMS = 16
"""What a template and the joints of texts may cost on top."""


async def prepare_chat(
    service: Service,
    attempt: Attempt,
    request: ChatRequest,
    limit: Limits,
    turn: OpenTurn | None = None,
    following: Sequence[dict[str, Any]] = (),
) -> Generation:
    """The generation that answers a conversation; raises what is wrong with the request.

    `turn`: of a stored conversation. `following`: what the assistant and tools said since the request's messages.
    """
    exchange = attempt.exchange
    check_tools(request)
    check_choices(1, request.n or 1, service.settings)
    messages = template_messages(request.messages, known_calls(turn))
    if service.guardrails is not None:
        messages = await service.guardrails.messages(exchange, messages)
        following = await service.guardrails.messages(exchange, list(following)) if following else following
    remote = service.registry.remote(request.model)
    if remote is not None:
        if request.rag is not None:
            raise InvalidRequest(
                f"`rag` is for models that run here; another server runs `{remote.name}`.",
                param="rag",
                code="remote_model",
            )
        said = [*messages, *following]
        if turn is not None:
            window, quota = remote.context_window or REMOTE_WINDOW, service.quotas.context_tokens(exchange.caller)
            window = window if quota is None else min(window, quota)
            said = turn.messages(service, attempt, messages, window, limit, following)
        return relay(service, attempt, request, said, limit, remote)
    if request.rag is None:
        return await _prepare(service, attempt, request, limit, messages, turn, following)
    said = messages if turn is None else [*turn.history, *messages]
    retrieval = Retrieval(service.knowledge, exchange.caller.tenant, request.rag, said)
    try:
        return await _prepare(service, attempt, request, limit, messages, turn, following, retrieval)
    finally:
        await retrieval.close()


async def _prepare(
    service: Service,
    attempt: Attempt,
    request: ChatRequest,
    limit: Limits,
    messages: list[dict[str, Any]],
    turn: OpenTurn | None,
    following: Sequence[dict[str, Any]],
    retrieval: Retrieval | None = None,
) -> Generation:
    exchange = attempt.exchange
    stops = stop_strings(request)
    priority = service.admissions.priority(exchange, request.service_tier)
    model, info = await open_route(service, attempt, request.model, limit)
    toolbox = toolbox_of(request, model)
    params = sampling_params(
        request,
        info,
        model.text.eos_token_ids,
        limit,
        logprobs=(request.top_logprobs or 0) if request.logprobs else None,
        grammar=await grammar_for(service.grammars, request, toolbox),
    )
    quota = service.quotas.context_tokens(exchange.caller)
    window = info.max_model_len if quota is None else min(info.max_model_len, quota)
    retrieved = None
    if retrieval is not None:
        bare = await chat_tokens(service, model, with_instructions([*messages, *following]), toolbox)
        room = room_for_sources(window, len(bare), limit)
        with exchange.timeline.phase("retrieve"):
            retrieved = await retrieval.result(
                lambda text: len(model.text.encode(text, special=False)),
                room if turn is None else min(room, window // 2),
            )
    if turn is not None:
        tokens = await turn.tokens(service, attempt, messages, model, toolbox, window, limit, following, retrieved)
    else:
        said = [*messages, *following]
        tokens = await chat_tokens(service, model, said if retrieved is None else retrieved.dressed(said), toolbox)
    params = fit(params, len(tokens), limit, info.max_model_len, "messages", quota)
    generation = EngineGeneration(
        model,
        [Prompt(tokens, [with_seed(params, i) for i in range(request.n or 1)])],
        id=attempt.ids.next(),
        metrics=service.metrics,
        started_at=exchange.started_at,
        cache_salt=service.cache_salt(exchange.caller),
        affinity=attempt.affinity(request.prompt_cache_key),
        patient=not attempt.has_fallback,
        stops=stops,
        priority=priority,
        speculation=request.speculation is not False,
        time_limit_s=time_limit(service, exchange),
        want_logprobs=bool(request.logprobs),
        toolbox=toolbox,
        seeded=request.seed is not None,
        # A stored conversation, what tools said, and sources are not in the request: alike requests may differ in them.
        comparable=None if turn or following or retrieved else _comparable(service, request, messages),
    )
    if retrieved is not None:
        # Nothing is added to text that has to be parsed, or whose tokens are shown one by one.
        plain = request.response_format is None or isinstance(request.response_format, TextFormat)
        generation.cite(retrieved, attribute=plain and toolbox is None and not request.logprobs)
    if service.judge is not None:
        service.judge.choose(generation, messages)
    return generation


def room_for_sources(window: int, prompt_tokens: int, limit: Limits) -> int:
    """Tokens of the window that neither the prompt nor the answer needs."""
    answer = limit.max_tokens or min(limit.default or DEFAULT_ANSWER, window // 4)
    return window - prompt_tokens - answer - SEAMS


def time_limit(service: Service, exchange: Exchange) -> float | None:
    """Seconds that a request may generate."""
    return service.settings.time_limit_s if exchange.line is None else service.settings.batches.time_limit_s


def _comparable(service: Service, request: ChatRequest, messages: list[dict[str, Any]]) -> Question | None:
    """What the semantic cache compares, if there is one: the last message against those in the same circumstances."""
    if service.recall is None or service.settings.cache.semantic == "off":
        return None
    *before, last = messages
    if last["role"] != "user" or not 0 < len(last["content"]) <= LONGEST_QUESTION:
        return None
    # Who asks, and how the answer is delivered, does not decide what it says.
    rest = msgspec.structs.replace(
        request, messages=[], seed=request.seed if request.temperature != 0 else None, stream=None, stream_options=None,
        user=None, safety_identifier=None, metadata=None, service_tier=None, prompt_cache_key=None, speculation=None,
    )  # fmt: skip
    return Question(last["content"], msgspec.json.encode((rest, before)))


async def chat_tokens(
    service: Service, model: ServedModel, messages: list[dict[str, Any]], toolbox: Toolbox | None
) -> list[int]:
    """The prompt of a conversation."""
    messages, tools = for_template(messages, toolbox.tools if toolbox is not None else (), model)
    return await service.encode_chat(model, messages, tools=tools)


async def open_route(service: Service, attempt: Attempt, name: str, limit: Limits) -> tuple[ServedModel, EngineInfo]:
    """The model, once its engine is up and, if it takes turns, awake; waits for each up to `engine_wait_s`."""
    exchange = attempt.exchange
    # A token has at least a byte, so this is the most that the request can need.
    route = service.admissions.reroute(
        exchange, service.registry.route(name), lambda: exchange.body_size + (limit.max_tokens or 1)
    )
    model = route.model
    attempt.note_model(name, model, route.why)
    within = 0.0 if attempt.has_fallback else service.settings.engine_wait_s
    info = await model.backend.wait_ready(within)
    attempt.hold(await service.slices.acquire(model, within))
    # One that woke for the first time knows more of itself now.
    return model, model.backend.info or info
