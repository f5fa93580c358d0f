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
from penstock.errors import ConfigError, PenstockError, require_extra
from penstock.gateway.http.port import check_port
from penstock.machine import usable_cores, usable_memory
from penstock.sources.adapters import check_adapter
from penstock.sources.resolve import cached

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
        ("engine", lambda: _engine(config)),
        ("cpu", _cpu),
        ("memory", _memory),
        ("model cache", lambda: _cache(config)),
        ("sources", lambda: _sources(config)),
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

    needed = ("numpy", "tokenizers", "jinja2", "msgspec", "zmq", "httptools", "httpx", "yaml")
    missing = [name for name in needed if find_spec(name) is None]
    if missing:
        remedy = "install Penstock again: `pip install penstock`, or `make serve` in a clone"
        yield Finding("packages", CheckState.FAIL, f"missing: {', '.join(missing)}", remedy)
    else:
        yield Finding("packages", CheckState.OK, "all installed")


def _engine(config: Config) -> Iterator[Finding]:
    """What engines need; a machine of gateways has none of it."""
    try:
        require_extra("engine", "an engine")
    except ConfigError as error:
        yield Finding("engine", CheckState.WARN, "this machine can run gateways, but no engine", str(error))
        return
    yield from _torch()
    yield from _kernels()
    yield from _configured_devices(config)


def _torch() -> Iterator[Finding]:
    try:
        import torch
    except ImportError as error:
        yield Finding("torch", CheckState.FAIL, str(error), "install it again: `pip install --force-reinstall torch`")
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
    usable = usable_cores()
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
    total, available = usable_memory()
    detail = f"{available / GiB:.1f} of {total / GiB:.1f} GiB available"
    if available < LEAST_MEMORY:
        yield Finding("memory", CheckState.WARN, detail, "free some memory, or serve a smaller model")
    else:
        yield Finding("memory", CheckState.OK, detail)


def _cache(config: Config) -> Iterator[Finding]:
    from penstock.sources.model_cache import cache_dir

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


def missing_sources(config: Config) -> list[str]:
    """What the configuration names and is not on this machine, one sentence each. What would be downloaded counts as
    there."""
    problems = []

    def look(where: str, source: str, find: Callable[[str], object]) -> None:
        try:
            find(source)
        except PenstockError as error:
            problems.append(f"{where}: {error}")

    for index, model in enumerate(config.models):
        look(f"models[{index}]", model.source, cached)
        if model.draft_model is not None:
            look(f"models[{index}].draft_model", model.draft_model, cached)
        for position, adapter in enumerate(model.adapters):
            look(f"models[{index}].adapters[{position}]", adapter.source, check_adapter)
    for index, encoder in enumerate(config.encoders):
        look(f"encoders[{index}]", encoder.source, cached)
    for index, route in enumerate(config.routes):
        if route.classifier and not Path(route.classifier).expanduser().is_file():
            problems.append(f"routes[{index}].classifier: there is no file {route.classifier}")
    for index, remote in enumerate(config.remotes):
        if remote.key_file and not Path(remote.key_file).is_file():
            problems.append(f"remotes[{index}].key_file: there is no file {remote.key_file}")
    return problems


def _sources(config: Config) -> Iterator[Finding]:
    named = {f"models[{index}]:" for index in range(len(config.models))}  # those are findings of their own
    for problem in missing_sources(config):
        if problem.split(" ", 1)[0] not in named:
            yield Finding("source", CheckState.FAIL, problem)


def _configured_devices(config: Config) -> Iterator[Finding]:
    """Whether the device that each model is configured for is here."""
    import torch

    from penstock.engine.backends.select import pick_device, rank_device

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    for model in config.models:
        ranks = model.tensor_parallel * model.pipeline_parallel
        try:
            device = pick_device(model.device)
            named = [rank_device(device, rank, ranks, model.devices) for rank in range(ranks)] if model.devices else []
        except PenstockError as error:
            yield Finding("device", CheckState.FAIL, f"{model.name}: {error}")
            continue
        if named:
            yield Finding("device", CheckState.OK, f"{model.name} runs on {', '.join(map(str, named))}")
            continue
        last = (device.index or 0) + ranks
        if device.type == "cuda" and last > count:
            detail = f"{model.name} needs {ranks} device{'s' if ranks > 1 else ''} from {device} on; there are {count}"
            yield Finding(
                "device", CheckState.FAIL, detail, "lower tensor_parallel or pipeline_parallel, or change device"
            )
        elif model.device != "auto" or ranks > 1:
            where = str(device) if ranks == 1 else f"{ranks} ranks from {device} on"
            yield Finding("device", CheckState.OK, f"{model.name} runs on {where}")


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
