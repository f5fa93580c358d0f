"""How each API family renders errors and rate-limit headers."""

from __future__ import annotations

import datetime
import re
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from penstock.limits import LimitState
from penstock.protocol.errors import ApiError, ContextLengthExceeded, InsufficientQuota, InvalidRequest, PayloadTooLarge

Renaming = Sequence[tuple[str, str]]
"""Patterns of parameter names with their replacements; the first match counts."""


def _object(**properties: object) -> dict[str, object]:
    return {"type": "object", "required": list(properties), "properties": properties}


_STRING = {"type": "string"}
_OPTIONAL = {"type": ["string", "null"]}


class Dialect:
    """OpenAI's format, used by most endpoints."""

    error_name = "Error"
    error_schema = _object(error=_object(message=_STRING, type=_STRING, param=_OPTIONAL, code=_OPTIONAL))
    id_headers: tuple[bytes, ...] = (b"x-request-id",)
    """The response headers that carry the request id."""

    def error(self, error: ApiError, request_id: str) -> object:
        return error.body()

    def limit_headers(self, state: LimitState) -> dict[str, str]:
        metric = state.limit.metric
        return {
            f"x-ratelimit-limit-{metric}": str(state.limit.most),
            f"x-ratelimit-remaining-{metric}": str(state.remaining),
            f"x-ratelimit-reset-{metric}": duration(state.reset_s),
        }


class AnthropicDialect(Dialect):
    """Anthropic's format, used by `/v1/messages`."""

    error_name = "MessagesError"
    error_schema = _object(type=_STRING, error=_object(type=_STRING, message=_STRING), request_id=_STRING)
    id_headers = (b"x-request-id", b"request-id")

    def error(self, error: ApiError, request_id: str) -> object:
        message = error.message
        if isinstance(error, ContextLengthExceeded) and error.prompt_tokens > error.limit:
            # Agents look for these words, and shorten their history by the difference.
            message = f"prompt is too long: {error.prompt_tokens} tokens > {error.limit} maximum. {message}"
        shown: dict[str, object] = {"type": _anthropic_type(error), "message": message}
        if error.code in _ACTED_UPON:
            shown["details"] = {"error_code": error.code}
        return {"type": "error", "error": shown, "request_id": request_id}

    def limit_headers(self, state: LimitState) -> dict[str, str]:
        prefix = f"anthropic-ratelimit-{state.limit.metric}"
        reset = datetime.datetime.fromtimestamp(time.time() + state.reset_s, datetime.UTC)
        return {
            f"{prefix}-limit": str(state.limit.most),
            f"{prefix}-remaining": str(state.remaining),
            f"{prefix}-reset": reset.strftime("%Y-%m-%dT%H:%M:%SZ"),
        }


class OllamaDialect(Dialect):
    """Ollama's format, used by `/api/...`."""

    error_name = "OllamaError"
    error_schema = _object(error=_STRING)

    def error(self, error: ApiError, request_id: str) -> object:
        return {"error": error.message}


class LlamaCppDialect(Dialect):
    """That of llama.cpp's own paths: the code is the status, and a prompt that does not fit has a type of its own."""

    error_name = "LlamaCppError"
    error_schema = _object(error=_object(code={"type": "integer"}, message=_STRING, type=_STRING, param=_OPTIONAL))

    def error(self, error: ApiError, request_id: str) -> object:
        kind = error.type
        more: dict[str, object] = {}
        if isinstance(error, ContextLengthExceeded):
            kind = "exceed_context_size_error"
            more = {"n_prompt_tokens": error.prompt_tokens, "n_ctx": error.limit}
        elif error.code == "unsupported_parameter":
            kind = "not_supported_error"
        elif error.status == 503:
            kind = "unavailable_error"
        return {"error": {"code": error.status, "message": error.message, "type": kind, "param": error.param, **more}}


class TgiDialect(Dialect):
    """That of the paths of text-generation-inference."""

    error_name = "TgiError"
    error_schema = _object(error=_STRING, error_type=_STRING)

    def error(self, error: ApiError, request_id: str) -> object:
        if error.status in (429, 503):
            kind = "overloaded"
        elif isinstance(error, InvalidRequest):
            kind = "validation"
        else:
            kind = "generation" if error.status >= 500 else error.type
        return {"error": error.message, "error_type": kind}


OPENAI = Dialect()
ANTHROPIC = AnthropicDialect()
OLLAMA = OllamaDialect()
LLAMA_CPP = LlamaCppDialect()
TGI = TgiDialect()


def dialect_of(path: str) -> Dialect:
    """The format of a path that no endpoint has: that of the clients that would ask there."""
    if path == "/v1/messages" or path.startswith("/v1/messages/"):
        return ANTHROPIC
    return OLLAMA if path.startswith("/api/") else OPENAI


_ACTED_UPON = ("thread_unsupported_request",)
"""Error codes on which clients of the Messages API do something else than report the error."""
_SAME = ("invalid_request_error", "authentication_error", "permission_error", "not_found_error", "rate_limit_error")


def _anthropic_type(error: ApiError) -> str:
    if isinstance(error, PayloadTooLarge):
        return "request_too_large"
    if isinstance(error, InsufficientQuota):
        return "billing_error"
    if error.type in _SAME or error.type == "timeout_error":
        return error.type
    return "overloaded_error" if error.type == "overloaded" else "api_error"


def duration(seconds: float) -> str:
    """`6m0s`, `20s`, `20ms`: the format of OpenAI's rate-limit headers."""
    if seconds < 1:
        return f"{round(seconds * 1000)}ms"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes}m{rest}s" if minutes else f"{rest}s"


@contextmanager
def renamed(names: Renaming) -> Iterator[None]:
    """Shared code names the parameters of chat completions; errors raised in this context are renamed by `names`."""
    try:
        yield
    except InvalidRequest as error:
        error.message = re.sub(r"`([^`]+)`", lambda match: f"`{_rename(match[1], names)}`", error.message)
        if error.param is not None:
            error.param = _rename(error.param, names)
        raise


def _rename(name: str, names: Renaming) -> str:
    for pattern, instead in names:
        if re.match(pattern, name):
            return re.sub(f"^{pattern}", instead, name)
    return name
