"""POST /v1/tokenize and /v1/detokenize: the tokens and cost of a prompt, without inference."""

from __future__ import annotations

from typing import Any

import msgspec

from penstock.gateway.accounting.attribution import find_model
from penstock.gateway.app.decoding import decode
from penstock.gateway.app.exchange import Exchange
from penstock.gateway.generation.chat_messages import template_messages
from penstock.gateway.generation.sampling import check_token_ids
from penstock.gateway.generation.schemas import DetokenizeRequest, TokenizeRequest
from penstock.gateway.generation.tokenization import Tokenization
from penstock.gateway.generation.tool_choice import for_template, tool_of
from penstock.protocol.errors import InvalidRequest
from penstock.routing.registry import ModelRegistry

_tokenize = msgspec.json.Decoder(TokenizeRequest)
_detokenize = msgspec.json.Decoder(DetokenizeRequest)


class TokenEndpoints:
    """Counts tokens."""

    def __init__(self, registry: ModelRegistry, tokenization: Tokenization, body_limit: int) -> None:
        self._registry = registry
        self._tokenization = tokenization
        self._body_limit = body_limit

    async def tokenize(self, exchange: Exchange) -> None:
        request = decode(_tokenize, await exchange.body(self._body_limit))
        if (request.prompt is None) == (request.messages is None):
            raise InvalidRequest("Send either `prompt` or `messages`.", param="prompt")
        if request.messages is not None and request.add_special_tokens is not None:
            raise InvalidRequest(
                "`add_special_tokens` goes with `prompt`; the chat template writes its own.", param="add_special_tokens"
            )
        if request.prompt is not None and request.add_generation_prompt is not None:
            raise InvalidRequest("`add_generation_prompt` goes with `messages`.", param="add_generation_prompt")
        if request.tools and request.messages is None:
            raise InvalidRequest("`tools` go with `messages`.", param="tools")
        model = find_model(self._registry, exchange, request.model)
        if request.messages is not None:
            tools = tuple(map(tool_of, request.tools or ()))
            messages, described = for_template(template_messages(request.messages), tools, model)
            tokens = await self._tokenization.encode_chat(
                model,
                messages,
                tools=described,
                add_generation_prompt=request.add_generation_prompt is not False,
            )
        else:
            tokens = await self._tokenization.encode(
                model, request.prompt or "", add_special_tokens=request.add_special_tokens is not False
            )
        count, window = len(tokens), model.context_window
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
                "count": count,
                "max_model_len": window,
                "fits": window is None or count + (request.max_tokens or 1) <= window,
                "estimated_cost": estimate,
            }
        )

    async def detokenize(self, exchange: Exchange) -> None:
        request = decode(_detokenize, await exchange.body(self._body_limit))
        model = find_model(self._registry, exchange, request.model)
        check_token_ids(request.tokens, model.text.vocab_size, "tokens")
        text = model.text.decode(request.tokens)
        await exchange.reply_json(
            {
                "object": "detokenization",
                "model": model.name,
                "text": text,
                "prompt": text,
                "count": len(request.tokens),
            }
        )
