"""Steps of one token with the products between two attentions in one launch: the tokens of the usual path."""

from __future__ import annotations

import dataclasses
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from penstock.engine.adapters.spec import AdapterSpec
from penstock.engine.backends.interface import AttentionBatch
from penstock.engine.core import Engine
from penstock.engine.kv.cache import KVCache
from penstock.engine.loading.random_checkpoint import RandomCheckpoint
from penstock.engine.models.boundary import boundaries_of
from penstock.engine.models.build import build_decoder
from penstock.engine.models.decoder import Decoder
from penstock.engine.models.families import read_config
from penstock.engine.models.llama import LlamaDecoder
from penstock.engine.models.tap import Tap
from penstock.engine.request import Request, SamplingParams
from penstock.engine.runner.eager import EagerExecutor
from penstock.engine.sleep.memory import walk
from tests.engine.adapters.files import write_adapter
from tests.engine.chained import Chain, ChainBackend, ChainOps, use_chains
from tests.engine.harness import assert_idle, generate, greedy, make_engine
from tests.engine.speculative.heads import write_original
from tests.engine.tiny import write_checkpoint

PROMPT = [i * 7 % 199 for i in range(50)]
FAMILIES = ["llama-gqa", "llama-mqa-tied", "llama-mha-bias", "mistral-window", "qwen2-bias", "qwen3-qknorm", "smollm3"]


def _decoder(engine: Engine) -> tuple[LlamaDecoder, KVCache]:
    executor = engine.runner.executor
    assert isinstance(executor, EagerExecutor)
    decoder = executor._decoder
    assert isinstance(decoder, LlamaDecoder)
    return decoder, executor._kv


@pytest.mark.parametrize("family", FAMILIES)
def test_families_have_the_same_tokens(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sequence alone, and others beside it for a part of the time."""
    folder = write_checkpoint(family, tmp_path)
    requests = [greedy("alone", PROMPT, 24), greedy("short", PROMPT[:1], 6), greedy("other", PROMPT[5:], 4)]
    expected = generate(make_engine(folder, num_blocks=40), *requests)
    ops = use_chains(monkeypatch)
    engine = make_engine(folder, num_blocks=40)
    assert generate(engine, *requests) == expected
    _expect_chains(ops, 10)
    assert_idle(engine)


def _expect_chains(ops: ChainOps, steps: int) -> None:
    """Two whole ones and a shorter one behind the last of three layers, in each step of one token."""
    found = Counter(ops.lengths)
    assert found[4] == 2 * found[3] and found[3] >= steps and set(found) == {3, 4}


@pytest.mark.parametrize(("longest", "few_bits"), [(3, False), (4, True), (3, True)])
def test_shorter_chains_and_weights_with_scales(
    longest: int, few_bits: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_checkpoint("qwen2-bias", tmp_path)
    request = greedy("a", PROMPT, 16)
    without = use_chains(monkeypatch, 0, few_bits)
    expected = generate(make_engine(folder, num_blocks=20), request)
    ops = use_chains(monkeypatch, longest, few_bits)
    assert generate(make_engine(folder, num_blocks=20), request) == expected
    assert not without.lengths and max(ops.lengths) == longest


def test_a_chain_is_cut_where_a_product_cannot_be_linked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_chains(monkeypatch)
    decoder, kv = _decoder(make_engine(write_checkpoint("llama-gqa", tmp_path), num_blocks=8))
    first, second, third = decoder.layers
    mixer: Any = dataclasses.replace(second.mixer, qkv=_Opaque(second.mixer.qkv))  # type: ignore[type-var, attr-defined]
    feed_forward: Any = dataclasses.replace(third.feed_forward, down=_Opaque(third.feed_forward.down))  # type: ignore[type-var, attr-defined]
    cut = dataclasses.replace(
        decoder,
        layers=[
            first,
            dataclasses.replace(second, mixer=mixer),
            dataclasses.replace(third, feed_forward=feed_forward),
        ],
    )
    assert [_length(boundary.chain) for boundary in cut.boundaries] == [3, 4, 0]
    torch.testing.assert_close(_step(cut, kv), _step(dataclasses.replace(decoder, chains=False), kv))
    none = dataclasses.replace(decoder, layers=[cut.layers[2]])
    assert not none.chained


class _Opaque:
    """A linear that takes the fused calls, and is no link."""

    def __init__(self, inner: Any) -> None:
        self.inner, self.weight_bytes, self.fused = inner, inner.weight_bytes, inner.fused


def _length(chain: Any) -> int:
    return len(chain.links) if isinstance(chain, Chain) else 0


def _step(decoder: Decoder, kv: KVCache) -> torch.Tensor:
    batch = AttentionBatch.of_one(1, kv.block_size, torch.device("cpu"))
    return decoder.forward(torch.tensor([11]), batch, kv)


def test_steps_with_adapters_and_without(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_checkpoint("llama-gqa", tmp_path / "base")
    adapter = AdapterSpec("a", str(write_adapter(tmp_path / "a", folder)))
    requests = [
        Request(name, PROMPT, SamplingParams(max_tokens=10, temperature=0.0), adapter=name.strip("-"))
        for name in ("a", "-")
    ]
    expected = [generate(make_engine(folder, num_blocks=20, adapters=(adapter,)), each) for each in requests]
    ops = use_chains(monkeypatch)
    engine = make_engine(folder, num_blocks=20, adapters=(adapter,))
    ops.lengths.clear()
    assert generate(engine, requests[0]) == expected[0] and not ops.lengths
    assert generate(engine, requests[1]) == expected[1] and ops.lengths


@pytest.mark.parametrize("speculation", ["eagle3", "draft", "ngram"])
def test_drafters_and_their_targets(speculation: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An EAGLE-3 head reads the stream between layers; a draft model takes single tokens itself."""
    folder = write_checkpoint("llama-gqa", tmp_path / "base", spread=0.3, num_hidden_layers=4)
    settings: dict[str, Any] = {"speculation": speculation, "num_blocks": 40}
    if speculation == "eagle3":
        settings["draft_model"] = str(write_original(tmp_path / "head"))
    elif speculation == "draft":
        settings["draft_model"] = str(write_checkpoint("qwen3-qknorm", tmp_path / "draft", spread=0.3))
    expected = generate(make_engine(folder, num_blocks=40), greedy("a", PROMPT, 24))
    ops = use_chains(monkeypatch)
    engine = make_engine(folder, **settings)
    assert generate(engine, greedy("a", PROMPT, 24)) == expected
    assert ops.lengths or speculation == "eagle3"  # of which every step has drafts


def test_streams_that_are_read_between_layers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_chains(monkeypatch)
    decoder, kv = _decoder(make_engine(write_checkpoint("llama-gqa", tmp_path), num_blocks=8))
    batch = AttentionBatch.of_one(1, kv.block_size, torch.device("cpu"))
    tap = Tap(0, layers=(0, 1, 2, 3))
    chained, usual = (tap.on(one) for one in (decoder, dataclasses.replace(decoder, chains=False)))
    assert all(part.chained for part in chained.parts) and not any(part.chained for part in usual.parts)
    found, expected = (one.run_tapped(one.embed(torch.tensor([11])), batch, kv) for one in (chained, usual))
    torch.testing.assert_close(found, expected)


def test_a_decoder_with_other_layers_has_chains_of_those(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that stand for all before a step is captured, or one that is built ahead."""
    use_chains(monkeypatch)
    decoder, _ = _decoder(make_engine(write_checkpoint("llama-gqa", tmp_path, num_hidden_layers=6), num_blocks=8))
    kept = [decoder.layers[index] for index in (0, 1, 5)]
    few = dataclasses.replace(decoder, layers=kept)
    assert [id(boundary.layer) for boundary in few.boundaries] == [id(layer) for layer in kept]
    assert [id(boundary.after) for boundary in few.boundaries[:-1]] == [id(layer) for layer in kept[1:]]
    assert few.boundaries[-1].after is None
    assert not dataclasses.replace(decoder, fused_up_to=0).chained


def test_chains_have_the_tensors_of_the_layers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine that sleeps moves the memory under them, and copies would stay behind."""
    use_chains(monkeypatch)
    decoder, _ = _decoder(make_engine(write_checkpoint("llama-gqa", tmp_path), num_blocks=8))
    held = {id(item) for layer in decoder.layers for linear in layer.linears for item in vars(linear).values()}
    chains: list[Any] = [boundary.chain for boundary in decoder.boundaries]
    assert len(chains) == 3 and all(id(link.weight) in held for chain in chains for link in chain.links)
    assert {id(item) for item in walk(decoder)} >= {id(chain) for chain in chains}


@pytest.mark.parametrize("family", ["gemma2", "qwen3-moe", "olmo2"])
def test_other_layers_have_none(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_checkpoint(family, tmp_path)
    expected = generate(make_engine(folder, num_blocks=20), greedy("a", PROMPT, 8))
    ops = use_chains(monkeypatch)
    assert generate(make_engine(folder, num_blocks=20), greedy("a", PROMPT, 8)) == expected
    assert not ops.lengths


def test_one_layer_of_experts_is_enough_for_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What they add to the residual stream need not be in place, which boundaries rely on."""
    ops = use_chains(monkeypatch)
    decoder, _ = _decoder(make_engine(write_checkpoint("llama-gqa", tmp_path), num_blocks=8))
    first, second, third = decoder.layers
    experts: Any = SimpleNamespace(fuses=True, fused=second.feed_forward.forward)
    assert boundaries_of([first, second, third], ops, 1e-6)
    assert not boundaries_of([first, dataclasses.replace(second, feed_forward=experts), third], ops, 1e-6)


def test_ranks_have_none() -> None:
    """Those of one device would hold each other's places."""
    config = {
        "model_type": "llama", "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 64, "rms_norm_eps": 1e-6,
    }  # fmt: skip
    weights = RandomCheckpoint(config, dtype=torch.float32)
    alone, rank = (
        build_decoder(
            weights, read_config(config), ChainBackend(4, few_bits=False), dtype=torch.float32, max_positions=64,
            fused_up_to=8, head_rows=rows,
        )
        for rows in (None, 64)
    )  # fmt: skip
    assert alone.chained and not rank.chained and rank.fused_up_to == 8
