"""Moving an engine's device memory to the host and back.

Everything that the engine holds on the device is found by walking its objects, and moved storage by storage: tensors
keep their identity, their views and their sharing; only the memory under them goes and comes back. On the host it lies
in ordinary memory, which is taken when the engine goes to sleep and given back when it wakes.
The KV cache is not kept; what executors have captured is captured again, since it remembers addresses.
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
from penstock.engine.core import Engine
from penstock.engine.kv.cache import KVCache
from penstock.engine.runner.executor import Executor

_PLAIN = (str, bytes, int, float, bool, type(None), type, torch.dtype, torch.device)


Storages = dict[int, torch.UntypedStorage]
"""By identity."""


@dataclass(frozen=True, slots=True)
class OffloadedEngine:
    """An engine whose device memory is on the host."""

    engine: Engine
    kept: list[tuple[torch.UntypedStorage, Tensor]]
    """Device memory, now empty, and what was in it."""
    emptied: list[tuple[torch.UntypedStorage, int]]
    """Device memory whose content is not kept, and its size."""
    executors: list[tuple[Executor, Callable[[], None]]]
    """And what makes again what they had captured."""

    @torch.inference_mode()
    def restore(self) -> Engine:
        """Bring everything back; the engine can be used again, and the host's memory is free. Without room for all of
        it nothing is taken."""
        backend = self.backend
        try:
            for storage, host in self.kept:
                storage.resize_(host.numel())
            backend.synchronize()
            to_device([(bytes_of(storage), host) for storage, host in self.kept], backend.device)
            for storage, size in self.emptied:
                storage.resize_(size)
                bytes_of(storage).zero_()
            for _, capture in self.executors:
                capture()
            backend.synchronize()
        except BaseException:
            self._empty()
            raise
        self.kept.clear()
        return self.engine

    @property
    def backend(self) -> Backend:
        return self.engine.runner.backend

    def _empty(self) -> None:
        for executor, _ in self.executors:
            executor.release()
        for storage in (*(storage for storage, _ in self.kept), *(storage for storage, _ in self.emptied)):
            storage.resize_(0)
        self.backend.memory.trim(workspaces=True)


@torch.inference_mode()
def offload(engine: Engine) -> OffloadedEngine:
    """Free the device memory of an idle engine."""
    found = list(walk(engine))
    executors = [(item, item.release()) for item in found if isinstance(item, Executor)]
    engine.scheduler.allocator.pool.forget_all()
    backend = engine.runner.backend
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
    offloaded = OffloadedEngine(engine, kept, emptied, executors)
    offloaded._empty()
    return offloaded


def bytes_of(storage: torch.UntypedStorage) -> Tensor:
    """The memory of a storage as a tensor."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def storages_of(tensors: list[Tensor]) -> Storages:
    """The memory under tensors that can be given back, once each however many of them share it."""
    storages = [tensor.untyped_storage() for tensor in tensors if tensor.layout == torch.strided]
    return {storage._cdata: storage for storage in storages if storage.resizable()}


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
        elif type(item).__module__.startswith("penstock.") or dataclasses.is_dataclass(item):
            todo += vars(item).values() if hasattr(item, "__dict__") else ()
            slots = (name for cls in type(item).__mro__ for name in getattr(cls, "__slots__", ()))
            todo += [getattr(item, name) for name in slots if hasattr(item, name)]
