"""Sleep on CUDA, and as much of tensor parallelism as one GPU can show.

NCCL wants a GPU per rank, so its groups are tried with one member; two shards share the GPU over gloo instead, which
runs everything else of the CUDA path: the cut weights, the eager steps, tokens that never see the host.
"""

from __future__ import annotations

import dataclasses
import gc
import itertools
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from safetensors.torch import save_file

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from penstock.bench import shapes  # noqa: E402
from penstock.engine.adapters.spec import AdapterSpec  # noqa: E402
from penstock.engine.backends import copy_streams  # noqa: E402
from penstock.engine.backends.cuda.device import TorchCudaBackend  # noqa: E402
from penstock.engine.backends.host_memory import Slabs  # noqa: E402
from penstock.engine.backends.reference.backend import ReferenceBackend  # noqa: E402
from penstock.engine.config import EngineConfig  # noqa: E402
from penstock.engine.core import Engine  # noqa: E402
from penstock.engine.loading.random_checkpoint import RandomCheckpoint  # noqa: E402
from penstock.engine.parallel import groups, launch  # noqa: E402
from penstock.engine.parallel.member import Member  # noqa: E402
from penstock.engine.sleep.offload import offload  # noqa: E402
from tests.engine.adapters.files import ALL, MODULES  # noqa: E402
from tests.engine.harness import assert_idle, generate, greedy  # noqa: E402
from tests.engine.parallel.threads import _spawn  # noqa: E402
from tests.gpu.gpu_harness import Row  # noqa: E402

ON_DEVICE = torch.cuda.is_available() and os.environ.get("PENSTOCK_GPU_TESTS") != "compile"
SMALL: dict[str, Any] = {
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


def test_nccl_groups_of_one_sum_gather_and_can_be_captured() -> None:
    """In a process of its own, which ends without taking the group down: that can wait for ever."""
    if ON_DEVICE:
        environment = os.environ | {"PYTHONPATH": str(ROOT)}
        subprocess.run([sys.executable, __file__, "nccl"], check=True, timeout=60, env=environment)


def nccl() -> None:
    import torch.distributed as dist

    device = torch.device("cuda", torch.cuda.current_device())
    with tempfile.TemporaryDirectory() as folder:
        store = dist.PrefixStore("t", dist.FileStore(f"{folder}/store", 1))  # type: ignore[attr-defined]
        group = groups.Group(TorchCudaBackend(device).process_group(store, 0, 1, timedelta(seconds=30)), 0, 1)
        x = torch.randn(4, 64, device=device)
        expected = x.clone()
        for _ in range(2):  # the first call makes the communicator
            assert torch.equal(group.sum(x), expected)
            assert torch.equal(group.gather(x)[0], expected)
            assert torch.equal(group.broadcast(x), expected)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            doubled = group.sum(x * 2)
        x.fill_(3)
        graph.replay()
        torch.cuda.synchronize()
        assert float(doubled.min()) == float(doubled.max()) == 6
        os._exit(0)


@contextmanager
def two_shards(**settings: object) -> Iterator[Engine]:
    """An engine of two ranks as threads, both on the same GPU."""

    def gloo(backend: TorchCudaBackend, store: object, rank: int, size: int, timeout: timedelta) -> object:
        return ReferenceBackend().process_group(store, rank, size, timeout)

    with (
        patch.object(launch, "_spawn", _spawn),
        patch.object(Member, "device", lambda self, first: first),
        patch.object(TorchCudaBackend, "process_group", gloo),
    ):
        engine = load(tensor_parallel=2, **settings)
        try:
            yield engine
        finally:
            engine.close()


def test_two_shards_on_one_gpu_answer_like_one() -> None:
    if not ON_DEVICE:
        return
    expected = generate(load(), *requests())
    with two_shards() as engine:
        got = generate(engine, *requests())
    assert_alike(got, expected)


def test_two_shards_on_one_gpu_serve_adapters_like_one() -> None:
    """Several in a batch and one alone, on all linears and on query, key and value only."""
    if not ON_DEVICE:
        return
    with tempfile.TemporaryDirectory() as folder:
        adapters = {"every": (24, ALL), "narrow": (3, ("q_proj", "v_proj")), "outputs": (8, ("o_proj", "down_proj"))}
        for seed, (name, (rank, targets)) in enumerate(adapters.items()):
            write_small_adapter(Path(folder) / name, rank, targets, seed)
        specs = tuple(AdapterSpec(name, f"{folder}/{name}") for name in adapters)
        together = [
            dataclasses.replace(request, adapter=name)
            for request, name in zip(requests(), ("", *adapters), strict=True)
        ]
        alone = [dataclasses.replace(requests()[1], request_id="alone", adapter="narrow")]
        one = load(adapters=specs)
        expected = generate(one, *together) | generate(one, *alone)
        with two_shards(adapters=specs) as engine:
            got = generate(engine, *together) | generate(engine, *alone)
    assert_alike(got, expected)


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


def assert_alike(got: dict[str, list[int]], expected: dict[str, list[int]]) -> None:
    # Sums in another order may break a tie differently, once, late.
    equal = sum(got[name] == tokens for name, tokens in expected.items())
    assert equal >= len(expected) - 1, (expected, got)
    assert all(got[name][:8] == tokens[:8] for name, tokens in expected.items())


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


if __name__ == "__main__" and sys.argv[1:] == ["nccl"]:
    nccl()
