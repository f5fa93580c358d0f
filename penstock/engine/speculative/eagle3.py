"""EAGLE-3 heads: one Llama layer over the embedding of a token and a projection of three hidden states of the model.

Two layouts are published. The original one has `midlayer.*` beside `fc`, `norm`, `lm_head`, `d2t` and `t2d`, and a
`config.json` like a Llama model's with `draft_vocab_size`. That of the speculators library (which vLLM reads too) has
`layers.0.*` in place of `midlayer.*`, and the layer's keys under `transformer_layer_config`.

The layer is Llama's but for its input: the embedding and the hidden state, each normalized on its own, side by side.
`d2t` says how far the token of each of the head's rows is from the row's own number; `t2d` follows from it, and is only
used in training.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from penstock.engine.backends.backend import Backend
from penstock.engine.backends.interface import AttentionBatch, HeadLayout
from penstock.engine.kv.cache import KVCache
from penstock.engine.loading.checkpoint import read_json
from penstock.engine.loading.keys import KeyRules
from penstock.engine.models.decoder import DecoderLayer
from penstock.engine.models.families import read_config
from penstock.engine.models.layers.attention import Attention
from penstock.engine.models.layers.feed_forward import GatedMlp
from penstock.engine.models.layers.linear import Linear
from penstock.engine.models.layers.rotary import cos_sin_table
from penstock.engine.models.model_config import ModelConfig
from penstock.engine.models.tap import Tap
from penstock.engine.models.weights import WeightReader
from penstock.engine.speculative.head_checkpoint import open_head
from penstock.engine.speculative.head_decoder import HeadDecoder, PartialHead
from penstock.errors import CheckpointError

_OWN = frozenset({
    "draft_vocab_size", "target_hidden_size", "norm_before_residual", "eagle_aux_hidden_state_layer_ids",
    "eagle_config",
})  # fmt: skip
"""Keys of a head, which a Llama model does not have."""
_SPECULATORS = KeyRules(
    reader="EAGLE-3 heads",
    read=_OWN | {"speculators_model_type", "transformer_layer_config", "tie_word_embeddings"},
    limited={"norm_before_fc": (False, None)},
    inert={
        "architectures", "auto_map", "speculators_config", "speculators_version", "embed_requires_grad",
        "has_no_defaults_at_init", "torch_dtype", "dtype", "transformers_version", "model_type",
    },
    strict=True,
)  # fmt: skip
_EAGLE_CONFIG = KeyRules(
    reader="EAGLE-3 heads",
    read={"eagle_aux_hidden_state_layer_ids"},
    limited={
        "use_aux_hidden_state": (True,), "use_input_layernorm_in_first_layer": (True,), "use_last_layernorm": (True,),
        "use_mtp_layernorm": (False,), "norm_before_fc": (False,),
    },
    strict=True,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Eagle3Config:
    """What a head's `config.json` says."""

    layer: ModelConfig
    """A Llama model of one layer."""
    draft_vocab_size: int
    tapped: tuple[int, ...]
    """Layers of the target in front of which the residual stream is read."""
    norm_before_residual: bool
    """Whether the layer adds to the normalized hidden state, not to the hidden state as it came."""


def is_head(folder: Path) -> bool:
    """Whether a folder holds an EAGLE-3 head, in either layout."""
    try:
        raw = read_json(folder / "config.json")
    except CheckpointError:
        return False
    return raw.get("speculators_model_type") == "eagle3" or "draft_vocab_size" in raw


def read_eagle3_config(raw: Mapping[str, Any], target: ModelConfig) -> Eagle3Config:
    """Either layout; a head that cannot be run exactly, or is for another model, is refused."""
    nested = raw.get("transformer_layer_config")
    if nested is not None:
        kind = raw.get("speculators_model_type")
        if kind != "eagle3":
            raise CheckpointError(f"the head is of speculators_model_type {kind!r:.80}; only eagle3 can be run")
        _SPECULATORS.check(raw)
        layer = dict(nested)
        given = raw
    else:
        given = raw
        layer = {key: value for key, value in raw.items() if key not in _OWN}
    eagle = given.get("eagle_config") or {}
    _EAGLE_CONFIG.check(eagle, "config.json: eagle_config")
    # Whatever family the file names, the published heads have Llama's layer, as many of it as they say.
    config = read_config({**layer, "model_type": "llama"})
    if config.num_layers != 1:
        raise CheckpointError(f"the head has {config.num_layers} layers; EAGLE-3 heads of one layer can be run")
    if config.vocab_size != target.vocab_size:
        raise CheckpointError(
            f"the head was made for a vocabulary of {config.vocab_size} tokens, the model has {target.vocab_size}"
        )
    width = given.get("target_hidden_size")
    if (width or config.hidden_size) != target.hidden_size:
        raise CheckpointError(
            f"the head was made for hidden states of {width or config.hidden_size}, the model's have "
            f"{target.hidden_size}"
        )
    tapped = given.get("eagle_aux_hidden_state_layer_ids") or eagle.get("eagle_aux_hidden_state_layer_ids")
    return Eagle3Config(
        layer=replace(config, max_positions=target.max_positions),
        draft_vocab_size=_count(given, "draft_vocab_size", config.vocab_size),
        tapped=_tapped(tapped, target.num_layers),
        norm_before_residual=_flag(given, "norm_before_residual"),
    )


def _count(raw: Mapping[str, Any], key: str, most: int) -> int:
    value = most if raw.get(key) is None else raw[key]
    if isinstance(value, bool) or not isinstance(value, int) or not 0 < value <= most:
        raise CheckpointError(f"config key {key!r} must be an integer from 1 to {most}, found {value!r:.80}")
    return value


def _flag(raw: Mapping[str, Any], key: str) -> bool:
    value = raw.get(key) or False
    if not isinstance(value, bool):
        raise CheckpointError(f"config key {key!r} must be true or false, found {value!r:.80}")
    return value


def _tapped(given: Any, layers: int) -> tuple[int, ...]:
    """As named, or the usual three: after the second layer, in the middle, and before the last three."""
    chosen = [2, layers // 2, layers - 3] if given is None else given
    if not isinstance(chosen, list) or not all(isinstance(at, int) and 0 <= at <= layers for at in chosen):
        raise CheckpointError(
            f"the head reads hidden states in front of layers {chosen!r:.80}; the model has {layers} layers"
        )
    return tuple(sorted(set(chosen)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Eagle3Decoder(HeadDecoder):
    """See `HeadDecoder`. `final_norm` is the head's own; `layers` has its one layer."""

    feature_norm: Tensor
    norm_before_residual: bool

    def read(self, embedded: Tensor, features: Tensor, batch: AttentionBatch, kv: KVCache) -> tuple[Tensor, Tensor]:
        ops, eps, layer = self.ops, self.config.rms_eps, self.layers[0]
        token = ops.rms_norm(embedded, layer.mixer_norm, eps)
        hidden = ops.rms_norm(features, self.feature_norm, eps)
        stream = hidden if self.norm_before_residual else features
        x = layer.mixer.forward(torch.cat((token, hidden), dim=-1), batch, kv.layers[0])
        stream = ops.widen(stream) if self.stream_dtype is not stream.dtype else stream
        x = ops.add_rms_norm(x, stream, layer.feed_forward_norm, eps)
        x = ops.add_rms_norm(layer.feed_forward.forward(x), stream, self.final_norm, eps)
        return x, stream.to(features.dtype)


@dataclass(frozen=True, slots=True)
class Eagle3Head:
    """A head's weights on the device; the rest is the target's, once it is there."""

    config: Eagle3Config
    layer: DecoderLayer
    feature_norm: Tensor
    final_norm: Tensor
    tap: Tap
    embedding: Tensor | None
    """None: the target's."""
    head: Linear | None
    """None: the target's."""

    @property
    def needs_head(self) -> bool:
        return self.head is None

    def decoder(self, backend: Backend, features: Tensor, block_size: int, embedding: Tensor, head: Linear,
                max_positions: int) -> Eagle3Decoder:  # fmt: skip
        """The drafter over what a target keeps; `embedding` and `head` are the target's."""
        return Eagle3Decoder(
            config=self.config.layer,
            ops=backend.ops,
            embedding=embedding if self.embedding is None else self.embedding,
            layers=[self.layer],
            final_norm=self.final_norm,
            head=head if self.head is None else self.head,
            max_positions=max_positions,
            features=features,
            block_size=block_size,
            feature_norm=self.feature_norm,
            norm_before_residual=self.config.norm_before_residual,
        )


def load_eagle3(
    folder: Path, target: ModelConfig, backend: Backend, dtype: torch.dtype, max_positions: int
) -> Eagle3Head:
    """Read a head in either layout."""
    weights = open_head(folder)
    read = WeightReader(weights, backend, dtype)
    names = read.names
    prefix = next((p for p in ("midlayer.", "layers.0.") if f"{p}hidden_norm.weight" in names), None)
    if prefix is None:
        raise CheckpointError(f"{folder} is not an EAGLE-3 head: it has neither midlayer.* nor layers.0.hidden_norm")
    config = read_eagle3_config(weights.config, target)
    layer, hidden, vocab = config.layer, config.layer.hidden_size, target.vocab_size
    embedding = read.get("embed_tokens.weight", vocab, hidden) if "embed_tokens.weight" in names else None
    rows, tokens = config.draft_vocab_size, _tokens(weights.tensor("d2t"), vocab) if "d2t" in names else None
    head: Linear | None = None
    if "lm_head.weight" in names:
        head = backend.as_head(read.linear("", {"lm_head": rows}, hidden))
        if tokens is not None:
            if len(tokens) != rows:
                raise CheckpointError(f"d2t has {len(tokens)} entries, draft_vocab_size is {rows}")
            head = PartialHead(head, tokens.to(backend.device), vocab)
        elif rows != vocab:
            raise CheckpointError(f"the head has {rows} of {vocab} tokens, but no d2t that says which")
    for missing, size in (("embed_tokens", embedding), ("lm_head", head)):
        if size is None and hidden != target.hidden_size:
            raise CheckpointError(
                f"the head is {hidden} wide, the model {target.hidden_size}: it needs its own {missing}"
            )
    inputs = len(config.tapped) * target.hidden_size
    known = {"t2d", "d2t", "lm_head.weight", "embed_tokens.weight", "fc.weight", "norm.weight"}
    stray = sorted(name for name in names if name not in known and not name.startswith(prefix))
    if stray:
        raise CheckpointError(f"the head holds {stray[0]!r}, which EAGLE-3 heads of one layer do not have")
    project = read.linear("", {"fc": hidden}, inputs)
    return Eagle3Head(
        config=config,
        layer=_layer(read, prefix, layer, backend, max_positions),
        feature_norm=read.norm(f"{prefix}hidden_norm", hidden),
        final_norm=read.norm("norm", hidden),
        tap=Tap(hidden, backend.ops, config.tapped, project),
        embedding=embedding,
        head=head,
    )


def _tokens(offsets: Tensor, vocab_size: int) -> Tensor:
    """The token of each row of the head."""
    tokens = torch.arange(len(offsets)) + offsets.cpu().long()
    if len(tokens) and not 0 <= int(tokens.min()) <= int(tokens.max()) < vocab_size:
        raise CheckpointError(f"d2t names tokens outside the vocabulary of {vocab_size}")
    return tokens


def _layer(read: WeightReader, prefix: str, config: ModelConfig, backend: Backend, max_positions: int) -> DecoderLayer:
    hidden, dim = config.hidden_size, config.head_dim
    q_size, kv_size = config.num_heads * dim, config.num_kv_heads * dim
    at, mlp = f"{prefix}self_attn.", f"{prefix}mlp."
    qkv = {"q_proj": q_size, "k_proj": kv_size, "v_proj": kv_size}
    return DecoderLayer(
        mixer_norm=read.norm(f"{prefix}input_layernorm", hidden),
        mixer=Attention(
            ops=backend.ops,
            attention_ops=backend.ops,
            qkv=read.linear(at, qkv, 2 * hidden, config.qkv_bias),
            output=read.linear(at, {"o_proj": hidden}, q_size, config.output_bias),
            heads=HeadLayout(config.num_heads, config.num_kv_heads, dim, config.attention_scale),
            cos_sin=cos_sin_table(config.rope, dim, max_positions, backend.device),
        ),
        feed_forward_norm=read.norm(f"{prefix}post_attention_layernorm", hidden),
        feed_forward=GatedMlp(
            ops=backend.ops,
            activation=config.activation,
            gate_up=read.linear(mlp, dict.fromkeys(("gate_proj", "up_proj"), config.ffn_size), hidden, config.mlp_bias),
            down=read.linear(mlp, {"down_proj": hidden}, config.ffn_size, config.mlp_bias),
        ),
    )
