"""The watermark (R-ENG-13): exact in any batch, with any drafts, after a preemption and on another engine; it does not
change the distribution; a detector with the key finds it and one without does not."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from penstock.engine.backends.reference.noise import gumbel
from penstock.engine.core import Engine
from penstock.engine.noise import row_keys, uniforms
from penstock.engine.request import Request, SamplingParams
from penstock.engine.watermark import VARIANTS, WIDTH, WatermarkState, context_hash, noise_keys
from penstock.text.watermark import detect, gamma_tail
from tests.engine.harness import assert_idle, generate, make_engine
from tests.engine.speculative.forced import Oracle, eager_engine
from tests.engine.tiny import write_checkpoint

VOCAB = 199
KEY, OTHER = bytes(range(32)), bytes(range(1, 33))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint("llama-gqa", tmp_path_factory.mktemp("watermark"))


@pytest.fixture(scope="module")
def plain(checkpoint: Path) -> Engine:
    return make_engine(checkpoint, num_blocks=400)


def request(name: str, seed: int = 5, count: int = 60, **params: object) -> Request:
    params = {"temperature": 1.0, "watermark": KEY, **params}
    return Request(name, [3, 1, 4, 1, 5], SamplingParams(max_tokens=count, seed=seed, **params))  # type: ignore[arg-type]


def requests() -> list[Request]:
    """Next to each other: with and without a watermark, with filters, penalties, rules and log-probabilities."""
    return [
        request("marked"),
        request("again", seed=6),
        request("unmarked", watermark=b""),
        request("greedy", temperature=0.0),
        request("filtered", top_k=40, top_p=0.95, min_p=0.01),
        request("typical", typical_p=0.9),
        request("penalized", presence_penalty=0.5, frequency_penalty=0.4, repetition_penalty=1.2),
        request("ruled", allowed_token_ids=tuple(range(20, 150)), logprobs=1),
        request("other", watermark=OTHER),
    ]


@pytest.fixture(scope="module")
def texts(plain: Engine) -> dict[str, list[int]]:
    return generate(plain, *requests())


def test_the_same_text_alone_and_in_any_batch(plain: Engine, texts: dict[str, list[int]]) -> None:
    for one in requests():
        assert generate(plain, one)[one.request_id] == texts[one.request_id], one.request_id
    assert_idle(plain)
    unkeyed = replace(request("x"), params=replace(request("x").params, watermark=b""))
    assert generate(plain, unkeyed)["x"] == texts["unmarked"] != texts["marked"]


def test_seeds_choose_the_text(plain: Engine, texts: dict[str, list[int]]) -> None:
    assert texts["again"] != texts["marked"] != texts["other"]
    assert generate(plain, request("x", seed=5 + VARIANTS * 3))["x"][:20] == texts["marked"][:20]
    assert texts["greedy"] == generate(plain, request("x", temperature=0.0, watermark=b""))["x"]


@pytest.mark.parametrize("wrong", [0.0, 0.3, 1.0])
def test_the_same_text_with_any_draft_tokens(checkpoint: Path, texts: dict[str, list[int]], wrong: float) -> None:
    """And in a pool so small that sequences are preempted."""
    engine = eager_engine(checkpoint, lambda _: Oracle(texts, wrong, VOCAB), num_blocks=24)
    assert generate(engine, *requests()) == texts
    assert engine.load_snapshot().draft_tokens > 0
    assert_idle(engine)


def test_the_same_text_with_a_draft_model_which_sees_the_same_noise(
    checkpoint: Path, texts: dict[str, list[int]]
) -> None:
    engine = eager_engine(checkpoint, draft_model=str(checkpoint), speculation="draft", num_blocks=400)
    marked = [one for one in requests() if one.request_id in ("marked", "again", "filtered", "other")]
    assert generate(engine, *marked) == {one.request_id: texts[one.request_id] for one in marked}
    load = engine.load_snapshot()
    assert load.accepted_tokens == pytest.approx(load.draft_tokens, rel=0.05), "the draft is the model itself"


def test_the_same_text_when_another_engine_goes_on(checkpoint: Path, texts: dict[str, list[int]]) -> None:
    other = make_engine(checkpoint, num_blocks=400)
    for at in (1, 2, 17, 59):
        going = [replace(one, produced=texts[one.request_id][:at]) for one in requests()]
        found = generate(other, *going)
        assert {name: [*texts[name][:at], *rest] for name, rest in found.items()} == texts


def test_the_same_text_in_deterministic_mode_and_without_recording(checkpoint: Path) -> None:
    engine = make_engine(checkpoint, num_blocks=400, deterministic=True)
    alone = {one.request_id: generate(engine, one)[one.request_id] for one in requests()}
    assert generate(engine, *requests()) == alone


def test_the_key_is_not_in_a_description_of_the_request() -> None:
    assert "watermark" not in repr(request("x").params)


def test_noise_without_torch_is_that_of_the_sampler() -> None:
    import torch

    keys, tokens = row_keys(np.arange(50, dtype=np.uint64), np.arange(50)), np.arange(50, dtype=np.int64) * 7
    noise = gumbel(torch.from_numpy(keys), 400).numpy()[np.arange(50), tokens]
    assert noise == pytest.approx(-np.log(-np.log(uniforms(keys, tokens))), rel=1e-4, abs=1e-5)


def test_the_distribution_is_the_models_own() -> None:
    """Over keys and seeds, the token behind one context has the probabilities of the logits."""
    weights = np.array([0.5, 0.25, 0.15, 0.08, 0.02])
    logits, draws, counts = np.log(weights), 6_000, Counter[int]()
    for number in range(draws):
        key = number.to_bytes(4, "little") * 8
        state = WatermarkState(key, number % VARIANTS, 4)
        [noise_key] = state.keys([1, 2, 3, 4], (), 4, np.zeros(1, np.int64))
        u = uniforms(np.full(5, noise_key), np.arange(5))
        counts[int((logits - np.log(-np.log(u))).argmax())] += 1
    chi_square = sum((counts[i] - draws * p) ** 2 / (draws * p) for i, p in enumerate(weights))
    assert chi_square < 20, "0.9995 of chi-square with 4 degrees of freedom"


def test_a_context_that_occurs_again_is_left_to_the_seed() -> None:
    state, plain = WatermarkState(KEY, 3, 2), np.array([11, 12, 13], np.int64)
    hashed = noise_keys(np.array([context_hash(KEY, [8, 9])], np.uint64), np.array([3]))[0, 0]
    assert state.keys([8, 9], (), 2, plain[:1])[0] == hashed
    text = [8, 9, 1, 2, 3, 4, 5, 1, 2, 3]
    found = state.keys(text, (4, 5), len(text), plain)
    assert found[0] != plain[0], "the first time that 5 1 2 3 comes before a token"
    assert found[1] == plain[1], "1 2 3 4 has been before"
    assert found[2] == plain[2], "and so has 2 3 4 5"
    assert list(state.keys([*text, 4], (5,), len(text) + 1, plain[1:])) == list(found[1:])


def test_detection(texts: dict[str, list[int]], plain: Engine) -> None:
    long = generate(plain, request("x", count=200), request("y", count=200, watermark=b""))
    assert detect(long["x"], [KEY]).p_value < 1e-12
    assert detect(long["x"], [OTHER]).p_value > 0.001 and detect(long["y"], [KEY]).p_value > 0.001
    assert detect(long["x"], [OTHER, KEY]).verdict() == "watermarked"
    for part in (long["x"][:60], long["x"][70:130], long["x"][-60:]):
        assert detect(part, [KEY]).verdict() == "watermarked", "a piece of it is enough"
    hidden = [*long["y"], *long["x"][50:150], *long["y"][::-1]]
    found = detect(hidden, [KEY])
    assert found.verdict() == "watermarked" and found.passage is not None
    assert 150 < found.passage[0] < 300 and found.passage[1] < 330
    assert detect(texts["marked"][: WIDTH + 3], [KEY]).verdict() == "too_short"
    assert detect([], [KEY]).p_value == 1.0


def test_p_values_are_exact() -> None:
    assert gamma_tail(1, 2.0) == pytest.approx(np.exp(-2.0))
    assert gamma_tail(3, 2.0) == pytest.approx(np.exp(-2.0) * (1 + 2 + 2))
    assert gamma_tail(5000, 5000.0) == pytest.approx(0.498, abs=0.01) and gamma_tail(50_000, 60_000.0) < 1e-300
    rng = np.random.default_rng(7)
    found = [detect(rng.integers(0, 5000, 40).tolist(), [rng.bytes(32)]).p_value for _ in range(60)]
    assert sum(p <= 0.05 for p in found) <= 9, "on text of others"
