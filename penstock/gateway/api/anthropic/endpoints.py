"""POST /v1/messages and /v1/messages/count_tokens"""

from __future__ import annotations

import msgspec

from penstock.gateway.accounting.attribution import identify
from penstock.gateway.api.anthropic.chat_request import NAMES, chat_request, rename_ignored
from penstock.gateway.api.anthropic.documents import read_documents
from penstock.gateway.api.anthropic.renderer import MessageRenderer
from penstock.gateway.api.anthropic.schemas import CountTokensRequest, MessagesRequest
from penstock.gateway.app.dialects import renamed
from penstock.gateway.app.exchange import Exchange
from penstock.gateway.generation.attempt import Attempt
from penstock.gateway.generation.chat_messages import template_messages
from penstock.gateway.generation.input_files import InputFiles
from penstock.gateway.generation.pipeline import GenerationPipeline
from penstock.gateway.generation.prompt import ChatPrompt
from penstock.gateway.generation.prompt_options import prompt_options
from penstock.gateway.generation.question import chat_question
from penstock.gateway.generation.request_decoder import RequestDecoder
from penstock.gateway.generation.resumption import asked_for
from penstock.gateway.generation.sampling import token_limit
from penstock.gateway.generation.thoughts import plan
from penstock.gateway.generation.tokenization import (
    check_counted,
    check_size,
    messages_size,
    most_counted,
    tools_size,
)
from penstock.gateway.generation.tool_choice import check_tools, toolbox_of

_messages = RequestDecoder(MessagesRequest)
_count = RequestDecoder(CountTokensRequest)


class MessageEndpoints:
    def __init__(self, pipeline: GenerationPipeline, files: InputFiles) -> None:
        self._pipeline = pipeline
        self._files = files

    async def create_message(self, exchange: Exchange) -> None:
        pipeline, settings = self._pipeline, self._pipeline.settings
        request = _messages(exchange, await exchange.body(settings.body_limit))
        identify(exchange, None if request.metadata is None else request.metadata.user_id, None)
        limit = token_limit(request.max_tokens, settings, default=None, param="max_tokens", clip=True)
        await read_documents(exchange, self._files, request.messages, request.model)
        chat = chat_request(exchange, request)
        resumption = asked_for(exchange, stream=request.stream)

        async def answer(attempt: Attempt) -> None:
            attempt.resumption = resumption
            with renamed(NAMES):
                asked = msgspec.structs.replace(chat, model=attempt.model)
                generation = await pipeline.chat(attempt, asked, limit)
                rename_ignored(exchange)
            renderer = MessageRenderer(generation, exchange.request_id, request)
            await pipeline.respond(attempt, generation, renderer, stream=bool(request.stream))

        await pipeline.answer(exchange, request.model, answer, lambda: chat_question(chat, limit))

    async def count_tokens(self, exchange: Exchange) -> None:
        pipeline = self._pipeline
        request = _count(exchange, await exchange.body(pipeline.settings.body_limit))
        await read_documents(exchange, self._files, request.messages, request.model, free=True)
        with renamed(NAMES):
            chat = chat_request(exchange, request)
            check_tools(chat)
            messages = template_messages(chat.messages)
            remote = pipeline.permissions.remote(exchange, request.model)
            if remote is not None:
                found = await pipeline.count_remote(exchange, remote, chat, messages)
                more = {"estimated": True} if found.estimated else {}
                await exchange.reply_json({"input_tokens": found.count, **more})
                return
            model = await pipeline.permissions.find(exchange, request.model)
            toolbox = toolbox_of(chat, model)
            tools, most = () if toolbox is None else toolbox.tools, most_counted(model)
            chat, _ = plan(exchange, chat, model)
            rename_ignored(exchange)
            options = prompt_options(chat)
            prompt = ChatPrompt(pipeline.tokenization, model, tools, exchange.caller.tenant, most, options)
            async with pipeline.quotas.text_work(exchange, model.base_name, exchange.body_size, only=True) as work:
                check_size(model, messages_size(messages) + tools_size(chat.tools), most, "messages")
                tokens = await prompt.tokens(messages)
                work.tokens = len(tokens)
                check_counted(len(tokens), most, "messages")
        await exchange.reply_json({"input_tokens": len(tokens)})
