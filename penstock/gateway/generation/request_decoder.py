"""Decodes the bodies of inference requests. Every parameter is honoured, refused, or ignored and named: never silently
dropped, and no wall for clients that send more than we know.

Refused (400): what other servers honour and would change the answer, unless its value says "as usual". Ignored: what is
advisory, neutral or unknown to us; `x-penstock-ignored` names it. With `server.unknown_parameters: refuse` everything
that is not honoured is refused.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar

import msgspec
from msgspec import Raw

from penstock.gateway.app.decoding import decode, not_supported
from penstock.gateway.app.exchange import Exchange
from penstock.gateway.app.unknown_fields import UnknownFields, strip_unknown
from penstock.gateway.generation.schemas import ChatRequest, CompletionRequest
from penstock.protocol.errors import InvalidRequest

T = TypeVar("T")

ANY: tuple[Any, ...] = (None,)
CHANGES_THE_ANSWER: dict[str, tuple[Any, ...]] = {
    # Constraints, as vLLM, SGLang and llama.cpp spell them
    "grammar_lazy": (None, False),
    "grammar_triggers": (None, []),
    "logits_processors": (None, []),
    "custom_logit_processor": ANY,
    "stop_regex": ANY,
    "stop_sequences": (None, []),
    # The prompt
    "prompt_embeds": ANY,
    "image_data": (None, []),
    "mm_processor_kwargs": (None, {}),
    "instruction": (None, ""),
    # Sampling
    "use_beam_search": (None, False),
    "length_penalty": (None, 1),
    "tfs_z": (None, 1),
    "top_n_sigma": (None, -1, 0),
    "top_a": (None, 0),
    "mirostat": (None, 0),
    "dry_multiplier": (None, 0),
    "xtc_probability": (None, 0),
    "dynatemp_range": (None, 0),
    "samplers": ANY,
    # What comes back
    "separate_reasoning": (None, True),
    "reasoning_format": (None, "auto", "deepseek", "parsed"),
    "logprobs_mode": ANY,
    "normalize": (None, True),
    # Where and with what it runs
    "lora_path": ANY,
    "thread": ANY,
    # Tools, where an endpoint has none of these
    "tool_choice": (None, "auto"),
    "parallel_tool_calls": (None, True),
    # Honoured where the endpoint has them
    "structured_outputs": (None, {}),
    "grammar": (None, ""),
    "documents": (None, []),
    "suffix": (None, ""),
    "skip_special_tokens": (None, True),
    "include_stop_str_in_output": (None, False),
    "no_stop_trim": (None, False),
    "detokenize": (None, True),
    "chat_template_kwargs": (None, {}),
    "add_generation_prompt": (None, True),
    "continue_final_message": (None, False),
    "messages.prefix": (None, False),
    "messages.partial": (None, False),
    "echo": (None, False),
    "priority": (None, 0),
    "cache_salt": ANY,
    "n_probs": (None, 0),
    "return_tokens_as_token_ids": (None, False),
    "return_token_ids": (None, False),
    "prompt_logprobs": ANY,
    "min_new_tokens": (None, 0),
    "n_predict": (None, -1),
    "repeat_penalty": (None, 1),
    "typical_p": (None, 1),
    "bad_words": (None, []),
    "allowed_token_ids": ANY,
}
"""Parameters that an endpoint may not honour, with the values that ask for nothing."""
_FILTERS = "the filters here are `top_k`, `top_p`, `min_p` and `typical_p`"
_PENALTIES = "the penalties here are `repetition_penalty`, `frequency_penalty` and `presence_penalty`"
_CODE = "code of a request does not run here; use `logit_bias`, `allowed_token_ids` or `bad_words`"
_APART = (
    "thoughts come apart from answers; `include_reasoning: false` leaves them out, and a model with `reasoning: off` "
    "in the configuration leaves them in the text"
)
_HOLDERS = ("parameters", "sampling_params")
"""Objects in which some APIs send what others send beside the prompt."""
REASONS = {
    "use_beam_search": "beams copy their caches at every token, which costs all other requests; use `best_of`",
    "length_penalty": "it belongs to beam search, which is not done here; `best_of` compares the mean per token",
    "mirostat": "its state changes with every token, and would not survive a failover; use `temperature` and `min_p`",
    "dry_multiplier": _PENALTIES,
    "xtc_probability": _FILTERS,
    "top_n_sigma": _FILTERS,
    "top_a": _FILTERS,
    "tfs_z": _FILTERS,
    "dynatemp_range": "a request has one temperature; use `temperature` with `min_p`",
    "separate_reasoning": _APART,
    "reasoning_format": _APART,
    "logits_processors": _CODE,
    "custom_logit_processor": _CODE,
    "image_data": "images are parts of a chat's messages; a text prompt has none",
    "stop_sequences": "it is called `stop` here",
}
"""Why some of them are not honoured, and what does something similar."""


ADVISORY = frozenset(
    (
        *("metadata", "prompt_cache_key", "safety_identifier", "service_tier", "speculation", "store", "user"),
        *("reasoning_effort", "reasoning", "thinking", "enable_thinking", "include_reasoning"),
        *("thinking_budget", "thinking_token_budget", "max_reasoning_tokens"),
        *("thinking_budget_tokens", "reasoning_budget"),
    )
)
OF_OTHER_ENDPOINTS = frozenset((*ChatRequest.__struct_fields__, *CompletionRequest.__struct_fields__)) - ADVISORY
"""What chat or text completions honour, and another endpoint does not, changes the answer there too."""
_json = msgspec.json.Decoder()


class RequestDecoder(Generic[T]):
    """For one kind of body."""

    def __init__(self, kind: type[T], strip: Callable[[T, UnknownFields], None] | None = None) -> None:
        """`strip` takes unknown fields out of parts of the body that are not decoded into structs."""
        self._kind = kind
        self._decoder = msgspec.json.Decoder(kind)
        self._strip = strip

    def __call__(self, exchange: Exchange, body: bytes | Raw, at: str = "") -> T:
        """`at`: the path of `body` inside the request, when it is a part of it."""
        try:
            request = decode(self._decoder, body, at)
        except InvalidRequest as error:
            if error.code != "unknown_parameter" or exchange.refuses_unknown:
                raise
            stripped, unknown = strip_unknown(self._kind, decode(_json, body, at))
            request = decode(self._decoder, stripped, at)
        else:
            if self._strip is None or exchange.refuses_unknown:
                return request
            unknown = UnknownFields()
        if self._strip is not None:
            self._strip(request, unknown)
        if unknown.names:
            ignore(exchange, unknown, _without_positions(at))
        return request


def ignore(exchange: Exchange, unknown: UnknownFields, at: str = "") -> None:
    """Notes what is ignored, for the header; raises for what must not be."""
    for name, value in unknown.names.items():
        holder, _, inner = name.rpartition(".")
        plain = inner if holder in _HOLDERS else name
        neutral = CHANGES_THE_ANSWER.get(plain, ANY if plain in OF_OTHER_ENDPOINTS else None)
        if neutral is not None and not any(_equal(value, usual) for usual in neutral):
            raise not_supported(name, REASONS.get(plain, ""))
    exchange.ignored.extend(f"{at}.{name}" if at else name for name in unknown.names)
    exchange.ignored_more += unknown.unnamed


def ignore_advice(exchange: Exchange, name: str) -> None:
    """A parameter that is known, advisory and not followed."""
    if exchange.refuses_unknown:
        raise not_supported(name)
    exchange.ignored.append(name)


def _equal(value: Any, usual: Any) -> bool:
    """JSON's idea of equality: 1 and 1.0 are equal, 1 and true are not."""
    return value == usual and isinstance(value, bool) == isinstance(usual, bool)


def _without_positions(at: str) -> str:
    return at.partition("[")[0]
