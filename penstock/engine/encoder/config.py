"""Settings of an encoder engine, and the shape of its model as the checkpoint tells it."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

from penstock.engine.config import DType
from penstock.engine.loading.keys import KeyRules
from penstock.engine.models.families.config_keys import INERT, reference_of, with_defaults
from penstock.errors import CheckpointError

Pooling = Literal["mean", "cls"]
EncoderWeights = Literal["auto", "dense", "int8"]

_BERT = KeyRules(
    reader="BERT encoders",
    reference=reference_of("bert"),
    read={
        "model_type", "architectures", "id2label", "num_labels", "vocab_size", "hidden_size", "num_hidden_layers",
        "num_attention_heads", "intermediate_size", "max_position_embeddings", "type_vocab_size", "layer_norm_eps",
        "quantization_config",
    },
    limited={
        "hidden_act": ("gelu",),
        "position_embedding_type": ("absolute",),
        "is_causal": (False,),
        "is_decoder": (False,),
        "add_cross_attention": (False,),
        "per_layer_config": (None, {}),
    },
    inert=(INERT - {"architectures", "id2label", "num_labels"})
    | {"tie_word_embeddings", "output_cross_attentions", "sentence_transformers"},
)  # fmt: skip
_MODULES = ("Transformer", "Pooling", "Normalize")
_SETTINGS = {
    "1_Pooling/config.json": KeyRules(
        reader="encoders",
        read={"pooling_mode_mean_tokens", "pooling_mode_cls_token"},
        limited={
            "pooling_mode": ("mean", "cls"),
            "include_prompt": (True,),
            "pooling_mode_max_tokens": (False,),
            "pooling_mode_mean_sqrt_len_tokens": (False,),
            "pooling_mode_weightedmean_tokens": (False,),
            "pooling_mode_lasttoken": (False,),
        },
        inert={"word_embedding_dimension", "embedding_dimension"},
    ),
    "sentence_bert_config.json": KeyRules(
        reader="encoders", read={"max_seq_length"}, limited={"do_lower_case": (False,)}, inert={"model_args"}
    ),
    "config_sentence_transformers.json": KeyRules(
        reader="encoders",
        limited={"default_prompt_name": (None,)},
        inert={"__version__", "prompts", "similarity_fn_name", "model_type"},
    ),
}
"""Files of sentence-transformers, and what of them is honoured."""


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
    _BERT.check(config, f"{folder}/config.json")
    config = with_defaults("bert", config, ())
    scores = any("SequenceClassification" in name for name in config["architectures"] or ())
    labels = len(config["id2label"]) if config["id2label"] else config.get("num_labels", 2)
    if scores and labels != 1:
        raise CheckpointError(f"{folder}: a cross-encoder has one output; this one classifies into {labels} labels")
    positions = int(config["max_position_embeddings"])
    _check_modules(folder)
    trained = _json(folder / "sentence_bert_config.json").get("max_seq_length") or positions
    return EncoderShape(
        vocab_size=config["vocab_size"],
        hidden=config["hidden_size"],
        layers=config["num_hidden_layers"],
        heads=config["num_attention_heads"],
        positions=positions,
        segments=config["type_vocab_size"],
        norm_eps=config["layer_norm_eps"],
        pooling=_pooling(folder),
        max_model_len=min(int(trained), positions),
        scores=scores,
    )


def _check_modules(folder: Path) -> None:
    """sentence-transformers runs the modules that a file lists; an encoder, pooling and a norm can be run here."""
    for module in _json(folder / "modules.json", list):
        kind = str(module.get("type", "")).rpartition(".")[2]
        if kind not in _MODULES:
            raise CheckpointError(f"{folder}/modules.json: {kind} is not supported; supported: {', '.join(_MODULES)}")
    for name, rules in _SETTINGS.items():
        settings = _json(folder / name)
        if _json(folder / "tokenizer_config.json").get("do_lower_case") is True:
            settings.pop("do_lower_case", None)  # the tokenizer does it already
        rules.check(settings, f"{folder}/{name}")


def _pooling(folder: Path) -> Pooling:
    settings = _json(folder / "1_Pooling" / "config.json")
    if settings.get("pooling_mode") in ("mean", "cls"):  # newer files have one key instead of one for each mode
        return cast(Pooling, settings["pooling_mode"])
    chosen = [name for name, value in settings.items() if name.startswith("pooling_mode_") and value is True]
    if chosen in ([], ["pooling_mode_mean_tokens"]):
        return "mean"
    if chosen == ["pooling_mode_cls_token"]:
        return "cls"
    raise CheckpointError(f"{folder}: pools by {', '.join(chosen)}; mean_tokens and cls_token are supported")


def _json(file: Path, kind: Callable[[], Any] = dict) -> Any:
    """The file's object or list; an empty one where there is none."""
    empty = kind()
    if not file.exists():
        return empty
    try:
        value = json.loads(file.read_bytes())
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{file} cannot be read: {error}") from error
    return value if isinstance(value, type(empty)) else empty
