"""The checks of `penstock doctor`: each finding is ok, a warning or a failure, with a remedy."""

from __future__ import annotations

import os
import platform
import resource
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from penstock.config import Config
from penstock.errors import PenstockError
from penstock.gateway.http.port import check_port

GiB = 2**30
LEAST_MEMORY = 2 * GiB
LEAST_DISK = 2 * GiB
GOOD_FILE_LIMIT = 4096
_FEATURES = (
    "avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_bf16", "amx_int8",
    "asimd", "asimdhp", "asimddp", "sve", "i8mm", "bf16",
)  # fmt: skip


class CheckState(Enum):
    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True, slots=True)
class Finding:
    name: str
    state: CheckState
    detail: str
    remedy: str = ""


def examine(config: Config) -> list[Finding]:
    """Runs all checks. A check that itself fails is a finding, not a crash."""
    checks: list[tuple[str, Callable[[], Iterator[Finding]]]] = [
        ("python", _python),
        ("packages", _packages),
        ("torch", _torch),
        ("cpu", _cpu),
        ("kernels", _kernels),
        ("memory", _memory),
        ("model cache", lambda: _cache(config)),
        ("port", lambda: _port(config)),
        ("file limit", _file_limit),
    ]
    findings: list[Finding] = []
    for name, check in checks:
        try:
            findings += check()
        except Exception as error:
            findings.append(Finding(name, CheckState.FAIL, f"could not be checked: {type(error).__name__}: {error}"))
    return findings


def _python() -> Iterator[Finding]:
    detail = f"{platform.python_version()} in {sys.prefix}, {platform.system()} {platform.machine()}"
    yield Finding("python", CheckState.OK, detail)


def _packages() -> Iterator[Finding]:
    from importlib.util import find_spec

    needed = ("numpy", "safetensors", "tokenizers", "jinja2", "msgspec", "zmq", "httptools", "httpx", "yaml")
    missing = [name for name in needed if find_spec(name) is None]
    if missing:
        yield Finding("packages", CheckState.FAIL, f"missing: {', '.join(missing)}", "run `pip install penstock` again")
    else:
        yield Finding("packages", CheckState.OK, "all installed")


def _torch() -> Iterator[Finding]:
    try:
        import torch
    except ImportError as error:
        yield Finding("torch", CheckState.FAIL, str(error), "run `pip install torch` for this machine")
        return
    yield Finding("torch", CheckState.OK, f"{torch.__version__}, {torch.get_num_threads()} threads")
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            properties = torch.cuda.get_device_properties(index)
            free, total = torch.cuda.mem_get_info(index)
            detail = f"cuda:{index} {properties.name}, {free / GiB:.0f} of {total / GiB:.0f} GiB free"
            yield Finding("device", CheckState.OK, detail)
    elif shutil.which("nvidia-smi"):
        remedy = "install a torch built for CUDA; until then engines run on the CPU"
        yield Finding(
            "device", CheckState.WARN, "there is an NVIDIA GPU, but this build of torch cannot use it", remedy
        )
    else:
        yield Finding("device", CheckState.OK, "cpu (no CUDA device)")


def _cpu() -> Iterator[Finding]:
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        words = set(Path("/proc/cpuinfo").read_text().split())
    except OSError:
        words = set()
    features = [name for name in _FEATURES if name in words]
    detail = f"{usable} cores" + (f"; {', '.join(features)}" if features else "")
    fast = {"avx2", "avx512f", "asimd", "sve"} & words
    remedy = "" if fast or not words else "this CPU has no wide vector instructions; expect it to be slow"
    yield Finding("cpu", CheckState.WARN if remedy else CheckState.OK, detail, remedy)


def _kernels() -> Iterator[Finding]:
    from penstock.engine.backends.select import native_status

    found = native_status()
    if found.available:
        yield Finding("kernels", CheckState.OK, found.detail)
    else:
        remedy = "install a C++ compiler (Debian, Ubuntu: apt install g++); the native kernels are several times faster"
        yield Finding("kernels", CheckState.WARN, f"PyTorch fallback: {found.detail}", remedy)


def _memory() -> Iterator[Finding]:
    try:
        fields = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
        total, available = (int(fields[key].split()[0]) * 1024 for key in ("MemTotal", "MemAvailable"))
    except (OSError, KeyError):
        total = available = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    detail = f"{available / GiB:.1f} of {total / GiB:.1f} GiB available"
    if available < LEAST_MEMORY:
        yield Finding("memory", CheckState.WARN, detail, "free some memory, or serve a smaller model")
    else:
        yield Finding("memory", CheckState.OK, detail)


def _cache(config: Config) -> Iterator[Finding]:
    from penstock.sources.model_cache import cache_dir
    from penstock.sources.resolve import cached

    root = cache_dir()
    existing = next(folder for folder in (root, *root.parents) if folder.exists())
    if not os.access(existing, os.W_OK):
        yield Finding(
            "model cache", CheckState.FAIL, f"{root} cannot be written", "set PENSTOCK_CACHE to a folder that can"
        )
    else:
        free = shutil.disk_usage(existing).free
        detail = f"{root}, {free / GiB:.1f} GiB free"
        low = free < LEAST_DISK
        remedy = "free some disk space, or set PENSTOCK_CACHE to a folder on another disk" if low else ""
        yield Finding("model cache", CheckState.WARN if low else CheckState.OK, detail, remedy)
    for model in config.models:
        try:
            path = cached(model.source)
        except PenstockError as error:
            yield Finding("model", CheckState.FAIL, f"{model.name}: {error}")
            continue
        if path is None:
            yield Finding(
                "model", CheckState.WARN, f"{model.name} is not downloaded yet", f"run `penstock pull {model.source}`"
            )
        else:
            yield Finding("model", CheckState.OK, f"{model.name} in {path}")


def _port(config: Config) -> Iterator[Finding]:
    server = config.server
    try:
        check_port(server.host, server.port)
    except PenstockError as error:
        yield Finding("port", CheckState.WARN, str(error))
    else:
        yield Finding("port", CheckState.OK, f"{server.host}:{server.port} is free")


def _file_limit() -> Iterator[Finding]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    detail = f"{soft} open files (hard limit {hard})"
    if soft < GOOD_FILE_LIMIT:
        remedy = f"every connection needs one: run `ulimit -n {min(65536, hard)}` before serving many clients"
        yield Finding("file limit", CheckState.WARN, detail, remedy)
    else:
        yield Finding("file limit", CheckState.OK, detail)
