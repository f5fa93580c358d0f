"""Ranks as processes on one GPU, for the tests of peer memory: `spawn` starts them, the functions below run in them.

    python tests/gpu/peer_ranks.py probe       # what this machine can do, and how long flags take from rank to rank

Processes that share a GPU take turns of milliseconds on it; under NVIDIA's multi-process service (MPS) their kernels
run side by side. `mps` starts it where it is installed.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "gpu")]

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

from penstock.engine.backends.cuda import peer_memory  # noqa: E402
from penstock.engine.backends.cuda.kernels import peers as kernels  # noqa: E402

JOBS = int(os.environ.get("PENSTOCK_GPU_JOBS", "1"))
"""Processes that share the tests (`run.py --jobs`): all compile kernels, and whatever one does may take longer so many
times."""
PATIENCE_S = 80 * JOBS
"""Ranks that take longer hang. Less than a whole test may take, so that the failure names them."""
SIZES = [(tokens, hidden) for tokens in (1, 8, 64) for hidden in (4096, 8192)]


@contextlib.contextmanager
def mps() -> Iterator[dict[str, str] | None]:
    """The environment of processes that share the GPU through MPS; None where it is not installed."""
    places = os.pathsep.join((os.environ.get("PATH", ""), "/usr/local/nvidia/bin", "/usr/bin", "/opt/bin"))
    control = shutil.which("nvidia-cuda-mps-control", path=places)
    if control is None:
        yield None
        return
    with tempfile.TemporaryDirectory() as folder:
        environment = {"CUDA_MPS_PIPE_DIRECTORY": folder, "CUDA_MPS_LOG_DIRECTORY": folder}
        here = os.environ | environment
        started = subprocess.run([control, "-d"], env=here, capture_output=True, text=True, timeout=20 * JOBS)
        if started.returncode:
            print(f"MPS does not start: {started.stdout}{started.stderr}", flush=True)
            yield None
            return
        try:
            yield environment
        finally:
            for log in Path(folder).glob("*.log"):
                lines = [line for line in log.read_text().splitlines() if "rror" in line or "ail" in line]
                print("\n".join(lines[-5:]), flush=True)
            subprocess.run([control], input="quit\n", text=True, env=here, capture_output=True, timeout=20 * JOBS)


def spawn(
    work: str, size: int, environment: dict[str, str] | None = None, timeout_s: float = PATIENCE_S, *args: int
) -> Any:
    """Run `work` on `size` ranks, a process each; what rank 0 returns."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__, work, folder, str(size)]
        given = os.environ | {"PYTHONPATH": str(ROOT)} | (environment or {})
        print(f"{work} on {size} ranks", flush=True)
        ranks = [subprocess.Popen([*command, str(rank), *map(str, args)], env=given) for rank in range(size)]
        deadline = time.monotonic() + timeout_s
        try:
            for rank in ranks:
                code = rank.wait(max(0.1, deadline - time.monotonic()))
                assert code == 0, f"{work}: a rank of {size} ended with {code}"
            return json.loads((Path(folder) / "result").read_text())
        finally:
            for rank in ranks:
                if rank.poll() is None:
                    rank.kill()


class Meeting:
    """A rank's peers, and a way to begin together."""

    def __init__(self, store: Any, rank: int, size: int) -> None:
        self.store, self.rank, self.size = store, rank, size
        self.device = torch.device("cuda", 0)
        torch.cuda.set_device(self.device)
        regions = peer_memory.open_regions(store, rank, size, kernels.REGION_BYTES, self.device)
        assert regions is not None, "the ranks cannot open each other's memory"
        self.peers = kernels.Peers(regions, rank, self.device, 20.0 * JOBS, size)
        self._turns = 0

    def together(self) -> None:
        torch.cuda.synchronize()
        self._turns += 1
        self.store.add(f"turn/{self._turns}", 1)
        while self.store.add(f"turn/{self._turns}", 0) < self.size:
            time.sleep(0.0005)


def latency(meeting: Meeting, sizes: list[tuple[int, int]] | None = None, each: int = 100) -> list[list[Any]]:
    """Microseconds of an all-reduce with residual addition and norm inside a graph, by tokens, width and form."""
    rows = []
    for tokens, hidden in sizes or SIZES:
        x = torch.randn(tokens, hidden, device=meeting.device, dtype=torch.bfloat16)
        residual, weight = torch.randn_like(x), torch.randn(hidden, device=meeting.device, dtype=torch.bfloat16)
        for two_shot in (False, True):

            def work(
                x: torch.Tensor = x,
                residual: torch.Tensor = residual,
                weight: torch.Tensor = weight,
                two: bool = two_shot,
            ) -> None:
                kernels.all_reduce_add_norm(meeting.peers, x, residual, weight, 1e-6, two_shot=two)

            rows.append([tokens, hidden, two_shot, timed(meeting, work, each)])
    return rows


def timed(meeting: Meeting, work: Callable[[], object], each: int) -> float:
    """Microseconds of one `work` of `each` in a graph; every rank runs it at the same time."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        work()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        for _ in range(each):
            work()
    times = []
    for _ in range(5):
        meeting.together()
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        with torch.cuda.stream(stream):
            work()  # the ranks start at different times; behind this they are together
            begin.record()
            graph.replay()
            end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1000 / each)
    return statistics.median(times)


def few_latencies(meeting: Meeting) -> list[list[Any]]:
    """For ranks that take turns of milliseconds."""
    return latency(meeting, [(1, 4096)], each=4)


def quick_latency(meeting: Meeting) -> list[list[Any]]:
    return latency(meeting, [(1, 4096), (64, 8192)])


def check_collectives(meeting: Meeting) -> int:
    """Sums, norms, gathers and broadcasts of many shapes against the same in float64; how many were right."""
    rank, size, device, peers, checked = meeting.rank, meeting.size, meeting.device, meeting.peers, 0
    # Every shape and type is another kernel to compile: few of each.
    every = (torch.bfloat16, torch.float16, torch.float32)
    shapes = [(1, 4096, every[:1]), (64, 8192, every[:1]), (200, 1000, every), (65, 16384, every[:1])]
    for number, (tokens, hidden, dtypes) in enumerate(shapes):
        for dtype in dtypes:
            rng = torch.Generator(device=device).manual_seed(number)

            def draw(*shape: int, rng: Any = rng, dtype: torch.dtype = dtype) -> torch.Tensor:
                return torch.randn(*shape, generator=rng, device=device).to(dtype)

            parts = [draw(tokens, hidden) for _ in range(size)]
            residual, weight, x_weight = draw(tokens, hidden), draw(hidden), draw(hidden)
            total = sum(part.double() for part in parts)
            rounded = parts[0].float()
            for part in parts[1:]:
                rounded = rounded + part.float()
            rounded = rounded.to(dtype)
            for two_shot in (False, True):
                assert torch.equal(kernels.all_reduce(peers, parts[rank].clone(), two_shot=two_shot), rounded)
                for before in (None, x_weight) if hidden == 1000 else (None,):
                    stream = residual.clone()
                    got = kernels.all_reduce_add_norm(
                        peers, parts[rank], stream, weight, 1e-5, before, two_shot=two_shot
                    )
                    added = total if before is None else _normed(total, before)
                    close("residual", stream, residual.double() + added)
                    close("norm", got, _normed(residual.double() + added, weight))
                    checked += 2
            if hidden == 4096:
                data, scale = kernels.all_reduce_add_norm_fp8(peers, parts[rank], residual.clone(), weight, 1e-5)
                close("fp8", data.float() * scale, _normed(residual.double() + total, weight), 0.05)
            joined = kernels.all_gather(peers, parts[rank], size * hidden - 5)
            assert torch.equal(joined, torch.cat(parts, 1)[:, : size * hidden - 5])
            checked += 1
    for count in (1, 7, 1024, 5000):
        ids = torch.randperm(100_000, generator=torch.Generator().manual_seed(count))[:count].to(device)
        got = ids.clone() if rank == 0 else torch.zeros_like(ids)
        assert torch.equal(kernels.broadcast(peers, got), ids)
        checked += 1
    return checked + _check_graphs(meeting)


def _check_graphs(meeting: Meeting) -> int:
    """A captured chain of exchanges of different shapes, replayed with new inputs."""
    device, peers = meeting.device, meeting.peers
    x, y = torch.zeros(5, 512, device=device), torch.zeros(70, 64, device=device)
    ids = torch.zeros(9, dtype=torch.int64, device=device)

    def work() -> tuple[torch.Tensor, ...]:
        first = kernels.all_reduce(peers, x.clone())
        second = kernels.all_reduce(peers, y.clone(), two_shot=True)
        third = kernels.broadcast(peers, ids.clone())
        return first, second, third, kernels.all_gather(peers, first[:, :8] + meeting.rank, 8 * meeting.size)

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        work()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        first, second, third, fourth = work()
    for turn in range(1, 6):
        x.fill_(turn + meeting.rank)
        y.fill_(turn * (1 + meeting.rank))
        ids.fill_(turn if meeting.rank == 0 else -1)
        graph.replay()
        torch.cuda.synchronize()
        ranks = range(meeting.size)
        assert float(first.min()) == float(first.max()) == sum(turn + rank for rank in ranks)
        assert float(second.min()) == float(second.max()) == sum(turn * (1 + rank) for rank in ranks)
        assert int(third.min()) == int(third.max()) == turn
        assert torch.equal(fourth[0, ::8].cpu(), float(first[0, 0]) + torch.arange(meeting.size, dtype=torch.float32))
    return 5


def _normed(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x * (x.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * weight.double()


def close(name: str, got: torch.Tensor, want: torch.Tensor, limit: float | None = None) -> None:
    limit = limit or {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 1.2e-2}[got.dtype]
    error = float((got.double() - want).norm() / want.norm())
    assert error <= limit, f"{name}: relative error {error:.1e}"  # NaN fails too


def probe() -> None:
    print(f"torch {torch.__version__}, {torch.cuda.get_device_name(0)}, {os.cpu_count()} CPUs", flush=True)
    found = {name: shutil.which(name) for name in ("nvcc", "nvidia-cuda-mps-control", "nvidia-cuda-mps-server")}
    elsewhere = subprocess.run(
        ["find", "/usr", "/opt", "-name", "nvidia-cuda-mps*"], capture_output=True, text=True, timeout=20
    )
    print(found, elsewhere.stdout.split(), flush=True)

    def attempt(label: str, work: Callable[[], object]) -> None:
        begin = time.perf_counter()
        try:
            print(f"{label}: {work()} ({time.perf_counter() - begin:.1f} s)", flush=True)
        except Exception as error:
            print(f"{label}: FAILED {type(error).__name__}: {error}", flush=True)

    attempt("processes, 2 ranks", lambda: spawn("few_latencies", 2, timeout_s=25))
    with mps() as environment:
        if environment is None:
            print("no MPS", flush=True)
            return
        attempt("MPS, 2 ranks", lambda: spawn("quick_latency", 2, environment, timeout_s=25))
        attempt("MPS, 4 ranks", lambda: spawn("quick_latency", 4, environment, timeout_s=25))


def main() -> None:
    if sys.argv[1:] == ["probe"]:
        probe()
        return
    work, folder, size, rank = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    if work.startswith("engine_"):
        import rank_engines

        (Path(folder) / "result").write_text(json.dumps(getattr(rank_engines, work)(*map(int, sys.argv[5:]))))
        sys.stdout.flush()
        os._exit(0)
    store = dist.FileStore(f"{folder}/store", size)  # type: ignore[attr-defined]
    with torch.inference_mode():
        result = globals()[work](Meeting(store, rank, size))
    torch.cuda.synchronize()
    if rank == 0:
        (Path(folder) / "result").write_text(json.dumps(result))
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
