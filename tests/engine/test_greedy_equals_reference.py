"""Greedy tokens equal `transformers` in float32: alone, and inside a busy batch with everything switched on."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from penstock.engine.backends.reference import linear
from tests.engine.harness import assert_idle, generate, greedy, make_engine
from tests.engine.tiny import FAMILIES, Reference, write_checkpoint

LENGTHS = (1, 15, 16, 17, 130, 330)
OUTPUT, GROWTH = 5, 20
VARIANTS = {
    "llama-linear-rope", "llama-mha-bias", "qwen2-window", "qwen3-moe-some-dense", "qwen3-next-dense", "qwen3.5",
    "qwen3.5-moe", "deepseek-v2-groups", "deepseek-v3-halves", "granite-moe-shared", "granite4-experts-nope",
    "cohere-qknorm", "exaone4-full", "llama4-plain", "glm4-moe-groups", "phi3-half-rotated",
    "granite4-hybrid-dense", "falcon-h1-biased", "falcon-h1-norm-first", "bamba", "nemotron-h-biased",
    "nemotron-h-narrow-experts", "mamba2-biased", "glm-dsa",
    "seed-oss-biased", "ernie4.5-biased", "ernie4.5-moe-some-dense",
    "hunyuan-biased", "glm4-moe-lite-some-dense", "exaone-moe-full", "dots1-window", "arcee-biased",
    "lfm2-biased", "lfm2-moe-plain", "kimi-linear-groups",
    "glm-unbiased", "stablelm-parallel", "starcoder2-unbiased", "olmo-biased", "phi-gqa", "helium-biased",
    "hyperclovax-biased", "jais2-unbiased", "nemotron-biased", "apertus-biased", "hy-v3-some-dense", "youtu-halves",
    "granite-swa-biased", "granite-moe-swa-shared", "afmoe-biased",
    "stablelm-head-norms", "axk1-some-dense", "minicpm3-plain", "cohere2-moe-sigmoids",
    "gemma4-unified", "mistral4-halves", "qwen4-exp-plain", "axk2-plain", "hy-v4-some-dense", "hrm-text-scaled",
    "mimo-v2-flash-some-dense", "laguna-elements",
    "minimax-m3-shared-choice", "step3.5-biased", "mistral-large4-own",
    "muse-glimmer-other", "muse-spark-some-dense", "glm5-next-shared",
}  # fmt: skip
"""Further shapes of families that have another: they are compared in the slow suite."""
COMBINED = {
    "seed-oss", "ernie4.5", "hunyuan-moe", "minimax-m2", "glm4-moe-lite", "exaone-moe", "dots1", "solar-open", "cwm",
    "arcee", "flex-olmo", "mellum", "ernie4.5-moe", "lfm2-moe", "granite-moe", "olmoe", "qwen2-moe", "nemotron-h",
    "gemma4", "mistral4",
}  # fmt: skip
"""Families of parts that others have: in the slow suite too."""
BRIEF = (
    "glm", "stablelm", "starcoder2", "olmo", "phi", "helium", "hyperclovax", "jais2", "nemotron", "apertus", "hy-v3",
    "youtu", "granite-swa", "granite-moe-swa", "afmoe", "axk1", "minicpm3", "cohere2-moe",
    "qwen4-exp", "axk2", "hy-v4", "hrm-text", "mimo-v2-flash", "laguna",
    "minimax-m3", "step3.5", "mistral-large4", "muse-glimmer", "muse-spark", "glm5-next",
    "gemma", "granite", "ministral", "smollm3", "cohere2", "hunyuan", "glm4", "granite4", "granite4-hybrid",
    "gemma4-experts", "deepseek-v2-lite", "kimi-linear",
)  # fmt: skip
"""These too; in the quick one they are compared briefly."""
SLOW = VARIANTS | COMBINED | {*BRIEF}
CASES = [pytest.param(name, marks=pytest.mark.slow) if name in SLOW else name for name in FAMILIES]


@pytest.fixture(scope="module", params=CASES)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(request.param, tmp_path_factory.mktemp(request.param))


def test_alone_and_in_a_mixed_batch(checkpoint: Path) -> None:
    rng = random.Random(7)
    reference = Reference(checkpoint)
    prompts = {f"r{n}": [rng.randrange(199) for _ in range(n)] for n in LENGTHS}
    alone = make_engine(checkpoint, token_budget=1024, prefix_cache=False)
    expected: dict[str, list[int]] = {}
    for name, prompt in prompts.items():
        expected |= generate(alone, greedy(name, prompt, OUTPUT))
        assert len(expected[name]) == OUTPUT and reference.agrees(prompt, expected[name]), name

    # Small chunks, few rows, shared prefixes, everything at once.
    mixed = make_engine(checkpoint, token_budget=48, num_blocks=44, max_running=6, threads=2)
    requests = [greedy(name, prompt, OUTPUT) for name, prompt in prompts.items()]
    requests += [greedy(f"again-{name}", prompt, OUTPUT) for name, prompt in prompts.items()]
    rng.shuffle(requests)
    got = generate(mixed, *requests)
    for name, tokens in expected.items():
        assert got[name] == tokens
        assert got[f"again-{name}"] == tokens
    assert mixed.load_snapshot().prefix_hit_tokens > 0
    assert_idle(mixed)

    # Sequences that start small and outgrow the pool together: some must be preempted and computed again.
    growing = {f"grow-{i}": [rng.randrange(199) for _ in range(5 + 20 * i)] for i in range(5)}
    # A window lets go of blocks meanwhile, so there it takes a smaller pool.
    room = 18 if alone.scheduler.allocator.window is None else 11
    tight = make_engine(checkpoint, token_budget=48, num_blocks=room, max_running=6)
    got = generate(tight, *(greedy(name, prompt, GROWTH) for name, prompt in growing.items()))
    for name, prompt in growing.items():
        assert len(got[name]) == GROWTH and reference.agrees(prompt, got[name])
    assert tight.load_snapshot().preemptions > 0
    assert_idle(tight)


def test_packed_linears(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As those of larger models are."""
    monkeypatch.setattr(linear, "SMALL", 0)
    test_alone_and_in_a_mixed_batch(write_checkpoint("qwen2-bias", tmp_path))


@pytest.mark.parametrize("family", BRIEF)
def test_alone(family: str, tmp_path: Path) -> None:
    checkpoint, rng = write_checkpoint(family, tmp_path), random.Random(7)
    prompt = [rng.randrange(199) for _ in range(130)]
    tokens = generate(make_engine(checkpoint), greedy("a", prompt, 8))["a"]
    assert len(tokens) == 8 and Reference(checkpoint).agrees(prompt, tokens)
