"""Models of the `transformers` library whose layers keep states: kept at the ends of blocks, rolled back behind
rejected draft tokens, moved to the host and to other engines. Every engine gives the tokens of one that does none of
it, and those are the library's."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.engine.adapters.spec import AdapterSpec
from penstock.engine.core import Engine
from penstock.engine.models.families import FAMILIES
from penstock.engine.models.transformers import memory
from penstock.engine.request import Request, SamplingParams
from penstock.errors import CheckpointError, ConfigError
from tests.engine.foreign import write_foreign
from tests.engine.harness import assert_idle, generate, greedy, make_engine
from tests.engine.kv.test_state_exchange import hand_over, text
from tests.engine.models.test_transformers import prompt_of, write_lora
from tests.engine.parallel.threads import threaded_engine
from tests.engine.tiny import Reference

PROMPTS = {f"r{n}": [random.Random(n).randrange(3, 199) for _ in range(n)] for n in (3, 33, 64, 150)}
COUNT = 16
QUICK = "zaya"
assert QUICK not in FAMILIES, "a family took it over; choose another"
OTHERS = ("lfm2", "jamba", "zamba2", "olmo_hybrid", "minimax", "recurrent_gemma", "mamba", "rwkv")
"""The first has attention and a state in each layer. The others: convolutions alone; continued token by token; Mamba-2
and shared attention; delta nets; a cache of its own; states in modules; no attention, the last with one tensor for all
layers."""


@pytest.fixture(
    scope="module",
    params=[QUICK, *(pytest.param(name, marks=pytest.mark.slow) for name in OTHERS if name not in FAMILIES)],
)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_foreign(request.param, tmp_path_factory.mktemp("states"))


@pytest.fixture(scope="module")
def expected(folder: Path) -> dict[str, list[int]]:
    engine, reference = make_engine(folder, prefix_cache=False), Reference(folder)
    tokens: dict[str, list[int]] = {}
    for name, prompt in PROMPTS.items():
        tokens |= generate(engine, greedy(name, prompt, COUNT))
        assert reference.agrees(prompt, tokens[name], 1e-3), name
    return tokens


def run(engine: Engine, suffix: str = "") -> dict[str, list[int]]:
    found = generate(engine, *(greedy(name + suffix, prompt, COUNT) for name, prompt in PROMPTS.items()))
    return {name.removesuffix(suffix): tokens for name, tokens in found.items()}


@pytest.mark.slow
def test_a_conversation_starts_behind_its_last_prompt(folder: Path, expected: dict[str, list[int]]) -> None:
    engine = make_engine(folder, state_interval=32, token_budget=40)
    assert run(engine) == expected
    turn = PROMPTS["r150"] + expected["r150"] + [1, 2, 3]
    hits = engine.load_snapshot().prefix_hit_tokens
    found = generate(engine, greedy("next", turn, 6))["next"]
    assert Reference(folder).agrees(turn, found, 1e-3)
    assert engine.load_snapshot().prefix_hit_tokens - hits == 160
    assert_idle(engine)


@pytest.mark.slow
def test_rejected_draft_tokens_leave_no_trace(
    folder: Path, expected: dict[str, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine(folder, speculation="ngram", state_interval=16)
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
    assert run(engine, "-again") == expected
    states = engine.scheduler.allocator.states
    assert states is not None and states.pool.host is not None and states.pool.host.restored > 0
    assert_idle(engine)


@pytest.mark.slow
def test_another_engine_goes_on_behind_a_state(folder: Path) -> None:
    giver, taker = (make_engine(folder, role=role) for role in ("prefill", "decode"))
    assert giver.info.kv_format == taker.info.kv_format != ""
    hand_over(giver, taker, text(1, 140))


@pytest.mark.slow
def test_deterministic(folder: Path, expected: dict[str, list[int]]) -> None:
    engine = make_engine(folder, deterministic=True, token_budget=50)
    assert run(engine) == expected
    tokens = [generate(engine, greedy(f"{i}", PROMPTS["r64"], 4, logprobs=2)) for i in range(2)]
    assert tokens[0]["0"] == tokens[1]["1"] == expected["r64"][:4]


@pytest.mark.slow
@pytest.mark.parametrize("model_type", ["zaya", "jamba", "mamba"])  # others' random weights magnify any rounding
@pytest.mark.parametrize("settings", [{"kv_dtype": "int8"}, {"kv_dtype": "fp8"}, {"weights": "int8"}], ids=str)
def test_few_bits_stay_close(model_type: str, settings: dict[str, Any], tmp_path: Path) -> None:
    folder, prompt = write_foreign(model_type, tmp_path), PROMPTS["r64"]
    reference, tokens = Reference(folder), generate(make_engine(folder, **settings), greedy("r", prompt, 1))["r"]
    spread = float(reference.logprobs(prompt)[-1].std())
    assert float(reference.margins(prompt, tokens).max()) < spread


@pytest.mark.slow
@pytest.mark.parametrize("model_type", ["zaya", "jamba", "mamba"])
def test_16_bits(model_type: str, tmp_path: Path) -> None:
    """States have the types that the library gives them."""
    folder, prompt = write_foreign(model_type, tmp_path), PROMPTS["r64"]
    reference = Reference(folder)
    tokens = generate(make_engine(folder, dtype="bfloat16", token_budget=40), greedy("r", prompt, 4))["r"]
    spread = float(reference.logprobs(prompt)[-1].std())
    assert float(reference.margins(prompt, tokens).median()) < spread


@pytest.mark.slow
def test_adapters_change_the_linears_of_all_layers(tmp_path: Path) -> None:
    base = write_foreign("olmo_hybrid", tmp_path / "base")
    adapter, folder = write_lora(tmp_path, base, ("mlp.up_proj", "mlp.down_proj"))
    merged, plain = Reference(folder), Reference(base)
    engine = make_engine(base, adapters=(AdapterSpec("tuned", str(adapter)),), token_budget=40)
    rng = random.Random(2)
    asked = {f"r{i}": (prompt_of(rng, 9 + 13 * i), "tuned" if i % 2 else "") for i in range(5)}
    params = SamplingParams(max_tokens=10, temperature=0.0)
    got = generate(engine, *(Request(name, prompt, params, adapter=chosen) for name, (prompt, chosen) in asked.items()))
    for name, (prompt, chosen) in asked.items():
        assert (merged if chosen else plain).agrees(prompt, got[name], 2e-2), name
    assert not all(plain.agrees(prompt, got[name], 2e-2) for name, (prompt, _) in asked.items())


@pytest.mark.slow
@pytest.mark.parametrize("model_type", ["jamba", "zamba"])
def test_what_begins_anew_with_several_tokens_is_noticed(
    model_type: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the comparison too, should asking which states are read not show it."""
    folder, prompt = write_foreign(model_type, tmp_path), PROMPTS["r64"]
    monkeypatch.setattr(memory.Memory, "continues", lambda *_: True)
    tokens = generate(make_engine(folder, token_budget=24), greedy("r", prompt, 6))["r"]
    assert Reference(folder).agrees(prompt, tokens, 1e-3)


@pytest.mark.slow
def test_a_state_that_is_not_found_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would go from one sequence to the next."""
    found = memory._module_tensors
    monkeypatch.setattr(
        memory, "_module_tensors", lambda base: (one for one in found(base) if one[0][1] != "recurrent_states")
    )
    with pytest.raises(CheckpointError, match="its logits differ"):
        make_engine(write_foreign("recurrent_gemma", tmp_path))


@pytest.mark.slow
def test_a_state_beside_keys_and_values_of_every_layer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the model does not say that it keeps one, the comparison shows it."""
    import transformers
    from transformers import AutoModelForCausalLM

    from tests.engine.tiny import COMMON

    monkeypatch.delitem(FAMILIES, "falcon_h1")  # as if it were not run natively
    sizes = {"mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8}
    torch.manual_seed(0)
    config = transformers.FalconH1Config(**COMMON, **sizes)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(tmp_path)
    prompt = PROMPTS["r64"]
    tokens = generate(make_engine(tmp_path, token_budget=24), greedy("r", prompt, 6))["r"]
    assert Reference(tmp_path).agrees(prompt, tokens, 1e-3)
    for name in ("load", "passes"):
        monkeypatch.setattr(f"penstock.engine.models.transformers.{name}.keeps_states", lambda model: False)
    with pytest.raises(CheckpointError, match="cannot be run through transformers"):
        make_engine(tmp_path)


@pytest.mark.parametrize("grid", [(2, 1), pytest.param((1, 2), marks=pytest.mark.slow)])
def test_states_are_not_divided(grid: tuple[int, int], tmp_path: Path) -> None:
    folder = write_foreign(QUICK, tmp_path)
    with pytest.raises(ConfigError, match="not available for zaya models"), threaded_engine(folder, *grid):
        pass
