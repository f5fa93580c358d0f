"""A rank that is lost is started again alone: the others keep their weights, and the output is that of one device."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path
from typing import Any, cast
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from penstock.engine.core import Engine
from penstock.engine.models.calibration import calibrate
from penstock.engine.models.decoder import Decoder
from penstock.engine.models.layers.linear import Linear
from penstock.engine.parallel import experts, launch
from penstock.engine.startup import engine as startup
from penstock.engine.startup import part
from penstock.errors import ConfigError, ReplicaLost
from tests.engine.harness import assert_idle, collect, drain, generate, greedy, make_engine
from tests.engine.parallel.lost_rank import lose, run_losing
from tests.engine.parallel.threads import ThreadProcess, _spawn, threaded_engine
from tests.engine.speculative.forced import verify_everything
from tests.engine.speculative.mtp_layers import write_mtp
from tests.engine.tiny import write_checkpoint
from tests.engine_host.client import eventually

BATCH = [greedy(f"r{i}", [(i * 17 + j * 5) % 190 for j in range(3 + 9 * i)], 16) for i in range(4)]
SETTINGS: dict[str, Any] = {"token_budget": 32, "rank_restarts": 2, "kv_dtype": "full", "watchdog_s": 120}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint("qwen3-moe-some-dense", tmp_path_factory.mktemp("restart") / "model")


@pytest.fixture(scope="module")
def expected(folder: Path) -> dict[str, list[int]]:
    return generate(make_engine(folder, token_budget=32, kv_dtype="full"), *BATCH)


def run_and_lose(engine: Engine, rank: int) -> dict[str, list[int]]:
    return collect(run_losing(engine, BATCH, rank))


@pytest.mark.parametrize(
    ("tensor", "pipeline", "rank", "more"),
    [
        (2, 1, 1, {"expert_parallel": True, "expert_copies": 1}),
        pytest.param(2, 2, 3, {"expert_parallel": True}, marks=pytest.mark.slow),
        pytest.param(2, 2, 1, {"expert_parallel": True, "attention_parallel": "data"}, marks=pytest.mark.slow),
        pytest.param(4, 1, 2, {"expert_parallel": True, "attention_parallel": "data"}, marks=pytest.mark.slow),
        pytest.param(2, 2, 2, {}, marks=pytest.mark.slow),
    ],
)
def test_running_sequences_go_on(
    folder: Path, expected: dict[str, list[int]], tensor: int, pipeline: int, rank: int, more: dict[str, Any]
) -> None:
    as_threads = patch.object(launch, "_spawn", _spawn)
    with threaded_engine(folder, tensor, pipeline, **SETTINGS, **more) as engine, as_threads:
        assert engine.ranks is not None
        kept = [other.process for other in engine.ranks._ranks if other.place.rank != rank]
        assert run_and_lose(engine, rank) == expected
        assert engine.load_snapshot().preemptions > 0
        now = [other.process for other in engine.ranks._ranks if other.place.rank != rank]
        assert all(one is other for one, other in zip(kept, now, strict=True)), "the others were not started again"
        assert generate(engine, *BATCH) == expected
        assert_idle(engine)


def test_a_rank_that_takes_long_to_exit_is_waited_for(
    folder: Path, expected: dict[str, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a large one does, which gives back its memory. Others notice before its process is gone."""
    monkeypatch.setattr(launch, "_SIGN_S", 0.1)
    monkeypatch.setattr(ThreadProcess, "linger_s", 1.0)
    as_threads = patch.object(launch, "_spawn", _spawn)
    with threaded_engine(folder, 1, 2, **SETTINGS) as engine, as_threads:
        assert engine.ranks is not None
        assert run_and_lose(engine, 1) == expected
        assert engine.ranks.generation == 1
        assert_idle(engine)


@pytest.mark.parametrize(
    ("kind", "more"),
    [
        pytest.param("host", {}, marks=pytest.mark.slow),
        pytest.param("disk", {}, marks=pytest.mark.slow),
        pytest.param("disk that keeps", {}, marks=pytest.mark.slow),
        pytest.param("host", {"expert_parallel": True, "attention_parallel": "data"}, marks=pytest.mark.slow),
        pytest.param(
            "disk that keeps", {"expert_parallel": True, "attention_parallel": "data"}, marks=pytest.mark.slow
        ),
    ],
)
def test_tiers_behind_the_cache_go_on_with_what_the_disk_keeps(
    folder: Path, expected: dict[str, list[int]], tmp_path: Path, kind: str, more: dict[str, Any]
) -> None:
    prompts = [[(i * 31 + 7 * j * j) % 190 for j in range(100)] for i in range(4)]
    told = [greedy(f"t{i}", prompt, 4) for i, prompt in enumerate(prompts)]
    said = generate(make_engine(folder, kv_dtype="full"), *told)
    tiers: dict[str, Any] = {"num_blocks": 16, "host_memory": 1 << 20, "host_idle_s": 0.0}
    if kind != "host":
        persistent = kind == "disk that keeps"
        tiers |= {"disk_memory": 4 << 20, "disk_path": str(tmp_path), "disk_persistent": persistent}
    as_threads = patch.object(launch, "_spawn", _spawn)
    with threaded_engine(folder, 2, 1, **SETTINGS, **tiers, **more) as engine, as_threads:
        for turn in range(2):
            assert generate(engine, *told) == said
            while engine.settle():
                pass
            assert run_and_lose(engine, 1) == expected
            for request in told:
                engine.submit(request)
            deltas = drain(engine)
            assert collect(deltas) == said
            first = {delta.request_id: delta.cached_tokens for delta in deltas if delta.cached_tokens is not None}
            found = 96 if kind == "disk that keeps" else 0
            assert first == dict.fromkeys(said, found), f"turn {turn}"
            assert_idle(engine)
            for host in engine.scheduler.allocator.hosts:
                host.check()


@pytest.mark.slow
def test_an_erasure_outlives_a_rank(folder: Path, tmp_path: Path) -> None:
    prompt = [7 * i * i % 190 for i in range(100)]
    said = generate(make_engine(folder, kv_dtype="full"), greedy("r", prompt, 4))
    tiers = {"host_memory": 1 << 20, "disk_memory": 4 << 20, "disk_path": str(tmp_path), "disk_persistent": True}
    with threaded_engine(folder, 2, 1, **SETTINGS, **tiers) as engine, patch.object(launch, "_spawn", _spawn):
        assert generate(engine, greedy("r", prompt, 4)) == said
        while engine.settle():
            pass
        assert engine.ranks is not None
        other = engine.ranks._ranks[0]
        lose(engine, 1)
        assert eventually(lambda: other.process.poll() is not None)
        erasures = [engine.erase("")]
        assert erasures[0].blocks
        while not erasures[-1].advance():
            if engine.has_work:
                engine.step()
        assert engine.ranks._ranks[0] is not other and erasures[0].failed, "the rank's part is still there"
        erasures.append(engine.erase(""))
        assert eventually(erasures[1].advance)
        assert not erasures[1].blocks and not erasures[1].failed
        parts = list(tmp_path.glob("kv-cache/*/*/rank*.blocks"))
        assert len(parts) == 2 and not any(any(part.read_bytes()) for part in parts)
        assert generate(engine, greedy("r", prompt, 4)) == said


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["draft", "alone", "mtp"])
@pytest.mark.parametrize(
    ("tensor", "pipeline", "more"),
    [(2, 1, {}), (1, 2, {}), (2, 2, {"expert_parallel": True, "attention_parallel": "data"})],
)
def test_a_drafter_goes_on(tmp_path: Path, kind: str, tensor: int, pipeline: int, more: dict[str, Any]) -> None:
    folder = write_mtp("glm4-moe", tmp_path)
    expected = generate(make_engine(folder, kv_dtype="full"), *BATCH)
    shards = {"alone": 1, "draft": tensor}.get(kind)
    drafter = {} if shards is None else {"draft_model": str(folder), "draft_tensor_parallel": shards}
    kind = "draft" if drafter else kind
    as_threads = patch.object(launch, "_spawn", _spawn)
    settings = {**SETTINGS, **more, **drafter, "speculation": kind}
    with threaded_engine(folder, tensor, pipeline, **settings) as engine, as_threads:
        assert engine.speculation is not None
        verify_everything(engine.speculation)
        for _ in range(2):
            assert run_and_lose(engine, tensor * pipeline - 1) == expected
        load = engine.load_snapshot()
        assert load.preemptions > 0 and load.draft_tokens > 20
        if kind == "draft":
            assert load.accepted_tokens > 0.8 * load.draft_tokens, "it is the model itself"
        assert_idle(engine)


@pytest.mark.slow
@pytest.mark.parametrize("rank", [1, 3])
def test_a_draft_model_on_fewer_shards_than_the_model_goes_on(tmp_path: Path, rank: int) -> None:
    folder = write_checkpoint("llama-mqa-tied", tmp_path / "model")
    expected = generate(make_engine(folder, kv_dtype="full"), *BATCH)
    draft = {"speculation": "draft", "draft_model": str(folder), "draft_tensor_parallel": 2}
    as_threads = patch.object(launch, "_spawn", _spawn)
    with threaded_engine(folder, 4, 1, **SETTINGS, **draft) as engine, as_threads:
        assert engine.speculation is not None
        verify_everything(engine.speculation)
        for _ in range(2):
            assert run_and_lose(engine, rank) == expected
        load = engine.load_snapshot()
        assert load.preemptions > 0 and load.accepted_tokens > 0.8 * load.draft_tokens > 20
        assert_idle(engine)


@pytest.mark.slow
def test_experts_that_had_moved_are_where_they_were(
    folder: Path, expected: dict[str, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(experts, "_VISITS", 4)
    more = {"expert_parallel": True, "expert_copies": 1, "expert_rebalance_s": 1e-6}
    as_threads = patch.object(launch, "_spawn", _spawn)
    with threaded_engine(folder, 2, 1, **SETTINGS, **more) as engine, as_threads:
        balancer = engine.balancer
        assert isinstance(balancer, experts.ExpertBalancer)
        while not balancer.moved:
            assert generate(engine, *BATCH) == expected
        balancer.period_s = 0.0
        tables = dict(balancer._tables)
        for _ in range(2):
            assert run_and_lose(engine, 1) == expected
            assert balancer._tables == tables and tables != balancer._first


@pytest.mark.slow
def test_a_process_that_is_killed_is_replaced_so_often_and_no_oftener(
    folder: Path, expected: dict[str, list[int]]
) -> None:
    settings = {**SETTINGS, "rank_restarts": 1, "expert_parallel": True}
    engine = make_engine(folder, threads=1, tensor_parallel=2, **settings)
    assert engine.ranks is not None
    lost: list[str] = []
    engine.ranks.watch(lost.append, exit_after_s=None)
    try:
        for request in BATCH:
            engine.submit(request)
        output = engine.step()
        deltas = output.deltas if output is not None else []
        (pid,) = engine.ranks.pids
        os.kill(pid, signal.SIGKILL)
        deltas += drain(engine)
        assert collect(deltas) == expected and not lost
        (again,) = engine.ranks.pids
        assert again != pid
        engine.submit(BATCH[0])
        engine.step()
        os.kill(again, signal.SIGKILL)
        with pytest.raises(ReplicaLost, match="killed by SIGKILL"):
            drain(engine)
    finally:
        engine.close()


def test_a_rank_that_cannot_be_started_ends_the_engine_and_whoever_waits_for_it(folder: Path) -> None:
    with threaded_engine(folder, 2, 1, **SETTINGS) as engine:
        engine.submit(BATCH[0])
        engine.step()
        lose(engine, 1)
        with (
            patch.object(launch, "_spawn", side_effect=BlockingIOError("no more processes")),
            pytest.raises(ReplicaLost, match="could not be replaced: no more processes"),
        ):
            drain(engine)
        assert engine.ranks is not None and not engine.ranks.await_restart(engine.ranks.generation)


def test_what_a_rank_could_not_do_while_all_calibrated_is_what_the_engine_fails_with(folder: Path) -> None:
    here = threading.current_thread()

    def fails_elsewhere(*args: Any, **options: Any) -> Decoder:
        if threading.current_thread() is not here:
            raise ConfigError("no room for calibration")
        return calibrate(*args, **options)

    settings = {**SETTINGS, "kv_dtype": "int8"}
    with (
        patch.object(part, "calibrate", fails_elsewhere),
        pytest.raises(ConfigError, match=r"rank 1 .*: no room for calibration"),
        threaded_engine(folder, 2, 1, **settings),
    ):
        pass


@pytest.mark.slow
def test_an_idle_engine_notices_and_is_ready_for_the_next_request(folder: Path, expected: dict[str, list[int]]) -> None:
    engine = make_engine(folder, threads=1, tensor_parallel=2, **SETTINGS)
    assert engine.ranks is not None
    engine.ranks.watch(lambda why: None, exit_after_s=None)
    try:
        assert generate(engine, *BATCH) == expected and not engine.has_work
        os.kill(engine.ranks.pids[0], signal.SIGKILL)
        assert eventually(lambda: engine.has_work), "to replace it"
        drain(engine)
        assert generate(engine, *BATCH) == expected
    finally:
        engine.close()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("tensor", "pipeline", "more"),
    [
        # Deterministic: a token computed in a prompt again has the numbers that it had as a decode.
        (2, 1, {"weights": "int8", "kv_dtype": "int8", "deterministic": True}),
        (2, 2, {"weights": "int4", "kv_dtype": "int8", "deterministic": True}),
        # Inputs are observed where there are matrix tiles.
        (2, 1, {"weights": "int8", "dtype": "bfloat16", "deterministic": True}),
        (2, 1, {"kv_dtype": "int8", "expert_parallel": True, "attention_parallel": "data"}),
    ],
    ids=str,
)
def test_what_calibration_found_is_kept_for_the_new_rank(
    folder: Path, tensor: int, pipeline: int, more: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[list[Any]] = []

    def noted(*args: Any, **options: Any) -> Decoder:
        decoder = calibrate(*args, **options)
        found.append([getattr(layer.mixer, "key_smoothing", None) for layer in decoder.layers])
        return decoder

    monkeypatch.setattr(part, "calibrate", noted)
    as_threads = patch.object(launch, "_spawn", _spawn)
    with threaded_engine(folder, tensor, pipeline, **{**SETTINGS, **more}) as engine, as_threads:
        expected = generate(engine, *BATCH)
        assert len(found) == tensor * pipeline
        for _ in range(2):
            assert run_and_lose(engine, tensor * pipeline - 1) == expected
        assert generate(engine, *BATCH) == expected
        assert_idle(engine)
    assert len(found) == tensor * pipeline + 2
    before = [smoothing for smoothing in found[:-2] if _same(smoothing, found[-1])]
    assert before and _same(found[-1], found[-2])


def _same(one: list[Any], other: list[Any]) -> bool:
    if [smoothing is None for smoothing in one] != [smoothing is None for smoothing in other]:
        return False
    pairs = [pair for pair in zip(one, other, strict=True) if pair[0] is not None]
    return all(torch.equal(a.centre, b.centre) and torch.equal(a.scale, b.scale) for a, b in pairs)


def test_what_calibration_found_is_read_from_its_file(folder: Path, tmp_path: Path) -> None:
    """Inputs of linears and ranges of keys, to the bit; nothing runs a second time."""
    file, seen = tmp_path / "kept.safetensors", list[Tensor]()

    class Observer:
        def __init__(self, linear: Linear) -> None:
            self.linear, self.squares = linear, torch.zeros(3)

        def see(self, x: Tensor) -> None:
            self.squares += x.float().square().sum() * torch.arange(3)

        def finish(self) -> None:
            seen.append(self.squares)

    engine = make_engine(folder, kv_dtype="full")
    decoder, backend = engine.runner.decoder, engine.runner.backend
    with patch.object(type(backend), "input_observers", lambda _, linears: [Observer(decoder.head)]):
        first = calibrate(decoder, backend, int8_cache=True, kept=file)
        again = calibrate(decoder, backend, int8_cache=True, kept=file, together=lambda *_: pytest.fail("it runs"))
    assert seen[0].any() and torch.equal(*seen)
    smoothing = [[cast(Any, layer.mixer).key_smoothing for layer in each.layers] for each in (first, again)]
    assert smoothing[0][0] is not None and _same(*smoothing)


def test_devices_other_than_cpus_are_refused(folder: Path) -> None:
    with (
        pytest.raises(ConfigError, match="there the engine restarts as a whole"),
        patch.object(startup, "pick_device", lambda _: torch.device("cuda")),
    ):
        make_engine(folder, tensor_parallel=2, **SETTINGS)
