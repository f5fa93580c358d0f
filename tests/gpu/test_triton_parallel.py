"""As much of tensor parallelism as one GPU can show.

NCCL wants a GPU per rank, so its groups are tried with one member. Ranks are processes that share the GPU (see
`peer_ranks`): all else runs as on several GPUs, with peer memory at the speed of one GPU's own.
"""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from penstock.bench import shapes, shard  # noqa: E402
from penstock.engine.backends.cuda.device import TorchCudaBackend  # noqa: E402
from penstock.engine.backends.cuda.kernels import peers  # noqa: E402
from penstock.engine.config import EngineConfig  # noqa: E402
from penstock.engine.parallel import groups  # noqa: E402
from tests.gpu import peer_ranks  # noqa: E402
from tests.gpu.gpu_harness import MODE, Row  # noqa: E402

ON_DEVICE = torch.cuda.is_available() and os.environ.get("PENSTOCK_GPU_TESTS") != "compile"


def test_nccl_groups_of_one_sum_gather_and_can_be_captured() -> None:
    """In a process of its own, which ends without taking the group down: that can wait for ever."""
    if ON_DEVICE:
        environment = os.environ | {"PYTHONPATH": str(ROOT)}
        subprocess.run([sys.executable, __file__, "nccl"], check=True, timeout=60 * peer_ranks.JOBS, env=environment)


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


def test_sums_gathers_and_broadcasts_over_peer_memory() -> None:
    """Two and four ranks, a process each, under MPS where there is one; in the interpreter two, with little data."""
    if ON_DEVICE:
        for size in (2, 4):
            with peer_ranks.mps() as environment:
                assert peer_ranks.spawn("check_collectives", size, environment) > 40
    elif MODE == "interpret":
        interpreted_peers()
    else:
        compiled_peers()


def interpreted_peers() -> None:
    """Forked processes share memory at the same addresses, which is all that the kernels need."""
    size = 2
    memory = torch.zeros(size, peers.REGION_BYTES, dtype=torch.uint8).share_memory_()
    regions = [region.data_ptr() for region in memory]
    context = multiprocessing.get_context("fork")
    ranks = [context.Process(target=exchange_a_little, args=(regions, rank), daemon=True) for rank in range(size)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(120)
    codes = [rank.exitcode for rank in ranks]
    for rank in ranks:
        rank.kill()
    assert codes == [0] * size, codes


def exchange_a_little(regions: list[int], rank: int) -> None:
    group = peers.Peers(regions, rank, torch.device("cpu"), timeout_s=1e3)
    for turn, (rows, two_shot) in enumerate(((1, False), (3, True), (2, False))):
        rng = torch.Generator().manual_seed(turn)
        parts = [torch.randn(rows, 16, generator=rng) for _ in regions]
        residual, weight = torch.randn(rows, 16, generator=rng), torch.rand(16, generator=rng)
        total = parts[0] + parts[1]
        assert torch.equal(peers.all_reduce(group, parts[rank].clone(), two_shot=two_shot), total)
        stream = residual.clone()
        normed = peers.all_reduce_add_norm(group, parts[rank], stream, weight, 1e-5, two_shot=two_shot)
        assert torch.equal(stream, residual + total)
        assert torch.allclose(normed, torch.nn.functional.rms_norm(stream, (16,), weight, 1e-5), atol=1e-5)
    assert torch.equal(peers.all_gather(group, parts[rank], 30), torch.cat(parts, 1)[:, :30])
    ids = torch.arange(3) if rank == 0 else torch.zeros(3, dtype=torch.int64)
    assert torch.equal(peers.broadcast(group, ids), torch.arange(3))


def compiled_peers() -> None:
    """Build what the ranks will launch."""
    for size in (2, 4):
        group = peers.Peers([0] * size, 0, torch.device("cpu"))
        for hidden in (4096, 8192):
            x = torch.empty(8, hidden, dtype=torch.bfloat16)
            for two_shot in (False, True):
                peers.all_reduce_add_norm(group, x, x, x[0], 1e-5, two_shot=two_shot)
        peers.all_gather(group, x, x.shape[1] * size)
        peers.broadcast(group, torch.empty(8, dtype=torch.int64))


def test_two_ranks_on_one_gpu_answer_like_one() -> None:
    answer_like_one(2)


def test_four_ranks_on_one_gpu_answer_like_one() -> None:
    answer_like_one(4)


def test_two_stages_on_one_gpu_answer_like_one() -> None:
    answer_like_one(1, stages=2)


def answer_like_one(size: int, stages: int = 1) -> None:
    """Processes that share the GPU; shards with captured steps and overlap."""
    if not ON_DEVICE:
        return
    with peer_ranks.mps() as environment:
        found = peer_ranks.spawn("engine_tokens", 1, environment, peer_ranks.PATIENCE_S, size, stages)
    assert found["captured"] == (stages == 1) and (found["replays"] > 20 or stages > 1), found["replays"]
    assert found["got"] == found["again"], "the same twice: sums are made in one order"
    assert_alike(found["got"], found["expected"])
    print(f"  {size * stages} ranks started in {found['start_s']:.1f} s, {found['replays']} steps replayed", flush=True)


def test_two_ranks_on_one_gpu_serve_adapters_like_one() -> None:
    """Several in a batch and one alone, on all linears and on query, key and value only."""
    if not ON_DEVICE:
        return
    with peer_ranks.mps() as environment:
        found = peer_ranks.spawn("engine_adapters", 1, environment, peer_ranks.PATIENCE_S, 2)
    assert_alike(found["got"], found["expected"])


def test_two_ranks_on_one_gpu_draft_and_sleep() -> None:
    """A draft model that is the target, on both ranks; both give their memory back and wake as they were."""
    if not ON_DEVICE:
        return
    with peer_ranks.mps() as environment:
        found = peer_ranks.spawn("engine_sleep", 1, environment, peer_ranks.PATIENCE_S, 2)
    assert_alike(found["got"], found["expected"])
    assert_alike(found["again"], found["got"])
    # Draft and target run in batches of different sizes, so a tie may fall either way now and then.
    assert found["accepted_tokens"] > 0.9 * found["draft_tokens"] > 0
    assert found["freed"] > 100 << 20, "the caches alone are more"
    print(f"  asleep after {found['slept_s']:.2f} s, awake after {found['woke_s']:.2f} s", flush=True)


def test_blocks_of_two_ranks_on_one_gpu_leave_and_cross() -> None:
    """To the host, to disk and back; and to an engine of one rank, whose prompts they computed."""
    if not ON_DEVICE:
        return
    with peer_ranks.mps() as environment:
        found = peer_ranks.spawn("engine_blocks", 1, environment, peer_ranks.PATIENCE_S, 2)
    for got in ("first", "again", "handed"):
        assert_alike(found[got], found["expected"])
    assert found["restored"] > 20 and found["read"] > 6 and found["blocks_in"] == 8 * 6, found


def test_blocks_of_ranks_with_sequences_of_their_own_leave_and_cross() -> None:
    """The same of two ranks that attend each over sequences of their own, and have host memory and a disk for these."""
    if not ON_DEVICE:
        return
    with peer_ranks.mps() as environment:
        found = peer_ranks.spawn("engine_blocks", 1, environment, peer_ranks.PATIENCE_S, 2, 1)
    for got in ("first", "again", "handed"):
        assert_alike(found[got], found["expected"])
    assert found["restored"] > 12 and found["read"] > 0 and found["blocks_in"] == 8 * 6, found


def assert_alike(got: dict[str, list[int]], expected: dict[str, list[int]]) -> None:
    # Sums in another order than one rank's may break a tie differently, once, late.
    equal = sum(got[name] == tokens for name, tokens in expected.items())
    assert equal >= len(expected) - 1, (expected, got)
    assert all(got[name][:8] == tokens[:8] for name, tokens in expected.items())


def bench_all_reduce() -> Iterator[Row]:
    """An all-reduce with residual addition and norm, in a graph; ranks on one GPU."""
    if not ON_DEVICE:
        return
    with peer_ranks.mps() as environment:
        kind = "MPS" if environment is not None else "taking turns"
        for size in (2, 4):
            for tokens, hidden, two_shot, us in peer_ranks.spawn("latency", size, environment):
                form = "two-shot" if two_shot else "one-shot"
                yield f"{size} ranks, {kind}: {form} {tokens} x {hidden}", us, f"{tokens * hidden * 2 >> 10} KiB"


def bench_ranks_on_one_gpu() -> Iterator[Row]:
    """Decode steps against the sum of what the shards do alone."""
    if not ON_DEVICE:
        return
    with peer_ranks.mps() as environment:
        for size in (2, 4):
            found = peer_ranks.spawn("engine_steps", 1, environment, 110, size, 32)
            for batch, ms in found["ranks"].items():
                alone = found["shard"][batch] * size
                label = f"8B on {size} ranks of one GPU, batch {batch}"
                yield label, ms * 1e3, f"{ms / alone:.2f} of {size} shards alone ({alone:.2f} ms)"


def bench_one_shard_of_eight() -> Iterator[Row]:
    """A 70B in eight shards: one is measured, what passes between them is computed."""
    if not ON_DEVICE:
        return
    link = shard.Link()
    settings = EngineConfig(
        "llama-70b", device="cuda", max_running=64, max_model_len=1024, num_blocks=4096, token_budget=256
    )
    for step in shard.measure(shapes.named("llama-70b"), 8, (1, 16, 64), link, settings, context=500):
        words = f"measured; with {step.sums_s * 1e3:.2f} ms of sums {step.batch / step.step_s:,.0f} tokens/s, computed"
        yield f"70B, one shard of eight, batch {step.batch}", step.shard_s * 1e6, words


if __name__ == "__main__" and sys.argv[1:] == ["nccl"]:
    nccl()
