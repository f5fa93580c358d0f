"""Address, credentials and dialect of a server."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

DialectName = Literal[
    "openai", "azure", "anthropic", "bedrock", "penstock", "vllm", "sglang", "tgi", "ollama", "tensorrt-llm", "triton",
    "llama.cpp",
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class Upstream:
    """Where a model runs and how it is asked."""

    url: str
    """Including `/v1` where the server's API is OpenAI's."""
    model: str
    """Name of the model on the server."""
    key_env: str = ""
    """Environment variable with its key; empty: no key."""
    timeout_s: float = 60.0
    """Maximum silence."""
    dialect: DialectName = "openai"
    key_file: str = ""
    """File with its key, read again when it changes."""
    api_version: str = ""
    """Azure: the value of `api-version`; Anthropic: of the header `anthropic-version`."""
    aws_region: str = ""
    """Bedrock: part of what is signed; empty: from the url."""
    streamed: bool = True
    """Bedrock: false for models that cannot stream."""
    max_tokens: int = 4096
    """Limit of an answer for dialects that demand one, where the request has none."""

    @property
    def root(self) -> str:
        """The address without `/v1`."""
        return self.url.rstrip("/").removesuffix("/v1")
