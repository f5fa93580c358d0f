"""Model types that no family describes run through `transformers`, and give the tokens that it gives alone."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from penstock.engine.models.families import FAMILIES
from penstock.errors import CheckpointError, ConfigError
from tests.engine.foreign import FOREIGN, write_foreign
from tests.engine.harness import assert_idle, generate, greedy, make_engine
from tests.engine.tiny import Reference, write_checkpoint

LENGTHS = (1, 15, 16, 17, 130, 330)
OUTPUT = 12
QUICK = ("starcoder2",)


def prompt_of(rng: random.Random, length: int) -> list[int]:
    return [rng.randrange(3, 199) for _ in range(length)]


@pytest.mark.parametrize(
    "model_type", [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in FOREIGN]
)
def test_tokens_equal_the_library_alone_in_a_mixed_batch_and_preempted(model_type: str, tmp_path: Path) -> None:
    folder = write_foreign(model_type, tmp_path)
    rng = random.Random(7)
    reference = Reference(folder)
    prompts = {f"r{n}": prompt_of(rng, n) for n in LENGTHS}
    alone = make_engine(folder, token_budget=1024, prefix_cache=False)
    assert alone.info.runs_through == "transformers"
    expected: dict[str, list[int]] = {}
    for name, prompt in prompts.items():
        expected |= generate(alone, greedy(name, prompt, OUTPUT))
        assert len(expected[name]) == OUTPUT and reference.agrees(prompt, expected[name]), name

    mixed = make_engine(folder, token_budget=48, num_blocks=44, max_running=6)
    requests = [
        greedy(f"{again}{name}", prompt, OUTPUT) for name, prompt in prompts.items() for again in ("", "again-")
    ]
    rng.shuffle(requests)
    got = generate(mixed, *requests)
    for name, tokens in expected.items():
        assert got[name] == got[f"again-{name}"] == tokens, name
    assert mixed.load_snapshot().prefix_hit_tokens > 0
    assert_idle(mixed)

    growing = {f"grow-{i}": prompt_of(rng, 5 + 20 * i) for i in range(5)}
    room = 18 if alone.scheduler.allocator.window is None else 11
    tight = make_engine(folder, token_budget=48, num_blocks=room, max_running=6)
    got = generate(tight, *(greedy(name, prompt, 40) for name, prompt in growing.items()))
    for name, prompt in growing.items():
        assert len(got[name]) == 40 and reference.agrees(prompt, got[name])
    assert tight.load_snapshot().preemptions > 0
    assert_idle(tight)


def test_none_of_these_types_has_a_family_of_its_own() -> None:
    own = {model_type.partition("-")[0] for model_type in FOREIGN} & FAMILIES.keys()
    assert not own, "a family took it over: replace it here by a type that has none"


@pytest.mark.slow
@pytest.mark.parametrize("model_type", ["gpt2", "starcoder2", "bloom", "nemotron"])
@pytest.mark.parametrize("kv_dtype", ["int8", "fp8"])
def test_few_bit_caches_stay_close(model_type: str, kv_dtype: str, tmp_path: Path) -> None:
    folder = write_foreign(model_type, tmp_path)
    reference = Reference(folder)
    prompt = prompt_of(random.Random(3), 60)
    engine = make_engine(folder, kv_dtype=kv_dtype)
    tokens = generate(engine, greedy("r", prompt, 1))["r"]
    assert float(reference.margins(prompt, tokens).max()) < 3.0


def test_speculation_and_the_host_tier(tmp_path: Path) -> None:
    folder = write_foreign("gpt2", tmp_path)
    prompt = prompt_of(random.Random(5), 20) * 4
    plain = generate(make_engine(folder), greedy("r", prompt, 40))["r"]
    drafted = make_engine(folder, speculation="ngram", host_memory=1 << 20, num_blocks=24)
    assert generate(drafted, greedy("r", prompt, 40))["r"] == plain
    others = [greedy(f"o{i}", prompt_of(random.Random(i), 300), 4) for i in range(4)]
    generate(drafted, *others)
    assert generate(drafted, greedy("r2", prompt, 40))["r2"] == plain
    assert_idle(drafted)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [({"deterministic": True}, "deterministic"), ({"tensor_parallel": 2}, "tensor_parallel")],
)
def test_what_is_not_available_is_refused(settings: dict[str, Any], reason: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"{reason}.*transformers"):
        make_engine(write_foreign("gpt2", tmp_path), **settings)


def changed(folder: Path, **keys: Any) -> Path:
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(raw | keys))
    return folder


@pytest.mark.parametrize(
    ("keys", "reason"),
    [
        ({"model_type": "t5"}, "encoder|generates text"),
        ({"model_type": "no-such-type"}, "neither one of ours .* nor"),
        ({"model_type": "mamba"}, "num_attention_heads|cannot be run|state"),
        ({"model_type": "qwen3_next_like", "auto_map": {"AutoModelForCausalLM": "modeling.X"}}, "trust_remote_code"),
    ],
)
def test_other_models_are_refused(keys: dict[str, Any], reason: str, tmp_path: Path) -> None:
    folder = changed(write_checkpoint("llama-gqa", tmp_path), **keys)
    with pytest.raises(CheckpointError, match=reason):
        make_engine(folder)


def test_a_missing_tensor_is_an_error(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    folder = write_foreign("starcoder2", tmp_path)
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.1.mlp.c_fc.weight"]
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match=r"layers\.1\.mlp\.c_fc"):
        make_engine(folder)


def test_without_the_library_the_error_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = changed(write_checkpoint("llama-gqa", tmp_path), model_type="gpt2")
    monkeypatch.setattr("penstock.engine.models.transformers.config.find_spec", lambda name: None)
    with pytest.raises(CheckpointError, match=r"pip install 'penstock\[transformers\]'"):
        make_engine(folder)
