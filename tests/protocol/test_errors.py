"""WIRE.md, Errors: the body always has four keys, and the headers tell a client library what to do."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import PenstockError
from penstock.protocol import errors
from penstock.protocol.errors import ApiError, sentence

EVERY = [
    (errors.InvalidRequest("bad", param="n"), 400, "invalid_request_error", None),
    (
        errors.ContextLengthExceeded(limit=10, prompt_tokens=12),
        400,
        "invalid_request_error",
        "context_length_exceeded",
    ),
    (
        errors.ContextQuotaExceeded(limit=10, prompt_tokens=12, whose="The tier free", scope="tier"),
        400,
        "invalid_request_error",
        "context_length_exceeded",
    ),
    (errors.ContentBlocked("no"), 400, "invalid_request_error", "content_blocked"),
    (errors.RequestLimitExceeded("no", limit="choices", scope="tier"), 400, "invalid_request_error", "limit_exceeded"),
    (errors.CostLimitExceeded("no"), 402, "invalid_request_error", "max_cost_exceeded"),
    (errors.DataRuleForbids("no"), 403, "permission_error", "data_rule"),
    (errors.TimeLimitReached("The tier free", 5.0, "tier"), 503, "server_error", "time_limit"),
    (errors.AuthenticationError("no key"), 401, "authentication_error", "invalid_api_key"),
    (errors.PermissionDenied("no"), 403, "permission_error", "permission_denied"),
    (errors.UntrustedPage("no"), 403, "permission_error", "untrusted_origin"),
    (errors.NotFound("no such path"), 404, "not_found_error", "not_found"),
    (errors.ModelNotFound("x", ["a"]), 404, "not_found_error", "model_not_found"),
    (errors.MethodNotAllowed("no"), 405, "invalid_request_error", "method_not_allowed"),
    (errors.RequestTimeout("late"), 408, "timeout_error", "timeout"),
    (errors.ConversationBusy("wait"), 409, "conflict_error", "conversation_busy"),
    (errors.ResumedElsewhere(), 409, "conflict_error", "resumed_elsewhere"),
    (errors.PayloadTooLarge(limit=5, size=9), 413, "invalid_request_error", "payload_too_large"),
    (errors.UnsupportedMediaType("xml"), 415, "invalid_request_error", "unsupported_media_type"),
    (errors.UnsupportedEncoding("br", ["gzip"]), 415, "invalid_request_error", "unsupported_encoding"),
    (errors.RateLimitExceeded("slow down", retry_after=3), 429, "rate_limit_error", "rate_limit_exceeded"),
    (errors.InsufficientQuota("spent"), 429, "insufficient_quota", "insufficient_quota"),
    (errors.ServerError("oops"), 500, "server_error", "server_error"),
    (errors.Overloaded("full"), 503, "overloaded", "overloaded"),
    (errors.Draining(), 503, "overloaded", "draining"),
    (errors.KeyStoreUnavailable(), 503, "server_error", "key_store_unavailable"),
    (errors.EngineUnavailable("starting"), 503, "server_error", "engine_unavailable"),
    (errors.ModelAsleep("x"), 503, "server_error", "model_asleep"),
    (errors.LedgerUnavailable(), 503, "server_error", "ledger_unavailable"),
    (errors.EngineLost(), 503, "server_error", "engine_lost"),
]


@pytest.mark.parametrize(("error", "status", "kind", "code"), EVERY, ids=lambda v: type(v).__name__)
def test_every_error_has_its_status_and_the_four_keys(
    error: ApiError, status: int, kind: str, code: str | None
) -> None:
    assert isinstance(error, PenstockError)
    assert error.status == status
    detail = error.body()["error"]
    assert set(detail) == {"message", "type", "param", "code"}
    assert (detail["type"], detail["code"]) == (kind, code)
    assert detail["message"] == str(error)


def test_no_error_class_is_missing_from_the_table() -> None:
    def leaves(cls: type[ApiError]) -> set[type[ApiError]]:
        return {cls}.union(*(leaves(sub) for sub in cls.__subclasses__()))

    here = {cls for cls in leaves(ApiError) if cls.__module__ == errors.__name__}  # dialects have some of their own
    assert here - {ApiError, errors.ServiceUnavailable} == {type(error) for error, *_ in EVERY}


@given(st.floats(allow_nan=True, allow_infinity=True))
def test_retry_after_is_always_a_whole_number_that_clients_obey(seconds: float) -> None:
    value = errors.Overloaded("full", retry_after=seconds).headers()["retry-after"]
    assert 1 <= int(value) <= 120


def test_retry_after_is_rounded_up() -> None:
    assert errors.RateLimitExceeded("wait", retry_after=2.1).headers()["retry-after"] == "3"


def test_a_spent_budget_is_not_worth_retrying_and_a_lost_engine_is() -> None:
    assert errors.InsufficientQuota("spent").headers()["x-should-retry"] == "false"
    assert errors.EngineLost().headers()["x-should-retry"] == "true"
    assert "retry-after" in errors.EngineLost().headers()


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (errors.Overloaded("x", reason="queue_timeout"), "queue_timeout"),
        (errors.Draining(), "draining"),
        (errors.RateLimitExceeded("x"), "rate_limit"),
        (errors.InsufficientQuota("x"), "budget"),
        (errors.ContextQuotaExceeded(limit=1, prompt_tokens=2, whose="The tier free", scope="tier"), "context_quota"),
    ],
)
def test_every_rejection_says_why(error: ApiError, reason: str) -> None:
    assert error.headers()["x-penstock-reason"] == reason


def test_context_overflow_says_both_numbers() -> None:
    alone = str(errors.ContextLengthExceeded(limit=2048, prompt_tokens=3000))
    assert "2048" in alone and "3000" in alone
    both = str(errors.ContextLengthExceeded(limit=2048, prompt_tokens=2000, max_tokens=100))
    assert all(number in both for number in ("2048", "2100", "2000", "100"))


@pytest.mark.parametrize(
    ("problem", "want"),
    [
        ("no such model", "No such model."),
        ("the file ends early.", "The file ends early."),
        ("adapter_config.json: no rank", "adapter_config.json: no rank."),
        ("`a` has no pools", "`a` has no pools."),
    ],
)
def test_internal_problems_become_sentences(problem: str, want: str) -> None:
    assert sentence(problem) == want
