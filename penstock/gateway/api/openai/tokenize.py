"""POST /v1/tokenize and /v1/detokenize: the tokens and cost of a prompt, without inference. `/tokenize` and
`/detokenize` are the same under the paths of other servers, whose forms are told by the name of the text. GET
/tokenizer_info: what a client needs to know of the tokenizer."""

from __future__ import annotations

from typing import Any

from msgspec import Struct

from penstock.gateway.accounting.quotas import Quotas
from penstock.gateway.api.openai.token_forms import pieces, spans
from penstock.gateway.app.decoding import decode_query
from penstock.gateway.app.dialects import LLAMA_CPP, TGI
from penstock.gateway.app.exchange import Exchange
from penstock.gateway.generation.chat_messages import strip_parts, template_messages
from penstock.gateway.generation.input_files import InputFiles
from penstock.gateway.generation.permissions import Permissions
from penstock.gateway.generation.prompt_options import prompt_options
from penstock.gateway.generation.remote_count import count_remote
from penstock.gateway.generation.request_decoder import RequestDecoder
from penstock.gateway.generation.sampling import check_token_ids
from penstock.gateway.generation.schemas import DetokenizeRequest, TokenizeRequest
from penstock.gateway.generation.tokenization import (
    MOST_COUNTED,
    Tokenization,
    check_counted,
    check_size,
    messages_size,
    most_counted,
    tools_size,
)
from penstock.gateway.generation.tokenized_model import TokenizedModel, known_text
from penstock.gateway.generation.tool_choice import tool_of
from penstock.protocol.errors import InvalidRequest
from penstock.routing.registry import ServedModel
from penstock.routing.remotes import RemoteModel

_tokenize = RequestDecoder(TokenizeRequest, strip_parts)
CHAT_OPTIONS = ("add_generation_prompt", "continue_final_message", "chat_template", "chat_template_kwargs", "documents")
OTHER_OPTIONS = ("add_special", "parse_special", "with_pieces")
NOT_TEMPLATE = ("prompt", "content", "inputs", "add_special_tokens", "max_tokens", "return_token_strs")
_detokenize = RequestDecoder(DetokenizeRequest)


class TokenizerQuery(Struct, forbid_unknown_fields=True):
    model: str | None = None
    """The first model when not given."""


class TokenEndpoints:
    """Counts tokens."""

    def __init__(
        self,
        permissions: Permissions,
        tokenization: Tokenization,
        quotas: Quotas,
        body_limit: int,
        files: InputFiles,
        *,
        request_templates: bool = False,
    ) -> None:
        """`request_templates`: whether requests may bring a chat template."""
        self._request_templates = request_templates
        self._permissions = permissions
        self._tokenization = tokenization
        self._quotas = quotas
        self._body_limit = body_limit
        self._files = files

    async def tokenize(self, exchange: Exchange) -> None:
        request = _tokenize(exchange, await exchange.body(self._body_limit))
        if request.content is not None or request.inputs is not None:
            await self._other_form(exchange, request)
            return
        for name in OTHER_OPTIONS:
            if getattr(request, name) is not None:
                raise InvalidRequest(f"`{name}` goes with `content`.", param=name)
        if (request.prompt is None) == (request.messages is None):
            raise InvalidRequest("Send either `prompt` or `messages`.", param="prompt")
        if request.messages is not None and request.add_special_tokens:
            raise InvalidRequest(
                "`add_special_tokens` goes with `prompt`; the chat template writes its own.", param="add_special_tokens"
            )
        for name in CHAT_OPTIONS:
            if request.prompt is not None and getattr(request, name) is not None:
                raise InvalidRequest(f"`{name}` goes with `messages`.", param=name)
        if request.tools and request.messages is None:
            raise InvalidRequest("`tools` go with `messages`.", param="tools")
        if request.messages is not None:
            name = request.model or self._permissions.first(exchange).name
            request.messages = await self._files.chat(exchange, request.messages, name, free=True)
        if request.model is not None:
            remote = self._permissions.remote(exchange, request.model)
            if remote is not None:
                await self._tokenize_remote(exchange, request, remote)
                return
        model = await self._model(exchange, request.model)
        async with self._quotas.text_work(exchange, model.base_name, exchange.body_size, only=True) as work:
            tokens = await self._tokens(exchange, request, model)
            work.tokens = len(tokens)
        spelled = [model.text.token_spelling(token) for token in tokens] if request.return_token_strs else None
        await self._reply(exchange, request, model, tokens, len(tokens), spelled)

    async def _other_form(self, exchange: Exchange, request: TokenizeRequest) -> None:
        """A text by its name in llama.cpp's API or in that of text-generation-inference."""
        llama = request.content is not None
        exchange.dialect = LLAMA_CPP if llama else TGI
        own = ("model", "content", *OTHER_OPTIONS) if llama else ("model", "inputs", "add_special_tokens")
        for name in request.__struct_fields__:
            if name not in own and getattr(request, name) is not None:
                raise InvalidRequest(f"`{name}` does not go with `{own[1]}`.", param=name)
        model = await self._tokenized(exchange, request.model)
        text, most = request.content if llama else request.inputs, most_counted(model)
        assert text is not None
        async with self._quotas.text_work(exchange, model.name, len(text), only=True) as work:
            check_size(model, len(text), most, own[1])
            tokens = await self._tokenization.encode(
                model,
                text,
                tenant=exchange.caller.tenant,
                most=most,
                add_special_tokens=bool(request.add_special) if llama else request.add_special_tokens is not False,
                special=request.parse_special is not False,
            )
            work.tokens = len(tokens)
            check_counted(len(tokens), most, own[1])
        if llama:
            await exchange.reply_json({"tokens": pieces(model.text, tokens) if request.with_pieces else tokens})
        else:
            await exchange.reply_json(spans(model.text, tokens, text))

    async def apply_template(self, exchange: Exchange) -> None:
        """The prompt of a conversation as text: what `/completion` makes the same tokens of, without those that it
        adds itself."""
        request = _tokenize(exchange, await exchange.body(self._body_limit))
        if request.messages is None:
            raise InvalidRequest("Missing required parameter: `messages`.", param="messages", code="missing_parameter")
        for name in (*NOT_TEMPLATE, *OTHER_OPTIONS):
            if getattr(request, name) is not None:
                raise InvalidRequest(f"`{name}` does not go with `messages`.", param=name)
        model = await self._model(exchange, request.model)
        request.messages = await self._files.chat(exchange, request.messages, model.name, free=True)
        async with self._quotas.text_work(exchange, model.base_name, exchange.body_size, only=True) as work:
            tokens = await self._tokens(exchange, request, model)
            work.tokens = len(tokens)
            tokens = model.text.without_added(tokens)
            text = await self._tokenization.decode(model, tokens, tenant=exchange.caller.tenant)
        await exchange.reply_json({"prompt": text})

    async def _tokenize_remote(self, exchange: Exchange, request: TokenizeRequest, model: RemoteModel) -> None:
        """For a model that another server runs. `estimated` is true where the count is an estimate; `tokens` are there
        where they are known."""
        async with self._quotas.text_work(exchange, model.base_name, exchange.body_size, only=True) as work:
            found = await count_remote(
                exchange,
                model,
                self._tokenization,
                text=request.prompt or "",
                messages=None if request.messages is None else template_messages(request.messages),
                tools=request.tools or (),
                options=prompt_options(request, allow_template=self._request_templates),
                add_special_tokens=request.add_special_tokens is not False,
            )
            work.tokens = found.count
            check_counted(
                found.count,
                max(model.context_window or 0, MOST_COUNTED),
                "prompt" if request.messages is None else "messages",
            )
        spelled = None
        if request.return_token_strs and model.text is not None and found.tokens is not None:
            spelled = [model.text.token_spelling(token) for token in found.tokens]
        more = {"estimated": True} if found.estimated else {}
        await self._reply(exchange, request, model, found.tokens or [], found.count, spelled, **more)

    async def _reply(
        self,
        exchange: Exchange,
        request: TokenizeRequest,
        model: ServedModel | RemoteModel,
        tokens: list[int],
        count: int,
        spelled: list[str] | None,
        **more: bool,
    ) -> None:
        window = model.context_window
        if isinstance(model, RemoteModel) and window is None and model.text is not None:
            window = model.text.context_length
        estimate: dict[str, Any] = {
            "input": count * model.input_price / 1e6,
            "output": (request.max_tokens or 0) * model.output_price / 1e6,
        }
        estimate["total"] = estimate["input"] + estimate["output"]
        await exchange.reply_json(
            {
                "object": "tokenization",
                "model": model.name,
                "tokens": tokens,
                "token_strs": spelled,
                "count": count,
                "max_model_len": window,
                "fits": window is None or count + (request.max_tokens or 1) <= window,
                "estimated_cost": estimate,
                **more,
            }
        )

    async def _model(self, exchange: Exchange, name: str | None) -> ServedModel:
        permissions = self._permissions
        return await permissions.find(exchange, name or permissions.first(exchange).name)

    async def _tokens(self, exchange: Exchange, request: TokenizeRequest, model: ServedModel) -> list[int]:
        most, tenant = most_counted(model), exchange.caller.tenant
        if request.messages is not None:
            messages = template_messages(request.messages)
            check_size(model, messages_size(messages) + tools_size(request.tools), most, "messages")
            tokens = await self._tokenization.encode_chat(
                model,
                messages,
                tenant=tenant,
                most=most,
                tools=tuple(map(tool_of, request.tools or ())),
                options=prompt_options(request, allow_template=self._request_templates),
            )
        else:
            text = request.prompt or ""
            check_size(model, len(text), most, "prompt")
            tokens = await self._tokenization.encode(
                model, text, tenant=tenant, most=most, add_special_tokens=request.add_special_tokens is not False
            )
        check_counted(len(tokens), most, "prompt" if request.messages is None else "messages")
        return tokens

    async def _tokenized(self, exchange: Exchange, name: str | None) -> TokenizedModel:
        """The model, whose tokenizer must be known here."""
        remote = None if name is None else self._permissions.remote(exchange, name)
        if remote is None:
            return await self._model(exchange, name)
        return known_text(remote)

    async def tokenizer_info(self, exchange: Exchange) -> None:
        asked = decode_query(TokenizerQuery, exchange.scope)
        model = await self._tokenized(exchange, asked.model)
        text = model.text
        await exchange.reply_json(
            {
                "object": "tokenizer",
                "model": model.name,
                **text.special_tokens,
                "chat_template": text.template_source or None,
                "vocab_size": text.vocab_size,
                "model_max_length": model.context_window,
            }
        )

    async def detokenize(self, exchange: Exchange) -> None:
        request = _detokenize(exchange, await exchange.body(self._body_limit))
        model = await self._tokenized(exchange, request.model)
        count, most = len(request.tokens), most_counted(model)
        async with self._quotas.text_work(exchange, model.name, count, only=True) as work:
            work.tokens = count
            check_counted(count, most, "tokens")
            check_token_ids(request.tokens, model.text.vocab_size, "tokens")
            skip = bool(request.skip_special_tokens)
            tenant = exchange.caller.tenant
            text = await self._tokenization.decode(model, request.tokens, tenant=tenant, skip_special=skip)
        await exchange.reply_json(
            {
                "object": "detokenization",
                "model": model.name,
                "text": text,
                "prompt": text,
                "content": text,
                "count": count,
            }
        )
