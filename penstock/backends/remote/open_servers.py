"""Servers of open models whose API is OpenAI's with additions: Penstock, vLLM, SGLang, TensorRT-LLM, llama.cpp.

They differ in the fields they know, in how they spell some, in where health and metrics are, and in how text is
tokenized.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import msgspec

from penstock.backends.remote.chunk import TokenCount
from penstock.backends.remote.conversation import prompt_of
from penstock.backends.remote.dialect import Call, encode, json_object
from penstock.backends.remote.features import STANDARD, Feature, Operation
from penstock.backends.remote.load import LoadMetrics, ServerLoad
from penstock.backends.remote.openai import OpenAI
from penstock.protocol.errors import EngineUnavailable

VLLM_METRICS = LoadMetrics(
    ("vllm:num_requests_running",),
    ("vllm:num_requests_waiting",),
    ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc"),
)


class OpenServer(OpenAI):
    """What they have in common: `/v1` below the root, `/health` and `/metrics` beside it."""

    metrics: ClassVar[LoadMetrics]
    metrics_path: ClassVar[str] = "/metrics"
    health_path: ClassVar[str] = "/health"
    tokenize_path: ClassVar[str] = "/tokenize"

    @property
    def base(self) -> str:
        return f"{self.upstream.root}/v1"

    def health_call(self) -> Call:
        return Call(self.upstream.root + self.health_path)

    def healthy(self, status: int, data: bytes) -> bool:
        return status < 500

    def load_call(self) -> Call | None:
        return Call(self.upstream.root + self.metrics_path)

    def load(self, data: bytes) -> ServerLoad | None:
        return self.metrics.read(data.decode("utf-8", "replace"), self.upstream.model)

    def count_call(self, body: Mapping[str, Any]) -> Call:
        if not self.supports("tokenize_chat" if "messages" in body else "tokenize"):
            raise self._missing("tokenize")
        known = ("prompt", "messages", "add_special_tokens", "add_generation_prompt", "tools", "chat_template_kwargs")
        sent = {name: body[name] for name in known if body.get(name) is not None}
        return Call(self.upstream.root + self.tokenize_path, encode({"model": self.upstream.model, **sent}))

    def count(self, data: bytes) -> TokenCount:
        try:
            return msgspec.convert(json_object(data), TokenCount)
        except msgspec.ValidationError as error:
            raise EngineUnavailable(
                "The remote server of this model sent an invalid token count; try again."
            ) from error


class Vllm(OpenServer):
    name = "vllm"
    features: ClassVar[frozenset[Feature]] = OpenAI.features | {"tokenize", "tokenize_chat"}
    parameters: ClassVar[frozenset[str] | None] = STANDARD | {
        *("top_k", "min_p", "repetition_penalty", "stop_token_ids", "allowed_token_ids", "bad_words", "ignore_eos"),
        *("min_tokens", "prompt_logprobs", "return_token_ids", "return_tokens_as_token_ids", "truncate_prompt_tokens"),
        *("skip_special_tokens", "include_stop_str_in_output", "add_special_tokens", "cache_salt", "user"),
        *("add_generation_prompt", "continue_final_message", "chat_template", "chat_template_kwargs", "documents"),
        *("structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar", "priority"),
        "thinking_token_budget",
    }
    metrics = VLLM_METRICS


class Penstock(OpenServer):
    """Another Penstock: it refuses itself what it cannot do."""

    name = "penstock"
    features: ClassVar[frozenset[Feature]] = OpenAI.features | {"tokenize", "tokenize_chat"}
    metrics = VLLM_METRICS
    tokenize_path = "/v1/tokenize"


class Sglang(OpenServer):
    name = "sglang"
    features: ClassVar[frozenset[Feature]] = OpenAI.features | {"tokenize"}
    parameters: ClassVar[frozenset[str] | None] = STANDARD | {
        *("top_k", "min_p", "repetition_penalty", "stop_token_ids", "ignore_eos", "min_tokens", "regex", "ebnf"),
        *("skip_special_tokens", "no_stop_trim", "continue_final_message", "chat_template_kwargs", "json_schema"),
    }
    metrics = LoadMetrics(
        ("sglang:num_running_reqs", "sglang_num_running_reqs"),
        ("sglang:num_queue_reqs", "sglang_num_queue_reqs"),
        ("sglang:token_usage", "sglang_token_usage"),
    )


class TensorRt(OpenServer):
    """trtllm-serve."""

    name = "tensorrt-llm"
    features: ClassVar[frozenset[Feature]] = OpenAI.features - {"embeddings", "rerank", "continue_final_message"}
    parameters: ClassVar[frozenset[str] | None] = STANDARD | {
        *("top_k", "min_p", "repetition_penalty", "stop_token_ids", "ignore_eos", "min_tokens", "skip_special_tokens"),
        *("include_stop_str_in_output", "truncate_prompt_tokens", "add_special_tokens", "add_generation_prompt"),
        *("chat_template", "chat_template_kwargs", "documents"),
    }
    metrics_path = "/prometheus/metrics"
    metrics = LoadMetrics(
        ("trtllm_num_requests_running",), ("trtllm_num_requests_waiting",), ("trtllm_kv_cache_utilization",)
    )


class LlamaCpp(OpenServer):
    """llama-server."""

    name = "llama.cpp"
    features: ClassVar[frozenset[Feature]] = OpenAI.features - {"echo"} | {"tokenize"}
    parameters: ClassVar[frozenset[str] | None] = (STANDARD - {"echo", "best_of", "suffix"}) | {
        *("top_k", "min_p", "typical_p", "repetition_penalty", "ignore_eos", "grammar", "json_schema"),
        *("add_generation_prompt", "continue_final_message", "chat_template_kwargs"),
    }
    metrics = LoadMetrics(
        ("llamacpp:requests_processing",), ("llamacpp:requests_deferred",), ("llamacpp:kv_cache_usage_ratio",)
    )

    def rewritten(self, operation: Operation, body: dict[str, Any]) -> dict[str, Any]:
        if "repetition_penalty" in body:
            body["repeat_penalty"] = body.pop("repetition_penalty")
        if body.pop("continue_final_message", None):  # it continues an answer that is last without being told
            body.pop("add_generation_prompt", None)
        return body

    def count_call(self, body: Mapping[str, Any]) -> Call:
        if "messages" in body:
            raise self._missing("tokenize_chat")
        sent = {"content": prompt_of(body), "add_special": body.get("add_special_tokens", True)}
        return Call(f"{self.upstream.root}/tokenize", encode(sent))

    def count(self, data: bytes) -> TokenCount:
        found = json_object(data).get("tokens")
        if not isinstance(found, list):
            raise EngineUnavailable("The remote server of this model sent an invalid token count; try again.")
        return TokenCount(len(found), [token for token in found if isinstance(token, int)])
