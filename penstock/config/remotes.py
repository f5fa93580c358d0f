"""Settings of models that other servers run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from penstock.config.fields import setting


@dataclass(frozen=True, slots=True)
class RemoteConfig:
    """A model that other servers run, behind the OpenAI chat API: vLLM, llama.cpp, Ollama, a paid API, a Penstock."""

    name: str = setting("", doc="What clients call it; what the servers call it when empty.")
    aliases: tuple[str, ...] = setting((), doc="Other names that clients may use for it.", example="[large]")
    urls: tuple[str, ...] = setting(
        (), doc="Its servers, up to and with /v1; the one with the least to do is asked.",
        example="['http://10.0.0.5:8000/v1']",
    )  # fmt: skip
    model: str = setting("", doc="What the servers call it.", example="gpt-4o-mini")
    key_env: str = setting(
        "", doc="Environment variable that holds the API key for them; never the key itself.", example="UPSTREAM_KEY"
    )
    timeout_s: float = setting(60.0, doc="Seconds a server may say nothing before it has failed.", least=0.1)
    check_s: float = setting(
        10.0, doc="A server that has been silent for so long is asked whether it is up.", least=0.1
    )
    max_in_flight: int = setting(256, doc="Requests at one server at a time; more are refused.", least=1)
    max_tokens_field: Literal["max_tokens", "max_completion_tokens"] = setting(
        "max_tokens", doc="What the servers call the most tokens of an answer."
    )
    context_window: int | None = setting(None, doc="Shown in /v1/models.", least=1, example="131072")
    input_price: float = setting(0.0, doc="Price of a million prompt tokens.", least=0)
    output_price: float = setting(0.0, doc="Price of a million completion tokens.", least=0)
