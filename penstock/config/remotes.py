"""Settings of remote models, which other servers run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from penstock.config.fields import setting

WITHOUT_QUEUE = ("openai", "azure", "anthropic", "bedrock", "ollama", "triton")
"""Dialects of servers that do not tell how many requests wait."""


@dataclass(frozen=True, slots=True)
class RemoteConfig:
    """A remote model behind another server's API: vLLM, llama.cpp, Ollama, a paid API, another Penstock."""

    name: str = setting("", doc="Name for clients; empty: the value of model.")
    aliases: tuple[str, ...] = setting((), doc="Other names for clients.", example="[large]")
    dialect: str = setting(
        "openai", doc="API that the servers speak.", choices="penstock.backends.remote.dialects:DIALECTS"
    )
    urls: tuple[str, ...] = setting(
        (), doc="Its servers, with /v1 where the API is OpenAI's; each request goes to the least busy one.",
        example="['http://10.0.0.5:8000/v1']",
    )  # fmt: skip
    regions: tuple[str, ...] = setting(
        (), doc="Region of each of them, in the order of urls: the one that answers soonest is used.",
        example="[eu, us]",
    )  # fmt: skip
    labels: tuple[tuple[str, str], ...] = setting(
        (), doc="Labels for data rules; external is true unless given here, region is that of each server.",
        example="{region: eu, external: false}",
    )  # fmt: skip
    model: str = setting("", doc="Name of the model on those servers.", example="gpt-4o-mini")
    key_env: str = setting(
        "", doc="Environment variable with their API key; never the key itself.", example="UPSTREAM_KEY"
    )
    key_file: str = setting(
        "", doc="File with their API key, read again when it changes; for bedrock a shared credentials file.",
        example="/run/secrets/upstream",
    )  # fmt: skip
    api_version: str = setting(
        "", doc="azure: the api-version of the address; anthropic: the anthropic-version header; empty: a stable one.",
        example="2024-10-21",
    )  # fmt: skip
    aws_region: str = setting(
        "", doc="bedrock: region to sign for; empty: that of the url, or AWS_REGION.", example="eu-central-1"
    )
    streamed: bool = setting(
        True, doc="bedrock: false asks for whole answers (Converse), for models that cannot stream."
    )
    timeout_s: float = setting(60.0, doc="Seconds of silence after which a request counts as failed.", least=0.1)
    check_s: float = setting(10.0, doc="Seconds of silence after which a server's health is checked.", least=0.1)
    max_in_flight: int = setting(
        256, doc="Maximum of requests in flight per server; further ones are refused.", least=1
    )
    max_waiting: int | None = setting(
        None, doc="Requests waiting at a server, by its own metrics, at which it counts as full.", least=1, example="32"
    )
    metrics_s: float = setting(
        2.0, doc="Seconds between readings of the servers' own load, where they tell it.", least=0.1
    )
    default_max_tokens: int = setting(
        4096, doc="Limit of an answer for dialects that demand one, where the request has none.", least=1
    )
    max_tokens_field: Literal["max_tokens", "max_completion_tokens"] = setting(
        "max_tokens", doc="Request field for the token limit on those servers."
    )
    fallback: tuple[str, ...] = setting(
        (), doc="Models that answer when none of the servers can, in order.", example="[small]"
    )
    kind: Literal["chat", "embedding", "rerank"] = setting(
        "chat", doc="What it does: chat and completions, vectors of texts, or scores of documents for a query."
    )
    dimensions: int | None = setting(
        None, doc="Length of an embedding model's vectors, if it is to be checked.", least=1, example="1536"
    )
    texts_per_request: int = setting(
        256, doc="Texts that an embedding or rerank model gets at once; longer lists are split.", least=1
    )
    tokenizer: str = setting(
        "",
        doc="Its tokenizer, for exact counts and token ids: a known name, hf:ORG/NAME, a folder or a GGUF file.",
        example="hf:Qwen/Qwen3-32B",
    )
    context_window: int | None = setting(None, doc="Context window shown in /v1/models.", least=1, example="131072")
    input_price: float = setting(0.0, doc="Price per million prompt tokens.", least=0)
    output_price: float = setting(0.0, doc="Price per million completion tokens.", least=0)

    def problems(self) -> list[str]:
        """Settings that contradict each other, or that its dialect has no use for."""
        found = []
        if self.key_env and self.key_file:
            found.append("key_file: key_env is set, too; one of them")
        if self.api_version and self.dialect not in ("azure", "anthropic"):
            found.append(f"api_version: the dialect {self.dialect} has none")
        if self.aws_region and self.dialect != "bedrock":
            found.append(f"aws_region: the dialect {self.dialect} has none")
        if not self.streamed and self.dialect != "bedrock":
            found.append(f"streamed: servers of the dialect {self.dialect} always stream")
        if self.max_waiting is not None and self.dialect in (
            "openai",
            "azure",
            "anthropic",
            "bedrock",
            "ollama",
            "triton",
        ):
            found.append(f"max_waiting: servers of the dialect {self.dialect} do not tell how many requests wait")
        return found
