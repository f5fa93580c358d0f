"""Settings of remote models, which other servers run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from penstock.config.fields import setting


@dataclass(frozen=True, slots=True)
class RemoteConfig:
    """A remote model behind an OpenAI-compatible chat API: vLLM, llama.cpp, Ollama, a paid API, another Penstock."""

    name: str = setting("", doc="Name for clients; empty: the value of model.")
    aliases: tuple[str, ...] = setting((), doc="Other names for clients.", example="[large]")
    urls: tuple[str, ...] = setting(
        (), doc="Its servers, including /v1; each request goes to the least busy one.",
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
    timeout_s: float = setting(60.0, doc="Seconds of silence after which a request counts as failed.", least=0.1)
    check_s: float = setting(10.0, doc="Seconds of silence after which a server's health is checked.", least=0.1)
    max_in_flight: int = setting(
        256, doc="Maximum of requests in flight per server; further ones are refused.", least=1
    )
    max_tokens_field: Literal["max_tokens", "max_completion_tokens"] = setting(
        "max_tokens", doc="Request field for the token limit on those servers."
    )
    context_window: int | None = setting(None, doc="Context window shown in /v1/models.", least=1, example="131072")
    input_price: float = setting(0.0, doc="Price per million prompt tokens.", least=0)
    output_price: float = setting(0.0, doc="Price per million completion tokens.", least=0)
