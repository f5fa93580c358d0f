"""Qwen4: hashes of n-grams, tables as checkpoints store them, attention to chosen blocks, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn import functional as F
from transformers.models.qwen4_exp import modeling_qwen4_exp as library

from penstock.engine.backends.interface import AttentionBatch, BlockIndex, BlockIndexLayout, Entries, HeadLayout
from penstock.engine.backends.reference.ops import ReferenceOps
from penstock.engine.models.families import read_config
from penstock.engine.models.model_config import NgramConfig
from penstock.engine.models.ngram_hash import head_sizes, multipliers
from penstock.errors import CheckpointError, ConfigError
from tests.engine.harness import generate, greedy, make_engine
from tests.engine.parallel.threads import threaded_engine
from tests.engine.tiny import Reference, write_checkpoint

TABLE = "model.layers.0.ple.ple_embedding.ngram_embedding"
PROMPT = [(j * 31 + 7) % 199 for j in range(60)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint("qwen4-exp", tmp_path_factory.mktemp("qwen4"))


def _config(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return found


def _changed(folder: Path, target: Path, tensors: dict[str, torch.Tensor]) -> Path:
    target.mkdir()
    (target / "config.json").write_text((folder / "config.json").read_text())
    save_file(tensors, target / "model.safetensors")
    return target


@pytest.mark.parametrize("index", [0, 2])
def test_ngrams_are_hashed_as_the_library_does(index: int) -> None:
    config = NgramConfig(
        layers=(0,), size=4, heads=3, width=18, rows=1000, multiple=8, seed=99, end=0, taps=4, parts=1
    )  # fmt: skip
    expected = library._build_layer_multipliers(5000, 4, index, 99)
    assert multipliers(config, 5000, index) == expected.tolist()
    first = index * config.all_heads
    found = [library._find_nth_prime_after(999, first + head + 1) for head in range(config.all_heads)]
    assert head_sizes(config, index) == found


def test_a_table_is_read_whole_or_in_parts(folder: Path, tmp_path: Path) -> None:
    wanted = generate(make_engine(folder), greedy("a", PROMPT, 6))
    tensors = load_file(folder / "model.safetensors")
    parts = {name: tensor for name, tensor in tensors.items() if name.startswith(f"{TABLE}.shard_")}
    assert len(parts) == 3
    others = {name: tensor for name, tensor in tensors.items() if name not in parts}
    whole = torch.cat([parts[f"{TABLE}.shard_{part}.weight"] for part in range(3)])
    stored = {f"{TABLE}.weight": whole}
    computed = ("layer_multipliers", "ngram_heads_vocab_sizes", "ngram_heads_offsets")
    fewer = {name: tensor for name, tensor in others.items() if not name.endswith(computed)}
    assert generate(make_engine(_changed(folder, tmp_path / "whole", fewer | stored)), greedy("a", PROMPT, 6)) == wanted
    parts.pop(f"{TABLE}.shard_2.weight")
    with pytest.raises(CheckpointError, match=r"no tensor .*shard_2"):
        make_engine(_changed(folder, tmp_path / "incomplete", others | parts))
    with pytest.raises(CheckpointError, match="the configuration says"):
        make_engine(_changed(folder, tmp_path / "short", others | {f"{TABLE}.weight": whole[:-1].clone()}))


@pytest.mark.parametrize("kind", [torch.float32, torch.int8])
def test_a_token_sees_the_best_blocks_and_the_tokens_behind_them(kind: torch.dtype) -> None:
    ops, layout = ReferenceOps(), BlockIndexLayout(heads=4, dim=8, rate=3, most=2, eps=1e-6)
    heads, tokens, size = HeadLayout(4, 2, 16, 0.25), 23, 4
    torch.manual_seed(1)
    batch = AttentionBatch.of_one(tokens, size, torch.device("cpu"))
    made = torch.randn(tokens, 8)
    slots, blocks = torch.zeros(8 * size, 8), Entries(torch.zeros(8, 2, 8), None, size)
    cos_sin = torch.cat((torch.ones(tokens, 2), torch.zeros(tokens, 2)), 1)  # nothing is rotated
    ops.store_block_keys(made, torch.ones(8), layout, cos_sin, batch, slots, blocks)
    shape = (8, 2, size, 16)
    k = torch.randint(-9, 9, shape).to(kind)
    v = torch.randint(-9, 9, shape).to(kind)
    scales = None if kind == torch.float32 else (torch.full(shape[:3], 0.5).half(), torch.full(shape[:3], 0.25).half())
    q, asked = torch.randn(tokens, 4, 16), torch.randn(tokens, 32)
    index = BlockIndex(asked, torch.ones(8), layout, blocks)
    got = ops.attend_blocks(q, heads, index, cos_sin, batch, k, v, scales)

    keys, values = (
        part.float() * (1 if scales is None else scales[i][..., None].float()) for i, part in enumerate((k, v))
    )
    keys, values = (part[1:].transpose(1, 2).flatten(0, 1)[:tokens] for part in (keys, values))
    pooled = F.rms_norm(made[:21].view(7, 3, 8).mean(1), (8,), eps=1e-6)
    scores = F.relu(F.rms_norm(asked.view(tokens, 4, 8), (8,), eps=1e-6) @ pooled.t()).sum(1)
    for at in range(tokens):
        complete = (at + 1) // 3
        best = scores[at, :complete].topk(min(2, complete)).indices.tolist()
        seen = [*(3 * block + place for block in best for place in range(3)), *range(3 * complete, at + 1)]
        each = [
            ((q[at, head] @ keys[seen, head // 2].t()) * 0.25).softmax(-1) @ values[seen, head // 2]
            for head in range(4)
        ]
        torch.testing.assert_close(got[at], torch.cat(each), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"ple_layer_ids": [3]}, "must number linear_attention layers"),
        ({"ple_layer_ids": [True]}, "list of numbers"),
        ({"eos_token_id": None}, "eos_token_id must be set"),
        ({"ple_embed_dim": 50}, "cannot share evenly"),
        ({"indexer_budget": 25}, "not a multiple of indexer_compress_ratio"),
        ({"indexer_head_dim": 4}, "indexer_head_dim is 4"),
        ({"indexer_kv_heads": 2}, "indexer_kv_heads"),
        ({"output_gate_type": "relu"}, "output_gate_type"),
        ({"hc_count": 1}, "several residual streams"),
    ],
    ids=str,
)
def test_configurations_that_cannot_be_run(folder: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        read_config(_config(folder) | changes)


def test_later_stages_are_told_of_tokens(tmp_path: Path) -> None:
    """Also where a stage in between looks nothing up, and passes on what others will."""
    folder = write_checkpoint("qwen4-exp", tmp_path, ple_layer_ids=[1, 4])
    requests = [greedy(name, ids, 6) for name, ids in (("a", PROMPT), ("b", PROMPT[5:]), ("c", [3]))]
    wanted = generate(make_engine(folder), *requests)
    assert Reference(folder).agrees(PROMPT, wanted["a"])
    for ranks in ((1, 2), (1, 5), (2, 2)):
        with threaded_engine(folder, *ranks, token_budget=16) as engine:
            assert generate(engine, *requests) == wanted, ranks


def test_what_it_does_not_have_is_refused(folder: Path, tmp_path: Path) -> None:
    drafting = {**load_file(folder / "model.safetensors"), "mtp.fc.weight": torch.zeros(64, 128)}
    drafts = _changed(folder, tmp_path / "mtp", drafting)
    with pytest.raises(ConfigError, match="speculation: mtp is not available"):
        make_engine(drafts, speculation="mtp")
    assert make_engine(drafts, speculation="auto").config.speculation == "ngram"
