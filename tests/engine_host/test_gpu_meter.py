"""Readings of GPUs through NVML; the driver's library is one that we compile, with the interface of the real one."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from penstock.engine_host.gpu_meter import DeviceMeter, Nvml, NvmlError, open_meter

DRIVER = """
#include <string.h>
typedef struct { unsigned long long total, free, used; } memory_t;
typedef struct { unsigned int gpu, memory; } utilization_t;
static int devices[2] = {0, 1};
static int gone = 0;
int nvmlInitWithFlags(unsigned int flags) { return 0; }
int nvmlDeviceGetHandleByUUID(const char *uuid, void **device) {
    if (strcmp(uuid, "GPU-a") && strcmp(uuid, "GPU-b")) return 6;
    *device = &devices[strcmp(uuid, "GPU-a") != 0];
    return 0;
}
int nvmlDeviceGetMemoryInfo(void *device, memory_t *memory) {
    memory->total = 80ull << 30;
    memory->used = (unsigned long long)(10 + *(int *)device) << 30;
    return gone ? 15 : 0;
}
int nvmlDeviceGetUtilizationRates(void *device, utilization_t *busy) { busy->gpu = 25; busy->memory = 3; return 0; }
void be_gone(int now) { gone = now; }
"""


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler to build a driver library with")
    folder = tmp_path_factory.mktemp("driver")
    (folder / "nvml.c").write_text(DRIVER)
    library = folder / "libnvidia-ml.so.1"
    subprocess.run([compiler, "-shared", "-fPIC", "-o", library, folder / "nvml.c"], check=True)
    return library


@pytest.fixture
def library(driver: Path, monkeypatch: pytest.MonkeyPatch) -> ctypes.CDLL:
    """What `nvidia-ml-py` finds as the driver's library."""
    pynvml = pytest.importorskip("pynvml")
    loaded = ctypes.CDLL(str(driver))
    monkeypatch.setattr(pynvml, "nvmlLib", loaded)
    monkeypatch.setattr(pynvml, "_nvmlGetFunctionPointer_cache", {})
    return loaded


@pytest.fixture
def nvml(library: ctypes.CDLL) -> Callable[..., Nvml]:
    return lambda *uuids: Nvml(uuids)


def test_every_gpu_of_an_engine_is_read(nvml: Callable[..., Nvml]) -> None:
    first, second = nvml("GPU-a", "GPU-b").read()
    assert (first.index, first.memory_used, first.memory_total, first.busy) == (0, 10 << 30, 80 << 30, 0.25)
    assert (second.index, second.memory_used) == (1, 11 << 30)


def test_a_gpu_that_is_not_there_is_an_error(nvml: Callable[..., Nvml]) -> None:
    with pytest.raises(NvmlError, match="Not Found"):
        nvml("GPU-c")


def test_a_meter_reads_beside_the_work_and_stops_when_closed(nvml: Callable[..., Nvml]) -> None:
    found = DeviceMeter(nvml("GPU-a"), period_s=0.01)
    deadline = time.monotonic() + 60
    while found.latest is None:
        assert time.monotonic() < deadline
        time.sleep(0.005)
    assert found.latest[0].busy == 0.25
    found.close()


def test_a_driver_that_goes_away_ends_the_readings_and_nothing_else(
    nvml: Callable[..., Nvml], library: ctypes.CDLL
) -> None:
    source = nvml("GPU-a")
    found = DeviceMeter(source, period_s=0.01)
    library.be_gone(1)
    found._thread.join(60)
    library.be_gone(0)
    assert found.latest is None
    found.close()


def test_on_cpu_there_is_nothing_to_read() -> None:
    assert open_meter("cpu") is None


def test_without_the_package_nothing_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    with pytest.raises(NvmlError, match="nvidia-ml-py is not installed"):
        Nvml(["GPU-a"])


def test_without_a_driver_nothing_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    pynvml = pytest.importorskip("pynvml")

    def missing(name: str) -> ctypes.CDLL:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(pynvml, "nvmlLib", None)
    monkeypatch.setattr(pynvml, "CDLL", missing)
    with pytest.raises(NvmlError, match="Not Found"):
        Nvml(["GPU-a"])
