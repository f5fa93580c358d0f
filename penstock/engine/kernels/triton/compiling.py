"""Compiling kernels side by side.

Triton compiles a kernel when it is first launched, one after the other: on a fresh machine that is most of the time to
the first token, and later a pause in the middle of traffic. Inside `compile_only` a launch asks for its kernel and
goes on without running it; all kernels asked for are compiled in parallel, and are there when the block ends.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import triton
from triton.runtime.jit import JITFunction


@contextmanager
def compile_only(threads: int | None = None) -> Iterator[None]:
    """Launches inside compile and do not run; outputs keep whatever was in their memory."""
    launch = JITFunction.run

    def request(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        return launch(self, *args, grid=grid, warmup=True, **options)

    workers = threads or min(16, os.cpu_count() or 1)
    JITFunction.run = request
    try:
        with ThreadPoolExecutor(workers) as pool, triton.AsyncCompileMode(pool):
            yield
    finally:
        JITFunction.run = launch
