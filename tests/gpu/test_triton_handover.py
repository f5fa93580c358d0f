"""KV blocks from one engine on a GPU to another: the same answers, while the one that takes them decodes on."""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from gpu_harness import Row  # noqa: E402

from penstock.bench import shapes  # noqa: E402
from penstock.engine.backends.cuda.backend import CudaBackend  # noqa: E402
from penstock.engine.config import EngineConfig  # noqa: E402
from penstock.engine.core import Engine  # noqa: E402
from penstock.engine.kv.allocator import BlockAllocator  # noqa: E402
from penstock.engine.kv.cache import CacheShape, KVCache  # noqa: E402
from penstock.engine.kv.exchange import BlockExchange  # noqa: E402
from penstock.engine.kv.pool import BlockPool  # noqa: E402
from penstock.engine.loading.random_checkpoint import RandomCheckpoint  # noqa: E402
from tests.engine.harness import assert_idle, carry, collect, drain, generate, greedy, make_engine  # noqa: E402
from tests.engine.tiny import write_checkpoint  # noqa: E402

ON_DEVICE = torch.cuda.is_available() and os.environ.get("PENSTOCK_GPU_TESTS") != "compile"


def _text(number: int, length: int) -> list[int]:
    return [(31 * number + 7 * j * j + 3 * j) % 199 for j in range(length)]


def test_an_engine_goes_on_behind_blocks_that_another_computed() -> None:
    if not ON_DEVICE:
        return
    coarse = ({"kv_dtype": kind, "dtype": "bfloat16"} for kind in ("int8", "fp8", "auto"))
    for settings in ({}, {"host_memory": 4 << 20}, *coarse):
        with tempfile.TemporaryDirectory() as folder:
            path = write_checkpoint("llama-gqa", Path(folder), spread=0.5)
            common = {"device": "cuda", "max_running": 8, "num_blocks": 120, **settings}
            giver = make_engine(path, role="prefill", **common)
            taker = make_engine(path, role="decode", **common)
            others = [greedy(f"other{i}", _text(10 + i, 30), 40) for i in range(3)]
            expected = generate(giver, *others)
            for other in others:
                taker.submit(other)
            deltas = []
            for number in range(4):
                request = greedy(f"r{number}", _text(number, 400), 12)
                expected |= generate(giver, request)
                assert taker.exchange is not None
                names, held = taker.exchange.names(request), list[int]()
                for begin in range(0, len(names), 5):  # a few between two steps, as they come
                    held += carry(giver, taker, names[begin : begin + 5])
                    output = taker.step()
                    deltas += output.deltas if output is not None else []
                assert len(held) == 24
                assert all(_same(giver, taker, name) for name in names), settings
                taker.exchange.release(held)
                taker.submit(request)
            deltas += drain(taker)
            # In bfloat16 steps of other sizes round differently, and one token changes the rest of an answer.
            assert "dtype" in settings or collect(deltas) == expected, settings
            firsts = [delta for delta in deltas if delta.cached_tokens is not None and delta.request_id[0] == "r"]
            assert [delta.cached_tokens for delta in firsts] == [384] * 4
            for engine in (giver, taker):
                assert_idle(engine)


def _same(giver: Engine, taker: Engine, name: bytes) -> bool:
    """Whether both have the same bits under a name."""
    ends = []
    for engine in (giver, taker):
        block = engine.scheduler.allocator.pool.find(name)
        assert block is not None
        ends.append([tensor.view(torch.uint8)[:, :, block] for tensor in engine.runner.kv.tensors])
    return all(torch.equal(here, there) for here, there in zip(*ends, strict=True))


def bench_blocks_cross() -> Iterator[Row]:
    """Blocks of an 8B model, 2 MiB each: out of a cache, through host memory, into another; 128 are 2048 tokens."""
    if not ON_DEVICE:
        return
    ends = []
    backend = CudaBackend(torch.device("cuda", 0))
    for _ in range(2):
        kv = KVCache(CacheShape.of_paged_kv(32, 8, 128, 16, torch.bfloat16), 300, torch.device("cuda"))
        allocator = BlockAllocator(BlockPool(300), 16)
        ends.append(
            (BlockExchange(allocator, kv, backend, step_tokens=2048, version=lambda name: name), allocator.pool)
        )
    (giver, source), (taker, target) = ends
    names = [index.to_bytes(16, "little") for index in range(128)]
    for name in names:
        source.name(source.allocate(), name)
    size = len(names) * giver.block_bytes
    times: dict[str, list[float]] = {"out": [], "host to host": [], "in": []}
    for _ in range(4):
        torch.cuda.synchronize()
        marks = [time.perf_counter()]
        slots = giver.copy_out(names)
        _wait_for(giver, slots)
        marks.append(time.perf_counter())
        arrived = []
        for name, slot in zip(names, slots, strict=True):
            arrived.append((name, taker.slots.pop()))
            for part, memory in zip(giver.memory(slot), taker.memory(arrived[-1][1]), strict=True):
                memory[:] = part
        marks.append(time.perf_counter())
        held = taker.take_in(arrived)
        _wait_for(taker, [slot for _, slot in arrived])
        torch.cuda.synchronize()
        marks.append(time.perf_counter())
        taker.release(held)
        target.forget_all()
        giver.slots.extend(slots)
        taker.slots.extend(slot for _, slot in arrived)
        for label, begin, end in zip(times, marks, marks[1:], strict=False):
            times[label].append(end - begin)
    for label, values in times.items():
        seconds = statistics.median(values[1:])
        yield f"128 blocks of 2 MiB {label}", 1e6 * seconds, f"{size / seconds / 1e9:.1f} GB/s"


def bench_steps_while_blocks_come() -> Iterator[Row]:
    """An 8B model that decodes 32 sequences, while as many blocks as may are taken in between any two steps."""
    if not ON_DEVICE:
        return
    yield from _steps("llama-8b", "cuda", 2000)


def _steps(shape: str, device: str, num_blocks: int) -> Iterator[Row]:
    config = EngineConfig(
        shape, device=device, max_running=32, max_model_len=2048, num_blocks=num_blocks, role="decode"
    )
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    engine = Engine.load(config, checkpoint=RandomCheckpoint(shapes.named(shape), device=device, dtype=dtype))
    exchange = engine.exchange
    assert exchange is not None
    count = min(exchange.at_once, exchange.num_slots // 2)
    for row in range(32):
        engine.submit(greedy(f"r{row}", _text(row, 64), 10_000))
    for _ in range(40):
        engine.step()
    serial, usual = 0, 0.0
    for label, come in (("alone", False), (f"and {count} blocks come", True), ("alone again", False)):
        times, emptying = [], list[int]()
        for _ in range(120):
            begin = time.perf_counter()
            if come:
                exchange.slots.extend(slot for slot in emptying if exchange.is_idle(slot))
                emptying = [slot for slot in emptying if slot not in exchange.slots]
                arrived = []
                for _ in range(min(count, len(exchange.slots))):
                    serial += 1
                    arrived.append((serial.to_bytes(16, "little"), exchange.slots.pop()))
                exchange.release(exchange.take_in(arrived))
                emptying += [slot for _, slot in arrived]
            engine.step()
            times.append(time.perf_counter() - begin)
        moved, exchange.counts.bytes_in = exchange.counts.bytes_in, 0
        ordered = sorted(times)
        usual = usual or statistics.median(times)
        rate = f", {moved / sum(times) / 1e9:.1f} GB/s come in" if come else ""
        while emptying:
            exchange.slots.extend(slot for slot in emptying if exchange.is_idle(slot))
            emptying = [slot for slot in emptying if slot not in exchange.slots]
        note = f"p99 {1e3 * ordered[-2]:.2f} ms, {statistics.median(times) / usual:.2f}x{rate}"
        yield f"decode step of 32, {label}", 1e6 * statistics.median(times), note


def _wait_for(exchange: BlockExchange, slots: list[int]) -> None:
    while not all(exchange.is_idle(slot) for slot in slots):
        pass
