"""How much of its GPUs an engine uses, read once a second beside its work.

NVML is called through `nvidia-ml-py`; where the package or the driver is missing, nothing is reported. A thread reads,
so that a slow driver never delays a step; a step only picks up the latest reading.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from typing import Any

from penstock.engine.request import DeviceLoad

PERIOD_S = 1.0
log = logging.getLogger(__name__)


class NvmlError(Exception):
    """NVML cannot be used, or can no longer."""


class Nvml:
    """Reads the GPUs with these UUIDs. Raises `NvmlError` without the package, the driver or such a device."""

    def __init__(self, uuids: Sequence[str]) -> None:
        try:
            import pynvml
        except ImportError as error:
            raise NvmlError("the package nvidia-ml-py is not installed") from error
        self._nvml: Any = pynvml
        try:
            pynvml.nvmlInit()
            self._handles = [pynvml.nvmlDeviceGetHandleByUUID(uuid) for uuid in uuids]
        except pynvml.NVMLError as error:
            raise NvmlError(str(error)) from error

    def read(self) -> list[DeviceLoad]:
        try:
            return [self._device(index, handle) for index, handle in enumerate(self._handles)]
        except self._nvml.NVMLError as error:
            raise NvmlError(str(error)) from error

    def _device(self, index: int, handle: object) -> DeviceLoad:
        memory = self._nvml.nvmlDeviceGetMemoryInfo(handle)
        utilization = self._nvml.nvmlDeviceGetUtilizationRates(handle)
        return DeviceLoad(index, memory.used, memory.total, utilization.gpu / 100)


class DeviceMeter:
    """Keeps `latest` fresh until it is closed; None until the first reading, and after a failed one."""

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
            except NvmlError as error:
                log.warning("GPU memory and utilization are no longer reported: %s", error)
                self.latest = None
                return
            if self._closed.wait(self._period_s):
                return


def open_meter(device: str, ranks: int = 1) -> DeviceMeter | None:
    """A meter for the `ranks` GPUs of an engine, from `device` on; None on CPU and where NVML cannot be used."""
    import torch

    first = torch.device(device)
    if first.type != "cuda":
        return None
    try:
        indices = range(first.index or 0, (first.index or 0) + ranks)
        uuids = [str(torch.cuda.get_device_properties(index).uuid).removeprefix("GPU-") for index in indices]
        return DeviceMeter(Nvml([f"GPU-{uuid}" for uuid in uuids]))
    except (NvmlError, AttributeError) as error:  # older versions of torch do not know UUIDs
        log.info("GPU memory and utilization are not reported: %s", error)
        return None
