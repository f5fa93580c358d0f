"""Parameters that other servers spell differently, under the names that the rest of the gateway knows."""

from __future__ import annotations

from typing import Any

from penstock.gateway.app.exchange import Exchange
from penstock.gateway.generation.samplers import choose_samplers
from penstock.gateway.generation.schemas import ChatRequest, CompletionRequest, TokenDetails
from penstock.protocol.errors import InvalidRequest

_NAMES = (
    ("max_tokens", "n_predict", "max_new_tokens"),
    ("min_tokens", "min_new_tokens"),
    ("repetition_penalty", "repeat_penalty"),
)
"""The usual name, and what llama.cpp, SGLang and TGI call it."""


def respell(exchange: Exchange, request: TokenDetails) -> None:
    """Move values to their usual names; a 400 where two names of one parameter have different values."""
    if request.n_predict == -1:
        request.n_predict = None  # as many as fit
    for usual, *others in _NAMES:
        for name in others:
            _move(request, name, usual)
    if not request.n_probs:
        request.n_probs = None
    elif isinstance(request, ChatRequest):
        _move(request, "n_probs", "top_logprobs")
        request.logprobs = True
    elif isinstance(request, CompletionRequest):
        _move(request, "n_probs", "logprobs")
    choose_samplers(exchange, request)


def _move(request: TokenDetails, name: str, usual: str) -> None:
    value: Any = getattr(request, name)
    if value is None:
        return
    known = getattr(request, usual)
    if known is not None and known != value:
        raise InvalidRequest(f"`{name}` and `{usual}` differ; send one of them.", param=name)
    setattr(request, usual, value)
    setattr(request, name, None)
