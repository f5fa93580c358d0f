"""Moving the device memory of any objects to the host and back.

Everything that they hold on the device is found by walking them, and moved storage by storage: tensors keep their
identity, their views and their sharing; only the memory under them goes and comes back. On the host it lies in ordinary
memory, which is taken when it goes and given back when it has returned. The KV cache is not kept; what executors have
captured is captured again, since it remembers addresses. What other processes have mapped stays where it is: objects
that say `resident` are not walked into.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from penstock.engine.backends.backend import Backend
from penstock.engine.backends.copy_streams import to_device, to_host
from penstock.engine.backends.host_memory import Slabs
from penstock.engine.kv.cache import KVCache
from penstock.engine.runner.executor import Releasable

_PLAIN = (str, bytes, int, float, bool, type(None), type, torch.dtype, torch.device)


Storages = dict[int, torch.UntypedStorage]
"""By identity."""


@dataclass(frozen=True, slots=True)
class OffloadedMemory:
    """Device memory that is on the host. `restore` and then `capture` bring it back; `empty` undoes that, and `discard`
    ends it."""

    backend: Backend
    kept: list[tuple[torch.UntypedStorage, Tensor]]
    """Device memory, now empty, and what was in it."""
    emptied: list[tuple[torch.UntypedStorage, int]]
    """Device memory whose content is not kept, and its size."""
    executors: list[tuple[Releasable, Callable[[], None]]]
    """And what makes again what they had captured."""

    @torch.inference_mode()
    def restore(self) -> None:
        """Bring the memory back. Without room for all of it nothing is taken; what is on the host stays there too."""
        try:
            for storage, host in self.kept:
                storage.resize_(host.numel())
            self.backend.synchronize()
            to_device([(bytes_of(storage), host) for storage, host in self.kept], self.backend.device)
            for storage, size in self.emptied:
                storage.resize_(size)
                bytes_of(storage).zero_()
            self.backend.synchronize()
        except BaseException:
            self.empty()
            raise

    @torch.inference_mode()
    def capture(self) -> None:
        """Make again what executors had captured."""
        for _, capture in self.executors:
            capture()
        self.backend.synchronize()

    def empty(self) -> None:
        """Free the device's memory; what was in it is still on the host."""
        for executor, _ in self.executors:
            executor.release()
        for storage in (*(storage for storage, _ in self.kept), *(storage for storage, _ in self.emptied)):
            storage.resize_(0)
        self.backend.memory.trim(workspaces=True)

    def discard(self) -> None:
        """Free the host's memory."""
        self.kept.clear()


@torch.inference_mode()
def offload_memory(root: object, backend: Backend) -> OffloadedMemory:
    """Free the device memory of everything that `root` holds; nothing of it may be in use."""
    found = list(walk(root))
    executors = [(item, item.release()) for item in found if isinstance(item, Releasable)]
    caches = storages_of(
        [tensor for item in found if isinstance(item, KVCache) for tensor in (*item.tensors, *item.states)]
    )
    found_there = storages_of([t for t in found if isinstance(t, Tensor) and t.device == backend.device])
    moving = [storage for key, storage in found_there.items() if key not in caches]
    slabs = Slabs()
    kept = [(storage, slabs.take(storage.nbytes())) for storage in moving]
    backend.synchronize()
    to_host([(bytes_of(storage), host) for storage, host in kept], backend.device)
    emptied = [(storage, storage.nbytes()) for storage in caches.values()]
    found.clear()  # graphs that were dropped have memory as long as something refers to them
    offloaded = OffloadedMemory(backend, kept, emptied, executors)
    offloaded.empty()
    return offloaded


def bytes_of(storage: torch.UntypedStorage) -> Tensor:
    """The memory of a storage as a tensor."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def storages_of(tensors: list[Tensor]) -> Storages:
    """The memory under tensors that can be given back, once each however many of them share it."""
    storages = [tensor.untyped_storage() for tensor in tensors if tensor.layout == torch.strided]
    return {storage._cdata: storage for storage in storages if storage.resizable()}


def _is_own(item: object) -> bool:
    return type(item).__module__.startswith("penstock.") or dataclasses.is_dataclass(item)


def walk(root: object) -> Iterator[Any]:
    """Every object reachable from `root` through attributes, fields and containers, each once."""
    seen: set[int] = set()
    todo: list[Any] = [root]
    while todo:
        item = todo.pop()
        if isinstance(item, _PLAIN) or id(item) in seen:
            continue
        seen.add(id(item))
        yield item
        if isinstance(item, Tensor):
            continue
        if isinstance(item, dict):
            todo += item.values()
        elif isinstance(item, (list, tuple, set, frozenset)):
            todo += item
        elif getattr(type(item), "resident", False):
            continue
        elif isinstance(item, torch.nn.Module) or _is_own(item):
            todo += vars(item).values() if hasattr(item, "__dict__") else ()
            slots = (name for cls in type(item).__mro__ for name in getattr(cls, "__slots__", ()))
            todo += [getattr(item, name) for name in slots if hasattr(item, name)]
