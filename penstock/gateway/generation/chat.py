"""From a chat request to its generation: checks, content filter, model, sources, prompt, sampling parameters.

Every API family that holds conversations translates its requests to a `ChatRequest`; what follows is here, once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from penstock.gateway.accounting.request_limits import Cap
from penstock.gateway.accounting.targets import check_targets
from penstock.gateway.generation.attempt import Attempt
from penstock.gateway.generation.base import Generation
from penstock.gateway.generation.chat_input import ChatInput, room_for_sources
from penstock.gateway.generation.chat_messages import Message, template_messages
from penstock.gateway.generation.cost_limit import within_cost
from penstock.gateway.generation.engine import EngineGeneration
from penstock.gateway.generation.factory import GenerationFactory
from penstock.gateway.generation.prompt import ChatPrompt
from penstock.gateway.generation.prompt_options import (
    PromptOptions,
    continues,
    kept_tokens,
    known_names,
    prompt_options,
)
from penstock.gateway.generation.remote_generations import RemoteGenerations
from penstock.gateway.generation.request_decoder import ignore_advice
from penstock.gateway.generation.sampling import (
    TokenLimit,
    check_choices,
    check_foreign_tokens,
    check_prompt_scores,
    choice_params,
    fit,
    forbidden_words,
    length_limit,
    sampling_params,
    stop_strings,
)
from penstock.gateway.generation.schemas import ChatRequest, TextFormat
from penstock.gateway.generation.sources import PendingSources, SourceSearch, source_check
from penstock.gateway.generation.spec import TokenPrompt, request_spec
from penstock.gateway.generation.stages import AnswerCache, AnswerGrader
from penstock.gateway.generation.structured_output import with_response_format
from penstock.gateway.generation.thoughts import channels_of, plan, reading, with_thought
from penstock.gateway.generation.tokenization import check_size
from penstock.gateway.generation.tool_choice import (
    check_constrained,
    check_tool_count,
    check_tools,
    grammar_for,
    toolbox_of,
)
from penstock.gateway.generation.turn import STATELESS, Turn, TurnInput
from penstock.protocol.errors import InvalidRequest
from penstock.routing.registry import ModelRegistry, ServedModel
from penstock.text.chat_template import RESERVED


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatGenerations(GenerationFactory):
    """Makes generations for chat requests."""

    registry: ModelRegistry
    remotes: RemoteGenerations
    source_search: SourceSearch
    cache: AnswerCache
    grader: AnswerGrader

    async def make(
        self,
        attempt: Attempt,
        request: ChatRequest,
        limit: TokenLimit,
        turn: Turn = STATELESS,
        following: Sequence[Message] = (),
    ) -> Generation:
        """The generation that answers `request`; raises what is wrong with the request.

        `following`: what the assistant and tools have said since the request's messages.
        """
        if attempt.trial is not None and attempt.trial.wants_again:
            original = request
            attempt.trial.again = lambda other: self.make(
                other, msgspec.structs.replace(original, model=other.model), limit, turn.replayed(), following
            )
        request = with_response_format(request)
        check_targets(attempt.exchange)
        check_tools(request)
        name = self.registry.base_name(request.model)
        exchange = attempt.exchange
        check_choices(1, request.n or 1, self.settings, self.cap(exchange, "choices", name))
        check_tool_count(request, self.cap(exchange, "tools", name))
        limit = limit.capped(self.cap(exchange, "output_tokens", name))
        if continues(request) and (turn.stored or request.server_tools):
            raise InvalidRequest(
                "An answer that continues the last message is one message with it: that is not possible with "
                "`server_tools`, nor in a stored conversation.",
                param="continue_final_message",
            )
        messages = template_messages(request.messages, turn.calls)
        remote = self.registry.remote(request.model)
        if remote is not None:
            said = await self._filtered(attempt, messages)
            following = await self._filtered(attempt, following)
            if self.content_filter.checks_input:
                documents = await self._filtered_value(attempt, request.documents)
                kwargs = await self._filtered_value(attempt, request.chat_template_kwargs)
                request = msgspec.structs.replace(request, documents=documents, chat_template_kwargs=kwargs)
            return await self.remotes.chat(ChatInput(attempt, request, limit, said, turn, following), remote)
        model = self.registry.route(request.model).model
        asked = ChatInput(attempt, request, limit, messages, turn, following)
        size = asked.size
        async with self.quotas.text_work(attempt.exchange, model.base_name, size):
            quota = self.cap(exchange, "context_tokens", model.base_name)
            window = within(model.context_window, quota)
            if window is not None and request.truncate_prompt_tokens is None:
                check_size(model, size, window, "messages", quota)
            said, since = await self._filtered(attempt, messages), await self._filtered(attempt, following)
            asked = replace(asked, messages=said, following=since)
            async with asked.sources(self.source_search) as sources:
                return await self._local(asked, sources)

    async def _filtered(self, attempt: Attempt, messages: Sequence[Message]) -> list[Message]:
        return await self.content_filter.messages(attempt.exchange, list(messages)) if messages else []

    async def _options(
        self, attempt: Attempt, request: ChatRequest, model: ServedModel, last: int | None
    ) -> PromptOptions:
        """What the model is given beside messages passes the content filter too."""
        options = prompt_options(request, allow_template=self.settings.request_templates, last=last)
        given = (options.template_kwargs or {}).keys()
        for name in sorted(given & RESERVED):
            ignore_advice(attempt.exchange, f"chat_template_kwargs.{name}")
        for name in sorted(given - known_names(model.text, options.template) - RESERVED) if given else ():
            if name == "documents":
                template = "`chat_template`" if options.template else f"The chat template of `{model.name}`"
                raise InvalidRequest(
                    f"{template} knows no `documents`; put them into a message, or into a collection and ask with "
                    "`rag`.",
                    param="documents",
                    code="unsupported_parameter",
                )
            ignore_advice(attempt.exchange, f"chat_template_kwargs.{name}")
        if not self.content_filter.checks_input or (options.template_kwargs is None and not options.template):
            return options
        return msgspec.structs.replace(
            options,
            template_kwargs=await self._filtered_value(attempt, options.template_kwargs),
            template=await self._filtered_value(attempt, options.template),
        )

    async def _filtered_value(self, attempt: Attempt, value: Any) -> Any:
        if isinstance(value, str):
            return await self.content_filter.prompt(attempt.exchange, value) if value else value
        if isinstance(value, Mapping):
            return {key: await self._filtered_value(attempt, entry) for key, entry in value.items()}
        if isinstance(value, list):
            return [await self._filtered_value(attempt, entry) for entry in value]
        return value

    async def _local(self, asked: ChatInput, pending: PendingSources | None) -> EngineGeneration:
        attempt, request, limit, turn = asked.attempt, asked.request, asked.limit, asked.turn
        messages, following, exchange = asked.messages, asked.following, attempt.exchange
        stops = stop_strings(request)
        priority = self.admissions.priority(exchange, request.service_tier, request.priority)
        if attempt.is_fallback:
            check_foreign_tokens(request)
        model, info = await self.models.open(attempt, request.model, limit)
        limit = limit.lowered(model.sampling.max_tokens, "sampling.max_tokens")
        toolbox = toolbox_of(request, model)
        request, thoughts = plan(exchange, request, model)
        channels = None if continues(request) or thoughts is None else channels_of(thoughts, model.text)
        params = sampling_params(
            request,
            info,
            model.text.eos_token_ids,
            limit,
            defaults=model.sampling,
            logprobs=(request.top_logprobs or 0) if request.logprobs else None,
            bad_words=forbidden_words(request, model.text),
            grammar=await grammar_for(self.grammars, request, toolbox, exchange, channels),
        )
        check_constrained(model, params.grammar)
        params = self.watermarks.marked(exchange, request.watermark, params)
        quota = self.cap(exchange, "context_tokens", model.base_name)
        window = info.max_model_len if quota is None else min(info.max_model_len, quota.most)
        tools = () if toolbox is None else toolbox.tools
        options = await self._options(
            attempt, request, model, kept_tokens(request.truncate_prompt_tokens, window, limit)
        )
        prompt = ChatPrompt(self.tokenization, model, tools, exchange.caller.tenant, window, options)
        sources = None
        if pending is not None:
            bare = await prompt.tokens(pending.instructed([*messages, *following]))
            room = room_for_sources(window, len(bare), limit)
            with exchange.timeline.phase("retrieve"):
                sources = found = await pending.result(
                    lambda text: len(model.text.encode(text, special=False)),
                    turn.source_room(room, window),
                    source_check(self.content_filter.prompt, exchange),
                )
            await self.content_filter.mark(exchange, lambda: list(found.texts().values()))
        tokens = await turn.tokens(attempt, prompt, TurnInput(messages, following, window, limit, sources))
        check_prompt_scores(request, len(tokens), 1)
        placement = self.place(exchange, model, priority, len(tokens), limit)
        context = placement.window or info.max_model_len
        limit = within_cost(self.quotas, exchange, model, len(tokens), limit, request.n or 1)
        params = fit(params, len(tokens), limit, context, "messages", quota)
        continued = messages[-1]["content"] if options.continue_final else None
        read = None if thoughts is None else reading(thoughts, model.text, tokens, toolbox, continued)
        if thoughts is not None and read is not None:
            if params.grammar and read.in_text:
                begun = read.state == "thinking"
                described = await grammar_for(self.grammars, request, toolbox, exchange, None, read.style, begun)
                params = replace(params, grammar=described)
            params = with_thought(params, thoughts, read)
        if request.prompt_logprobs is not None:
            params = replace(params, prompt_logprobs=request.prompt_logprobs)
        # A stored conversation, tool results and sources are not part of the request: equal requests differ in them.
        # What is said about the prompt's tokens holds for that very prompt.
        about_prompt = request.prompt_logprobs is not None or request.return_token_ids
        # Documents that read alike to the semantic cache may say the opposite.
        comparable = not (turn.stored or following or sources or about_prompt or attempt.exchange.documents)
        spec = request_spec(
            attempt,
            self.settings,
            request,
            model,
            [TokenPrompt(tokens, choice_params(params, request.n, score_once=True))],
            stops=stops,
            priority=priority,
            length_limit=length_limit(params, limit, context, quota),
            logprobs=bool(request.logprobs),
            continuation=options.continue_final,
            continued=continued or "",
            toolbox=toolbox,
            thoughts=read,
            cache_question=self.cache.question(request, messages) if comparable else None,
            placement=placement,
        )
        generation = EngineGeneration(spec, self.metrics)
        if sources is not None:
            # Nothing is added to text that has to be parsed, or whose tokens are shown one by one.
            plain = request.response_format is None or isinstance(request.response_format, TextFormat)
            generation.cite(sources, attribute=plain and toolbox is None and not request.logprobs)
        self.grader.sample(attempt, generation, messages)
        return generation


def within(window: int | None, quota: Cap | None) -> int | None:
    """As much of a model's window as the caller may use."""
    return window if quota is None else min(quota.most, window or quota.most)
