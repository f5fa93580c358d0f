"""Many adapters on few slots: loading on first use, eviction, unloading, and what a bad adapter does to others."""

from __future__ import annotations

import json
import random
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from penstock.engine.adapters.loader import Loader
from penstock.engine.adapters.peft import LoadedAdapter
from penstock.engine.adapters.spec import AdapterSpec, AdapterStatus
from penstock.engine.config import EngineConfig
from penstock.engine.core import Engine
from penstock.engine.request import Delta
from penstock.engine.startup import adapters as startup_adapters
from penstock.errors import ConfigError
from tests.engine.adapters.files import write_adapter
from tests.engine.adapters.test_equals_merging import ask, prompts
from tests.engine.harness import assert_idle, collect, drain, generate, make_engine, read_at_once
from tests.engine.tiny import write_checkpoint


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint("llama-gqa", tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="module")
def folders(base: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    root = tmp_path_factory.mktemp("adapters")
    return [write_adapter(root / f"a{i}", base, rank=1 + i % 4, seed=i) for i in range(100)]


def specs_of(folders: list[Path], **settings: Any) -> tuple[AdapterSpec, ...]:
    return tuple(AdapterSpec(folder.name, str(folder), **settings) for folder in folders)


def load(engine: Engine, spec: AdapterSpec, deltas: list[Delta] | None = None) -> AdapterStatus:
    """Load through the engine's interface and wait for the result. The engine steps only when the files are read,
    however long that takes, so that what runs does not end meanwhile; what it says goes to `deltas`."""
    results: list[AdapterStatus] = []
    assert engine.adapters is not None
    engine.adapters.load(spec, results.append)
    while not results:
        engine.adapters.registry.wait(60.0)
        output = engine.step()
        if output is not None and deltas is not None:
            deltas += output.deltas
    return results[0]


def ends(deltas: list[Delta]) -> dict[str, Delta]:
    return {delta.request_id: delta for delta in deltas if delta.finish_reason is not None}


@pytest.mark.slow
def test_a_hundred_adapters_on_twenty_slots(base: Path, folders: list[Path]) -> None:
    """Random order, some several times, mixed with the base model; each answer is that of the adapter alone."""
    specs = specs_of(folders)
    roomy = make_engine(base, adapters=specs, adapter_slots=100, num_blocks=2000)
    prompt = prompts(1)[0]
    names = [spec.name for spec in specs] + [""]
    alone = {name: generate(roomy, ask("x", prompt, name, 4))["x"] for name in names}
    assert len({tuple(tokens) for tokens in alone.values()}) > 80, "the adapters differ too little to tell them apart"

    engine = make_engine(base, adapters=specs, adapter_slots=20, adapter_host_slots=40, num_blocks=2000)
    order = names * 2
    random.Random(3).shuffle(order)
    got = generate(engine, *(ask(f"{i}", prompt, name, 4) for i, name in enumerate(order)))
    assert [got[str(i)] for i in range(len(order))] == [alone[name] for name in order]
    assert_idle(engine)
    state = engine.load_snapshot().adapters
    assert state is not None and state.on_device <= 20 and state.on_host <= 40 and not state.waiting
    assert state.copies >= 100 and state.host_evictions >= 60
    engine.scheduler.adapters.slots.check()  # type: ignore[union-attr]


def test_more_adapters_than_slots_in_one_batch_wait_without_blocking_the_rest(base: Path, folders: list[Path]) -> None:
    engine = read_at_once(make_engine(base, adapters=specs_of(folders[:4]), adapter_slots=2))
    for name in ("a0", "a1", "a2", "a3", ""):
        engine.submit(ask(name or "base", [1, 2, 3], name, 12))
    most, finished = 0, []
    while engine.has_work:
        output = engine.step()
        load = engine.load_snapshot().adapters
        assert load is not None
        most = max(most, len(load.running))
        finished += [d.request_id for d in output.deltas if d.finish_reason] if output else []
    assert most == 2 and len(finished) == 5
    assert "base" in finished[:3], "the base model does not wait for slots"


def test_an_old_request_gets_its_slot_although_others_keep_coming(base: Path, folders: list[Path]) -> None:
    engine = read_at_once(make_engine(base, adapters=specs_of(folders[:3]), adapter_slots=2))
    now = 0.0
    engine.clock = lambda: now  # type: ignore[method-assign]
    done: set[str] = set()
    for i in range(400):
        now += 0.1
        for name in ("a0", "a1"):
            engine.submit(ask(f"{name}-{i}", [1, 2, 3], name, 8))
        if i == 5:
            engine.submit(ask("patient", [1, 2, 3], "a2", 8))
        output = engine.step()
        done |= {d.request_id for d in output.deltas if d.finish_reason} if output else set()
        if "patient" in done:
            break
    assert "patient" in done and i < 100
    drain(engine)
    assert_idle(engine)


def test_loading_delays_no_other_request(base: Path, folders: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """While an adapter is being read, others produce every one of their tokens."""
    gate = threading.Event()
    read = startup_adapters.read_adapter

    def slow(name: str, *args: Any, **settings: Any) -> Any:
        assert name != "a1" or gate.wait(200)
        return read(name, *args, **settings)

    monkeypatch.setattr(startup_adapters, "read_adapter", slow)
    engine = make_engine(base, adapters=specs_of(folders[:2]))
    engine.submit(ask("slow", [1, 2, 3], "a1", 4))
    got = []
    for id, name in (("base", ""), ("other", "a0")):
        engine.submit(ask(id, [1, 2, 3], name, 20))
    while len(got) < 2:
        output = engine.step()
        got += [d.request_id for d in output.deltas if d.finish_reason] if output else []
    assert set(got) == {"base", "other"}
    load_now = engine.load_snapshot()
    assert load_now.waiting == 1 and load_now.adapters is not None and load_now.adapters.waiting == ["a1"]
    gate.set()
    assert len(collect(drain(engine))["slow"]) == 4
    assert_idle(engine)


def broken(folder: Path, good: Path, how: str) -> Path:
    shutil.copytree(good, folder)
    config = json.loads((folder / "adapter_config.json").read_text())
    weights = load_file(folder / "adapter_model.safetensors")
    first = next(name for name in weights if "lora_A" in name)
    match how:
        case "no such folder":
            shutil.rmtree(folder)
        case "no weights":
            (folder / "adapter_model.safetensors").unlink()
        case "no config":
            (folder / "adapter_config.json").unlink()
        case "damaged":
            (folder / "adapter_model.safetensors").write_bytes(b"\x10\0\0\0\0\0\0\0nonsense")
        case "wrong shape":
            weights[first] = weights[first][:, :-1].contiguous()
        case "wrong rank":
            config["r"] += 1
        case "no partner":
            del weights[first]
        case "not finite":
            weights[first][0, 0] = float("nan")
        case "another module":
            weights["base_model.model.classifier.lora_A.weight"] = torch.zeros(1, 64)
        case "too many layers":
            weights[first.replace("layers.0", "layers.7")] = weights[first].clone()
        case "rank above the limit":
            config["r"] = 17
        case "modules_to_save":
            config["modules_to_save"] = ["lm_head"]
        case "bias":
            config["bias"] = "some"
        case "use_dora":
            config["use_dora"] = True
        case "peft_type":
            config["peft_type"] = "HRA"
        case "pissa":
            config["init_lora_weights"] = "pissa_niter_4"
    if (folder / "adapter_config.json").exists():
        (folder / "adapter_config.json").write_text(json.dumps(config))
    if how not in ("damaged", "no weights", "no such folder"):
        save_file(weights, folder / "adapter_model.safetensors")
    return folder


PROBLEMS = {
    "no such folder": "no-such-folder is not an adapter",
    "no weights": "no adapter_model.safetensors",
    "no config": "no adapter_config.json",
    "damaged": "damaged or incomplete",
    "wrong shape": "rank 1 on this model needs (1, ",
    "wrong rank": "rank 2 on this model needs",
    "no partner": "has no lora_A",
    "not finite": "not finite",
    "another module": "cannot apply",
    "too many layers": "beyond the model's 3 layers",
    "rank above the limit": "rank 17 is above adapter_rank 16",
    "modules_to_save": "modules_to_save has lm_head, and adapter_model.safetensors does not",
    "bias": "bias is 'some', which LoRA adapters do not support",
    "use_dora": "has no lora_magnitude_vector, but adapter_config.json has use_dora: True",
    "peft_type": "peft_type HRA is not supported: it multiplies matrices of the model",
    "pissa": "changes the base model",
}


def test_a_bad_adapter_is_a_clear_error_and_affects_no_other_request(
    base: Path, folders: list[Path], tmp_path: Path
) -> None:
    bad = tuple(AdapterSpec(how.replace(" ", "-"), str(broken(tmp_path / how, folders[0], how))) for how in PROBLEMS)
    engine = make_engine(base, adapters=(*specs_of(folders[:1]), *bad), adapter_rank=16)
    expected = generate(engine, ask("x", [1, 2, 3], "a0", 12))["x"]
    for spec in bad:
        engine.submit(ask(spec.name, [1, 2, 3], spec.name, 12))
    engine.submit(ask("good", [1, 2, 3], "a0", 12))
    deltas = drain(engine)
    assert collect(deltas)["good"] == expected
    for how, sentence in PROBLEMS.items():
        end = ends(deltas)[how.replace(" ", "-")]
        assert end.finish_reason == "error" and sentence in (end.error or ""), (how, end.error)
        assert end.error is not None and end.error.startswith("the adapter cannot be used")
    assert_idle(engine)


def test_an_adapter_that_does_not_fit_the_device_fails_alone(
    base: Path, folders: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine(base, adapters=specs_of(folders[:2]), adapter_slots=2)
    expected = generate(engine, ask("x", [1, 2, 3], "a0", 8), ask("y", [1, 2, 3], "", 8))
    assert engine.runner.adapters is not None
    kernel, budget = engine.runner.adapters.kernel, engine.scheduler.token_budget
    put = kernel.put

    def full(slot: int, adapter: LoadedAdapter) -> None:
        if adapter.name == "a1":
            raise torch.OutOfMemoryError("no")
        put(slot, adapter)

    monkeypatch.setattr(kernel, "put", full)
    for turn in range(2):
        engine.submit(ask(f"big{turn}", [1, 2, 3], "a1", 8))
        for request in (ask(f"x{turn}", [1, 2, 3], "a0", 8), ask(f"y{turn}", [1, 2, 3], "", 8)):
            engine.submit(request)
        deltas = drain(engine)
        assert "adapter a1 does not fit into device memory" in (ends(deltas)[f"big{turn}"].error or "")
        found = collect(deltas)
        assert (found[f"x{turn}"], found[f"y{turn}"]) == (expected["x"], expected["y"])
    assert engine.scheduler.token_budget == budget
    monkeypatch.undo()
    assert len(generate(engine, ask("now", [1, 2, 3], "a1", 8))["now"]) == 8
    assert_idle(engine)


def test_a_reason_is_never_long() -> None:
    loader: Loader[str] = Loader(lambda name, source: (_ for _ in ()).throw(ConfigError("x" * 10**6)))
    loader.start("a", "a", "a")
    loader.wait(60)
    (result,) = loader.finished()
    assert len(result.error) == 2000


def test_the_host_decides_where_an_adapter_comes_from(base: Path, folders: list[Path]) -> None:
    asked: list[str] = []

    def find(source: str) -> Path:
        asked.append(source)
        return folders[0]

    config = EngineConfig(model=str(base), adapters=(AdapterSpec("a0", "store:a0"),))
    found = generate(Engine.load(config, find_adapter=find), ask("x", [1, 2, 3], "a0", 12))["x"]
    plain = make_engine(base, adapters=specs_of(folders[:1]))
    assert found == generate(plain, ask("x", [1, 2, 3], "a0", 12))["x"]
    assert asked == ["store:a0"]


def test_unknown_adapters_are_refused(base: Path, folders: list[Path]) -> None:
    engine = make_engine(base, adapters=specs_of(folders[:1]))
    engine.submit(ask("x", [1], "nobody"))
    assert ends(drain(engine))["x"].error == "no adapter is called 'nobody'"
    off = make_engine(base)
    off.submit(ask("x", [1], "a0"))
    assert "serves no adapters" in (ends(drain(off))["x"].error or "")
    assert off.adapters is None and off.load_snapshot().adapters is None


def test_unload_while_in_use(base: Path, folders: list[Path]) -> None:
    """What runs finishes with the adapter; the name is free at once, and its memory after the last user."""
    engine = make_engine(base, adapters=specs_of(folders[:1]), adapter_slots=2)
    expected = generate(engine, ask("x", [1, 2, 3], "a0", 30))["x"]
    engine.submit(ask("x", [1, 2, 3], "a0", 30))
    tokens: list[int] = []
    while len(tokens) < 5:
        output = engine.step()
        tokens += [token for delta in output.deltas for token in delta.tokens] if output else []
    engine.unload_adapter("a0")
    engine.submit(ask("late", [1, 2, 3], "a0", 30))
    deltas = drain(engine)
    assert tokens + collect(deltas)["x"] == expected
    assert ends(deltas)["late"].finish_reason == "error"
    state = engine.load_snapshot().adapters
    assert state is not None and state.on_device == state.on_host == 0
    with pytest.raises(ConfigError, match="no adapter is called 'a0'"):
        engine.unload_adapter("a0")


def test_a_reload_with_other_weights_never_meets_old_prefixes(base: Path, folders: list[Path], tmp_path: Path) -> None:
    folder = shutil.copytree(folders[1], tmp_path / "a")
    engine = make_engine(base, adapter_slots=2)
    prompt = prompts(1, longest=200)[0] * 3
    assert load(engine, AdapterSpec("a", str(folder))).state == "ready"
    first = generate(engine, ask("x", prompt, "a"))["x"]
    running = ask("running", prompt, "a", 24)
    engine.submit(running)
    engine.step()
    shutil.rmtree(folder)
    shutil.copytree(folders[2], folder)
    hits = engine.load_snapshot().prefix_hit_tokens
    assert load(engine, AdapterSpec("a", str(folder))).version != ""
    second = generate(engine, ask("x", prompt, "a"))["x"]
    assert engine.load_snapshot().prefix_hit_tokens == hits, "a prefix of the old weights was used for the new ones"
    fresh = make_engine(base, adapters=(AdapterSpec("a", str(folder)),))
    assert second == generate(fresh, ask("x", prompt, "a"))["x"] != first


def test_the_request_that_was_running_keeps_its_weights_across_a_reload(
    base: Path, folders: list[Path], tmp_path: Path
) -> None:
    engine = make_engine(base, adapter_slots=2)
    load(engine, AdapterSpec("a", str(folders[1])))
    expected = generate(engine, ask("x", [5, 6, 7], "a", 24))["x"]
    engine.submit(ask("x", [5, 6, 7], "a", 24))
    deltas: list[Delta] = []
    while not deltas:
        output = engine.step()
        deltas += output.deltas if output is not None else []
    load(engine, AdapterSpec("a", str(folders[2])), deltas)
    assert not ends(deltas), "it is still running"
    deltas += drain(engine)
    assert collect(deltas)["x"] == expected


def test_pinned_adapters_are_read_at_start_and_keep_their_slot(base: Path, folders: list[Path]) -> None:
    pinned, others = specs_of(folders[:1], pinned=True), specs_of(folders[1:5])
    engine = make_engine(base, adapters=(*pinned, *others), adapter_slots=2, adapter_host_slots=2)
    pool = engine.adapters
    assert pool is not None
    while pool.registry.loading:
        engine.step()
    assert next(s for s in pool.statuses() if s.name == "a0").state == "ready", "it was not asked for yet"
    for name in ("a0", "a1", "a2", "a3", "a4"):
        generate(engine, ask(name, [1, 2], name))
    states = {status.name: status for status in pool.statuses()}
    assert states["a0"].on_device and states["a0"].pinned and states["a1"].state == "known"
    with pytest.raises(ConfigError, match="one of 2 slots must stay free"):
        pool.pin("a4", True)
    assert not pool.pin("a0", False).pinned
    assert pool.pin("a4", True).pinned
    with pytest.raises(ConfigError, match="at most 1 can be"):
        make_engine(base, adapters=specs_of(folders[:2], pinned=True), adapter_slots=2)


def test_requests_end_cleanly_wherever_they_wait(base: Path, folders: list[Path]) -> None:
    engine = read_at_once(make_engine(base, adapters=specs_of(folders[:3]), adapter_slots=1))
    now = 0.0
    engine.clock = lambda: now  # type: ignore[method-assign]
    for i, name in enumerate(("a0", "a1", "a2", "a1")):
        engine.submit(ask(f"r{i}", [1, 2, 3], name, 50, timeout_s=5.0 if i == 3 else None))
    engine.abort("r2")  # while it waits to be read
    deltas = []
    for _ in range(30):
        output = engine.step()
        deltas += output.deltas if output else []
    engine.abort("r1")  # while it waits for a slot
    now = 10.0
    deltas += drain(engine)
    assert {id: delta.finish_reason for id, delta in ends(deltas).items()} == {
        "r0": "length", "r1": "abort", "r2": "abort", "r3": "timeout"
    }  # fmt: skip
    assert_idle(engine)


def test_preempted_sequences_come_back_with_their_adapter(base: Path, folders: list[Path]) -> None:
    specs = specs_of(folders[:4])
    requests = [ask(f"r{i}", prompt, f"a{i % 4}", 40) for i, prompt in enumerate(prompts(6, longest=40))]
    roomy = make_engine(base, adapters=specs)
    expected = {}
    for request in requests:
        expected |= generate(roomy, request)
    tight = read_at_once(make_engine(base, adapters=specs, num_blocks=12, adapter_slots=2))
    assert generate(tight, *requests) == expected
    assert tight.load_snapshot().preemptions > 0
    assert_idle(tight)
