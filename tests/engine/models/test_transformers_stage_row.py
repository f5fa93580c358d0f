"""What goes from layer to layer beside one residual stream is found without weights, and goes from stage to stage."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from penstock.engine.models.transformers.stage_row import Left, find_stage_row

ROWS = 300


class _Layer(nn.Module):
    """Leaves its keys to the layers behind it, or reads those of the first. What the second leaves nobody reads."""

    def __init__(self, index: int, shares: bool) -> None:
        super().__init__()
        self.index, self.shares = index, shares
        self.keys = nn.Linear(8, 6)

    def forward(self, stream: Tensor, extra: Tensor | None, left: dict[int, Any]) -> Tensor:
        if self.shares and self.index == 0:
            keys = self.keys(stream.reshape(-1, *stream.shape[-2:])[:1]).unflatten(-1, (3, 2)).transpose(1, 2)
            left[0] = keys, keys * 2
        if self.shares and self.index > 0:
            stream = stream + left[0][1].sum()
            left[self.index] = left[0]
        return stream if extra is None else stream + extra


class _Model(nn.Module):
    """Three layers. `streams`: how many there are; `reads`: whether layers look tokens up by themselves."""

    def __init__(self, streams: int = 1, *, shares: bool = False, reads: bool = False) -> None:
        super().__init__()
        self.embed_tokens, self.positions = nn.Embedding(ROWS, 8), nn.Embedding(64, 8)
        self.further = nn.Embedding(ROWS, 8) if reads else None
        self.layers = nn.ModuleList(_Layer(index, shares) for index in range(3))
        self.streams = streams

    def forward(self, input_ids: Tensor, use_cache: bool) -> Any:
        at = torch.arange(input_ids.shape[1], device=self.positions.weight.device)
        stream = self.embed_tokens(input_ids) + self.positions(at)
        stream = stream if self.streams == 1 else torch.stack([stream] * self.streams)
        extra = None if self.further is None else self.further(torch.where(input_ids < ROWS, input_ids, 0))
        left: dict[int, Any] = {}
        for layer in self.layers:
            stream = layer(stream, extra, left=left)
        return SimpleNamespace(last_hidden_state=stream)


def row_of(**options: Any) -> Any:
    with torch.device("meta"):
        model = _Model(**options)
        return find_stage_row(model, "layers", ROWS)


def test_one_stream_is_nothing_more() -> None:
    assert row_of() is None


def test_streams_shared_tensors_and_tokens_are_found() -> None:
    found = row_of(streams=4, shares=True, reads=True)
    keys = Left("left", 0, 0, (1, 3, 2)), Left("left", 0, 1, (1, 3, 2))
    assert found.stream == (4, 1, 8) and found.tokens
    assert found.left == ((), keys, keys)
    assert found.width == 32 + 12 + 3
    assert row_of(shares=True).tokens is False
    assert row_of(reads=True).left == ((), (), ())


def test_the_model_itself_is_not_run() -> None:
    class Keeps(_Model):
        kept: Any = None

        def forward(self, input_ids: Tensor, use_cache: bool) -> Any:
            self.kept = self.embed_tokens(input_ids)
            return super().forward(input_ids, use_cache)

    with torch.device("meta"):
        model = Keeps(streams=4)
        assert find_stage_row(model, "layers", ROWS) is not None
    assert model.kept is None and not model.layers[0]._forward_pre_hooks


def test_a_model_that_looks_at_values_is_left_to_the_checks_of_a_stage() -> None:
    class Looks(_Model):
        def forward(self, input_ids: Tensor, use_cache: bool) -> Any:
            if self.embed_tokens(input_ids).sum() > 0:
                return super().forward(input_ids, use_cache)
            return None

    with torch.device("meta"):
        model = Looks(streams=4)
        assert find_stage_row(model, "layers", ROWS) is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_row_holds_all_of_it(dtype: torch.dtype) -> None:
    found = row_of(streams=4, shares=True, reads=True)
    ids = torch.tensor([0, 255, 256, 262_143, 5_000_000])
    entry = found.of_tokens(ids, dtype)
    assert entry.shape == (5, found.width) and torch.equal(found.ids(entry), ids)
    stream = torch.randn(4, 1, 5, 8).to(dtype)
    keys = torch.randn(2, 1, 3, 5, 2).to(dtype)
    row = found.pack(2, stream, {"left": {0: (keys[0], keys[1])}}, entry)
    assert row.shape == entry.shape and torch.equal(found.ids(row), ids)
    left: dict[int, Any] = {}
    assert torch.equal(found.unpack(2, row, {"left": left}), stream)
    assert torch.equal(torch.stack(left[0]), keys)
    # Before the first layer nothing has been left, and a row is as wide.
    assert found.pack(0, stream, {"left": {}}, entry).shape == entry.shape
