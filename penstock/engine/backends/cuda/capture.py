"""Capturing work as a CUDA graph, and stopping in the middle of it when a request comes.

Capturing a step launches each of its kernels from Python once, which takes about as long as ten steps. It can end
between two layers, where no stream is open but the one that is captured: whatever it had until then is dropped, and the
same step is captured from its beginning another time.

All graphs of a model share one pool of memory (`GraphPool`), which grows with the largest of them and not with their
number: if each kept its logits, these would take gigabytes.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from copy import copy
from dataclasses import dataclass
from functools import cache
from typing import Any, SupportsIndex

import torch
from torch import Tensor

from penstock.engine.kv.cache import KVCache

_ROOM = 1 << 29
"""Free bytes of the device with which a step can be captured, usually."""

Work = Callable[[], tuple[Tensor, Tensor]]


@dataclass(frozen=True, slots=True)
class Recording:
    """A captured graph, and the tensors that each replay writes; valid until the next replay of any graph that shares
    its pool. They do not own their memory: the graph must outlive them."""

    graph: torch.cuda.CUDAGraph
    results: tuple[Tensor, Tensor]


class GraphPool:
    """The memory that graphs of a model share: activations, logits, sampled tokens.

    PyTorch gives a capture what earlier captures into the same pool have freed. Results count as freed once their
    capture has ended (`_unowned`), so a replay overwrites the results of the replay before it, whatever its size.

    This is safe while steps overlap. All replays are on one stream, and whatever reads a step's results on the device
    is launched on it before the next replay: `GraphExecutor.run` and `draw_ahead` do not return until sampling (with
    grammar masks, penalties and log-probabilities) and the copies to pinned memory are queued behind the replay. A
    graph begins when everything queued before it has finished; kernels that start early do so within a graph. Later,
    the host reads pinned memory alone: to emit tokens, and to accept draft tokens. The next step finds its tokens in
    the device rows, and a drafter what it taps in the cache; neither is in the pool. Captures write nothing: what is
    rehearsed has memory of its own. Pipelines, which sample later, launch their steps one by one.
    """

    def __init__(self) -> None:
        self.handle: Any = None
        """PyTorch's name for it, from the first capture on."""

    def forget(self) -> None:
        """Graphs are dropped: later captures begin a new pool, for PyTorch frees one that no graph uses any more."""
        self.handle = None


class Interrupted(Exception):
    """There is something more urgent than the step that was being captured."""


@cache
def _capture_stream(device: torch.device) -> Any:
    """One for all captures: cuBLAS keeps a workspace of tens of megabytes for every stream it was ever used on."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def record(device: torch.device, work: Work, pool: GraphPool, rehearse: Work) -> Recording:
    """Capture `work` with memory from `pool`. `rehearse` runs before, and launches every kernel that `work` will:
    outside the graph they may be compiled and loaded."""
    _make_room(device)
    stream = _capture_stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    try:
        with torch.inference_mode(), torch.cuda.stream(stream):
            rehearse()
    finally:  # also what was launched until it was interrupted reads inputs that are freed now
        torch.cuda.current_stream(device).wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.inference_mode(), torch.cuda.stream(stream), _garbage_kept():
        # Not `torch.cuda.graph`, which waits for the device and empties the allocator's cache before each capture.
        # Other threads may use the device meanwhile: adapters and blocks are copied while steps are captured.
        graph.capture_begin(**({} if pool.handle is None else {"pool": pool.handle}), capture_error_mode="thread_local")
        try:
            results = work()
        finally:
            graph.capture_end()
        pool.handle = pool.handle or graph.pool()
        # Until here they were owned, so that nothing within the graph itself took their memory.
        first, second = (_unowned(result) for result in results)
    return Recording(graph, (first, second))


class _Words:
    """Memory of a tensor as integers, which `torch.as_tensor` takes as they are, without owning them."""

    def __init__(self, tensor: Tensor) -> None:
        size = tensor.element_size()
        self.__cuda_array_interface__ = {
            "version": 3,
            "typestr": f"<i{size}",
            "data": (tensor.data_ptr(), False),
            "shape": tuple(tensor.shape),
            "strides": tuple(size * stride for stride in tensor.stride()),
        }


def _unowned(result: Tensor) -> Tensor:
    """A weak reference: the same numbers at the same address, whose memory later captures may take once `result` is
    gone. It stays mapped as long as a graph uses the pool."""
    if not result.is_cuda:
        return result
    return torch.as_tensor(_Words(result), device=result.device).view(result.dtype)


@contextmanager
def _garbage_kept() -> Iterator[None]:
    """Inside, the garbage collector does not run: an engine that was dropped is garbage, since its parts refer to each
    other, and freeing its graphs would invalidate the capture."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _make_room(device: torch.device) -> None:
    """The allocator frees none of what it has cached while something is captured."""
    if torch.cuda.mem_get_info(device)[0] < _ROOM:
        torch.cuda.empty_cache()


_urgent: ContextVar[Callable[[], bool] | None] = ContextVar("urgent", default=None)


@contextmanager
def interruptible(urgent: Callable[[], bool]) -> Iterator[None]:
    """Inside, captures raise `Interrupted` between two layers once `urgent` says so."""
    token = _urgent.set(urgent)
    try:
        yield
    finally:
        _urgent.reset(token)


def watched(kv: KVCache) -> KVCache:
    """The cache for a step that is captured: every layer takes its part of it, which is when to look."""
    urgent = _urgent.get()
    if urgent is None:
        return kv
    found = copy(kv)
    found.layers = _Watched(kv.layers, urgent)
    return found


class _Watched(list[Any]):
    """What the layers of a decoder keep, each taken when the layer before it is done."""

    def __init__(self, layers: Iterable[Any], urgent: Callable[[], bool]) -> None:
        super().__init__(layers)
        self._is_urgent = urgent

    def __iter__(self) -> Iterator[Any]:
        for one in super().__iter__():
            self._look()
            yield one

    def __getitem__(self, index: SupportsIndex | slice) -> Any:
        if isinstance(index, slice):
            return _Watched(super().__getitem__(index), self._is_urgent)
        self._look()
        return super().__getitem__(index)

    def _look(self) -> None:
        if self._is_urgent():
            raise Interrupted
