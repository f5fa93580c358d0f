"""Errors that travel to HTTP clients: one tree; each class owns its status, type, code and retry hint.

Invariant: every error renders to `{"error": {message, type, param, code}}` with all four keys, and
`Retry-After` is an integer in 1..120, the only range client libraries obey. There is one class per meaning,
so no code downstream chooses a status.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import ClassVar, Literal, TypedDict

from penstock.errors import PenstockError

Reason = Literal[
    "queue_full",
    "queue_timeout",
    "memory_pressure",
    "load_shed",
    "draining",
    "rate_limit",
    "budget",
    "context_quota",
    "request_limit",
    "slo_tpot",
    "slo_ttft",
]
"""Why a request was rejected, in machine-readable form (`x-penstock-reason`)."""


class ErrorDetail(TypedDict):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(TypedDict):
    error: ErrorDetail


class ApiError(PenstockError):
    """Base of the tree; raised itself it is a 500."""

    status: ClassVar[int] = 500
    type: ClassVar[str] = "server_error"
    code: str | None = None
    reason: Reason | None = None
    should_retry: ClassVar[bool | None] = None
    """The value of `x-should-retry`; None leaves the decision to the client's rule for the status."""

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        reason: Reason | None = None,
        retry_after: float | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        if code is not None:
            self.code = code
        if reason is not None:
            self.reason = reason
        self.retry_after = None if retry_after is None else clamp_retry_after(retry_after)

    def body(self) -> ErrorBody:
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}

    def headers(self) -> dict[str, str]:
        headers: dict[str, str] = {}
        if self.retry_after is not None:
            headers["retry-after"] = str(self.retry_after)
        if self.reason is not None:
            headers["x-penstock-reason"] = self.reason
        if self.should_retry is not None:
            headers["x-should-retry"] = "true" if self.should_retry else "false"
        return headers


def clamp_retry_after(seconds: float) -> int:
    """Whole seconds in 1..120, rounded up so that a client never comes back too early."""
    if math.isnan(seconds):
        return 1
    return math.ceil(min(max(seconds, 1.0), 120.0))


class InvalidRequest(ApiError):
    """The request itself is wrong; sending it again will not help."""

    status = 400
    type = "invalid_request_error"


class ContentBlocked(InvalidRequest):
    """A guardrail refused the content of the request."""

    code = "content_blocked"


class ContextLengthExceeded(InvalidRequest):
    """The prompt, or the prompt and what was asked for, does not fit the context window."""

    code = "context_length_exceeded"

    def __init__(
        self,
        *,
        limit: int,
        prompt_tokens: int,
        max_tokens: int | None = None,
        at_least: bool = False,
        param: str | None = "messages",
    ) -> None:
        """`at_least`: the prompt has this many tokens or more; the rest was not counted."""
        if max_tokens is None:
            asked = f"your prompt has {'at least ' if at_least else ''}{prompt_tokens} tokens"
            remedy = "Shorten the prompt."
        else:
            asked = (
                f"you asked for {prompt_tokens + max_tokens} tokens "
                f"({prompt_tokens} in the prompt, {max_tokens} for the completion)"
            )
            remedy = "Shorten the prompt or ask for fewer tokens."
        super().__init__(f"This model's maximum context length is {limit} tokens, but {asked}. {remedy}", param=param)
        self.limit = limit
        self.prompt_tokens = prompt_tokens


class ContextQuotaExceeded(ContextLengthExceeded):
    """The model could hold the prompt; the caller may not use that much of it."""

    reason = "context_quota"

    def __init__(
        self,
        *,
        limit: int,
        prompt_tokens: int,
        max_tokens: int | None = None,
        at_least: bool = False,
        param: str | None = "messages",
        whose: str,
        scope: str,
        estimated: bool = False,
    ) -> None:
        """`whose`: who has the limit, as the subject of a sentence; `scope` for machines. `estimated`: the prompt's
        tokens are not known exactly."""
        super().__init__(
            limit=limit, prompt_tokens=prompt_tokens, max_tokens=max_tokens, at_least=at_least, param=param
        )
        _, _, asked = self.message.partition(", but ")
        about = " (counted by their length)" if estimated else ""
        self.message = f"{whose} may use {limit} tokens of context in a request (`context_tokens`){about}, but {asked}"
        self.args = (self.message,)
        self.scope = scope

    def headers(self) -> dict[str, str]:
        return {**super().headers(), **limit_headers("context_tokens", self.scope)}


class RequestLimitExceeded(InvalidRequest):
    """A single request asks for more than the caller may ask for; waiting does not help."""

    code = "limit_exceeded"
    reason = "request_limit"

    def __init__(self, message: str, *, limit: str, scope: str, param: str | None = None) -> None:
        super().__init__(message, param=param)
        self.limit = limit
        self.scope = scope

    def headers(self) -> dict[str, str]:
        return {**super().headers(), **limit_headers(self.limit, self.scope)}


class TimeLimitReached(ApiError):
    """Work that gives nothing before it is complete took longer than the caller's requests may take."""

    status = 503
    code = "time_limit"
    reason = "request_limit"
    should_retry = False

    def __init__(self, whose: str, seconds: float, scope: str) -> None:
        super().__init__(f"{whose} may use {seconds:g} s for a request (`time_limit_s`), and this one took longer.")
        self.scope = scope

    def headers(self) -> dict[str, str]:
        return {**super().headers(), **limit_headers("time_limit", self.scope)}


def limit_headers(limit: str, scope: str) -> dict[str, str]:
    """Which limit applied, and whose it is."""
    return {"x-penstock-limit": limit, "x-penstock-limit-scope": scope}


class CostLimitExceeded(InvalidRequest):
    """The request may cost more than it allows itself (`x-penstock-max-cost`)."""

    status = 402
    code = "max_cost_exceeded"


class AuthenticationError(ApiError):
    """No key, or an unknown key."""

    status = 401
    type = "authentication_error"
    code = "invalid_api_key"

    def headers(self) -> dict[str, str]:
        return {**super().headers(), "www-authenticate": "Bearer"}


class PermissionDenied(ApiError):
    """A known key that may not do this."""

    status = 403
    type = "permission_error"
    code = "permission_denied"


class UntrustedPage(PermissionDenied):
    """A request that a web page of another origin may have sent, while no key protects the server."""

    code = "untrusted_origin"


class DataRuleForbids(PermissionDenied):
    """Nothing that may have the request's data can answer it, and that will not change by itself."""

    code = "data_rule"


class NotFound(ApiError):
    """No such path or object."""

    status = 404
    type = "not_found_error"
    code = "not_found"


class ResumedElsewhere(ApiError):
    """The client has come back for this stream on another connection, which goes on with it."""

    status = 409
    type = "conflict_error"
    code = "resumed_elsewhere"

    def __init__(self) -> None:
        super().__init__("This stream was resumed on another connection.")


class ModelNotFound(NotFound):
    """No such model. The message lists those that exist for the caller, where the caller is known. `purpose`: what it
    was wanted for, where a model of that name may exist for another, such as `for embeddings`."""

    code = "model_not_found"

    def __init__(self, model: str, available: list[str] | None = None, *, purpose: str = "") -> None:
        if model and not purpose:
            message = f"The model `{model}` does not exist here."
        else:
            message = f"There is {' '.join(filter(None, ('no model', model and f'`{model}`', purpose)))} here."
        if available is not None:
            names = ", ".join(f"`{name}`" for name in sorted(available)) or "none yet"
            message = f"{message} Available: {names}."
        super().__init__(message, param="model")


class MethodNotAllowed(InvalidRequest):
    """The path exists, but not with this method."""

    status = 405
    code = "method_not_allowed"


class RequestTimeout(ApiError):
    """The request did not finish, or its body did not arrive, in the time allowed."""

    status = 408
    type = "timeout_error"
    code = "timeout"


class ConversationBusy(ApiError):
    """Another turn of the same conversation is being answered; clients send this one again by themselves."""

    status = 409
    type = "conflict_error"
    code = "conversation_busy"

    def __init__(self, message: str) -> None:
        super().__init__(message, param="conversation", retry_after=1.0)


class PayloadTooLarge(InvalidRequest):
    """The body is larger than `server.body_limit`."""

    status = 413
    code = "payload_too_large"

    def __init__(self, *, limit: int, size: int | None = None) -> None:
        found = "is larger" if size is None else f"has {size} bytes"
        super().__init__(f"The request body {found}; the limit is {limit} bytes.")


class UnsupportedMediaType(InvalidRequest):
    """The body is not JSON."""

    status = 415
    code = "unsupported_media_type"


class UnsupportedEncoding(UnsupportedMediaType):
    """The `Content-Encoding` of the body is none that this server decodes."""

    code = "unsupported_encoding"

    def __init__(self, encoding: str, accepted: Sequence[str]) -> None:
        self.accepted = ", ".join(accepted)
        super().__init__(
            f"A request body with `content-encoding: {encoding[:64]}` is not understood; send it as it is, or with one "
            f"of: {self.accepted}."
        )

    def headers(self) -> dict[str, str]:
        return {**super().headers(), "accept-encoding": self.accepted}


class RateLimitExceeded(ApiError):
    """The caller's own limit, which refills by itself."""

    status = 429
    type = "rate_limit_error"
    code = "rate_limit_exceeded"
    reason = "rate_limit"


class InsufficientQuota(ApiError):
    """A spent budget: waiting does not help, so the client is told not to retry."""

    status = 429
    type = "insufficient_quota"
    code = "insufficient_quota"
    reason = "budget"
    should_retry = False


class ServerError(ApiError):
    """An internal error. The message must not reveal internals; those go to the log."""

    code = "server_error"


class ServiceUnavailable(ApiError):
    """Base of the 503s: the same request may succeed a little later, here or elsewhere."""

    status = 503
    should_retry = True

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        reason: Reason | None = None,
        retry_after: float = 1.0,
    ) -> None:
        super().__init__(message, param=param, code=code, reason=reason, retry_after=retry_after)


class Overloaded(ServiceUnavailable):
    """More work than the engines can take now; `reason` says which limit was met."""

    type = "overloaded"
    code = "overloaded"
    reason = "queue_full"


class Draining(ServiceUnavailable):
    """This server is shutting down and accepts nothing new."""

    type = "overloaded"
    code = "draining"
    reason = "draining"

    def __init__(self, message: str = "The server is shutting down; send the request again.") -> None:
        super().__init__(message, retry_after=1.0)


class KeyStoreUnavailable(ServiceUnavailable):
    """Keys cannot be checked at the moment, which says nothing about this one."""

    code = "key_store_unavailable"

    def __init__(self, message: str = "API keys cannot be checked at the moment; try again.") -> None:
        super().__init__(message, retry_after=2.0)


class LedgerUnavailable(ServiceUnavailable):
    """Usage cannot be recorded at the moment, so the request is neither served nor charged."""

    code = "ledger_unavailable"

    def __init__(self, message: str = "The ledger cannot be written at the moment; try again.") -> None:
        super().__init__(message, retry_after=2.0)


class EngineUnavailable(ServiceUnavailable):
    """No engine serves this model at the moment (starting, or restarting)."""

    code = "engine_unavailable"


class ModelAsleep(EngineUnavailable):
    """The model was put to sleep, or did not get its turn in time."""

    code = "model_asleep"

    def __init__(self, message: str, *, retry_after: float = 10.0) -> None:
        super().__init__(message, reason="queue_timeout", retry_after=retry_after)


class EngineLost(EngineUnavailable):
    """The engine died under a running request. Nothing was wrong with the request; send it again."""

    code = "engine_lost"

    def __init__(
        self,
        message: str = "The engine stopped while running this request. It is being restarted; try again.",
        *,
        retry_after: float = 1.0,
    ) -> None:
        super().__init__(message, retry_after=retry_after)


def sentence(problem: object) -> str:
    """An internal error's message as a sentence for clients. A name at its start (a file) stays as it is."""
    text = str(problem)
    first = text.split(" ", 1)[0].rstrip(":,.")
    begun = text if set(first) & set("._/") else text[:1].upper() + text[1:]
    return begun if begun.endswith((".", "!", "?")) else f"{begun}."
