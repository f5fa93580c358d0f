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
    """An encoder model, for /v1/embeddings and /v1/rerank and all that searches by meaning."""

    source: str = setting(
        DEFAULT_ENCODER,
        doc="A BERT sentence encoder or cross-encoder: a known name, pypi:PACKAGE==VERSION, hf:ORG/NAME or a folder.",
    )
    name: str = setting("", doc="What clients call it; made from the source when empty.")
    aliases: tuple[str, ...] = setting((), doc="Other names that clients may use for it.", example="[embed]")
    start: Literal["asked", "now"] = setting(
        "asked", doc="asked: fetched and started when first used; now: started as soon as the models are ready."
    )
    wait_s: float = setting(30.0, doc="Seconds a request waits for it to start before it gets 503.", least=0)
    device: str = setting("auto", doc="auto, cpu, cuda or cuda:N.")
    dtype: DType = setting("auto", doc="Type of weights and activations; auto is float32.")  # noqa: RUF009
    weights: EncoderWeights = setting(  # noqa: RUF009
        "auto",
        doc="int8: products in 8 bits on CPU, about twice as fast, with vectors that differ in the fourth digit of "
        "their cosine. auto is dense.",
    )
    max_model_len: int | None = setting(
        None, doc="Longest text in tokens; what the model was trained for when not set.", least=3, example="512"
    )
    token_budget: int | None = setting(
        None, doc="Most tokens computed in one step; 1024 on CPU, 16384 on CUDA when not set.", least=1, example="1024"
    )
    max_waiting: int = setting(16384, doc="Texts that may wait in the engine; more are refused.", least=1)
    max_texts: int = setting(2048, doc="Most texts or documents in one request.", least=1)
    threads: int | None = setting(None, doc="CPU threads; all cores when not set.", least=1, example="8")
    watchdog_s: float = setting(60.0, doc="With work and no finished step for this long it is restarted.", least=1)
    input_price: float = setting(0.0, doc="Price of a million tokens.", least=0)

    def engine_config(self, path: str) -> EncoderEngineConfig:
        """Settings for the engine of this encoder, whose source was resolved to `path`."""
        names = {field.name for field in dataclasses.fields(EncoderEngineConfig)} - {"model"}
        return EncoderEngineConfig(model=path, **{name: getattr(self, name) for name in names})
