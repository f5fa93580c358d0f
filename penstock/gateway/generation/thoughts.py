"""How much a model thinks before its answer, and how its thoughts are told from it.

Requests say it in many words (`reasoning_effort`, `reasoning`, `thinking`, `enable_thinking`, `thinking_budget` and
others); `asked` reads all of them. Where the chat template has a variable for it, the template is told; what it has no
word for becomes a budget: the engine closes a thought that has used it up, and the answer follows. A model that does
not think cannot be told to: then they are advice, named in `x-penstock-ignored`.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

import msgspec
from msgspec import Struct

from penstock.engine.request import SamplingParams, Thought
from penstock.gateway.app.exchange import Exchange
from penstock.gateway.generation.chat_messages import thought_of
from penstock.gateway.generation.prompt_options import known_names
from penstock.gateway.generation.request_decoder import ignore_advice
from penstock.gateway.generation.schemas import ChatRequest, Effort
from penstock.protocol.errors import InvalidRequest
from penstock.routing.registry import ServedModel
from penstock.text import TextModel
from penstock.text.thought_splitter import State, ThoughtSplitter, continued_state, prompt_state
from penstock.text.thought_styles import ReasoningSetting, ThoughtStyle, choose
from penstock.tools.channels import ChannelSplitter, ChannelTokens
from penstock.tools.toolbox import Toolbox

EFFORT_BUDGETS: Mapping[Effort, int | None] = {
    "none": 0,
    "minimal": 256,
    "low": 1024,
    "medium": 8192,
    "high": None,
    "xhigh": None,
    "max": None,
}
"""Tokens of a thought, for templates that have no variable for the effort; None: any number."""
_TEMPLATE_EFFORTS: Mapping[Effort, str] = {"none": "low", "minimal": "low", "xhigh": "high", "max": "high"}
"""What gpt-oss, which knows low, medium and high, is told instead."""
EFFORT = "reasoning_effort"
SWITCHES = ("enable_thinking", "thinking", "reasoning")
"""Variables by which chat templates are told whether to think."""
BUDGETS = (
    *("thinking_budget", "thinking_token_budget", "max_reasoning_tokens"),
    *("thinking_budget_tokens", "reasoning_budget"),
)
"""The last two are llama.cpp's, with -1 for the default of the server."""
BUDGET = "thinking_budget"
"""The variable by which Seed-OSS is told how many tokens it may think for; the engine keeps to them in any case."""
_FOR_TEMPLATES = (("reasoning", "summary"), ("reasoning", "generate_summary"), ("thinking", "clear_thinking"))
"""Fields that only some templates have a variable for."""
PARAMETERS = (EFFORT, "reasoning", "thinking", "enable_thinking", *BUDGETS)
_MESSAGE_FIELDS = ("reasoning_content", "message.reasoning", ".thinking", "'thinking'")
"""How chat templates name the thought of a message."""
_BEGIN_SPACES = ("", "\n", "\n\n", " ")
"""White space that models put before the beginning of a thought."""


class Asked(Struct, frozen=True):
    """What a request says about thinking."""

    names: tuple[str, ...] = ()
    """The parameters that say it."""
    enabled: bool | None = None
    effort: Effort | None = None
    budget: int | None = None
    hidden: bool = False
    """The client does not want to see thoughts."""


def asked(request: ChatRequest) -> Asked:
    """A 400 where two parameters contradict each other."""
    names = tuple(name for name in PARAMETERS if getattr(request, name) is not None)
    reasoning, thinking = request.reasoning, request.thinking
    excluded = None if reasoning is None else reasoning.exclude
    if excluded is not None and request.include_reasoning is excluded:
        raise InvalidRequest(
            "`reasoning.exclude` contradicts `include_reasoning`; send one of them.", param="reasoning.exclude"
        )
    hidden = request.include_reasoning is False or bool(excluded)
    if not names:
        return Asked(hidden=hidden)
    effort = _one({EFFORT: request.reasoning_effort, "reasoning.effort": reasoning and reasoning.effort})
    budget = _one(_budgets(request))
    enabled = _one(
        {
            "enable_thinking": request.enable_thinking,
            "thinking.type": None if thinking is None else {"enabled": True, "disabled": False}.get(thinking.type),
            "reasoning.enabled": reasoning and reasoning.enabled,
        }
    )
    if effort is not None:
        # In the Messages API an effort without thinking is no contradiction: it is about the answer as well.
        switch = "enable_thinking" if request.enable_thinking is not None else "reasoning.enabled"
        said = request.enable_thinking if request.enable_thinking is not None else reasoning and reasoning.enabled
        if said is not None and said != (effort != "none"):
            raise InvalidRequest(f"An effort of `{effort}` contradicts `{switch}`; send one of them.", param=switch)
        enabled = effort != "none" if enabled is None else enabled
    return Asked(names, enabled, effort, budget, hidden)


def _budgets(request: ChatRequest) -> dict[str, int | None]:
    """The budget, under every name that it has."""
    reasoning, thinking = request.reasoning, request.thinking
    return {
        **{name: None if (value := getattr(request, name)) == -1 else value for name in BUDGETS},
        "reasoning.max_tokens": None if reasoning is None else reasoning.max_tokens,
        "thinking.budget_tokens": None if thinking is None else thinking.budget_tokens,
    }


def _one(given: Mapping[str, Any]) -> Any:
    """The value that was given, under whichever name."""
    found = {name: value for name, value in given.items() if value is not None}
    if len(set(found.values())) > 1:
        *_, name, other = found
        raise InvalidRequest(f"`{name}` and `{other}` differ; send one of them.", param=other)
    return next(iter(found.values()), None)


class Plan(Struct, frozen=True):
    """How a model answers one request."""

    style: ThoughtStyle
    budget: int | None = None


def style_of(model: ServedModel, template: str = "") -> ThoughtStyle | None:
    """How a model marks its thoughts; None: it has none, as far as is known. `template`: of the request."""
    style = choose(cast(ReasoningSetting, model.reasoning), template or model.text.template_source)
    if style is not None and style.channels and not ChannelTokens(model.text).complete:
        return None
    return style


def plan(exchange: Exchange, request: ChatRequest, model: ServedModel) -> tuple[ChatRequest, Plan | None]:
    """The request with what the chat template is told, and how thoughts are treated; None: the model has none."""
    wanted = asked(request)
    source = request.chat_template or model.text.template_source
    if any(map(thought_of, request.messages)) and not any(name in source for name in _MESSAGE_FIELDS):
        exchange.ignored.append("messages.reasoning_content")
    style = style_of(model, request.chat_template or "")
    if not wanted.names and (model.thinking_budget is None or BUDGET not in source):
        return request, None if style is None else Plan(style, model.thinking_budget)
    names = known_names(model.text, request.chat_template)
    told, budget = _told(wanted, style, names)
    unused: list[str] = []
    for parameter, field in _FOR_TEMPLATES:
        value = getattr(getattr(request, parameter), field, None)
        if value is not None and field in names:
            told[field] = value
        elif value is not None:
            unused.append(f"{parameter}.{field}")
    if style is not None and budget is None and wanted.effort is None:
        budget = model.thinking_budget
    if style is not None and budget is not None and BUDGET in names:
        told[BUDGET] = budget
    if told:
        kwargs = {**told, **(request.chat_template_kwargs or {})}
        request = msgspec.structs.replace(request, chat_template_kwargs=kwargs)
    if style is not None:
        if wanted.enabled is False:  # a thought that is not to be has no length
            unused += [name for name, value in _budgets(request).items() if value]
        exchange.ignored += unused
        return request, Plan(style, budget)
    for name in wanted.names:
        # What cannot think need not be told not to.
        if wanted.enabled is not False and (not told or name in BUDGETS):
            ignore_advice(exchange, name)
    return request, None


def _told(wanted: Asked, style: ThoughtStyle | None, names: Collection[str]) -> tuple[dict[str, Any], int | None]:
    """Variables for the chat template, and the budget for what it has no variable for."""
    told: dict[str, Any] = {}
    budget = wanted.budget
    switch = next((name for name in SWITCHES if name in names), None)
    if switch is not None and wanted.enabled is not None:
        told[switch] = wanted.enabled
    elif wanted.enabled is False:
        budget = 0
    if wanted.effort is not None and EFFORT in names:
        mapped = _TEMPLATE_EFFORTS.get(wanted.effort, wanted.effort)
        told[EFFORT] = mapped if style is not None and style.channels else wanted.effort
    elif wanted.effort is not None and budget is None and wanted.enabled is not False:
        budget = EFFORT_BUDGETS[wanted.effort]
    return told, budget


def channels_of(plan: Plan, text: TextModel) -> ChannelTokens | None:
    """The control tokens of a model whose answers are several messages."""
    return ChannelTokens(text) if plan.style.channels else None


class ThoughtReading(Struct, frozen=True):
    """How the tokens of an answer are read."""

    style: ThoughtStyle
    text: TextModel
    state: State
    prompt: list[int]
    names: frozenset[str] = frozenset()
    """The offered functions."""
    ends: tuple[int, ...] | None = None
    """Tokens that end an answer; None: the usual ones."""

    @property
    def in_text(self) -> bool:
        """Whether a thought may come whose end is text, not a token."""
        text, style = self.text, self.style
        return self.state != "answer" and not style.channels and any(text.added_id(mark) is None for mark in style.end)

    def splitter(self) -> ThoughtSplitter | ChannelSplitter:
        if not self.style.channels:
            return ThoughtSplitter(self.style, self.text, self.state)
        splitter = ChannelSplitter(ChannelTokens(self.text), self.names)
        splitter.prepare(self.text, self.prompt)
        return splitter


def reading(
    plan: Plan, text: TextModel, prompt: list[int], toolbox: Toolbox | None, continued: str | None
) -> ThoughtReading:
    """`continued`: the beginning of the answer, if the prompt has it."""
    style = plan.style
    if style.channels:
        names = frozenset[str]() if toolbox is None else frozenset(tool.name for tool in toolbox.allowed)
        ends = ChannelTokens(text).stops(text.eos_token_ids)
        found = ThoughtReading(style, text, "before", prompt[-64:], names, ends)
        splitter = found.splitter()
        return msgspec.structs.replace(
            found, state="thinking" if splitter.thinking else "answer" if splitter.answering else "before"
        )
    state = prompt_state(style, text, prompt)
    if continued is not None:
        state = continued_state(style, continued, state)
    return ThoughtReading(style, text, state, [])


def with_thought(params: SamplingParams, plan: Plan, found: ThoughtReading) -> SamplingParams:
    """The parameters with what the engine has to know of the thought: nothing, if it may go on for ever and nothing is
    asked of the answer."""
    style, text = found.style, found.text
    usual = set(text.eos_token_ids)
    if found.ends is not None and usual <= set(params.stop_token_ids):
        more = tuple(id for id in params.stop_token_ids if id not in usual)
        params = replace(params, stop_token_ids=tuple(dict.fromkeys((*found.ends, *more))))
    if found.state == "answer" or (plan.budget is None and (not params.grammar or found.in_text)):
        return params
    if style.channels:
        return replace(params, thought=_channel_thought(text, plan, found, bool(params.grammar)))
    # With a grammar a thought begins at once: white space might belong to the answer.
    spaces = ("",) if params.grammar else _BEGIN_SPACES
    begins = dict.fromkeys(_ids(text, space + mark) for mark in style.begin for space in spaces)
    end = style.end[0]
    return replace(
        params,
        thought=Thought(
            end=tuple(dict.fromkeys(ids for mark in style.end for ids in _spellings(text, mark + style.header))),
            begin=() if found.state == "thinking" else tuple(begins),
            close=_ids(text, f"{style.before_end}{end}{style.after_end}{style.answer_begin}"),
            budget=plan.budget,
            within=bool(params.grammar) and found.in_text,
        ),
    )


def at_once(
    model: ServedModel, tokens: list[int], params: Sequence[SamplingParams]
) -> tuple[list[int], list[SamplingParams], ThoughtReading | None]:
    """A prompt that is to be answered without a thought: its tokens, the parameters, and how the answer is read."""
    style, text = style_of(model), model.text
    if style is None:
        return tokens, list(params), None
    if style.channels:
        ids = ChannelTokens(text).ids
        tokens = [*tokens, ids["channel"], *_ids(text, "final"), ids["message"]]
    elif prompt_state(style, text, tokens) == "thinking":
        tokens = [*tokens, *_ids(text, f"{style.end[0]}{style.after_end}{style.answer_begin}")]
    never = Plan(style, 0)
    found = reading(never, text, tokens, None, None)
    if found.in_text and style.begun:
        found = msgspec.structs.replace(found, state="answer")
    return tokens, [one if one.grammar else with_thought(one, never, found) for one in params], found


def _channel_thought(text: TextModel, plan: Plan, found: ThoughtReading, constrained: bool) -> Thought:
    """Behind a thought, an answer with a grammar begins its next message at once; see `Toolbox.channel_grammar`."""
    ids = ChannelTokens(text).ids
    assistant, analysis, final = (_ids(text, word) for word in ("assistant", "analysis", "final"))
    begin = (ids["channel"], *analysis, ids["message"])
    over, next_message = (ids["end"],), (ids["start"], *assistant)
    thinking = found.state == "thinking"
    return Thought(
        # A message that is not ended properly is over for its reader too, see `ChannelSplitter.mark`.
        end=(over, *((ids[name],) for name in ("start", "channel", "message"))),
        begin=() if thinking or constrained else (begin,),
        opening=begin if constrained and not thinking else (),
        after=next_message if constrained else (),
        close=over if constrained else (*over, *next_message, ids["channel"], *final, ids["message"]),
        budget=plan.budget,
    )


def _ids(text: TextModel, spelled: str) -> tuple[int, ...]:
    """The tokens of marks and what is around them; control tokens count."""
    return tuple(text.encode(spelled, add_special_tokens=False))


_BEFORE = ("", "\n", "\n\n", " ", *(f"{end}{space}" for end in ".!?:;,)]}>\"'`" for space in ("", "\n", "\n\n")))
_AFTER = ("", "\n", "\n\n", " ")


@functools.lru_cache(maxsize=32)
def _spellings(text: TextModel, mark: str) -> tuple[tuple[int, ...], ...]:
    """The tokens of a mark; of one that is no token of its own, those that it has between usual characters, which may
    be part of its first and last token."""
    alone = _ids(text, mark)
    if len(alone) == 1:
        return (alone,)
    found: dict[tuple[int, ...], None] = {alone: None}
    for before in _BEFORE:
        head = _ids(text, before) if before else ()
        for after in _AFTER:
            both = _ids(text, before + mark + after)
            both = both[len(head) :] if both[: len(head)] == head else both
            tail = _ids(text, after) if after else ()
            both = both[: -len(tail)] if tail and both[-len(tail) :] == tail else both
            found[both] = None
    return tuple(found)
