"""GLM-5-Next: the default configuration, what is refused, pools that are chosen and kept, decays with a bound, ranks,
few bits and names of published files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.models.glm5_next.modeling_glm5_next import Glm5NextTextForgetGate, Glm5NextTextIndexer

from penstock.engine.backends.interface import (
    AttentionBatch,
    DeltaLayout,
    DeltaWeights,
    Entries,
    PooledIndexLayout,
    PoolInputs,
    PoolState,
    StateBatch,
)
from penstock.engine.backends.reference import delta
from penstock.engine.backends.reference.ops import ReferenceOps
from penstock.engine.kv.kinds import BothKinds, PagedEntries, PagedLatent, RecurrentState, StateTensors
from penstock.engine.models.families import is_linear, read_config
from penstock.engine.models.families.glm5_next import GLM5_NEXT
from penstock.engine.parallel.layout import check_layout
from penstock.engine.request import Request, SamplingParams
from penstock.errors import CheckpointError, ConfigError
from tests.engine.harness import assert_idle, drain, generate, greedy, make_engine
from tests.engine.parallel.threads import threaded_engine
from tests.engine.quantization.layouts import write as write_layout
from tests.engine.speculative.forced import eager_engine
from tests.engine.speculative.heads import noted_drafts
from tests.engine.speculative.plain_mtp import PlainGlm5Next
from tests.engine.tiny import COMMON, FAMILIES, Reference, write_checkpoint

FAMILY, SHARED = "glm5-next", "glm5-next-shared"
PROMPT = [(j * 31 + 7) % 199 for j in range(90)]
slow = pytest.mark.slow


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(FAMILY, tmp_path_factory.mktemp("glm5-next"))


def tiny(**changes: Any) -> dict[str, Any]:
    return {**COMMON, **FAMILIES[FAMILY][1], "model_type": "glm5_next_text", **changes}


def test_the_default_configuration() -> None:
    given = json.loads(json.dumps(transformers.Glm5NextTextConfig().to_dict()))
    config = read_config(given)
    assert config == read_config({"model_type": "glm5_next_text"})
    latent, moe, nets, streams = config.latent, config.moe, config.delta, config.streams
    assert latent is not None and latent.index is not None and moe is not None and nets is not None
    assert config.num_layers == 45 and [at for at in range(45) if not nets.layers[at]] == list(range(3, 45, 4))
    assert latent.index.layers == tuple(not one for one in nets.layers)
    assert (latent.index.most, latent.index.rate, latent.index.everything) == (2048, 16, 2063)
    assert (latent.cached_in(3), latent.plain, latent.value, latent.query_rank) == (512, 256, 256, 1536)
    assert (nets.v_heads, nets.k_dim, nets.conv, nets.lowest) == (64, 128, 4, -5.0)
    assert (moe.experts, moe.top_k, moe.scale, moe.layers) == (288, 8, 2.5, (False,) * 3 + (True,) * 42)
    assert streams is not None and (streams.count, streams.rounds, streams.averaged) == (4, 20, True)
    check_layout(config, 8, 45)


def test_a_model_that_also_sees() -> None:
    given = json.loads(json.dumps(transformers.Glm5NextConfig().to_dict()))
    assert read_config(given) == read_config(given["text_config"])
    # Older files have the decoder's keys beside those of the wrapper.
    assert read_config({**tiny(), "model_type": "glm5_next", "image_token_id": 3}) == read_config(tiny())


def test_delta_nets_as_other_files_describe_them() -> None:
    inner: dict[str, Any] = {"head_dim": 24, "num_heads": 2, "short_conv_kernel_size": 3, "gate_lower_bound": -2.0}
    own = {"linear_head_dim": 24, "linear_num_heads": 2, "linear_conv_kernel_dim": 3, "linear_lower_bound": -2.0}
    assert read_config(tiny(linear_attn_config=inner)) == read_config(tiny(**own))
    unbounded = {**inner, "gate_lower_bound": None}
    for change, lowest in (({}, -5.0), ({"safe_gate": True}, -5.0), ({"safe_gate": False}, 0.0)):
        nets = read_config(tiny(linear_attn_config={**unbounded, **change})).delta
        assert nets is not None and nets.lowest == lowest


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"index_topk": 26}, "index_topk is 26, which index_kpool, 4, does not divide"),
        ({"index_kpool_always_select_tail": False}, "index_kpool_always_select_tail is false"),
        ({"index_kpool": 0}, "index_kpool"),
        ({"index_head_dim": 1}, "all index keys are the same"),
        ({"indexer_types": ["full"] * 2 + ["shared"] + ["full"] * 2}, "layer 2 attends to what another one chose"),
        ({"indexer_types": ["full"] * 4 + ["shared"]}, "layer 4 attends to what another one chose"),
        ({"indexer_types": ["full"] * 4}, "indexer_types .or index_topk_pattern. must say full or shared"),
        ({"layer_types": ["linear_attention"] * 4 + ["sliding_attention"]}, "layer_types must name one of"),
        ({"mlp_layer_types": ["dense"]}, "mlp_layer_types"),
        ({"qk_rope_head_dim": 8}, "qk_rope_head_dim is 8"),
        ({"q_lora_rank": None}, "q_lora_rank"),
        ({"num_key_value_heads": 2}, "num_key_value_heads must be num_attention_heads"),
        ({"linear_lower_bound": 0.0}, "linear_lower_bound is 0; it must be negative"),
        ({"swiglu_limit": 0.0}, "swiglu_limit is 0"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"hc_sinkhorn_iters": 0}, "hc_sinkhorn_iters"),
        ({"sliding_window": 64}, "sliding_window is 64"),
    ],
    ids=str,
)
def test_configurations_that_cannot_be_run(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        read_config(tiny(**changes))


def test_tails_do_not_matter_to_pools_of_one_token() -> None:
    latent = read_config(tiny(index_kpool=1, index_kpool_always_select_tail=False)).latent
    assert latent is not None and latent.index is not None and latent.index.everything == 24


def test_what_layers_keep(folder: Path) -> None:
    kinds = make_engine(folder, num_blocks=10, kv_dtype="int8").runner.kv.shape.kinds
    state = RecurrentState(4, 16, 16, 192, 4, torch.float32)
    pools = BothKinds(PagedEntries(12, 4, 16, torch.float32), StateTensors((((3, 12), torch.float32),)))
    latents = BothKinds(PagedLatent(32, 16, torch.int8), pools)
    assert kinds == (state, state, latents, state, latents)
    assert latents.block_bytes == 16 * (32 + 2) + 4 * 12 * 4 and latents.state_bytes == 3 * 12 * 4


def test_stages_do_not_begin_with_layers_that_follow_another() -> None:
    config = read_config({**COMMON, **FAMILIES[SHARED][1], "model_type": "glm5_next_text"})
    assert config.stage_starts == (True, False, True, True, False)
    check_layout(config, 2, 3)
    with pytest.raises(ConfigError, match="4 stages are more than the 3 layers with an indexer or a delta net"):
        check_layout(config, 1, 4)


class Pools:
    """One sequence whose blocks lie in reverse, before an indexer of the library's."""

    heads, dim, rate, most = 16, 12, 4, 3

    def __init__(self, tokens: int) -> None:
        torch.manual_seed(5)
        values = tiny(index_n_heads=self.heads, index_head_dim=self.dim, index_topk=self.rate * self.most)
        config = transformers.Glm5NextTextConfig(**{key: one for key, one in values.items() if key != "model_type"})
        self.theirs = Glm5NextTextIndexer(config, 2)
        with torch.no_grad():
            for parameter in self.theirs.parameters():
                parameter.normal_(0, 0.4)
        self.hidden, self.narrow = torch.randn(1, tokens, 64), torch.randn(1, tokens, 24)
        self.layout = PooledIndexLayout(self.heads, self.dim, self.rate, self.most)
        self.table = torch.arange(-(-tokens // 8), 0, -1, dtype=torch.int32).unsqueeze(0)
        rows = torch.full((len(self.table[0]) + 1, 2, self.dim), float("nan"))
        self.kept, self.state = Entries(rows, None, 8), PoolState(torch.full((3, 3, self.dim), float("nan")), None)

    def expected(self) -> list[set[int]]:
        found = self.theirs(self.hidden, self.narrow, torch.ones(1, self.hidden.shape[1], dtype=torch.bool), None)
        return [{at for at in row if at >= 0} for row in found[0].tolist()]

    @torch.inference_mode()
    def chosen(self, sizes: list[int]) -> list[set[int]]:
        """In chunks of so many tokens."""
        found, start = [], 0
        for size in sizes:
            end = start + size
            found += self._step(start, end)
            start = end
        return found

    def _step(self, start: int, end: int) -> list[set[int]]:
        x, theirs = self.hidden[0, start:end], self.theirs
        states = StateBatch.of_one(end - start, x.device)
        states.reads = states.reads + (1 if start else 0)
        batch = AttentionBatch(
            positions=torch.arange(start, end), slots=self._slots()[start:end],
            rows=torch.tensor([0], dtype=torch.int32),
            query_starts=torch.tensor([0, end - start], dtype=torch.int32), block_tables=self.table,
            context_lens=torch.tensor([end], dtype=torch.int32), num_decodes=int(end - start == 1),
            max_query=end - start, max_context=end, states=states,
        )  # fmt: skip
        ops = ReferenceOps()
        keys = theirs.k_norm(theirs.wk(x))
        gates = x @ theirs.index_kpool_compress_gate.T
        ops.store_pools(PoolInputs(keys, gates, theirs.index_kpool_compress_ape), batch, self.kept, self.state)
        made = ops.choose_pools(
            theirs.wq_b(self.narrow[0, start:end]), theirs.weights_proj(x), self.layout, batch, self.kept, every=True
        )
        (only,) = made
        places = {int(slot): at for at, slot in enumerate(self._slots())}
        rows: list[tuple[Tensor, Tensor]] = list(zip(only.slots, only.valid, strict=True))
        return [{places[int(slot)] for slot in slots[valid]} for slots, valid in rows]

    def _slots(self) -> Tensor:
        return (self.table[0].long().unsqueeze(1) * 8 + torch.arange(8)).flatten()


@pytest.mark.parametrize("sizes", [[43], [1] * 43, [3, 1, 6, 2, 9, 1, 1, 20]], ids=str)
def test_tokens_are_those_that_the_librarys_indexer_chooses(sizes: list[int]) -> None:
    pools = Pools(43)
    assert pools.chosen(sizes) == pools.expected()


def test_decays_are_those_of_the_librarys_gate() -> None:
    torch.manual_seed(4)
    config = transformers.Glm5NextTextConfig(hidden_size=64, linear_num_heads=2, linear_head_dim=12)
    gate = Glm5NextTextForgetGate(config)
    with torch.no_grad():
        for parameter in gate.parameters():
            parameter.normal_(0, 0.7)
        x = torch.randn(1, 9, 64) * 4
        made, rates = gate.f_b_proj(gate.f_a_proj(x[0])), torch.zeros(9, 2)
        layout = DeltaLayout(2, 2, 12, 12, 4, grouped=False, by_channel=True, lowest=-5.0)
        weights = DeltaWeights(torch.zeros(72, 4), -gate.A_log.exp(), gate.dt_bias, torch.ones(12), 1e-6)
        heads = delta._heads(torch.ones(9, 72), rates, made, layout, weights)
        torch.testing.assert_close(heads.g, gate(x)[0])
    assert -5 <= float(heads.g.min()) < -4 and float(heads.g.max()) > -1


def test_log_probabilities_are_the_references(folder: Path) -> None:
    """Of every token of a prompt in small chunks, and of those behind it."""
    engine = make_engine(folder, token_budget=23)
    engine.submit(Request("a", PROMPT, SamplingParams(max_tokens=8, temperature=0.0, prompt_logprobs=0, logprobs=0)))
    deltas = drain(engine)
    tokens = [token for one in deltas for token in one.tokens]
    of_prompt = [entry.logprob for one in deltas for entry in one.prompt_logprobs or () if entry is not None]
    found = of_prompt + [entry.logprob for one in deltas for entry in one.logprobs or ()]
    theirs = Reference(folder).logprobs(PROMPT + tokens)
    said = torch.tensor(PROMPT[1:] + tokens)
    torch.testing.assert_close(
        torch.tensor(found), theirs[: len(said)].gather(1, said.unsqueeze(1)).squeeze(1), atol=2e-3, rtol=0
    )


@pytest.mark.parametrize("family", [pytest.param(FAMILY, marks=slow), SHARED])
def test_chunks_preemption_prefixes_and_drafts(family: str, tmp_path: Path) -> None:
    folder = write_checkpoint(family, tmp_path)
    reference = Reference(folder)
    prompts = {f"r{n}": [(n * 13 + j * 7) % 199 for j in range(n)] for n in (20, 61, 90, 133)}
    engine = make_engine(folder, token_budget=23, num_blocks=14, max_running=4, speculation="ngram", state_interval=16)
    got = generate(engine, *(greedy(name, prompt, 16) for name, prompt in prompts.items()))
    for name, prompt in prompts.items():
        assert reference.agrees(prompt, got[name]), name
    assert engine.load_snapshot().preemptions > 0
    assert_idle(engine)
    roomy = make_engine(folder, token_budget=23, state_interval=16)
    for turn in range(2):
        assert generate(roomy, greedy(f"turn {turn}", prompts["r133"], 16))[f"turn {turn}"] == got["r133"]
    assert roomy.load_snapshot().prefix_hit_tokens == 128


@slow
@pytest.mark.parametrize(
    ("family", "tensor", "pipeline", "settings"),
    [
        (FAMILY, 2, 1, {"expert_parallel": True}),
        (FAMILY, 2, 2, {"expert_parallel": True, "attention_parallel": "data"}),
        (FAMILY, 4, 1, {"host_memory": 1 << 20}),
        (SHARED, 2, 3, {}),
    ],
    ids=str,
)
def test_ranks_give_the_output_of_one_device(
    tmp_path: Path, family: str, tensor: int, pipeline: int, settings: dict[str, Any]
) -> None:
    folder = write_checkpoint(family, tmp_path)
    asked = [greedy(f"r{n}", [(n * 13 + j * 7) % 199 for j in range(n)], 12) for n in (5, 40, 75, 110)]
    expected = generate(make_engine(folder, token_budget=32), *asked)
    with threaded_engine(folder, tensor, pipeline, token_budget=32, **settings) as engine:
        for _ in range(2):
            assert generate(engine, *asked) == expected
        assert_idle(engine)


@slow
@pytest.mark.parametrize(
    "settings", [{"host_memory": 1 << 20}, {"host_memory": 64 << 10, "disk_memory": 8 << 20}], ids=str
)
def test_tiers_change_nothing(folder: Path, tmp_path: Path, settings: dict[str, Any]) -> None:
    settings = {**settings, "disk_path": str(tmp_path)} if "disk_memory" in settings else settings
    asked = [greedy(f"r{n}", [(n * 13 + j * 7) % 199 for j in range(n)], 12) for n in (5, 40, 75, 110)]
    expected = generate(make_engine(folder), *asked)
    engine = make_engine(folder, token_budget=48, num_blocks=14, **settings)
    for _ in range(2):
        assert generate(engine, *asked) == expected
    assert_idle(engine)


def write_as(folder: Path, source: Path, tensors: dict[str, Tensor]) -> Path:
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text((source / "config.json").read_text())
    return folder


def test_names_of_published_files(tmp_path: Path) -> None:
    """Beside what sees, and with the layer for multi-token prediction behind the last one, which drafts."""
    target = PlainGlm5Next.write("glm5-next", tmp_path)
    tensors = load_file(target / "model.safetensors")
    assert {
        "model.layers.0.hc_attn_fn", "model.layers.0.self_attn.f_a_proj.weight", "model.layers.0.self_attn.A_log",
        "model.layers.0.self_attn.k_conv1d.weight", "model.layers.1.mlp.experts.7.down_proj.weight",
    } <= tensors.keys()  # fmt: skip
    prefixed = {name.replace("model.", "model.language_model.", 1): tensor for name, tensor in tensors.items()}
    prefixed["model.visual.patch_embed.proj.weight"] = torch.zeros(8, 8)
    config = json.loads((target / "config.json").read_text())
    save_file(prefixed, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "glm5_next", "text_config": config}))
    expected = generate(make_engine(target), greedy("a", PROMPT, 8))
    engine, layer = eager_engine(tmp_path, speculation="mtp"), PlainGlm5Next(target)
    drafts = noted_drafts(engine)
    assert generate(engine, greedy("a", PROMPT, 8)) == expected
    assert len(drafts) > 2
    for tokens, draft in drafts:
        assert layer.scores(tokens, draft).argmax(-1).tolist() == draft


def test_a_checkpoint_without_gates_of_pools_is_incomplete(folder: Path, tmp_path: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.2.self_attn.indexer.index_kpool_compress_gate"]
    with pytest.raises(CheckpointError, match=r"no tensor 'model\.layers\.2\..*index_kpool_compress_gate'"):
        make_engine(write_as(tmp_path, folder, tensors))


@slow
@pytest.mark.parametrize(
    ("settings", "bound"),
    [({"weights": "int8"}, 0.3), ({"weights": "int4"}, 2.5), ({"weights": "fp8"}, 1.5), ({"kv_dtype": "int8"}, 0.3)],
    ids=str,
)
def test_few_bits(tmp_path: Path, settings: dict[str, Any], bound: float) -> None:
    """Tokens that the reference finds nearly as likely as the best."""
    folder = write_checkpoint(FAMILY, tmp_path, spread=0.4)
    asked = [greedy(f"r{n}", [(n * 13 + j * 7) % 199 for j in range(n)], 12) for n in (5, 40, 75, 110)]
    reference, got = Reference(folder), generate(make_engine(folder, token_budget=32, **settings), *asked)
    for request in asked:
        margins = reference.margins(list(request.prompt), got[request.request_id][:6])
        assert float(margins.median()) < bound, margins


@slow
@pytest.mark.parametrize("layout", ["gptq", "awq", "packed", "fp8", "fp8-tiles"])
def test_checkpoints_in_few_bits(layout: str, tmp_path: Path) -> None:
    assert GLM5_NEXT.own_name is not None
    own_name = GLM5_NEXT.own_name
    sizes = {"v_head_dim": 16, "index_head_dim": 16, "moe_intermediate_size": 32, "q_lora_rank": 32}
    base = write_checkpoint(FAMILY, tmp_path / "base", **sizes)
    few, same, _ = write_layout(base, layout, tmp_path, is_linear=lambda name: is_linear(own_name(name)))
    got = generate(make_engine(few, weights="dense"), greedy("a", PROMPT, 8))["a"]
    assert Reference(same).agrees(PROMPT, got, 1e-2)
