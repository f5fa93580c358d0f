"""Adapters with tokens of their own, behind the model's vocabulary."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from penstock.engine.adapters.spec import AdapterSpec
from penstock.engine.core import Engine
from penstock.engine.request import Request, SamplingParams
from tests.engine.adapters.company import TIGHT, assert_same_in_company, one_by_one
from tests.engine.adapters.test_end_rows import BOTH, failure, replaced, write_saved
from tests.engine.adapters.test_equals_merging import TIE, ask
from tests.engine.harness import assert_idle, drain, generate, make_engine
from tests.engine.parallel.threads import threaded_engine
from tests.engine.speculative.forced import eager_engine
from tests.engine.tiny import Reference, write_checkpoint

OWN, COUNT = 199, 211
KINDS: dict[str, dict[str, Any]] = {
    "more": {"count": COUNT},
    "resized": {"count": COUNT - 4, "rows": slice(0, 0), "declared": False},
    "ends": {"count": COUNT, "ends": BOTH, "rows": slice(0, 30)},
}


def prompts(count: int, most: int, seed: int = 3) -> list[list[int]]:
    """Each with some of the tokens that are behind the model's."""
    rng = random.Random(seed)
    return [
        [rng.randrange(most) for _ in range(rng.randrange(4, 40))] + [most - 1 - i % 5, rng.randrange(OWN)]
        for i in range(count)
    ]


@pytest.fixture(scope="module", params=["llama-gqa", pytest.param("gemma2", marks=pytest.mark.slow)])
def base(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(request.param, tmp_path_factory.mktemp("tokens") / "base")


@pytest.fixture(scope="module")
def specs(base: Path) -> tuple[AdapterSpec, ...]:
    return tuple(
        AdapterSpec(name, str(write_saved(base.parent / name, base, seed=seed, size=0.9, **settings)))
        for seed, (name, settings) in enumerate(KINDS.items())
    )


def mixed(count: int = 12) -> list[Request]:
    names = ["", *KINDS]
    sizes = {"": OWN, "more": COUNT, "resized": COUNT - 4, "ends": COUNT}
    return [ask(f"r{i}", prompts(count, sizes[names[i % 4]])[i], names[i % 4]) for i in range(count)]


@pytest.fixture(scope="module")
def alone(base: Path, specs: tuple[AdapterSpec, ...]) -> dict[str, list[int]]:
    return one_by_one(make_engine(base, adapters=specs), mixed())


def test_they_are_read_and_generated(base: Path, specs: tuple[AdapterSpec, ...], alone: dict[str, list[int]]) -> None:
    references = {"": Reference(base)}
    for spec in specs:
        references[spec.name] = Reference(replaced(base, Path(spec.source), base.parent / f"merged {spec.name}"))
    for request in mixed():
        got = alone[request.request_id]
        assert references[request.adapter].agrees(request.prompt, got, TIE), request.request_id
        assert request.adapter or max(got) < OWN
    assert max(token for request in mixed() if request.adapter for token in alone[request.request_id]) >= OWN


def test_in_company_each_request_gets_what_it_gets_alone(
    base: Path, specs: tuple[AdapterSpec, ...], alone: dict[str, list[int]]
) -> None:
    assert_same_in_company(base, specs, mixed(), alone, TIGHT | {"num_blocks": 30})


def test_a_draft_model_need_not_know_them(
    base: Path, specs: tuple[AdapterSpec, ...], alone: dict[str, list[int]]
) -> None:
    """Sequences with such a token get no drafts, nor do those that are biased towards one; others do."""
    settings: dict[str, Any] = {"speculation": "draft", "draft_model": str(base), "num_blocks": 60, "block_size": 4}
    without = AdapterSpec("without", str(write_saved(base.parent / "without", base, modules=())))
    engine = eager_engine(base, adapters=(*specs, without), token_budget=24, **settings)
    assert generate(engine, *mixed()) == alone
    params = SamplingParams(max_tokens=6, temperature=0.0, logit_bias={COUNT - 1: 60.0})
    assert len(generate(engine, Request("no such token", [5, 7, 9], params, adapter="without"))["no such token"]) == 6
    assert engine.speculation is not None and not engine.speculation.broken
    assert generate(engine, Request("biased", [5, 7, 9], params, adapter="more"))["biased"] == [COUNT - 1] * 6
    before = engine.load_snapshot().draft_tokens
    known = [[token for token in request.prompt if token < OWN] for request in mixed(4)]
    plain = [ask(f"p{i}", prompt, "more") for i, prompt in enumerate(known)]
    expected = generate(make_engine(base, adapters=specs), *plain)
    assert generate(engine, *plain) == expected
    assert engine.load_snapshot().draft_tokens > before
    assert_idle(engine)


@pytest.mark.parametrize("grid", [(2, 1), pytest.param((2, 2), marks=pytest.mark.slow)], ids=str)
def test_ranks_give_the_same(
    base: Path, specs: tuple[AdapterSpec, ...], alone: dict[str, list[int]], grid: tuple[int, int]
) -> None:
    with threaded_engine(base, *grid, adapters=specs, token_budget=32) as engine:
        assert generate(engine, *mixed()) == alone


def sampled(engine: Engine, *requests: Request) -> dict[str, tuple[list[int], list[Any]]]:
    for request in requests:
        engine.submit(request)
    found: dict[str, tuple[list[int], list[Any]]] = {request.request_id: ([], []) for request in requests}
    for delta in drain(engine):
        assert not delta.error, delta.error
        found[delta.request_id][0].extend(delta.tokens)
        found[delta.request_id][1].extend(delta.logprobs or [])
    return found


def test_sampling_parameters_reach_them(base: Path, specs: tuple[AdapterSpec, ...]) -> None:
    """Bias, penalties, masks and log-probabilities over the wider vocabulary, in a batch with narrower requests."""
    engine = make_engine(base, adapters=specs)
    wanted = dict.fromkeys(range(OWN, COUNT), 60.0)
    params = SamplingParams(max_tokens=8, temperature=0.0, logprobs=3, logit_bias=wanted, repetition_penalty=1.3)
    allowed = SamplingParams(max_tokens=4, temperature=1.0, seed=4, allowed_token_ids=(OWN + 1, OWN + 3, 5))
    plain = SamplingParams(max_tokens=8, temperature=0.9, seed=11, top_p=0.8, presence_penalty=0.5, logprobs=1)
    prompt = [5, 7, 9]
    before = sampled(engine, Request("plain", prompt, plain))["plain"][0]
    got = sampled(
        engine,
        Request("biased", prompt, params, adapter="more"),
        Request("allowed", prompt, allowed, adapter="more"),
        Request("plain", prompt, plain),
    )
    assert all(token >= OWN for token in got["biased"][0]) and len(set(got["biased"][0])) > 1
    assert all(logprob.logprob < 0 for logprob in got["biased"][1])
    assert set(got["allowed"][0]) <= {OWN + 1, OWN + 3, 5}
    assert got["plain"][0] == before


def error(engine: Engine, request: Request) -> str:
    refused = engine.submit(request)
    deltas = ([] if refused is None else [refused]) + list(drain(engine))
    return next(delta.error for delta in deltas if delta.error)


def test_tokens_that_an_adapter_does_not_have_are_refused(base: Path, specs: tuple[AdapterSpec, ...]) -> None:
    engine = make_engine(base, adapters=specs)
    assert engine.info.vocab_size == COUNT
    assert f"between 0 and {OWN - 1}" in error(engine, ask("a", [1, OWN], ""))
    for _ in range(2):  # before it is loaded, and after
        assert "the adapter does not have all of the prompt's" in error(engine, ask("b", [1, COUNT - 1], "resized"))
    assert f"between 0 and {COUNT - 1}" in error(engine, ask("c", [1, COUNT], "more"))
    assert generate(engine, ask("d", [1, COUNT - 1], "more"))["d"]
    assert_idle(engine)


def test_tokens_that_could_be_generated_but_not_read_are_refused(base: Path, tmp_path: Path) -> None:
    adapter = write_saved(tmp_path / "head", base, modules=("lm_head",), count=COUNT)
    assert "that the embedding has none of" in failure(base, adapter)


def test_room_is_what_the_configuration_says(base: Path, specs: tuple[AdapterSpec, ...]) -> None:
    adapter = Path(specs[0].source)
    assert "unless adapter_tokens is at least that" in failure(base, adapter, adapter_tokens=COUNT - OWN - 1)


@pytest.mark.parametrize("stages", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_ngrams_are_of_their_ids(tmp_path: Path, stages: int) -> None:
    """As in transformers, where a larger embedding does not change how ids are hashed."""
    base = write_checkpoint("qwen4-exp", tmp_path / "base", ple_layer_ids=[1, 4])
    folder = write_saved(tmp_path / "own", base, rows=slice(0, 0), count=COUNT)
    file = folder / "adapter_model.safetensors"
    tensors = {key: 0 * one if "lora_B" in key else one for key, one in load_file(file).items()}
    save_file(tensors, file)
    reference = Reference(base)
    reference.model.resize_token_embeddings(COUNT, mean_resizing=False)
    for end, at in (("get_input_embeddings", "model.embed_tokens"), ("get_output_embeddings", "lm_head")):
        getattr(reference.model, end)().weight.data.copy_(tensors[f"base_model.model.{at}.weight"])
    requests = [ask(f"r{i}", prompt, "own") for i, prompt in enumerate(prompts(4, COUNT))]
    specs = (AdapterSpec("own", str(folder)),)
    if stages > 1:
        with threaded_engine(base, 1, stages, adapters=specs) as engine:
            got = generate(engine, *requests)
    else:
        got = generate(make_engine(base, adapters=specs), *requests)
    for request in requests:
        assert reference.agrees(request.prompt, got[request.request_id], TIE), request.request_id
