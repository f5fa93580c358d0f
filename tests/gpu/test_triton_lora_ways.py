"""Where the time of adapters beside a product of 64 tokens goes: other ways to launch them, and launches left out."""

from __future__ import annotations

import contextlib
import json
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gpu_harness import DEVICE, MODE, Row, check, rand, time_us
from test_triton_lora import LLAMA, SMALL, adapter, use
from test_triton_lora_speed import Stack, overlapping
from torch import Tensor

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from penstock.engine.adapters.layout import PlacedSite  # noqa: E402
from penstock.engine.backends.cuda import lora as lora_module  # noqa: E402
from penstock.engine.backends.cuda.kernels.addends import Addends  # noqa: E402
from penstock.engine.backends.cuda.lora import TritonLora  # noqa: E402

TOKENS = 64
Base = Callable[[Tensor], Tensor]


class WaysLora(TritonLora):
    """Adapters beside a linear, launched in the way of that name."""

    way = "as it is"

    def beside(self, x: Tensor, placed: PlacedSite, base: Base) -> Tensor | Addends:
        if self.way == "as it is":
            return super().beside(x, placed, base)
        step = self._step
        assert step is not None
        delta = torch.empty((x.shape[0], placed.site.outputs), dtype=x.dtype, device=x.device)
        sums = self._partial(x, placed)
        addends = self._tiled(step)[2][placed.index]
        if self.way == "one behind the other":
            self._shrink(x, sums, placed)
            y = base(x)
            self._expand(sums, y, placed, add=True)
            return y
        if self.way == "A before, B beside":
            self._shrink(x, sums, placed)
            with self._on_side(x):
                self._expand(sums, delta, placed, add=False)
                y = self._on_main(x, base)
            return Addends(y, delta, addends)
        with self._on_side(x):
            if self.way != "nothing but streams":
                self._shrink(x, sums, placed)
            y = self._on_main(x, base)
        if self.way == "A beside, B behind":
            self._expand(sums, y, placed, add=True)
            return y
        return Addends(y, delta, addends)  # what was left out is added, as it happens to be

    @contextlib.contextmanager
    def _on_side(self, x: Tensor) -> Iterator[None]:
        if self._side is None:
            yield
            return
        stream = torch.cuda.current_stream(x.device)
        self._side.wait_stream(stream)
        self._main = stream
        with torch.cuda.stream(self._side):
            yield
        stream.wait_stream(self._side)

    def _on_main(self, x: Tensor, base: Base) -> Tensor:
        if self._side is None:
            return base(x)
        with torch.cuda.stream(self._main):
            return base(x)


@contextlib.contextmanager
def launches(**more: dict[str, Any]) -> Iterator[None]:
    """Kernels of these names are launched with further options."""
    kept = lora_module.launch

    def launch(kernel: Any, *args: Any, **options: Any) -> None:
        changes = more.get(kernel.fn.__name__ if hasattr(kernel, "fn") else "", {})
        kept(kernel, *args, **options | changes)

    lora_module.launch = launch  # type: ignore[attr-defined]
    try:
        yield
    finally:
        lora_module.launch = kept  # type: ignore[attr-defined]


@contextlib.contextmanager
def shapes(shares: int | None = None, columns: int | None = None) -> Iterator[None]:
    kept = lora_module.input_shares, lora_module.columns_at_once
    if shares is not None:
        lora_module.input_shares = lambda inputs: max(1, min(shares, inputs // 512))
    if columns is not None:
        lora_module.columns_at_once = lambda outputs: columns
    try:
        yield
    finally:
        lora_module.input_shares, lora_module.columns_at_once = kept


WAYS: dict[str, tuple[str, int, int, Any]] = {
    "as it is": ("as it is", 0, -1, contextlib.nullcontext),
    "same priority": ("as it is", 0, 0, contextlib.nullcontext),
    "product first": ("as it is", -1, 0, contextlib.nullcontext),
    "nothing but streams": ("nothing but streams", 0, -1, contextlib.nullcontext),
    "A alone": ("A alone", 0, -1, contextlib.nullcontext),
    "A alone, product first": ("A alone", -1, 0, contextlib.nullcontext),
    "A beside, B behind": ("A beside, B behind", 0, -1, contextlib.nullcontext),
    "A beside, B behind, product first": ("A beside, B behind", -1, 0, contextlib.nullcontext),
    "A before, B beside": ("A before, B beside", 0, -1, contextlib.nullcontext),
    "A before, B beside, product first": ("A before, B beside", -1, 0, contextlib.nullcontext),
    "one behind the other": ("one behind the other", 0, -1, contextlib.nullcontext),
    "A in 2 stages": ("as it is", 0, -1, lambda: launches(shrink_kernel={"num_stages": 2})),
    "A in 2 stages, product first": ("as it is", -1, 0, lambda: launches(shrink_kernel={"num_stages": 2})),
    "16 shares": ("as it is", 0, -1, lambda: shapes(16)),
    "2 shares, 512 columns": ("as it is", 0, -1, lambda: shapes(2, 512)),
    "256 columns": ("as it is", 0, -1, lambda: shapes(None, 256)),
}
"""Name: how, priorities of the product's stream and of the other (lower is more urgent), what else is different."""


def _made(stack: Stack, count: int, sites: range, parts: int, way: str, side: int) -> WaysLora:
    lora = stack.adapters(TOKENS, count, sites, parts, kind=WaysLora)
    assert isinstance(lora, WaysLora)
    lora.way = way
    if lora._side is not None:
        lora._side = torch.cuda.Stream(DEVICE, priority=side)
    return lora


def tune_lora_beside() -> Iterator[Row]:
    """A layer of 64 tokens: every way, for one adapter everywhere and for twenty on query and value."""
    stack = Stack()
    layers = stack.layout.layers
    with overlapping():
        for name, (way, main, side, different) in WAYS.items():
            with different():
                plain = 0.0
                if MODE != "compile":
                    plain = time_us([stack.pass_of(TOKENS, stack.linears, None)], priority=main) / layers
                found = []
                for count, wide in ((1, True), (20, False), (20, True)):
                    lora = _made(stack, count, range(4), 7 if wide else 5, way, side)
                    step = stack.pass_of(TOKENS, stack.adapted(lora, 4 if wide else 1), lora)
                    found.append(time_us([step], priority=main) / layers)
                shown = "; ".join(f"{us:.1f} ({us - plain:+.1f})" for us in found) if plain else "-"
                yield f"{name}: without; 1, 20 on q and v, 20", plain, shown


def tune_lora_sites() -> Iterator[Row]:
    """What one adapter adds at each linear of 64 tokens, by itself."""
    stack = Stack()
    layers = stack.layout.layers
    ways = ("as it is", "product first", "nothing but streams", "A alone", "A beside, B behind", "A before, B beside")
    with overlapping():
        plain = 0.0
        if MODE != "compile":
            plain = time_us([stack.pass_of(TOKENS, stack.linears, None)]) / layers
        for name in ways:
            way, main, side, different = WAYS[name]
            with different():
                for index, site in enumerate(LLAMA.sites):
                    lora = _made(stack, 1, range(4), 7, way, side)
                    adapted = stack.adapted(lora)
                    only = [
                        [one if j == index else linear for j, (one, linear) in enumerate(zip(*both, strict=True))]
                        for both in zip(adapted, stack.linears, strict=True)
                    ]
                    us = time_us([stack.pass_of(TOKENS, only, lora)], priority=main) / layers
                    yield f"{name}: {site.attribute} alone", us, f"{us - plain:+.1f} us" if plain else "-"


def tune_lora_vendor() -> Iterator[Row]:
    """The vendor's products of 64 tokens: which kernels, and how much of a multiprocessor each program takes."""
    if MODE != "device":
        return
    stack = Stack(1)
    lora = stack.adapters(TOKENS, 1)
    for name, call in {
        "without": stack.pass_of(TOKENS, stack.linears, None),
        "adapters": stack.pass_of(TOKENS, stack.adapted(lora), lora),
    }.items():
        call()
        torch.cuda.synchronize()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            call()
            torch.cuda.synchronize()
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "trace.json"
            profile.export_chrome_trace(str(path))
            events = json.loads(path.read_text())["traceEvents"]
        for event in events:
            if event.get("cat") == "kernel":
                found = event["args"]
                size = " ".join(
                    f"{key} {found[key]}"
                    for key in ("grid", "block", "registers per thread", "shared memory", "blocks per SM")
                    if key in found
                )
                yield f"{name}: {event['name'][:90]}", float(event["dur"]), size


def test_ways_agree() -> None:
    """Each that leaves nothing out gives the same sums."""
    dtype = torch.float32
    lora = WaysLora(SMALL, 2, 16, dtype, DEVICE)
    for slot in range(2):
        lora.put(slot, adapter(SMALL, 16, dtype))
    slots = np.array([0, 1, -1, 0, 1, 1], dtype=np.int32)
    for index, site in enumerate(SMALL.sites):
        x, plain = rand(len(slots), site.inputs), rand(len(slots), site.outputs)
        found = []
        for way in ("as it is", "one behind the other", "A before, B beside", "A beside, B behind"):
            lora.way = way
            use(lora, slots, len(slots))
            y = lora.beside(x, SMALL.place(0, index), lambda _, plain=plain: plain.clone())
            if isinstance(y, Addends):
                y = y.base + torch.where((y.ranks > 0)[:, None], y.delta, 0.0)
            found.append(y)
        for other in found[1:]:
            check(f"{site.attribute}", other, found[0])
