"""The interfaces carry more than attention: a hybrid of attention and linear-attention layers, known only here, runs
through the real builder, cache, memory plan, scheduler and runner, and gives the tokens of a plain implementation."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from penstock.engine.backends.cpu.recorder import NotRecordableError
from penstock.engine.backends.interface import ActivationOps, AttentionBatch
from penstock.engine.config import EngineConfig
from penstock.engine.core import Engine
from penstock.engine.kv.cache import CacheShape, KVCache
from penstock.engine.kv.kinds import CacheTensors, PagedKV
from penstock.engine.loading.random_checkpoint import RandomCheckpoint
from penstock.engine.models.architecture import Architecture, LayerContext
from penstock.engine.models.decoder import DecoderLayer
from penstock.engine.models.families import FAMILIES, Family
from penstock.engine.models.families.family import GGUFFormat
from penstock.engine.models.layers.linear import Linear
from penstock.engine.models.llama import LlamaDecoder, compose_feed_forward
from penstock.engine.models.llama import compose_layer as attention_layer
from penstock.errors import ConfigError
from tests.engine.harness import assert_idle, generate, greedy

HEADS, DIM = 4, 16
CONFIG: dict[str, Any] = {
    "model_type": "hybrid",
    "vocab_size": 199,
    "hidden_size": HEADS * DIM,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": HEADS,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-6,
}


@dataclass(frozen=True, slots=True)
class MatrixState:
    """A cache kind: one matrix per head and sequence, nothing per token."""

    heads: int
    dim: int

    @property
    def block_bytes(self) -> int:
        return 0

    @property
    def state_bytes(self) -> int:
        return 4 * self.heads * self.dim * self.dim

    def allocate(self, layers: int, num_blocks: int, num_states: int, device: torch.device) -> CacheTensors:
        states = torch.zeros(layers, 1, num_states, self.heads, self.dim, self.dim, device=device)
        return CacheTensors(list(states[:, 0]), states=[states])


@dataclass(frozen=True, slots=True)
class LinearAttention:
    """A token mixer: S = decay * S + k v^T, o = q S, for every head."""

    ops: ActivationOps
    qkv: Linear
    output: Linear
    decay: Tensor

    @property
    def linears(self) -> tuple[Linear, ...]:
        return self.qkv, self.output

    @property
    def weight_bytes(self) -> int:
        return self.qkv.weight_bytes + self.output.weight_bytes

    def cache_kind(self, block_size: int, dtype: torch.dtype) -> MatrixState:
        return MatrixState(HEADS, DIM)

    def forward(self, x: Any, batch: AttentionBatch, cache: Tensor) -> Tensor:
        q, k, v = self.qkv(x).float().view(-1, 3, HEADS, DIM).unbind(1)
        states = batch.states
        if states is None:
            raise NotRecordableError("needs states")
        out = torch.empty_like(q)
        for t, (first, read, write) in enumerate(zip(states.first, states.reads, states.writes, strict=True)):
            if t == int(first):
                state = cache[read].clone() if read else torch.zeros_like(cache[0])
            state = self.decay * state + k[t].unsqueeze(-1) * v[t].unsqueeze(-2)
            out[t] = (q[t].unsqueeze(-2) @ state).squeeze(-2)
            if write:
                cache[write] = state
        return self.output(out.flatten(1))


def hybrid_layer(context: LayerContext) -> DecoderLayer:
    """Attention in every second layer, linear attention in the others."""
    if context.index % 2:
        return attention_layer(context)
    read, hidden, at = context.read, context.config.hidden_size, f"{context.prefix}linear_attn."
    return DecoderLayer(
        mixer_norm=read.norm(f"{context.prefix}input_layernorm", hidden),
        mixer=LinearAttention(
            context.inner,
            read.linear(at, {"qkv_proj": 3 * HEADS * DIM}, hidden),
            read.linear(at, {"o_proj": hidden}, HEADS * DIM),
            torch.sigmoid(2 + read.get(f"{at}decay", HEADS, dtype=torch.float32)).view(-1, 1, 1),
        ),
        feed_forward_norm=read.norm(f"{context.prefix}post_attention_layernorm", hidden),
        feed_forward=compose_feed_forward(context),
    )


def stateful_layer(context: LayerContext) -> DecoderLayer:
    """Linear attention everywhere."""
    return hybrid_layer(dataclasses.replace(context, index=0))


@pytest.fixture(autouse=True)
def families(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, compose in (("hybrid", hybrid_layer), ("stateful", stateful_layer)):
        family = Family(
            model_type=name,
            class_name="",
            gguf=GGUFFormat(architectures=()),
            architecture=lambda compose=compose: Architecture(LlamaDecoder, compose),
        )
        monkeypatch.setitem(FAMILIES, name, family)


def checkpoint(family: str = "hybrid") -> RandomCheckpoint:
    return RandomCheckpoint({**CONFIG, "model_type": family}, seed=3, dtype=torch.float32, embedding_scale=1.0)


def engine_of(model: RandomCheckpoint, **settings: Any) -> Engine:
    settings = {"device": "cpu", "dtype": "float32", "threads": 2, "max_running": 6, **settings}
    return Engine.load(EngineConfig(model="hybrid", **settings), checkpoint=model)


class PlainModel:
    """The same model over one whole sequence, layer by layer and without any cache."""

    def __init__(self, weights: RandomCheckpoint, linear_everywhere: bool = False) -> None:
        self._weights = weights
        self._linear_everywhere = linear_everywhere

    def _get(self, name: str) -> Tensor:
        return self._weights.tensor(f"{name}.weight" if not name.endswith("decay") else name)

    def logits(self, tokens: list[int]) -> Tensor:
        x = F.embedding(torch.tensor(tokens), self._get("model.embed_tokens"))
        for index in range(CONFIG["num_hidden_layers"]):
            at = f"model.layers.{index}"
            normed = self._norm(x, f"{at}.input_layernorm")
            linear = self._linear_everywhere or index % 2 == 0
            x = x + (self._linear_attention if linear else self._attention)(normed, at)
            normed = self._norm(x, f"{at}.post_attention_layernorm")
            gate, up = (F.linear(normed, self._get(f"{at}.mlp.{name}_proj")) for name in ("gate", "up"))
            x = x + F.linear(F.silu(gate) * up, self._get(f"{at}.mlp.down_proj"))
        return F.linear(self._norm(x, "model.norm"), self._get("lm_head"))

    def _norm(self, x: Tensor, name: str) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), self._get(name), CONFIG["rms_norm_eps"])

    def _attention(self, x: Tensor, at: str) -> Tensor:
        q, k, v = (
            F.linear(x, self._get(f"{at}.self_attn.{name}_proj")).unflatten(1, (-1, DIM)).transpose(0, 1)
            for name in "qkv"
        )
        frequencies = 10000.0 ** (-torch.arange(0, DIM, 2) / DIM)
        angles = (torch.arange(len(x)).unsqueeze(1) * frequencies).repeat(1, 2)
        q, k = (
            h * angles.cos() + torch.cat((-h[..., DIM // 2 :], h[..., : DIM // 2]), -1) * angles.sin() for h in (q, k)
        )
        out = F.scaled_dot_product_attention(q, k.repeat_interleave(2, 0), v.repeat_interleave(2, 0), is_causal=True)
        return F.linear(out.transpose(0, 1).flatten(1), self._get(f"{at}.self_attn.o_proj"))

    def _linear_attention(self, x: Tensor, at: str) -> Tensor:
        q, k, v = F.linear(x, self._get(f"{at}.linear_attn.qkv_proj")).unflatten(1, (3, HEADS, DIM)).unbind(1)
        decay = torch.sigmoid(2 + self._get(f"{at}.linear_attn.decay"))
        # Closed form: a token sees an earlier one through the decay of the steps between them.
        steps = torch.arange(len(x)).unsqueeze(1) - torch.arange(len(x))
        weights = torch.where(steps >= 0, decay.view(-1, 1, 1) ** steps.clamp_min(0), 0.0)
        scores = torch.einsum("thd,shd->hts", q, k) * weights
        return F.linear(torch.einsum("hts,shd->thd", scores, v).flatten(1), self._get(f"{at}.linear_attn.o_proj"))

    def agrees(self, prompt: list[int], output: list[int]) -> bool:
        """Whether every output token has the largest logit, but for rounding."""
        logits = self.logits(prompt + output[:-1])[len(prompt) - 1 :]
        chosen = logits.gather(1, torch.tensor(output).unsqueeze(1)).squeeze(1)
        return bool(output) and float((logits.amax(-1) - chosen).max()) < 1e-3


def prompts(*lengths: int) -> Iterator[list[int]]:
    chance = random.Random(5)
    return ([chance.randrange(199) for _ in range(length)] for length in lengths)


@pytest.mark.parametrize("family", ["hybrid", pytest.param("stateful", marks=pytest.mark.slow)])
def test_tokens_equal_a_plain_implementation(family: str) -> None:
    """Alone, in a mixed batch with small chunks, and while sequences are preempted and computed again."""
    weights = checkpoint(family)
    plain = PlainModel(weights, family == "stateful")
    alone, mixed = engine_of(weights), engine_of(weights, token_budget=24, num_blocks=60)
    wanted = {f"r{len(prompt)}": prompt for prompt in prompts(1, 2, 15, 16, 17, 40, 70)}
    expected: dict[str, list[int]] = {}
    for name, prompt in wanted.items():
        expected |= generate(alone, greedy(name, prompt, 10))
        assert len(expected[name]) == 10 and plain.agrees(prompt, expected[name]), name
    assert generate(mixed, *(greedy(name, prompt, 10) for name, prompt in wanted.items())) == expected
    assert_idle(mixed)
    tight = engine_of(weights, token_budget=24, num_blocks=12)
    growing = {f"grow{len(prompt)}": prompt for prompt in prompts(5, 20, 35, 50)}
    got = generate(tight, *(greedy(name, prompt, 40) for name, prompt in growing.items()))
    assert tight.load_snapshot().preemptions > 0
    for name, prompt in growing.items():
        assert len(got[name]) == 40 and plain.agrees(prompt, got[name]), name
    assert_idle(tight)


def test_the_cache_has_what_each_kind_needs() -> None:
    engine = engine_of(checkpoint(), num_blocks=10)
    kv = engine.runner.kv
    paged, state = PagedKV(2, DIM, 16, torch.float32), MatrixState(HEADS, DIM)
    assert kv.shape.kinds == (state, paged, state, paged)
    assert kv.shape.block_bytes == 2 * paged.block_bytes and kv.shape.state_bytes == 2 * state.state_bytes
    assert [tuple(tensor.shape[:3]) for tensor in kv.tensors] == [(2, 2, 11)], "blocks of two layers"
    slots = 1 + 6 + 4 * 6  # none, one for each sequence, and those that are kept
    assert [tuple(tensor.shape[:3]) for tensor in kv.states] == [(2, 1, slots)]
    assert [type(cache) for cache in kv.layers[::2]] == [Tensor, Tensor]


def test_states_are_taken_from_the_memory_of_the_cache() -> None:
    states = 7 * 2 * MatrixState(HEADS, DIM).state_bytes
    block = 2 * PagedKV(2, DIM, 16, torch.float32).block_bytes
    assert engine_of(checkpoint(), kv_memory=states + 9 * block, kept_states=0).runner.kv.num_blocks == 1 + 9
    with pytest.raises(ConfigError, match="no room for the states of 6 sequences"):
        engine_of(checkpoint(), kv_memory=states - 1)


def test_a_prompt_that_came_before_starts_from_a_kept_state() -> None:
    engine = engine_of(checkpoint())
    (prompt,) = prompts(64)
    first = generate(engine, greedy("a", prompt, 5))["a"]
    assert generate(engine, greedy("b", prompt, 5))["b"] == first
    assert engine.load_snapshot().prefix_hit_tokens == 48, "a state was kept at the end of its last full block but one"


def test_without_kept_states_it_is_computed_again() -> None:
    """Blocks without the state behind them are of no use to another sequence."""
    engine = engine_of(checkpoint(), kept_states=0, max_running=1)
    (prompt,) = prompts(64)
    first = generate(engine, greedy("a", prompt, 5))["a"]
    assert generate(engine, greedy("b", prompt, 5))["b"] == first
    assert engine.load_snapshot().prefix_hit_tokens == 0


@pytest.mark.parametrize(
    "settings", [{"kv_dtype": "int8"}, {"weights": "int8"}, {"kv_dtype": "int8", "weights": "int4"}]
)
def test_few_bits_apply_to_every_mixer(settings: dict[str, Any]) -> None:
    engine = engine_of(checkpoint(), **settings)
    assert len(generate(engine, greedy("a", list(range(40)), 8))["a"]) == 8


def test_shapes_of_other_kinds_say_what_they_are() -> None:
    paged = CacheShape.of_paged_kv(3, 2, DIM, 16, torch.float16)
    assert str(paged) == "3 layers of 2 heads of 16 in float16, 16 tokens in a block" and paged.blocks_suffice
    mixed = CacheShape((*paged.kinds, MatrixState(HEADS, DIM)), 16)
    assert not mixed.blocks_suffice and mixed.block_bytes == paged.block_bytes
    cache = KVCache(mixed, 4, torch.device("cpu"), num_states=2)
    assert len(cache.layers) == 4 and cache.layers[3].shape == (2, HEADS, DIM, DIM)
