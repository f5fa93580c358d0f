"""Settings of encoder models."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Literal

from penstock.config.fields import setting
from penstock.engine.config import DType
from penstock.engine.encoder.config import EncoderEngineConfig, EncoderWeights

DEFAULT_ENCODER = "minilm"


@dataclass(frozen=True, slots=True)
class EncoderConfig:
    """An encoder model, for /v1/embeddings, /v1/rerank, collections and the semantic cache."""

    source: str = setting(
        DEFAULT_ENCODER,
        doc="A BERT sentence encoder or cross-encoder: a known name, pypi:PACKAGE==VERSION, hf:ORG/NAME or a folder.",
    )
    name: str = setting("", doc="Name for clients; empty: derived from the source.")
    aliases: tuple[str, ...] = setting((), doc="Other names for clients.", example="[embed]")
    labels: tuple[tuple[str, str], ...] = setting(
        (), doc="Labels for data rules; external is false unless given here.", example="{region: eu}"
    )
    start: Literal["asked", "now"] = setting(
        "asked", doc="asked: downloaded and started on first use; now: started as soon as the models are ready."
    )
    wait_s: float = setting(30.0, doc="Seconds a request waits for the encoder to start before it gets 503.", least=0)
    device: str = setting("auto", doc="auto, cpu, cuda or cuda:N.")
    dtype: DType = setting("auto", doc="Data type of weights and activations; auto: float32.")  # noqa: RUF009
    weights: EncoderWeights = setting(  # noqa: RUF009
        "auto",
        doc="int8: 8-bit matrix products on CPU, about twice as fast; vectors differ in the fourth digit of "
        "their cosine. auto: dense.",
    )
    max_model_len: int | None = setting(
        None, doc="Maximum text length in tokens; when not set, the model's own.", least=3, example="512"
    )
    token_budget: int | None = setting(
        None, doc="Maximum tokens per step; when not set, 1024 on CPU and 16384 on CUDA.", least=1, example="1024"
    )
    max_waiting: int = setting(16384, doc="Maximum of texts waiting in the engine; further ones are refused.", least=1)
    max_texts: int = setting(2048, doc="Maximum of texts or documents in one request.", least=1)
    threads: int | None = setting(
        None, doc="CPU threads; when not set, all cores that this process may use.", least=1, example="8"
    )
    watchdog_s: float = setting(
        60.0, doc="Seconds with work but without a finished step after which it is restarted.", least=1
    )
    input_price: float = setting(0.0, doc="Price per million tokens.", least=0)

    def engine_config(self, path: str) -> EncoderEngineConfig:
        """Settings of the engine; `path` is the resolved source."""
        names = {field.name for field in dataclasses.fields(EncoderEngineConfig)} - {"model"}
        return EncoderEngineConfig(model=path, **{name: getattr(self, name) for name in names})
