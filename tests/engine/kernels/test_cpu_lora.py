"""The native LoRA kernel against plain PyTorch, and the tiles both are given."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from penstock.engine.adapters.apply import ReferenceLora
from penstock.engine.adapters.layout import AdapterLayout, Site
from penstock.engine.adapters.peft import LoadedAdapter
from penstock.engine.adapters.tiles import make_tiles, most_tiles
from penstock.engine.kernels.cpu.build import isa_choices
from penstock.engine.kernels.cpu.lora import CpuLora
from penstock.engine.kernels.cpu.native import Handle

LAYOUT = AdapterLayout(
    (Site("a", ("q", "k", "v"), (70, 13, 600), 37), Site("b", ("o",), (53,), 96), Site("c", ("g", "u"), (8, 9), 5)), 2
)


def adapter(rank: int, dtype: torch.dtype, skip: int | None = None) -> LoadedAdapter:
    ranks = torch.full((3,), rank, dtype=torch.int32)
    if skip is not None:
        ranks[skip] = 0
    return LoadedAdapter("", rank, "", torch.randn(rank * LAYOUT.unit).to(dtype), ranks)


@pytest.mark.parametrize("isa", ["native", "generic"])
@pytest.mark.parametrize(
    ("dtype", "kept", "tolerance"),
    [
        (torch.float32, torch.float32, 1e-5),
        (torch.float32, torch.float16, 1e-5),
        (torch.float16, torch.float16, 4e-3),
        (torch.bfloat16, torch.bfloat16, 3e-2),
    ],
)
def test_native_equals_reference(isa: str, dtype: torch.dtype, kept: torch.dtype, tolerance: float) -> None:
    assert isa in isa_choices()
    torch.manual_seed(7)
    rng = np.random.default_rng(7)
    native, reference = CpuLora(Handle(2, isa), LAYOUT, 4, kept), ReferenceLora(4, torch.device("cpu"))
    for slot, rank in enumerate((1, 5, 16, 24)):
        loaded = adapter(rank, kept, skip=1 if slot == 2 else None)
        native.put(slot, loaded)
        reference.put(slot, loaded)
    for tokens in (1, 3, 70):
        slots = rng.integers(-1, 4, tokens).astype(np.int32)
        slots[0] = 3
        native.begin(slots)
        reference.begin(slots)
        for layer in range(2):
            for index, site in enumerate(LAYOUT.sites):
                x, y = torch.randn(tokens, site.inputs).to(dtype), torch.randn(tokens, site.outputs).to(dtype)
                got, want = y.clone(), y.clone()
                native.add(x, got, LAYOUT.place(layer, index))
                reference.add(x, want, LAYOUT.place(layer, index))
                error = float((got.float() - want.float()).norm() / want.float().norm())
                assert error < tolerance, (tokens, layer, index, error)
                assert torch.equal(got[slots < 0], y[slots < 0]), "a token without adapter was touched"
                if index == 1:
                    assert torch.equal(got[slots == 2], y[slots == 2]), "a site that the adapter leaves alone"


def test_tiles_cover_every_token_once_by_slot() -> None:
    rng = np.random.default_rng(0)
    for _ in range(200):
        tokens, count, block = int(rng.integers(1, 80)), int(rng.integers(1, 9)), int(rng.integers(1, 20))
        slots = rng.integers(-1, count, tokens).astype(np.int32)
        tiles = make_tiles(slots, block)
        seen = []
        for slot, start, length in zip(tiles.slots, tiles.starts, tiles.counts, strict=True):
            part = tiles.order[start : start + length]
            assert 0 < length <= block and (slots[part] == slot).all()
            seen.extend(part.tolist())
        assert sorted(seen) == np.flatnonzero(slots >= 0).tolist()
        assert len(tiles.slots) <= most_tiles(tokens, count, block)
