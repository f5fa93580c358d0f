"""POST /v1/responses and POST /v1/responses/input_tokens."""

from __future__ import annotations

import functools

import msgspec

from penstock.gateway.accounting.attribution import identify
from penstock.gateway.accounting.batch_line import batch_line
from penstock.gateway.api.openai.responses.background import BackgroundResponses
from penstock.gateway.api.openai.responses.background_renderer import BackgroundRenderer
from penstock.gateway.api.openai.responses.background_run import BackgroundRun, background_run
from penstock.gateway.api.openai.responses.file_search_loop import FileSearchLoop, SearchParts
from penstock.gateway.api.openai.responses.file_search_renderer import FileSearchRenderer
from penstock.gateway.api.openai.responses.input_files import with_file_texts
from penstock.gateway.api.openai.responses.input_items import (
    chat_request,
    conversation_of,
    rename_ignored,
)
from penstock.gateway.api.openai.responses.references import ResponseReferences
from penstock.gateway.api.openai.responses.renderer import ResponseRenderer
from penstock.gateway.api.openai.responses.schemas import (
    LOGPROBS,
    SEALED,
    SEARCH_RESULTS,
    UNSUPPORTED,
    InputTokensRequest,
    ResponsesRequest,
)
from penstock.gateway.api.openai.responses.store import NoResponseStore, ResponseRecord, ResponseStore
from penstock.gateway.api.openai.responses.tools import OfferedTools
from penstock.gateway.app.decoding import given, not_supported
from penstock.gateway.app.dialects import renamed
from penstock.gateway.app.exchange import Exchange
from penstock.gateway.conversations.truncation import TruncatedTurn
from penstock.gateway.generation.attempt import Attempt
from penstock.gateway.generation.base import Generation
from penstock.gateway.generation.chat_messages import template_messages
from penstock.gateway.generation.input_files import InputFiles
from penstock.gateway.generation.pipeline import GenerationPipeline
from penstock.gateway.generation.prompt import ChatPrompt
from penstock.gateway.generation.question import Question, chat_question
from penstock.gateway.generation.request_decoder import RequestDecoder, ignore_advice
from penstock.gateway.generation.resumption import HEADER, asked_for
from penstock.gateway.generation.sampling import TokenLimit, token_limit
from penstock.gateway.generation.schemas import ChatMessage, ChatRequest
from penstock.gateway.generation.tokenization import (
    check_counted,
    check_size,
    messages_size,
    most_counted,
    tools_size,
)
from penstock.gateway.generation.tool_choice import check_tools, toolbox_of
from penstock.gateway.generation.turn import Conversations, Turn, TurnRecorder
from penstock.gateway.rag.vector_stores.file_search import DEFAULT_RESULTS, FileSearch, FileSearches
from penstock.gateway.rag.vector_stores.schemas import attribute_filter
from penstock.gateway.rag.vector_stores.search import StoreSearch
from penstock.gateway.server_tools.steps import StepsRenderer, StepTotals
from penstock.protocol.errors import InvalidRequest

_decoder = RequestDecoder(ResponsesRequest)
_counted = RequestDecoder(InputTokensRequest)
_NAMES = (
    (r"messages\b", "input"),
    (r"response_format\.json_schema", "text.format"),
    (r"response_format", "text.format"),
    (r"tools\[(\d+)\]\.function\.", r"tools[\1]."),
)


class ResponseEndpoints:
    def __init__(
        self,
        pipeline: GenerationPipeline,
        conversations: Conversations,
        store: ResponseStore | NoResponseStore,
        background: BackgroundResponses | None,
        searches: FileSearches,
        search_parts: SearchParts,
        files: InputFiles,
    ) -> None:
        """`background`: generates responses without a client; None where none are stored."""
        self._files = files
        self._searches = searches
        self._search_parts = search_parts
        self._pipeline = pipeline
        self._conversations = conversations
        self._references = ResponseReferences(store, pipeline.permissions)
        self._can_store = store.enabled
        self._background = background

    async def create_response(self, exchange: Exchange) -> None:
        pipeline, settings = self._pipeline, self._pipeline.settings
        body = await exchange.body(settings.body_limit)
        request = _decoder(exchange, body)
        identify(exchange, request.user or request.safety_identifier, request.metadata)
        _check(request, can_store=self._can_store)
        run = background_run(exchange)
        if request.stream_options is not None and run is None:
            request.stream_options.apply(exchange)
        if request.background and run is None:
            await self._checked_background(exchange, request).create(exchange, body, stream=bool(request.stream))
            return
        asked, param = request.max_output_tokens, "max_output_tokens"
        if asked is None and request.max_tokens:
            asked, param = request.max_tokens, "max_tokens"
        limit = token_limit(asked, settings, default=settings.default_max_tokens, param=param)
        tools = OfferedTools(exchange, request.tools)
        resumption = asked_for(
            exchange, stream=request.stream, conversation=request.conversation, file_search=tools.file_search
        )
        # Instructions are for one answer: they are no part of a conversation.
        async with self._conversations.open(exchange, request.conversation, keep_system=False) as turn:
            exchange.continues = request.previous_response_id or ""
            if turn.stored:
                earlier = msgspec.convert(turn.history, list[ChatMessage])
            else:
                earlier = await self._references.earlier(exchange, request.previous_response_id)
            items = await self._references.resolved(exchange, request.input)
            read = await with_file_texts(exchange, self._files, items, request.model)
            conversation = conversation_of(exchange, read, earlier, tools)
            included = (LOGPROBS, SEALED) if tools.file_search is None else (LOGPROBS, SEALED, SEARCH_RESULTS)
            for name in request.include or ():
                if name not in included:  # other items that could be included are never made here
                    ignore_advice(exchange, f"include.{name}")
            search = await self._search(exchange, request, tools)
            said = conversation[len(earlier) :] if turn.stored else conversation
            if request.truncation == "auto" and not turn.stored:
                turn, said = await self._truncatable(exchange, said)
            record = store = None
            if request.store is not False and self._can_store:
                record = await self._references.record(exchange, request.previous_response_id, items, conversation)
                store = functools.partial(self._references.put, record) if run is None else None

            async def answer(attempt: Attempt) -> None:
                attempt.resumption = resumption
                with renamed(_NAMES):
                    chat = chat_request(msgspec.structs.replace(request, model=attempt.model), said, tools)
                    if search is not None:
                        await self._searching(attempt, request, chat, limit, turn, tools, search, record, run)
                        return
                    generation = await pipeline.chat(attempt, chat, limit, turn)
                    rename_ignored(exchange)
                recorder = turn.recorder(attempt, generation)
                if run is None:
                    renderer = ResponseRenderer(request, tools, generation, recorder, store)
                    await pipeline.respond(attempt, generation, renderer, stream=bool(request.stream))
                    return
                assert self._background is not None and record is not None
                inner = ResponseRenderer(
                    request, tools, generation, recorder, None, background=run.id, first_event=run.first_event
                )
                detached = BackgroundRenderer(self._background, run, exchange, inner, record)
                await pipeline.respond(attempt, generation, detached, stream=True)

            def question() -> Question:
                return chat_question(chat_request(request, conversation, tools), limit)

            await pipeline.answer(exchange, request.model, answer, question)

    async def count_input_tokens(self, exchange: Exchange) -> None:
        """The length of the prompt that a response would have."""
        pipeline = self._pipeline
        asked = _counted(exchange, await exchange.body(pipeline.settings.body_limit))
        identify(exchange, None, None)
        tools = OfferedTools(exchange, asked.tools)
        earlier = await self._references.earlier(exchange, asked.previous_response_id)
        if asked.conversation is not None:
            async with self._conversations.open(exchange, asked.conversation, keep_system=False) as turn:
                earlier = msgspec.convert(turn.history, list[ChatMessage])
        conversation = list(earlier)
        if asked.input is not None:
            items = await self._references.resolved(exchange, asked.input)
            read = await with_file_texts(exchange, self._files, items, asked.model, free=True)
            conversation = conversation_of(exchange, read, earlier, tools)
        with renamed(_NAMES):
            chat = chat_request(asked.request(), conversation, tools)
            check_tools(chat)
            messages = template_messages(chat.messages)
            remote = pipeline.permissions.remote(exchange, chat.model)
            if remote is not None:
                found = await pipeline.count_remote(exchange, remote, chat, messages)
                more = {"estimated": True} if found.estimated else {}
                await exchange.reply_json({"object": "response.input_tokens", "input_tokens": found.count, **more})
                return
            model = await pipeline.permissions.find(exchange, chat.model)
            toolbox = toolbox_of(chat, model)
            offered, most = () if toolbox is None else toolbox.tools, most_counted(model)
            prompt = ChatPrompt(pipeline.tokenization, model, offered, exchange.caller.tenant, most)
            async with pipeline.quotas.text_work(exchange, model.base_name, exchange.body_size, only=True) as work:
                check_size(model, messages_size(messages) + tools_size(chat.tools), most, "messages")
                tokens = await prompt.tokens(messages) if messages else []
                work.tokens = len(tokens)
                check_counted(len(tokens), most, "messages")
        await exchange.reply_json({"object": "response.input_tokens", "input_tokens": len(tokens)})

    async def _search(self, exchange: Exchange, request: ResponsesRequest, tools: OfferedTools) -> FileSearch | None:
        """The search that a request offers to the model."""
        asked, at = tools.file_search, tools.file_search_at
        if asked is None:
            return None
        if exchange.header(HEADER) is not None:
            raise InvalidRequest("A stream with `file_search` cannot be resumed: send no `Last-Event-ID`.", param=at)
        if request.rag is not None:
            raise InvalidRequest("`rag` and `file_search` both number their sources; send one of them.", param="rag")
        wanted = StoreSearch.of(
            attribute_filter(asked.filters, f"{at}.filters"),
            asked.max_num_results or DEFAULT_RESULTS,
            asked.ranking_options,
            f"{at}.ranking_options",
        )
        return await self._searches.open(exchange, asked.vector_store_ids, wanted, at)

    async def _searching(
        self,
        attempt: Attempt,
        request: ResponsesRequest,
        chat: ChatRequest,
        limit: TokenLimit,
        turn: Turn,
        tools: OfferedTools,
        search: FileSearch,
        record: ResponseRecord | None,
        run: BackgroundRun | None,
    ) -> None:
        """Answer in steps, with searches between them."""
        store = None if record is None or run is not None else functools.partial(self._references.put, record)

        def render(generation: Generation, recorder: TurnRecorder, totals: StepTotals) -> StepsRenderer:
            rename_ignored(attempt.exchange)
            background, first = (None, None) if run is None else (run.id, run.first_event)
            about = (request, tools, generation, recorder, store, search, totals, loop.said)
            renderer = FileSearchRenderer(*about, background=background, first_event=first)
            if run is None:
                return renderer
            assert self._background is not None and record is not None
            return BackgroundRenderer(self._background, run, attempt.exchange, renderer, record)

        self._pipeline.cache.check(attempt.exchange)
        loop = FileSearchLoop(self._search_parts, attempt, chat, limit, turn, render, search, request.max_tool_calls)
        await loop.run(stream=bool(request.stream) or run is not None)

    async def _truncatable(self, exchange: Exchange, said: list[ChatMessage]) -> tuple[Turn, list[ChatMessage]]:
        """A turn that may leave out the oldest messages, and those that it must not."""
        head = next((i for i, message in enumerate(said) if message.role not in ("system", "developer")), len(said))
        last = max((i for i, message in enumerate(said) if message.role == "user"), default=head)
        history = template_messages(said[head:last])
        if history:
            history = await self._pipeline.content_filter.messages(exchange, history)
        return TruncatedTurn(history), [*said[:head], *said[max(head, last) :]]

    def _checked_background(self, exchange: Exchange, request: ResponsesRequest) -> BackgroundResponses:
        """What generates a response in the background; a 400 where that is not possible."""
        if request.store is False:
            raise InvalidRequest(
                "A response with `background: true` is stored, to be asked for later; `store` cannot be false.",
                param="background",
            )
        if batch_line(exchange) is not None:
            raise InvalidRequest(
                "The requests of a batch run in the background anyway; leave `background` out.", param="background"
            )
        if exchange.header(HEADER) is not None:
            raise InvalidRequest(
                "With `background: true` events are read again with "
                "`GET /v1/responses/{id}?stream=true&starting_after=N`; send no `Last-Event-ID`.",
                param="Last-Event-ID",
            )
        if self._background is None or not self._background.enabled:
            raise not_supported("background", "this gateway stores no responses, or generates none in the background")
        return self._background


def _check(request: ResponsesRequest, *, can_store: bool) -> None:
    for name, why in UNSUPPORTED.items():
        if given(getattr(request, name)):
            raise not_supported(name, why)
    if (request.n or 1) > 1:
        raise InvalidRequest("A response has one answer; `n` must be 1.", param="n")
    if request.response_format is not None and request.text is not None and request.text.format is not None:
        raise InvalidRequest(
            "`text.format` and `response_format` mean the same; send one of them.", param="text.format"
        )
    if request.top_logprobs and LOGPROBS not in (request.include or ()):
        raise InvalidRequest(
            "`top_logprobs` needs `include` with `message.output_text.logprobs`.", param="top_logprobs"
        )
    if request.stream_options is not None:
        if request.stream_options.continuous_usage_stats:
            raise not_supported("stream_options.continuous_usage_stats")
        if not request.stream:
            raise InvalidRequest("`stream_options` is only allowed with `stream: true`.", param="stream_options")
    if request.conversation is not None and request.previous_response_id is not None:
        raise InvalidRequest(
            "`conversation` and `previous_response_id` both say what came before; send one of them.",
            param="previous_response_id",
        )
    if not can_store:
        wanted = {"store": request.store, "previous_response_id": request.previous_response_id}
        for name, value in wanted.items():
            if value:
                raise InvalidRequest(
                    f"`{name}` needs a store, and this gateway stores no responses; send the whole conversation.",
                    param=name,
                    code="unsupported_parameter",
                )
