"""CUDA C++ at run time, without a device: which compiler, what is cached, what a launch refuses."""

from __future__ import annotations

import ctypes
from concurrent.futures import ThreadPoolExecutor
from ctypes import c_float, c_int32, c_int64
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from penstock.engine.backends.cuda import nvrtc
from penstock.engine.backends.cuda.nvrtc import arguments, compiler, cubin, driver
from penstock.engine.backends.cuda.nvrtc.compiler import Compiler, CudaBuildError, candidates

RING = Path(__file__).parents[2] / "gpu" / "emulation" / "ring_product.cu"


class CountingCompiler(Compiler):
    """In place of NVRTC, which machines without a GPU seldom have."""

    def __init__(self, version: tuple[int, int] = (12, 9)) -> None:
        self.version = version
        self.calls: list[tuple[str, ...]] = []

    def compile(self, source, name, headers, options):  # type: ignore[no-untyped-def]
        assert "device.cuh" in headers and source
        self.calls.append(tuple(options))
        return f"{name} {options}".encode(), ""


def test_a_kernel_is_compiled_once_and_then_read_from_the_cache(tmp_path: Path) -> None:
    using = CountingCompiler()
    first = nvrtc.build(RING, defines={"B": 2, "A": 1}, directory=tmp_path, using=using)
    again = nvrtc.build(RING, defines={"A": 1, "B": 2}, directory=tmp_path, using=CountingCompiler())
    assert first == again and len(using.calls) == 1
    assert using.calls[0] == ("--std=c++17", "--gpu-architecture=sm_90a", "-DA=1", "-DB=2")
    assert [path.suffix for path in tmp_path.iterdir() if path.name != ".lock"] == [".cubin"]


def test_whatever_a_kernel_depends_on_makes_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tmp_path / "source.cu"
    source.write_text("one")
    headers = tmp_path / "csrc"
    headers.mkdir()
    (headers / "device.cuh").write_text("header")
    monkeypatch.setattr(cubin, "SOURCES", headers)
    using = CountingCompiler()

    def build(**changed: object) -> None:
        nvrtc.build(source, directory=tmp_path / "cache", **{"using": using, **changed})  # type: ignore[arg-type]

    build()
    build(defines={"A": 1})
    build(options=("--use_fast_math",))
    build(arch="sm_100a")
    source.write_text("two")
    build()
    (headers / "device.cuh").write_text("another header")
    build()
    assert len(using.calls) == 6
    newer = CountingCompiler((13, 0))
    build(using=newer)
    build(using=newer)
    build()
    assert (len(using.calls), len(newer.calls)) == (6, 1)


def test_processes_that_start_together_compile_it_once(tmp_path: Path) -> None:
    using = CountingCompiler()
    with ThreadPoolExecutor(8) as pool:
        made = list(pool.map(lambda _: nvrtc.build(RING, directory=tmp_path, using=using), range(8)))
    assert len(set(made)) == 1 and len(using.calls) == 1


def test_a_cache_that_cannot_be_written_costs_only_time(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")
    using = CountingCompiler()
    made = {nvrtc.build(RING, directory=blocked, using=using) for _ in range(2)}
    assert len(made) == 1 and len(using.calls) == 2


def test_without_a_compiler_the_error_says_what_brings_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    compiler.compiler.cache_clear()
    monkeypatch.setattr(compiler, "_folders", lambda: iter([tmp_path]))
    try:
        with pytest.raises(CudaBuildError, match=r"none found.*nvidia-cuda-nvrtc"):
            nvrtc.build(RING, directory=tmp_path)
        (tmp_path / "libnvrtc.so.12").write_text("damaged")
        with pytest.raises(CudaBuildError, match=r"libnvrtc\.so\.12 cannot be loaded"):
            nvrtc.build(RING, directory=tmp_path)
    finally:
        compiler.compiler.cache_clear()


def test_the_library_of_pytorchs_own_cuda_comes_first(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("libnvrtc.so.11.2", "libnvrtc.so.12", "libnvrtc.so.13", "libnvrtc-builtins.so.12.9", "libcuda.so.1"):
        (tmp_path / name).touch()
    monkeypatch.setattr(compiler, "_folders", lambda: iter([tmp_path, tmp_path]))
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    assert [path.name for path in candidates()] == ["libnvrtc.so.12", "libnvrtc.so.13", "libnvrtc.so.11.2"]
    monkeypatch.setattr(torch.version, "cuda", None)
    assert [path.name for path in candidates()] == ["libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so.11.2"]


def test_a_missing_source_is_an_error_of_the_installation() -> None:
    with pytest.raises(CudaBuildError, match="reinstall penstock"):
        nvrtc.build("no_such_kernel.cu", using=CountingCompiler())


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_it_is_unavailable_where_there_is_no_device() -> None:
    assert nvrtc.unavailable() == "PyTorch sees no CUDA device"


def test_architectures_have_the_instructions_that_only_they_have() -> None:
    assert [nvrtc.architecture(known) for known in ((8, 9), (9, 0), (10, 0))] == ["sm_89", "sm_90a", "sm_100a"]


def test_structs_of_the_driver_have_its_layout() -> None:
    """cuda.h: CUlaunchAttribute is an int padded to 8 bytes and a union of 64; CUlaunchConfig ends with a count."""
    assert ctypes.sizeof(driver.Attribute) == 72 and driver.Attribute.value.offset == 8
    assert ctypes.sizeof(driver.LaunchConfig) == 56
    assert [getattr(driver.LaunchConfig, name).offset for name in ("shared_bytes", "stream", "attributes")] == [
        24,
        32,
        40,
    ]


def test_what_the_driver_says_about_multiprocessors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of this context, and whether other processes use them at the same time; an old driver says neither."""
    assert driver._Resource.processors.offset == 96

    def resources(context: object, resource: Any, kind: ctypes.c_int) -> int:
        assert kind.value == 1
        resource._obj.processors = 66
        return 0

    def attribute(found: Any, which: ctypes.c_int, device: object) -> int:
        found._obj.value = int(which.value == 133)
        return 0

    known = SimpleNamespace(
        cuCtxGetCurrent=lambda context: 0,
        cuCtxGetDevResource=resources,
        cuDeviceGet=lambda device, ordinal: 0,
        cuDeviceGetAttribute=attribute,
    )
    monkeypatch.setattr(driver, "driver", lambda: known)
    device = torch.device("cuda", 0)
    assert driver.processors_of_context() == 66 and driver.is_shared(device)
    known.cuCtxGetDevResource = known.cuDeviceGetAttribute = lambda *args: 1
    assert driver.processors_of_context() is None and not driver.is_shared(device)
    del known.cuCtxGetDevResource
    assert driver.processors_of_context() is None


def test_arguments_must_say_their_width_and_fit_the_kernel() -> None:
    tensor = torch.zeros(4)
    pointers, values = arguments.pack("k", [tensor, None, c_int32(7), c_float(0.5)], [8, 8, 4, 4])
    assert [value.value for value in values] == [tensor.data_ptr(), None, 7, 0.5] and len(pointers) == 4
    with pytest.raises(nvrtc.CudaDriverError, match=r"takes 2 parameters of \[8, 4\] bytes.*\[8, 8\]"):
        arguments.pack("k", [tensor, c_int64(7)], [8, 4])
    with pytest.raises(nvrtc.CudaDriverError, match="argument 1 of k is a int"):
        arguments.pack("k", [tensor, 7], None)  # type: ignore[list-item]


needs_nvrtc = pytest.mark.skipif(not candidates(), reason="no libnvrtc here: PyTorch for CUDA brings one")


@needs_nvrtc
def test_nvrtc_compiles_the_kernels_for_a_hopper_gpu(tmp_path: Path) -> None:
    assert nvrtc.build(RING, directory=tmp_path).startswith(b"\x7fELF")
    said = nvrtc.report(RING)
    assert "ring_product" in said and "0 bytes spill stores" in said


@needs_nvrtc
def test_a_mistake_in_a_source_is_reported_with_its_line(tmp_path: Path) -> None:
    source = tmp_path / "wrong.cu"
    source.write_text('#include "device.cuh"\nextern "C" __global__ void wrong(float* x) { x[0] = nothing; }\n')
    with pytest.raises(CudaBuildError, match=r'wrong\.cu\(2\): error: identifier "nothing" is undefined'):
        nvrtc.build(source, directory=tmp_path)
    assert not list(tmp_path.glob("*.cubin"))
