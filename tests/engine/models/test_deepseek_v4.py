"""DeepSeek V4: entries of several tokens and what chooses them, names and forms of published checkpoints, and what is
refused. `test_greedy_equals_reference` compares the family with the reference, `test_hybrid` has its states."""

from __future__ import annotations

import dataclasses
import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from penstock.engine.backends.activation import ClampedSilu
from penstock.engine.backends.interface import Entries, PoolInputs
from penstock.engine.backends.reference.pooling import entry_slots, pool_run, pool_singles
from penstock.engine.kv.kinds import BothKinds, PagedEntries, StateTensors
from penstock.engine.loading.mxfp4 import round_mxfp4
from penstock.engine.models.families import read_config
from penstock.engine.models.families.deepseek_v4_names import own_name
from penstock.engine.models.layers.experts import Router, StepTokens
from penstock.engine.parallel.layout import check_layout
from penstock.engine.request import Request
from penstock.errors import CheckpointError, ConfigError
from tests.engine.harness import assert_idle, generate, greedy, make_engine
from tests.engine.parallel.threads import threaded_engine
from tests.engine.speculative.forced import eager_engine
from tests.engine.speculative.heads import noted_drafts
from tests.engine.speculative.plain_mtp import PlainV4
from tests.engine.test_determinism import WATCHED, bits, others_in_batch, run
from tests.engine.tiny import Reference, write_checkpoint
from tests.engine.tiny.latent import DEEPSEEK_V4, V4_MIXERS

slow = pytest.mark.slow
RATE, DIM = 5, 6


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint("deepseek-v4", tmp_path_factory.mktemp("v4"))


def requests(count: int = 4, longest: int = 90, tokens: int = 12) -> list[Request]:
    chance = random.Random(11)
    prompts = [[chance.randrange(199) for _ in range(chance.randrange(20, longest))] for _ in range(count)]
    return [greedy(f"r{i}", prompt, tokens) for i, prompt in enumerate(prompts)]


def pool(tokens: int, overlapping: bool) -> PoolInputs:
    width = 2 * DIM if overlapping else DIM
    values, gates = torch.randn(2, tokens, width)
    return PoolInputs(values, 3 * gates, torch.randn(RATE, width), torch.ones(DIM))


def entries_of(inputs: PoolInputs, overlapping: bool) -> torch.Tensor:
    """By their definition."""
    found = []
    for group in range(len(inputs.values) // RATE):
        own = slice(group * RATE, (group + 1) * RATE)
        scores, values = inputs.gates[own] + inputs.bias, inputs.values[own]
        if overlapping:
            scores, values = scores[:, DIM:], values[:, DIM:]
            if group:
                older = slice((group - 1) * RATE, group * RATE)
                scores = torch.cat(((inputs.gates[older] + inputs.bias)[:, :DIM], scores))
                values = torch.cat((inputs.values[older, :DIM], values))
        found.append((scores.softmax(0) * values).sum(0))
    return torch.stack(found)


@pytest.mark.parametrize("overlapping", [False, True])
@pytest.mark.parametrize("cuts", [(23,), (4, 3, 1, 9, 6), (1,) * 23, (5, 5, 10, 3), (2, 1, 1, 1, 17, 1)], ids=str)
def test_entries_are_the_same_however_a_prompt_is_cut(overlapping: bool, cuts: tuple[int, ...]) -> None:
    torch.manual_seed(2)
    inputs = pool(23, overlapping)
    nothing = float("nan")  # a state that nobody has written is not read
    running = torch.full((3, inputs.bias.shape[1]), nothing)
    before = torch.full((3, DIM), nothing) if overlapping else None
    made, start = [], 0
    for length in cuts:
        some = slice(start, start + length)
        part = inputs._replace(values=inputs.values[some], gates=inputs.gates[some])
        if length > 1:
            found, running, before = pool_run(part, start, running, before)
        else:
            group = None if before is None else before.unsqueeze(0)
            found, states, groups = pool_singles(part, torch.tensor([start]), running.unsqueeze(0), group)
            running, before = states[0], None if groups is None else groups[0]
            found = found[: int((start + 1) % RATE == 0)]
        made.append(found)
        start += length
    torch.testing.assert_close(torch.cat(made), entries_of(inputs, overlapping))


@pytest.mark.parametrize(("rate", "size"), [(4, 16), (32, 16), (1, 8), (5, 16), (24, 16), (16, 16)])
def test_an_entry_lies_in_the_block_of_its_last_token(rate: int, size: int) -> None:
    places, blocks = -(-size // rate), 12
    kept = Entries(torch.zeros(blocks + 1, places, 1), None, size)
    table = torch.arange(blocks, 0, -1, dtype=torch.int32)
    count = blocks * size // rate
    slots = entry_slots(table, torch.arange(count), rate, kept).tolist()
    assert len({*slots}) == count, "two entries in one place"
    for entry, slot in enumerate(slots):
        assert slot // places == int(table[((entry + 1) * rate - 1) // size])


def test_experts_by_token_ids_are_weighed_by_scores() -> None:
    linear: Any = lambda x: x  # noqa: E731
    table = torch.tensor([[0, 2], [1, 2], [2, 1]])
    router = Router(linear, 2, True, scoring="sqrt_softplus", scale=1.5, table=table, tokens=StepTokens())
    logits = torch.tensor([[0.3, 9.0, -1.0], [4.0, -20.0, 1.0]])
    with pytest.raises(RuntimeError, match="nobody has said"):
        router(logits)
    router.tokens.ids = torch.tensor([2, 0])
    weights, experts = router(logits)
    assert experts.tolist() == [[2, 1], [0, 2]]
    scores = logits.gather(1, experts).exp().log1p().sqrt()
    torch.testing.assert_close(weights, 1.5 * scores / scores.sum(-1, keepdim=True))


def test_the_cache_has_entries_in_blocks_and_windows_in_states(folder: Path) -> None:
    def states(*sizes: int) -> StateTensors:
        return StateTensors((((24, 24), torch.float32), *(((3, size), torch.float32) for size in sizes)))

    few, many = (PagedEntries(24, rate, 16, torch.int8) for rate in (4, 32))
    keys = PagedEntries(12, 4, 16, torch.float32)
    chosen = BothKinds(BothKinds(few, keys), states(48, 24, 24, 12))
    kinds = make_engine(folder, num_blocks=10, kv_dtype="int8").runner.kv.shape.kinds
    assert kinds == (states(), chosen, BothKinds(many, states(24)), chosen)
    assert (few.block_bytes, many.block_bytes, keys.block_bytes) == (4 * (24 + 2), 24 + 2, 4 * 12 * 4)


@pytest.mark.parametrize(
    "settings",
    [
        {"block_size": 8, "num_blocks": 30, "state_interval": 16},
        pytest.param({"block_size": 32, "num_blocks": 9, "state_interval": 32}, marks=slow),
        pytest.param({"host_memory": 64 << 10, "disk_memory": 8 << 20, "num_blocks": 12}, marks=slow),
        pytest.param({"speculation": "ngram"}, marks=slow),
    ],
    ids=str,
)
def test_blocks_of_any_size_and_tiers_change_nothing(folder: Path, tmp_path: Path, settings: dict[str, Any]) -> None:
    if "disk_memory" in settings:
        settings = {**settings, "disk_path": str(tmp_path)}
    expected = generate(make_engine(folder), *requests())
    engine = make_engine(folder, token_budget=48, **settings)
    for _ in range(2):
        assert generate(engine, *requests()) == expected
    assert_idle(engine)


@slow
@pytest.mark.parametrize("kv_dtype", ["int8", "fp8"])
def test_few_bits_are_the_same_in_any_batch(folder: Path, kv_dtype: str) -> None:
    alone = {}
    for request in requests():
        alone |= generate(make_engine(folder, kv_dtype=kv_dtype, token_budget=48), request)
    crowded = make_engine(folder, kv_dtype=kv_dtype, num_blocks=16, token_budget=48)
    assert generate(crowded, *requests()) == alone
    assert_idle(crowded)


@slow
@pytest.mark.parametrize("settings", [{}, {"kv_dtype": "int8"}, {"weights": "int8"}], ids=str)
def test_the_same_bits_in_any_batch_in_deterministic_mode(folder: Path, settings: dict[str, Any]) -> None:
    fixed = {"deterministic": True, "num_blocks": 400, **settings}
    alone = make_engine(folder, **fixed)
    expected = {request.request_id: bits(run(alone, [request]), request.request_id) for request in WATCHED}
    again = {request.request_id: bits(run(alone, [request]), request.request_id) for request in WATCHED}
    assert again == expected, "with the prompt found in the cache"
    for budget, others in ((64, 5), (7, 2)):
        engine = make_engine(folder, **fixed, token_budget=budget)
        deltas = run(engine, others_in_batch(others) + WATCHED)
        for name, wanted in expected.items():
            assert bits(deltas, name) == wanted, (name, budget, others)


@slow
@pytest.mark.parametrize(
    ("tensor", "pipeline", "settings"),
    [
        (2, 2, {}),
        (2, 1, {"expert_parallel": True}),
        (2, 1, {"expert_parallel": True, "attention_parallel": "data"}),
        (1, 2, {"host_memory": 1 << 20, "num_blocks": 12, "kv_dtype": "int8"}),
        (2, 1, {"speculation": "ngram", "weights": "int8"}),
    ],
    ids=str,
)
def test_ranks_give_the_output_of_one_device(
    folder: Path, tensor: int, pipeline: int, settings: dict[str, Any]
) -> None:
    same = {key: value for key, value in settings.items() if key in ("kv_dtype", "weights")}
    expected = generate(make_engine(folder, token_budget=32, **same), *requests())
    with threaded_engine(folder, tensor, pipeline, token_budget=32, **settings) as engine:
        for _ in range(2):
            assert generate(engine, *requests()) == expected


@slow
@pytest.mark.parametrize("weights", ["int8", "int4", "fp8"])
def test_quantized_weights_run(folder: Path, weights: str) -> None:
    engine = make_engine(folder, weights=weights)
    assert all(len(tokens) == 12 for tokens in generate(engine, *requests()).values())


def published(name: str) -> str:
    """What DeepSeek calls a tensor that transformers has written."""
    return (
        name.removeprefix("model.")
        .replace("embed_tokens.", "embed.")
        .replace("attn.norm.", "attn.kv_norm.")
        .replace("hc_head.hc_", "hc_head_")
    )


_LINEARS = (".wq_", ".wkv.", ".wo_", ".w1.", ".w2.", ".w3.", ".e_proj.", ".h_proj.")


def as_published(folder: Path, *, few_bits: bool) -> dict[str, torch.Tensor]:
    """Store a checkpoint as DeepSeek does; with `few_bits` in FP8, experts in four bits. The numbers that it then has,
    under the names that they had."""
    stored, meant, found = load_file(folder / "model.safetensors"), {}, {}
    for name, tensor in stored.items():
        own, linear = published(name), name.endswith("weight") and tensor.dim() == 2 and few_bits
        found[own] = meant[name] = tensor
        if linear and ".experts." in name:
            packed = round_mxfp4(tensor)
            found[own], meant[name] = packed.blocks.view(torch.int8), packed.dense()
            found[own.replace("weight", "scale")] = packed.scales.view(torch.float8_e8m0fnu)
        elif linear and any(part in name for part in _LINEARS):
            if "compressor" in name:
                continue
            rows, columns = tensor.shape
            wide = torch.zeros(-(-rows // 32) * 32, -(-columns // 32) * 32)
            wide[:rows, :columns] = tensor
            tiles = wide.unflatten(0, (-1, 32)).unflatten(2, (-1, 32))
            scale = (tiles.abs().amax((1, 3)) / 448).log2().ceil().clamp_min(-20).exp2()
            each = scale.repeat_interleave(32, 0).repeat_interleave(32, 1)[:rows, :columns]
            found[own] = (tensor / each).to(torch.float8_e4m3fn)
            meant[name] = found[own].float() * each
            found[own.replace("weight", "scale")] = scale.to(torch.float8_e8m0fnu)
    save_file({name: one.contiguous() for name, one in found.items()}, folder / "model.safetensors")
    return meant


PUBLISHED = {
    "compress_ratios": [0, 4, 128, 4, 0], "compress_rate_hca": 32, "num_hash_layers": 2, "qk_rope_head_dim": 8,
    "expert_dtype": "fp4", "rope_theta": 10000, "compress_rope_theta": 160000, "topk_method": "noaux_tc",
    "rope_scaling": {"type": "yarn", "factor": 4, "original_max_position_embeddings": 256, "beta_fast": 32,
                     "beta_slow": 1},
}  # fmt: skip
REPLACED = ("layer_types", "compress_rates", "mlp_layer_types", "partial_rotary_factor", "rope_parameters")


def publish(folder: Path, **more: Any) -> None:
    """Write the configuration as DeepSeek does."""
    config = json.loads((folder / "config.json").read_text())
    config = {key: value for key, value in config.items() if key not in REPLACED}
    (folder / "config.json").write_text(json.dumps({**config, **PUBLISHED, **more}))


def test_a_published_checkpoint_is_that_of_transformers(folder: Path, tmp_path: Path) -> None:
    other = write_checkpoint("deepseek-v4", tmp_path)
    as_published(other, few_bits=False)
    before = read_config(json.loads((other / "config.json").read_text()))
    publish(other)
    assert read_config(json.loads((other / "config.json").read_text())) == before
    assert generate(make_engine(other), *requests(2)) == generate(make_engine(folder), *requests(2))


def test_fp8_in_tiles_with_experts_in_four_bits(tmp_path: Path) -> None:
    sizes = {"moe_intermediate_size": 32, "intermediate_size": 32}
    stored, plain = (PlainV4.write("deepseek-v4", tmp_path / name, **sizes) for name in ("stored", "plain"))
    save_file(as_published(stored, few_bits=True), plain / "model.safetensors", metadata={"format": "pt"})
    form = {"quant_method": "fp8", "fmt": "e4m3", "scale_fmt": "ue8m0", "activation_scheme": "dynamic"}
    publish(stored, quantization_config={**form, "weight_block_size": [32, 32]})
    PlainV4.write_layer(plain)
    reference, layer, asked = Reference(plain), PlainV4(plain), requests(2, 50, 8)
    for weights in ("dense", "auto"):
        engine = eager_engine(stored, weights=weights, speculation="mtp")
        drafts = noted_drafts(engine)
        got = generate(engine, *asked)
        assert len(drafts) > 5
        for tokens, draft in drafts:
            scores = layer.scores(tokens, draft)
            assert bool((scores.amax(-1) - scores[range(len(draft)), draft] < 1e-2).all())
        for one in asked:
            assert reference.agrees(list(one.prompt), got[one.request_id], 1e-2), (weights, one.request_id)
    experts: Any = engine.runner.decoder.layers[0].feed_forward
    assert "Mxfp4" in type(experts.routed.experts[0].down).__name__, "experts are widened"
    with threaded_engine(stored, 2, 1, weights="dense") as ranks:
        got = generate(ranks, *asked)
        assert all(reference.agrees(list(one.prompt), got[one.request_id], 1e-2) for one in asked)


def test_experts_in_another_form_than_the_configuration_says(tmp_path: Path) -> None:
    sizes = {"moe_intermediate_size": 32, "intermediate_size": 32}
    stored = write_checkpoint("deepseek-v4", tmp_path, **sizes)
    as_published(stored, few_bits=True)
    form = {"quant_method": "fp8", "weight_block_size": [32, 32]}
    for dtype, message in (("fp8", "has a scale but is torch.int8"), ("fp2", "expert_dtype is 'fp2'")):
        publish(stored, quantization_config=form, expert_dtype=dtype)
        with pytest.raises(CheckpointError, match=message):
            make_engine(stored)


def test_a_table_that_names_experts_that_are_not_there(tmp_path: Path) -> None:
    stored = load_file((write_checkpoint("deepseek-v4", tmp_path)) / "model.safetensors")
    stored["model.layers.1.ffn.gate.tid2eid"][7, 1] = 8
    save_file(stored, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match="names experts from 0 to 8 of 8"):
        make_engine(tmp_path)


@slow
def test_a_checkpoint_under_the_names_that_transformers_uses_in_memory(folder: Path, tmp_path: Path) -> None:
    """Experts are stacks then."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model.save_pretrained(tmp_path, save_original_format=False)
    assert "model.layers.0.mlp.experts.gate_up_proj" in load_file(tmp_path / "model.safetensors")
    assert generate(make_engine(tmp_path), *requests(2)) == generate(make_engine(folder), *requests(2))


@pytest.mark.parametrize(
    ("stored", "own"),
    [
        ("embed.weight", "model.embed_tokens.weight"),
        ("head.weight", "lm_head.weight"),
        ("norm.weight", "model.norm.weight"),
        ("hc_head_fn", "model.hc_head.hc_fn"),
        ("layers.3.hc_attn_scale", "model.layers.3.attn_hc.scale"),
        ("layers.3.attn.kv_norm.weight", "model.layers.3.self_attn.kv_norm.weight"),
        ("layers.3.attn.wo_a.scale", "model.layers.3.self_attn.o_a_proj.weight_scale_inv"),
        ("layers.3.attn.attn_sink", "model.layers.3.self_attn.sinks"),
        ("layers.3.attn.compressor.norm.weight", "model.layers.3.self_attn.compressor.kv_norm.weight"),
        ("layers.3.attn.indexer.wq_b.scale", "model.layers.3.self_attn.compressor.indexer.q_b_proj.weight_scale_inv"),
        ("layers.3.attn.indexer.compressor.ape", "model.layers.3.self_attn.compressor.indexer.position_bias"),
        (
            "layers.3.attn.indexer.weights_proj.weight",
            "model.layers.3.self_attn.compressor.indexer.scorer.weights_proj.weight",
        ),
        ("layers.3.ffn.gate.bias", "model.layers.3.mlp.gate.e_score_correction_bias"),
        ("layers.3.ffn.gate.tid2eid", "model.layers.3.mlp.gate.tid2eid"),
        ("layers.3.ffn.experts.17.w3.weight", "model.layers.3.mlp.experts.17.up_proj.weight"),
        ("layers.3.ffn.shared_experts.w2.scale", "model.layers.3.mlp.shared_experts.down_proj.weight_scale_inv"),
        ("mtp.0.attn.wkv.weight", "mtp.0.self_attn.kv_proj.weight"),
        ("mtp.0.e_proj.scale", "mtp.0.e_proj.weight_scale_inv"),
        ("mtp.0.ffn.experts.17.w3.scale", "mtp.0.mlp.experts.17.up_proj.weight_scale_inv"),
        ("mtp.0.hc_ffn_scale", "mtp.0.ffn_hc.scale"),
        ("mtp.0.hc_head_scale", "mtp.0.hc_head.hc_scale"),
        ("mtp.0.norm.weight", "mtp.0.norm.weight"),
    ],
)
def test_published_names(stored: str, own: str) -> None:
    assert own_name(stored) == own == own_name(own)


CONFIG: dict[str, Any] = {
    **DEEPSEEK_V4, "model_type": "deepseek_v4", "vocab_size": 199, "hidden_size": 64, "num_attention_heads": 4,
}  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layer_types": ["full_attention"] * 4}, "layer_types must name one of sliding_attention"),
        ({"layer_types": [V4_MIXERS[0]] * 3}, "for each of 4 layers"),
        ({"layer_types": None, "compress_ratios": [0, 4, 64, 4]}, "compress_ratios must be 0, 4 or 128"),
        ({"compress_rates": {V4_MIXERS[0]: 4}}, "no rate of heavily_compressed_attention"),
        ({"mlp_layer_types": ["dense"] * 4}, "mlp_layer_types"),
        ({"scoring_func": "softmax"}, "scoring_func is 'softmax'"),
        ({"o_groups": 5}, "o_groups is 5"),
        ({"qk_rope_head_dim": 7}, "7 dimensions of heads are rotated, in pairs"),
        ({"qk_rope_head_dim": 14}, "those of the indexer 12"),
        ({"swiglu_limit": 0.0}, "swiglu_limit"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"rope_parameters": {"main": {"rope_type": "default"}}}, "both main and compress"),
        ({"rope_parameters": {"rope_type": "longrope", "short_factor": [1], "long_factor": [1]}}, "longrope"),
        ({"hidden_act": "gelu"}, "hidden_act"),
    ],
    ids=str,
)
def test_what_cannot_be_run_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        read_config({**CONFIG, **changes})


def test_a_published_configuration() -> None:
    """Of DeepSeek V4 Flash, as far as it is known from its readers."""
    raw = {
        **PUBLISHED, "model_type": "deepseek_v4", "vocab_size": 129280, "num_hidden_layers": 43,
        "compress_ratios": [0, 0, *([4, 128] * 20), 4, 0], "num_hash_layers": 3, "qk_rope_head_dim": 64,
        "num_experts_per_tok": 6, "compress_rate_hca": None,
    }  # fmt: skip
    model = read_config(raw)
    assert model.compression is not None and model.moe is not None and model.streams is not None
    assert model.compression.rates == (0, 0, *([4, 128] * 20), 4) and sum(model.compression.chosen) == 21
    assert model.moe.hashed == (True,) * 3 + (False,) * 40 and model.moe.experts == 256
    assert model.rope.theta == 160000 and model.rope.attention_factor == 1.0 and model.rope.rotated == 1 / 8
    assert model.local_rope is not None and model.local_rope.theta == 10000 and model.local_rope.kind == "default"
    assert model.activation == ClampedSilu(10.0) and model.head_dim == 512 and model.streams.count == 4


def test_later_stages_choose_experts_by_token_ids(folder: Path) -> None:
    asked = requests(2, 60, 8)
    expected = generate(make_engine(folder, token_budget=32), *asked)
    with threaded_engine(folder, 1, 4, token_budget=32) as engine:
        assert generate(engine, *asked) == expected


def test_grids_that_divide_it() -> None:
    model = read_config(CONFIG)
    check_layout(model, 2, 2)
    check_layout(model, 1, 4)
    with pytest.raises(ConfigError, match="cannot split"):
        check_layout(dataclasses.replace(model, num_heads=8), 4, 1)


@pytest.mark.parametrize(
    ("settings", "message"),
    [({"speculation": "mtp"}, "no MTP layer")],
    ids=str,
)
def test_what_it_does_not_have_is_refused(folder: Path, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_engine(folder, **settings)


def test_a_layer_that_drafts_has_no_entries(tmp_path: Path) -> None:
    folder = PlainV4.write("deepseek-v4", tmp_path)
    tensors = load_file(folder / "model.safetensors")
    tensors["mtp.0.attn.compressor.ape"] = torch.zeros(4, 48)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConfigError, match="its MTP layer attends to entries"):
        make_engine(folder, speculation="mtp")
