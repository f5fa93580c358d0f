"""The table of endpoints of other servers' own APIs: llama.cpp, text-generation-inference, SGLang."""

from __future__ import annotations

from penstock.gateway.api.llama_cpp.endpoints import LlamaCppEndpoints
from penstock.gateway.api.llama_cpp.schemas import (
    InfillRequest,
    LlamaCppCompletionRequest,
    LlamaCppEmbeddingRequest,
    LlamaCppModelQuery,
    SlotsQuery,
)
from penstock.gateway.api.openai.rerank import RerankEndpoints
from penstock.gateway.api.openai.tokenize import TokenEndpoints
from penstock.gateway.api.operations.health import HealthEndpoints
from penstock.gateway.api.sglang.endpoints import SglangEndpoints
from penstock.gateway.api.sglang.schemas import GenerateRequest, SglangModelQuery
from penstock.gateway.api.tgi.endpoints import TgiEndpoints
from penstock.gateway.api.tgi.schemas import TgiModelQuery, TgiRequest
from penstock.gateway.app.dialects import LLAMA_CPP as LLAMA_CPP_DIALECT
from penstock.gateway.app.dialects import TGI as TGI_DIALECT
from penstock.gateway.app.endpoint import Endpoint
from penstock.gateway.generation.schemas import RerankRequest, TokenizeRequest

LLAMA_CPP_TAG, TGI_TAG, SGLANG_TAG = "llama.cpp", "text-generation-inference", "SGLang"
LLAMA_CPP = (
    *(
        Endpoint("POST", path, handler, summary, LLAMA_CPP_TAG, body, serves_tokens=True, dialect=LLAMA_CPP_DIALECT)
        for path, handler, summary, body in (
            (
                "/completion",
                LlamaCppEndpoints.llama_cpp_completion,
                "Continue text or token ids.",
                LlamaCppCompletionRequest,
            ),
            (
                "/completions",
                LlamaCppEndpoints.llama_cpp_completion,
                "The same; OpenAI's is /v1/completions.",
                LlamaCppCompletionRequest,
            ),
            ("/infill", LlamaCppEndpoints.llama_cpp_infill, "Fill a gap between two texts.", InfillRequest),
            ("/embedding", LlamaCppEndpoints.llama_cpp_embedding, "Embed texts.", LlamaCppEmbeddingRequest),
            (
                "/embeddings",
                LlamaCppEndpoints.llama_cpp_embedding,
                "The same; OpenAI's is /v1/embeddings.",
                LlamaCppEmbeddingRequest,
            ),
            (
                "/apply-template",
                TokenEndpoints.apply_template,
                "The prompt of a conversation, as text.",
                TokenizeRequest,
            ),
        )
    ),
    *(
        Endpoint("GET", path, handler, summary, LLAMA_CPP_TAG, query=query, dialect=LLAMA_CPP_DIALECT)
        for path, handler, summary, query in (
            (
                "/props",
                LlamaCppEndpoints.llama_cpp_props,
                "A model's window, template and sampling.",
                LlamaCppModelQuery,
            ),
            (
                "/lora-adapters",
                LlamaCppEndpoints.llama_cpp_lora_adapters,
                "The adapters of a model.",
                LlamaCppModelQuery,
            ),
        )
    ),
    Endpoint(
        "GET",
        "/slots",
        LlamaCppEndpoints.llama_cpp_slots,
        "How many requests a model runs at once, and runs now.",
        LLAMA_CPP_TAG,
        query=SlotsQuery,
        scope="metrics",
        logged=False,
        dialect=LLAMA_CPP_DIALECT,
    ),
    *(
        Endpoint(
            "POST", path, handler, "Refused with a reason.", LLAMA_CPP_TAG, scope="admin", dialect=LLAMA_CPP_DIALECT
        )
        for path, handler in (
            ("/lora-adapters", LlamaCppEndpoints.llama_cpp_set_lora_adapters),
            ("/props", LlamaCppEndpoints.llama_cpp_set_props),
        )
    ),
    *(
        Endpoint(
            "POST",
            path,
            RerankEndpoints.rerank,
            "The same under the paths of llama.cpp.",
            "Inference",
            RerankRequest,
            serves_tokens=True,
        )
        for path in ("/reranking", "/v1/reranking")
    ),
    Endpoint("GET", "/v1/health", HealthEndpoints.health, "The same as /health.", "Health", scope=None, logged=False),
)
TGI = (
    *(
        Endpoint("POST", path, handler, summary, TGI_TAG, TgiRequest, serves_tokens=True, dialect=TGI_DIALECT)
        for path, handler, summary in (
            ("/", TgiEndpoints.tgi_root, "Continue text, whole or streamed."),
            ("/generate_stream", TgiEndpoints.tgi_generate_stream, "Continue text, streamed."),
        )
    ),
    Endpoint(
        "GET",
        "/info",
        TgiEndpoints.tgi_info,
        "What a model takes.",
        TGI_TAG,
        query=TgiModelQuery,
        dialect=TGI_DIALECT,
    ),
)
SGLANG = (
    Endpoint(
        "POST",
        "/generate",
        SglangEndpoints.generate,
        "Continue text or token ids, for clients of SGLang and of text-generation-inference.",
        SGLANG_TAG,
        GenerateRequest,
        serves_tokens=True,
        other_dialects=(TGI_DIALECT,),
    ),
    *(
        Endpoint("GET", path, SglangEndpoints.sglang_model_info, summary, SGLANG_TAG, query=SglangModelQuery)
        for path, summary in (("/model_info", "A model."), ("/get_model_info", "The same under its older path."))
    ),
    Endpoint(
        "GET",
        "/health_generate",
        HealthEndpoints.ready,
        "The same as /health/ready.",
        "Health",
        scope=None,
        logged=False,
    ),
)
NATIVE = (*LLAMA_CPP, *TGI, *SGLANG)
