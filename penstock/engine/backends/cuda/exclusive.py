"""Launches whose blocks wait for each other: who may have them.

All blocks must be on the device at once, or those that are there wait forever for the others. Two such launches at the
same time may each hold a part of the multiprocessors and wait for the rest. Within an engine they run one after
another; this module keeps them apart from those of other engines. Processes without a multi-process service take turns
on the device, each with all of it.
"""

from __future__ import annotations

import gc
import os
import threading
from pathlib import Path
from weakref import WeakValueDictionary

import torch

_lock = threading.RLock()
_owners: WeakValueDictionary[torch.device, object] = WeakValueDictionary()


def claim(device: torch.device, owner: object) -> bool:
    """Whether `owner` may have such launches on `device`: one owner in a process, until nothing refers to it."""
    with _lock:
        if _owners.setdefault(device, owner) is not owner:
            gc.collect()  # an engine that was dropped: its parts refer to each other
        return _owners.setdefault(device, owner) is owner


def shares_processors() -> bool:
    """Whether processes run beside each other on a device (MPS), as far as the environment says: by the pipe of the
    service, where it is or is said to be, or by the share that this process may have."""
    pipe = Path(os.environ.get("CUDA_MPS_PIPE_DIRECTORY", "/tmp/nvidia-mps"), "control")
    return "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE" in os.environ or pipe.exists()
