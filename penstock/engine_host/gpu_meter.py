"""How much of its GPUs an engine uses, read once a second beside the work.

NVML is asked through the driver's own library: there is nothing to install, and where it is missing nothing is told. A
thread reads, so that a driver that takes its time never delays a step; a step only picks up the latest reading.
"""

from __future__ import annotations

import ctypes
import logging
import threading
from collections.abc import Sequence

from penstock.engine.request import DeviceLoad

PERIOD_S = 1.0
_LIBRARY = "libnvidia-ml.so.1"
log = logging.getLogger(__name__)


class _Memory(ctypes.Structure):
    _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))


class _Utilization(ctypes.Structure):
    _fields_ = (("gpu", ctypes.c_uint), ("memory", ctypes.c_uint))


class Nvml:
    """The few calls of NVML that are needed; `OSError` where there is no such library or device."""

    def __init__(self, uuids: Sequence[str]) -> None:
        self._library = ctypes.CDLL(_LIBRARY)
        self._call("nvmlInit_v2")
        self._handles = [ctypes.c_void_p() for _ in uuids]
        for uuid, handle in zip(uuids, self._handles, strict=True):
            self._call("nvmlDeviceGetHandleByUUID", uuid.encode(), ctypes.byref(handle))

    def read(self) -> list[DeviceLoad]:
        return [self._device(index, handle) for index, handle in enumerate(self._handles)]

    def _device(self, index: int, handle: ctypes.c_void_p) -> DeviceLoad:
        memory, busy = _Memory(), _Utilization()
        self._call("nvmlDeviceGetMemoryInfo", handle, ctypes.byref(memory))
        self._call("nvmlDeviceGetUtilizationRates", handle, ctypes.byref(busy))
        return DeviceLoad(index, memory.used, memory.total, busy.gpu / 100)

    def _call(self, name: str, *args: object) -> None:
        code = getattr(self._library, name)(*args)
        if code != 0:
            raise OSError(f"{name} failed with code {code}")


class DeviceMeter:
    """Keeps `latest` fresh until it is closed; None until the first reading."""

    def __init__(self, source: Nvml, period_s: float = PERIOD_S) -> None:
        self.latest: list[DeviceLoad] | None = None
        self._source = source
        self._period_s = period_s
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="device meter", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._closed.set()
        self._thread.join()

    def _run(self) -> None:
        while True:
            try:
                self.latest = self._source.read()
            except OSError as error:
                log.warning("the GPUs can no longer be read: %s", error)
                self.latest = None
                return
            if self._closed.wait(self._period_s):
                return


def open_meter(device: str, ranks: int = 1) -> DeviceMeter | None:
    """A meter of the GPUs of an engine whose first one is `device`; None on CPU, and where NVML is not to be had."""
    import torch

    first = torch.device(device)
    if first.type != "cuda":
        return None
    try:
        indices = range(first.index or 0, (first.index or 0) + ranks)
        uuids = [str(torch.cuda.get_device_properties(index).uuid).removeprefix("GPU-") for index in indices]
        return DeviceMeter(Nvml([f"GPU-{uuid}" for uuid in uuids]))
    except (OSError, AttributeError) as error:
        log.info("GPU memory and utilisation are not reported: %s", error)
        return None
