"""Which rank holds what: everything once, evenly, or refused with what would do."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from penstock.engine.loading.checkpoint import GGUFCheckpoint, open_checkpoint
from penstock.engine.loading.dequantize import dequantize
from penstock.engine.loading.groups import IntGroups
from penstock.engine.models.families import read_config
from penstock.engine.models.model_config import ModelConfig
from penstock.engine.parallel.cuts import HEAD, head_rows
from penstock.engine.parallel.layer_cuts import Cut
from penstock.engine.parallel.layout import Place, check_layout, head_span, kv_head_span, layer_span, local_config
from penstock.engine.parallel.shards import ShardedGGUF, _cut_groups, shard
from penstock.errors import ConfigError
from penstock.planning import deployment
from penstock.planning.model_shape import model_shape
from tests.engine.tiny import write_checkpoint


def model(heads: int = 8, kv_heads: int = 4, layers: int = 6, ffn: int = 96, vocab: int = 100) -> ModelConfig:
    return read_config(
        {
            "model_type": "llama",
            "hidden_size": heads * 8,
            "intermediate_size": ffn,
            "num_hidden_layers": layers,
            "num_attention_heads": heads,
            "num_key_value_heads": kv_heads,
            "vocab_size": vocab,
        }
    )


@given(layers=st.integers(1, 100), pipeline=st.integers(1, 16))
def test_stages_cover_the_layers_once_in_order_and_evenly(layers: int, pipeline: int) -> None:
    if pipeline > layers:
        return
    spans = [layer_span(layers, Place(stage, 1, pipeline)) for stage in range(pipeline)]
    assert [layer for span in spans for layer in range(*span)] == list(range(layers))
    sizes = [end - begin for begin, end in spans]
    assert max(sizes) - min(sizes) <= 1 and sizes[0] == min(sizes)


@given(starts=st.lists(st.booleans(), min_size=1, max_size=60), pipeline=st.integers(1, 12))
def test_stages_begin_where_they_may_near_an_even_division(starts: list[bool], pipeline: int) -> None:
    starts = [True, *starts]
    if pipeline > sum(starts):
        return
    spans = [layer_span(len(starts), Place(stage, 1, pipeline), starts) for stage in range(pipeline)]
    assert [layer for span in spans for layer in range(*span)] == list(range(len(starts)))
    assert all(begin < end and starts[begin] for begin, end in spans)
    even = [layer_span(len(starts), Place(stage, 1, pipeline)) for stage in range(pipeline)]
    if all(starts[begin] for begin, _ in even):
        assert spans == even


@given(groups=st.integers(1, 4), kv_heads=st.integers(1, 8), tensor=st.integers(1, 16))
def test_shards_have_all_heads_and_the_kv_heads_these_attend_to(groups: int, kv_heads: int, tensor: int) -> None:
    heads = groups * kv_heads
    whole = model(heads, kv_heads, ffn=tensor * 16)
    try:
        check_layout(whole, tensor, 1)
    except ConfigError:
        assert heads % tensor or (kv_heads % tensor and tensor % kv_heads)
        return
    seen = []
    for rank in range(tensor):
        place = Place(rank, tensor, 1)
        queries, keys = range(*head_span(whole, place)), range(*kv_head_span(whole, place))
        assert {head // groups for head in queries} == set(keys)
        local = local_config(whole, place)
        # Within the shard the grouping is again even: the kernels know no other.
        assert local.num_heads == len(queries) and local.num_kv_heads == len(keys)
        assert [keys[i // (len(queries) // len(keys))] for i in range(len(queries))] == [h // groups for h in queries]
        seen += queries
    assert seen == list(range(heads))


def test_what_cannot_be_split_is_refused_with_what_can() -> None:
    with pytest.raises(ConfigError, match=r"tensor_parallel: 2 cannot split 9 heads over 3 KV heads.*allows 1, 3"):
        check_layout(model(9, 3, ffn=1536), 2, 1)
    with pytest.raises(ConfigError, match="8 heads over 4 KV heads and a feed-forward width of 98 evenly"):
        check_layout(model(ffn=98), 4, 1)
    with pytest.raises(ConfigError, match="pipeline_parallel: 7 is more than the 6 layers"):
        check_layout(model(), 1, 7)


def test_the_width_that_cannot_be_split_is_named(tmp_path: Path) -> None:
    """Where all layers have experts, no layer has the dense width of the configuration."""
    sizes = {"num_attention_heads": 6, "num_key_value_heads": 3, "intermediate_size": 96, "moe_intermediate_size": 32}
    folder = write_checkpoint("qwen3-moe", tmp_path / "model", hidden_size=96, **sizes)
    found = "cannot split 6 heads over 3 KV heads and an expert width of 32 evenly"
    with pytest.raises(ConfigError, match=found):
        check_layout(read_config(open_checkpoint(folder).config), 3, 1)
    with pytest.raises(ConfigError, match=found):
        deployment._check_layout(model_shape(folder), 3, 1)


def test_parts_of_a_checkpoint_put_together_are_the_checkpoint(tmp_path: Path) -> None:
    weights = open_checkpoint(write_checkpoint("llama-mha-bias", tmp_path / "model"))
    whole = read_config(weights.config)
    parts = [shard(weights, whole, Place(rank, 2, 1)) for rank in range(2)]

    def both(name: str) -> list[torch.Tensor]:
        return [part.tensor(name) for part in parts]

    at = "model.layers.1."
    for name in (f"{at}self_attn.q_proj.weight", f"{at}self_attn.k_proj.bias", f"{at}mlp.up_proj.weight"):
        assert torch.equal(torch.cat(both(name)), weights.tensor(name))
    for name in (f"{at}self_attn.o_proj.weight", f"{at}mlp.down_proj.weight"):
        assert torch.equal(torch.cat(both(name), dim=1), weights.tensor(name))
    for name in (f"{at}self_attn.o_proj.bias", f"{at}mlp.down_proj.bias"):
        assert torch.equal(sum(both(name)), weights.tensor(name)), "a bias must be added once"
    for part in both(f"{at}input_layernorm.weight"):
        assert torch.equal(part, weights.tensor(f"{at}input_layernorm.weight"))
    head = torch.cat(both(HEAD))
    assert len(head) == 2 * head_rows(whole, Place(0, 2, 1)) == 200
    assert torch.equal(head[:199], weights.tensor("lm_head.weight")) and not head[199:].any()


def test_a_stage_sees_its_layers_from_zero_on(tmp_path: Path) -> None:
    weights = open_checkpoint(write_checkpoint("llama-gqa", tmp_path / "model"))
    whole = read_config(weights.config)
    last = shard(weights, whole, Place(1, 1, 2))
    layers = {name.split(".")[2] for name in last.names() if ".layers." in name}
    assert layers == {"0", "1"}
    name = "mlp.up_proj.weight"
    assert torch.equal(last.tensor(f"model.layers.0.{name}"), weights.tensor(f"model.layers.1.{name}"))


def test_stored_blocks_are_cut_between_blocks_and_decoded_where_that_is_inside_one(default_model: Path) -> None:
    weights = GGUFCheckpoint(default_model)
    whole = read_config(weights.config)
    for rank in range(3):
        place = Place(rank, 3, 1)
        part = ShardedGGUF(weights, whole, place)
        for kind in ("self_attn.o_proj", "self_attn.v_proj", "mlp.down_proj"):
            name = f"model.layers.0.{kind}.weight"
            raw = part.raw(name)
            assert raw.type == weights.raw(name).type
            assert torch.equal(dequantize(torch.from_numpy(raw.data), raw.type, raw.shape), part.tensor(name))
    name = "model.layers.0.mlp.down_proj.weight"
    inside = ShardedGGUF(weights, whole, Place(1, 64, 1))  # inputs 24 to 48, and blocks of 32
    wide = weights.tensor(name)[:, 24:48]
    assert torch.equal(inside.tensor(name), wide) and inside.groups(name) is None
    raw = inside.raw(name)
    assert torch.equal(dequantize(torch.from_numpy(raw.data), raw.type, raw.shape), wide)


@pytest.mark.parametrize("bits", [4, 8])
def test_integers_in_groups_are_cut_with_their_scales(tmp_path: Path, bits: int) -> None:
    rng = np.random.default_rng(bits)
    quants = torch.from_numpy(rng.integers(0, 15, (64, 96)).astype(np.uint8 if bits == 4 else np.int8))
    scale, low = (torch.from_numpy(rng.random((64, 1), np.float32)) for _ in range(2))
    whole = IntGroups(quants, scale, low, bits)
    dense = whole.dense()
    halves = [_cut_groups(whole, Cut(inputs=span)) for span in ((0, 32), (32, 96))]
    assert torch.equal(torch.cat([half.dense() for half in halves if isinstance(half, IntGroups)], dim=1), dense)
    rows = _cut_groups(whole, Cut(outputs=((8, 16), (40, 64)), padding=2))
    assert isinstance(rows, IntGroups)
    assert torch.equal(rows.dense()[:-2], torch.cat((dense[8:16], dense[40:64]))) and not rows.dense()[-2:].any()
    assert _cut_groups(whole, Cut(inputs=(48, 96))) == "a cut at inputs 48 and 96 leaves groups of 48"
    scattered = dataclasses.replace(whole, order=torch.arange(96).flip(0))
    assert "act-order" in str(_cut_groups(scattered, Cut(inputs=(0, 32))))
    all_of_them = _cut_groups(scattered, Cut(inputs=(0, 96)))
    assert isinstance(all_of_them, IntGroups) and torch.equal(all_of_them.dense(), scattered.dense()), "as stored"
