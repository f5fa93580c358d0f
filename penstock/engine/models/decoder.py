"""What the engine needs of a model: an embedding, layers made of parts, a head, and the forward pass between them.

A layer is a token mixer (`layers.mixer`) and a feed-forward (`layers.feed_forward`) with their norms. A model file such
as `llama` composes layers from a checkpoint's tensors and defines `run`. Tokens of all sequences are packed along one
axis, so a layer never knows whether it sees prompts, decodes or both.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import ClassVar, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from penstock.engine.backends.interface import AttentionBatch, Followers, Ops
from penstock.engine.kv.cache import CacheShape, KVCache
from penstock.engine.models.layers.feed_forward import FeedForward
from penstock.engine.models.layers.latent_attention import LatentAttention
from penstock.engine.models.layers.linear import Linear
from penstock.engine.models.layers.mixer import TokenMixer
from penstock.engine.models.model_config import ModelConfig


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    """The parts of one layer."""

    mixer_norm: Tensor | None
    """None, as below: the part reads the residual stream as it is."""
    mixer: TokenMixer
    feed_forward_norm: Tensor | None
    feed_forward: FeedForward
    mixer_out_norm: Tensor | None = None
    feed_forward_out_norm: Tensor | None = None
    """With sandwich norms: the output of mixer and feed-forward is normalized before it is added."""
    mixer_norm_bias: Tensor | None = None
    feed_forward_norm_bias: Tensor | None = None
    """Of LayerNorms that have some."""

    @property
    def linears(self) -> tuple[Linear, ...]:
        return *self.mixer.linears, *self.feed_forward.linears


class EmbeddedTokens(Protocol):
    """What changes the initial residual stream of tokens."""

    def known(self, token_ids: Tensor) -> Tensor:
        """Ids that the embedding has, in place of those that it has not."""
        ...

    def __call__(self, token_ids: Tensor, stream: Tensor) -> None:
        """Change the stream in place."""
        ...


@dataclass(frozen=True, slots=True)
class Decoder(ABC):
    """Embedding, layers, final norm and head."""

    uniform: ClassVar[bool] = False
    """Whether it runs with any of its layers left out, each of the others as before."""
    config: ModelConfig
    ops: Ops
    embedding: Tensor
    layers: list[DecoderLayer]
    final_norm: Tensor
    head: Linear
    max_positions: int
    """Positions that the rotary tables cover."""
    fused_up_to: int = 0
    """Steps of at most this many tokens take the fused path; 0 where some part of a layer has none."""
    embedded: EmbeddedTokens | None = None
    final_norm_bias: Tensor | None = None
    chains: bool = False
    """Whether steps of one token may be computed in launches that need the device for themselves; see `Ops.chain`."""

    def forward(self, token_ids: Tensor, batch: AttentionBatch, kv: KVCache) -> Tensor:
        """Final hidden states [T, hidden] of the packed tokens; `kv` knows the tokens afterwards."""
        return self.run(self.embed(token_ids), batch, kv)

    def alone(self, layer: DecoderLayer) -> Decoder:
        """One that launches what this one does for a layer, and little else: kernels are built for its steps. A layer
        that attends to what another has chosen comes behind one that chooses."""
        if not isinstance(layer.mixer, LatentAttention) or not layer.mixer.follows:
            return replace(self, layers=[layer])
        before = next(one for one in self.layers if isinstance(one.mixer, LatentAttention) and one.mixer.indexer)
        return replace(self, layers=[before, layer])

    @property
    def launched_eagerly(self) -> bool:
        """Whether every step is launched from Python, because it can be neither recorded nor captured."""
        return False

    @property
    def captured_context(self) -> int | None:
        """The longest context of steps that may be recorded or captured together: those with longer ones compute
        something else, and are launched or have graphs of their own. None: any."""
        latent = self.config.latent
        return None if latent is None or latent.index is None else latent.index.everything

    @property
    def chained(self) -> bool:
        """Whether steps of one token have launches that compute products of two neighbouring layers."""
        return False

    @property
    def followers(self) -> Followers | None:
        """The other ranks that replay captured steps with this one; None where there are none, or nothing is captured
        with them."""
        return None

    def captured(self) -> Decoder:
        """What a captured step runs: with followers only this rank's part, since they replay theirs."""
        return self

    def begin(self, token_ids: Tensor, batch: AttentionBatch, kv: KVCache) -> Callable[[], Tensor]:
        """`forward` in two halves: begins it, and returns what waits for its end. Ends come in the order of begins."""
        hidden = self.forward(token_ids, batch, kv)
        return lambda: hidden

    @abstractmethod
    def run(self, residual: Tensor, batch: AttentionBatch, kv: KVCache) -> Tensor:
        """The same from embedded tokens: the residual stream, to which every layer adds in place."""

    def embed(self, token_ids: Tensor) -> Tensor:
        """The initial residual stream."""
        known = token_ids if self.embedded is None else self.embedded.known(token_ids)
        stream = F.embedding(known, self.embedding)
        stream = stream if self.stream_dtype is stream.dtype else self.ops.widen(stream)
        if self.embedded is not None:
            self.embedded(token_ids, stream)
        return stream

    @property
    def stream_dtype(self) -> torch.dtype:
        """Of the residual stream; activations have the embedding's."""
        return torch.float32 if self.ops.wide_stream else self.embedding.dtype

    @property
    def residual_width(self) -> int:
        """Numbers of the residual stream of a token."""
        return self.config.hidden_size

    @property
    def stream_width(self) -> int:
        """Of what the stage before this one sends of every token."""
        return self.config.hidden_size

    def entered(self, sent: Tensor) -> Tensor:
        """The residual stream, of what the stage before has sent: `passed_on` there, [T, stream_width] here."""
        return sent

    def passed_on(self, stream: Tensor) -> Tensor:
        """What the next stage is sent, of the residual stream behind the layers of this one."""
        return stream

    def logits(self, hidden: Tensor) -> Tensor:
        """float32 [n, vocab] of chosen hidden states."""
        return self.head(hidden).float()

    def cache_shape(self, block_size: int, dtype: torch.dtype) -> CacheShape:
        """The cache that the layers need; `dtype` is that of keys and values."""
        return CacheShape(tuple(layer.mixer.cache_kind(block_size, dtype) for layer in self.layers), block_size)

    @property
    def weight_bytes(self) -> int:
        """Bytes of the matrices that steps read (the embedding is a lookup and does not count)."""
        layers = sum(layer.mixer.weight_bytes + layer.feed_forward.weight_bytes for layer in self.layers)
        return layers + self.head.weight_bytes
