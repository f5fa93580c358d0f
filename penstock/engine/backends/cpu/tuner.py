"""Measures on this machine from how many rows on each form of a linear is the fastest.

A few rows are bound by reading weights, many by arithmetic; where the two cross depends on the CPU, the shape and the
number of threads. A measurement takes a few milliseconds and is kept in a file named after the compiled library and the
CPU; a file that cannot be read or written only costs measuring again.
"""

from __future__ import annotations

import hashlib
import json
import logging
import platform
import time
from functools import cache
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from penstock.engine.backends.cpu.build import cache_dir
from penstock.engine.backends.cpu.linear_forms import FormName
from penstock.engine.backends.cpu.native import Handle
from penstock.engine.backends.cpu.quant_linear import QuantLinear

log = logging.getLogger(__name__)

_FEW: Final = (1, 2, 3, 4, 6, 8, 12, 16, 32)
_MANY: Final = (32, 64, 128, 256, 512)
"""Where two forms are compared, in this order; the first at which the one for more rows wins is the answer."""
_COLUMNS: Final = 768
"""Outputs that take part: enough for every thread, little enough to be quick."""
_REPEATS: Final = 5


class Tuner:
    """Sets the `first_rows` of linears. One per engine that is being built."""

    def __init__(self, handle: Handle, path: Path | None = None) -> None:
        self._handle = handle
        self._path = path or cache_dir() / f"{handle.library_name}-{_cpu_hash()}.tuning.json"
        self._known = self._read()

    def tune(self, linear: QuantLinear) -> None:
        """Choose the numbers of rows for this linear."""
        first_rows = linear.first_rows
        if linear.per_channel is not None:
            first_rows.clear()
            # A single row is bound by bytes, of which packed weights have fewer; here, in caches, that does not show.
            dtype = torch.bfloat16 if self._handle.has_matrix else torch.float32
            first_rows["per_channel"] = self._crossover(linear, "per_channel", dtype, _FEW[1:])
        elif linear.bits < 16 and self._handle.has_matrix:
            first_rows["bfloat16"] = 0
            first_rows["per_group"] = self._crossover(linear, "per_group", torch.bfloat16, _FEW)
            first_rows["bfloat16"] = self._crossover(linear, "bfloat16", torch.bfloat16, _MANY)
        elif linear.fits_float16:
            first_rows["float16"] = self._crossover(linear, "float16", torch.float32, _FEW[1:])

    def _crossover(self, linear: QuantLinear, form: FormName, dtype: torch.dtype, choices: tuple[int, ...]) -> int:
        columns = min(_COLUMNS, linear.out_features)
        key = f"{form} {columns}x{linear.in_features} {linear.bits} bits {self._handle.threads} threads"
        if key not in self._known:
            self._known[key] = _measure(linear.narrowed(columns), form, dtype, choices)
            log.info("linear %s: %s", key, self._known[key] or "never")
            self._write()
        return self._known[key]

    def _read(self) -> dict[str, int]:
        try:
            content = json.loads(self._path.read_text())
        except FileNotFoundError:
            return {}
        except (OSError, ValueError) as error:
            log.warning("cannot read %s (%s); measuring again", self._path, error)
            return {}
        return {str(key): int(rows) for key, rows in content.items()} if isinstance(content, dict) else {}

    def _write(self) -> None:
        scratch = self._path.with_suffix(f".{time.monotonic_ns()}.tmp")
        try:
            scratch.write_text(json.dumps(self._known, indent=1) + "\n")
            scratch.replace(self._path)
        except OSError as error:
            log.warning("cannot keep the measurements in %s: %s", self._path, error)


def _measure(linear: QuantLinear, form: FormName, dtype: torch.dtype, choices: tuple[int, ...]) -> int:
    generator = torch.Generator().manual_seed(0)
    for rows in choices:
        x = torch.randn(rows, linear.in_features, generator=generator).to(dtype)
        times = []
        for first_row in (0, 1):  # without the form, then with it
            linear.first_rows[form] = first_row
            times.append(_least_seconds(linear, x))
        if times[1] < times[0]:
            return rows
    return 0


def _least_seconds(linear: QuantLinear, x: Tensor) -> float:
    """The least of several runs: other work on the machine only ever adds time."""
    least = float("inf")
    for _ in range(_REPEATS):
        begin = time.perf_counter()
        linear(x)
        least = min(least, time.perf_counter() - begin)
    return least


@cache
def _cpu_hash() -> str:
    """Of the CPU's model and features, which the measurements depend on."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        text = platform.processor()
    wanted = ("model name", "flags", "Features", "CPU part", "CPU implementer", "CPU variant")
    lines = sorted({line for line in text.splitlines() if line.startswith(wanted)}) or [text]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:8]
