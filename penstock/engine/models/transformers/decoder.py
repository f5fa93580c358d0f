"""`TransformersDecoder`: a model of the `transformers` library as the engine runs it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from penstock.engine.backends.interface import ActivationOps, AttentionBatch, HeadLayout
from penstock.engine.kv.cache import KVCache
from penstock.engine.kv.kinds import PagedKV, StateTensors
from penstock.engine.models.decoder import Decoder
from penstock.engine.models.layers.linear import Linear
from penstock.engine.models.transformers.body import StageBody
from penstock.engine.models.transformers.cuts import Cuts
from penstock.engine.models.transformers.hidden import HiddenStates
from penstock.engine.models.transformers.linears import EngineLinear


@dataclass(frozen=True, slots=True)
class CachedLayer:
    """Stands for the mixer and the feed-forward of a layer: which cache it has, which linears. The library runs it."""

    ops: ActivationOps
    heads: HeadLayout
    linears: tuple[Linear, ...]

    @property
    def weight_bytes(self) -> int:
        return sum(linear.weight_bytes for linear in self.linears)

    def cache_kind(self, block_size: int, dtype: torch.dtype) -> PagedKV:
        return PagedKV(self.heads.kv_heads, self.heads.head_dim, block_size, dtype)

    def forward(self, x: Any, *_: Any) -> Tensor:
        raise NotImplementedError("a layer of a model that transformers runs is not run by itself")


@dataclass(frozen=True, slots=True)
class KeptStates:
    """Stands for the mixers of all layers that keep states, with one entry of the cache for all of them."""

    ops: ActivationOps
    states: StateTensors
    linears: tuple[Linear, ...]

    @property
    def weight_bytes(self) -> int:
        return sum(linear.weight_bytes for linear in self.linears)

    def cache_kind(self, block_size: int, dtype: torch.dtype) -> StateTensors:
        return self.states

    def forward(self, x: Any, *_: Any) -> Tensor:
        raise NotImplementedError("a layer of a model that transformers runs is not run by itself")


@dataclass(frozen=True, slots=True, kw_only=True)
class TransformersDecoder(Decoder):
    """See `Decoder`. `layers` has one entry for every attention call of a pass, and one for all states."""

    hidden: HiddenStates
    linears: list[EngineLinear]
    """All that the engine has replaced."""
    other_bytes: int = 0
    """Of weights that no linear of the engine's holds, such as stacked experts."""
    stage: StageBody | None = None
    """Where other ranks have other parts of the model: this one."""
    cuts: Cuts | None = None
    """Where shards have parts of its linears: which."""
    embeds: nn.Embedding | None = None
    """What embeds tokens, where the model reads them nowhere else; None: it does, or is divided."""
    final_width: int = 0
    """Of the hidden states that the head reads."""

    @property
    def launched_eagerly(self) -> bool:
        return True

    @property
    def stream_dtype(self) -> torch.dtype:
        return self.embedding.dtype

    @property
    def stream_width(self) -> int:
        return self.config.hidden_size if self.stage is None else self.stage.width

    def embed(self, token_ids: Tensor) -> Tensor:
        assert self.stage is not None, "a whole model that transformers runs begins with token ids"
        return self.stage.embed(token_ids)

    def forward(self, token_ids: Tensor, batch: AttentionBatch, kv: KVCache) -> Tensor:
        if self.stage is None:
            return self.hidden(token_ids, batch, kv)
        return self.run(self.embed(token_ids), batch, kv)

    def run(self, residual: Tensor, batch: AttentionBatch, kv: KVCache) -> Tensor:
        assert self.stage is not None, "a whole model that transformers runs begins with token ids"
        hidden = self.hidden(residual, batch, kv)
        if self.stage.junction.last:
            return hidden
        residual.copy_(hidden)  # what the next stage is sent
        return hidden.new_empty(len(hidden), self.final_width)

    @property
    def weight_bytes(self) -> int:
        layers = sum(layer.mixer.weight_bytes for layer in self.layers)
        return layers + self.head.weight_bytes + self.other_bytes


class ModelHead:
    """What a model does after its layers, whatever that is: the projection, scaling, caps. It is called with hidden
    states in place of its layers'."""

    def __init__(self, model: Any, base: str, linear: Linear | None, *, alone: bool = False) -> None:
        """`base`: the attribute that holds the layers; they are taken out. `alone`: in deterministic mode, every row
        by itself (see `TokenPass`)."""
        self._alone = alone
        self._hidden = _GivenHidden(getattr(model, base))
        setattr(model, base, self._hidden)
        self._model = model
        self.linear = linear
        self.weight_bytes = 0 if linear is None else linear.weight_bytes

    def __call__(self, x: Tensor) -> Tensor:
        return torch.cat([self._logits(x[row : row + 1]) for row in range(len(x))]) if self._alone else self._logits(x)

    def _logits(self, x: Tensor) -> Tensor:
        self._hidden.states = x.unsqueeze(0)
        ids = torch.zeros(1, x.shape[0], dtype=torch.int64, device=x.device)
        logits: Tensor = self._model(input_ids=ids, use_cache=False).logits
        return logits[0].float()


class _GivenHidden(nn.Module):
    """Gives hidden states back. Some heads call a part of the layers (the decoder of their model's decoder): that is
    this module too. Others read a number of them: it is theirs."""

    states: Tensor

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self._base = (base,)  # not a part of this module

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name.startswith("_"):
                raise
            found = getattr(self._base[0], name)
            return self if isinstance(found, nn.Module) else found

    def forward(self, *_: Any, **__: Any) -> Any:
        return _Output(self.states)


class _Output:
    """Stands for the output of a model's layers: hidden states, and nothing else of what it may have."""

    def __init__(self, last_hidden_state: Tensor) -> None:
        self.last_hidden_state = last_hidden_state

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)

    def __getitem__(self, index: int | slice) -> Any:
        return (self.last_hidden_state,)[index]
