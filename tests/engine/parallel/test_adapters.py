"""LoRA adapters on several ranks (R-ENG-8 with R-ENG-10): the tokens of one device, and the same life of an adapter."""

from __future__ import annotations

import random
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from penstock.engine.adapters.spec import AdapterSpec, AdapterStatus
from penstock.engine.core import Engine
from penstock.engine.parallel.adapters import FollowingAdapters
from penstock.engine.request import Delta, Request, SamplingParams
from penstock.engine.startup import adapters as startup_adapters
from tests.engine.adapters.files import ALL, write_adapter
from tests.engine.harness import assert_idle, collect, drain, generate, greedy, make_engine, read_at_once
from tests.engine.parallel.threads import threaded_engine
from tests.engine.tiny import write_checkpoint

GRIDS: list[Any] = [
    ("llama-gqa", 2, 2),
    pytest.param("llama-mqa-tied", 4, 1, marks=pytest.mark.slow),  # one KV head for four shards
    pytest.param("llama-gqa", 2, 1, marks=pytest.mark.slow),
    pytest.param("llama-gqa", 1, 2, marks=pytest.mark.slow),
    pytest.param("llama-gqa", 1, 3, marks=pytest.mark.slow),
    pytest.param("mixtral", 2, 1, marks=pytest.mark.slow),
    pytest.param("mixtral", 2, 2, marks=pytest.mark.slow),
    pytest.param("phi3", 2, 2, marks=pytest.mark.slow),
    pytest.param("qwen3-qknorm", 2, 2, marks=pytest.mark.slow),
]


def adapters_for(base: Path, folder: Path, family: str) -> tuple[AdapterSpec, ...]:
    """Of different ranks, on different linears."""
    targets = {"mixtral": ALL[:4], "phi3": ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")}.get(family, ALL)
    some = ("qkv_proj",) if family == "phi3" else ("q_proj", "v_proj")
    made = [
        write_adapter(folder / "every", base, rank=20, targets=targets, seed=1),
        write_adapter(folder / "some", base, rank=3, targets=some, seed=2),
        write_adapter(folder / "outputs", base, rank=8, targets=[name for name in targets if name not in some], seed=3),
    ]
    return tuple(AdapterSpec(path.name, str(path)) for path in made)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint("llama-gqa", tmp_path_factory.mktemp("adapters") / "llama-gqa")


@pytest.fixture(scope="module")
def specs(base: Path) -> tuple[AdapterSpec, ...]:
    return adapters_for(base, base.parent, "llama-gqa")


@pytest.fixture
def followers(monkeypatch: pytest.MonkeyPatch) -> list[FollowingAdapters]:
    """What the other ranks of engines that are started meanwhile keep."""
    found: list[FollowingAdapters] = []
    handlers = FollowingAdapters.handlers

    def seen(self: FollowingAdapters) -> Any:
        found.append(self)
        return handlers(self)

    monkeypatch.setattr(FollowingAdapters, "handlers", seen)
    return found


def ask(id: str, prompt: list[int], adapter: str, count: int = 8, **params: Any) -> Request:
    return Request(id, prompt, SamplingParams(max_tokens=count, temperature=0.0, **params), adapter=adapter)


def requests(specs: tuple[AdapterSpec, ...], count: int = 8) -> list[Request]:
    """All adapters and none in one batch, so that steps mix prompts and decodes of all of them."""
    names = ["", *(spec.name for spec in specs)]
    return [
        ask(f"r{i}", [(i * 17 + j * 5) % 190 for j in range(3 + 13 * i)], names[i % len(names)], count)
        for i in range(6)
    ]


@pytest.mark.parametrize(("family", "tensor", "pipeline"), GRIDS)
def test_adapters_give_the_tokens_of_one_device(
    tmp_path: Path, family: str, tensor: int, pipeline: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(startup_adapters, "FusedLora", object)  # a narrow decoder too, as on CUDA
    base = write_checkpoint(family, tmp_path / family)
    specs = adapters_for(base, tmp_path, family)
    settings: dict[str, Any] = {"adapters": specs, "token_budget": 32}
    alone = make_engine(base, **settings)
    narrow = ask("narrow", [4, 3, 2, 1], "some")
    expected = generate(alone, *requests(specs)) | generate(alone, narrow)
    assert alone.config.adapter_rank == 20, "slots are made for the largest adapter that is listed"
    with threaded_engine(base, tensor, pipeline, **settings) as engine:
        assert generate(engine, *requests(specs)) | generate(engine, narrow) == expected
        assert_idle(engine)
    plain = generate(make_engine(base), *(ask(r.request_id, r.prompt, "") for r in requests(specs)))
    assert sum(plain[id] != expected[id] for id in plain) >= 3, "the adapters matter"


@pytest.mark.slow
def test_with_speculation_preemption_prefixes_and_few_slots(base: Path, specs: tuple[AdapterSpec, ...]) -> None:
    shared = [7, 3, 9, 1, 4, 4, 2, 8, 6, 5, 3, 1]
    batch = [
        ask(f"p{i}", [*shared * 2, 20 + i % 3], name, 16)
        for i, name in enumerate(["", "every", "some", "outputs", "every", "some"])
    ]
    roomy = make_engine(base, adapters=specs)
    expected: dict[str, list[int]] = {}
    for request in batch:
        expected |= generate(roomy, request)
    tight: dict[str, Any] = {
        "num_blocks": 24, "block_size": 4, "token_budget": 16, "adapter_slots": 2, "adapter_host_slots": 2,
        "speculation": "ngram",
    }  # fmt: skip
    with threaded_engine(base, 2, 2, adapters=specs, **tight) as engine:
        read_at_once(engine)
        for _ in range(2):
            assert generate(engine, *batch) == expected
        load = engine.load_snapshot()
        assert load.preemptions > 0 and load.prefix_hit_tokens > 0
        assert load.adapters is not None and load.adapters.copies > 3 and load.adapters.host_evictions > 0
        assert_idle(engine)


def load(engine: Engine, spec: AdapterSpec) -> AdapterStatus:
    """Load an adapter while the engine runs."""
    statuses: list[AdapterStatus] = []
    assert engine.adapters is not None
    engine.adapters.load(spec, statuses.append)
    while not statuses:
        engine.step()
    return statuses[0]


def test_adapters_come_and_go_on_all_ranks(
    base: Path, specs: tuple[AdapterSpec, ...], tmp_path: Path, followers: list[FollowingAdapters]
) -> None:
    """Load, use, reload with other weights, pin, unload: the other ranks keep exactly what rank 0 keeps."""
    folder = shutil.copytree(specs[0].source, tmp_path / "a")
    prompt = [5, 6, 7] * 9
    alone = make_engine(base, adapters=specs)
    old, new = (generate(alone, ask("x", prompt, spec.name))["x"] for spec in (specs[0], specs[2]))
    assert alone.adapters is not None
    with threaded_engine(base, 2, 2, adapter_slots=2, adapter_rank=20) as engine:
        first = load(engine, AdapterSpec("a", str(folder)))
        assert first.state == "ready" and first.rank == 20
        assert first.version == alone.adapters.version("every"), "engines of other grids call it the same"
        assert generate(engine, ask("x", prompt, "a"))["x"] == old
        engine.submit(ask("old", prompt, "a"))
        deltas: list[Delta] = []
        while not deltas:
            output = engine.step()
            deltas += output.deltas if output else []
        shutil.rmtree(folder)
        shutil.copytree(specs[2].source, folder)
        again = load(engine, AdapterSpec("a", str(folder), pinned=True))
        assert again.version != first.version and again.pinned
        hits = engine.load_snapshot().prefix_hit_tokens
        assert generate(engine, ask("x", prompt, "a"))["x"] == new
        assert engine.load_snapshot().prefix_hit_tokens == hits, "a prefix of the old weights was used"
        assert len(followers) == 3 and all(len(follower._adapters) == 1 for follower in followers)
        engine.unload_adapter("a")
        engine.submit(ask("late", prompt, "a"))
        assert drain(engine)[-1].error == "no adapter is called 'a'"
        assert generate(engine, ask("x", prompt, ""))["x"]
        assert not any(follower._adapters for follower in followers)
        assert_idle(engine)


def test_an_adapter_that_one_rank_cannot_read_fails_alone(
    base: Path, specs: tuple[AdapterSpec, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, gone = FollowingAdapters.read, str(tmp_path / "gone")

    def lose(self: FollowingAdapters, number: int, name: str, source: str, folder: str) -> Any:
        return read(self, number, name, gone, gone) if name == "some" else read(self, number, name, source, folder)

    monkeypatch.setattr(FollowingAdapters, "read", lose)
    with threaded_engine(base, 2, 1, adapters=(*specs, AdapterSpec("broken", gone))) as engine:
        expected = generate(engine, ask("good", [1, 2, 3], "every"))["good"]
        for id, name in (("good", "every"), ("lost", "some"), ("broken", "broken")):
            engine.submit(ask(id, [1, 2, 3], name))
        deltas = drain(engine)
        assert collect(deltas)["good"] == expected
        errors = {delta.request_id: delta.error or "" for delta in deltas if delta.error}
        assert errors["lost"].startswith("the adapter cannot be used: rank 1 (shard 1 of 2, stage 0 of 1)")
        assert "broken is not an adapter" in errors["broken"]
        assert_idle(engine)


def test_a_rank_on_another_machine_finds_the_source_itself(base: Path, specs: tuple[AdapterSpec, ...]) -> None:
    asked: list[str] = []

    def find(source: str) -> Path:
        asked.append(source)
        return Path(specs[0].source)

    model = make_engine(base, adapters=specs).runner.adapters
    assert model is not None
    follower = FollowingAdapters(model.model, find)
    there = follower.read(0, "a", "store:a", "/no/such/folder").result(60)
    here = follower.read(1, "a", "store:a", specs[0].source).result(60)
    assert asked == ["store:a"] and there == here


@pytest.mark.slow
def test_a_mixed_load_with_aborts_and_reloads_gives_what_each_request_gives_alone(base: Path, tmp_path: Path) -> None:
    folders = [write_adapter(tmp_path / f"a{i}", base, rank=1 + 3 * i, seed=i) for i in range(5)]
    specs = tuple(AdapterSpec(folder.name, str(folder)) for folder in folders)
    rng = random.Random(4)
    shared = [rng.randrange(199) for _ in range(40)]
    batch = []
    for i in range(24):
        prompt = shared[: rng.randrange(8, 40)] + [rng.randrange(199)] * rng.randrange(1, 6)
        params = SamplingParams(max_tokens=rng.randrange(4, 20), temperature=rng.choice([0.0, 0.8]), seed=i)
        batch.append(Request(f"r{i}", prompt, params, adapter=rng.choice(["", *(s.name for s in specs)])))
    roomy = make_engine(base, adapters=specs)
    alone: dict[str, list[int]] = {}
    for request in batch:
        alone |= generate(roomy, request)
    tight: dict[str, Any] = {
        "adapter_slots": 2, "adapter_host_slots": 3, "num_blocks": 9, "max_running": 6, "token_budget": 32,
        "speculation": "ngram",
    }  # fmt: skip
    with threaded_engine(base, 2, 2, adapters=specs, **tight) as engine:
        read_at_once(engine)
        pool = engine.adapters
        assert pool is not None
        leaving = [request.request_id for request in batch[::5]]
        for request in batch:
            engine.submit(request)
        deltas: list[Delta] = []
        for step in range(20_000):
            if not engine.has_work:
                break
            output = engine.step()
            deltas += output.deltas if output else []
            if step % 7 == 3 and leaving:
                engine.abort(leaving.pop(0))
            if step % 9 == 5:
                pool.load(rng.choice(specs), lambda status: None)  # again, with the same content
        got = collect(deltas)
        aborted = {delta.request_id for delta in deltas if delta.finish_reason == "abort"}
        assert aborted
        for id, tokens in alone.items():
            assert got.get(id, []) == (tokens[: len(got.get(id, []))] if id in aborted else tokens), id
        assert_idle(engine)
        load = engine.load_snapshot()
        assert load.preemptions > 0 and load.adapters is not None and load.adapters.host_evictions > 0


def test_stages_without_attention_keep_adapters_as_the_others_do(tmp_path: Path) -> None:
    """Beside few bits on CPU they are in float16, which one stage alone does not show."""
    base = write_checkpoint("lfm2", tmp_path / "base", spread=0.5)
    spec = AdapterSpec("a", str(write_adapter(tmp_path / "a", base, targets=("q_proj", "v_proj"))))
    settings = {"weights": "int8", "activations": "int16", "adapters": (spec,), "adapter_slots": 2}
    asked = [greedy("r", list(range(40)), 8), replace(greedy("s", list(range(40)), 8), adapter="a")]
    expected = generate(make_engine(base, **settings), *asked)
    assert expected["r"] != expected["s"]
    with threaded_engine(base, 1, 2, **settings) as engine:
        assert generate(engine, *asked) == expected
