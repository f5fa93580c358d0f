"""Models that forget: blocks behind the window are freed while a sequence runs, and its tokens stay the reference's."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import torch

from penstock.engine.core import Engine
from tests.engine.harness import assert_idle, collect, drain, generate, greedy, make_engine
from tests.engine.tiny import Reference, write_checkpoint

WINDOW = 40


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint("mistral-window", tmp_path_factory.mktemp("mistral"))


@pytest.fixture(scope="module")
def reference(folder: Path) -> Reference:
    return Reference(folder)


def tokens(count: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(199) for _ in range(count)]


def most_used(engine: Engine) -> int:
    """Step until idle; the most blocks that were held at once."""
    most = 0
    while engine.has_work:
        engine.step()
        most = max(most, engine.load_snapshot().used_blocks)
    return most


@pytest.mark.slow
def test_a_long_generation_holds_a_window_of_blocks(folder: Path, reference: Reference) -> None:
    engine = make_engine(folder, num_blocks=12, token_budget=32)
    assert engine.info.max_model_len == 1024, "twelve blocks hold 192 tokens; a window of 40 needs no more"
    got = generate(engine, greedy("a", tokens(9), 300))["a"]
    assert reference.agrees(tokens(9), got)
    engine.submit(greedy("b", tokens(9, seed=1), 300))
    assert most_used(engine) <= WINDOW // 16 + 2
    assert_idle(engine)


def test_a_long_prompt_passes_through_a_small_pool(folder: Path, reference: Reference) -> None:
    prompt = tokens(900)
    engine = make_engine(folder, num_blocks=9, token_budget=32)
    engine.submit(greedy("a", prompt, 20))
    deltas = drain(engine)
    assert reference.agrees(prompt, collect(deltas)["a"])
    assert_idle(engine)


@pytest.mark.slow
def test_many_sequences_share_what_they_no_longer_need(folder: Path) -> None:
    prompts = {f"r{i}": tokens(30 + 50 * i, seed=i) for i in range(6)}
    alone = {name: generate(make_engine(folder), greedy(name, prompt, 80))[name] for name, prompt in prompts.items()}
    engine = make_engine(folder, num_blocks=24, token_budget=64)
    assert generate(engine, *(greedy(name, prompt, 80) for name, prompt in prompts.items())) == alone
    assert_idle(engine)


@pytest.mark.parametrize("settings", [{}, {"host_memory": 4 << 20}], ids=["device", "host"])
def test_a_conversation_goes_on_although_its_beginning_is_gone(folder: Path, settings: dict[str, int]) -> None:
    prompt = tokens(300)
    engine = make_engine(folder, num_blocks=10, token_budget=32, **settings)
    answer = generate(engine, greedy("a", prompt, 40))["a"]
    pool, names = engine.scheduler.allocator.pool, engine.scheduler.allocator
    assert pool.cached < len(prompt) // names.block_size, "the pool is too small to have kept the beginning"
    longer = prompt + answer + tokens(7, seed=9)
    engine.submit(greedy("b", longer, 10))
    deltas = drain(engine)
    assert deltas[0].cached_tokens is not None and deltas[0].cached_tokens >= 320
    assert collect(deltas)["b"] == generate(make_engine(folder, prefix_cache=False), greedy("b", longer, 10))["b"]
    assert_idle(engine)


def test_a_prefix_that_lacks_part_of_its_window_is_not_used(folder: Path) -> None:
    engine = make_engine(folder, num_blocks=60)
    prompt = tokens(200)
    generate(engine, greedy("a", prompt, 2))
    allocator = engine.scheduler.allocator
    sequence = engine.scheduler.add(greedy("b", prompt, 2), 0.0)
    found = allocator.match(sequence)
    assert len(found) == 12 and [hit.block == 0 for hit in found] == [True] * 9 + [False] * 3
    lost = found[10].block  # one of the three that the window needs
    assert lost is not None
    allocator.pool._block_of.pop(allocator.pool._name_of.pop(lost))
    allocator.pool._cached.pop(lost)
    allocator.pool._empty.append(lost)
    shorter = allocator.match(sequence)
    assert len(shorter) == 10, "everything up to the gap"
    expected = generate(make_engine(folder), greedy("b", prompt, 2))["b"]
    assert collect(drain(engine))["b"] == expected
    assert_idle(engine)


def test_one_layer_that_sees_everything_keeps_everything(tmp_path: Path) -> None:
    folder = write_checkpoint("qwen2-window", tmp_path)
    engine = make_engine(folder, num_blocks=12)
    assert engine.scheduler.allocator.window is None
    assert engine.info.max_model_len == 12 * 16


@pytest.mark.slow
def test_128k_tokens_in_the_memory_of_a_window(tmp_path: Path) -> None:
    """Over three layers a token hears of the 3 x 39 tokens before it: a reference of the last 400 is exact."""
    folder = write_checkpoint("mistral-window", tmp_path, spread=0.5)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 131072}))
    prompt = tokens(131072 - 20)
    engine = make_engine(folder, num_blocks=80, token_budget=1024)
    assert engine.info.max_model_len == 131072
    engine.submit(greedy("a", prompt, 20, logprobs=0))
    deltas = drain(engine)
    output = collect(deltas)["a"]
    assert len(output) == 20 and deltas[-1].finish_reason == "length"
    assert_idle(engine)
    end = (prompt + output)[-400:]
    with torch.inference_mode():
        at = torch.arange(131072 - 400, 131072).unsqueeze(0)
        logits = Reference(folder).model(torch.tensor([end]), position_ids=at).logits[0]
    expected = logits[-21:-1].log_softmax(-1)
    got = torch.tensor([delta.logprobs[0].logprob for delta in deltas if delta.logprobs])
    torch.testing.assert_close(got, expected.gather(1, torch.tensor(output).unsqueeze(1))[:, 0], rtol=0, atol=2e-3)
