"""What a dialect can express: features that a gateway asks about, and the fields of a request.

A field that a dialect cannot express is ignored and named if it is advice or has its neutral value, and refused
otherwise, because leaving it out would change the answer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

Feature = Literal[
    "chat",
    "completions",
    "embeddings",
    "rerank",
    "tokenize",
    "tokenize_chat",
    "tools",
    "tool_choice",
    "parallel_tool_calls",
    "logprobs",
    "top_logprobs",
    "n",
    "logit_bias",
    "seed",
    "response_format",
    "reasoning",
    "continue_final_message",
    "token_prompt",
    "echo",
]
"""`tokenize`: it counts the tokens of a text; `tokenize_chat`: of messages. `token_prompt`: the prompt of a completion
may be token ids. `echo`: it may be given back with the completion."""
Operation = Literal["chat", "completions"]

ENVELOPE = frozenset(
    ("model", "messages", "prompt", "stream", "stream_options", "max_tokens", "max_completion_tokens", "stop")
)
"""Fields that every dialect has in one form or another."""
STANDARD = frozenset(
    (
        *("temperature", "top_p", "presence_penalty", "frequency_penalty", "logit_bias", "seed", "n"),
        *("response_format", "tools", "tool_choice", "parallel_tool_calls", "logprobs", "top_logprobs"),
        *("reasoning_effort", "echo", "suffix", "best_of"),
    )
)
"""Fields of OpenAI's own API."""
SWITCHES = ("enable_thinking", "thinking", "reasoning")
"""Fields that say whether a model is to think; the last two may have a budget too."""
BUDGETS = (
    *("thinking_budget", "thinking_token_budget", "max_reasoning_tokens"),
    *("thinking_budget_tokens", "reasoning_budget"),
)
"""Fields that say how many tokens it may think."""
ADVICE = frozenset(
    (
        *("user", "safety_identifier", "metadata", "service_tier", "priority", "prompt_cache_key", "cache_salt"),
        *("store", "speculation", "reasoning_effort", "verbosity", *SWITCHES, *BUDGETS),
    )
)
"""Fields that do not change what may be answered."""
NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "temperature": (1,),
    "top_p": (1,),
    "top_k": (-1, 0),
    "min_p": (0,),
    "typical_p": (1,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "logit_bias": ({},),
    "n": (1,),
    "best_of": (1,),
    "min_tokens": (0,),
    "ignore_eos": (False,),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "echo": (False,),
    "suffix": ("",),
    "stop_token_ids": ([],),
    "bad_words": ([],),
    "tools": ([],),
    "tool_choice": ("auto",),
    "parallel_tool_calls": (True,),
    "response_format": ({"type": "text"},),
    "continue_final_message": (False,),
    "add_generation_prompt": (True,),
    "skip_special_tokens": (True,),
    "include_stop_str_in_output": (False,),
    "add_special_tokens": (True,),
    "chat_template_kwargs": ({},),
    "documents": ([],),
}
"""Values that mean what leaving the field out means."""


@dataclass(frozen=True, slots=True)
class Fit:
    """How much of a request a dialect can express."""

    body: dict[str, Any]
    """Without the fields below."""
    refused: tuple[str, ...] = ()
    """Fields that would change the answer."""
    ignored: tuple[str, ...] = ()
    """Fields that are left out and named to the client."""


def fit(body: Mapping[str, Any], known: frozenset[str] | None) -> Fit:
    """Sorts the fields of a request by what a dialect knows; None: it is told all of them."""
    if known is None:
        return Fit(dict(body))
    body = _in_known_words(body, known)
    kept: dict[str, Any] = {}
    refused, ignored = [], []
    for name, value in body.items():
        if name in ENVELOPE or name in known:
            kept[name] = value
        elif value is None or (name == "add_generation_prompt" and body.get("continue_final_message")):
            continue
        elif name in ADVICE or _is_neutral(name, value):
            ignored.append(name)
        else:
            refused.append(name)
    return Fit(kept, tuple(refused), tuple(ignored))


def _in_known_words(body: Mapping[str, Any], known: frozenset[str]) -> dict[str, Any]:
    """Clients have many words for how much a model is to think. Those that a dialect does not know are replaced by
    those that it does, where these say the same."""
    found = dict(body)
    for word in (*SWITCHES, *BUDGETS):
        said = body.get(word)
        if word in known or said is None:
            continue
        parts = said if isinstance(said, dict) else {}
        switch = said if word == "enable_thinking" else parts.get("enabled", _TYPES.get(parts.get("type", "")))
        budget = said if word in BUDGETS else parts.get("max_tokens", parts.get("budget_tokens"))
        budget = None if budget == -1 else budget
        told = []
        if budget is not None:
            told.append("thinking_budget" in known)
            if told[0]:
                found["thinking_budget"] = budget
        if switch is not None and "enable_thinking" in known:
            told.append(True)
            found["enable_thinking"] = switch
        elif switch is False and "thinking" in known:
            told.append(True)
            found["thinking"] = {"type": "disabled"}
        elif switch is not None:
            told.append(switch and budget is not None)  # a budget says it too
        if told and all(told):
            del found[word]
    return found


_TYPES = {"enabled": True, "disabled": False}


def _is_neutral(name: str, value: Any) -> bool:
    return any(value == usual and isinstance(value, bool) == isinstance(usual, bool) for usual in NEUTRAL.get(name, ()))
