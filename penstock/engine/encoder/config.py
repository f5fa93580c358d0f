"""Settings of an encoder engine, and the shape of its model as the checkpoint tells it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from penstock.engine.config import DType
from penstock.errors import CheckpointError

Pooling = Literal["mean", "cls"]
EncoderWeights = Literal["auto", "dense", "int8"]


@dataclass(frozen=True, slots=True)
class EncoderEngineConfig:
    """Everything an encoder engine needs to know besides the checkpoint itself."""

    model: str
    """Path of a checkpoint folder (sources are resolved before the engine starts)."""
    name: str = ""
    device: str = "auto"
    """`auto` takes CUDA when there is one with memory left, for language models take nearly all of it."""
    dtype: DType = "auto"
    """`auto`: float32, so that vectors computed on any machine can be compared."""
    weights: EncoderWeights = "auto"
    """`int8`: weights, and what they are multiplied with, in 8 bits by the native CPU kernels. `auto` is dense."""
    max_model_len: int | None = None
    """Longest text in tokens; what the checkpoint was made for when not set."""
    token_budget: int | None = None
    """Most tokens computed in one step; 1024 on CPU and 16384 on CUDA when not set."""
    max_waiting: int = 16384
    """Texts that may wait; requests beyond are refused."""
    threads: int | None = None


@dataclass(frozen=True, slots=True)
class EncoderShape:
    """The model's dimensions."""

    vocab_size: int
    hidden: int
    layers: int
    heads: int
    positions: int
    segments: int
    norm_eps: float
    pooling: Pooling
    max_model_len: int
    """What it was trained for; at most `positions`."""
    scores: bool
    """Whether it is a cross-encoder: two texts in, a number out."""


def read_shape(folder: Path, config: dict[str, Any]) -> EncoderShape:
    """From `config.json` (given) and the files of sentence-transformers beside it."""
    kind = config.get("model_type")
    if kind != "bert":
        raise CheckpointError(f"{folder}: {kind!r} is not an encoder this engine runs; it runs bert")
    if config.get("hidden_act", "gelu") != "gelu" or config.get("position_embedding_type", "absolute") != "absolute":
        raise CheckpointError(f"{folder}: only BERT models with gelu and absolute positions are supported")
    scores = any("SequenceClassification" in name for name in config.get("architectures") or ())
    if scores and len(config.get("id2label") or {0: ""}) != 1:
        raise CheckpointError(f"{folder}: a cross-encoder has one output; this one classifies")
    positions = int(config["max_position_embeddings"])
    trained = _json(folder / "sentence_bert_config.json").get("max_seq_length") or positions
    return EncoderShape(
        vocab_size=config["vocab_size"],
        hidden=config["hidden_size"],
        layers=config["num_hidden_layers"],
        heads=config["num_attention_heads"],
        positions=positions,
        segments=config.get("type_vocab_size", 2),
        norm_eps=config.get("layer_norm_eps", 1e-12),
        pooling=_pooling(folder),
        max_model_len=min(int(trained), positions),
        scores=scores,
    )


def _pooling(folder: Path) -> Pooling:
    settings = _json(folder / "1_Pooling" / "config.json")
    chosen = [name for name, value in settings.items() if name.startswith("pooling_mode_") and value is True]
    if chosen in ([], ["pooling_mode_mean_tokens"]):
        return "mean"
    if chosen == ["pooling_mode_cls_token"]:
        return "cls"
    raise CheckpointError(f"{folder}: pools by {', '.join(chosen)}; mean_tokens and cls_token are supported")


def _json(file: Path) -> dict[str, Any]:
    if not file.exists():
        return {}
    try:
        value = json.loads(file.read_bytes())
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{file} cannot be read: {error}") from error
    return value if isinstance(value, dict) else {}
