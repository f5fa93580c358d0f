"""Kimi Linear: configurations as they are published, fast decays, adapters under the names of modules in memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from penstock.engine.adapters.spec import AdapterSpec
from penstock.engine.backends.reference import delta
from penstock.engine.models.families import read_config
from penstock.engine.models.families.kimi_linear import own_name
from penstock.engine.request import Request, SamplingParams
from penstock.errors import CheckpointError
from tests.engine.adapters.company import assert_same_in_deterministic_company
from tests.engine.adapters.files import merge, write_adapter
from tests.engine.harness import assert_idle, generate, make_engine
from tests.engine.parallel.threads import threaded_engine
from tests.engine.tiny import Reference, write_checkpoint

PUBLISHED: dict[str, Any] = {
    "model_type": "kimi_linear", "hidden_size": 2304, "intermediate_size": 9216, "moe_intermediate_size": 1024,
    "num_hidden_layers": 27, "num_attention_heads": 32, "num_key_value_heads": 32, "head_dim": 72, "num_experts": 256,
    "num_shared_experts": 1, "num_experts_per_token": 8, "num_expert_group": 1, "topk_group": 1,
    "first_k_dense_replace": 1, "moe_layer_freq": 1, "moe_renormalize": True, "use_grouped_topk": True,
    "moe_router_activation_func": "sigmoid", "routed_scaling_factor": 2.446, "kv_lora_rank": 512, "q_lora_rank": None,
    "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128, "mla_use_nope": True, "vocab_size": 163840,
    "model_max_length": 1048576, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "rope_scaling": None,
    "num_nextn_predict_layers": 0, "tie_word_embeddings": False, "hidden_act": "silu",
    "linear_attn_config": {
        "full_attn_layers": [4, 8, 12, 16, 20, 24, 27], "head_dim": 128, "num_heads": 32, "short_conv_kernel_size": 4,
        "kda_layers": [1, 2, 3, 5, 6, 7, 9, 10, 11, 13, 14, 15, 17, 18, 19, 21, 22, 23, 25, 26],
    },
}  # fmt: skip
TIE = 2e-2


def test_a_published_configuration() -> None:
    model = read_config(PUBLISHED)
    assert model.delta is not None and model.latent is not None and model.moe is not None
    assert [index + 1 for index, own in enumerate(model.delta.layers) if not own] == [4, 8, 12, 16, 20, 24, 27]
    assert (model.delta.v_heads, model.delta.k_dim, model.delta.conv, model.max_positions) == (32, 128, 4, 1048576)
    assert (model.latent.rank, model.latent.query_rank, model.head_dim) == (512, None, 192)
    assert (model.moe.experts, model.moe.top_k, model.moe.shared_ffn_size, model.moe.scale) == (256, 8, 1024, 2.446)
    assert model.moe.layers == (False, *[True] * 26)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mla_use_nope": False}, "mla_use_nope"),
        ({"moe_router_activation_func": "softmax"}, "moe_router_activation_func"),
        ({"moe_layer_freq": 2}, "moe_layer_freq"),
        ({"linear_attn_config": {**PUBLISHED["linear_attn_config"], "kda_layers": [1, 2]}}, "each of the layers"),
        ({"linear_attn_config": {**PUBLISHED["linear_attn_config"], "full_attn_layers": 4}}, "each of the layers"),
        ({"linear_attn_config": {**PUBLISHED["linear_attn_config"], "num_heads": 0}}, "linear_num_heads"),
        ({"layer_types": ["linear_attention", "mamba"]}, "layer_types"),
        ({"num_key_value_heads": 8}, "num_key_value_heads"),
    ],
    ids=lambda value: str(value)[:50],
)
def test_what_cannot_be_run_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        read_config({**PUBLISHED, **changes})


def test_chunks_of_channels_that_forget_at_once_are_those_of_single_tokens() -> None:
    """Sums of such decays are thousands: their exponentials, taken apart, would be zero times infinity."""
    torch.manual_seed(2)
    tokens, heads, size = 75, 2, 24
    q, k = (torch.nn.functional.normalize(torch.randn(tokens, heads, size), dim=-1) for _ in range(2))
    g = -torch.rand(tokens, heads, size) * torch.tensor([0.01, 300.0]).repeat(size // 2)
    every = delta.Heads(q, k, torch.randn(tokens, heads, 16), g, torch.rand(tokens, heads))
    begin = state = torch.randn(heads, size, 16)
    found = []
    for t in range(tokens):
        state, out = delta._advance(state, *(part[t] for part in every))
        found.append(out)
    last, chunk = delta._chunk(every, begin)
    torch.testing.assert_close(chunk, torch.stack(found), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(last, state, rtol=1e-4, atol=1e-5)


def write_in_memory_names(folder: Path, base: Path) -> tuple[Path, Path]:
    """An adapter of all matrices of the mixers, of dense feed-forwards and shared experts as PEFT writes it over
    transformers, and the same under the names of the checkpoint, to merge it."""
    targets = ("q_proj", "k_proj", "v_proj", "o_proj", "b_proj", "f_a_proj", "f_b_proj", "g_a_proj", "g_b_proj",
               "kv_a_proj_with_mqa", "gate_proj", "down_proj")  # fmt: skip
    stored = write_adapter(folder / "stored", base, rank=4, targets=targets, size=0.4)
    renamed = write_adapter(folder / "adapter", base, rank=4, targets=targets, size=0.4)
    tensors = load_file(renamed / "adapter_model.safetensors")
    save_file({own_name(key): value for key, value in tensors.items()}, renamed / "adapter_model.safetensors")
    return stored, renamed


def requests() -> list[Request]:
    prompts = [[(7 * i + 13 * j) % 199 for j in range(20 + 30 * i)] for i in range(4)]
    params = SamplingParams(max_tokens=12, temperature=0.0)
    return [Request(f"r{i}", prompt, params, adapter="tuned" if i % 2 else "") for i, prompt in enumerate(prompts)]


def test_adapters_of_every_part_equal_merging_them(tmp_path: Path) -> None:
    base = write_checkpoint("kimi-linear", tmp_path / "base")
    stored, adapter = write_in_memory_names(tmp_path, base)
    merged, plain = Reference(merge(base, stored, tmp_path / "merged")), Reference(base)
    specs = (AdapterSpec("tuned", str(adapter)),)
    engine = make_engine(base, adapters=specs, token_budget=40, num_blocks=60)
    got = generate(engine, *requests())
    for request in requests():
        tuned, tokens = bool(request.adapter), got[request.request_id]
        assert (merged if tuned else plain).agrees(request.prompt, tokens, TIE), request.request_id
        assert not (plain if tuned else merged).agrees(request.prompt, tokens, TIE), "the adapter makes no difference"
    assert_idle(engine)
    with threaded_engine(base, 2, 2, adapters=specs, token_budget=40) as ranks:
        assert generate(ranks, *requests()[:2]) == {name: got[name] for name in ("r0", "r1")}


def test_those_without_an_adapter_depend_on_nobody_who_has_one_in_deterministic_mode(tmp_path: Path) -> None:
    base = write_checkpoint("kimi-linear", tmp_path / "base")
    specs = (AdapterSpec("tuned", str(write_adapter(tmp_path / "tuned", base, targets=("o_proj",), rank=2))),)
    assert_same_in_deterministic_company(base, specs, lambda: requests()[:3])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("tensor", "pipeline", "settings"),
    [
        (2, 1, {"expert_parallel": True}),
        (2, 2, {"expert_parallel": True, "attention_parallel": "data"}),
        (4, 1, {}),
        (1, 4, {}),
    ],
)
def test_ranks_give_the_output_of_one_device(
    tmp_path: Path, tensor: int, pipeline: int, settings: dict[str, Any]
) -> None:
    base = write_checkpoint("kimi-linear", tmp_path)
    asked = [Request(one.request_id, one.prompt, one.params) for one in requests()]
    expected = generate(make_engine(base, token_budget=32), *asked)
    with threaded_engine(base, tensor, pipeline, token_budget=32, **settings) as engine:
        assert generate(engine, *asked) == expected
        assert_idle(engine)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "bound"),
    [({"weights": "int8"}, 1.5), ({"weights": "int4"}, 8.0), ({"kv_dtype": "int8"}, 1.0), ({"kv_dtype": "fp8"}, 4.0)],
    ids=str,
)
def test_few_bits(tmp_path: Path, settings: dict[str, Any], bound: float) -> None:
    """Tokens that the reference finds nearly as likely as the best: logits of these models spread over tens."""
    base = write_checkpoint("kimi-linear", tmp_path)
    asked = [Request(one.request_id, one.prompt, one.params) for one in requests()]
    reference, got = Reference(base), generate(make_engine(base, token_budget=32, **settings), *asked)
    for request in asked:
        margins = reference.margins(request.prompt, got[request.request_id][:6])
        assert float(margins.median()) < bound, margins
