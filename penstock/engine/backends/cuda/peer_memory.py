"""Device memory that the ranks of a group share: each allocates a region and opens those of the others by CUDA IPC.

Ranks may have a GPU each (joined by NVLink, so that one can read and write the other's memory) or share one. Where
any of them cannot open another's region, none uses them (`open_regions` returns None), and the ranks exchange data
through NCCL or the host.
"""

from __future__ import annotations

import ctypes
import logging
import os
from collections import Counter
from ctypes import byref, c_int, c_size_t, c_uint64
from pathlib import Path
from typing import Any

import torch

log = logging.getLogger(__name__)

_LAZY_PEER_ACCESS = 1
_NATIVE_ATOMICS = 3
"""CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED."""
_HANDLE_BYTES = 64


class _Handle(ctypes.Structure):
    _fields_ = (("reserved", ctypes.c_ubyte * _HANDLE_BYTES),)


class PeersNotVisible(Exception):
    """Why a region of another rank cannot be opened."""


def _call(name: str, *args: Any) -> None:
    result = getattr(_driver(), name)(*args)
    if result:
        text = ctypes.c_char_p()
        _driver().cuGetErrorName(result, byref(text))
        raise PeersNotVisible(f"{name}: {(text.value or b'?').decode()}")


def _driver() -> Any:
    return ctypes.CDLL("libcuda.so.1")


def open_regions(store: Any, rank: int, size: int, nbytes: int, device: torch.device) -> list[int] | None:
    """The addresses of all ranks' regions of `nbytes`, zeroed, in the order of ranks; None when not all can see all.

    `store`: where the ranks meet; all of them call this. Regions live as long as the process."""
    torch.cuda.synchronize(device)  # makes the device's context the current one
    why = ""
    address = c_uint64(0)
    try:
        _call("cuMemAlloc_v2", byref(address), c_size_t(nbytes))
        _call("cuMemsetD8_v2", address, ctypes.c_ubyte(0), c_size_t(nbytes))
        _call("cuCtxSynchronize")
        handle = _Handle()
        _call("cuIpcGetMemHandle", byref(handle), address)
        shown = f"{_machine()} {os.getpid()} {_uuid(device)} {bytes(handle.reserved).hex()}"
    except PeersNotVisible as error:
        why, shown = str(error), "none"
    store.set(f"region/{rank}", shown)
    others = [store.get(f"region/{other}").decode() for other in range(size)]
    regions: list[int] = []
    if not why:
        try:
            regions = [_open(text, address.value, device, other == rank) for other, text in enumerate(others)]
        except PeersNotVisible as error:
            why = str(error)
    store.set(f"opened/{rank}", why or "yes")
    answers = [store.get(f"opened/{other}").decode() for other in range(size)]
    problem = next((answer for answer in answers if answer != "yes"), None)
    if problem is None:
        return regions
    if address.value:
        _call("cuMemFree_v2", address)
    log.warning("ranks do not share device memory: %s", problem)
    return None


def _open(shown: str, own: int, device: torch.device, mine: bool) -> int:
    if mine:
        return own
    if shown == "none":
        raise PeersNotVisible("another rank could not share its memory")
    machine, process, uuid, handle = shown.split()
    if machine != _machine():
        raise PeersNotVisible("the ranks are on different machines")
    if uuid != _uuid(device):
        _check_link(device, uuid)
    if int(process) == os.getpid():
        # A kernel that waits for another thread's would wait for ever: loading that one waits for running kernels.
        raise PeersNotVisible("the ranks are threads of one process")
    opened = c_uint64(0)
    raw = _Handle.from_buffer_copy(bytes.fromhex(handle))
    _call("cuIpcOpenMemHandle_v2", byref(opened), raw, ctypes.c_uint(_LAZY_PEER_ACCESS))
    return opened.value


def _check_link(device: torch.device, uuid: str) -> None:
    """Raise unless this device can read, write and count in the memory of the one with `uuid`."""
    found = [index for index in range(torch.cuda.device_count()) if _uuid(torch.device("cuda", index)) == uuid]
    if not found:
        raise PeersNotVisible(f"{device} does not see the device of another rank")
    if not torch.cuda.can_device_access_peer(device, found[0]):
        raise PeersNotVisible(f"{device} cannot access cuda:{found[0]}")
    atomics = c_int(0)
    _call("cuDeviceGetP2PAttribute", byref(atomics), c_int(_NATIVE_ATOMICS), c_int(device.index or 0), c_int(found[0]))
    if not atomics.value:
        raise PeersNotVisible(f"there are no atomic operations between {device} and cuda:{found[0]}")


def _uuid(device: torch.device) -> str:
    return str(torch.cuda.get_device_properties(device).uuid)


def ranks_per_device(store: Any, rank: int, size: int, device: torch.device) -> int:
    """How many of the ranks that meet in `store` have the same GPU, at most; all of them call this."""
    store.set(f"device/{rank}", f"{_machine()} {_uuid(device)}")
    return max(Counter(store.get(f"device/{other}").decode() for other in range(size)).values())


def _machine() -> str:
    """Equal for processes of one running system."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    return boot.read_text().strip() if boot.exists() else os.uname().nodename
