"""Engines whose ranks share one GPU, as `peer_ranks` runs them: each function in a process of its own."""

from __future__ import annotations

import dataclasses
import itertools
import json
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
from safetensors.torch import save_file  # noqa: E402

from penstock.bench import shapes  # noqa: E402
from penstock.bench.shard import decode_s, shard_shape  # noqa: E402
from penstock.bench.soak.engines import verify_everything  # noqa: E402
from penstock.engine.adapters.spec import AdapterSpec  # noqa: E402
from penstock.engine.backends.cuda.graphs import GraphExecutor  # noqa: E402
from penstock.engine.config import EngineConfig  # noqa: E402
from penstock.engine.core import Engine  # noqa: E402
from penstock.engine.loading.random_checkpoint import RandomCheckpoint  # noqa: E402
from penstock.engine.sleep.offload import offload  # noqa: E402
from tests.engine.adapters.files import ALL, MODULES  # noqa: E402
from tests.engine.harness import assert_idle, carry, generate, greedy, make_engine  # noqa: E402
from tests.engine.tiny import write_checkpoint  # noqa: E402
from tests.gpu.peer_ranks import JOBS  # noqa: E402

SMALL: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 499,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 512,
}
WATCHDOG_S = 60.0 * JOBS


def load(config: dict[str, Any], ranks: int, dtype: torch.dtype, stages: int = 1, **settings: Any) -> Engine:
    given = {"device": "cuda", "dtype": str(dtype).removeprefix("torch."), "watchdog_s": WATCHDOG_S, **settings}
    if ranks * stages > 1:
        devices = ("cuda:0",) * (ranks * stages)
        given |= {"tensor_parallel": ranks, "pipeline_parallel": stages, "devices": devices}
    checkpoint = RandomCheckpoint(config, device="cuda", dtype=dtype)
    return Engine.load(EngineConfig("random", **given), checkpoint=checkpoint)


def requests() -> list[Any]:
    rng = random.Random(1)
    return [greedy(f"r{n}", [rng.randrange(499) for _ in range(n)], 24) for n in (1, 9, 33, 70, 200)]


def engine_tokens(ranks: int, stages: int = 1) -> dict[str, Any]:
    """The same requests on one rank and on several; on those twice, and how many steps were replayed."""
    small: dict[str, Any] = {"max_running": 8, "num_blocks": 200, "token_budget": 128}
    engine = load(SMALL, 1, torch.float32, **small)
    expected = generate(engine, *requests())
    engine.close()
    begin = time.perf_counter()
    engine = load(SMALL, ranks, torch.float32, stages, **small)
    started = time.perf_counter() - begin
    executor = engine.runner.executor
    captured = isinstance(executor, GraphExecutor)
    replays = 0
    if isinstance(executor, GraphExecutor):
        replay = executor.graphs.replay

        def counted(batch: Any) -> Any:
            nonlocal replays
            replays += 1
            return replay(batch)

        executor.graphs.replay = counted  # type: ignore[method-assign]
    got, again = generate(engine, *requests()), generate(engine, *requests())
    assert_idle(engine)
    engine.close()
    return {
        "expected": expected, "got": got, "again": again, "captured": captured, "replays": replays, "start_s": started,
    }  # fmt: skip


def engine_adapters(ranks: int) -> dict[str, Any]:
    """Requests with adapters on one rank and on several."""
    small: dict[str, Any] = {"max_running": 8, "num_blocks": 200, "token_budget": 128}
    with tempfile.TemporaryDirectory() as folder:
        adapters = {"every": (24, ALL), "narrow": (3, ("q_proj", "v_proj")), "outputs": (8, ("o_proj", "down_proj"))}
        for seed, (name, (rank, targets)) in enumerate(adapters.items()):
            write_small_adapter(Path(folder) / name, rank, targets, seed)
        specs = tuple(AdapterSpec(name, f"{folder}/{name}") for name in adapters)
        chosen = zip(requests(), ("", *adapters, ""), strict=True)
        together = [dataclasses.replace(request, adapter=name) for request, name in chosen]
        alone = [dataclasses.replace(requests()[1], request_id="alone", adapter="narrow")]
        results = []
        for count in (1, ranks):
            engine = load(SMALL, count, torch.float32, adapters=specs, **small)
            results.append(generate(engine, *together) | generate(engine, *alone))
            engine.close()
    return {"expected": results[0], "got": results[1]}


def write_small_adapter(folder: Path, rank: int, targets: Sequence[str], seed: int) -> None:
    """An adapter for `SMALL`, as PEFT saves one."""
    hidden, ffn = int(SMALL["hidden_size"]), int(SMALL["intermediate_size"])
    sizes = {
        "q_proj": (hidden, hidden), "k_proj": (hidden // 2, hidden), "v_proj": (hidden // 2, hidden),
        "o_proj": (hidden, hidden), "gate_proj": (ffn, hidden), "up_proj": (ffn, hidden), "down_proj": (hidden, ffn),
    }  # fmt: skip
    noise = torch.Generator().manual_seed(seed)
    tensors = {}
    for layer, target in itertools.product(range(int(SMALL["num_hidden_layers"])), targets):
        outputs, inputs = sizes[target]
        module = f"base_model.model.model.layers.{layer}.{MODULES[target]}"
        tensors[f"{module}.lora_A.weight"] = torch.randn(rank, inputs, generator=noise) * 0.1
        tensors[f"{module}.lora_B.weight"] = torch.randn(outputs, rank, generator=noise) * 0.1
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": 16, "target_modules": list(targets)}
    (folder / "adapter_config.json").write_text(json.dumps(config))


def engine_sleep(ranks: int) -> dict[str, Any]:
    """Requests with a draft model that is the target, before and after a sleep of all ranks; bytes that it frees."""
    with tempfile.TemporaryDirectory() as folder:
        path = write_checkpoint("llama-gqa", Path(folder))
        small: dict[str, Any] = {"device": "cuda", "max_running": 8, "num_blocks": 20_000, "token_budget": 128}
        small["watchdog_s"] = WATCHDOG_S
        asked = [dataclasses.replace(request, prompt=[i % 199 for i in request.prompt]) for request in requests()]
        engine = make_engine(path, **small)
        expected = generate(engine, *asked)
        del engine
        small |= {"tensor_parallel": ranks, "devices": ("cuda:0",) * ranks}
        engine = make_engine(path, speculation="draft", draft_model=str(path), **small)
        assert engine.speculation is not None
        verify_everything(engine.speculation)
        got = generate(engine, *asked)
        torch.cuda.synchronize()
        before = torch.cuda.mem_get_info()[0]
        begin = time.perf_counter()
        offloaded = offload(engine)
        slept, freed = time.perf_counter() - begin, torch.cuda.mem_get_info()[0] - before
        offloaded.restore()
        woke = time.perf_counter() - begin - slept
        again = generate(engine, *asked)
        load = engine.load_snapshot()
        assert_idle(engine)
        engine.close()
    return {
        "expected": expected, "got": got, "again": again, "freed": freed, "slept_s": slept, "woke_s": woke,
        "draft_tokens": load.draft_tokens, "accepted_tokens": load.accepted_tokens,
    }  # fmt: skip


def engine_blocks(ranks: int, own_sequences: int = 0) -> dict[str, Any]:
    """Conversations that leave ranks with few blocks, for the host and the disk, and come back; and prompts computed by
    ranks, continued by one device. `own_sequences`: each rank has its own (`attention_parallel: data`)."""
    prompts = {f"c{i}": [(31 * i + 7 * j * j) % 199 for j in range(100)] for i in range(8)}
    asked = [greedy(name, prompt, 12) for name, prompt in prompts.items()]
    with tempfile.TemporaryDirectory() as folder:
        family, host = ("qwen3-moe", 14) if own_sequences else ("llama-gqa", 28)
        path = write_checkpoint(family, Path(folder) / "model", spread=0.5)
        small: dict[str, Any] = {"device": "cuda", "max_running": 4, "num_blocks": 200, "watchdog_s": WATCHDOG_S}
        grid: dict[str, Any] = {"tensor_parallel": ranks, "devices": ("cuda:0",) * ranks}
        if own_sequences:
            grid |= {"expert_parallel": True, "attention_parallel": "data", "expert_rebalance_s": 0.0}
        engine = make_engine(path, role="decode", **small)
        block = engine.runner.kv.shape.block_bytes // (1 if own_sequences else ranks)
        expected = generate(engine, *asked)
        engine.scheduler.allocator.pool.forget_all()
        tiers = {"num_blocks": 10, "host_memory": host * block, "disk_memory": 80 * block, "disk_path": folder}
        tiered = make_engine(path, **{**small, **grid, **tiers})
        said = []
        for _ in range(2):
            answers: dict[str, list[int]] = {}
            for request in asked:
                answers |= generate(tiered, request)
                for _ in range(20):  # steps that leave the disk some time
                    tiered.scheduler.allocator.tick(tiered.clock())
                    time.sleep(0.002)
            said.append(answers)
        load = tiered.load_snapshot()
        assert_idle(tiered)
        tiered.close()
        giver = make_engine(path, role="prefill", **small, **grid)
        generate(giver, *asked)
        assert giver.info.kv_format == engine.info.kv_format and engine.exchange is not None
        for request in asked:
            engine.exchange.release(carry(giver, engine, engine.exchange.names(request)))
        handed = generate(engine, *asked)
        giver.close()
    return {
        "expected": expected, "first": said[0], "again": said[1], "handed": handed, "restored": load.restored_blocks,
        "read": load.disk_read_blocks, "blocks_in": engine.exchange.counts.blocks_in,
    }  # fmt: skip


def engine_steps(ranks: int, layers: int) -> dict[str, Any]:
    """Milliseconds of decode steps of an 8B model in bfloat16 (`layers` of its layers) on ranks that share the GPU, and
    of one shard's own work."""
    config = shapes.named("llama-8b") | {"num_hidden_layers": layers}
    settings: dict[str, Any] = {"max_running": 16, "max_model_len": 512, "num_blocks": 600, "token_budget": 64}
    result: dict[str, Any] = {}
    for name, shape, count in (("shard", shard_shape(config, ranks), 1), ("ranks", config, ranks)):
        engine = load(shape, count, torch.bfloat16, **settings)
        result[name] = {batch: decode_s(engine, batch, 200) * 1e3 for batch in (1, 16)}
        engine.close()
        del engine
        torch.cuda.empty_cache()
    return result
