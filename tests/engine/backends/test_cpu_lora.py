"""The native LoRA kernel against plain PyTorch, and the tiles both are given."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from penstock.engine.adapters.layout import AdapterLayout, Site
from penstock.engine.adapters.model_sites import layout_of
from penstock.engine.adapters.peft import LoadedAdapter, read_adapter
from penstock.engine.adapters.rows import EndRows, ReplacedRows, RowBank
from penstock.engine.adapters.tiles import make_tiles, most_tiles
from penstock.engine.backends.cpu.build import isa_choices
from penstock.engine.backends.cpu.lora import CpuLora
from penstock.engine.backends.cpu.native import Handle
from penstock.engine.backends.reference.lora import ReferenceLora
from penstock.engine.models.families import read_config
from tests.engine.adapters.files import write_adapter
from tests.engine.tiny import write_checkpoint

LAYOUT = AdapterLayout(
    (Site("a", ("q", "k", "v"), (70, 13, 600), 37), Site("b", ("o",), (53,), 96), Site("c", ("g", "u"), (8, 9), 5)), 2
)


def adapter(rank: int, dtype: torch.dtype, skip: int | None = None) -> LoadedAdapter:
    ranks = torch.full((3,), rank, dtype=torch.int32)
    if skip is not None:
        ranks[skip] = 0
    return LoadedAdapter("", rank, "", torch.randn(rank * LAYOUT.unit).to(dtype), ranks)


@pytest.mark.parametrize("isa", ["native", pytest.param("generic", marks=pytest.mark.slow)])
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
    native, reference = CpuLora(Handle(2, isa), LAYOUT, 4, kept), ReferenceLora(LAYOUT, 4, torch.device("cpu"))
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


def test_both_orders_of_b_hold_the_same_adapter(tmp_path: Path) -> None:
    """CUDA wants B by output and ranks in eights; the same file read either way adds the same."""
    base = write_checkpoint("llama-gqa", tmp_path / "base")
    path = write_adapter(tmp_path / "adapter", base, rank=5, targets=("q_proj", "v_proj", "o_proj", "up_proj"))
    config = read_config(json.loads((base / "config.json").read_text()))
    results = []
    for by_output in (False, True):
        layout = layout_of(config, by_output=by_output)
        loaded = read_adapter("a", path, layout, max_rank=8, dtype=torch.float32, pin=False)
        assert loaded.rank == 5 and set(loaded.ranks.tolist()) == {0, 8 if by_output else 5}
        lora = ReferenceLora(layout, 1, torch.device("cpu"))
        lora.put(0, loaded)
        lora.begin(np.zeros(3, np.int32))
        torch.manual_seed(3)
        for layer in range(layout.layers):
            for index, site in enumerate(layout.sites):
                y = torch.zeros(3, site.outputs)
                lora.add(torch.randn(3, site.inputs), y, layout.place(layer, index))
                results.append(y)
    half = len(results) // 2
    assert any(bool(y.any()) for y in results)
    for one, other in zip(results[:half], results[half:], strict=True):
        torch.testing.assert_close(one, other)


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


@pytest.mark.parametrize("kind", ["native", "reference"])
def test_rows_of_the_head_are_replaced_behind_a_step(kind: str) -> None:
    slots = np.array([1, -1, 1], np.int32)
    native = kind == "native"
    lora = CpuLora(Handle(1, "native"), LAYOUT, 2) if native else ReferenceLora(LAYOUT, 2, torch.device("cpu"))
    lora.banks.rows = RowBank(2, 10, 6, torch.float32, torch.device("cpu"))
    row = ReplacedRows(torch.tensor([4]), torch.ones(1, 6))
    lora.put(1, replace(adapter(2, torch.float32), rows=EndRows(head=row)))
    lora.begin(np.array([1, 1, 1, -1, 1], np.int32))
    lora.begin_head(slots)
    x, y = torch.randn(3, 6), torch.zeros(3, 10)
    lora.banks.rows.replace_logits(x, y)
    torch.testing.assert_close(y[:, 4], x.sum(1) * torch.tensor([1.0, 0.0, 1.0]))
