"""EAGLE-3 heads in both layouts: they draft what a plain implementation drafts, and the text stays the same."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from penstock.bench.soak.engines import verify_everything
from penstock.engine.adapters.spec import AdapterSpec
from penstock.engine.core import Engine
from penstock.engine.request import Request, SamplingParams
from penstock.errors import ConfigError
from tests.engine.adapters.files import write_adapter
from tests.engine.adapters.test_end_rows import write_saved
from tests.engine.harness import assert_idle, carry, collect, drain, generate, greedy, make_engine
from tests.engine.parallel.threads import threaded_engine
from tests.engine.speculative.forced import eager_engine
from tests.engine.speculative.heads import PlainHead, noted_drafts, write_head, write_original
from tests.engine.speculative.test_same_text import any_requests, run
from tests.engine.tiny import write_checkpoint

LAYOUTS = [
    pytest.param("original", {}, marks=pytest.mark.slow),
    pytest.param("original", {"pickled": True, "draft_vocab": 199}, marks=pytest.mark.slow),
    pytest.param("speculators", {}, marks=pytest.mark.slow),
    ("speculators", {"norm_before_residual": False, "hidden": 32}),
]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint("llama-gqa", tmp_path_factory.mktemp("target"), spread=0.3, num_hidden_layers=4)


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_original(tmp_path_factory.mktemp("head"))


@pytest.fixture(scope="module")
def plain(target: Path) -> Engine:
    return make_engine(target, num_blocks=400)


def drafting(target: Path, head: Path, **settings: object) -> Engine:
    return eager_engine(target, speculation="eagle3", draft_model=str(head), **settings)


@pytest.mark.parametrize(("layout", "changes"), LAYOUTS)
def test_drafts_are_those_of_a_plain_implementation(
    target: Path, plain: Engine, tmp_path: Path, layout: str, changes: dict[str, Any]
) -> None:
    """Behind every number of accepted tokens, in batches, with prompts in chunks and shared prefixes."""
    folder = write_head(layout, tmp_path / "head", **changes)
    engine = drafting(target, folder, speculation_depth=4, token_budget=48)
    drafts = noted_drafts(engine)
    prompt = [i * 7 % 199 for i in range(100)]
    requests = [greedy("a", prompt, 20), greedy("b", [5, 4], 20), greedy("c", prompt[:70], 12)]
    expected = generate(plain, *requests)
    assert generate(engine, *requests) == expected
    engine.submit(greedy("d", prompt, 20))
    assert collect(drain(engine))["d"] == expected["a"]
    reference = PlainHead(folder, target)
    assert len(drafts) > 20
    for tokens, draft in drafts:
        assert draft == reference.draft(tokens, len(draft))
    assert_idle(engine)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1])
def test_any_mix_of_requests_gets_the_same_answers(target: Path, head: Path, plain: Engine, seed: int) -> None:
    requests = any_requests(200 + seed)
    expected = run(plain, requests)
    engine = drafting(target, head, num_blocks=11, token_budget=64)
    got = run(engine, requests)
    assert {name: delta.tokens for name, delta in got.items()} == {n: d.tokens for n, d in expected.items()}
    load = engine.load_snapshot()
    assert load.draft_tokens > 100 and load.preemptions > 0
    assert_idle(engine)


def test_steps_are_recorded_with_a_head_as_without(target: Path, head: Path, plain: Engine) -> None:
    engine = drafting(target, head)
    assert (engine.runner.executor.recorded is None) == (plain.runner.executor.recorded is None)


def test_blocks_from_the_host_bring_what_the_head_reads(target: Path, head: Path, plain: Engine) -> None:
    """A prompt whose blocks were offloaded comes back, and what is drafted behind it is what a fresh engine drafts."""
    engine = drafting(target, head, num_blocks=14, host_memory=1 << 22, host_idle_s=0.0, kv_dtype="full")
    prompt = [i * 7 % 199 for i in range(100)]
    expected = generate(plain, greedy("a", prompt, 12))
    assert generate(engine, greedy("a", prompt, 12)) == expected
    for index in range(3):
        generate(engine, greedy("x", [(index * 31 + i) % 199 for i in range(150)], 4))
    drafts = noted_drafts(engine)
    assert generate(engine, greedy("a", prompt, 12)) == expected
    assert engine.load_snapshot().host_hit_tokens > 0
    reference = PlainHead(head, target)
    assert drafts and all(draft == reference.draft(tokens, len(draft)) for tokens, draft in drafts)


@pytest.mark.parametrize("settings", [{"deterministic": True}, {"kv_dtype": "int8"}, {"kv_dtype": "fp8"}])
def test_other_settings_of_the_target(target: Path, head: Path, settings: dict[str, Any]) -> None:
    request = greedy("a", [i * 7 % 199 for i in range(60)], 20)
    engine = drafting(target, head, **settings)
    assert generate(engine, request) == generate(make_engine(target, **settings), request)
    assert engine.load_snapshot().draft_tokens > 10


@pytest.mark.slow
def test_adapters_with_tokens_that_the_head_does_not_know(target: Path, head: Path, tmp_path: Path) -> None:
    adapter = AdapterSpec("a", str(write_saved(tmp_path / "a", target, count=211, size=0.9)))
    params = SamplingParams(max_tokens=16, temperature=0.0)
    requests = [Request(f"{i}", [i, 7, 200 + i, 3][: 2 + i % 3], params, adapter="a" * (i % 4 > 0)) for i in range(8)]
    requests = [request for request in requests if request.adapter or max(request.prompt) < 199]
    engine = drafting(target, head, adapters=(adapter,))
    assert generate(engine, *requests) == generate(make_engine(target, adapters=(adapter,)), *requests)
    assert_idle(engine)


def test_adapters_of_the_target(target: Path, head: Path, tmp_path: Path) -> None:
    adapter = AdapterSpec("a", str(write_adapter(tmp_path, target)))
    prompt = [i * 7 % 199 for i in range(60)]
    requests = [
        Request(name, prompt, SamplingParams(max_tokens=16, temperature=0.0), adapter=name.strip("-"))
        for name in ("a", "-")
    ]
    engine = drafting(target, head, adapters=(adapter,))
    assert generate(engine, *requests) == generate(make_engine(target, adapters=(adapter,)), *requests)
    assert engine.load_snapshot().draft_tokens > 10


def test_a_head_that_does_not_fit_is_refused(target: Path, tmp_path: Path) -> None:
    def refused(folder: Path, why: str) -> None:
        with pytest.raises(ConfigError, match=why):
            make_engine(target, speculation="eagle3", draft_model=str(folder))

    folder = write_original(tmp_path / "head")
    config = json.loads((folder / "config.json").read_text())

    def change(**keys: Any) -> Path:
        (folder / "config.json").write_text(json.dumps({**config, **keys}))
        return folder

    refused(change(vocab_size=200), "vocabulary of 200 tokens")
    refused(change(target_hidden_size=128), "hidden states of 128")
    refused(change(num_hidden_layers=2), "has 2 layers")
    refused(change(eagle_config={"eagle_aux_hidden_state_layer_ids": [1, 2, 9]}), "the model has 4 layers")
    refused(change(eagle_config={"use_aux_hidden_state": False}), "use_aux_hidden_state")
    refused(change(draft_vocab_size=100), "lm_head.weight")
    refused(target, "not an EAGLE-3 head")
    with pytest.raises(ConfigError, match="needs a draft_model"):
        make_engine(target, speculation="eagle3")


def test_auto_finds_out_what_a_drafter_is(target: Path, head: Path) -> None:
    assert make_engine(target, speculation="auto", draft_model=str(head)).config.speculation == "eagle3"
    assert make_engine(target, speculation="auto", draft_model=str(target)).config.speculation == "draft"


@pytest.mark.slow
@pytest.mark.parametrize(
    "family",
    [
        "gemma2",
        "qwen3-moe",
        "olmo2",
        "cohere",
        "gpt-oss",
        "mistral-window",
        "laguna",
        "minimax-m3",
        "mistral-large4",
        "muse-glimmer",
        "muse-spark",
    ],
)
def test_other_families_have_the_same_text(family: str, head: Path, tmp_path: Path) -> None:
    folder = write_checkpoint(family, tmp_path, spread=0.3)
    requests = [greedy("a", [i * 7 % 199 for i in range(90)], 20), greedy("b", [5, 4], 20)]
    engine = drafting(folder, head)
    assert generate(engine, *requests) == generate(make_engine(folder), *requests)
    assert engine.load_snapshot().draft_tokens > 10


@pytest.mark.slow
@pytest.mark.parametrize("grid", ["tensor_parallel", "pipeline_parallel"])
def test_two_ranks_have_the_same_text(target: Path, head: Path, plain: Engine, grid: str) -> None:
    request = greedy("a", [i * 7 % 199 for i in range(90)], 20)
    engine = drafting(target, head, num_blocks=100, **{grid: 2})
    try:
        drafts = noted_drafts(engine)
        assert generate(engine, request) == generate(plain, request)
        reference = PlainHead(head, target)
        assert drafts and all(draft == reference.draft(tokens, len(draft)) for tokens, draft in drafts)
    finally:
        engine.close()


NARROW = {"norm_before_residual": False, "hidden": 32}


@pytest.mark.parametrize(
    ("tensor", "pipeline", "changes", "mixed"),
    [
        (1, 2, {}, 0),
        *(
            pytest.param(*grid, 6, marks=pytest.mark.slow)
            for grid in ((1, 2, {}), (1, 4, {}), (2, 2, {}), (1, 3, NARROW))
        ),
    ],
)
def test_stages_of_a_pipeline_pass_on_what_the_head_reads(
    target: Path, plain: Engine, tmp_path: Path, tensor: int, pipeline: int, changes: dict[str, Any], mixed: int
) -> None:
    """Drafts are those of a plain implementation, with several steps on their way, preemption and shared prefixes.
    `mixed`: requests of all kinds."""
    folder = write_head("speculators", tmp_path / "head", **changes)
    prompt = [i * 7 % 199 for i in range(100)]
    requests = [greedy("a", prompt, 20), greedy("b", [5, 4], 20), greedy("c", prompt[:70], 12)]
    settings = {"speculation": "eagle3", "draft_model": str(folder), "speculation_depth": 4, "token_budget": 48}
    with threaded_engine(target, tensor, pipeline, num_blocks=16, **settings) as engine:
        assert engine.speculation is not None
        verify_everything(engine.speculation)
        drafts = noted_drafts(engine)
        assert generate(engine, *requests) == generate(plain, *requests)
        assert generate(engine, greedy("d", prompt, 20))["d"] == generate(plain, greedy("d", prompt, 20))["d"]
        reference = PlainHead(folder, target)
        assert len(drafts) > 20
        for tokens, draft in drafts if mixed else drafts[::5]:
            assert draft == reference.draft(tokens, len(draft))
        if mixed:
            asked = any_requests(210, count=mixed)
            got, expected = run(engine, asked), run(plain, asked)
            assert {name: delta.tokens for name, delta in got.items()} == {n: d.tokens for n, d in expected.items()}
        assert_idle(engine)


@pytest.mark.parametrize("family", ["qwen4-exp", "deepseek-v4", "hy-v4", "glm5-next"])
def test_a_head_has_one_stream_to_read(head: Path, tmp_path: Path, family: str) -> None:
    with pytest.raises(ConfigError, match=r"a head reads one residual stream, and these have \d"):
        drafting(write_checkpoint(family, tmp_path), head)


@pytest.mark.parametrize(("tensor", "pipeline"), [(2, 1), pytest.param(2, 2, marks=pytest.mark.slow)])
def test_drafts_come_along_where_layers_differ_in_their_heads(
    head: Path, tmp_path: Path, tensor: int, pipeline: int
) -> None:
    """Behind a prompt that was computed elsewhere, too."""
    target = write_checkpoint("gemma4", tmp_path, spread=0.3)
    prompt = [i * 7 % 199 for i in range(100)]
    settings: dict[str, Any] = {"speculation": "eagle3", "draft_model": str(head), "num_blocks": 40}
    giver = make_engine(target, role="prefill", **settings)
    expected = generate(giver, greedy("p", prompt, 20))["p"]
    with threaded_engine(target, tensor, pipeline, role="decode", **settings) as engine:
        assert engine.speculation is not None and engine.exchange is not None
        assert engine.info.kv_format == giver.info.kv_format
        verify_everything(engine.speculation)
        drafts = noted_drafts(engine)
        request = greedy("p", prompt, 20)
        names = engine.exchange.names(request)
        engine.exchange.release(carry(giver, engine, names))
        assert generate(engine, request)["p"] == expected
        assert engine.exchange.counts.blocks_in == 6
        reference = PlainHead(head, target)
        assert len(drafts) > 5 and all(draft == reference.draft(tokens, len(draft)) for tokens, draft in drafts)
        assert_idle(engine)


@pytest.mark.slow
@pytest.mark.parametrize("pipeline", [1, 2])
def test_shards_with_sequences_of_their_own_have_the_same_drafts(head: Path, tmp_path: Path, pipeline: int) -> None:
    target = write_checkpoint("qwen3-moe", tmp_path, spread=0.3, num_hidden_layers=4)
    requests = [greedy(f"r{n}", [(i * 7 + n) % 199 for i in range(n)], 20) for n in (90, 2, 33, 60)]
    settings = {
        "speculation": "eagle3",
        "draft_model": str(head),
        "expert_parallel": True,
        "attention_parallel": "data",
    }
    with threaded_engine(target, 2, pipeline, num_blocks=60, token_budget=48, **settings) as engine:
        assert engine.speculation is not None
        verify_everything(engine.speculation)
        drafts = noted_drafts(engine)
        assert generate(engine, *requests) == generate(make_engine(target), *requests)
        reference = PlainHead(head, target)
        assert len(drafts) > 20
        some = drafts if pipeline == 1 else drafts[::4]  # the reference takes its time
        assert all(draft == reference.draft(tokens, len(draft)) for tokens, draft in some)
        assert_idle(engine)
