"""All dialects by name."""

from __future__ import annotations

from penstock.backends.remote.anthropic import Anthropic
from penstock.backends.remote.azure import Azure
from penstock.backends.remote.bedrock import Bedrock
from penstock.backends.remote.dialect import Dialect
from penstock.backends.remote.ollama import Ollama
from penstock.backends.remote.open_servers import LlamaCpp, Penstock, Sglang, TensorRt, Vllm
from penstock.backends.remote.openai import OpenAI
from penstock.backends.remote.tgi import Tgi
from penstock.backends.remote.triton import Triton
from penstock.backends.remote.upstream import DialectName, Upstream

DIALECTS: dict[DialectName, type[Dialect]] = {
    "openai": OpenAI,
    "azure": Azure,
    "anthropic": Anthropic,
    "bedrock": Bedrock,
    "penstock": Penstock,
    "vllm": Vllm,
    "sglang": Sglang,
    "tgi": Tgi,
    "ollama": Ollama,
    "tensorrt-llm": TensorRt,
    "triton": Triton,
    "llama.cpp": LlamaCpp,
}


def make_dialect(upstream: Upstream) -> Dialect:
    return DIALECTS[upstream.dialect](upstream)
