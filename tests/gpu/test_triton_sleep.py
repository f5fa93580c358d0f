"""Sleep on CUDA: the device's memory is free, and an engine wakes as it was."""

from __future__ import annotations

import gc
import itertools
import os
import random
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import patch

import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from penstock.bench import shapes  # noqa: E402
from penstock.engine.backends import copy_streams  # noqa: E402
from penstock.engine.backends.host_memory import Slabs  # noqa: E402
from penstock.engine.config import EngineConfig  # noqa: E402
from penstock.engine.core import Engine  # noqa: E402
from penstock.engine.loading.random_checkpoint import RandomCheckpoint  # noqa: E402
from penstock.engine.sleep.offload import offload  # noqa: E402
from tests.engine.harness import assert_idle, generate, greedy  # noqa: E402
from tests.gpu.gpu_harness import Row  # noqa: E402

ON_DEVICE = torch.cuda.is_available() and os.environ.get("PENSTOCK_GPU_TESTS") != "compile"
SMALL = {
    "model_type": "llama",
    "vocab_size": 499,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}


def load(config: dict[str, object] = SMALL, **settings: object) -> Engine:
    checkpoint = RandomCheckpoint(config, device="cuda", dtype=torch.float32)
    given = {"device": "cuda", "dtype": "float32", "max_running": 8, "num_blocks": 200, **settings}
    return Engine.load(EngineConfig("random", **given), checkpoint=checkpoint)  # type: ignore[arg-type]


def requests() -> list:  # type: ignore[type-arg]
    rng = random.Random(1)
    return [greedy(f"r{n}", [rng.randrange(499) for _ in range(n)], 24) for n in (1, 9, 70, 200)]


def test_a_sleeping_engine_frees_the_device_and_wakes_with_the_same_answers() -> None:
    if not ON_DEVICE:
        return
    gc.collect()  # engines of other tests, held by reference cycles
    torch._C._cuda_clearCublasWorkspaces()
    others = torch.cuda.memory_allocated()
    engine = load(num_blocks=20_000)
    expected = generate(engine, *requests())
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated() - others
    offloaded = offload(engine)
    asleep = torch.cuda.memory_allocated() - others
    assert asleep < before / 20, (before, asleep)
    woken = offloaded.restore()
    assert woken is engine
    assert generate(engine, *requests()) == expected
    assert_idle(engine)
    offloaded = offload(engine)
    assert torch.cuda.memory_allocated() - others <= 2 * asleep + (1 << 20), "sleeping again leaves no more behind"
    assert generate(offloaded.restore(), *requests()) == expected


def bench_sleep() -> Iterator[Row]:
    """An 8B model in bfloat16 from awake to asleep and back, graphs captured again."""
    if not ON_DEVICE:
        return
    checkpoint = RandomCheckpoint(shapes.named("llama-8b"), device="cuda", dtype=torch.bfloat16)
    config = EngineConfig("llama-8b", device="cuda", max_running=64, max_model_len=4096, kv_memory=8 << 30)
    engine = Engine.load(config, checkpoint=checkpoint)
    size = engine.runner.decoder.weight_bytes
    for turn in ("first", "second"):
        begin = time.perf_counter()
        offloaded = offload(engine)
        slept = time.perf_counter()
        executors = offloaded.memory.executors
        engine = offloaded.restore()
        woke = time.perf_counter()
        for executor, capture in executors:
            executor.release()
            capture()
        torch.cuda.synchronize()
        recorded = time.perf_counter() - woke
        yield f"8B falls asleep, {turn} time", (slept - begin) * 1e6, f"{size / (slept - begin) / 1e9:.1f} GB/s"
        yield (
            f"8B wakes, {turn} time",
            (woke - slept) * 1e6,
            f"{size / (woke - slept - recorded) / 1e9:.1f} GB/s and {recorded * 1e3:.0f} ms for graphs",
        )


def tune_copy_streams() -> Iterator[Row]:
    """Between the device and ordinary host memory: how many copy streams, how large their buffers."""
    if not ON_DEVICE:
        return
    device = torch.device("cuda")
    there = torch.zeros(4 << 30, dtype=torch.uint8, device=device)
    kind = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    large = kind.read_text().strip() if kind.exists() else "unknown"
    for count, buffer in itertools.product((4, 8, 12, 16, 24), (4 << 20, 16 << 20)):
        with (
            patch.object(copy_streams, "COPY_STREAMS", count),
            patch.object(copy_streams, "BUFFER", buffer),
            patch.object(copy_streams, "_PIECE", 4 * buffer),
        ):
            here = Slabs().take(there.numel())
            times = []
            for carry in (copy_streams.to_host, copy_streams.to_host, copy_streams.to_device):
                torch.cuda.synchronize()
                begin = time.perf_counter()
                carry([(there, here)], device)
                times.append(time.perf_counter() - begin)
            del here
        fresh, again, back = (there.numel() / took / 1e9 for took in times)
        words = f"{fresh:.1f} GB/s to fresh memory, {again:.1f} again, {back:.1f} back; large pages {large}"
        yield f"{count} copy streams, {buffer >> 20} MiB", sum(times) * 1e6, words
