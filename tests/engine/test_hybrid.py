"""Models with recurrent layers: states kept at the ends of blocks, rolled back behind rejected draft tokens, and cut by
heads. Every engine gives the tokens of one that does none of it."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from penstock.engine.core import Engine
from penstock.errors import ConfigError
from tests.engine.harness import assert_idle, generate, greedy, make_engine
from tests.engine.parallel.threads import threaded_engine
from tests.engine.tiny import write_checkpoint

PROMPTS = {f"r{n}": [random.Random(n).randrange(199) for _ in range(n)] for n in (3, 33, 64, 150)}
COUNT = 24


MORE: list[dict[str, Any]] = [{"kept_states": 2, "max_running": 2}, {"prefix_cache": False}]
OTHERS = (
    "granite4-hybrid",
    "granite4-hybrid-dense",
    "falcon-h1",
    "nemotron-h",
    "nemotron-h-experts",
    "mamba2",
    "lfm2",
    "lfm2-moe",
    "deepseek-v4",
    "kimi-linear",
    "kimi-linear-groups",
    "qwen4-exp",
    "glm5-next",
    "glm5-next-shared",
)


@pytest.fixture(scope="module", params=["qwen3-next", *(pytest.param(name, marks=pytest.mark.slow) for name in OTHERS)])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(request.param, tmp_path_factory.mktemp("hybrid"))


@pytest.fixture(scope="module")
def expected(folder: Path) -> dict[str, list[int]]:
    engine = make_engine(folder, prefix_cache=False)
    tokens: dict[str, list[int]] = {}
    for name, prompt in PROMPTS.items():
        tokens |= generate(engine, greedy(name, prompt, COUNT))
    return tokens


def run(engine: Engine, suffix: str = "") -> dict[str, list[int]]:
    found = generate(engine, *(greedy(name + suffix, prompt, COUNT) for name, prompt in PROMPTS.items()))
    return {name.removesuffix(suffix): tokens for name, tokens in found.items()}


def test_a_conversation_starts_behind_its_last_prompt(folder: Path, expected: dict[str, list[int]]) -> None:
    engine = make_engine(folder, state_interval=32)
    assert run(engine) == expected
    turn = PROMPTS["r150"] + expected["r150"] + [1, 2, 3]
    hits = engine.load_snapshot().prefix_hit_tokens
    alone = generate(make_engine(folder, prefix_cache=False), greedy("next", turn, COUNT))
    assert generate(engine, greedy("next", turn, COUNT)) == alone
    # Every 32 tokens a state was kept, while tokens were generated too.
    assert engine.load_snapshot().prefix_hit_tokens - hits == 160
    assert_idle(engine)


def test_a_common_beginning_is_found_from_the_third_prompt_on(folder: Path) -> None:
    """The second prompt shows where the first was left, and a state is kept there."""
    engine = make_engine(folder, state_interval=1024)
    common = PROMPTS["r64"]
    hits = []
    for last in range(3):
        generate(engine, greedy(f"p{last}", [*common, *([last] * 40)], 2))
        hits.append(engine.load_snapshot().prefix_hit_tokens)
    assert hits == [0, 0, 64]


@pytest.mark.slow
def test_few_slots_keep_what_they_can(folder: Path, expected: dict[str, list[int]]) -> None:
    for kept in (0, 1, 3):
        engine = make_engine(folder, state_interval=16, kept_states=kept, max_running=3, token_budget=40)
        assert run(engine) == expected == run(engine, "-again")
        assert_idle(engine)


def test_preempted_sequences_start_from_their_last_state(folder: Path, expected: dict[str, list[int]]) -> None:
    engine = make_engine(folder, state_interval=16, num_blocks=14, token_budget=40)
    assert run(engine) == expected
    assert engine.load_snapshot().preemptions > 0
    assert_idle(engine)


@pytest.mark.parametrize("settings", [{}, *(pytest.param(more, marks=pytest.mark.slow) for more in MORE)], ids=str)
def test_rejected_draft_tokens_leave_no_trace(
    folder: Path, expected: dict[str, list[int]], settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine(folder, speculation="ngram", state_interval=16, **settings)
    assert engine.speculation is not None
    chance = random.Random(3)

    def propose(decoding: list[Any]) -> dict[Any, list[int]]:
        """Some right tokens, then wrong ones."""
        drafts = {}
        for seq in decoding:
            done = seq.output_len
            right = expected[seq.id.removesuffix("-again")][done : done + chance.randrange(4)]
            drafts[seq] = [*right, *(chance.randrange(199) for _ in range(chance.randrange(3)))] or [0]
        return drafts

    monkeypatch.setattr(engine.speculation, "propose", propose)
    monkeypatch.setattr(engine.speculation, "plan", lambda decoding: dict.fromkeys(decoding, 1))
    assert run(engine) == expected == run(engine, "-again")
    load = engine.load_snapshot()
    assert 0 < load.accepted_tokens < load.draft_tokens
    assert_idle(engine)


@pytest.mark.slow
def test_states_leave_for_host_memory_with_their_blocks(folder: Path, expected: dict[str, list[int]]) -> None:
    settings = {"state_interval": 32, "num_blocks": 14, "kept_states": 2, "max_running": 2, "host_idle_s": 0.0}
    engine = make_engine(folder, host_memory=8 << 20, **settings)
    assert run(engine) == expected
    others = {f"other{n}": [random.Random(n).randrange(199) for _ in range(100)] for n in range(200, 204)}
    generate(engine, *(greedy(name, prompt, 4) for name, prompt in others.items()))
    before = engine.load_snapshot().prefix_hit_tokens
    assert run(engine, "-again") == expected
    load = engine.load_snapshot()
    assert load.prefix_hit_tokens - before >= 144 and load.host_hit_tokens > 0
    states = engine.scheduler.allocator.states
    assert states is not None and states.pool.host is not None and states.pool.host.restored > 0
    assert_idle(engine)
    with threaded_engine(folder, 2, 1, host_memory=8 << 20, **settings) as ranks:
        assert run(ranks) == expected
        generate(ranks, *(greedy(name, prompt, 4) for name, prompt in others.items()))
        assert run(ranks, "-again") == expected


@pytest.mark.parametrize(
    ("tensor", "pipeline"), [(2, 1), *(pytest.param(n, 2, marks=pytest.mark.slow) for n in (1, 2))]
)
def test_ranks_share_heads_and_layers(folder: Path, expected: dict[str, list[int]], tensor: int, pipeline: int) -> None:
    with threaded_engine(folder, tensor, pipeline, state_interval=32, token_budget=64) as engine:
        assert run(engine) == expected == run(engine, "-again")
        assert engine.load_snapshot().prefix_hit_tokens > 0


@pytest.mark.slow
def test_deterministic(folder: Path, expected: dict[str, list[int]]) -> None:
    engine = make_engine(folder, deterministic=True, token_budget=50)
    assert run(engine) == expected


def test_experts_stored_as_stacks_in_a_model_that_also_sees(tmp_path: Path) -> None:
    """As Qwen3.5 is published: the decoder lies one level down, and a layer's experts are two tensors."""
    folder = write_checkpoint("qwen3.5-moe", tmp_path)
    wanted = generate(make_engine(folder), greedy("a", PROMPTS["r64"], 10))
    text, tensors = json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")
    config = {"model_type": "qwen3_5_moe", "text_config": text, "vision_config": {}, "image_token_id": 7}
    (folder / "config.json").write_text(json.dumps(config))
    for layer in range(text["num_hidden_layers"]):
        at = f"model.layers.{layer}.mlp.experts."
        each = [
            {part: tensors.pop(f"{at}{n}.{part}_proj.weight") for part in ("gate", "up", "down")}
            for n in range(text["num_experts"])
        ]
        tensors[f"{at}gate_up_proj"] = torch.stack([torch.cat((one["gate"], one["up"])) for one in each])
        tensors[f"{at}down_proj"] = torch.stack([one["down"] for one in each])
    renamed = {name.replace("model.", "model.language_model.", 1): tensor for name, tensor in tensors.items()}
    save_file(renamed, folder / "model.safetensors")
    assert generate(make_engine(folder), greedy("a", PROMPTS["r64"], 10)) == wanted


def test_what_cannot_be_is_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match="state_interval: 24 is not a multiple of block_size 16"):
        make_engine(folder, state_interval=24)
