"""Translates refusals and failures of engines into API errors."""

from __future__ import annotations

from penstock.engine.adapters.spec import ADAPTER_FAILED, ADAPTER_UNKNOWN, NO_ADAPTERS
from penstock.engine.request import (
    GRAMMAR_REFUSED,
    PROMPT_TOO_SLOW,
    QUEUE_FULL,
    TOKENS_UNKNOWN,
    TOO_LONG,
    WAITED,
    Delta,
)
from penstock.protocol.errors import (
    ApiError,
    Draining,
    EngineLost,
    InvalidRequest,
    ModelAsleep,
    NotFound,
    Overloaded,
    ResumedElsewhere,
    ServerError,
    sentence,
)
from penstock.protocol.messages import ASLEEP, DRAINING, NOT_REGISTERED, RESUMED_ELSEWHERE


def error_of(delta: Delta) -> ApiError:
    """The API error for a request that the engine refused or failed."""
    message = delta.error or "The engine failed this request."
    if message.startswith(DRAINING):
        return Draining()
    if message.startswith(NOT_REGISTERED):
        return EngineLost()
    if message.startswith(RESUMED_ELSEWHERE):
        return ResumedElsewhere()
    if message.startswith(ASLEEP):
        return ModelAsleep("The model fell asleep before this request could run; try again.", retry_after=1.0)
    if message.startswith((ADAPTER_UNKNOWN, ADAPTER_FAILED, NO_ADAPTERS)):
        return adapter_error(message)
    if message.startswith(PROMPT_TOO_SLOW):
        return Overloaded(
            f"The prompt takes{message.removeprefix(PROMPT_TOO_SLOW)}, longer than `x-slo-ttft-ms` leaves; "
            "shorten it, or allow more.",
            reason="slo_ttft",
            retry_after=2.0,
        )
    if message.startswith(WAITED):
        return waited_too_long()
    if message.startswith(QUEUE_FULL):
        return Overloaded(message, retry_after=2.0)
    if message.startswith(GRAMMAR_REFUSED):
        return InvalidRequest(sentence(message), code="unsupported_grammar")
    if message.startswith(TOKENS_UNKNOWN):
        return InvalidRequest(sentence(message), param="prompt")
    if message.startswith(TOO_LONG):
        return InvalidRequest(f"{message}.", param="prompt", code="context_length_exceeded")
    return ServerError(message)


def waited_too_long() -> Overloaded:
    """The error of a request that was not begun in the time that its client allows."""
    return Overloaded(
        "Other requests kept the engine busy for longer than this one may wait; try again later.",
        reason="queue_timeout",
        retry_after=2.0,
    )


def adapter_error(message: str, *, param: str = "model") -> ApiError:
    """The API error for a failed adapter operation. `param`: what named the adapter that could not be read."""
    if message.startswith(ADAPTER_UNKNOWN):
        return NotFound(sentence(message), param="model", code="model_not_found")
    return InvalidRequest(sentence(message), param=param, code="adapter_failed")
