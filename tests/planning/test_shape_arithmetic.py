"""Parameters and cache of a small decoder, counted by hand: every option adds what it should, where it should."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from penstock.planning.numbers import WEIGHT_FORMATS
from penstock.planning.shape import LayerParts, ModelShape, Moe
from penstock.planning.token_mixers import Mla

DENSE = ModelShape(
    name="small", family="llama", layers=4, hidden=24, ffn=40, heads=6, kv_heads=3, head_dim=8, vocab=101,
    max_positions=640, windows=(None,) * 4,
)  # fmt: skip
MOE = Moe(experts=5, top_k=2, ffn=14, layers=(False, True, True, True), bias=False)
ROUTED = replace(DENSE, moe=MOE)
MLA = Mla(kv_rank=20, rope_dim=4, nope_dim=10, value_dim=7)
LATENT = replace(DENSE, mla=MLA)
LAYER = LayerParts(2 * 24 * 48, 2 * 24 * 24, 0, 3 * 24 * 40, 0, 0, 2 * 24)
"""Queries and outputs of 6 x 8, keys and values of 3 x 8, gate, up and down of 40, two norms."""


def test_the_parts_of_a_layer() -> None:
    parts = LayerParts(1, 10, 100, 1000, 10_000, 100_000, 1_000_000)
    assert parts.matrices == 101_111 and parts.total == 1_111_111
    assert DENSE.layer(0) == DENSE.layer(3) == LAYER
    assert (DENSE.served, DENSE.tied_embeddings, MOE.shared_ffn, MOE.count) == (True, False, 0, 3)
    assert DENSE.with_stored(WEIGHT_FORMATS["int8"]).stored is WEIGHT_FORMATS["int8"] and DENSE.stored is None


@pytest.mark.parametrize(
    ("option", "more"),
    [
        ("sandwich_norms", 48), ("sinks", 6), ("qkv_bias", 48 + 2 * 24), ("output_bias", 24), ("qk_norm", 16),
        ("whole_qk_norm", 72), ("mlp_bias", 2 * 40 + 24), ("tied_embeddings", 0),
    ],
)  # fmt: skip
def test_what_an_option_adds_to_a_dense_layer(option: str, more: int) -> None:
    assert replace(DENSE, **{option: True}).layer(1) == replace(LAYER, small=48 + more)


def test_latent_attention() -> None:
    expanded, output = 20 * 6 * (10 + 7), 6 * 7 * 24
    plain = LayerParts(24 * 6 * 14 + expanded + output, 0, 24 * 24, 3 * 24 * 40, 0, 0, 48 + 20)
    assert LATENT.layer(0) == plain
    compressed = replace(DENSE, mla=replace(MLA, q_rank=9)).layer(0)
    queries = 9 * 6 * 14
    assert compressed == replace(
        plain, query_output=queries + expanded + output, latent=24 * 24 + 24 * 9, small=48 + 20 + 9
    )
    assert LATENT.kv_elements_per_layer == MLA.cached == 24 and LATENT.kv_elements == 4 * 24
    assert LATENT.kv_bytes_per_token() == 4 * 24 * 2


@pytest.mark.parametrize(
    ("option", "changed"),
    [
        ({}, {}),
        ({"bias": True}, {"small": 48 + 5 * (2 * 14 + 24)}),
        ({"router_bias": True}, {"small": 48 + 5}),
        ({"shared_ffn": 11}, {"feed_forward": 3 * 24 * 11, "small": 48 + 2 * 11 + 24}),
        ({"shared_gate": True}, {"router": 24 * 6}),
    ],
)
def test_a_layer_of_experts(option: dict[str, Any], changed: dict[str, int]) -> None:
    shape = replace(DENSE, moe=replace(MOE, **option), mlp_bias=True)
    routed = replace(LAYER, feed_forward=0, experts=5 * 3 * 24 * 14, router=24 * 5)
    assert shape.layer(1) == replace(routed, **changed)
    assert shape.layer(0) == replace(LAYER, small=48 + 2 * 40 + 24), "a dense one among them"


def test_layers_that_are_alike() -> None:
    dense, routed = ROUTED.layer(0), ROUTED.layer(1)
    assert ROUTED.layer_groups() == [(dense, 1), (routed, 3)]
    assert ROUTED.layer_groups(1) == ROUTED.layer_groups(1, 4) == [(routed, 3)]
    assert ROUTED.layer_groups(0, 1) == [(dense, 1)] and ROUTED.layer_groups(0, 2) == [(dense, 1), (routed, 1)]
    assert DENSE.layer_groups() == [(LAYER, 4)] and DENSE.layer_groups(2, 3) == [(LAYER, 1)]


def test_the_whole_model() -> None:
    layer = 2304 + 1152 + 2880 + 48
    assert (DENSE.embedding_parameters, DENSE.head_parameters) == (2424, 2424)
    assert DENSE.parameters == DENSE.active_parameters == 2 * 2424 + 4 * layer + 24
    assert replace(DENSE, tied_embeddings=True).parameters == 2424 + 4 * layer + 24
    assert DENSE.matrix_parameters == 4 * (layer - 48) and DENSE.expert_parameters == 0
    attention, experts = 2304 + 1152, 5 * 3 * 24 * 14
    assert ROUTED.parameters == 2 * 2424 + 24 + layer + 3 * (attention + experts + 24 * 5 + 48)
    assert ROUTED.matrix_parameters == layer - 48 + 3 * (attention + 24 * 5)
    assert ROUTED.expert_parameters == 3 * 3 * 24 * 14
    assert ROUTED.active_parameters == ROUTED.parameters - 3 * (3 * 3 * 24 * 14)


@pytest.mark.parametrize(("tokens", "visited"), [(0, 0.0), (1, 2.0), (2, 3.2), (3, 3.92)])
def test_experts_that_tokens_visit(tokens: int, visited: float) -> None:
    assert ROUTED.experts_visited(tokens) == pytest.approx(visited) and DENSE.experts_visited(tokens) == 0.0


def test_what_a_token_leaves_in_the_cache_and_the_next_one_reads() -> None:
    assert (DENSE.kv_elements_per_layer, DENSE.kv_elements) == (48, 192)
    assert DENSE.kv_bytes_per_token() == 384 and DENSE.kv_bytes_per_token(1.25) == 240
    mixed = replace(DENSE, windows=(None, 30, None, 50))
    assert [mixed.context_elements(context) for context in (10, 40, 100)] == [
        4 * 10 * 48, (40 + 30 + 40 + 40) * 48, (100 + 30 + 100 + 50) * 48,
    ]  # fmt: skip
    assert mixed.window is None and DENSE.window is None
    assert replace(DENSE, windows=(30, 50, 40, 30)).window == 50
