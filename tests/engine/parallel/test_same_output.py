"""Several ranks give the output of one device (R-ENG-10): every family, every grid, with all that steps can mix."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.engine.core import Engine
from penstock.engine.request import Request, SamplingParams
from tests.engine.harness import assert_idle, collect, drain, generate, greedy, make_engine
from tests.engine.parallel.threads import threaded_engine
from tests.engine.tiny import write_checkpoint

GRIDS = [
    pytest.param("llama-gqa", 2, 1, marks=pytest.mark.slow),
    pytest.param("llama-gqa", 1, 2, marks=pytest.mark.slow),
    ("llama-gqa", 2, 2),
    pytest.param("llama-gqa", 1, 3, marks=pytest.mark.slow),
    ("llama-mqa-tied", 4, 1),  # one KV head for four shards
    pytest.param("llama-mha-bias", 2, 2, marks=pytest.mark.slow),
    pytest.param("mistral-window", 2, 2, marks=pytest.mark.slow),
    pytest.param("qwen2-bias", 2, 1, marks=pytest.mark.slow),
    pytest.param("qwen3-qknorm", 2, 2, marks=pytest.mark.slow),
    pytest.param("mixtral", 2, 2, marks=pytest.mark.slow),
    ("qwen3-moe-some-dense", 2, 2),
    ("gpt-oss", 2, 2),
    pytest.param("gemma2", 2, 1, marks=pytest.mark.slow),
    ("gemma3-two-ropes", 2, 2),
    pytest.param("mistral4", 2, 2, marks=pytest.mark.slow),
    ("gemma4", 2, 2),  # heads of two sizes, of one kind one for both shards
    pytest.param("gemma4-experts", 2, 1, marks=pytest.mark.slow),
    pytest.param("gemma4-small", 2, 1, marks=pytest.mark.slow),
    ("gemma4-small", 1, 3),  # one stage passes on keys that only the next one attends to
    pytest.param("gemma4-small", 2, 2, marks=pytest.mark.slow),
    pytest.param("phi3", 2, 1, marks=pytest.mark.slow),
    ("olmo2", 2, 1),  # norms of whole rows are over all shards
    pytest.param("olmo3", 2, 2, marks=pytest.mark.slow),
    pytest.param("olmoe", 2, 1, marks=pytest.mark.slow),
    pytest.param("granite", 2, 2, marks=pytest.mark.slow),
    pytest.param("granite-moe-shared", 2, 1, marks=pytest.mark.slow),
    pytest.param("granite4", 2, 2, marks=pytest.mark.slow),
    pytest.param("qwen2-moe", 2, 1, marks=pytest.mark.slow),
    pytest.param("smollm3", 1, 2, marks=pytest.mark.slow),
    pytest.param("ministral3", 2, 2, marks=pytest.mark.slow),
]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("checkpoints")

    class Written(dict[str, Path]):
        """Each when it is first asked for."""

        def __missing__(self, family: str) -> Path:
            return self.setdefault(family, write_checkpoint(family, folder / family))

    return Written()


def requests() -> list[Request]:
    """Prompts of very different lengths, so that steps mix prefill chunks and decodes."""
    return [greedy(f"r{i}", [(i * 17 + j * 5) % 190 for j in range(3 + 25 * i)], 10) for i in range(4)]


@pytest.mark.parametrize(("family", "tensor", "pipeline"), GRIDS)
def test_a_batch_decodes_as_on_one_device(
    checkpoints: dict[str, Path], family: str, tensor: int, pipeline: int
) -> None:
    expected = generate(make_engine(checkpoints[family], token_budget=32), *requests())
    with threaded_engine(checkpoints[family], tensor, pipeline, token_budget=32) as engine:
        assert engine.info.ranks == tensor * pipeline
        assert generate(engine, *requests()) == expected
        assert_idle(engine)


def test_prefixes_are_reused_and_preempted_sequences_come_back(checkpoints: dict[str, Path]) -> None:
    folder = checkpoints["llama-gqa"]
    settings = {"num_blocks": 14, "block_size": 4, "token_budget": 16}
    shared = [7, 3, 9, 1, 4, 4, 2, 8, 6, 5, 3, 1]
    batch = [greedy(f"p{i}", [*shared, 20 + i], 16) for i in range(3)]
    expected = generate(make_engine(folder, **settings), *batch)
    with threaded_engine(folder, 2, 2, **settings) as engine:
        assert generate(engine, *batch) == expected
        assert engine.load_snapshot().preemptions > 0
        assert engine.load_snapshot().prefix_hit_tokens > 0
        assert generate(engine, *batch) == expected
        assert_idle(engine)


def test_sampling_and_logprobs_are_those_of_one_device(checkpoints: dict[str, Path]) -> None:
    params = SamplingParams(
        max_tokens=8, temperature=0.8, top_k=20, seed=11, frequency_penalty=0.3, logprobs=2, prompt_logprobs=1
    )
    ask = Request("a", [5, 9, 2, 77, 31], params)
    results = []
    alone = make_engine(checkpoints["qwen3-qknorm"])
    with threaded_engine(checkpoints["qwen3-qknorm"], 2, 2) as engine:
        for one in (alone, engine):
            one.submit(ask)
            results.append(drain(one))
    expected, found = results
    assert collect(found) == collect(expected)
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.logprobs is not None and theirs.logprobs is not None
        assert ours.logprobs[0].top_ids == theirs.logprobs[0].top_ids
        assert ours.logprobs[0].logprob == pytest.approx(theirs.logprobs[0].logprob, abs=1e-4)
    assert found[0].prompt_logprobs is not None and len(found[0].prompt_logprobs) == 5


@pytest.mark.parametrize(
    "setting", [{"speculation": "ngram"}, pytest.param({"kv_dtype": "int8"}, marks=pytest.mark.slow)], ids=str
)
def test_speculation_and_a_small_cache_work_as_on_one_device(
    checkpoints: dict[str, Path], setting: dict[str, str]
) -> None:
    folder = checkpoints["llama-gqa"]
    repeating = greedy("again", [3, 1, 4, 1, 5] * 12, 20)
    expected = generate(make_engine(folder, **setting), *requests(), repeating)
    with threaded_engine(folder, 2, 2, **setting) as engine:
        assert generate(engine, *requests(), repeating) == expected


@pytest.mark.parametrize("weights", ["int8", "int4"])
def test_quantized_blocks_are_cut_before_they_are_packed(tmp_path: Path, weights: str) -> None:
    """The same blocks of 32 are rounded; only the order of additions, and the rounding of activations, differ."""
    folder = write_checkpoint("llama-gqa", tmp_path / "wide", hidden_size=128, intermediate_size=192, spread=0.3)
    settings = {"weights": weights, "activations": "int16"}
    expected = prompt_scores(make_engine(folder, **settings))
    with threaded_engine(folder, 2, 1, **settings) as engine:
        assert prompt_scores(engine) == pytest.approx(expected, abs=0.02)


def prompt_scores(engine: Engine) -> list[float]:
    """The log-probability of every token of a prompt."""
    engine.submit(Request("s", [(7 * j) % 190 for j in range(40)], SamplingParams(max_tokens=1, prompt_logprobs=0)))
    scores = drain(engine)[0].prompt_logprobs
    assert scores is not None
    return [score.logprob for score in scores if score is not None]


def test_matrices_that_stay_dense_are_named_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A width of 96 is three groups of 32; half of it is no number of groups."""
    folder = write_checkpoint("llama-gqa", tmp_path, intermediate_size=96, num_hidden_layers=2)
    generate(make_engine(folder, weights="int4"), greedy("r", [1, 2, 3], 2))
    assert "dense" not in caplog.text
    with threaded_engine(folder, 2, 1, weights="int4") as engine:
        generate(engine, greedy("r", [1, 2, 3], 2))
    said = [record.getMessage() for record in caplog.records if "dense" in record.getMessage()]
    assert len(said) == 1 and "down_proj.weight and those like it are dense, not int4" in said[0] and "48" in said[0]


def test_the_kv_cache_is_split_so_more_tokens_fit_the_same_memory(checkpoints: dict[str, Path]) -> None:
    settings = {"kv_memory": 1 << 18, "max_model_len": 1024, "max_running": 64}
    one = make_engine(checkpoints["llama-gqa"], **settings).info.num_blocks
    with threaded_engine(checkpoints["llama-gqa"], 2, 1, **settings) as engine:
        assert engine.info.num_blocks == pytest.approx(2 * one, abs=2)


@pytest.mark.parametrize(
    ("family", "tensor", "pipeline"),
    [
        ("llama-mha-bias", 4, 1),
        pytest.param("llama-mha-bias", 2, 2, marks=pytest.mark.slow),
        pytest.param("qwen3-moe", 4, 1, marks=pytest.mark.slow),
    ],
)
def test_deterministic_ranks_give_the_same_bits_in_any_batch(
    tmp_path: Path, family: str, tensor: int, pipeline: int
) -> None:
    """An all-reduce adds in an order that depends on what else is in the step; theirs does not."""
    folder = write_checkpoint(family, tmp_path / "model", spread=0.6)
    watched = Request("w", [(7 * j) % 190 for j in range(50)], SamplingParams(max_tokens=8, logprobs=1, seed=3))
    with threaded_engine(folder, tensor, pipeline, deterministic=True, num_blocks=200, token_budget=40) as engine:
        engine.submit(watched)
        alone = drain(engine)
        for request in (*requests(), watched):
            engine.submit(request)
        together = [delta for delta in drain(engine) if delta.request_id == "w"]
    assert [delta.tokens for delta in together] == [delta.tokens for delta in alone]
    assert [delta.logprobs for delta in together] == [delta.logprobs for delta in alone]
