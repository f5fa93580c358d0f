"""What the kernel tests share: where they run, fresh inputs, poisoned outputs, comparison and timing.

Three modes. `device`: on a CUDA GPU. `interpret`: on the CPU through Triton's interpreter (TRITON_INTERPRET=1), for
numerics only. `compile`: no GPU either; every launch compiles its kernel for compute capability 9.0 and records
registers, spills and shared memory, so that a kernel that would not build or would spill is found without a device.
Plain functions, no pytest: the device machine may not have it.
"""

from __future__ import annotations

import contextlib
import os
import random
import re
import statistics
import subprocess
import sys
import tempfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
from torch import Tensor  # noqa: E402

MODE = os.environ.get("PENSTOCK_GPU_TESTS") or ("interpret" if os.environ.get("TRITON_INTERPRET") == "1" else "device")
DEVICE = torch.device("cuda" if MODE == "device" else "cpu")
QUICK = MODE == "interpret"
"""The interpreter is thousands of times slower than a GPU: tests choose small shapes."""

_seed = int.from_bytes(os.urandom(4)) if "PENSTOCK_SEED" not in os.environ else int(os.environ["PENSTOCK_SEED"])
rng = random.Random(_seed)
torch.set_num_threads(1) if MODE != "device" else None


def seed() -> int:
    """The seed of this process: set PENSTOCK_SEED to it to repeat a failure."""
    return _seed


def reseed(label: str) -> None:
    """Make what follows depend on the seed and the test only, so that parallel builds see the same shapes."""
    rng.seed(f"{_seed} {label}")
    torch.manual_seed(rng.getrandbits(63))


def rand(*shape: int, dtype: torch.dtype = torch.float32, scale: float = 1.0) -> Tensor:
    """Fresh normal noise; never zeros."""
    if MODE == "compile":
        return torch.empty(shape, dtype=dtype)
    noise = torch.randn(shape, device=DEVICE, dtype=torch.float32).mul_(scale)
    return noise.to(dtype)


def integers(values: Sequence[int], dtype: torch.dtype) -> Tensor:
    return torch.tensor(values, dtype=dtype, device=DEVICE)


def poison_(tensor: Tensor) -> Tensor:
    """Fill with NaN (integers: an absurd value), so that an element that is never written shows."""
    if MODE == "compile" or tensor.numel() == 0:
        return tensor
    if tensor.dtype == torch.float8_e4m3fn:
        tensor.view(torch.uint8).fill_(0x7F)
    elif tensor.is_floating_point():
        tensor.fill_(float("nan"))
    else:
        tensor.fill_({torch.uint8: 201, torch.int8: -77}.get(tensor.dtype, -1234567))
    return tensor


@contextlib.contextmanager
def poisoned_outputs() -> Iterator[None]:
    """Every `torch.empty` inside comes poisoned."""
    original = torch.empty

    def empty(*args: Any, **kwargs: Any) -> Tensor:
        return poison_(original(*args, **kwargs))

    torch.empty = empty
    try:
        yield
    finally:
        torch.empty = original


TOLERANCE = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 8e-3}
TRUNCATION = 2.0 if MODE == "interpret" else 1.0
"""The interpreter cuts to bf16 and fp8 where a GPU rounds: twice the error."""


def check(name: str, got: Tensor, want: Tensor, tolerance: float | None = None) -> None:
    """Relative error ‖got − want‖ / ‖want‖ against a float64 reference; NaN never passes."""
    if MODE == "compile":
        return
    assert got.shape == want.shape, f"{name}: shape {tuple(got.shape)}, expected {tuple(want.shape)}"
    limit = (TOLERANCE[got.dtype] if tolerance is None else tolerance) * TRUNCATION
    a, b = got.double().cpu(), want.double().cpu()
    assert not a.isnan().any(), f"{name}: {int(a.isnan().sum())} of {a.numel()} elements are NaN"
    error = float((a - b).norm() / b.norm().clamp_min(1e-30))
    assert error <= limit, f"{name}: relative error {error:.2e} over {limit:.0e}"


def check_equal(name: str, got: Tensor, want: Tensor) -> None:
    if MODE == "compile":
        return
    a, b = got.cpu(), want.cpu()
    assert a.shape == b.shape, f"{name}: shape {tuple(a.shape)}, expected {tuple(b.shape)}"
    wrong = (a != b).nonzero()
    assert not len(wrong), (
        f"{name}: {len(wrong)} of {a.numel()} differ, first at {wrong[0].tolist()}: "
        f"{a[tuple(wrong[0])]} instead of {b[tuple(wrong[0])]}"
    )


def check_rounded(name: str, got: Tensor, want: Tensor) -> None:
    """Equal, where the device rounds as PyTorch does."""
    if MODE == "interpret":
        check(name, got, want)
    else:
        check_equal(name, got, want)


def time_us(calls: Sequence[Callable[[], object]], repeats: int = 15, priority: int = 0) -> float:
    """Median microseconds of one call. `calls` rotate over different buffers so that the cache does not serve them.

    All calls are captured in one CUDA graph and replayed, which leaves out the host's launch cost. `priority`: of the
    stream that they are captured on; lower is more urgent.
    """
    if MODE == "compile":
        for call in calls:
            call()
        return 0.0
    stream = torch.cuda.Stream(priority=priority)
    with torch.cuda.stream(stream):
        for call in calls:
            call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    rounds = max(1, 8 // len(calls))
    with torch.cuda.graph(graph, stream=stream):
        for _ in range(rounds):
            for call in calls:
                call()
    times = []
    for _ in range(repeats):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) * 1000)
    return statistics.median(times) / (rounds * len(calls))


Row = tuple[str, float, str]
"""What was timed, microseconds, and the achieved rate."""


def bandwidth(name: str, us: float, nbytes: float) -> Row:
    return name, us, f"{nbytes / us / 1e6:.2f} TB/s" if us else "-"


def arithmetic(name: str, us: float, flops: float) -> Row:
    return name, us, f"{flops / us / 1e6:.0f} TFLOP/s" if us else "-"


def mend_interpreter() -> None:
    """Two gaps of Triton 3.6's interpreter, filled.

    NumPy 2.4 no longer turns one-element arrays into integers, which its loop bounds rely on; and it multiplies
    bf16 matrices as the integers that hold their bits.
    """
    import numpy as np
    import triton.language as tl
    from triton.runtime import interpreter

    dot = interpreter.InterpreterBuilder.create_dot

    def widen(operand: Any) -> Any:
        if operand.dtype.scalar != tl.bfloat16:
            return operand
        bits = operand.data.astype(np.uint32) << 16
        return interpreter.TensorHandle(bits.view(np.float32), tl.float32)

    def create_dot(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        return dot(self, widen(a), widen(b), *rest)

    interpreter.InterpreterBuilder.create_dot = create_dot
    original = interpreter._patch_lang_tensor

    def patch(tensor: Any, scope: Any) -> None:
        original(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    interpreter._patch_lang_tensor = patch


@contextlib.contextmanager
def checked_addresses(*modules: Any) -> Iterator[None]:
    """In the interpreter every address that kernels launched by `modules` read or write must be inside a tensor that
    the launch was given: on a GPU what lies behind is often mapped, and such a read goes unseen."""
    if MODE != "interpret":
        yield
        return
    import numpy as np
    from triton.runtime.interpreter import InterpreterBuilder as Builder

    ranges: list[tuple[int, int]] = []
    masked_load, masked_store, launches = Builder.create_masked_load, Builder.create_masked_store, {}

    def check_inside(what: str, at: Any, mask: Any) -> None:
        wanted = at.data[np.broadcast_to(mask.data.astype(bool), at.data.shape)].astype(np.uint64)
        inside = np.zeros(wanted.shape, bool)
        for first, last in ranges:
            inside |= (wanted >= first) & (wanted < last)
        assert inside.all(), f"{what}: {int((~inside).sum())} of {wanted.size} addresses are outside every tensor"

    def load(self: Any, at: Any, mask: Any, *rest: Any) -> Any:
        check_inside("load", at, mask)
        return masked_load(self, at, mask, *rest)

    def store(self: Any, at: Any, value: Any, mask: Any, *rest: Any) -> Any:
        check_inside("store", at, mask)
        return masked_store(self, at, value, mask, *rest)

    def observed(launch: Callable[..., None]) -> Callable[..., None]:
        def run(kernel: Any, grid: Any, *args: Any, **options: Any) -> None:
            storages = [arg.untyped_storage() for arg in args if isinstance(arg, Tensor)]
            ranges[:] = [(one.data_ptr(), one.data_ptr() + one.nbytes()) for one in storages]
            launch(kernel, grid, *args, **options)

        return run

    Builder.create_masked_load, Builder.create_masked_store = load, store
    for module in modules:
        launches[module] = module.launch
        module.launch = observed(module.launch)
    try:
        yield
    finally:
        Builder.create_masked_load, Builder.create_masked_store = masked_load, masked_store
        for module, launch in launches.items():
            module.launch = launch


@contextlib.contextmanager
def programs_backwards() -> Iterator[None]:
    """In the interpreter programs run one after the other, the last one of a launch first: on a GPU their order is
    anything, and no result may depend on it."""
    if MODE != "interpret":
        yield
        return
    from triton.runtime.interpreter import InterpreterBuilder as Builder

    place = Builder.set_grid_idx

    def mirrored(self: Any, *at: int) -> None:
        place(self, *(size - 1 - index for size, index in zip(self.grid_dim, at, strict=True)))

    Builder.set_grid_idx = mirrored
    try:
        yield
    finally:
        Builder.set_grid_idx = place


if MODE == "interpret":
    mend_interpreter()

compiled: dict[str, str] = {}
"""In compile mode: what each built kernel uses."""


def install_compile_mode(shard: int, shards: int) -> None:
    """Make every launch compile for an H200 instead of running; one process of `shards` does its share."""
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    from penstock.engine.backends.cuda.kernels import common

    class NoDevice:
        def get_current_target(self) -> GPUTarget:
            return GPUTarget("cuda", 90, 32)

        def get_current_device(self) -> int:
            return 0

        def get_current_stream(self, _device: int) -> int:
            return 0

    driver.set_active(NoDevice())
    run = JITFunction.run

    def build(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        kinds = [str(getattr(arg, "dtype", type(arg))) for arg in args]
        name = repr((self.__name__, kinds, sorted(kwargs.items())))
        if zlib.crc32(name.encode()) % shards != shard:
            return None
        kernel = run(self, *args, grid=grid, warmup=True, **kwargs)
        if os.environ.get("PENSTOCK_RESOURCES") == "1":
            _record(self, kernel)
        return kernel

    JITFunction.run = build
    common._building.set(True)


def _record(function: Any, kernel: Any) -> None:
    if kernel.hash in compiled:
        return
    from triton import knobs

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        tool = knobs.nvidia.cuobjdump.path
        text = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True).stdout
    found = dict(re.findall(r"(REG|STACK|LOCAL):(\d+)", text))
    meta = kernel.metadata
    ptx = kernel.asm["ptx"]
    marks = [
        f"{label} {ptx.count(code)}"
        for label, code in (
            ("wgmma", "wgmma.mma_async"),
            ("mma", "mma.sync"),
            ("cp.async", "cp.async.cg"),
            ("ld16", "ld.global.v4"),
        )
        if ptx.count(code)
    ]
    compiled[kernel.hash] = (
        f"{function.__name__:18s} warps {meta.num_warps} stages {meta.num_stages} regs {found.get('REG', '?'):>3s} "
        f"stack {found.get('STACK', '?'):>3s} shared {meta.shared:6d}  {', '.join(marks)}"
    )
