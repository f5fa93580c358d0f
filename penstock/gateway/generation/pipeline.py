"""The generation pipeline: decode -> spec -> admission -> generation -> response.

A handler decodes a request and calls `answer` with a function that makes one attempt: it asks for a generation (`chat`
or `completion`) and responds with it (`respond`). Features take part as stages that the composition root hands in.
"""

from __future__ import annotations

from penstock.gateway.accounting.admission import Admissions
from penstock.gateway.accounting.quotas import Quotas
from penstock.gateway.app.background import BackgroundTasks
from penstock.gateway.app.exchange import Exchange
from penstock.gateway.generation.attempt import Attempt
from penstock.gateway.generation.base import Generation
from penstock.gateway.generation.chat import ChatGenerations
from penstock.gateway.generation.chat_messages import Message
from penstock.gateway.generation.completion import CompletionGenerations
from penstock.gateway.generation.experiments import Experiments
from penstock.gateway.generation.fallback import FallbackChain
from penstock.gateway.generation.lifecycle import GenerationLifecycle
from penstock.gateway.generation.model_access import ModelAccess
from penstock.gateway.generation.model_routes import Routes
from penstock.gateway.generation.permissions import Permissions
from penstock.gateway.generation.remote_count import RemoteCount, count_remote
from penstock.gateway.generation.remote_generations import RemoteGenerations
from penstock.gateway.generation.remote_streams import RemoteStreams
from penstock.gateway.generation.renderer import Renderer
from penstock.gateway.generation.response import send_stream, send_whole
from penstock.gateway.generation.response_format import GrammarCache
from penstock.gateway.generation.resumption import EventNumbers
from penstock.gateway.generation.schemas import ChatRequest
from penstock.gateway.generation.settings import GenerationSettings
from penstock.gateway.generation.shadows import Shadows
from penstock.gateway.generation.sources import SourceSearch
from penstock.gateway.generation.stages import AnswerCache, AnswerGrader, ContentFilter
from penstock.gateway.generation.tokenization import Tokenization
from penstock.gateway.generation.tokenized_model import TokenizedModel, known_text
from penstock.gateway.generation.watermarks import Watermarks
from penstock.routing.registry import ModelRegistry
from penstock.routing.remotes import RemoteModel
from penstock.routing.time_slice_groups import TimeSlices
from penstock.telemetry.metrics import Metrics


class GenerationPipeline:
    """The way of every request for tokens through one gateway process."""

    def __init__(
        self,
        settings: GenerationSettings,
        *,
        registry: ModelRegistry,
        permissions: Permissions,
        routes: Routes,
        experiments: Experiments,
        shadows: Shadows,
        slices: TimeSlices,
        admissions: Admissions,
        quotas: Quotas,
        lifecycle: GenerationLifecycle,
        tokenization: Tokenization,
        grammars: GrammarCache,
        metrics: Metrics,
        background: BackgroundTasks,
        content_filter: ContentFilter,
        source_search: SourceSearch,
        cache: AnswerCache,
        grader: AnswerGrader,
        watermarks: Watermarks,
        streams: RemoteStreams,
    ) -> None:
        """`streams`: keeps streams of remote models that can be resumed."""
        self.settings = settings
        self.registry = registry
        self.permissions = permissions
        self.tokenization = tokenization
        self.quotas = quotas
        self.lifecycle = lifecycle
        self.metrics = metrics
        self.content_filter = content_filter
        self.cache = cache
        self.grader = grader
        self._background = background
        models = ModelAccess(registry, permissions, admissions, slices, settings.engine_wait_s)
        self.answer = FallbackChain(
            registry,
            permissions,
            routes,
            experiments,
            shadows,
            admissions,
            content_filter,
            metrics,
            settings.engine_wait_s,
        ).answer
        remotes = RemoteGenerations(
            settings=settings,
            tokenization=tokenization,
            quotas=quotas,
            watermarks=watermarks,
            metrics=metrics,
            content_filter=content_filter,
            source_search=source_search,
            cache=cache,
            grader=grader,
            streams=streams,
        )
        self.chat = ChatGenerations(
            settings=settings,
            models=models,
            tokenization=tokenization,
            grammars=grammars,
            quotas=quotas,
            watermarks=watermarks,
            admissions=admissions,
            metrics=metrics,
            content_filter=content_filter,
            registry=registry,
            remotes=remotes,
            source_search=source_search,
            cache=cache,
            grader=grader,
        ).make
        self.completion = CompletionGenerations(
            settings=settings,
            models=models,
            tokenization=tokenization,
            grammars=grammars,
            quotas=quotas,
            watermarks=watermarks,
            admissions=admissions,
            metrics=metrics,
            content_filter=content_filter,
            registry=registry,
            remotes=remotes,
        ).make

    async def tokenized(self, name: str) -> TokenizedModel:
        """The model called `name`, which exists for the caller; a 400 where its tokenizer is not known here."""
        remote = self.registry.remote(name)
        if remote is not None:
            return known_text(remote)
        await self.registry.prepare(name)
        return self.registry.route(name).model

    async def count_remote(
        self, exchange: Exchange, model: RemoteModel, chat: ChatRequest, messages: list[Message]
    ) -> RemoteCount:
        """The length of the prompt of a conversation for a remote model."""
        tools = chat.tools if chat.tools and chat.tool_choice != "none" else ()
        async with self.quotas.text_work(exchange, model.base_name, exchange.body_size, only=True) as work:
            found = (
                await count_remote(exchange, model, self.tokenization, messages=messages, tools=tools)
                if messages
                else RemoteCount(0)
            )
            work.tokens = found.count
        return found

    async def respond(self, attempt: Attempt, generation: Generation, renderer: Renderer, *, stream: bool) -> None:
        """Run a generation and send what it says."""
        exchange = attempt.exchange
        self.content_filter.watch(exchange, generation)
        exchange.timeline.response_id = renderer.response_id
        numbers: EventNumbers | None = None
        if (resumption := attempt.resumption) is not None:
            # Before anything is reserved or charged under the id that the client gave.
            await generation.claim()
            numbers = EventNumbers(generation.id, resumption.seen)
        lookup = await self.cache.look_up(exchange, generation) if numbers is None else None
        with exchange.watched(generation.fail):
            async with self.lifecycle.running(attempt, generation) as account:
                if renderer.admitted is not None:
                    await renderer.admitted()
                if stream:
                    await send_stream(exchange, generation, renderer, account, self.settings, self.metrics, numbers)
                else:
                    await send_whole(exchange, generation, renderer, account)
        self.grader.submit(attempt, generation)
        if lookup is not None:
            self._background.start(lookup.store(renderer.response_id))
