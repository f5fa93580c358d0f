"""POST /v1/chat/completions"""

from __future__ import annotations

import functools
import operator
import time
from collections.abc import Sequence
from typing import Any

import msgspec

from penstock.gateway.accounting.attribution import identify
from penstock.gateway.api.openai.chat_calls import calls_of
from penstock.gateway.api.openai.chat_store import ChatStore
from penstock.gateway.api.openai.stored_chat import Keep, StoringRenderer, keeper
from penstock.gateway.app.decoding import given, not_supported
from penstock.gateway.app.dialects import renamed
from penstock.gateway.app.exchange import Exchange, encode_json
from penstock.gateway.generation import thoughts as reasoning
from penstock.gateway.generation.attempt import Attempt
from penstock.gateway.generation.base import Generation
from penstock.gateway.generation.chat_messages import message_text, strip_parts
from penstock.gateway.generation.choice import AnyToken, Piece
from penstock.gateway.generation.engine import EngineGeneration
from penstock.gateway.generation.input_files import InputFiles
from penstock.gateway.generation.logprobs import logprob_entries, prompt_entries
from penstock.gateway.generation.older_functions import OLDER_NAMES, with_tools
from penstock.gateway.generation.pipeline import GenerationPipeline
from penstock.gateway.generation.prompt_options import continues
from penstock.gateway.generation.question import chat_question
from penstock.gateway.generation.remote import RemoteGeneration
from penstock.gateway.generation.renderer import DONE
from penstock.gateway.generation.request_decoder import RequestDecoder
from penstock.gateway.generation.resumption import asked_for
from penstock.gateway.generation.sampling import token_limit
from penstock.gateway.generation.schemas import CHAT_UNSUPPORTED, ChatRequest, served_tier
from penstock.gateway.generation.spellings import respell
from penstock.gateway.generation.turn import Conversations, TurnRecorder, UnstoredAnswer
from penstock.gateway.server_tools.answers import ToolAnswers
from penstock.gateway.server_tools.steps import StepsRenderer, StepTotals
from penstock.protocol.errors import InvalidRequest

_decoder = RequestDecoder(ChatRequest, strip_parts)
_unsupported = operator.attrgetter(*CHAT_UNSUPPORTED)
_NONE_GIVEN = (msgspec.UNSET,) * len(CHAT_UNSUPPORTED)


class ChatEndpoints:
    def __init__(
        self,
        pipeline: GenerationPipeline,
        conversations: Conversations,
        server_tools: ToolAnswers,
        store: ChatStore | None,
        files: InputFiles,
    ) -> None:
        """`store`: where completions with `store: true` are kept."""
        self._pipeline = pipeline
        self._conversations = conversations
        self._server_tools = server_tools
        self._store = store
        self._files = files

    async def chat_completions(self, exchange: Exchange) -> None:
        pipeline, settings = self._pipeline, self._pipeline.settings
        request = _decoder(exchange, await exchange.body(settings.body_limit))
        if request.stream_options is not None:
            request.stream_options.apply(exchange)
        identify(exchange, request.user or request.safety_identifier, request.metadata)
        respell(exchange, request)
        _check(request)
        keep = self._keep(exchange, request)
        request = with_tools(request)
        request = msgspec.structs.replace(
            request, messages=await self._files.chat(exchange, request.messages, request.model)
        )
        asked, param = _max_tokens(request)
        limit = token_limit(asked, settings, default=settings.default_max_tokens, param=param)
        resumption = asked_for(
            exchange,
            stream=request.stream,
            n=(request.n or 1) > 1,
            server_tools=request.server_tools,
            conversation=request.conversation,
        )
        async with self._conversations.open(exchange, request.conversation, choices=request.n or 1) as turn:

            async def answer(attempt: Attempt) -> None:
                chat = request
                if attempt.model != request.model:
                    chat = msgspec.structs.replace(request, model=attempt.model)
                if chat.server_tools:
                    render = functools.partial(_renderer, keep, chat)
                    await self._server_tools.answer(attempt, chat, limit, turn, render)
                    return
                attempt.resumption = resumption
                generation = await pipeline.chat(attempt, chat, limit, turn)
                renderer = _renderer(keep, chat, generation, turn.recorder(attempt, generation))
                await pipeline.respond(attempt, generation, renderer, stream=bool(chat.stream))

            question = functools.partial(chat_question, request, limit, turn)
            with renamed(OLDER_NAMES if request.functions else ()):
                await pipeline.answer(exchange, request.model, answer, question)

    def _keep(self, exchange: Exchange, request: ChatRequest) -> Keep | None:
        if not request.store:
            return None
        if self._store is None:
            raise InvalidRequest(
                "`store` needs a store, and this gateway stores no completions.",
                param="store",
                code="unsupported_parameter",
            )
        return keeper(self._store, exchange, request)


def _renderer(
    keep: Keep | None,
    request: ChatRequest,
    generation: Generation,
    recorder: TurnRecorder,
    totals: StepTotals | None = None,
) -> StepsRenderer:
    renderer = ChatRenderer(request, generation, recorder, totals)
    if keep is None:
        return renderer
    unstreamed = msgspec.structs.replace(request, stream=None, stream_options=None)
    plain = ChatRenderer(unstreamed, generation, UnstoredAnswer(generation), totals)
    return StoringRenderer(renderer, plain, len(generation.choices), keep)


def _check(request: ChatRequest) -> None:
    if _unsupported(request) != _NONE_GIVEN:
        for name, why in CHAT_UNSUPPORTED.items():
            if given(getattr(request, name)):
                raise not_supported(name, why)
    if given(request.modalities) and _plain(request.modalities) != ["text"]:
        raise not_supported("modalities", 'models here write text; leave it out, or send ["text"]')
    if request.server_tools and (request.return_token_ids or request.prompt_logprobs is not None):
        param = "return_token_ids" if request.return_token_ids else "prompt_logprobs"
        raise InvalidRequest(f"With `server_tools` an answer has several prompts; leave `{param}` out.", param=param)
    if request.top_logprobs is not None and not request.logprobs:
        raise InvalidRequest("`top_logprobs` needs `logprobs: true`.", param="top_logprobs")


def _plain(raw: Any) -> Any:
    return msgspec.json.decode(bytes(raw))


def _max_tokens(request: ChatRequest) -> tuple[int | None, str]:
    old, new = request.max_tokens, request.max_completion_tokens
    if old is not None and new is not None and old != new:
        raise InvalidRequest(
            "`max_tokens` and `max_completion_tokens` differ; send one of them.", param="max_completion_tokens"
        )
    if old == 0:
        raise InvalidRequest("`max_tokens` must be at least 1.", param="max_tokens")
    return (new, "max_completion_tokens") if new is not None else (old, "max_tokens")


class ChatRenderer(StepsRenderer):
    """`chat.completion` and `chat.completion.chunk` objects."""

    def __init__(
        self,
        request: ChatRequest,
        generation: Generation,
        recorder: TurnRecorder,
        totals: StepTotals | None = None,
    ) -> None:
        """`totals`: of an answer that takes several steps."""
        self._recorder = recorder
        self._totals = totals
        model = generation.model
        self._generation = generation
        self._text = generation.text
        self._logprobs = bool(request.logprobs)
        self._top = request.top_logprobs or 0
        self._prompt_top = request.prompt_logprobs
        self._ids = bool(request.return_token_ids)
        self._as_ids = bool(request.return_tokens_as_token_ids)
        self._thoughts = not reasoning.asked(request).hidden
        self._calls = calls_of(request)
        self._echoed = continued_text(request) if request.echo else ""
        self._usage = bool(request.stream_options and request.stream_options.include_usage)
        self._continuous = bool(request.stream_options and request.stream_options.continuous_usage_stats)
        self._head: dict[str, Any] = {
            "id": f"chatcmpl-{generation.id}",
            "object": "chat.completion.chunk" if request.stream else "chat.completion",
            "created": int(time.time()),
            "model": model.name,
            "system_fingerprint": model.fingerprint,
        }
        if request.service_tier is not None:
            self._head["service_tier"] = served_tier(request.service_tier)
        if request.stream:  # everything around the text of a chunk is the same every time; encode it once
            self._before = b"data: " + encode_json(self._head)[:-1] + b',"choices":['
            self._after = b'],"usage":null}\n\n' if self._usage else b"]}\n\n"

    def opening(self) -> bytes:
        delta = {"role": "assistant", "content": self._echoed, "refusal": None}
        about = self._about()
        if not about:
            return b"".join(self._chunk(choice.index, delta) for choice in self._generation.choices)
        first, *others = self._generation.choices
        choice = {"index": first.index, "delta": delta, "logprobs": None, "finish_reason": None}
        usage = {"usage": self._used()} if self._continuous else {"usage": None} if self._usage else {}
        opening = b"data: %b\n\n" % encode_json({**self._head, "choices": [choice], **about, **usage})
        return opening + b"".join(self._chunk(other.index, delta) for other in others)

    def event(self, piece: Piece) -> bytes:
        data = b""
        self._recorder.add(piece)
        ids = piece.token_ids
        if piece.reasoning and self._thoughts:
            data += self._chunk(piece.index, _thought(piece.reasoning))
        if piece.text or piece.tokens:
            if not piece.tokens and ids is None:
                data += b'%b{"index":%d,"delta":{"content":%b},"logprobs":null,"finish_reason":null}%b' % (
                    self._before,
                    piece.index,
                    encode_json(piece.text),
                    self._end(),
                )
            else:
                logprobs = self._shown_logprobs(piece.tokens)
                data += self._chunk(piece.index, {"content": piece.text}, logprobs=logprobs, token_ids=ids)
                ids = None
        if piece.citations:
            data += self._chunk(piece.index, {"annotations": self._annotations([piece])})
        for delta in self._calls.deltas(piece.index, piece.calls or (), ended=piece.finish_reason is not None):
            data += self._chunk(piece.index, delta)
        if piece.finish_reason is not None:
            reason = self._calls.finish_reason(piece.finish_reason)
            data += self._chunk(piece.index, {}, finish_reason=reason, stop_reason=piece.stop_reason, token_ids=ids)
        elif ids is not None:
            data += self._chunk(piece.index, {}, token_ids=ids)
        return data

    def tool_event(self, event: dict[str, Any]) -> bytes:
        # An ordinary chunk, so that clients which do not know the field ignore it.
        choice = {"index": 0, "delta": {}, "logprobs": None, "finish_reason": None}
        return self._before + encode_json(choice) + b'],"tool_event":' + encode_json(event) + self._end()[1:]

    def closing(self) -> bytes:
        if not self._usage:
            return DONE
        usage = encode_json({**self._head, "choices": [], "usage": self._used()})
        return b"data: " + usage + b"\n\n" + DONE

    def whole(self, pieces: list[list[Piece]]) -> bytes:
        choices = []
        for index, parts in enumerate(pieces):
            tokens = [token for part in parts for token in part.tokens]
            message: dict[str, Any] = {
                "role": "assistant",
                "content": self._echoed + "".join(part.text for part in parts),
                "refusal": None,
                "annotations": self._annotations(parts),
            }
            if self._thoughts and (thoughts := "".join(part.reasoning for part in parts)):
                message |= _thought(thoughts)
            if calls := [call for part in parts for call in part.calls or ()]:
                message["content"] = message["content"] or None
                message |= self._calls.whole(calls)
            choice: dict[str, Any] = {
                "index": index,
                "message": message,
                "logprobs": self._shown_logprobs(tokens) if self._logprobs else None,
                "finish_reason": self._calls.finish_reason(parts[-1].finish_reason),
            }
            if parts[-1].stop_reason is not None:
                choice["stop_reason"] = parts[-1].stop_reason
            if self._ids:
                choice["token_ids"] = [id for part in parts for id in part.token_ids or ()]
            choices.append(choice)
        body = {**self._head, "choices": choices, "usage": self._used()}
        if self._totals is not None:
            body["tool_events"] = self._totals.events
        for piece in pieces[0]:
            self._recorder.add(piece)
        return encode_json({**body, **self._about()})

    def _shown_logprobs(self, tokens: Sequence[AnyToken]) -> dict[str, Any] | None:
        if not self._logprobs:
            return None
        return {"content": logprob_entries(self._text, tokens, self._top, as_ids=self._as_ids), "refusal": None}

    def _used(self) -> dict[str, object]:
        return self._generation.usage() if self._totals is None else self._totals.usage()

    async def before_end(self) -> None:
        await self._recorder.store()

    def _about(self) -> dict[str, Any]:
        """What the answer says about its conversation, its prompt and its sources."""
        about: dict[str, Any] = {"conversation": self._recorder.report} if self._recorder.report else {}
        if isinstance(self._generation, EngineGeneration) and (self._ids or self._prompt_top is not None):
            prompt, text = self._generation.spec.prompts[0].tokens, self._generation.model.text
            if self._prompt_top is not None:
                scores = self._generation.choices[0].prompt_logprobs
                about["prompt_logprobs"] = prompt_entries(text, prompt, scores, self._prompt_top)
            if self._ids:
                about["prompt_token_ids"] = prompt
        elif isinstance(self._generation, RemoteGeneration) and self._ids:
            about["prompt_token_ids"] = self._generation.prompt_token_ids
        sources = self._generation.sources
        return about if sources is None else {**about, "rag": sources.report()}

    def _annotations(self, pieces: list[Piece]) -> list[dict[str, Any]]:
        sources = self._generation.sources
        if sources is None:
            return []
        return [sources.annotation(citation) for piece in pieces for citation in piece.citations]

    def _chunk(
        self,
        index: int,
        delta: dict[str, Any],
        *,
        logprobs: dict[str, Any] | None = None,
        finish_reason: str | None = None,
        stop_reason: str | int | None = None,
        token_ids: list[int] | None = None,
    ) -> bytes:
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}
        if stop_reason is not None:
            choice["stop_reason"] = stop_reason
        if token_ids is not None:
            choice["token_ids"] = token_ids
        return self._before + encode_json(choice) + self._end()

    def _end(self) -> bytes:
        """The end of a chunk."""
        return b'],"usage":%b}\n\n' % encode_json(self._used()) if self._continuous else self._after


def continued_text(request: ChatRequest) -> str:
    """The text that the answer continues; empty where it is an answer of its own."""
    return message_text(request.messages[-1], len(request.messages) - 1) if continues(request) else ""


def _thought(text: str) -> dict[str, str]:
    """Under the name that DeepSeek gave it, which most clients read, and that of OpenRouter and newer vLLM."""
    return {"reasoning_content": text, "reasoning": text}
