"""Models with attention over latents (MLA) in everything an engine can do: caches in few bits, the tiers behind them,
several ranks, experts spread over them, handover, adapters, quantized weights and speculation."""

from __future__ import annotations

import dataclasses
import json
import random
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.engine.adapters.spec import AdapterSpec
from penstock.engine.kv.cache import CacheShape
from penstock.engine.kv.kinds import PagedLatent
from penstock.engine.models.families import read_config
from penstock.engine.request import Request
from penstock.errors import CheckpointError
from tests.engine.adapters.files import merge, write_adapter
from tests.engine.harness import assert_idle, carry, collect, drain, generate, greedy, make_engine
from tests.engine.parallel.threads import threaded_engine
from tests.engine.test_determinism import WATCHED, bits, others_in_batch, run
from tests.engine.tiny import Reference, write_checkpoint

slow = pytest.mark.slow
TIE = 1e-3


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("latent")
    return {name: write_checkpoint(name, folder / name) for name in ("deepseek-v3", "deepseek-v2-lite")}


def requests(count: int = 5, longest: int = 90) -> list[Request]:
    chance = random.Random(11)
    prompts = [[chance.randrange(199) for _ in range(chance.randrange(20, longest))] for _ in range(count)]
    return [greedy(f"r{i}", prompt, 16) for i, prompt in enumerate(prompts)]


def test_the_cache_has_one_vector_per_token(folders: dict[str, Path]) -> None:
    engine = make_engine(folders["deepseek-v3"], num_blocks=10)
    kind = PagedLatent(32 + 8, 16, torch.float32)
    assert engine.runner.kv.shape == CacheShape((kind,) * 3, 16)
    assert kind.block_bytes == 16 * 40 * 4 and str(kind) == "latents of 40 in float32"
    assert [tuple(tensor.shape) for tensor in engine.runner.kv.tensors] == [(3, 1, 11, 16, 40)]
    # DeepSeek V3: 576 numbers, where keys and values of 128 heads would be 40,960.
    assert PagedLatent(576, 1, torch.bfloat16).block_bytes == 1152
    assert PagedLatent(576, 16, torch.int8).block_bytes == 16 * 578


@pytest.mark.parametrize(("family", "whole", "more"), [("deepseek-v3", 13, 0), ("deepseek-v32", 60, 4)], ids=str)
def test_blocks_that_another_sequence_fills_in_the_same_step(
    tmp_path: Path, family: str, whole: int, more: int
) -> None:
    """A sequence of one new token goes the way of decodes, one that is shorter than what an indexer chooses attends to
    everything: both read what the sequence before them is about to store."""
    folder = write_checkpoint(family, tmp_path, spread=0.3)
    prompt = [(37 * at + 11) % 199 for at in range(whole)]
    first, second = greedy("first", prompt, 8), greedy("second", prompt[:13] + [5] * more, 8)
    alone = generate(make_engine(folder, block_size=4, num_blocks=60, prefix_cache=False), second)
    engine = make_engine(folder, block_size=4, num_blocks=60)
    assert generate(engine, first, second)["second"] == alone["second"]
    assert engine.load_snapshot().prefix_hit_tokens == 12


@pytest.mark.parametrize("settings", [{"host_memory": 1 << 20, "num_blocks": 12}, {"speculation": "ngram"}], ids=str)
def test_tiers_and_speculation_change_nothing(folders: dict[str, Path], settings: dict[str, Any]) -> None:
    expected = generate(make_engine(folders["deepseek-v3"]), *requests())
    engine = make_engine(folders["deepseek-v3"], token_budget=48, **settings)
    for _ in range(2):
        assert generate(engine, *requests()) == expected
    assert_idle(engine)


@slow
@pytest.mark.parametrize("kv_dtype", ["int8", "fp8"])
def test_few_bits_are_the_same_in_any_batch(folders: dict[str, Path], kv_dtype: str) -> None:
    alone = {}
    for request in requests():
        alone |= generate(make_engine(folders["deepseek-v3"], kv_dtype=kv_dtype, token_budget=48), request)
    crowded = make_engine(folders["deepseek-v3"], kv_dtype=kv_dtype, num_blocks=16, token_budget=48)
    assert generate(crowded, *requests()) == alone
    assert_idle(crowded)


@slow
@pytest.mark.parametrize(("tensor", "pipeline"), [(2, 1), (4, 1), (1, 3), (2, 2)])
@pytest.mark.parametrize("family", ["deepseek-v3", "deepseek-v2-lite"])
def test_ranks_give_the_output_of_one_device(folders: dict[str, Path], family: str, tensor: int, pipeline: int) -> None:
    expected = generate(make_engine(folders[family], token_budget=32), *requests())
    with threaded_engine(folders[family], tensor, pipeline, token_budget=32) as engine:
        assert generate(engine, *requests()) == expected


@slow
@pytest.mark.parametrize("attention", ["tensor", "data"])
def test_experts_spread_over_ranks(folders: dict[str, Path], attention: str) -> None:
    expected = generate(make_engine(folders["deepseek-v3"], token_budget=32), *requests())
    settings: dict[str, Any] = {"expert_parallel": True, "attention_parallel": attention}
    with threaded_engine(folders["deepseek-v3"], 2, 1, token_budget=32, **settings) as engine:
        assert generate(engine, *requests()) == expected


@slow
@pytest.mark.parametrize(
    ("family", "targets"),
    [
        ("deepseek-v3", ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "o_proj")),
        ("deepseek-v2-lite", ("q_proj", "kv_a_proj_with_mqa")),
        ("deepseek-v2-lite", ("kv_b_proj",)),
        ("deepseek-v3", ("q_b_proj", "kv_b_proj", "gate_proj")),
    ],
)
def test_an_adapter_equals_merging_it(
    folders: dict[str, Path], tmp_path: Path, family: str, targets: tuple[str, ...]
) -> None:
    adapter = write_adapter(tmp_path / "adapter", folders[family], targets=targets)
    merged = Reference(merge(folders[family], adapter, tmp_path / "merged"))
    engine = make_engine(folders[family], adapters=(AdapterSpec("tuned", str(adapter)),), token_budget=40)
    asked = requests(3)
    got = generate(engine, *(dataclasses.replace(one, adapter="tuned") for one in asked))
    for one in asked:
        assert merged.agrees(list(one.prompt), got[one.request_id], TIE), one.request_id


@slow
@pytest.mark.parametrize("weights", ["int8", "int4"])
def test_quantized_weights_run(folders: dict[str, Path], weights: str) -> None:
    engine = make_engine(folders["deepseek-v3"], weights=weights)
    assert all(len(tokens) == 16 for tokens in generate(engine, *requests()).values())


CONFIG: dict[str, Any] = {
    "model_type": "deepseek_v3", "vocab_size": 199, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 4, "kv_lora_rank": 32, "q_lora_rank": 24, "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8, "v_head_dim": 20, "n_routed_experts": 8, "num_experts_per_tok": 3, "n_group": 4,
    "topk_group": 2, "moe_intermediate_size": 24, "n_shared_experts": 2, "first_k_dense_replace": 1,
}  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_key_value_heads": 2}, "all heads share one latent"),
        ({"qk_rope_head_dim": 7}, "rotated in pairs"),
        ({"moe_layer_freq": 0}, "moe_layer_freq"),
        ({"scoring_func": "softmax"}, "scoring_func"),
        ({"topk_group": 1, "num_experts_per_tok": 3}, "cannot visit 3 experts"),
        ({"model_type": "deepseek_v2", "topk_method": "noaux_tc"}, "topk_method"),
    ],
)
def test_what_cannot_be_run_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        read_config({**CONFIG, **changes})


def test_experts_in_every_second_layer(tmp_path: Path) -> None:
    """`moe_layer_freq`, which transformers does not know: dense layers where DeepSeek's own code has them."""
    folder = write_checkpoint("deepseek-v3", tmp_path, num_hidden_layers=4, first_k_dense_replace=1)
    reference = Reference(folder)
    layers = reference.model.model.layers
    for index in (1, 3):
        layers[index].mlp = deepcopy(layers[0].mlp)
        for parameter in layers[index].mlp.parameters():
            parameter.data = parameter.data.flip(0, 1)
    reference.model.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "moe_layer_freq": 2}))
    prompt = [29 * i % 199 for i in range(50)]
    assert reference.agrees(prompt, generate(make_engine(folder), greedy("a", prompt, 10))["a"])
    model = read_config({**config, "moe_layer_freq": 2})
    assert model.moe is not None and model.moe.layers == (False, False, True, False)


def test_keys_of_published_files() -> None:
    """Kimi K2's are V3's; layers for multi-token prediction are not of the decoder; a model may be all dense."""
    model = read_config({**CONFIG, "model_type": "kimi_k2", "num_nextn_predict_layers": 1, "ep_size": 1})
    assert model.moe is not None and model.moe.scoring == "sigmoid" and model.num_layers == 3
    assert read_config({**CONFIG, "first_k_dense_replace": 3}).moe is None
    scaling = {"type": "yarn", "factor": 40, "original_max_position_embeddings": 4096, "mscale": 1.0,
               "mscale_all_dim": 1.0, "beta_fast": 32, "beta_slow": 1}  # fmt: skip
    scaled = read_config({**CONFIG, "rope_scaling": scaling, "max_position_embeddings": 163840})
    assert scaled.attention_scale == pytest.approx(24**-0.5 * 1.3688879454113936**2)


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("deepseek-v3", {}),
        pytest.param("deepseek-v2-lite", {}, marks=slow),
        pytest.param("deepseek-v3", {"kv_dtype": "int8"}, marks=slow),
        pytest.param("deepseek-v3", {"weights": "int8"}, marks=slow),
    ],
)
def test_the_same_bits_in_any_batch_in_deterministic_mode(
    folders: dict[str, Path], family: str, settings: dict[str, Any]
) -> None:
    fixed = {"deterministic": True, "num_blocks": 400, **settings}
    alone = make_engine(folders[family], **fixed)
    expected = {request.request_id: bits(run(alone, [request]), request.request_id) for request in WATCHED}
    again = {request.request_id: bits(run(alone, [request]), request.request_id) for request in WATCHED}
    assert again == expected, "with the prompt found in the cache"
    for budget, others in ((64, 5), (7, 2)):
        engine = make_engine(folders[family], **fixed, token_budget=budget)
        deltas = run(engine, others_in_batch(others) + WATCHED)
        for name, wanted in expected.items():
            assert bits(deltas, name) == wanted, (name, budget, others)


def test_deterministic_mode_is_close_to_the_usual_engine(folders: dict[str, Path]) -> None:
    request = requests(1)[0]
    usual = generate(make_engine(folders["deepseek-v3"]), request)
    assert generate(make_engine(folders["deepseek-v3"], deterministic=True), request) == usual


def test_a_prefill_engine_hands_latents_over(folders: dict[str, Path]) -> None:
    giver, taker = (make_engine(folders["deepseek-v3"], role=role) for role in ("prefill", "decode"))
    request = greedy("r", [7 * i % 199 for i in range(140)], 12)
    expected = generate(giver, request)
    assert taker.exchange is not None
    taker.exchange.release(carry(giver, taker, taker.exchange.names(request)))
    taker.submit(request)
    deltas = drain(taker)
    assert collect(deltas) == expected and deltas[0].cached_tokens == 128


@slow
@pytest.mark.parametrize(
    "settings", [{}, {"kv_dtype": "int8"}, {"deterministic": True}, {"tensor_parallel": 2}], ids=str
)
def test_adapters_of_what_makes_keys_and_values(
    folders: dict[str, Path], tmp_path: Path, settings: dict[str, Any]
) -> None:
    """In a batch with other adapters and none each sequence has the tokens that it has alone."""
    base = folders["deepseek-v3"]
    targets = {"a": ("kv_b_proj",), "b": ("kv_b_proj", "o_proj"), "c": ("q_b_proj",)}
    specs = tuple(
        AdapterSpec(name, str(write_adapter(tmp_path / name, base, targets=parts, rank=3 + i, seed=i)))
        for i, (name, parts) in enumerate(targets.items())
    )
    asked = [
        dataclasses.replace(one, adapter=name, request_id=f"{one.request_id}-{name}")
        for one in requests(2)
        for name in ("", *targets)
    ]
    ranks = settings.pop("tensor_parallel", 1)
    alone = {}
    for one in asked:
        alone |= generate(make_engine(base, adapters=specs, **settings), one)
    assert len({tuple(tokens) for tokens in alone.values()}) == len(alone)
    if ranks > 1:
        with threaded_engine(base, ranks, 1, adapters=specs, token_budget=40) as engine:
            assert generate(engine, *asked) == alone
    else:
        assert generate(make_engine(base, adapters=specs, token_budget=40, **settings), *asked) == alone
